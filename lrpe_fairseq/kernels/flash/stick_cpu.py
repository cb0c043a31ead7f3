"""Stick-breaking attention on a CPU, in tiles from the newest key to the oldest.

It equals ``stick.definition`` without masks and dropout. A tile stays in the cache of a core, keys
after the query are not computed, and a row of tiles ends where nothing is left of the stick of any
of its queries. With z = scale q.k, s = softplus(z) and sums over the keys from the newest to t:

    log weight_t = z_t - s_t - sum_(u > t) s_u
    dL/dz_t = weight_t g_t - sigmoid(z_t) sum_(u <= t) weight_u g_u,   g_t = v_t . dL/dout.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.kernels.conditions import (
    gradients_of,
    gradients_without_autocast,
    is_plain,
    without_autocast,
)
from lrpe_fairseq.kernels.flash import stick
from lrpe_fairseq.kernels.loader import kernels_enabled

TILE = 256
"""Queries and keys of a tile: 256 KB of scores in float32."""

Tile = tuple[slice, Tensor | None]
"""Keys, counted from the newest, and the pairs (R, C) of a tile that are hidden, if any are."""


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if :func:`stick_attention` supports the tensors and saves time."""
    rows = (q, k, v)
    return (
        kernels_enabled()
        and is_plain(*rows)
        and k.shape[2] > TILE <= q.shape[2]  # else there is little to skip
        and q.dtype in (torch.float32, torch.float64)
        and all(x.device.type == "cpu" and x.dtype == q.dtype for x in rows)
    )


def stick_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute ``stick.definition`` of q (B, H, T, D), k (B, H, S, D) and v (B, H, S, E).

    Returns: (B, H, T, E).
    """
    with without_autocast(q):
        return _Stick.apply(q, k, v, scale)


class _Stick(torch.autograd.Function):
    """The attention with a hand-written gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        for parts in _heads(q, k, v, out):
            _attend(*parts, scale)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v)
        return out

    @staticmethod
    @gradients_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(grad):  # second derivatives, several gradients
            definition = partial(stick.definition, scale=ctx.scale)
            return *gradients_of(definition, (q, k, v), ctx.needs_input_grad[:3], [grad]), None
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        for parts in _heads(q, k, v, grad, *grads):
            _differentiate(*parts, ctx.scale)
        return *grads, None


def _heads(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yield the matrices (N, D) of every head of every text from tensors (B, H, N, D)."""
    batch, heads = tensors[0].shape[:2]
    for text in range(batch):
        for head in range(heads):
            yield [x[text, head] for x in tensors]


def _attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> None:
    """Add the attention of one head to ``out`` (T, E)."""
    keys, values = (k * scale).flip(0), v.flip(0)
    for rows, tiles in _tiles(len(q), len(k), q.device):
        left = q.new_zeros(len(q[rows]), 1)
        for columns, hidden in tiles:
            z = q[rows] @ keys[columns].T
            weights, left = _weights(z, left, hidden)
            out[rows].addmm_(weights, values[columns])
            if _is_used_up(left):
                break


def _differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    scale: float,
) -> None:
    """Write the gradients of one head to ``grad_q``, ``grad_k`` and ``grad_v``, which are 0."""
    keys, values = (k * scale).flip(0), v.flip(0)
    of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
    for rows, tiles in _tiles(len(q), len(k), q.device):
        left, kept = q.new_zeros(len(q[rows]), 1), []
        for columns, hidden in tiles:
            z = q[rows] @ keys[columns].T
            shares = z.sigmoid() if hidden is None else z.sigmoid().masked_fill_(hidden, 0.0)
            weights, left = _weights(z, left, hidden)
            of_values[columns].addmm_(weights.T, grad[rows])
            kept.append((columns, shares, weights.mul_(grad[rows] @ values[columns].T)))
            if _is_used_up(left):
                break
        older = torch.zeros_like(left)
        for columns, shares, weighted in reversed(kept):
            # sums from the oldest key on: a difference of sums from the newest would be rounded
            sums = weighted.flip(-1).cumsum_(-1).flip(-1).add_(older)
            older = sums[:, :1].clone()
            of_scores = weighted.sub_(sums.mul_(shares))
            grad_q[rows].addmm_(of_scores, keys[columns])
            of_keys[columns].addmm_(of_scores.T, q[rows], alpha=scale)
    grad_k.copy_(of_keys.flip(0))
    grad_v.copy_(of_values.flip(0))


def _weights(z: Tensor, left: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the weights (R, C) of a tile, and the sums (R, 1) of softplus(z) with its keys.

    z: (R, C), which is overwritten. left: the sums (R, 1) over newer keys.
    """
    if hidden is not None:
        z.masked_fill_(hidden, torch.finfo(z.dtype).min)
    parts = F.softplus(z, threshold=50.0)  # the default, 20, rounds to 2e-9
    # own part first: a large score minus a sum that holds its part would be rounded
    z.sub_(parts)
    sums = parts.cumsum_(-1).add_(left)
    z[:, :1].sub_(left)
    z[:, 1:].sub_(sums[:, :-1])
    # torch's exp is ten times slower where its result is not a normal number
    lowest = _lowest(z.dtype)
    weights = z.clamp_min_(lowest).exp_()
    return F.threshold_(weights, math.exp(lowest) * (1 + 1e-5), 0.0), sums[:, -1:]


def _is_used_up(left: Tensor) -> bool:
    """True if every weight of an older key is 0."""
    return bool(left.min() > -_lowest(left.dtype))


def _lowest(dtype: torch.dtype) -> float:
    """Return the logarithm below which weights are 0."""
    return math.log(torch.finfo(dtype).tiny) + 1e-5


def _tiles(rows: int, columns: int, device: torch.device) -> Iterator[tuple[slice, Iterator[Tile]]]:
    """Yield slices of queries, the last ``rows`` of ``columns`` tokens, each with its tiles."""
    for first in range(0, rows, TILE):
        last = min(first + TILE, rows)
        yield slice(first, last), _tiles_of(rows - last, rows - first, columns, device)


def _tiles_of(newest: int, oldest: int, columns: int, device: torch.device) -> Iterator[Tile]:
    """Yield the tiles of queries, the newest keys first.

    newest, oldest: the own key of the last query, and the number after that of the first query.
    """
    own = torch.arange(oldest - 1, newest - 1, -1, device=device).unsqueeze(-1)
    for first in range(newest, columns, TILE):
        last = min(first + TILE, columns)
        hidden = torch.arange(first, last, device=device) <= own if first < oldest else None
        yield slice(first, last), hidden
