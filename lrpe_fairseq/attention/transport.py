"""Scores of keys that reflections carry along the text, in chunks (PaTH, Yang et al. 2025).

score_st = q_s^T H_s ... H_(t+1) k_t with H_u = I - beta_u w_u w_u^T (``core.forms``). In a
chunk of C tokens H_C ... H_1 = I - W^T Y, where Y and Z solve one triangular system (the UT
transform). All of it is ordinary differentiable PyTorch in the dtype of queries or keys, which is
float32 or wider.

Axes: B batch, H heads, T tokens with reflections, S keys, N chunks of C tokens, D key width,
E value width. The last T keys are those of the T tokens. Earlier keys have been carried to the
token before them (:func:`carried`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.forms import Transport
from lrpe_fairseq.kernels.conditions import without_autocast
from lrpe_fairseq.kernels.linear.causal import chunks_of, cut, decay_in_chunk

CHUNK = 32
"""Longest chunk in tokens. On a CPU linear attention takes 0.6 to 0.75 of the time of 64."""


def scores_naive(q: Tensor, k: Tensor, transport: Transport) -> Tensor:
    """Compute the scores of q (B, H, T, D) and k (B, H, S, D), reflection by reflection.

    Returns: (B, H, T, S), 0 for keys after the query.
    """
    before = k.shape[2] - q.shape[2]
    rows = []
    seen, new = k[:, :, :before], k[:, :, before:]
    for s in range(q.shape[2]):
        here = slice(s, s + 1)
        seen = torch.cat([reflected(seen, transport.of(here)), new[:, :, here]], 2)
        scores = q[:, :, here] @ seen.mT
        rows.append(F.pad(scores, (0, k.shape[2] - scores.shape[-1])))
    return torch.cat(rows, 2)


def reflected(k: Tensor, transport: Transport) -> Tensor:
    """Apply the reflection of one token to the keys k (B, H, S, D)."""
    w, beta = transport.w.to(k), transport.beta.to(k)
    return k - beta.unsqueeze(-1) * (k @ w.mT) * w


class _Chunks(NamedTuple):
    """What the chunks need of each other, (B, H, N, C, .)."""

    inside: Tensor  # scores within the chunk, C C
    start: Tensor  # queries, pulled back to the start of the chunk
    end: Tensor  # keys, carried to its end
    w: Tensor
    y: Tensor  # H_C ... H_1 = I - w^T y


def _chunks(q: Tensor, k: Tensor, transport: Transport) -> _Chunks:
    """Cut T tokens into equal chunks, the last one padded with zeros, and solve each."""
    count, size = chunks_of(q.shape[2], CHUNK)
    q = cut(q, count, size)
    k = cut(k, count, size)
    w = cut(transport.w.to(q), count, size)
    beta = cut(transport.beta.to(q).unsqueeze(-1), count, size)
    right = beta * torch.cat([w, (w @ k.mT).tril(-1)], -1)
    system = beta * (w @ w.mT).tril(-1)  # its diagonal of ones is not read
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    y, z = solved.split([w.shape[-1], k.shape[-2]], -1)
    qw = (q @ w.mT).tril()
    return _Chunks((q @ k.mT - qw @ z).tril(), q - qw @ y, k - z.mT @ w, w, y)


# --- scores ------------------------------------------------------------------------------------


def score_blocks(
    q: Tensor, k: Tensor, transport: Transport, limit: int, window: int | None = None
) -> Iterator[tuple[slice, slice, Callable[[], Tensor]]]:
    """Yield slices of the queries and the keys, and a function that computes their scores.

    q: (B, H, T, D). k: (B, H, S, D). The rows are whole chunks, one or with at most ``limit``
    scores; the columns end at the last query, and begin at the first key of the ``window``.
    """
    batch, heads, length = q.shape[:3]
    before = k.shape[2] - length
    chunks = _chunks(q, k[:, :, before:], transport)
    earlier = k[:, :, :before]
    count, size = chunks.w.shape[2:4]
    most = count if window is None else -(-window // size)
    step = max(1, min(most, limit // max(1, batch * heads * size * k.shape[2])))
    for first in range(0, count, step):
        last = min(first + step, count)
        lowest = 0 if window is None else max(0, first * size - window + 1) // size
        # a window that begins inside the chunks hides all keys before them
        if lowest:
            begin, shown = before + lowest * size, earlier[:, :, :0]
        else:
            begin, shown = 0, earlier
        rows = slice(first * size, min(last * size, length))
        columns = slice(begin, before + rows.stop)
        sizes = rows.stop - rows.start, columns.stop - columns.start
        yield rows, columns, partial(_walked_back, chunks, shown, first, last, lowest, sizes)


def _walked_back(
    chunks: _Chunks, earlier: Tensor, first: int, last: int, lowest: int, sizes: tuple[int, int]
) -> Tensor:
    """Return the scores of the queries of chunks ``first`` to ``last`` (exclusive).

    Their keys are those of the chunks from ``lowest`` on, and before them the keys ``earlier``.
    sizes: the numbers of queries and keys, without the padding of the last chunk.
    """
    size = chunks.w.shape[3]
    # the queries of chunks j + 1 to last, pulled back to the end of chunk j
    pulled = earlier.new_empty(*earlier.shape[:2], 0, earlier.shape[-1])
    columns = []
    for j in reversed(range(lowest, last)):
        inside, start, end, w, y = (x[:, :, j] for x in chunks)
        scores = pulled @ end.mT
        pulled = pulled - (pulled @ w.mT) @ y
        if j >= first:
            scores = torch.cat([inside, scores], 2)
            pulled = torch.cat([start, pulled], 2)
        columns.append(F.pad(scores, (0, 0, size * (last - first) - scores.shape[2], 0)))
    scores = torch.cat([pulled @ earlier.mT, *reversed(columns)], -1)
    return scores[:, :, : sizes[0], : sizes[1]]


def carried(k: Tensor, transport: Transport) -> Tensor:
    """Return the keys k (B, H, S, D) at the last of the T tokens, computed without autocast.

    Features of k beyond those of w are not changed.
    """
    w = F.pad(transport.w, (0, k.shape[-1] - transport.w.shape[-1]))
    length = k.shape[2]
    before = length - w.shape[2]
    latest, k = k[:, :, before:], k[:, :, :before]
    with without_autocast(k):
        chunks = _chunks(latest, latest, Transport(w, transport.beta))
        for j in range(chunks.w.shape[2]):
            k = k - (k @ chunks.y[:, :, j].mT) @ chunks.w[:, :, j]
            k = torch.cat([k, chunks.end[:, :, j]], 2)
    return k[:, :, :length]


# --- sums of linear attention ------------------------------------------------------------------


def carried_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transport: Transport,
    log_decay: Tensor | None,
    before: Tensor,
    lowest: float,
) -> tuple[Tensor, Tensor]:
    """Compute sum_(t<=s) score_st v_t in O(T) time and memory.

    Args:
        q, k, v: (B, H, T, D), (B, H, T, D) and (B, H, T, E). before: the state, (B, H, D, E).
        log_decay: (H,) or (B, H, T), see ``kernels.linear.causal.definition``. One of ``lowest``
            or less is a decay of 0, which is no part of any sum of logarithms.
    Returns: (B, H, T, E), and the state after the last token.
    """
    inside, start, end, w, y = _chunks(q, k, transport)
    count, size = w.shape[2:4]
    v = cut(v, count, size)
    # what a chunk makes of the state before it: all its reflections at once
    whole = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device) - w.mT @ y
    if log_decay is not None:
        factor = _factors(log_decay, q.shape[2], count, size, lowest).to(w)
        inside, start = inside * factor[..., 1:, 1:], start * factor[..., 1:, :1]
        end, whole = end * factor[..., -1, 1:, None], whole * factor[..., -1:, :1]
    states = [before]
    for carry, new in zip(whole.unbind(2), (end.mT @ v).unbind(2), strict=True):
        states.append(carry @ states[-1] + new)
    out = inside @ v + start @ torch.stack(states[:-1], 2)
    return out.flatten(2, 3)[:, :, : q.shape[2]], states[-1]


def _factors(log_decay: Tensor, length: int, chunks: int, size: int, lowest: float) -> Tensor:
    """Return the decay of t+1..s in each chunk, float64 (B, H, N, C + 1, C + 1); B may be 1.

    Row and column 0 are the token before the chunk. Above the diagonal it is 1 or 0.
    """
    shut = log_decay <= lowest
    # a shut gate would make all differences of its sums 0 to rounding: it is counted instead
    open_only = log_decay.masked_fill(shut, 0.0)
    total = F.pad(decay_in_chunk(open_only, length, chunks, size), (1, 0))
    shut_so_far = F.pad(decay_in_chunk(shut, length, chunks, size), (1, 0))
    factor = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp()
    return factor.masked_fill(shut_so_far.unsqueeze(-1) != shut_so_far.unsqueeze(-2), 0.0)
