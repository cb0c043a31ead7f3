"""Memory and dtype of the results of Triton kernels, also where there is no Triton."""

from math import gcd

import torch
from torch import Tensor

FARTHEST = 2**24
"""Elements between two rows: 128 rows lie within 2^31, so that their offsets are int32."""

LIMIT = 65504 / 64
"""Largest quotient in float16; see ``attention.linear._narrow``."""


def is_aligned(x: Tensor) -> bool:
    """True if x starts at a multiple of 16 bytes, for which Triton compiles other code."""
    return x.data_ptr() % 16 == 0


def aligned(x: Tensor) -> Tensor:
    """Return x, copied if it does not start at a multiple of 16 bytes."""
    return x if is_aligned(x) else x.clone()


def gradient_rows(x: Tensor) -> Tensor:
    """Return a gradient of results (B, H, T, .), copied unless it lies in memory as in proofs.

    There its rows are contiguous and near, the largest of 1, 2, 4, 8 and 16 that divides their
    width divides the strides, and it is :func:`aligned`. Autograd's gradients mostly are so. Their
    layout is not in the key of a proof, as it is not known before the backward pass.
    """
    unit = gcd(16, x.shape[3])
    near = x.stride(3) == 1 and x.stride(2) < FARTHEST
    if near and is_aligned(x) and not any(step % unit for step in x.stride()[:3]):
        return x
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def with_near_heads(x: Tensor) -> Tensor:
    """Return x (B, H, T, .), copied with heads inside if the offset of a head may pass int32."""
    if x.shape[1] * x.stride(1) < 2**31:
        return x
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def result_like(
    x: Tensor, width: int, dtype: torch.dtype | None = None, time: int | None = None
) -> Tensor:
    """Return memory (B, H, T, width) for a result, in which the heads of a token lie together.

    Batch and time lie as in x (B, H, ., .): as (B, T, H, width), or as (T, B, H, width) if the
    rows are near enough.
    """
    batch, heads, _, _ = x.shape
    time = x.shape[2] if time is None else time
    token = heads * width  # numbers of a token with all heads
    if x.stride(2) > x.stride(0) and batch * token < FARTHEST:
        strides = token, width, batch * token, 1
    else:
        strides = time * token, width, token, 1
    return x.new_empty_strided((batch, heads, time, width), strides, dtype=dtype)


def result_type(v: Tensor, wanted: str) -> torch.dtype:
    """Return the dtype of a result, which is rounded once: float32 where sums may overflow v's."""
    rounds = wanted == "normalized" or (wanted == "numerator" and v.dtype == torch.bfloat16)
    return v.dtype if rounds else torch.float32


def narrow(quotient: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as the kernels do: float16 saturates."""
    return (quotient.clamp(-LIMIT, LIMIT) if dtype == torch.float16 else quotient).to(dtype)
