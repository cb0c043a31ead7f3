"""Names of one encoding: canonical_name, and that the encodings behind equal names are equal."""

import pytest
import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import COMPOSED_NAMES, ENCODINGS, build_encoding, canonical_name

ALIASES = [name for name in (*ENCODINGS, *COMPOSED_NAMES) if canonical_name(name) != name]


def test_names_of_one_method_have_one_canonical_name():
    assert canonical_name("lrpe-tmlr-type2") == canonical_name("lrpe-type2")
    assert canonical_name("lrpe-tmlr-type3") == canonical_name("lrpe-type4")
    assert canonical_name("lrpe-type4") == "lrpe:householder:permutation"
    assert canonical_name("rope") == "lrpe:identity:rotation"
    assert canonical_name("gated:lrpe-tmlr-type1") == "gated:lrpe:householder:unitary-learned"
    assert canonical_name("gated:selective:rope") == "gated:selective:lrpe:identity:rotation"
    assert canonical_name("ape") == "ape:sequence"


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
