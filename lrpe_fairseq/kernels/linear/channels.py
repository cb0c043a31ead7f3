"""Causal linear attention with a decay of its own for every key feature, in plain PyTorch.

    out_s = sum over t <= s and features j of q_sj k_tj exp(g_(t+1)j + ... + g_sj) v_t

g are logarithms of decays, at most 0. The forms are the definition (:func:`scores_naive`) and
chunks (:func:`chunked_sums`); attention computes one token by the recurrence S <- diag(exp(g_s)) S
+ k_s v_s^T, out_s = q_s S. A factor per feature is no factor of a pair of tokens, so kernels of
decays per head do not compute them.

Axes: B batch, H heads, T time, D key width, E value width, N chunks, C tokens of a chunk.
"""

import torch
from torch import Tensor

from lrpe_fairseq.kernels.linear.causal import cut

CHUNK = 16
"""C. Pairs inside a chunk have a factor for every feature, so memory is B H T C D; exp(g_s - g_t)
as a product of exponentials would overflow."""


def scores_naive(q: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """Return the scores of the definition, (B, H, T, T), 0 for keys after the query.

    q, k, log_decay: (B, H, T, D). It needs O(T^2 D) memory.
    """
    sums = log_decay.double().cumsum(-2)
    exponent = (sums.unsqueeze(-2) - sums.unsqueeze(-3)).clamp_max(0.0)  # B H T T D
    pairs = torch.einsum("bhsd,bhtd,bhstd->bhst", q, k, exponent.exp().to(q))
    return pairs.tril()


def scores_between(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor) -> Tensor:
    """Return the scores (B, H, T, S) of queries (B, H, T, D) and keys (B, H, S, D).

    of_q, of_k: (B, H D, T) and (B, H D, S) float64, sums of the log decays up to each token. Scores
    of keys after a query have no decay; they are hidden by the caller.
    """
    ahead, behind = (x.unflatten(1, (q.shape[1], -1)) for x in (of_q, of_k))
    exponent = (ahead.unsqueeze(-1) - behind.unsqueeze(-2)).clamp_max(0.0)  # B H D T S
    return torch.einsum("bhsd,bhtd,bhdst->bhst", q, k, exponent.exp().to(q))


def chunked_sums(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, H, T, E) after the state (B, H, D, E), and the state after them.

    No exponent is positive: from the state to s it is the sum from the start of the chunk, from t
    to the end of the chunk the sum of what follows t.

    q, k, log_decay: (B, H, T, D). v: (B, H, T, E). Float32 or wider.
    """
    length = q.shape[-2]
    if length == 0:
        return v, state
    chunks = -(-length // CHUNK)
    q, k, v, log_decay = (cut(x, chunks, CHUNK) for x in (q, k, v, log_decay))
    sums = log_decay.double().cumsum(-2)  # B H N C D
    into = sums.exp().to(q)
    out_of = (sums[..., -1:, :] - sums).exp().to(q)
    inside = _inside(q, k, sums) @ v
    added = (k * out_of).mT @ v  # B H N D E
    whole = into[..., -1, :].unsqueeze(-1)
    states = []
    for n in range(chunks):
        states.append(state)
        state = state * whole[:, :, n] + added[:, :, n]
    out = inside + (q * into) @ torch.stack(states, 2)
    return out.flatten(2, 3)[:, :, :length], state


def _inside(q: Tensor, k: Tensor, sums: Tensor) -> Tensor:
    """Return the scores of all pairs of a chunk, (B, H, N, C, C); sums: (B, H, N, C, D)."""
    exponent = (sums.unsqueeze(-2) - sums.unsqueeze(-3)).clamp_max(0.0)
    return torch.einsum("bhnsd,bhntd,bhnstd->bhnst", q, k, exponent.exp().to(q)).tril()
