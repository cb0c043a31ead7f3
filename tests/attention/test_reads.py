"""A training step of attention does not read a tensor, which would wait for a GPU."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import ENCODINGS, encoding_class, is_causal_only
from tests.end_to_end.cases import sampled

READS = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
}
REASONS = {
    "liere": "torch.linalg.eigh reads whether it has converged",
    "comrope-ap": "as liere",
    "comrope-ld": "as liere",
    "ape": "as liere; and fairseq's optimizers write through .data, which leaves the version of a "
    "parameter, so its values say whether the eigenbasis of all layers is still right",
    "ape-tree": "the depth of the nodes is the number of products",
    "fire": "the learned threshold L says whether a bias depends on the lag alone",
    "cape-fire": "as fire",
}
"""Encodings that read, and why they must."""
BATCH, HEADS, TIME, WIDTH = 3, 2, 11, 16
CASES = {
    name: [
        (name, kind, causal)
        for kind in ("softmax", "linear")
        if kind == "softmax" or encoding_class(name).serves_linear
        for causal in (True, False)
        if causal or not is_causal_only(name)
    ]
    for name in (*ENCODINGS, "gated:lrpe-type2")
}


def reads_of_a_step(module, length):
    """Train with a new mask, in causal self-attention also with new documents, and return what was
    read in the forward and backward pass."""
    x = torch.randn(BATCH, length, WIDTH)
    padding = torch.zeros(BATCH, length, dtype=torch.bool)
    padding[1, length - 3 :] = padding[2, :2] = True
    memory = (torch.randn(BATCH, 7, WIDTH),) if isinstance(module, CrossAttention) else ()
    masks = {"query_padding_mask": padding} if memory else {"key_padding_mask": padding}
    if not memory and module.causal:
        masks["starts"] = torch.zeros(BATCH, length, dtype=torch.bool)
        masks["starts"][:2, 4] = True
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        module.attend(x, *memory, **masks)[0].sum().backward()
    return READS & {event.name for event in seen.events()}


@pytest.mark.parametrize(
    ("name", "attention_type", "causal"),
    sampled(
        [case for own in CASES.values() for case in own],
        [own[turn % len(own)] for turn, own in enumerate(CASES.values())],
    ),
)
def test_a_step_with_a_new_mask_reads_nothing_from_the_second_on(name, attention_type, causal):
    options = {"attention_type": attention_type, "position_encoding": name, "causal": causal}
    module = MultiheadAttention(WIDTH, HEADS, **options)
    reads_of_a_step(module, TIME)
    assert bool(reads_of_a_step(module, TIME)) == (name in REASONS)


@pytest.mark.parametrize("name", ["rope", "t5", "lrpe-type2"])
def test_neither_does_cross_attention(name):
    module = CrossAttention(WIDTH, HEADS, attention_type="softmax", position_encoding=name)
    reads_of_a_step(module, TIME)
    assert not reads_of_a_step(module, TIME)
