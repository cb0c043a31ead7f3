"""Options, widths and names of which no encoding can be built are refused in one sentence."""

import pytest
import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.encodings.wrappers.fox import add_gate
from lrpe_fairseq.errors import ChoiceError

ROTATES = "rotation_block must be at least 2 and the head width at least"
OPTIONS = [
    ("cope", {"cope_positions": 1}, "--cope-positions must be at least 2 and at most 1,048,576"),
    (
        "deberta",
        {"deberta_distance": 0},
        "--deberta-distance must be at least 1 and",
    ),
    ("shaw", {"shaw_distance": -1}, "--shaw-distance must be at least 0 and at most 1,048,576"),
    ("t5", {"t5_max_distance": 8}, "largest distance"),
    ("fire", {"fire_length": 0}, "--fire-length must be at least 1 and .*, not 0"),
    ("ape", {"ape_decay": 0.0}, "--ape-decay must be above 0 and at most 1, not 0"),
    ("cosformer", {"cosformer_length": 0}, "--cosformer-length must be at least 1 and"),
    ("fope", {"fope_length": 6}, "--fope-length must be at least 7 and .*, not 6"),
    ("spe", {"spe_sines": -1}, "--spe-sines must be at least 1 and at most 65,536, not -1"),
    ("spe", {"spe_realizations": -1}, "--spe-realizations must be at least 1"),
    ("comrope-ld", {"rotation_block": 1}, "--rotation-block must be at least 2"),
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


def test_an_unknown_name_is_answered_with_the_nearest_one_or_with_all():
    with pytest.raises(ChoiceError, match=r"'foxx'; did you mean 'fox'\? docs/encodings.md has"):
        build_encoding("foxx", 4, 3)
    with pytest.raises(ChoiceError, match=r"'quux'; the names are none, rope, .* or lrpe:<P>:<L"):
        build_encoding("quux", 4, 3)


@pytest.mark.parametrize(("name", "options", "sentence"), OPTIONS)
def test_impossible_options_are_refused(name, options, sentence):
    with pytest.raises(ChoiceError, match=sentence):
        build_encoding(name, 8, 2, causal=True, options=EncodingOptions(**options))


@pytest.mark.parametrize(("name", "width", "grid", "sentence"), WIDTHS)
def test_a_head_width_that_the_mathematics_does_not_allow_is_refused(name, width, grid, sentence):
    with pytest.raises(ChoiceError, match=sentence):
        build_encoding(name, width, 2, options=EncodingOptions(grid_width=grid))


@pytest.mark.parametrize(
    "name", ["gated:t5", "gated:fox", "gated:gated:rope", "gated:gated-channel:rope"]
)
def test_an_encoding_that_cannot_be_gated_is_refused(name):
    with pytest.raises(ChoiceError, match=f"{name}: {GATES}"):
        build_encoding(name, 4, 3, causal=True)


@pytest.mark.parametrize("name", ["fox", "gated:rope", "gated-channel:rope"])
def test_gates_never_replace_other_gates(name):
    encoding = build_encoding(name, 4, 3, causal=True)
    gates = encoding.forget_gate
    with pytest.raises(ChoiceError, match="one kind of gates"):
        add_gate(encoding)
    assert encoding.forget_gate is gates


@pytest.mark.parametrize("name", ["fox", "path", "delta", "stick-breaking", "cope", "gated:rope"])
def test_a_causal_encoding_says_that_causal_true_is_the_cure_for_a_decoder(name):
    with pytest.raises(ChoiceError, match="or build it with causal=True for a decoder"):
        build_encoding(name, 4, 3)


def queries_and_keys():
    return [torch.randn(1, 3, 5, 4), torch.randn(1, 3, 5, 4), torch.arange(5), torch.arange(5)]


@pytest.mark.parametrize("name", ["t5", "kerple-log", "stick-breaking", "cope", "deberta"])
def test_a_score_encoding_says_that_q_and_k_are_not_enough(name):
    encoding = build_encoding(name, 4, 3, causal=True)
    with pytest.raises(TypeError, match=f"'{name}' acts on the scores, not on q and k alone: use"):
        encoding(*queries_and_keys())


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("alibi", "decay"),
        ("fox", "gates"),
        ("gated:alibi", "decay and gates"),
        ("gated:path:rope", "gates and reflections"),
        ("path", "reflections"),
        ("delta", "reflections"),
        ("permuteformer", "decay"),
    ],
)
def test_q_and_k_alone_warn_of_what_acts_on_the_scores(name, beside):
    encoding = build_encoding(name, 4, 3, causal=True)
    with pytest.warns(UserWarning, match=f"'{name}' acts on the scores too, .* its {beside}:"):
        encoding(*queries_and_keys())


@pytest.mark.parametrize("name", ["alibi", "fox", "path", "gated:rope", "rope"])
@pytest.mark.parametrize("kind", ["linear", "softmax"])
@pytest.mark.filterwarnings("error:.* acts on the scores too")
def test_attention_does_not_warn_of_what_it_applies(name, kind):
    own = {"attention_type": kind, "position_encoding": name, "causal": True}
    MultiheadAttention(12, 3, **own).attend(torch.randn(1, 5, 12))
