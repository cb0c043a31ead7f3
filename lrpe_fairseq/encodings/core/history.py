"""The tokens before each token: causal filters and shifts, over padding and in pieces.

Axes: B batch, T time, n number of earlier tokens, C width.
"""

import torch
from torch import Tensor


class Earlier:
    """Tokens before a piece that another process holds; in place of tensors of a history."""

    def tail(self, x: Tensor, count: int, padding: Tensor | None, starts: Tensor | None) -> Tensor:
        """Return the last ``count`` real tokens before x (B, T, C); see :func:`history`."""
        raise NotImplementedError

    def total(self, last: Tensor) -> Tensor:
        """Return a sum over all earlier tokens, given that over the tokens of this piece."""
        raise NotImplementedError


def history(
    x: Tensor,
    count: int,
    *,
    padding: Tensor | None = None,
    starts: Tensor | None = None,
    tail: Tensor | Earlier | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Return the ``count`` = n real tokens before each token, and the tail for the next piece.

    Args:
        x: a piece of a text, (B, T, C); T may be smaller than n.
        padding: bool (B, T), true at padding, which may be anywhere and is skipped; None: none.
        starts: bool (B, T), true at tokens that begin a document; None: x continues one document.
        tail: the tail that the previous piece returned, (B, n, C); None at the start of a text.
            Beam search selects its rows. Or an :class:`Earlier`.
    Returns: [x_(t-1), ..., x_(t-n)], (B, T, C) each, 0 before the start of the document, and the
        last n tokens of the last document, oldest first. Values at padding have no meaning.
    """
    order = None
    if isinstance(tail, Earlier):
        tail = tail.tail(x, count, padding, starts)
    # padding may stand anywhere: real tokens are brought together, filtered, and put back
    if padding is not None:
        padding = padding.bool()
        starts = None if starts is None else starts & ~padding
        order = padding.byte().argsort(dim=1, stable=True)  # real tokens first
        x = _picked(x, order)
        starts = None if starts is None else starts.gather(1, order)
    batch, length, width = x.shape
    tail = x.new_zeros(batch, count, width) if tail is None else tail
    if not length:
        return [x] * count, tail
    every = torch.cat([tail, x], 1)  # the piece with the n tokens before it
    past = [every[:, count - j : count - j + length] for j in range(1, count + 1)]
    real = length if padding is None else (~padding).sum(1, keepdim=True)
    slots = real - count + torch.arange(count, device=x.device).expand(batch, count)
    tail = _picked(every, slots + count)
    if starts is not None:
        slot = torch.arange(length, device=x.device)
        begin = torch.where(starts, slot, -count).cummax(1).values  # of the token's document
        past = [p.masked_fill((slot - begin < j + 1).unsqueeze(-1), 0) for j, p in enumerate(past)]
        tail = tail.masked_fill((slots < begin[:, -1:]).unsqueeze(-1), 0)
    if order is not None:
        back = order.argsort(dim=1)
        past = [_picked(p, back) for p in past]
    return past, tail


def _picked(x: Tensor, slots: Tensor) -> Tensor:
    """Return the tokens ``slots`` (B, N) of x (B, T, C)."""
    # take_along_dim would fix the length in a compiled graph
    return x.gather(1, slots.unsqueeze(-1).expand(-1, -1, x.shape[2]))


def causal_filter(
    x: Tensor,
    weight: Tensor,
    *,
    padding: Tensor | None = None,
    starts: Tensor | None = None,
    tail: Tensor | Earlier | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute y_t = sum_j weight_j x_(t-j), j = 0..n, per feature over real tokens.

    Args: x: (B, T, C). weight: (n + 1, C), that of the newest token first, unlike a convolution's.
        padding, starts, tail: of :func:`history`.
    Returns: (B, T, C), and the tail for the next piece.
    """
    past, tail = history(x, len(weight) - 1, padding=padding, starts=starts, tail=tail)
    y = weight[0] * x
    for w, earlier in zip(weight[1:], past, strict=True):
        y = y + w * earlier
    return y, tail
