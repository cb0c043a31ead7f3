"""Attention does not read a tensor, which would wait for a GPU, or says why.

On a CPU reading waits for nothing, and some encodings read there. What runs on a GPU is seen on a
CPU by telling ``dispatch.reads_are_free`` that no tensor is on a CPU.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import ENCODINGS, build_encoding, is_causal_only
from lrpe_fairseq.kernels import conditions
from tests.end_to_end.cases import computes, sampled

READS = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
}
READ_BY_NAME = ("liere", "comrope-ap", "comrope-ld", "ape", "ape-tree")
"""The encodings that state a reason in ``Encoding.host_reads``."""
BATCH, HEADS, TIME, WIDTH = 3, 2, 11, 16
CASES = {
    name: [
        (name, kind, causal)
        for kind in ("softmax", "linear")
        if computes(kind, name)
        for causal in (True, False)
        if causal or not is_causal_only(name)
    ]
    for name in (*ENCODINGS, "gated:lrpe-type2", "path:rope", "selective:lrpe-type2")
}
EVERY = [case for own in CASES.values() for case in own]
SOME = [own[turn % len(own)] for turn, own in enumerate(CASES.values())]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(conditions, "_is_on_cpu", lambda x: False)


def layer(name, attention_type, causal):
    options = {"attention_type": attention_type, "position_encoding": name, "causal": causal}
    return MultiheadAttention(WIDTH, HEADS, **options)


def inputs(module, device="cpu"):
    """x, with a new mask, and in causal self-attention also new documents."""
    x = torch.randn(BATCH, TIME, WIDTH, device=device, requires_grad=True)
    padding = torch.zeros(BATCH, TIME, dtype=torch.bool)
    padding[1, TIME - 3 :] = padding[2, :2] = True
    memory = ()
    if isinstance(module, CrossAttention):
        memory = (torch.randn(BATCH, 7, WIDTH, device=device),)
    masks = {"query_padding_mask" if memory else "key_padding_mask": padding.to(device)}
    if not memory and module.causal:
        starts = torch.zeros(BATCH, TIME, dtype=torch.bool)
        starts[:2, 4] = True
        masks["starts"] = starts.to(device)
    return x, memory, masks


def train(module, device="cpu"):
    x, memory, masks = inputs(module, device)
    module.attend(x, *memory, **masks)[0].sum().backward()
    assert x.grad.shape == x.shape


def reads_of(work):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        work()
    return READS & {event.name for event in seen.events()}


@pytest.mark.parametrize(("name", "attention_type", "causal"), sampled(EVERY, SOME))
def test_a_training_step_with_a_new_mask_reads_nothing_or_says_why(
    name, attention_type, causal, as_on_a_gpu
):
    module = layer(name, attention_type, causal)
    train(module)
    assert bool(reads_of(lambda: train(module))) == bool(module.encoding.host_reads)


@torch.no_grad()
@pytest.mark.parametrize(("name", "attention_type", "causal"), EVERY)
def test_inference_reads_nothing_for_any_encoding(name, attention_type, causal, as_on_a_gpu):
    module = layer(name, attention_type, causal).eval()
    x, _, masks = inputs(module)
    module.attend(x, **masks)
    assert not reads_of(lambda: module.attend(x, **masks))


def test_the_encodings_that_read_in_training_are_few_and_state_a_reason():
    found = {name: build_encoding(name, 8, 2, causal=True).host_reads for name in ENCODINGS}
    assert tuple(name for name, reason in found.items() if reason) == READ_BY_NAME


@pytest.mark.parametrize("name", ["rope", "t5", "lrpe-type2"])
def test_neither_does_cross_attention(name, as_on_a_gpu):
    module = CrossAttention(WIDTH, HEADS, attention_type="softmax", position_encoding=name)
    train(module)
    assert not reads_of(lambda: train(module))


class WithoutReads(TorchDispatchMode):
    """Raises an error where a value is read."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().partition(".")[0]
        if name in READS:
            raise RuntimeError(f"{name} reads a value")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "attention_type", "causal"), EVERY)
def test_no_read_decides_where_values_may_not_be_read(name, attention_type, causal):
    """In a dispatch mode and on the device meta, forward and backward."""
    module = layer(name, attention_type, causal)
    with WithoutReads():
        train(module)
    train(module.to("meta"), "meta")


def test_the_mode_refuses_a_read():
    with WithoutReads(), pytest.raises(RuntimeError, match="aten::_local_scalar_dense reads"):
        torch.ones(1).item()
