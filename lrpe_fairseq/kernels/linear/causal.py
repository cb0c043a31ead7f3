"""The definitions of the sums of linear attention, in differentiable operations.

Causal sums run by chunk: scores are computed within a chunk, and earlier tokens contribute through
the state, in O(T) time and memory. ``causal_cpu`` (C++) and ``causal_triton`` are the kernels;
``half`` computes the definition with products of half-precision numbers.

Axes: B batch, H heads, T time, N chunks of C tokens, D key width, E value width.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64
"""Maximum length of a chunk in tokens; the cost per token is O(CHUNK + D)."""

SCAN = 64
"""Number of chunks whose decayed states are summed by one SCAN x SCAN product."""

Product = Callable[[Tensor, Tensor], Tensor]


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    wanted: str,
    log_decay: Tensor | None,
    eps: float,
    product: Product = torch.matmul,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """Compute the causal sums of q, k (B, H, T, D) and v (B, H, T, E).

    Args:
        wanted: "numerator", sum_{t<=s} (q_s . k_t) v_t; "sums", the numerator and the denominator
            sum_{t<=s} q_s . k_t (B, H, T); "normalized", their quotient, with denominators of at
            least ``eps``.
        log_decay: logarithms g of a decay, at most 0, constant (H,) or per token (B, H, T). The
            score of (s, t) is multiplied by exp(g_{t+1} + ... + g_s).
        eps: the smallest denominator.
        product: the matrix product. Its results have the dtype of all sums.
        chunk: longest chunk in tokens.
    Returns: the result (B, H, T, E), and the denominators for "sums", else None.
    All tensors may need gradients of any order. T and B may be 0.
    """
    length = q.shape[-2]
    chunks, size = chunks_of(length, chunk)
    q, k, v = (cut(x, chunks, size) for x in (q, k, v))
    scores = product(q, k.mT).tril()  # of the pairs within a chunk
    # what reads the state before the chunk, and what is added to the state after it
    q_in = q
    k_in = k
    logs = None
    if log_decay is not None:
        total = decay_in_chunk(log_decay, length, chunks, size)  # B H N C
        # above the diagonal exponents would be positive: tril comes before exp
        within = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp()
        decay = block_decay(total, scores)
        scores, q_in, k_in = scores * within.to(scores), q * decay.into, k * decay.out_of
        logs = total[..., -1].cumsum(-1)
    out = product(scores, v) + product(q_in, _before(product(k_in.mT, v), logs))
    out = out.flatten(2, 3)[:, :, :length]
    if wanted == "numerator":
        return out, None
    keys = _before(k_in.sum(-2, keepdim=True, dtype=scores.dtype), logs)
    denominator = scores.sum(-1) + (q_in * keys).sum(-1)
    denominator = denominator.flatten(2)[:, :, :length]
    if wanted == "sums":
        return out, denominator
    return out / denominator.clamp_min(eps).unsqueeze(-1), None


def full_definition(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, eps: float, product: Product = torch.matmul
) -> tuple[Tensor, Tensor | None]:
    """Compute the sums of q (B, H, T, D) over all keys k (B, H, S, D) and values v (B, H, S, E).

    Arguments and results are those of :func:`definition`, without a decay.
    """
    out = product(q, product(k.mT, v))
    if wanted == "numerator":
        return out, None
    denominator = product(q, k.sum(-2, dtype=out.dtype).unsqueeze(-1)).squeeze(-1)
    if wanted == "sums":
        return out, denominator
    return out / denominator.clamp_min(eps).unsqueeze(-1), None


def chunks_of(length: int, longest: int = CHUNK) -> tuple[int, int]:
    """Return the number and the size of equal chunks for ``length`` tokens."""
    chunks = max(1, -(-length // longest))
    return chunks, max(1, -(-length // chunks))


def decay_matrix(log_decay: Tensor, length: int, like: Tensor) -> Tensor:
    """Return the factor of every score: (H, T, T), or (B, H, T, T) for a decay per token.

    Factors above the diagonal are 1, so nothing overflows. The exponents of a decay per token are
    computed in float64.
    """
    if log_decay.dim() == 3:
        total = log_decay.double().cumsum(-1)
        return (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().to(like)
    step = torch.arange(length, device=like.device)
    lag = (step.unsqueeze(-1) - step).clamp_min(0).to(like.dtype)
    return torch.exp(log_decay.to(like)[:, None, None] * lag)


def present(*results: Tensor | None) -> tuple[Tensor, ...]:
    """Return the results that are not None."""
    return tuple(x for x in results if x is not None)


def cut(x: Tensor, chunks: int, size: int) -> Tensor:
    """Cut into chunks: (B, H, T, .) -> (B, H, N, C, .), padded with zero rows.

    F.pad is not used, because the strides of its gradient are not those that torch.compile expects.
    """
    missing = chunks * size - x.shape[2]
    if missing:
        x = torch.cat([x, x.new_zeros(*x.shape[:2], missing, x.shape[-1])], 2)
    return x.unflatten(2, (chunks, size))


def decay_in_chunk(log_decay: Tensor, length: int, chunks: int, size: int) -> Tensor:
    """Return the cumulative log decay within each chunk, float64 (B, H, N, C).

    B is 1 for a constant decay.
    """
    if log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(1, -1, length)
    # float64, because only differences of these sums are exponentiated
    logs = F.pad(log_decay.double(), (0, chunks * size - length))
    return logs.unflatten(-1, (chunks, size)).cumsum(-1)


class BlockDecay(NamedTuple):
    """Factors of a decay in a block of T tokens, (..., T, 1) or (..., 1, 1).

    into: from the state before the block to a token. out_of: from a token to the state after the
    block. whole: from the state before the block to the one after it.
    """

    into: Tensor
    out_of: Tensor
    whole: Tensor


def block_decay(total: Tensor, like: Tensor) -> BlockDecay:
    """Return the factors for the cumulative log decay ``total`` (..., T) in a block, float64."""
    left = total.unsqueeze(-1)
    whole = left[..., -1:, :]
    return BlockDecay(*(power.exp().to(like) for power in (left, whole - left, whole)))


def _before(sums: Tensor, logs: Tensor | None) -> Tensor:
    """Return the sum over all earlier chunks of (B, H, N, ., .).

    logs: the cumulative log decay (B, H, N) up to the end of every chunk, or None.
    """
    if logs is None:
        after = sums.cumsum(2)
    else:
        groups = []
        last = 0.0  # the logarithm at the end of the group before
        for part, log in zip(sums.split(SCAN, 2), logs.split(SCAN, 2), strict=True):
            steps = (log.unsqueeze(-1) - log.unsqueeze(-2)).tril().exp().tril().to(sums)
            here = (steps @ part.flatten(3)).unflatten(-1, sums.shape[3:])
            if groups:
                carried = (log - last).exp().to(sums)[..., None, None]
                here = here + carried * groups[-1][:, :, -1:]
            groups.append(here)
            last = log[..., -1:]
        after = torch.cat(groups, 2)
    return torch.cat([torch.zeros_like(after[:, :, :1]), after[:, :, :-1]], 2)
