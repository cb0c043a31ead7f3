"""Softmax attention with any encoding: fused kernels where they serve it, else blocks of queries.

An encoding that changes q and k only uses torch's fused kernel for all queries at once. What
depends on a pair is computed for blocks of queries, so that memory does not grow with the product
of the lengths.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lrpe_fairseq.attention.tokens import (
    Tokens,
    counts_slots,
    lag_numbers,
    lags_between,
    visible_pairs,
)
from lrpe_fairseq.attention.transport import carried, score_blocks
from lrpe_fairseq.encodings.core.forms import LOWEST, Form, Transport, masked_softmax
from lrpe_fairseq.encodings.core.positions import Lags, PositionCache, constant
from lrpe_fairseq.encodings.core.protocols import Encoding
from lrpe_fairseq.kernels import loader
from lrpe_fairseq.kernels.dispatch import is_plain, is_transformed, without_autocast
from lrpe_fairseq.kernels.flash.flash import NoSecondDerivative

BLOCK = 2**24
"""Maximum number of scores B H R S of a block of R queries: 64 MB in float32."""

ROWS = 64
"""Queries of a block with a window, if that is shorter. It is read from R + window - 1 keys."""

LARGEST_BIAS = 2**25
"""Maximum number of elements of a bias that is kept: 64 MB in half precision."""

FLASH, STICK = "lrpe_fairseq.kernels.flash.flash_triton", "lrpe_fairseq.kernels.flash.stick_triton"

Rescore = Callable[[Tensor, Tensor | None], Tensor]
"""(scores, visible) -> scores; see ``ScoreEncoding.forward``."""

Weigh = Callable[[Tensor, Tensor | None, torch.dtype], Tensor]
"""(scores, visible, dtype) -> weights; see ``ScoreEncoding.weigh``."""


class Call(NamedTuple):
    """What all blocks of a call share."""

    form: Form
    lags: Lags | None
    causal: bool
    scale: float
    dropout: float = 0.0


class Terms(NamedTuple):
    """What is done to the scaled scores of a block: a bias is added, or they are mapped."""

    bias: Tensor | None = None
    rescore: Rescore | None = None
    weigh: Weigh = masked_softmax


# --- attention with an encoding ----------------------------------------------------------------


def encoded_attention(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tokens,
    keys: Tokens,
    *,
    causal: bool,
    dropout: float = 0.0,
) -> Tensor:
    """Compute softmax attention with ``encoding``.

    A decay, constant or from gates, counts real tokens: the weight exp(score) of (s, t), or for a
    ``score_decay`` the score itself, is multiplied by exp(sum of log decays of the tokens in
    t+1..s), in a bidirectional model by the sum between the two.

    Args:
        q, k, v: (B, H, T, D), (B, H, S, D), (B, H, S, E), already encoded in q and k. Keys and
            values may have fewer heads, each of which is read by equally many query heads in turn.
        queries, keys: their tokens. In causal attention the queries are the last T keys. If they
            have a transport, it has carried the other keys to the token before them.
        dropout: on the attention weights, as in the paper (softmax only).
    Returns: (B, H, T, E). A query without a visible key gets zeros, never NaN.
    """
    call, q = _call(encoding, queries, keys, causal, dropout), _with_factors(encoding, q)
    if not _reads_groups(q, k, v, queries, keys, call):
        k, v = (_of_all_heads(x, q) for x in (k, v))
    if queries.transport is not None:
        loader.log_served(
            f"softmax attention of {encoding.name}", "blocks of chunks", q.device.type
        )
        return _carried(q, k, v, queries, keys, call)
    out = (_shares if call.form.shares else _flash)(q, k, v, queries, keys, call)
    plain = call.form.has_only() and queries.sums is None
    bias = None if out is not None or plain else _constant_bias(q, queries, keys, call)
    form = "triton" if out is not None else "torch" if plain else "blocks of queries"
    form = form if bias is None else "torch with a cached bias"
    loader.log_served(f"softmax attention of {encoding.name}", form, q.device.type)
    if out is not None:
        return out
    window = keys.window if counts_slots(queries, keys) else None
    if plain and window is None:
        return _plain(q, k, v, queries, keys, call)
    if bias is not None:
        return softmax_attention(q, k, v, scale=call.scale, dropout=dropout, bias=bias)
    return _in_blocks(q, k, v, queries, keys, call, window)


def encoded_weights(
    encoding: Encoding, q: Tensor, k: Tensor, queries: Tokens, keys: Tokens, *, causal: bool
) -> Tensor:
    """Return the weights of :func:`encoded_attention`, (B, H, T, S) in q's dtype."""
    call, q = _call(encoding, queries, keys, causal, 0.0), _with_factors(encoding, q)
    rest = visible_pairs(queries, keys, causal), q.dtype, _terms(q, k, queries, keys, call)
    if queries.transport is None:
        return weighted((q * call.scale) @ k.mT, *rest)
    wide = torch.promote_types(q.dtype, torch.float32)
    ((*_, scores),) = score_blocks(q.to(wide), k.to(wide), queries.transport, q.shape[2] * BLOCK)
    return weighted(call.scale * scores(), *rest)


def _reads_groups(
    q: Tensor, k: Tensor, v: Tensor, queries: Tokens, keys: Tokens, call: Call
) -> bool:
    """True if torch's own kernel computes the call, which repeats no heads in memory."""
    if k.shape[1] != v.shape[1] or queries.transport is not None or keys.window is not None:
        return False
    ours = q.shape[2] > 1 and loader.triton_kernels(FLASH) is not None
    return call.form.has_only() and queries.sums is None and not ours


def _of_all_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeat the heads of x (B, K, S, D) for those of q (B, H, T, D): (B, H, S, D)."""
    times = q.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _call(encoding: Encoding, queries: Tokens, keys: Tokens, causal: bool, dropout: float) -> Call:
    lags = lags_between(queries, keys)
    with without_autocast(queries.positions):  # autocast would round the form
        form = encoding.form(lags, queries.positions)
    return Call(form, lags, causal, encoding.softmax_scale, dropout)


def _with_factors(encoding: Encoding, q: Tensor) -> Tensor:
    """Multiply the features of q (B, H, T, D') by ``feature_factors``, in float32 or wider."""
    if encoding.feature_factors is None:
        return q
    wide = torch.promote_types(q.dtype, torch.float32)
    return (q * constant(encoding.feature_factors, wide, q.device)).to(q.dtype)


def _in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tokens,
    keys: Tokens,
    call: Call,
    window: int | None,
) -> Tensor:
    """Compute :func:`encoded_attention` in blocks of queries."""
    blocks = list(query_blocks(q, k, call.causal, BLOCK, window))
    if len(blocks) == 1:
        return _block(q, k, v, queries, keys, call)
    parts = (
        _block(
            *(q[:, :, rows], k[:, :, columns], v[:, :, columns]),
            *(queries.of(rows), keys.of(columns)),
            call,
        )
        for rows, columns in blocks
    )
    return torch.cat(list(parts), 2)


def _carried(q: Tensor, k: Tensor, v: Tensor, queries: Tokens, keys: Tokens, call: Call) -> Tensor:
    """Compute attention to keys that a transport carries, in blocks of queries.

    Several blocks are recomputed in the backward pass, because autograd would otherwise store each
    query once for every chunk of keys before it.
    """
    window = keys.window if counts_slots(queries, keys) else None
    with without_autocast(q):
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(wide), k.to(wide)
        blocks = list(score_blocks(q, k, queries.transport, BLOCK, window))

        def block(rows: slice, columns: slice, scores: Callable[[], Tensor]) -> Tensor:
            places = queries.of(rows), keys.of(columns)
            terms = _terms(q[:, :, rows], k[:, :, columns], *places, call)
            visible = visible_pairs(*places, call.causal)
            weights = weighted(call.scale * scores(), visible, v.dtype, terms)
            return F.dropout(weights, call.dropout) @ v[:, :, columns]

        if len(blocks) > 1 and torch.is_grad_enabled() and not is_transformed():
            options = {"use_reentrant": False, "preserve_rng_state": call.dropout > 0}
            block = partial(checkpoint, block, **options)
        return torch.cat([block(*given) for given in blocks], 2)


def _plain(q: Tensor, k: Tensor, v: Tensor, queries: Tokens, keys: Tokens, call: Call) -> Tensor:
    """Compute attention whose scores are q k^T."""
    square, options = q.shape[-2] == k.shape[-2], {"scale": call.scale, "dropout": call.dropout}
    if keys.unmasked and (square or not call.causal):
        return fused_attention(q, k, v, is_causal=call.causal, **options)
    return softmax_attention(q, k, v, visible=visible_pairs(queries, keys, call.causal), **options)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, queries: Tokens, keys: Tokens, call: Call
) -> Tensor | None:
    """Compute :func:`encoded_attention` in the Triton kernel, or return None if it is not used.

    It is not used for a call that it does not support (:func:`_is_data`), for scores that torch's
    own kernel computes as fast, and for a single query.
    """
    form, kernels = call.form, loader.triton_kernels(FLASH)
    if kernels is None or not _is_data(form):
        return None
    by_lag = not form.has_only()
    plain = not by_lag and queries.sums is None and keys.unmasked
    if q.shape[2] == 1 or (plain and q.shape[3] == v.shape[3]):
        return None
    if keys.window is not None and not counts_slots(queries, keys):
        return None
    in_slots = None not in (queries.slots, keys.slots, call.lags)
    by_gates = form.decay is not None and call.causal and form[0] is form.score_decay is None
    if by_lag and not in_slots and not by_gates:
        return None
    options = {"causal": call.causal, "scale": call.scale, "dropout": call.dropout}
    data = _by_slot(call) if in_slots else {}
    if form.by_token is not None:
        q, data = _by_token(q, k, call, keys.window)
    data["gates"] = decay_sums(queries, keys, None if in_slots else form.decay, len(q))
    masks = _masks(queries, keys)
    pairs = (*(data["gates"] or ()), *masks.get("segments", ()))
    others = (x for x in data.values() if isinstance(x, Tensor))
    if not kernels.serves(q, k, v, keys.padding, *others, *pairs):
        return None
    return kernels.flash_attention(q, k, v, **options, **masks, **data)


def _is_data(form: Form) -> bool:
    """True if tables, fixed decays or per-token biases describe the form completely."""
    if any(x is not None and x.requires_grad for x in (form.decay, form.score_decay)):
        return False
    if form.by_token is not None:
        return form.has_only("bias", "by_token")
    return form.has_only("table", "decay", "score_decay")


def _shares(
    q: Tensor, k: Tensor, v: Tensor, queries: Tokens, keys: Tokens, call: Call
) -> Tensor | None:
    """Compute :func:`encoded_attention` of a form with ``shares`` in its own Triton kernel.

    None if that kernel does not support the call, and for a single query.
    """
    form, kernels = call.form, loader.triton_kernels(STICK)
    alone = form.has_only("weigh", "shares") and queries.sums is None
    if kernels is None or not (call.causal and alone) or q.shape[2] == 1:
        return None
    if keys.window is not None and not counts_slots(queries, keys):
        return None
    masks = _masks(queries, keys)
    if not kernels.serves(q, k, v, keys.padding, *masks.get("segments", ())):
        return None
    return kernels.stick_attention(q, k, v, scale=call.scale, dropout=call.dropout, **masks)


def _masks(queries: Tokens, keys: Tokens) -> dict[str, Any]:
    """Return what hides keys, as arguments of the kernels."""
    masks: dict[str, Any] = {"padding": keys.padding, "window": keys.window}
    if keys.segments is not None:
        masks["segments"] = queries.segments.int(), keys.segments.int()
    return masks


def _constant_bias(q: Tensor, queries: Tokens, keys: Tokens, call: Call) -> Tensor | None:
    """Return a constant decay and causality as a bias (H, T, S) in q's dtype, kept for later calls.

    Torch's memory-efficient kernel adds it without scores in memory. None except in half precision
    on a GPU that runs no Triton kernels, for a decay that is not learned and no other term.
    """
    decay = call.form.decay
    one = decay is not None and not decay.requires_grad and call.form.has_only("decay")
    at = queries.numbers, keys.numbers
    shared = keys.unmasked and queries.sums is None and at[0].dim() == at[1].dim() == 1
    if not (one and shared and _in_half_on_gpu(q)):
        return None
    if q.shape[1] * len(at[0]) * len(at[1]) > LARGEST_BIAS:
        return None

    def compute() -> Tensor:
        bias, seen = _bias(call, queries, keys, q.dtype), visible_pairs(queries, keys, call.causal)
        return bias if seen is None else bias.masked_fill(~seen[0], -torch.inf)

    return _biases.get((*at, decay), (call.causal, q.dtype), compute)


_biases = PositionCache(2)  # of training and validation


def _in_half_on_gpu(q: Tensor) -> bool:
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.is_cuda and half and loader.triton_kernels(FLASH) is None and is_plain(q)


def _by_slot(call: Call) -> dict[str, Any]:
    """Return the biases by lag (H, R), the smallest lag, and the decays (H,), all float32."""
    found = {name: getattr(call.form, name) for name in ("table", "decay", "score_decay")}
    found = {name: x.float().contiguous() for name, x in found.items() if x is not None}
    return found | ({"first_lag": call.lags[0]} if "table" in found else {})


def _by_token(
    q: Tensor, k: Tensor, call: Call, window: int | None
) -> tuple[Tensor, dict[str, Any]]:
    """Return the queries, and biases by lag of every token as arguments of the kernel."""
    first, last = call.lags
    lags = (
        max(first, 0) if call.causal else first,
        last if window is None else min(last, window - 1),
    )
    with without_autocast(q):
        found = call.form.by_token(q, k, lags)._asdict()
    return found.pop("q"), found


def decay_sums(
    queries: Tokens, keys: Tokens, decay: Tensor | None, batch: int
) -> tuple[Tensor, Tensor] | None:
    """Return sums (B, H, T) and (B, H, S), float64, whose differences are the log decays.

    decay: (H,), per real token; gates are in the tokens. None without both.
    """
    if queries.sums is None and decay is None:
        return None
    found = []
    for tokens in (queries, keys):
        sums = tokens.sums
        if decay is not None:
            own = decay.double().unsqueeze(-1) * tokens.numbers.unsqueeze(-2)
            sums = own.expand(batch, -1, -1) if sums is None else sums + own
        found.append(sums)
    return tuple(found)


def _block(q: Tensor, k: Tensor, v: Tensor, queries: Tokens, keys: Tokens, call: Call) -> Tensor:
    """Compute :func:`encoded_attention` of one block."""
    terms, visible = _terms(q, k, queries, keys, call), visible_pairs(queries, keys, call.causal)
    options = {"visible": visible, "scale": call.scale, "dropout": call.dropout}
    if terms.rescore is None and terms.weigh is masked_softmax:
        return softmax_attention(q, k, v, bias=terms.bias, **options)
    return softmax_attention_naive(q, k, v, **terms._asdict(), **options)


def _terms(q: Tensor, k: Tensor, queries: Tokens, keys: Tokens, call: Call) -> Terms:
    """Return what the form does to the scores of a block.

    It runs without autocast, which would round what encodings compute in float32.
    """
    form = call.form
    at, given = (queries.positions, keys.positions), (q * call.scale, k)
    with without_autocast(q):
        bias = _bias(call, queries, keys, q.dtype)
        factor = _factor(form, queries, keys, call.causal, q.dtype)
        if form.bias is not None and factor is None:
            own = form.bias(*given, *at)
            bias = own if bias is None else bias + own
    if factor is None and form.rescore is None:
        return Terms(bias, None, form.weigh or masked_softmax)

    def rescore(scores: Tensor, visible: Tensor | None) -> Tensor:
        scores = scores if factor is None else scores * factor
        with without_autocast(q):
            own = form.rescore
            scores = scores if own is None else own(scores, *given, *at, visible)
        return scores if bias is None else scores + bias

    return Terms(None, rescore, form.weigh or masked_softmax)


def _bias(call: Call, queries: Tokens, keys: Tokens, dtype: torch.dtype) -> Tensor | None:
    """Return the table of biases, the decay and the gates as a bias of every pair in ``dtype``."""
    form, exponents = call.form, []
    if queries.sums is not None:
        exponents.append(queries.sums.unsqueeze(-1) - keys.sums.unsqueeze(-2))
    if form.decay is not None:
        wide = form.decay.to(torch.promote_types(form.decay.dtype, dtype))
        exponents.append(_by_number(wide, queries, keys, call.causal))
    bias = sum(exponents).clamp(LOWEST, 0.0).to(dtype) if exponents else None
    if form.table is None:
        return bias
    wide = form.table.to(torch.promote_types(dtype, torch.float32))  # its gradient sums over pairs
    own = by_lag(wide, call.lags[0], queries, keys).to(dtype)
    return own if bias is None else own + bias


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
    lag = lag_numbers(queries, keys, causal).unsqueeze(-3)
    return log_decay.view(-1, 1, 1) * lag.to(log_decay.dtype)


def by_lag(table: Tensor, first: int, queries: Tokens, keys: Tokens) -> Tensor:
    """Expand a table (H, R) of the lags from ``first`` on: (H, T, S) or (B, H, T, S)."""
    if queries.slots is not None and keys.slots is not None:
        lowest, highest = lags_between(queries, keys)
        own = table[:, lowest - first : highest - first + 1]
        return by_diagonals(own, queries.positions.shape[-1])
    pairs = table[:, queries.positions.unsqueeze(-1) - keys.positions.unsqueeze(-2) - first]
    return pairs if pairs.dim() == 3 else pairs.transpose(0, 1)


def by_diagonals(table: Tensor, rows: int) -> Tensor:
    """Return the pairs (H, T, S) of a function of the lag, T = ``rows``.

    table: (H, T + S - 1), the values of the lags from those of the first query and the last key on.
    """
    columns = table.shape[-1] - rows + 1
    return table.flip(-1).unfold(-1, columns, 1).flip(-2)


def query_blocks(
    q: Tensor, k: Tensor, causal: bool, limit: int, window: int | None = None
) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the T queries and the S keys with at most ``limit`` scores each.

    q: (B, H, T, D). k: (B, H, S, D). A block has R >= 1 rows with B H R S <= ``limit`` if R > 1.
    In causal attention its keys end at the key of its last query, so that the last R keys are
    those of the queries, as for the whole; with a window they begin at the first key that its first
    query sees. There is one block, maybe empty, if T = 0.
    """
    batch, heads, rows, columns = *q.shape[:3], k.shape[2]
    most = rows if window is None else max(window, ROWS)
    wide = columns if window is None else min(columns, most + window)
    step = max(1, min(most, limit // max(1, batch * heads * wide)))
    for first in range(0, max(1, rows), step):
        last = min(first + step, rows)
        start = 0 if window is None else max(0, columns - rows + first - window + 1)
        yield slice(first, last), slice(start, columns - rows + last if causal else columns)


# --- attention with terms ----------------------------------------------------------------------


def softmax_attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    rescore: Rescore | None = None,
    weigh: Weigh = masked_softmax,
) -> Tensor:
    """Compute the definition, with the score matrix in memory; see :func:`softmax_attention`.

    Additional arguments:
        rescore: maps the scaled scores (B, H, T, S) and the visible keys to new scores, for
            encodings that are not additive.
        weigh: maps scores, visible keys and a dtype to weights, 0 where not visible.
    """
    terms = Terms(bias, rescore, weigh)
    return F.dropout(weighted((q * scale) @ k.mT, visible, v.dtype, terms), dropout) @ v


def weighted(scores: Tensor, visible: Tensor | None, dtype: torch.dtype, terms: Terms) -> Tensor:
    """Return the weights (B, H, T, S) of scaled scores in ``dtype``; see :class:`Terms`."""
    scores = scores if terms.bias is None else scores + terms.bias
    scores = scores if terms.rescore is None else terms.rescore(scores, visible)
    return terms.weigh(scores, visible, dtype)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale q k^T + bias) v with torch's fused kernels (LRPE, Eq. 2).

    Args:
        q, k, v: (B, H, T, D), (B, H, S, D), (B, H, S, E), already encoded.
        scale: D^-0.5 of the *original* head width. Encoded features may be wider.
        visible: bool, broadcastable to (B, H, T, S), true if the query may attend to the key.
        bias: broadcastable to (B, H, T, S), added to the scaled scores.
    Returns: (B, H, T, E). A query without a visible key gets zeros, never NaN.
    Raises: RuntimeError for second derivatives, which fused kernels do not have. Use
        ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` for them.
    """
    options = {"scale": scale, "dropout": dropout}
    if bias is not None and is_transformed():  # torch's fused kernel refuses a learned bias there
        return softmax_attention_naive(q, k, v, visible=visible, bias=bias, **options)
    if visible is None:
        return fused_attention(q, k, v, attn_mask=_like(bias, q), **options)
    blind = ~visible.any(-1, keepdim=True)
    mask = visible | blind
    if bias is not None:
        mask = (bias + bias.new_zeros(mask.shape)).masked_fill(~mask, -torch.inf)
    return fused_attention(q, k, v, attn_mask=_like(mask, q), **options).masked_fill(blind, 0.0)


def _like(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a bias in the dtype of q; a bool mask as it is."""
    return mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *, dropout: float, **options: Any) -> Tensor:
    """Call torch's fused kernel, with v padded with zeros to the width of q and k.

    Complex features make q and k wider than v, which only torch's slow kernel supports.
    """
    missing = q.shape[-1] - v.shape[-1]
    v = F.pad(v, (0, missing)) if missing > 0 else v
    options["enable_gqa"] = k.shape[1] != q.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **options)
    if is_plain(out) and out.requires_grad and "ScaledDotProduct" in out.grad_fn.name():
        out.grad_fn.register_hook(_refuse_second_derivatives)
    return out[..., :-missing] if missing > 0 else out


def _refuse_second_derivatives(
    grads: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """Under create_graph, let the derivative of a fused kernel's gradients raise an error."""
    if not torch.is_grad_enabled():
        return None
    return tuple(None if g is None else NoSecondDerivative.apply(g) for g in grads)


# --- the state ---------------------------------------------------------------------------------


class KVBuffer:
    """Preallocated buffers for the tensors of a :class:`SoftmaxState`.

    AXES: the axis of the tokens in each buffer. tokens: their capacity. used: the number of tokens
    written so far. Trap: only the newest state, with ``used`` tokens, may be extended in place, and
    a buffer made in inference mode only in that mode.
    """

    AXES = (2, 2, 1, 1, 2)

    def __init__(self, parts: Iterable[Tensor], tokens: int) -> None:
        """Allocate empty buffers for ``tokens`` tokens, with the other axes of ``parts``."""
        self.buffers = []
        for part, axis in zip(parts, self.AXES, strict=True):
            shape = list(part.shape)
            shape[axis] = tokens
            self.buffers.append(part.new_empty(shape))
        self.tokens, self.used = tokens, 0

    def at(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Return views of tokens ``first`` to ``last`` (exclusive) of every buffer."""
        pairs = zip(self.buffers, self.AXES, strict=True)
        return tuple(buffer.narrow(axis, first, last - first) for buffer, axis in pairs)

    def has(self, keys: Tensor, first: int) -> bool:
        """True if ``keys`` are a view of this buffer that starts at token ``first``."""
        if first + keys.shape[2] > self.tokens:
            return False
        own = self.buffers[0].narrow(2, first, keys.shape[2])
        return keys.data_ptr() == own.data_ptr() and keys.shape == own.shape

    def fits(self, seen: int, more: int) -> bool:
        """True if ``more`` tokens may be appended to a state of ``seen`` tokens."""
        writable = torch.is_inference_mode_enabled() or not self.buffers[0].is_inference()
        return writable and self.used == seen and seen + more <= self.tokens

    def append(self, parts: Iterable[Tensor], tokens: int) -> None:
        """Write ``tokens`` tokens after the used ones."""
        for place, part in zip(self.at(self.used, self.used + tokens), parts, strict=True):
            place.copy_(part)
        self.used += tokens


class SoftmaxState(NamedTuple):
    """State of causal softmax attention: all keys and values so far, and their tokens.

    Keys are encoded if the encoding is decomposable. The tensors may be views of ``buffer``, to
    which the next tokens are appended; see :func:`extend_state`. With a window it has the last keys
    only (:func:`last_tokens`), also in linear attention.
    """

    keys: Tensor  # B H S D
    values: Tensor  # B H S E
    positions: Tensor  # B S
    padding: Tensor  # B S, true where a key is padding
    sums: Tensor  # B H S, float64: sums of the log gates of all tokens so far; B 0 S without gates
    padded: bool = False  # True if a block had a padding mask
    counted: bool = True  # True if all positions count real tokens
    packed: bool = False  # True if a block had starts of documents, whose positions are 0
    buffer: KVBuffer | None = None
    first: int = 0  # the place of the first token in the buffer

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The five tensors without the buffer."""
        return self[:5]

    @property
    def tokens(self) -> Tokens:
        """The tokens of the keys."""
        counts = None if self.counted else (~self.padding).cumsum(-1) - 1
        padding = self.padding if self.padded else None
        sums = self.sums if self.sums.shape[1] else None
        segments = None
        if self.packed:
            segments = ((self.positions == 0) & ~self.padding).cumsum(-1)
        return Tokens(self.positions, counts, padding, segments, sums=sums)


def state_of(k: Tensor, v: Tensor, tokens: Tokens) -> SoftmaxState:
    """Return the state of one block of keys and values."""
    batch, length = k.shape[0], k.shape[2]
    padding, sums = tokens.padding, tokens.sums
    if padding is None:
        padding = torch.zeros(batch, length, dtype=torch.bool, device=k.device)
    if sums is None:
        sums = k.new_empty(batch, 0, length, dtype=torch.float64)
    positions = tokens.positions.expand(batch, length)
    flags = tokens.padding is not None, tokens.counts is None, tokens.segments is not None
    return SoftmaxState(k, v, positions, padding, sums, *flags)


def extend_state(past: SoftmaxState | None, new: SoftmaxState) -> SoftmaxState:
    """Return the state after the tokens of ``new``. ``past`` stays valid.

    Without gradients the tokens are appended to a preallocated buffer, whose capacity is doubled
    when it is full, so a token costs O(1) copies on average instead of O(S). With gradients all
    tensors are concatenated.
    """
    if past is None:
        return new
    flags = past.padded or new.padded, past.counted and new.counted, past.packed or new.packed
    if torch.is_grad_enabled():
        pairs = zip(past.parts, new.parts, strict=True)
        return SoftmaxState(*map(torch.cat, pairs, KVBuffer.AXES), *flags)
    seen, more = past.keys.shape[2], new.keys.shape[2]
    buffer, first = past.buffer, past.first
    own = buffer is not None and buffer.has(past.keys, first)
    if not own or not buffer.fits(first + seen, more):
        buffer, first = KVBuffer(past.parts, 2 * (seen + more)), 0
        buffer.append(past.parts, seen)
    buffer.append(new.parts, more)
    return SoftmaxState(*buffer.at(first, buffer.used), *flags, buffer, first)


def carry(state: SoftmaxState, transport: Transport | None) -> SoftmaxState:
    """Return the state whose keys a transport of the last T tokens has carried to its end.

    They change with every token, so that they are copied and not appended to a buffer.
    """
    if transport is None:
        return state
    return state._replace(keys=carried(state.keys, transport), buffer=None, first=0)


def last_tokens(state: SoftmaxState, count: int) -> SoftmaxState:
    """Return the state with the last ``count`` real tokens of each row, or all if they are fewer.

    Views of the buffer, so that a window needs O(count) memory; rows with padding are copied.
    """
    more = state.keys.shape[2] - count
    if more <= 0:
        return state
    pairs = list(zip(state.parts, KVBuffer.AXES, strict=True))
    if not state.padded:
        views = (part.narrow(axis, more, count) for part, axis in pairs)
        return SoftmaxState(*views, *state[5:9], state.first + more)
    order = (~state.padding).byte().argsort(dim=1, stable=True)[:, more:]  # B count: padding first
    axes = {4: order[:, None, :, None], 3: order[:, None], 2: order}
    parts = (part.take_along_dim(axes[part.dim()], axis) for part, axis in pairs)
    return SoftmaxState(*parts, *state[5:8])


def reorder_state(state: SoftmaxState, new_order: Tensor) -> SoftmaxState:
    """Return the state of the beams ``new_order`` (B',), int64 indices into the batch.

    The new buffer has the capacity of the old one.
    """
    if state.buffer is None:
        parts = (part.index_select(0, new_order) for part in state.parts)
        return SoftmaxState(*parts, *state[5:8])
    seen = state.keys.shape[2]
    first = (part[:1].expand(len(new_order), *part.shape[1:]) for part in state.parts)
    buffer = KVBuffer(first, state.buffer.tokens)
    for place, part in zip(buffer.at(0, seen), state.parts, strict=True):
        torch.index_select(part, 0, new_order, out=place)
    buffer.used = seen
    return SoftmaxState(*buffer.at(0, seen), *state[5:8], buffer)
