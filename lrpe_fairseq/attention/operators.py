"""What attention computes in chunks of tokens, as operators of compiled graphs.

A compiler would write every chunk into the graph, which would then serve texts of one number of
chunks. In eager execution each function here calls the one that it is named after. The gradients
of an operator compute the call once more; see ``kernels.recomputed``.

Axes: B batch, H heads, T tokens with reflections, S keys, D key width, E value width.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lrpe_fairseq.attention import transport as chunks
from lrpe_fairseq.encodings.core.forms import Transport
from lrpe_fairseq.kernels.linear import channels
from lrpe_fairseq.kernels.recomputed import RecomputedOperator


def _is_operator(x: Tensor) -> bool:
    """True if a graph calls an operator for x (B, H, T, D); without tokens there is no chunk."""
    return torch.compiler.is_compiling() and x.shape[2] > 0


# --- keys that reflections carry -----------------------------------------------------------------


def carried_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transport: Transport,
    log_decay: Tensor | None,
    before: Tensor,
    lowest: float,
) -> tuple[Tensor, Tensor]:
    """Compute ``transport.carried_sums``: (B, H, T, E), and the state (B, H, D, E)."""
    if not _is_operator(q):
        return chunks.carried_sums(q, k, v, transport, log_decay, before, lowest)
    return tuple(_carried_sums(q, k, v, *transport, log_decay, before, lowest))


def _call_carried_sums(q, k, v, w, beta, log_decay, before, lowest):
    return chunks.carried_sums(q, k, v, Transport(w, beta), log_decay, before, lowest)


def _like_sums(q, k, v, w, beta, log_decay, before, lowest):
    return [q.new_empty(v.shape), q.new_empty(before.shape)]


_carried_sums = RecomputedOperator(
    "carried_sums",
    "Tensor q, Tensor k, Tensor v, Tensor w, Tensor beta, Tensor? log_decay, Tensor before, "
    "float lowest",
    _call_carried_sums,
    _like_sums,
)


def carried(k: Tensor, transport: Transport) -> Tensor:
    """Compute ``transport.carried``, the keys (B, H, S, D) at the last of the T tokens."""
    return _carried(k, *transport)[0] if _is_operator(transport.w) else chunks.carried(k, transport)


_carried = RecomputedOperator(
    "carried_keys",
    "Tensor k, Tensor w, Tensor beta",
    lambda k, w, beta: [chunks.carried(k, Transport(w, beta))],
    lambda k, w, beta: [k.new_empty(k.shape)],
)


def score_blocks(
    q: Tensor, k: Tensor, transport: Transport, limit: int, window: int | None = None
) -> Iterator[tuple[slice, slice, Callable[[], Tensor]]]:
    """Yield the blocks of ``transport.score_blocks``; in a graph one, with all T x S scores."""
    if not _is_operator(q):
        yield from chunks.score_blocks(q, k, transport, limit, window)
        return
    yield slice(None), slice(None), partial(_all_scores, q, k, transport)


def _all_scores(q: Tensor, k: Tensor, transport: Transport) -> Tensor:
    return _carried_scores(q, k, *transport)[0]


def _call_scores(q, k, w, beta):
    every = q.shape[0] * q.shape[1] * (q.shape[2] + chunks.CHUNK) * k.shape[2]
    ((_, _, compute),) = chunks.score_blocks(q, k, Transport(w, beta), every)
    return [compute()]


_carried_scores = RecomputedOperator(
    "carried_scores",
    "Tensor q, Tensor k, Tensor w, Tensor beta",
    _call_scores,
    lambda q, k, w, beta: [q.new_empty(*q.shape[:3], k.shape[2])],
)


# --- decays of single features -------------------------------------------------------------------


def channel_sums(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``channels.chunked_sums``: (B, H, T, E), and the state (B, H, D, E)."""
    if not _is_operator(q):
        return channels.chunked_sums(q, k, v, log_decay, state)
    return tuple(_channel_sums(q, k, v, log_decay, state))


_channel_sums = RecomputedOperator(
    "channel_sums",
    "Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor state",
    channels.chunked_sums,
    lambda q, k, v, log_decay, state: [q.new_empty(v.shape), q.new_empty(state.shape)],
)
