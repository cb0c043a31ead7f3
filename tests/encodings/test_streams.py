"""Random streams: one for each name, also where two parts of a layer had one number."""

from collections import defaultdict

import pytest
import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.parts import PARTS
from lrpe_fairseq.encodings import COMPOSED_NAMES, ENCODINGS, EncodingOptions
from lrpe_fairseq.encodings.core.options import NUMBERS, EncodingSpec
from tests.end_to_end.cases import computes

LAYERS, SPACING = 4, 1_000_003
FIRST_OF_YOURS = 0.6921666860580444
COLLISIONS = (  # names whose components have the numbers of both parts and of PaTH
    *("ape:sequence+cycle7", "ape:sequence+cycle7+sequence", "path:ape:sequence+cycle7+sequence"),
    *("gated:path:ape:sequence+sequence+sequence", "ape:sequence+tree2+sequence"),
)


@pytest.fixture
def seeds(monkeypatch):
    """Seed of a generator -> names of the streams that began there, of all generators made."""
    found, generator = defaultdict(set), EncodingSpec.generator

    def recorded(spec, stream="", beside=()):
        made = generator(spec, stream, beside)
        found[made.initial_seed()].add(stream)
        return made

    monkeypatch.setattr(EncodingSpec, "generator", recorded)
    return found


@pytest.mark.parametrize("start", ["rope", "identity"])
@pytest.mark.parametrize("name", [*ENCODINGS, *COMPOSED_NAMES, *COLLISIONS])
def test_no_two_streams_of_a_stack_begin_at_one_seed(name, start, seeds):
    canonical = {"ape_generator": "canonical"} if "tree" not in name else {}
    for options in ({}, canonical, {"grid_width": 3, "position_grid": "axial"}):
        flat = "position_grid" not in options
        if not flat and name not in ("ape", "rope", "lrpe-type4", "ape:sequence+cycle7"):
            continue
        kind = "softmax"
        if name.startswith("gated-channel:") or not computes("softmax", name):
            kind = "linear"
        for seed in range(LAYERS):
            MultiheadAttention(
                32, 2, attention_type=kind, position_encoding=name, causal=True, seed=seed,
                parts=",".join(PARTS), options=EncodingOptions(ape_init=start, **options),
            )  # fmt: skip
    assert {"output-gate", "kv-shift"} <= set.union(*seeds.values())
    assert {seed: names for seed, names in seeds.items() if len(names) > 1} == {}


def test_a_stream_is_a_function_of_seed_and_name():
    def draw(seed, name):
        return torch.rand(8, generator=EncodingSpec(4, 1, seed=seed).generator(name)).tolist()

    drawn = {(seed, name): draw(seed, name) for seed in range(3) for name in ("yours", "mine", "")}
    assert len({tuple(numbers) for numbers in drawn.values()}) == 9
    for (seed, name), numbers in drawn.items():
        assert draw(seed, name) == numbers
    # the same numbers in every process and version: not Python's own hash
    assert drawn[0, "yours"][0] == pytest.approx(FIRST_OF_YOURS)


def test_models_of_before_start_as_they_did():
    spec = EncodingSpec(4, 1, seed=7)
    for name, number in NUMBERS.items():
        assert spec.generator(name).initial_seed() == 7 * SPACING + number
    for name, number in (("householder", 1), ("forget-gate", 8), ("path", 43), ("ape-1", 42)):
        assert NUMBERS[name] == number


@pytest.mark.parametrize(
    ("name", "gate", "shift", "path"),
    [
        ("rope", True, True, None),
        ("fox", True, True, None),
        ("path", True, True, True),
        ("path:lrpe-type2", True, True, True),
        ("path:ape", False, True, True),
        ("ape", False, True, None),
        ("ape:sequence+cycle7", False, False, None),
        ("path:ape:sequence+cycle7+sequence", False, False, False),
        ("gated:ape", False, True, None),
    ],
)
def test_a_part_has_another_stream_only_beside_an_encoding_of_its_number(name, gate, shift, path):
    """The encoding keeps its numbers, and PaTH those that no component has."""
    module = MultiheadAttention(
        32, 2, attention_type="softmax", position_encoding=name, causal=True, seed=5,
        parts="output-gate,kv-shift", ape_init="identity",
    )  # fmt: skip

    def numbers_of(number, shape):
        generator = torch.Generator().manual_seed(5 * SPACING + number)
        return 0.02 * torch.randn(shape, generator=generator)

    def is_from(number, weight):
        return torch.equal(weight.data, numbers_of(number, weight.shape))

    assert is_from(41, module.out_gate.weight) == gate
    assert is_from(42, module.kv_shift.weight) == shift
    if path is not None:
        assert is_from(43, module.encoding.reflections.down) == path
    for number, component in enumerate(getattr(module.encoding, "components", ())):
        if hasattr(component, "generator"):
            entries = component.generator.entries.data
            torch.testing.assert_close(entries, numbers_of(41 + number, entries.shape))
