"""Linear attention on encoded features: naive, chunked, recurrent, bidirectional.

out_s = sum_t (q~_s . k~_t) v_t / den_s over the visible t (LRPE, Eq. 3 and 39). All functions take
the same arguments and give the same result. The naive one is the reference for the others. Which
kernel computes the sums is decided in ``kernels.dispatch``.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.attention.operators import carried_sums, channel_sums, score_blocks
from lrpe_fairseq.attention.softmax.blocks import BLOCK, block_of, decay_sums, query_blocks
from lrpe_fairseq.attention.tokens import Tokens, visible_pairs, window_is_in_slots
from lrpe_fairseq.attention.transport import reflected, scores_naive
from lrpe_fairseq.attention.windows import is_cut, windows_of
from lrpe_fairseq.encodings.core.companions import FLAGS, PADDING, REAL, check_companion
from lrpe_fairseq.encodings.core.forms import Transport
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels import dispatch
from lrpe_fairseq.kernels.conditions import without_autocast
from lrpe_fairseq.kernels.dispatch import LinearKernel
from lrpe_fairseq.kernels.linear import channels
from lrpe_fairseq.kernels.linear.causal import block_decay, decay_matrix, full_definition

NORMALIZERS = ("rotated", "bounded", "content", "layernorm", "none")
"""Denominators. ``rotated``: sum of the scores (Eq. 39). ``bounded``: the same, but at least
:data:`SHARE` of the sum of the scores without encoding, with their decay. ``content``: sum of the
scores without encoding and decay, as in RoFormer. ``layernorm``: no denominator, but a LayerNorm
follows (TMLR). ``none``: no denominator.
"""

SHARE = 1 / 16
"""Smallest denominator of ``bounded``, relative to the sum of the scores without encoding.

Scores without encoding are positive. Rotated scores have both signs and add up to less. Beyond the
training length their sum may fall below zero, and a quotient by :data:`EPS` has no use.
"""

EPS = 1e-6
"""Smallest denominator: smaller ones are clamped to it, as in the authors' code."""

LOWEST_DECAY = -1000.0
"""Smallest logarithm of a decay: exp(-1000) is 0 in float64, and float32 sums of a block of such
decays keep three decimals."""


class Rows(NamedTuple):
    """The checked arguments of linear attention, in one dtype; padded keys and values are zero."""

    q: Tensor
    """(B, H, T, D)."""
    k: Tensor
    """(B, H, S, D)."""
    v: Tensor
    """(B, H, S, E)."""
    content: tuple[Tensor, Tensor] | None
    """The features (q, k) without encoding if :func:`reads_content`, else None."""
    log_decay: Tensor | None
    """At least :data:`LOWEST_DECAY`, so that -inf gives no NaN."""


class LinearState(NamedTuple):
    """The complete state of linear attention, in float32 or wider.

    kv: (B, H, D, E) = sum_t k~_t v_t^T. keys: (B, H, D') = sum of the denominator's keys, not used
    without a denominator; of normalizer "bounded" the encoded keys, then those without encoding.
    """

    kv: Tensor
    keys: Tensor


def _without_autocast(function: Callable) -> Callable:
    """Disable autocast in ``function``, because it would round the sums."""

    @wraps(function)
    def call(q: Tensor, *args: Any, **options: Any) -> Any:
        with without_autocast(q):
            return function(q, *args, **options)

    return call


@_without_autocast
def linear_attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    normalizer: str = "rotated",
    content: tuple[Tensor, Tensor] | None = None,
    log_decay: Tensor | None = None,
    starts: Tensor | None = None,
    transport: Transport | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute the T x S definition in O(T S) time and memory; see :func:`linear_attention`.

    window: a query attends to the last ``window`` keys only, itself included (causal).
    """
    _check_documents(q, causal, starts, transport)
    q, k, v, content, log_decay = _prepare(
        q,
        k,
        v,
        causal=causal,
        padding=key_padding_mask,
        normalizer=normalizer,
        content=content,
        log_decay=log_decay,
    )

    def scores_of(q: Tensor, k: Tensor, transport: Transport | None, decays: bool) -> Tensor:
        scores = q @ k.mT if transport is None else scores_naive(q, k, transport)
        if decays and _by_feature(log_decay):
            scores = channels.scores_naive(q, k, decay_of_real_tokens(log_decay, key_padding_mask))
        elif decays:
            scores = scores * _factors(log_decay, q, causal, key_padding_mask)
        return _visible(scores, causal, window, starts)

    decays = log_decay is not None
    scores = scores_of(q, k, transport, decays)
    denominator = scores.sum(-1) if sums_encoded(normalizer) else None
    unencoded = None
    if content is not None:
        unencoded = scores_of(*content, None, decays and normalizer == "bounded").sum(-1)
    return _divide(scores @ v, at_least(denominator, unencoded))


@_without_autocast
def linear_attention_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tokens,
    keys: Tokens,
    *,
    normalizer: str = "rotated",
    content: tuple[Tensor, Tensor] | None = None,
    log_decay: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute causal linear attention to the last ``keys.window`` tokens, in O(T window) time.

    Args:
        q, k, v: (B, H, T, D), (B, H, S, D), (B, H, S, E), encoded features.
        queries, keys: their tokens, with the sums of gates. The queries are the last T keys.
        normalizer, content, dtype: as of :func:`linear_attention`. log_decay: (H,), per real token.
    Returns: (B, H, T, E), equal to :func:`linear_attention_naive` with this window.
    """
    dtype = dtype or v.dtype
    wide = torch.promote_types(v.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (q, k, v))
    if content is not None:
        content = tuple(x.to(wide) for x in content)
    # with padding between tokens the last keys are not in the last slots: all of them are computed
    window = keys.window if window_is_in_slots(queries, keys) else None
    if is_cut(window) and queries.transport is None:
        cut = windows_of(q.shape[2], k.shape[2], window)
        queries, keys = cut.cut_tokens(queries, keys, len(q))
        q, k, v = cut.cut(q), cut.cut_keys(k), cut.cut_keys(v)
        if content is not None:
            content = cut.cut(content[0]), cut.cut_keys(content[1])
        sums = decay_sums(queries, keys, log_decay, len(q))
        compute = partial(torch.matmul, q, k.mT)
        out = _window_block(q, k, v, queries, keys, content, sums, compute, normalizer)
        return _narrow(cut.joined(out), dtype, normalizer)
    sums = decay_sums(queries, keys, log_decay, len(q))
    blocks = []
    for rows, columns, compute in _score_blocks(q, k, queries.transport, window):
        of_block = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        tokens = queries.of(rows), keys.of(columns)
        pair = None if content is None else (content[0][:, :, rows], content[1][:, :, columns])
        of_pairs = None if sums is None else (sums[0][..., rows], sums[1][..., columns])
        blocks.append(_window_block(*of_block, *tokens, pair, of_pairs, compute, normalizer))
    return _narrow(torch.cat(blocks, 2), dtype, normalizer)


def _window_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tokens,
    keys: Tokens,
    content: tuple[Tensor, Tensor] | None,
    sums: tuple[Tensor, Tensor] | None,
    compute: Callable[[], Tensor],
    normalizer: str,
) -> Tensor:
    """Compute :func:`linear_attention_window` of one block; sums, compute: see :func:`_decayed`."""
    visible = visible_pairs(queries, keys, True)
    scores = _shown(_decayed(q, k, sums, compute), visible)
    denominator = scores.sum(-1) if sums_encoded(normalizer) else None
    unencoded = None
    if reads_content(normalizer):
        of_pairs = sums if normalizer == "bounded" else None
        plain = _decayed(*content, of_pairs, partial(torch.matmul, content[0], content[1].mT))
        unencoded = _shown(plain, visible).sum(-1)
    return _divide(scores @ v, at_least(denominator, unencoded))


def _decayed(
    q: Tensor, k: Tensor, sums: tuple[Tensor, Tensor] | None, compute: Callable[[], Tensor]
) -> Tensor:
    """Return the scores (B, H, T, S) of queries and keys with their decay.

    sums: of the log decays up to each query and key, (B, H, .), or (B, H D, .) of every feature;
    None without a decay. compute: the scores without it.
    """
    if sums is None:
        return compute()
    q_sums, k_sums = sums
    if q_sums.shape[1] > q.shape[1]:  # of every feature
        return channels.scores_between(q, k, q_sums, k_sums)
    exponent = q_sums.unsqueeze(-1) - k_sums.unsqueeze(-2)
    return compute() * exponent.clamp(LOWEST_DECAY, 0.0).exp().to(q)


def _score_blocks(
    q: Tensor, k: Tensor, transport: Transport | None, window: int | None
) -> Iterator[tuple[slice, slice, Callable[[], Tensor]]]:
    """Yield the blocks of ``operators.score_blocks``, or of q k^T without a transport."""
    if transport is not None:
        yield from score_blocks(q, k, transport, BLOCK, window)
        return
    limit = block_of(q, k, True, window)
    for rows, columns in query_blocks(q, k, True, limit, window):
        yield rows, columns, partial(torch.matmul, q[:, :, rows], k[:, :, columns].mT)


def _shown(scores: Tensor, visible: Tensor | None) -> Tensor:
    """Set the scores (B, H, T, S) of hidden keys to zero; visible: see :func:`visible_pairs`."""
    return scores if visible is None else scores.masked_fill(~visible, 0.0)


def _visible(scores: Tensor, causal: bool, window: int | None, starts: Tensor | None) -> Tensor:
    """Set the scores of keys that a query does not attend to to zero."""
    scores = scores.tril() if causal else scores
    if starts is not None:
        document = starts.cumsum(-1).unsqueeze(1)  # B 1 T
        scores = scores.masked_fill(document.unsqueeze(-1) != document.unsqueeze(-2), 0.0)
    return scores if window is None else scores.triu(1 - window)


@_without_autocast
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    normalizer: str = "rotated",
    content: tuple[Tensor, Tensor] | None = None,
    log_decay: Tensor | None = None,
    starts: Tensor | None = None,
    transport: Transport | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute linear attention in O(T) time and memory, for any T.

    Args:
        q, k, v: (B, H, T, D), (B, H, S, D), (B, H, S, E), encoded features; S = T if causal.
        causal: True if s attends to t <= s only. key_padding_mask: (B, S), true at keys to ignore.
        normalizer: one of :data:`NORMALIZERS`. Trap: with ``rotated`` a denominator may be near 0
            or negative (Type 8; texts longer than in training); it is clamped to :data:`EPS`.
        content: features (q, k) without encoding, of equal width, if :func:`reads_content`.
        log_decay: logarithm of a decay, at most 0; -inf means 0. The score of (s, t) is multiplied
            by exp(sum of log_decay over t+1..s). (H,): constant. (B, H, T): per token, causal only;
            set to 0 at padding. (B, H, T, D): of every feature, likewise; without a transport.
            Trap: in causal attention a constant decay counts every slot, padding included. In
            bidirectional attention the factor is exp(log_decay n), n the number of real tokens
            after the earlier of s, t, up to the later one; it needs S = T.
        starts: bool (B, T), true where a document begins (causal only): a decay of 0 before it.
        transport: of the T tokens, with w like encoded features (causal only); beta 0 at padding.
        dtype: of the result; None for that of ``v``. Sums without a denominator overflow float16.
    Returns: (B, H, T, E) in that dtype (float16 saturates). Sums are computed in float32 or wider.
        A query without a visible key gets zeros.
    Raises: ValueError for an unknown normalizer, incompatible arguments, or a tensor of another
        shape, dtype or device than it must have.
    """
    _check_documents(q, causal, starts, transport)
    dtype = dtype or v.dtype
    without_kernel = transport is not None or _by_feature(log_decay)
    _require_causal(log_decay, causal)
    kernel = None if without_kernel else dispatch.linear_kernel(q, v, log_decay, causal)
    options = {"causal": causal, "padding": key_padding_mask, "normalizer": normalizer}
    options |= {"content": content, "log_decay": log_decay, "widen": kernel is None}
    rows = _prepare(q, k, v, **options)
    if without_kernel:  # one block without a past
        state = _empty_state(rows, normalizer)
        return _block(rows, state, key_padding_mask, normalizer, starts, transport, dtype)[0]
    quotient = _Call(kernel, causal, key_padding_mask, starts).quotient(rows, normalizer)
    return _narrow(quotient, dtype, normalizer)


@_without_autocast
def linear_attention_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: LinearState | None,
    key_padding_mask: Tensor | None = None,
    normalizer: str = "rotated",
    content: tuple[Tensor, Tensor] | None = None,
    log_decay: Tensor | None = None,
    starts: Tensor | None = None,
    transport: Transport | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, LinearState]:
    """Compute causal attention of the next T >= 1 tokens from the state before them.

    Arguments are those of :func:`linear_attention` (causal) for this block only. ``state`` is None
    before the first token. Returns (B, H, T, E) and the state after the block. One token costs
    O(D E) at any position.
    """
    dtype = dtype or v.dtype
    _check_documents(q, True, starts, transport)
    rows = _prepare(
        q,
        k,
        v,
        causal=True,
        padding=key_padding_mask,
        normalizer=normalizer,
        content=content,
        log_decay=log_decay,
    )
    if state is None:
        state = _empty_state(rows, normalizer)
    else:
        _check_sums(state, rows.q, v.shape[-1])
    return _block(rows, state, key_padding_mask, normalizer, starts, transport, dtype)


@_without_autocast
def summed_memory(
    k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    normalizer: str = "rotated",
    content: Tensor | None = None,
) -> LinearState:
    """Return the sums over all S keys that :func:`attend_to_memory` reads.

    Arguments are those of :func:`linear_attention`; ``content`` holds the keys only. The state has
    a size that does not depend on S, so a sentence that is decoded needs no other memory of it.
    """
    rows = _prepare(
        k,
        k,
        v,
        causal=False,
        padding=key_padding_mask,
        normalizer=normalizer,
        content=None if content is None else (content, content),
        log_decay=None,
    )
    return LinearState(rows.k.mT @ rows.v, _counted_keys(rows, normalizer).sum(-2))


@_without_autocast
def attend_to_memory(
    q: Tensor,
    memory: LinearState,
    *,
    dtype: torch.dtype,
    normalizer: str = "rotated",
    content: Tensor | None = None,
) -> Tensor:
    """Compute bidirectional attention of q (B, H, T, D) to the keys of ``memory``.

    Equal to :func:`linear_attention` with ``causal=False`` and the arguments of
    :func:`summed_memory`. content: features of the queries without encoding, for normalizer
    ``content`` and ``bounded``. dtype: of the values, and of the result (B, H, T, E).
    Raises: ValueError for an unknown normalizer.
    """
    check_normalizer(normalizer)
    _check_sums(memory, q, None)
    q = q.to(memory.kv)
    encoded_keys, content_keys = _keys_of(memory, q, normalizer)
    encoded = None if encoded_keys is None else _scores_with(q, encoded_keys)
    unencoded = None if content_keys is None else _scores_with(content.to(q), content_keys)
    return _narrow(_divide(q @ memory.kv, at_least(encoded, unencoded)), dtype, normalizer)


def _scores_with(q: Tensor, keys: Tensor) -> Tensor:
    """Return the sums (B, H, T) of the scores of q (B, H, T, D) with summed keys (B, H, D)."""
    return (q @ keys.unsqueeze(-1)).squeeze(-1)


def reorder_state(state: LinearState, new_order: Tensor) -> LinearState:
    """Return the state of the beams ``new_order`` (B',), int64 indices into the batch."""
    return LinearState(*(part.index_select(0, new_order) for part in state))


# --- shared by all functions -------------------------------------------------------------------


def check_normalizer(normalizer: str) -> None:
    """Raise ChoiceError for a name that is not in :data:`NORMALIZERS`."""
    if normalizer not in NORMALIZERS:
        known = ", ".join(NORMALIZERS)
        raise ChoiceError(f"unknown normalizer {normalizer!r}; choose one of {known}")


def sums_encoded(normalizer: str) -> bool:
    """True if the denominators are sums of encoded scores."""
    return normalizer in ("rotated", "bounded")


def reads_content(normalizer: str) -> bool:
    """True if the denominators need the features without encoding."""
    return normalizer in ("content", "bounded")


def at_least(encoded: Tensor | None, unencoded: Tensor | None) -> Tensor | None:
    """Return the denominators (B, H, T) of a normalizer from the sums that it has.

    encoded: sums of the encoded scores. unencoded: sums of the scores without encoding. With both
    it is the first, but at least :data:`SHARE` of the second; without both None.
    """
    if encoded is None or unencoded is None:
        return unencoded if encoded is None else encoded
    return torch.maximum(encoded, SHARE * unencoded)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    padding: Tensor | None,
    normalizer: str,
    content: tuple[Tensor, Tensor] | None,
    log_decay: Tensor | None,
    widen: bool = True,
) -> Rows:
    """Check the arguments, convert to at least float32, and set padded keys to zero.

    Without ``widen`` q, k and v keep their dtype, because the kernel computes its sums in float32.
    Raises: ValueError; see :func:`linear_attention`.
    """
    check_normalizer(normalizer)
    if reads_content(normalizer) and content is None:
        raise ValueError(
            f"normalizer {normalizer!r} needs content=(q, k), the features before encoding"
        )
    _check_features(q, k, v, padding, log_decay)
    if causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"causal attention needs as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}"
        )
    if log_decay is not None and not causal:  # two causal sums, of the text and of its reverse
        _check_both_ways(q, k, log_decay)
    wide = torch.promote_types(v.dtype, torch.float32)
    dtype = wide if widen else v.dtype
    q, k, v = (
        q.to(dtype),
        zero_at_padding(k.to(dtype), padding),
        zero_at_padding(v.to(dtype), padding),
    )
    if reads_content(normalizer):
        _check_content(content, q, k, normalizer == "bounded" and _by_feature(log_decay))
        content_q, content_k = content
        content = content_q.to(wide), zero_at_padding(content_k.to(wide), padding)
    else:
        content = None
    log_decay = None if log_decay is None else log_decay.clamp_min(LOWEST_DECAY)
    return Rows(q, k, v, content, log_decay)


def zero_at_padding(rows: Tensor, padding: Tensor | None) -> Tensor:
    """Set the rows (B, H, S, .) of padding (B, S) to zero."""
    if padding is None:
        return rows
    return rows.masked_fill(padding.bool()[:, None, :, None], 0.0)


def _check_features(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, log_decay: Tensor | None
) -> None:
    """Check q (B, H, T, D) and what belongs to it; see :func:`linear_attention`.

    Only shapes, dtypes and devices are read, as in all checks of this module.
    """
    check_companion("q", q, REAL, "(B, H, T, D)", ((None,) * 4,), q)
    batch, heads, length, width = q.shape
    check_companion("k", k, REAL, "(B, H, S, D)", ((batch, heads, None, width),), q)
    keys = k.shape[2]
    check_companion("v", v, REAL, "(B, H, S, E)", ((batch, heads, keys, None),), q)
    if key_padding_mask is not None:
        shape = batch, keys
        check_companion("key_padding_mask", key_padding_mask, PADDING, "(B, S)", (shape,), q)
    if log_decay is not None:
        shapes = (heads,), (batch, heads, length), (batch, heads, length, width)
        axes = "(H,), (B, H, T) or (B, H, T, D)"
        check_companion("log_decay", log_decay, REAL, axes, shapes, q)


def _check_content(
    content: tuple[Tensor, Tensor], q: Tensor, k: Tensor, decays_by_feature: bool
) -> None:
    """Check the features without encoding of queries and keys; see :func:`linear_attention`."""
    content_q, content_k = content
    shape = (*q.shape[:3], q.shape[3] if decays_by_feature else None)
    check_companion("content[0]", content_q, REAL, "(B, H, T, D)", (shape,), q)
    shape = (*k.shape[:3], content_q.shape[-1])
    check_companion("content[1]", content_k, REAL, "(B, H, S, D)", (shape,), q)


def _check_documents(
    q: Tensor, causal: bool, starts: Tensor | None, transport: Transport | None
) -> None:
    """Check what belongs to the tokens of causal attention; see :func:`linear_attention`."""
    if transport is not None:
        if not causal:
            raise ValueError("a transport of keys needs causal=True")
        shape = tuple(q.shape)
        check_companion("transport.w", transport.w, REAL, "(B, H, T, D)", (shape,), q)
        check_companion("transport.beta", transport.beta, REAL, "(B, H, T)", (shape[:3],), q)
    if starts is not None:
        if not causal:
            raise ValueError("starts of documents need causal=True")
        shape = q.shape[0], q.shape[2]
        check_companion("starts", starts, FLAGS, "(B, T)", (shape,), q)


def _check_sums(state: LinearState, q: Tensor, width: int | None) -> None:
    """Check that a state belongs to the features q (B, H, T, D) and to values of this width."""
    batch, heads, _, features = q.shape
    shape = batch, heads, features, width
    check_companion("state.kv", state.kv, REAL, "(B, H, D, E)", (shape,), q)
    check_companion("state.keys", state.keys, REAL, "(B, H, D')", ((batch, heads, None),), q)


def _check_both_ways(q: Tensor, k: Tensor, log_decay: Tensor) -> None:
    """Refuse a decay that has no meaning in bidirectional attention."""
    if log_decay.dim() != 1:
        raise ValueError(
            "log_decay of shape (B, H, T) needs causal=True; in bidirectional attention pass a "
            "constant decay of shape (H,)"
        )
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"log_decay needs as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}"
        )


def _factors(log_decay: Tensor, q: Tensor, causal: bool, padding: Tensor | None) -> Tensor:
    """Return the factor of every score, (H, T, T) or (B, H, T, T); see :func:`linear_attention`."""
    length = q.shape[-2]
    if causal:
        return decay_matrix(decay_of_real_tokens(log_decay, padding), length, q)
    if padding is None:
        count = torch.arange(length, device=q.device)
    else:
        count = (~padding.bool()).cumsum(-1)[:, None]  # B 1 T
    lag = (count.unsqueeze(-1) - count.unsqueeze(-2)).abs()
    return torch.exp(log_decay.double()[:, None, None] * lag).to(q)


def _by_feature(log_decay: Tensor | None) -> bool:
    """True for a decay (B, H, T, D) of every feature."""
    return log_decay is not None and log_decay.dim() == 4


def _require_causal(log_decay: Tensor | None, causal: bool) -> None:
    """Raise ValueError for a decay of every feature without causal attention."""
    if _by_feature(log_decay) and not causal:
        raise ValueError("a decay of single features needs causal=True")


def decay_of_real_tokens(
    log_decay: Tensor | None, key_padding_mask: Tensor | None
) -> Tensor | None:
    """Set a decay per token to log 1 = 0 at padding. A constant decay is not changed."""
    if log_decay is None or log_decay.dim() == 1 or key_padding_mask is None:
        return log_decay
    hidden = key_padding_mask.bool().unsqueeze(1)
    return log_decay.masked_fill(hidden.unsqueeze(-1) if _by_feature(log_decay) else hidden, 0.0)


def with_cuts(log_decay: Tensor | None, starts: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the decay per token (B, H, T) that removes the state before every start.

    (B, H, T, D) for a decay of every feature.
    """
    if starts is None:
        return log_decay
    if _by_feature(log_decay):
        return torch.where(starts[:, None, :, None], LOWEST_DECAY, log_decay)
    if log_decay is None:
        log_decay = torch.zeros((), device=q.device)
    elif log_decay.dim() == 1:
        log_decay = log_decay[:, None]
    return torch.where(starts.unsqueeze(1), LOWEST_DECAY, log_decay).expand(q.shape[:3])


class _Call(NamedTuple):
    """What the sums of numerators and of denominators of one call share."""

    kernel: LinearKernel | None
    """The kernel of a GPU; None for C++ and the definitions."""
    causal: bool
    padding: Tensor | None
    starts: Tensor | None

    def quotient(self, rows: Rows, normalizer: str) -> Tensor:
        """Return the sums over all visible keys, divided as ``normalizer`` says."""
        wanted = {"rotated": "normalized", "bounded": "sums"}.get(normalizer, "numerator")
        out, denominator = self.sums(rows.q, rows.k, rows.v, wanted, rows.log_decay)
        unencoded = None
        if rows.content is not None:
            decay = rows.log_decay if normalizer == "bounded" else None
            # the kernels of a GPU need more than one column of values
            unencoded = self._replace(kernel=None).content_sums(*rows.content, decay)
        return _divide(out, at_least(denominator, unencoded))

    def sums(
        self, q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sums over all visible keys, and denominators if they are not divided yet.

        wanted: "normalized", "sums" for numerators and denominators, or "numerator".
        """
        if not self.causal and log_decay is not None:
            both_ways = _both_ways(log_decay, self.padding)
            out, denominator = _decayed_sums(self._causal_sums, q, k, v, *both_ways)
            return out, (None if wanted == "numerator" else denominator)
        if self.causal:
            log_decay = with_cuts(decay_of_real_tokens(log_decay, self.padding), self.starts, q)
            out, denominator = self._causal_sums(q, k, v, wanted, log_decay, EPS)
        elif self.kernel is not None:
            out, denominator = self.kernel.full_sums(q, k, v, wanted, EPS)
        else:
            dispatch.log_linear("pytorch", q)
            out, denominator = full_definition(q, k, v, wanted, EPS)
        return out, (denominator if wanted == "sums" else None)

    @property
    def _causal_sums(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        return dispatch.plain_causal_sums if self.kernel is None else self.kernel.causal_sums

    def content_sums(self, q: Tensor, k: Tensor, log_decay: Tensor | None) -> Tensor:
        """Return the sums (B, H, T) of the scores of features q and k without encoding."""
        if self.starts is not None or log_decay is not None:  # numerators of values of 1
            ones = torch.ones_like(k[..., :1])
            return self.sums(q, k, ones, "numerator", log_decay)[0].squeeze(-1)
        keys = k.cumsum(-2) if self.causal else k.sum(-2, keepdim=True)
        return (q * keys).sum(-1)


def _both_ways(log_decay: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the decay (H,) for a sweep from left to right and for one over the reversed text.

    With ``padding`` (B, T) both are per token, (B, H, T). The factor of (s, t) with t > s is the
    decay over s+1..t, which is the one over t+1..s of the reversed text shifted by a token.
    """
    if padding is None:
        return log_decay, log_decay
    real = (~padding.bool()).unsqueeze(1)
    ahead = log_decay.unsqueeze(-1) * real
    return ahead, torch.cat([torch.zeros_like(ahead[..., :1]), ahead.flip(-1)[..., :-1]], -1)


def _decayed_sums(
    causal_sums: Callable, q: Tensor, k: Tensor, v: Tensor, ahead: Tensor, back: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the decayed sums over all t: those over t <= s and t >= s, less those over t = s.

    ahead, back: the results of :func:`_both_ways`.
    """
    out, denominator = causal_sums(q, k, v, "sums", ahead, EPS)
    flipped = (x.flip(-2) for x in (q, k, v))
    later, later_denominator = causal_sums(*flipped, "sums", back, EPS)
    # a token's score with itself is in both sums
    diagonal = (q.to(out) * k.to(out)).sum(-1)
    out = out + later.flip(-2) - diagonal.unsqueeze(-1) * v.to(out)
    return out, denominator + later_denominator.flip(-1) - diagonal


def divided(
    numerator: Tensor, denominator: Tensor | None, dtype: torch.dtype, normalizer: str
) -> Tensor:
    """Return the quotient (B, H, T, E) in ``dtype``, as all forms of this module compute it."""
    return _narrow(_divide(numerator, denominator), dtype, normalizer)


def _divide(numerator: Tensor, denominator: Tensor | None) -> Tensor:
    if denominator is None:
        return numerator
    return numerator / denominator.clamp_min(EPS).unsqueeze(-1)


def _narrow(out: Tensor, dtype: torch.dtype, normalizer: str) -> Tensor:
    """Cast to ``dtype``. float16 saturates, and quotients saturate at 1/64 of its range.

    A denominator of :data:`EPS` (frequent for Type 8) gives values near 1e8, which overflow
    float16. The margin of 64 also keeps the following projection finite. Kernels
    may have cast already.
    """
    if dtype == torch.float16 and out.dtype != torch.float16:
        margin = 64 if sums_encoded(normalizer) or reads_content(normalizer) else 1
        limit = torch.finfo(dtype).max / margin
        out = out.clamp(-limit, limit)
    return out.to(dtype)


def _content_after(
    q: Tensor, k: Tensor, keys: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the sums (B, H, T) of scores without encoding, and the sum of keys after T.

    keys: (B, H, D), the sum of the keys before the block. log_decay: with the starts of documents.
    """
    if k.shape[-2] == 0:  # no token, no decay
        return (q * k).sum(-1), keys
    if log_decay is None:
        sums = keys.unsqueeze(-2) + k.cumsum(-2)
        return (q * sums).sum(-1), sums[..., -1, :]
    # they are numerators of values of 1
    ones = torch.ones_like(q[..., :1])
    before = LinearState(keys.unsqueeze(-1), keys)
    advance = _advance_by_one if q.shape[-2] == 1 else _advance
    out, _, after = advance(q, k, ones, before, log_decay, False, None)
    return out.squeeze(-1), after.kv.squeeze(-1)


def _counted_keys(rows: Rows, normalizer: str) -> Tensor:
    """Return the keys (B, H, S, D') whose sum a state holds."""
    if rows.content is None:
        return rows.k
    content_k = rows.content[1]
    return torch.cat([rows.k, content_k], -1) if sums_encoded(normalizer) else content_k


def _keys_of(state: LinearState, q: Tensor, normalizer: str) -> tuple[Tensor | None, Tensor | None]:
    """Return the sums of the keys with and without encoding that the normalizer reads, or None."""
    encoded, content = sums_encoded(normalizer), reads_content(normalizer)
    if encoded and content:
        return state.keys[..., : q.shape[-1]], state.keys[..., q.shape[-1] :]
    return (state.keys if encoded else None), (state.keys if content else None)


def _empty_state(rows: Rows, normalizer: str) -> LinearState:
    counted = _counted_keys(rows, normalizer)
    batch, heads, _, width = rows.q.shape
    kv = rows.q.new_zeros(batch, heads, width, rows.v.shape[-1])
    return LinearState(kv, rows.q.new_zeros(batch, heads, counted.shape[-1]))


# --- one step of the recurrence, for a block and for a token ------------------------------------


def _block(
    rows: Rows,
    before: LinearState,
    padding: Tensor | None,
    normalizer: str,
    starts: Tensor | None,
    transport: Transport | None,
    dtype: torch.dtype,
) -> tuple[Tensor, LinearState]:
    """Compute :func:`linear_attention_block` of checked arguments."""
    q, k, v, content, log_decay = rows
    log_decay = with_cuts(decay_of_real_tokens(log_decay, padding), starts, q)
    encoded_keys, content_keys = _keys_of(before, q, normalizer)
    before = before if encoded_keys is None else before._replace(keys=encoded_keys)
    # while generating: one token needs no chunks and no scores
    advance = _advance_by_one if q.shape[-2] == 1 else _advance
    numerator, encoded, after = advance(
        q, k, v, before, log_decay, encoded_keys is not None, transport
    )
    unencoded = None
    if content_keys is not None:
        decay = log_decay if normalizer == "bounded" else with_cuts(None, starts, q)
        unencoded, keys = _content_after(*content, content_keys, decay)
        keys = keys if encoded_keys is None else torch.cat([after.keys, keys], -1)
        after = after._replace(keys=keys)
    out = _divide(numerator, at_least(encoded, unencoded))
    return _narrow(out, dtype, normalizer), after


def _advance(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: LinearState,
    log_decay: Tensor | None,
    with_denominator: bool,
    transport: Transport | None,
) -> tuple[Tensor, Tensor | None, LinearState]:
    """Return numerator and denominator for a block of T tokens, and the state after it.

    Without a denominator the state's keys are not changed.
    """
    if transport is not None:
        return _advance_carried(q, k, v, before, log_decay, with_denominator, transport)
    if _by_feature(log_decay):
        return _advance_by_feature(q, k, v, before, log_decay, with_denominator)
    wanted = "sums" if with_denominator else "numerator"
    numerator, denominator = dispatch.plain_causal_sums(q, k, v, wanted, log_decay, EPS)
    kv, keys = before
    if log_decay is not None:
        by_token = log_decay
        if log_decay.dim() == 1:
            by_token = log_decay[:, None].expand(-1, q.shape[-2])
        decay = block_decay(by_token.double().cumsum(-1), q)
        # each factor is at most 1: a product of e^s and e^-t would overflow
        q, k, kv = q * decay.into, k * decay.out_of, kv * decay.whole
    numerator = numerator + q @ before.kv
    kv = kv + k.transpose(-1, -2) @ v
    if with_denominator:
        denominator = denominator + (q * keys.unsqueeze(-2)).sum(-1)
        keys = (keys if log_decay is None else keys * decay.whole.squeeze(-1)) + k.sum(-2)
    return numerator, denominator, LinearState(kv, keys)


def _advance_carried(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: LinearState,
    log_decay: Tensor | None,
    with_denominator: bool,
    transport: Transport,
) -> tuple[Tensor, Tensor | None, LinearState]:
    """Compute :func:`_advance` with a transport; the keys' sum is one more column of values."""
    kv, keys = before
    if with_denominator:  # one solve of the chunks serves both sums
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        kv = torch.cat([kv, keys.unsqueeze(-1)], -1)
    dispatch.log_linear("pytorch", q)
    out, kv = carried_sums(q, k, v, transport, log_decay, kv, LOWEST_DECAY)
    if not with_denominator:
        return out, None, LinearState(kv, keys)
    return out[..., :-1], out[..., -1], LinearState(kv[..., :-1], kv[..., -1])


def _advance_by_feature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: LinearState,
    log_decay: Tensor,
    with_denominator: bool,
) -> tuple[Tensor, Tensor | None, LinearState]:
    """Compute :func:`_advance` with a decay of every feature, (B, H, T, D)."""
    dispatch.log_linear("pytorch", q)
    if not with_denominator:
        out, kv = channel_sums(q, k, v, log_decay, before.kv)
        return out, None, LinearState(kv, before.keys)
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    kv = torch.cat([before.kv, before.keys.unsqueeze(-1)], -1)
    out, kv = channel_sums(q, k, v, log_decay, kv)
    return out[..., :-1], out[..., -1], LinearState(kv[..., :-1], kv[..., -1])


def _advance_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: LinearState,
    log_decay: Tensor | None,
    with_denominator: bool,
    transport: Transport | None,
) -> tuple[Tensor, Tensor | None, LinearState]:
    """Compute :func:`_advance` for T = 1, five times as fast: the state is updated first."""
    kv, keys = before
    if transport is not None:
        kv = reflected(kv.mT, transport).mT
        keys = reflected(keys.unsqueeze(2), transport).squeeze(2) if with_denominator else keys
    if log_decay is not None:
        rate = torch.exp(log_decay.to(q))  # H, B H 1, or B H 1 D
        rate = rate.unsqueeze(-1) if log_decay.dim() == 1 else rate
        rate = rate.squeeze(2) if _by_feature(log_decay) else rate  # B H D
        kv = kv * rate.unsqueeze(-1)
        keys = keys * rate if with_denominator else keys
    kv = torch.addcmul(kv, k.transpose(-1, -2), v)
    denominator = None
    if with_denominator:
        keys = keys + k.squeeze(-2)
        denominator = (q * keys.unsqueeze(-2)).sum(-1)
    return q @ kv, denominator, LinearState(kv, keys)
