"""Kernels read and write numbers that lie 2^31 and more from the first, in Triton's interpreter.

The tensors are large, but only the memory that is touched is used.
"""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

import triton
import triton.language as tl

from lrpe_fairseq.kernels.encode import encode_triton
from lrpe_fairseq.kernels.linear.causal_triton import _chunk, _rows, _store_rows
from tests import triton_probe

pytestmark = [
    pytest.mark.skipif(bool(triton_probe.why_not()), reason=triton_probe.why_not()),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter"),
]


@triton.jit
def _one_more(x_ptr, n, T, C: tl.constexpr, WIDTH: tl.constexpr):
    """Add 1 to the rows of chunk n of the second sequence of x (L, T, WIDTH)."""
    sequence = tl.full((), 1, tl.int64)
    _row, t, inside = _chunk(n, T, C)
    column = tl.arange(0, WIDTH)
    x = _rows(x_ptr, sequence, t, column, inside, T, WIDTH)
    _store_rows(x_ptr, x + 1, sequence, t, column, inside, T, WIDTH)


def test_a_sequence_may_have_more_than_2_to_the_31_numbers():
    """Offsets of int32 wrap around to the sequence before."""
    time, width = 2**27 + 16, 16
    x = torch.empty(2, time, width, dtype=torch.int8)
    last = torch.arange(256, dtype=torch.int64).remainder(100).view(16, width)
    x[1, -16:] = last
    _one_more[(1,)](x, time // 16 - 1, time, C=16, WIDTH=width)
    assert torch.equal(x[1, -16:], (last + 1).to(torch.int8))


def with_far_heads(x):
    """x (1, 2, T, D) with heads that are 2^32 + 4096 apart: 4096, if that is an int32."""
    apart = 2**32 + 4096
    memory = torch.empty(apart + x[0, 0].numel(), dtype=x.dtype)
    memory[4096 : 4096 + x[0, 0].numel()] = 0.0
    return memory.as_strided(x.shape, (x.numel(), apart, x.shape[3], 1)).copy_(x)


def test_heads_of_queries_may_lie_2_to_the_31_numbers_apart():
    near = torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(0)).half()
    weights = torch.arange(near.numel()).cos().view_as(near).half()
    results = []
    for x in (near, with_far_heads(near)):
        x.requires_grad_()
        out, _ = encode_triton.feature_maps(x)
        results.append((out, *torch.autograd.grad(out, x, weights)))
    assert all(map(torch.equal, *results))
    assert results[0][0][0, 1].all()
