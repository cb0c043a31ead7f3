"""The sums of linear attention in PyTorch, with products of half-precision numbers.

They are for GPUs that run no Triton kernels, such as V100, whose tensor cores multiply float16
numbers and add in float32; the definitions (``kernels.linear.causal``) multiply in float32. Scores,
states and their sums over chunks are float32. Each is rounded once, as a factor of the next
product. Its rows or columns are first divided by their largest numbers, so that nothing overflows.
"""

import torch
from torch import Tensor

from lrpe_fairseq.kernels.conditions import is_plain
from lrpe_fairseq.kernels.linear import causal
from lrpe_fairseq.kernels.loader import AMPERE, capability_of, is_rocm

CHUNK = 128
"""Longest chunk in tokens. There are half as many float32 states as with ``causal.CHUNK``."""


def serves(q: Tensor, v: Tensor, log_decay: Tensor | None = None) -> bool:
    """True for float16 on a GPU, bfloat16 on an Ampere or newer one, and torch 2.8 or newer.

    False for a learned decay (H,), whose gradient is a sum of differences over all tokens, and on
    ROCm, where torch up to 2.9 refuses products of halves in float32.
    """
    learned = log_decay is not None and log_decay.dim() == 1 and log_decay.requires_grad
    if learned or is_rocm() or not (is_plain(q, v, log_decay) and q.is_cuda and v.is_cuda):
        return False
    fast = v.dtype == torch.float16 or (
        v.dtype == torch.bfloat16 and capability_of(v.device) >= AMPERE
    )
    return fast and hasattr(torch.ops.aten.bmm, "dtype")


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`causal.definition` of q, k and v of one half type, in float32."""
    return causal.definition(q, k, v, wanted, log_decay, eps, _Product.apply, CHUNK)


def full_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`causal.full_definition` of q, k and v of one half type, in float32."""
    return causal.full_definition(q, k, v, wanted, eps, _Product.apply)


class _Product(torch.autograd.Function):
    """a b in float32. Its factors are rounded to a half type if one of them is of that type."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return _product(a, b, a.dtype if b.dtype == torch.float32 else b.dtype)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (grad @ b.mT.to(grad)).to(a), (a.mT.to(grad) @ grad).to(b)
        dtype = a.dtype if b.dtype == torch.float32 else b.dtype
        return _product(grad, b.mT, dtype).to(a), _product(a.mT, grad, dtype).to(b)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a b in float32, with factors rounded to ``dtype`` and float32 sums."""
    a, rows = _narrow(a, -1, dtype)
    b, columns = _narrow(b, -2, dtype)
    if a.is_cuda and dtype != torch.float32:
        flat = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=torch.float32)
        out = flat.unflatten(0, a.shape[:-2])
    else:  # in tests, and of features in float32
        out = a.float() @ b.float()
    for scale in (rows, columns):
        out = out if scale is None else out * scale
    return out


def _narrow(x: Tensor, axis: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return x in ``dtype``, divided by its largest numbers along ``axis`` if it is wider."""
    if x.dtype == dtype:
        return x, None
    # the largest number becomes 1, so that a sum of products cannot overflow a half type's range
    largest = x.abs().amax(axis, keepdim=True)
    largest = largest.masked_fill_(largest == 0, 1)
    return (x / largest).to(dtype), largest
