"""Names of one encoding: canonical_name, and that the encodings behind equal names are equal."""

import pytest
import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import ENCODINGS, FREE_FORMS, build_encoding, canonical_name

ALIASES = [name for name in (*ENCODINGS, *FREE_FORMS) if canonical_name(name) != name]


def test_names_of_one_method_have_one_canonical_name():
    assert canonical_name("lrpe-tmlr-type2") == canonical_name("lrpe-type2")
    assert canonical_name("lrpe-tmlr-type3") == canonical_name("lrpe-type4")
    assert canonical_name("lrpe-type4") == "lrpe:householder:permutation"
    assert canonical_name("rope") == "lrpe:identity:rotation"
    assert canonical_name("gated:lrpe-tmlr-type1") == "gated:lrpe:householder:unitary-learned"
    assert canonical_name("ape") == "ape:sequence"


def test_other_names_are_their_own_canonical_names():
    for name in ("none", "spe", "t5", "ape-tree", "gated:spe", "no-such-name", "gated:no-such"):
        assert canonical_name(name) == name
    for name in (*ENCODINGS, *FREE_FORMS):
        assert canonical_name(canonical_name(name)) == canonical_name(name)


def test_only_the_second_papers_types_repeat_an_encoding():
    homes = {}
    for name in ENCODINGS:
        homes.setdefault(canonical_name(name), []).append(name)
    repeated = [names for names in homes.values() if len(names) > 1]
    assert repeated == [["lrpe-type2", "lrpe-tmlr-type2"], ["lrpe-type4", "lrpe-tmlr-type3"]]


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_builds_the_module_of_its_canonical_name(name):
    attention = "linear" if build_encoding(name, 8, 2, causal=True).serves_linear else "softmax"
    modules = []
    for own in (name, canonical_name(name)):
        torch.manual_seed(3)
        options = {"attention_type": attention, "position_encoding": own, "causal": True}
        modules.append(MultiheadAttention(16, 2, seed=5, **options).eval())
    states = [module.state_dict() for module in modules]
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1))
    outputs = [module.attend(x)[0] for module in modules]
    assert torch.equal(*outputs)
