"""Softmax attention through torch's scaled_dot_product_attention, its naive reference, its state.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.encodings.base import masked_softmax
from lrpe_fairseq.kernels.dispatch import is_plain, is_transformed

Rescore = Callable[[Tensor, Tensor | None], Tensor]
"""(scores, visible) -> scores, see ``ScoreEncoding.forward``."""

Weigh = Callable[[Tensor, Tensor | None, torch.dtype], Tensor]
"""(scores, visible, dtype) -> weights, see ``ScoreEncoding.weigh``."""


class KVBuffer:
    """Buffers with room for tokens to come, each (B, ., tokens, .) with its tokens on ``AXES``.

    ``used`` tokens of them belong to the newest state; only that one may be continued in place.
    """

    AXES = (2, 2, 1, 1)

    def __init__(self, parts: Iterable[Tensor], tokens: int) -> None:
        """KVBuffer for ``tokens`` tokens like ``parts``, with nothing in it."""
        self.buffers = []
        for part, axis in zip(parts, self.AXES, strict=True):
            shape = list(part.shape)
            shape[axis] = tokens
            self.buffers.append(part.new_empty(shape))
        self.tokens, self.used = tokens, 0

    def at(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Views of tokens ``first`` to ``last`` (exclusive) of every buffer."""
        pairs = zip(self.buffers, self.AXES, strict=True)
        return tuple(buffer.narrow(axis, first, last - first) for buffer, axis in pairs)

    def append(self, parts: Iterable[Tensor], tokens: int) -> tuple[Tensor, ...]:
        """Write ``tokens`` tokens after the used ones; views of all of them."""
        for place, part in zip(self.at(self.used, self.used + tokens), parts, strict=True):
            place.copy_(part)
        self.used += tokens
        return self.at(0, self.used)


class SoftmaxState(NamedTuple):
    """What causal softmax attention remembers: every key, encoded where that is possible.

    The tensors may be views of ``room``, in which the next tokens are written; see
    :func:`extend_state`.
    """

    keys: Tensor  # B H S D
    values: Tensor  # B H S E
    positions: Tensor  # B S
    padding: Tensor  # B S, true where a key is padding
    room: KVBuffer | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors alone."""
        return self[:4]


def extend_state(past: SoftmaxState | None, new: SoftmaxState) -> SoftmaxState:
    """The state after the tokens of ``new``; ``past`` stays as it is.

    Without gradients the tokens are written into room kept for them, which is doubled when it is
    full: a token costs O(1) copies on average, not O(S). With gradients all is copied.
    """
    if past is None:
        return new
    if torch.is_grad_enabled():
        pairs = zip(past.parts, new.parts, strict=True)
        return SoftmaxState(*map(torch.cat, pairs, KVBuffer.AXES))
    seen, more = past.keys.shape[2], new.keys.shape[2]
    room = past.room
    if room is None or room.used != seen or room.tokens < seen + more:
        room = KVBuffer(past.parts, 2 * (seen + more))
        room.append(past.parts, seen)
    return SoftmaxState(*room.append(new.parts, more), room)


def reorder_state(state: SoftmaxState, new_order: Tensor) -> SoftmaxState:
    """The state of beams ``new_order`` (B',), int64 indices into the batch; keeps as much room."""
    if state.room is None:
        return SoftmaxState(*(part.index_select(0, new_order) for part in state.parts))
    seen = state.keys.shape[2]
    first = (part[:1].expand(len(new_order), *part.shape[1:]) for part in state.parts)
    room = KVBuffer(first, state.room.tokens)
    for place, part in zip(room.at(0, seen), state.parts, strict=True):
        torch.index_select(part, 0, new_order, out=place)
    room.used = seen
    return SoftmaxState(*room.at(0, seen), room)


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
    """The definition, with the score matrix in memory; see :func:`softmax_attention`.

    Args (beyond those): rescore: maps the scaled scores (B, H, T, S) and the visible keys to new
        scores, for encodings that are not additive. weigh: maps scores, visible keys and a dtype
        to weights, 0 where not visible.
    """
    scores = (q * scale) @ k.transpose(-1, -2)
    scores = scores if bias is None else scores + bias
    visible = visible_keys(q, k, causal, key_padding_mask)
    scores = scores if rescore is None else rescore(scores, visible)
    return F.dropout(weigh(scores, visible, v.dtype), dropout) @ v


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
    """softmax(scale q k^T + bias) v by torch's fused kernels (LRPE, Eq. 2).

    Args:
        q, k, v: (B, H, T, D), (B, H, S, D), (B, H, S, E), already encoded.
        causal: query i of T sees keys 0 .. S - T + i, so that a block may follow a cache.
        scale: D^-0.5 of the *original* head width; encoded features may be wider.
        key_padding_mask: (B, S), true where a key is padding; or (B, T, S), where a query must
            not see it.
        dropout: on the attention weights, as in the paper (softmax only).
        bias: broadcastable to (B, H, T, S), added to the scaled scores.
    Returns: (B, H, T, E). A query that sees no key gets zeros, never NaN.
    Second derivatives need torch's own kernel, ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``;
        fused kernels have none and say so.
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


def visible_keys(
    q: Tensor, k: Tensor, causal: bool, key_padding_mask: Tensor | None
) -> Tensor | None:
    """Boolean (B or 1, 1, T, S), true where query may see key; None if everywhere."""
    rows, columns = q.shape[-2], k.shape[-2]
    allowed = None
    if causal and rows > 1:
        full = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
        allowed = full.tril(columns - rows)[None, None]
    if key_padding_mask is not None:
        hidden = key_padding_mask.bool()
        alive = ~(hidden if hidden.dim() == 3 else hidden.unsqueeze(1)).unsqueeze(1)
        allowed = alive if allowed is None else allowed & alive
    return allowed


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float
) -> Tensor:
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    return _fused(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)


def _fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's fused kernel, with v filled up by zeros to the width of q and k.

    Complex features make q and k wider than v, which only torch's slow kernel accepts.
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
    """Under create_graph, make the gradients of a fused kernel say that they have no derivative."""
    if not torch.is_grad_enabled():
        return None
    return tuple(None if g is None else _NoSecondDerivative.apply(g) for g in grads)


class _NoSecondDerivative(torch.autograd.Function):
    """The identity; its derivative is an error that says what to do."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError(
            "torch's fused softmax attention has no second derivative: run the forward pass under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )
