"""Linear attention with products of half-precision numbers, on a CPU, against float64."""

import pytest
import torch

from lrpe_fairseq.attention.linear import linear_attention, linear_attention_naive
from lrpe_fairseq.kernels import loader
from lrpe_fairseq.kernels.linear import half

sums = pytest.importorskip("tests.kernels.test_sweep_triton")
HALF = (torch.float16, torch.bfloat16)
"""Bounds are those of the Triton kernels: 3e-3 and 3e-2 of the largest number."""


def over_all_keys(q, k, v, wanted, log_decay, eps):
    return half.full_sums(q, k, v, wanted, eps)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("wanted", ["normalized", "sums", "numerator"])
@pytest.mark.parametrize("decay", [None, "head", "token"])
@pytest.mark.parametrize("length", [2, 128, 300])
def test_sums_and_gradients_are_near_float64(length, decay, wanted, dtype):
    leaves = sums.example(length, 64, 32, dtype, decay)
    leaves = [*leaves[:3], *(x.clamp_min(-1e3) for x in leaves[3:])]
    found = sums.errors(leaves, wanted, half.causal_sums)
    found = found[:-1] if decay == "head" else found  # its gradient needs float32; see serves
    if decay is None:
        given = (over_all_keys, sums.full_definition)
        found += sums.errors(leaves, wanted, *given)
    assert max(found) <= sums.BOUND[dtype]


@pytest.mark.parametrize("causal", [True, False])
def test_states_beyond_the_largest_float16_do_not_overflow(causal, monkeypatch):
    monkeypatch.setattr(half, "serves", lambda *_: True)
    monkeypatch.setattr(loader, "SERVED", {})
    q, k, v = (100 * torch.rand(1, 1, 4000, 16, dtype=torch.float16) for _ in range(3))
    out = linear_attention(q, k, v, causal=causal)
    exact = linear_attention_naive(q.double(), k.double(), v.double(), causal=causal)
    assert (out - exact).abs().max() <= sums.BOUND[torch.float16] * exact.abs().max()
    form = "pytorch, products in half precision on cpu"
    assert {"linear attention": [form]} == loader.SERVED


def test_second_derivatives_are_those_of_the_definition():
    q, k, v = (torch.rand(1, 1, 9, 4, dtype=torch.float16) for _ in range(3))
    seconds = []
    for form, dtype in ((half.causal_sums, q.dtype), (sums.definition, torch.float64)):
        own = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out, _ = form(*own, "normalized", None, 1e-6)
        grads = torch.autograd.grad(out.square().sum(), own, create_graph=True)
        loss = sum(g.double().square().sum() for g in grads)
        seconds.append(torch.autograd.grad(loss, own))
    for found, exact in zip(*seconds, strict=True):
        assert (found - exact).abs().max() <= 5e-3 * exact.abs().max()


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_a_cpu_never_uses_them(dtype):
    x = torch.rand(1, 1, 4, 4, dtype=dtype)
    assert not half.serves(x, x)
