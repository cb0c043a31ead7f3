"""Softmax attention with torch's scaled_dot_product_attention, a naive reference, and the state.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.encodings.base import masked_softmax
from lrpe_fairseq.kernels.dispatch import is_plain, is_transformed

Rescore = Callable[[Tensor, Tensor | None], Tensor]
"""(scores, visible) -> scores; see ``ScoreEncoding.forward``."""

Weigh = Callable[[Tensor, Tensor | None, torch.dtype], Tensor]
"""(scores, visible, dtype) -> weights; see ``ScoreEncoding.weigh``."""


class KVBuffer:
    """Preallocated buffers for the tensors of a :class:`SoftmaxState`.

    AXES: the axis of the tokens in each buffer. tokens: their capacity. used: the number of tokens
    written so far. Trap: only the newest state, with ``used`` tokens, may be extended in place, and
    one of inference mode only in it.
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

    def fits(self, seen: int, more: int) -> bool:
        """True if ``more`` tokens may be appended to a state of ``seen`` tokens."""
        writable = torch.is_inference_mode_enabled() or not self.buffers[0].is_inference()
        return writable and self.used == seen and seen + more <= self.tokens

    def append(self, parts: Iterable[Tensor], tokens: int) -> tuple[Tensor, ...]:
        """Write ``tokens`` tokens after the used ones, and return views of all tokens."""
        for place, part in zip(self.at(self.used, self.used + tokens), parts, strict=True):
            place.copy_(part)
        self.used += tokens
        return self.at(0, self.used)


class SoftmaxState(NamedTuple):
    """State of causal softmax attention: all keys and values so far.

    Keys are encoded if the encoding is decomposable. The tensors may be views of ``buffer``, to
    which the next tokens are appended; see :func:`extend_state`.
    """

    keys: Tensor  # B H S D
    values: Tensor  # B H S E
    positions: Tensor  # B S
    padding: Tensor  # B S, true where a key is padding
    sums: Tensor  # B H S, float64: sums of the log gates of all tokens so far; B 0 S without gates
    buffer: KVBuffer | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The five tensors without the buffer."""
        return self[:5]


def extend_state(past: SoftmaxState | None, new: SoftmaxState) -> SoftmaxState:
    """Return the state after the tokens of ``new``. ``past`` stays valid.

    Without gradients the tokens are appended to a preallocated buffer, whose capacity is doubled
    when it is full, so a token costs O(1) copies on average instead of O(S). With gradients all
    tensors are concatenated.
    """
    if past is None:
        return new
    if torch.is_grad_enabled():
        pairs = zip(past.parts, new.parts, strict=True)
        return SoftmaxState(*map(torch.cat, pairs, KVBuffer.AXES))
    seen, more = past.keys.shape[2], new.keys.shape[2]
    buffer = past.buffer
    if buffer is None or not buffer.fits(seen, more):
        buffer = KVBuffer(past.parts, 2 * (seen + more))
        buffer.append(past.parts, seen)
    return SoftmaxState(*buffer.append(new.parts, more), buffer)


def reorder_state(state: SoftmaxState, new_order: Tensor) -> SoftmaxState:
    """Return the state of the beams ``new_order`` (B',), int64 indices into the batch.

    The new buffer has the capacity of the old one.
    """
    if state.buffer is None:
        return SoftmaxState(*(part.index_select(0, new_order) for part in state.parts))
    seen = state.keys.shape[2]
    first = (part[:1].expand(len(new_order), *part.shape[1:]) for part in state.parts)
    buffer = KVBuffer(first, state.buffer.tokens)
    for place, part in zip(buffer.at(0, seen), state.parts, strict=True):
        torch.index_select(part, 0, new_order, out=place)
    buffer.used = seen
    return SoftmaxState(*buffer.at(0, seen), buffer)


def softmax_attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    key_padding_mask: Tensor | None = None,
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
    options = {"bias": bias, "rescore": rescore, "weigh": weigh, "dtype": v.dtype}
    masks = {"causal": causal, "key_padding_mask": key_padding_mask}
    return F.dropout(softmax_weights(q, k, scale=scale, **masks, **options), dropout) @ v


def softmax_weights(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    scale: float,
    dtype: torch.dtype,
    key_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    rescore: Rescore | None = None,
    weigh: Weigh = masked_softmax,
) -> Tensor:
    """Return the weights (B, H, T, S) of :func:`softmax_attention_naive` in ``dtype``."""
    scores = (q * scale) @ k.transpose(-1, -2)
    scores = scores if bias is None else scores + bias
    visible = visible_keys(q, k, causal, key_padding_mask)
    scores = scores if rescore is None else rescore(scores, visible)
    return weigh(scores, visible, dtype)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    key_padding_mask: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale q k^T + bias) v with torch's fused kernels (LRPE, Eq. 2).

    Args:
        q, k, v: (B, H, T, D), (B, H, S, D), (B, H, S, E), already encoded.
        causal: True if query i of T attends to keys 0 .. S - T + i, so that a block may follow a
            cache.
        scale: D^-0.5 of the *original* head width. Encoded features may be wider.
        key_padding_mask: (B, S), true where a key is padding; or (B, T, S), true where a query
            must not attend to a key.
        dropout: on the attention weights, as in the paper (softmax only).
        bias: broadcastable to (B, H, T, S), added to the scaled scores.
    Returns: (B, H, T, E). A query without a visible key gets zeros, never NaN.
    Raises: RuntimeError for second derivatives, which fused kernels do not have. Use
        ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` for them.
    """
    if bias is not None and is_transformed():  # torch's fused kernel refuses a learned bias there
        masks = {"causal": causal, "key_padding_mask": key_padding_mask}
        return softmax_attention_naive(q, k, v, scale=scale, dropout=dropout, bias=bias, **masks)
    square = q.shape[-2] == k.shape[-2]
    if bias is None and key_padding_mask is None and (square or not causal):
        return _fused(q, k, v, dropout_p=dropout, is_causal=causal, scale=scale)
    allowed = visible_keys(q, k, causal, key_padding_mask)
    if allowed is None:
        return _attend(q, k, v, bias, dropout, scale)
    blind = ~allowed.any(-1, keepdim=True)
    mask = allowed | blind
    if bias is not None:
        mask = (bias + bias.new_zeros(mask.shape)).masked_fill(~mask, -torch.inf)
    return _attend(q, k, v, mask, dropout, scale).masked_fill(blind, 0.0)


def query_blocks(q: Tensor, k: Tensor, causal: bool, limit: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the T queries and the S keys with at most ``limit`` scores each.

    q: (B, H, T, D). k: (B, H, S, D). A block has R >= 1 rows with B H R S <= ``limit`` if R > 1.
    In causal attention its keys end at the key of its last query, so that the last R keys are
    those of the queries, as for the whole. There is one block, maybe empty, if T = 0.
    """
    batch, heads, rows, columns = *q.shape[:3], k.shape[2]
    step = max(1, limit // max(1, batch * heads * columns))
    for first in range(0, max(1, rows), step):
        last = min(first + step, rows)
        yield slice(first, last), slice(0, columns - rows + last if causal else columns)


def visible_keys(
    q: Tensor, k: Tensor, causal: bool, key_padding_mask: Tensor | None
) -> Tensor | None:
    """Return a bool mask (B or 1, 1, T, S), true if the query may attend to the key.

    Returns: None if every query may attend to every key.
    """
    rows, columns = q.shape[-2], k.shape[-2]
    allowed = None
    if causal and rows > 1:
        full = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
        allowed = full.tril(columns - rows)[None, None]
    if key_padding_mask is not None:
        hidden = key_padding_mask.bool()
        shown = ~(hidden if hidden.dim() == 3 else hidden.unsqueeze(1)).unsqueeze(1)
        allowed = shown if allowed is None else allowed & shown
    return allowed


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float
) -> Tensor:
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    return _fused(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)


def _fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call torch's fused kernel, with v padded with zeros to the width of q and k.

    Complex features make q and k wider than v, which only torch's slow kernel supports.
    """
    missing = q.shape[-1] - v.shape[-1]
    v = F.pad(v, (0, missing)) if missing > 0 else v
    out = F.scaled_dot_product_attention(q, k, v, **options)
    if is_plain(out) and out.requires_grad and "ScaledDotProduct" in out.grad_fn.name():
        out.grad_fn.register_hook(_refuse_second_derivatives)
    return out[..., :-missing] if missing > 0 else out


def _refuse_second_derivatives(
    grads: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """Under create_graph, let the derivative of a fused kernel's gradients raise an error."""
    if not torch.is_grad_enabled():
        return None
    return tuple(None if g is None else _NoSecondDerivative.apply(g) for g in grads)


class _NoSecondDerivative(torch.autograd.Function):
    """The identity map, whose derivative raises an error that says what to do."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError(
            "torch's fused softmax attention has no second derivative: run the forward pass under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )
