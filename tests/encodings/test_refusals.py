"""Options, widths and names of which no encoding can be built are refused in one sentence."""

import pytest

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.errors import ChoiceError

LONG_ENOUGH = "fope_length must be at least 7"
ROTATES = "rotation_block must be at least 2 and the head width at least"
OPTIONS = [
    ("cope", {"cope_positions": 1}, "cope_positions must be at least 2"),
    ("deberta", {"deberta_distance": 0}, "deberta_distance must be at least 1"),
    ("shaw", {"shaw_distance": -1}, "shaw_distance cannot be negative"),
    ("t5", {"t5_max_distance": 8}, "largest distance"),
    ("fire", {"fire_length": 0}, "fire_length must be positive, got 0"),
    ("ape", {"ape_decay": 0.0}, "above 0 and at most 1, got 0.0"),
    ("cosformer", {"cosformer_length": 0}, "cosformer_length must be positive, got 0"),
    ("fope", {"fope_length": 6}, f"{LONG_ENOUGH}, so that a frequency remains, got 6"),
    ("spe", {"spe_sines": -1}, "positive"),
    ("spe", {"spe_realizations": -1}, "positive"),
    ("comrope-ld", {"rotation_block": 1}, ROTATES),
]
WIDTHS = [
    ("liere", 1, 0, ROTATES),
    ("comrope-ap", 3, 4, ROTATES),
    ("rope-2d", 3, 0, "rows and columns needs a head width of at least 4, got 3"),
    ("rope-2d-mixed", 3, 0, "rows and columns needs a head width of at least 4, got 3"),
    ("lrpe:identity:rotation", 1, 0, "head"),
    ("lrpe:householder:rotation-learned", 1, 0, "head"),
    ("lrpe:identity:rotation-half", 2, 0, "head"),
    ("rope", 0, 0, "head"),
]
GATES = "gates can be added to decomposable encodings"


@pytest.mark.parametrize(("name", "options", "sentence"), OPTIONS)
def test_impossible_options_are_refused(name, options, sentence):
    with pytest.raises(ChoiceError, match=sentence):
        build_encoding(name, 8, 2, causal=True, options=EncodingOptions(**options))


@pytest.mark.parametrize(("name", "width", "grid", "sentence"), WIDTHS)
def test_a_head_width_that_the_mathematics_does_not_allow_is_refused(name, width, grid, sentence):
    with pytest.raises(ChoiceError, match=sentence):
        build_encoding(name, width, 2, options=EncodingOptions(grid_width=grid))


@pytest.mark.parametrize("name", ["gated:t5", "gated:fox", "gated:gated:rope"])
def test_an_encoding_that_cannot_be_gated_is_refused(name):
    with pytest.raises(ChoiceError, match=f"{name}: {GATES}"):
        build_encoding(name, 4, 3, causal=True)
