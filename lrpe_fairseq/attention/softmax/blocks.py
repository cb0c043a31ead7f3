"""Softmax attention in blocks of queries, so that memory does not grow as T S.

What depends on a pair of tokens (biases, factors, functions of the scores, masks, transports) is
computed for the pairs of a block only.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lrpe_fairseq.attention.operators import score_blocks
from lrpe_fairseq.attention.softmax.fused import (
    Terms,
    softmax_attention,
    softmax_attention_naive,
    weighted,
)
from lrpe_fairseq.attention.tokens import (
    Tokens,
    lag_counts,
    lags_between,
    visible_pairs,
    window_is_in_slots,
)
from lrpe_fairseq.attention.windows import ROWS
from lrpe_fairseq.encodings.core.forms import LOWEST, Form, masked_softmax
from lrpe_fairseq.encodings.core.positions import Lags
from lrpe_fairseq.kernels.conditions import is_exporting, is_transformed, without_autocast

BLOCK = 2**24
"""Maximum number of scores B H R S of a block of R queries: 64 MB in float32."""

CPU_BLOCK = 2**20
"""The same for causal attention on a CPU: 4 MB in float32, which stay in the cache. Smaller blocks
compute fewer hidden pairs. Without hidden pairs they save no time in training."""

FEWEST_QUERIES = 128
"""Minimum number of queries of such a block, where BLOCK has room for them. Every block adds a
gradient of all its keys and values, so blocks of few queries are slow."""


class Call(NamedTuple):
    """What all blocks of a call share."""

    form: Form
    lags: Lags | None
    causal: bool
    scale: float
    dropout: float = 0.0


def block_of(q: Tensor, k: Tensor, causal: bool, window: int | None) -> int:
    """Return the maximum number of scores of a block of queries (B, H, T, D) and keys (B, H, S, D).

    Graphs have large blocks on a CPU too: they repeat their operations for every block.
    """
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not causal or q.device.type != "cpu" or in_graph:
        return BLOCK
    length = k.shape[2]
    keys = length if window is None else min(length, FEWEST_QUERIES + window)
    fewest = FEWEST_QUERIES * q.shape[0] * q.shape[1] * keys
    return min(BLOCK, max(CPU_BLOCK, fewest))


def attention_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tokens,
    keys: Tokens,
    call: Call,
    window: int | None,
) -> Tensor:
    """Compute ``dispatch.encoded_attention`` in blocks of queries."""
    limit = block_of(q, k, call.causal, window)
    slices = list(query_blocks(q, k, call.causal, limit, window))
    if len(slices) == 1:
        return one_block(q, k, v, queries, keys, call)
    parts = []
    for rows, columns in slices:
        features = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        parts.append(one_block(*features, queries.of(rows), keys.of(columns), call))
    return torch.cat(parts, 2)


def carried_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: Tokens, keys: Tokens, call: Call
) -> Tensor:
    """Compute attention to keys that a transport carries, in blocks of queries.

    Several blocks are recomputed in the backward pass, because autograd would otherwise store each
    query once for every chunk of keys before it.
    """
    window = keys.window if window_is_in_slots(queries, keys) else None
    with without_autocast(q):
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(wide), k.to(wide)
        blocks = list(score_blocks(q, k, queries.transport, BLOCK, window))

        def block(rows: slice, columns: slice, scores: Callable[[], Tensor]) -> Tensor:
            tokens = queries.of(rows), keys.of(columns)
            terms = terms_of(q[:, :, rows], k[:, :, columns], *tokens, call)
            visible = visible_pairs(*tokens, call.causal)
            weights = weighted(call.scale * scores(), visible, v.dtype, terms)
            return F.dropout(weights, call.dropout) @ v[:, :, columns]

        if len(blocks) > 1 and torch.is_grad_enabled() and not is_transformed():
            options = {"use_reentrant": False, "preserve_rng_state": call.dropout > 0}
            block = partial(checkpoint, block, **options)
        return torch.cat([block(*arguments) for arguments in blocks], 2)


def one_block(q: Tensor, k: Tensor, v: Tensor, queries: Tokens, keys: Tokens, call: Call) -> Tensor:
    """Compute ``dispatch.encoded_attention`` of queries (B, H, T, D), with all T x S scores."""
    terms = terms_of(q, k, queries, keys, call)
    visible = visible_pairs(queries, keys, call.causal)
    options = {"visible": visible, "scale": call.scale, "dropout": call.dropout}
    # a softmax of scores plus a bias is what torch's fused kernels compute
    if terms.rescore is None and terms.weigh is masked_softmax:
        return softmax_attention(q, k, v, bias=terms.bias, **options)
    return softmax_attention_naive(q, k, v, **terms._asdict(), **options)


def terms_of(q: Tensor, k: Tensor, queries: Tokens, keys: Tokens, call: Call) -> Terms:
    """Return what the form does to the scores of a block.

    It runs without autocast, which would round what encodings compute in float32.
    """
    form = call.form
    arguments = q * call.scale, k, queries.positions, keys.positions
    with without_autocast(q):
        bias = _bias(call, queries, keys, q.dtype)
        factor = _factor(form, queries, keys, call.causal, q.dtype)
        if form.bias is not None and factor is None:
            term = form.bias(*arguments)
            bias = term if bias is None else bias + term
    if factor is None and form.rescore is None:
        return Terms(bias, None, form.weigh or masked_softmax)

    def rescore(scores: Tensor, visible: Tensor | None) -> Tensor:
        if factor is not None:
            scores = scores * factor
        if form.rescore is not None:
            with without_autocast(q):
                scores = form.rescore(scores, *arguments, visible)
        return scores if bias is None else scores + bias

    return Terms(None, rescore, form.weigh or masked_softmax)


def _bias(call: Call, queries: Tokens, keys: Tokens, dtype: torch.dtype) -> Tensor | None:
    """Return the table of biases, the decay and the gates as a bias of every pair in ``dtype``."""
    form = call.form
    exponents = []
    if queries.sums is not None:
        # the gradient of a difference would negate all pairs
        exponents.append(queries.sums.unsqueeze(-1) + (-keys.sums).unsqueeze(-2))
    if form.decay is not None:
        wide = form.decay.to(torch.promote_types(form.decay.dtype, dtype))
        exponents.append(_by_number(wide, queries, keys, call.causal))
    # a decay never grows, also where sums of gates differ by rounding
    bias = sum(exponents).to(dtype).clamp(LOWEST, 0.0) if exponents else None
    if form.table is None:
        return bias
    wide = form.table.to(torch.promote_types(dtype, torch.float32))  # its gradient sums over pairs
    of_lags = by_lag(wide, call.lags[0], queries, keys).to(dtype)
    return of_lags if bias is None else of_lags + bias


def _factor(
    form: Form, queries: Tokens, keys: Tokens, causal: bool, dtype: torch.dtype
) -> Tensor | None:
    """Return the factor of every score, broadcastable to (B, H, T, S), or None."""
    if form.score_decay is not None:
        return _by_number(form.score_decay, queries, keys, causal).exp().to(dtype)
    if form.factor is None:
        return None
    return form.factor(queries.positions, keys.positions).to(dtype).unsqueeze(-3)


def _by_number(log_decay: Tensor, queries: Tokens, keys: Tokens, causal: bool) -> Tensor:
    """Return log_decay n, (H, T, S) or (B, H, T, S), for log_decay (H,)."""
    lag = lag_counts(queries, keys, causal).unsqueeze(-3)
    return log_decay.view(-1, 1, 1) * lag.to(log_decay.dtype)


def by_lag(table: Tensor, first: int, queries: Tokens, keys: Tokens) -> Tensor:
    """Expand a table (H, R) of the lags from ``first`` on: (H, T, S) or (B, H, T, S)."""
    if queries.first_slot is not None and keys.first_slot is not None:
        lowest, highest = lags_between(queries, keys)
        seen = table[:, lowest - first : highest - first + 1]
        return by_diagonals(seen, queries.positions.shape[-1])
    pairs = table[:, queries.positions.unsqueeze(-1) - keys.positions.unsqueeze(-2) - first]
    return pairs if pairs.dim() == 3 else pairs.transpose(0, 1)


def by_diagonals(table: Tensor, rows: int) -> Tensor:
    """Return the pairs (H, T, S) of a function of the lag, T = ``rows``.

    table: (H, T + S - 1), the values of the lags from those of the first query and the last key on.
    """
    # row i of the pairs is the reversed table from its i-th last entry on: a view, not a gather
    columns = table.shape[-1] - rows + 1
    if torch.compiler.is_compiling():
        return _skewed(F.pad(table.flip(-1), (0, 1)), rows)[..., :columns]
    return table.flip(-1).unfold(-1, columns, 1).flip(-2)


def _skewed(values: Tensor, rows: int) -> Tensor:
    """Return (H, T, R), row i the values (H, R + 1) from number T - 1 - i on, T = ``rows``.

    A compiler takes any length here, and only one in ``unfold``.
    """
    width = values.shape[-1] - 1
    flat = values.unsqueeze(1).expand(-1, rows, -1).flatten(1)
    return flat[:, rows - 1 : rows - 1 + rows * width].unflatten(1, (rows, width))


def query_blocks(
    q: Tensor, k: Tensor, causal: bool, limit: int, window: int | None = None
) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the T queries and the S keys with at most ``limit`` scores each.

    q: (B, H, T, D). k: (B, H, S, D). A block has R >= 1 rows with B H R S <= ``limit`` if R > 1.
    In causal attention its keys end at the key of its last query, so that the last R keys are
    those of the queries, as for the whole; with a window they begin at the first key that its first
    query sees. There is one block, maybe empty, if T = 0.
    """
    batch, heads, rows = q.shape[:3]
    columns = k.shape[2]
    # an exported program takes any length, so that it cannot have a number of blocks
    one = window is None and rows <= limit // max(1, batch * heads * columns)
    if is_exporting() or one:
        yield slice(0, rows), slice(0, columns)
        return
    # more queries than the window would compute mostly hidden pairs
    most = rows if window is None else max(window, ROWS)
    wide = columns if window is None else min(columns, most + window)
    step = max(1, min(most, limit // max(1, batch * heads * wide)))
    for first in range(0, max(1, rows), step):
        last = min(first + step, rows)
        start = 0 if window is None else max(0, columns - rows + first - window + 1)
        yield slice(first, last), slice(start, columns - rows + last if causal else columns)


def decay_sums(
    queries: Tokens, keys: Tokens, decay: Tensor | None, batch: int
) -> tuple[Tensor, Tensor] | None:
    """Return sums (B, H, T) and (B, H, S), float64, whose differences are the log decays.

    decay: (H,), per real token; gates are in the tokens. None without both.
    """
    if queries.sums is None and decay is None:
        return None
    return _sums_of(queries, decay, batch), _sums_of(keys, decay, batch)


def _sums_of(tokens: Tokens, decay: Tensor | None, batch: int) -> Tensor:
    """Return the sums of gates and of a constant decay up to each token, float64 (B, H, N)."""
    if decay is None:
        return tokens.sums
    sums = decay.double().unsqueeze(-1) * tokens.real_counts.unsqueeze(-2)
    return sums.expand(batch, -1, -1) if tokens.sums is None else tokens.sums + sums
