"""The causal sums of linear attention in differentiable operations: what the kernels compute.

Chunk by chunk: within a chunk the scores are formed; earlier tokens enter through the state. The
fast forms are ``attention.chunked``, ``causal_cpu`` (C++) and ``causal_triton``.

Axes: B batch, H heads, T time, N chunks of C tokens, D key width, E value width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64
"""Longest chunk; the cost per token is O(CHUNK + D)."""


def definition(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """The causal sums of q, k (B, H, T, D) and v (B, H, T, E).

    Args:
        wanted: "numerator", sum_{t<=s} (q_s . k_t) v_t; "sums", that and the denominator
            sum_{t<=s} q_s . k_t (B, H, T); "normalized", their quotient, with denominators
            clamped to ``eps`` from below.
        log_decay: logarithms g of a decay, constant (H,) or per token (B, H, T), at most 0; the
            score of (s, t) is multiplied by exp(g_{t+1} + ... + g_s).
    Every argument may need a gradient of any order. T and B may be 0.
    """
    length = q.shape[-2]
    chunks, size = chunks_of(length)
    q, k, v = (_cut(x, chunks, size) for x in (q, k, v))
    scores, q_in, k_in, steps = (q @ k.mT).tril(), q, k, None
    if log_decay is not None:
        left = _left(log_decay, length, chunks, size)  # B H N C
        within = (left.unsqueeze(-1) - left.unsqueeze(-2)).tril().exp()
        scores, q_in = scores * within.to(q), q * left.exp().to(q).unsqueeze(-1)
        k_in = k * (left[..., -1:] - left).exp().to(k).unsqueeze(-1)
        after = left[..., -1].cumsum(-1)
        steps = (after.unsqueeze(-1) - after.unsqueeze(-2)).tril().exp().tril().to(q)
    out = scores @ v + q_in @ _before(k_in.mT @ v, steps)
    out = out.flatten(2, 3)[:, :, :length]
    if wanted == "numerator":
        return out, None
    keys = _before(k_in.sum(-2, keepdim=True), steps)
    denominator = scores.sum(-1) + (q_in * keys).sum(-1)
    denominator = denominator.flatten(2)[:, :, :length]
    if wanted == "sums":
        return out, denominator
    return out / denominator.clamp_min(eps).unsqueeze(-1), None


def chunks_of(length: int) -> tuple[int, int]:
    """The number and the size of equal chunks for ``length`` tokens."""
    chunks = max(1, -(-length // CHUNK))
    return chunks, max(1, -(-length // chunks))


def decay_matrix(log_decay: Tensor, length: int, like: Tensor) -> Tensor:
    """The factor of every score, 1 above the diagonal: (H, T, T), or (B, H, T, T) per token.

    Never overflows. Exponents are float64.
    """
    if log_decay.dim() == 3:
        left = log_decay.double().cumsum(-1)
        return (left.unsqueeze(-1) - left.unsqueeze(-2)).tril().exp().to(like)
    step = torch.arange(length, device=like.device)
    lag = (step.unsqueeze(-1) - step).clamp_min(0).to(like.dtype)
    return torch.exp(log_decay.to(like)[:, None, None] * lag)


def present(*results: Tensor | None) -> tuple[Tensor, ...]:
    """The results that are not None."""
    return tuple(x for x in results if x is not None)


def _cut(x: Tensor, chunks: int, size: int) -> Tensor:
    """(B, H, T, .) -> (B, H, N, C, .), filled up with zero rows.

    Not by F.pad: its gradient has other strides than torch.compile expects.
    """
    missing = chunks * size - x.shape[2]
    if missing:
        x = torch.cat([x, x.new_zeros(*x.shape[:2], missing, x.shape[-1])], 2)
    return x.unflatten(2, (chunks, size))


def _left(log_decay: Tensor, length: int, chunks: int, size: int) -> Tensor:
    """Logarithm of what is left, after each token, of the state before its chunk: float64
    (B, H, N, C), with B = 1 for a constant decay."""
    if log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(1, -1, length)
    logs = F.pad(log_decay.double(), (0, chunks * size - length))
    return logs.unflatten(-1, (chunks, size)).cumsum(-1)


def _before(sums: Tensor, steps: Tensor | None) -> Tensor:
    """Sum of the (B, H, N, ., .) of all chunks before each one, decayed by ``steps``."""
    if steps is None:
        after = sums.cumsum(2)
    else:
        after = (steps @ sums.flatten(3)).unflatten(-1, sums.shape[3:])
    return torch.cat([torch.zeros_like(after[:, :, :1]), after[:, :, :-1]], 2)
