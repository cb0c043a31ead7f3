"""Causal sums of linear attention with a decay of each token's own, chunk by chunk: O(T).

``log_decay`` (B, H, T) multiplies the score of (s, t) by exp(sum of log_decay over t+1..s). It must
be finite and at most 0, so that no exponent is positive. Written in differentiable operations:
gradients of every argument are automatic, ``log_decay`` included. The forms with a constant decay
are in :mod:`lrpe_fairseq.attention.chunked`; the reference is ``linear.linear_attention_naive``.

Axes: B batch, H heads, N chunks of C tokens, D key width, E value width.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.attention.chunked import CHUNK, BlockDecay


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor, eps: float
) -> tuple[Tensor, Tensor | None]:
    """As ``chunked.causal_sums``, for ``log_decay`` (B, H, T)."""
    length = q.shape[-2]
    chunks = max(1, math.ceil(length / CHUNK))
    size = max(1, math.ceil(length / chunks))
    missing = chunks * size - length
    q, k, v = (_cut(F.pad(x, (0, 0, 0, missing)), chunks, size) for x in (q, k, v))
    log_decay = F.pad(log_decay, (0, missing)).unflatten(-1, (chunks, size))  # B H N C
    if wanted != "numerator":
        v = F.pad(v, (0, 1), value=1.0)  # a column of ones sums the scores
    sums = _sums(q, k, v, log_decay).flatten(2, 3)[:, :, :length]
    if wanted == "numerator":
        return sums, None
    numerator, denominator = sums[..., :-1], sums[..., -1]
    if wanted == "sums":
        return numerator, denominator
    return numerator / denominator.clamp_min(eps).unsqueeze(-1), None


def decay_matrix(log_decay: Tensor, like: Tensor) -> Tensor:
    """(..., T, T) for log_decay (..., T): exp(sum over t+1..s) for t <= s, 0 above the diagonal."""
    total = log_decay.double().cumsum(-1)
    exponent = total.unsqueeze(-1) - total.unsqueeze(-2)
    seen = torch.ones_like(exponent, dtype=torch.bool).tril()
    return exponent.masked_fill(~seen, -torch.inf).exp().to(like.dtype)


def block_decay(log_decay: Tensor, like: Tensor) -> BlockDecay:
    """Factors of a block, for log_decay (..., T): (..., T, 1) each, ``whole`` (..., 1, 1)."""
    total = log_decay.double().cumsum(-1).unsqueeze(-1)
    last = total[..., -1:, :]
    return BlockDecay(*(power.exp().to(like.dtype) for power in (total, last - total, last)))


def _cut(x: Tensor, chunks: int, size: int) -> Tensor:
    """(B, H, N C, D) -> (B, H, N, C, D)."""
    return x.unflatten(2, (chunks, size))


def _sums(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """sum_{t<=s} (q_s . k_t) decay v_t of (B, H, N, C, .) chunks: (B, H, N, C, E)."""
    decay = block_decay(log_decay, q)
    within = (q @ k.mT * decay_matrix(log_decay, q)) @ v
    parts = (k * decay.out_of).mT @ v  # B H N D E
    states = [torch.zeros_like(parts[:, :, 0])]
    for chunk in range(parts.shape[2] - 1):
        states.append(states[-1] * decay.whole[:, :, chunk] + parts[:, :, chunk])
    return within + (q * decay.into) @ torch.stack(states, 2)
