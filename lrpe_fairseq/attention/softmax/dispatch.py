"""Softmax attention with any encoding: fused kernels where they serve it, else blocks of queries.

An encoding that changes q and k only uses torch's fused kernel for all queries at once. The flash
kernel serves a ``Form`` that is data: tables, decays, gates and biases of tokens. What else depends
on a pair is computed in ``blocks``. Whether a kernel supports the tensors of a call is decided in
``kernels.dispatch``.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

from typing import Any

import torch
from torch import Tensor

from lrpe_fairseq.attention.operators import score_blocks
from lrpe_fairseq.attention.softmax import blocks
from lrpe_fairseq.attention.softmax.blocks import Call, decay_sums
from lrpe_fairseq.attention.softmax.fused import fused_attention, softmax_attention, weighted
from lrpe_fairseq.attention.tokens import Tokens, lags_between, visible_pairs, window_is_in_slots
from lrpe_fairseq.attention.windows import is_cut, windows_of
from lrpe_fairseq.encodings.core.forms import Form
from lrpe_fairseq.encodings.core.positions import constant
from lrpe_fairseq.encodings.core.protocols import Encoding
from lrpe_fairseq.kernels import dispatch, loader
from lrpe_fairseq.kernels.conditions import without_autocast


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
    call = _call(encoding, queries, keys, causal, dropout)
    q = _with_factors(encoding, q)
    if not _reads_groups(q, k, v, queries, keys, call):
        k, v = (_of_all_heads(x, q) for x in (k, v))
    if queries.transport is not None:
        _log(encoding, "blocks of chunks", q)
        return blocks.carried_attention(q, k, v, queries, keys, call)
    out = _by_kernel(encoding, q, k, v, queries, keys, call)
    if out is not None:
        return out
    # a window that hides slots is cheaper in blocks than as a mask of all pairs
    window = keys.window if window_is_in_slots(queries, keys) else None
    plain = call.form.has_only() and queries.sums is None
    _log(encoding, "torch" if plain else "blocks of queries", q)
    if plain and window is None:
        return _plain(q, k, v, queries, keys, call)
    if is_cut(window):
        cut = windows_of(q.shape[2], k.shape[2], window)
        queries, keys = cut.cut_tokens(queries, keys, len(q))
        call = _call(encoding, queries, keys, causal, dropout)
        features = cut.cut(q), cut.cut_keys(k), cut.cut_keys(v)
        return cut.joined(blocks.one_block(*features, queries, keys, call))
    return blocks.attention_in_blocks(q, k, v, queries, keys, call, window)


def _by_kernel(
    encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, queries: Tokens, keys: Tokens, call: Call
) -> Tensor | None:
    """Compute :func:`encoded_attention` by a kernel; None if none serves it."""
    out = (_shares if call.form.shares else _flash)(q, k, v, queries, keys, call)
    if out is not None:
        _log(encoding, "triton", q)
        return out
    if _is_stick(queries, call) and keys.unmasked and not call.dropout:
        out = dispatch.tiled_stick_attention(q, k, v, call.scale)
        if out is not None:
            _log(encoding, "tiles", q)
    return out


def encoded_weights(
    encoding: Encoding, q: Tensor, k: Tensor, queries: Tokens, keys: Tokens, *, causal: bool
) -> Tensor:
    """Return the weights of :func:`encoded_attention`, (B, H, T, S) in q's dtype."""
    call = _call(encoding, queries, keys, causal, dropout=0.0)
    q = _with_factors(encoding, q)
    if queries.transport is None:
        scores = (q * call.scale) @ k.mT
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        limit = q.shape[2] * blocks.BLOCK  # one block
        ((*_, compute),) = score_blocks(q.to(wide), k.to(wide), queries.transport, limit)
        scores = call.scale * compute()
    terms = blocks.terms_of(q, k, queries, keys, call)
    return weighted(scores, visible_pairs(queries, keys, causal), q.dtype, terms)


def _reads_groups(
    q: Tensor, k: Tensor, v: Tensor, queries: Tokens, keys: Tokens, call: Call
) -> bool:
    """True if torch's own kernel computes the call, which repeats no heads in memory."""
    if k.shape[1] != v.shape[1] or queries.transport is not None or keys.window is not None:
        return False
    ours = q.shape[2] > 1 and dispatch.has_flash(q)
    return call.form.has_only() and queries.sums is None and not ours


def _of_all_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeat the heads of x (B, K, S, D) for those of q (B, H, T, D): (B, H, S, D)."""
    times = q.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _log(encoding: Encoding, kernel: str, q: Tensor) -> None:
    """Record what computes softmax attention with ``encoding``; see ``loader.log_served``."""
    loader.log_served(f"softmax attention of {encoding.name}", kernel, q.device.type)


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


def _plain(q: Tensor, k: Tensor, v: Tensor, queries: Tokens, keys: Tokens, call: Call) -> Tensor:
    """Compute attention whose scores are q k^T."""
    options = {"scale": call.scale, "dropout": call.dropout}
    square = q.shape[-2] == k.shape[-2]
    # torch's causal flag aligns the first query with the first key, which is ours for squares only
    if keys.unmasked and (square or not call.causal):
        return fused_attention(q, k, v, is_causal=call.causal, **options)
    only_padding = keys.segments is None and keys.window is None and keys.padding is not None
    if only_padding and not call.dropout and (square or not call.causal):
        out = dispatch.padded_attention(q, k, v, keys.padding, call.causal, call.scale)
        if out is not None:
            return out
    out = softmax_attention(q, k, v, visible=visible_pairs(queries, keys, call.causal), **options)
    if keys.unmasked and q.stride(2) > q.stride(0):  # stored as by the kernel for equal lengths
        return out.movedim(2, 0).contiguous().movedim(0, 2)
    return out


def _flash(
    q: Tensor, k: Tensor, v: Tensor, queries: Tokens, keys: Tokens, call: Call
) -> Tensor | None:
    """Compute :func:`encoded_attention` in the Triton kernel, or return None if it is not used.

    It is not used for a call that it does not support (:func:`_is_data`), for scores that torch's
    own kernel computes as fast, and for a single query.
    """
    if not dispatch.has_flash(q) or not _is_data(call.form) or not _has_slots(queries, keys):
        return None
    no_terms = call.form.has_only()
    plain = no_terms and queries.sums is None and keys.unmasked
    # torch's own kernel is as fast, unless v is narrower than q and k and would be padded
    if q.shape[2] == 1 or (plain and q.shape[3] == v.shape[3]):
        return None
    # the kernel counts lags in slots; a constant decay alone can be passed as gates, sums by token
    in_slots = (
        queries.first_slot is not None and keys.first_slot is not None and call.lags is not None
    )
    if not (no_terms or in_slots or _is_decay_as_gates(call)):
        return None
    data = _by_slot(call, q.shape[1]) if in_slots else {}
    if call.form.by_token is not None:
        q, data = _by_token(q, k, call, keys.window)
    decay = None if in_slots else call.form.decay
    return dispatch.flash_attention(
        q,
        k,
        v,
        causal=call.causal,
        scale=call.scale,
        dropout=call.dropout,
        gates=decay_sums(queries, keys, decay, len(q)),
        **_masks(queries, keys),
        **data,
    )


def _has_slots(queries: Tokens, keys: Tokens) -> bool:
    """True unless a window counts tokens with padding between them, which no kernel does."""
    return keys.window is None or window_is_in_slots(queries, keys)


def _is_decay_as_gates(call: Call) -> bool:
    """True if gates, which causal attention sums by token, describe the form completely."""
    form = call.form
    others = form.table is not None or form.score_decay is not None
    return call.causal and form.decay is not None and not others


def _is_data(form: Form) -> bool:
    """True if tables, fixed decays or per-token biases describe the form completely.

    An empty form counts: gates are in the tokens.
    """
    # the kernel has no gradients of decays
    if any(x is not None and x.requires_grad for x in (form.decay, form.score_decay)):
        return False
    if form.by_token is not None:
        return form.has_only("bias", "by_token")
    return form.has_only("table", "far", "decay", "score_decay")


def _shares(
    q: Tensor, k: Tensor, v: Tensor, queries: Tokens, keys: Tokens, call: Call
) -> Tensor | None:
    """Compute :func:`encoded_attention` of a form with ``shares`` in its own Triton kernel.

    None if that kernel does not support the call, and for a single query.
    """
    if not (_is_stick(queries, call) and _has_slots(queries, keys)) or q.shape[2] == 1:
        return None
    masks = _masks(queries, keys)
    return dispatch.stick_attention(q, k, v, scale=call.scale, dropout=call.dropout, **masks)


def _is_stick(queries: Tokens, call: Call) -> bool:
    """True if stick-breaking attention is all that the form describes."""
    alone = call.form.has_only("weigh", "shares") and queries.sums is None
    return call.causal and call.form.shares and alone


def _masks(queries: Tokens, keys: Tokens) -> dict[str, Any]:
    """Return what hides keys, as arguments of the kernels."""
    masks: dict[str, Any] = {"padding": keys.padding, "window": keys.window}
    if keys.segments is not None:
        masks["segments"] = queries.segments.int(), keys.segments.int()
    return masks


def _by_slot(call: Call, heads: int) -> dict[str, Any]:
    """Return the biases by lag (H, R), the smallest lag, and the decays (H,), all float32.

    A table that all heads share is repeated, so that its gradient is summed over them.
    """
    data: dict[str, Any] = {}
    for name in ("table", "decay", "score_decay"):
        term = getattr(call.form, name)
        if term is not None:
            data[name] = term.float().contiguous()
    if "table" in data:
        data["table"] = data["table"].expand(heads, -1).contiguous()
        data |= {"first_lag": call.lags[0], "far": call.form.far}
    return data


def _by_token(
    q: Tensor, k: Tensor, call: Call, window: int | None
) -> tuple[Tensor, dict[str, Any]]:
    """Return the queries, and biases by lag of every token as arguments of the kernel."""
    first, last = call.lags
    # only lags of visible pairs need a column
    if call.causal:
        first = max(first, 0)
    if window is not None:
        last = min(last, window - 1)
    with without_autocast(q):
        bias = call.form.by_token(q, k, (first, last))
    data = {"first_lag": bias.first_lag, "by_query": bias.by_query, "by_key": bias.by_key}
    return bias.q, data
