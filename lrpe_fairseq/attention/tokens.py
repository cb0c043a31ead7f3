"""The tokens of a call of attention: positions, padding, documents, gates, and what they see.

Axes: B batch, H heads, T query time, S key time, N tokens, C width.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.encodings.core.companions import (
    FLAGS,
    PADDING,
    REAL,
    check_by_token,
    check_companion,
)
from lrpe_fairseq.encodings.core.forms import Transport
from lrpe_fairseq.encodings.core.history import Earlier
from lrpe_fairseq.encodings.core.positions import (
    Lags,
    PositionCache,
    check_positions,
    counted,
    known_lags,
    known_range,
    with_known_range,
)


@dataclass
class Given:
    """What the next forward pass says of its tokens, shared by the layers of one stack.

    positions: int64 (T,) or (B, T) of the queries; None counts real tokens. memory_positions: of
    the memory of cross-attention. query_padding: (B, T), true at padding, of the queries of
    cross-attention. window: see :class:`Tokens`. one_sided: the padding of a row is all before or
    all after its tokens, as fairseq's batches have it. starts: bool (B, T), true at tokens that
    begin a document; None for one document. states: (B, H, T, D) of the encoding, after the layers
    before this one; None for those of its start. sequence: a ``parallel.SplitSequence`` if x is a
    part of a text over several processes.
    """

    positions: Tensor | None = None
    memory_positions: Tensor | None = None
    query_padding: Tensor | None = None
    window: int | None = None
    one_sided: bool = False
    starts: Tensor | None = None
    states: Tensor | None = None
    sequence: Any = None


class Tokens(NamedTuple):
    """N queries or keys of each of B sequences."""

    positions: Tensor
    """N or B N, int64."""
    counts: Tensor | None = None
    """N or B N, int64: real tokens before each token; None if the positions are these."""
    padding: Tensor | None = None
    """B N, true at padding, or None without padding."""
    segments: Tensor | None = None
    """B N, int: the document of each token, ascending. A query sees keys of its own only."""
    window: int | None = None
    """A query sees the last ``window`` keys only, itself included; padding does not count (causal
    attention)."""
    sums: Tensor | None = None
    """B H N, float64: sums of the log gates up to each token, or None without gates."""
    transport: Transport | None = None
    """The reflections of queries, which carry the keys before them; None without."""
    first_slot: int | None = None
    """The index of the first token in its row, if lags of positions are known to equal lags of
    indices, that is, without padding between tokens; otherwise None."""
    history: dict[str, Tensor | Earlier] | None = None
    """State (B, ...) of causal filters and sums after the preceding text, replaced in place by the
    state after these tokens. None: a whole text. An Earlier: tokens of other processes."""
    phases: Tensor | None = None
    """B H N E, float64: what the encoding reads instead of the positions; see
    :meth:`Encoding.phases`."""

    def of(self, part: slice) -> "Tokens":
        """Return the tokens of a slice, without phases: their features are encoded already.

        part: with a start and an end of 0 or more, or None.
        """
        every = self._replace(phases=None)._asdict().items()
        cut = {n: x[..., part] for n, x in every if isinstance(x, Tensor)}
        length = self.positions.shape[-1]
        # slice.indices would fix the length in a compiled graph
        first = min(part.start or 0, length)
        last = length if part.stop is None else min(part.stop, length)
        # slices of counted positions are one object per range, so that encodings can cache by it
        known = known_range(self.positions)
        if known is not None and self.positions.dim() == 1:
            cut["positions"] = counted(known[0] + last, self.positions.device, known[0] + first)
        elif known is not None:
            with_known_range(cut["positions"], *known)
        if self.transport is not None:
            cut["transport"] = self.transport.of(part)
        first_slot = None if self.first_slot is None else self.first_slot + first
        return self._replace(**cut, first_slot=first_slot, phases=None)

    @property
    def read_by_encoding(self) -> Tensor:
        """The phases that the encoding computes from the text, or the positions."""
        return self.positions if self.phases is None else self.phases

    @property
    def unmasked(self) -> bool:
        """True if nothing but causality hides keys."""
        return self.padding is None and self.segments is None and self.window is None

    @property
    def starts(self) -> Tensor | None:
        """True at real tokens that begin a document, B N; None for one document."""
        if self.segments is None:
            return None
        first = self.positions == 0
        return first if self.padding is None else first & ~self.padding

    @property
    def real_counts(self) -> Tensor:
        """The number of real tokens before each token, N or B N."""
        return self.positions if self.counts is None else self.counts


class Names(NamedTuple):
    """What a caller's arguments are called, for the errors of :func:`check_tokens`."""

    x: str = "x"
    padding: str = "key_padding_mask"
    positions: str = "positions"


def check_tokens(
    x: Tensor,
    padding: Tensor | None = None,
    positions: Tensor | None = None,
    starts: Tensor | None = None,
    width: int | None = None,
    names: Names = Names(),
) -> None:
    """Check everything that belongs to the tokens of x (B, T, C), without reading a value.

    Args: padding, positions, starts: of :func:`tokens_of`. width: C; None for any.
    Raises: ValueError, in one sentence, for another shape, dtype or device than theirs.
    """
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{names.x} must be {REAL.words} of shape (B, T, C), got an object of type "
            f"{type(x).__name__}"
        )
    if x.dim() != 3 or not x.is_floating_point() or width not in (None, x.shape[2]):
        check_companion(names.x, x, REAL, "(B, T, C)", ((None, None, width),), x)
    if padding is not None:
        check_by_token(names.padding, padding, PADDING, x)
    if positions is not None:
        check_positions(positions, x, names.positions)
    if starts is not None:
        check_by_token("starts", starts, FLAGS, x)


def tokens_of(
    x: Tensor,
    padding: Tensor | None = None,
    before: Tensor | None = None,
    positions: Tensor | None = None,
    one_sided: bool = False,
    starts: Tensor | None = None,
    **more: Tensor | int | None,
) -> Tokens:
    """Return the tokens of a block x (B, T, C).

    Real tokens are counted first, then padding, which is masked. No value is read. The same
    positions object is returned for the same length, mask or starts, so that encodings can cache.
    Trap: the arguments are not checked; see :func:`check_tokens`.

    Args:
        padding: (B, T), true at padding, which may be anywhere.
        before: int64 (B,), the number of real tokens before the block; None: 0. With ``starts``
            those of the document that it continues.
        positions: int64 (T,) or (B, T); None counts. one_sided: see :class:`Given`.
        starts: bool (B, T); positions count from the last start on.
        more: further fields of :class:`Tokens`.
    """
    length = x.shape[1]
    device = x.device
    if padding is None:
        counts = counted(length, device)
    else:
        counts = _counts_of_mask.get(padding, None, partial(_count_real_first, padding))
    if before is not None:
        counts = before.unsqueeze(1) + counts
    padding = None if padding is None else padding.bool()
    if positions is not None:
        return Tokens(positions, counts, padding, **more)
    # padding on one side shifts all positions of a row alike, and lags not at all
    in_slots = before is None and (padding is None or one_sided)
    first_slot = 0 if in_slots else None
    if starts is None:
        return Tokens(counts, None, padding, first_slot=first_slot, **more)
    sources = (starts,) if padding is None else (starts, padding)
    find = partial(restarted, starts, padding, before)
    positions, segments = _documents.get(sources, None, find) if before is None else find()
    return Tokens(positions, counts, padding, segments, first_slot=first_slot, **more)


_counts_of_mask = PositionCache(2)  # of a source and a target
_documents = PositionCache()


def _count_real_first(padding: Tensor) -> Tensor:
    """Return the numbers (B, T) of the tokens of a mask (B, T), true at padding."""
    padding = padding.bool()
    real = ~padding
    # padding is counted after all real tokens: its positions are unique, and masked anyway
    after = real.sum(1, keepdim=True) + padding.cumsum(1)
    numbers = torch.where(padding, after, real.cumsum(1)) - 1
    return with_known_range(numbers, 0, padding.shape[1] - 1)


def restarted(
    starts: Tensor, padding: Tensor | None, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return positions and segments of :class:`Tokens`, (B, T) each, for ``starts``.

    A position is the number of real tokens since the start of the document. before: see
    :func:`tokens_of`.
    """
    real = torch.ones_like(starts) if padding is None else ~padding
    counts = real.cumsum(1) - real.long()  # real tokens before each
    counts = counts if before is None else counts + before.unsqueeze(1)
    starts = starts & real
    # the largest count of a start so far is that of the token's own document
    positions = counts - torch.where(starts, counts, 0).cummax(1).values
    if before is None:
        with_known_range(positions, 0, starts.shape[1])  # T, not T - 1: numbers may repeat
    return positions, starts.cumsum(1)


def tokens_after(x: Tensor, padding: Tensor | None, before: Tensor | None) -> Tensor:
    """Return the number of real tokens up to the end of the block x (B, T, C), int64 (B,)."""
    batch, length, _ = x.shape
    if padding is None:
        real = torch.full((batch,), length, device=x.device)
    else:
        real = (~padding.bool()).sum(1)
    return real if before is None else before + real


def lags_between(queries: Tokens, keys: Tokens) -> Lags | None:
    """Return the smallest and largest lag s - t, without reading; None if it is not known."""
    if queries.first_slot is None or keys.first_slot is None:
        return known_lags(queries.positions, keys.positions)
    rows, columns = queries.positions.shape[-1], keys.positions.shape[-1]
    first = queries.first_slot - keys.first_slot
    return (first - columns + 1, first + rows - 1) if columns else None


def lag_counts(queries: Tokens, keys: Tokens, causal: bool) -> Tensor:
    """Return the number of real tokens in t+1..s, int64 (T, S) or (B, T, S).

    For a key after the query it is 0 in a causal model, and that of s+1..t in a bidirectional one.
    """
    lag = queries.real_counts.unsqueeze(-1) - keys.real_counts.unsqueeze(-2)
    return lag.clamp_min(0) if causal else lag.abs()


def window_is_in_slots(queries: Tokens, keys: Tokens) -> bool:
    """True if the last n keys of a query are in its last n slots: no padding between tokens."""
    return keys.padding is None or (queries.first_slot is not None and keys.first_slot is not None)


def visible_pairs(queries: Tokens, keys: Tokens, causal: bool) -> Tensor | None:
    """Return a bool mask (B or 1, 1, T, S), true if the query may attend to the key.

    In causal attention the queries are the last T keys. None: every query sees every key.
    """
    rows, columns = queries.positions.shape[-1], keys.positions.shape[-1]
    window = keys.window
    by_slots = window_is_in_slots(queries, keys)
    visible = None
    if (causal and rows > 1) or window is not None:
        pairs = torch.ones(rows, columns, dtype=torch.bool, device=keys.positions.device)
        # the last T keys are those of the queries, so that the diagonal ends at the last of both
        pairs = pairs.tril(columns - rows) if causal else pairs
        if window is not None and by_slots:
            pairs = pairs.triu(columns - rows - window + 1)
        visible = pairs[None, None]
    if window is not None and not by_slots:
        visible = visible & (lag_counts(queries, keys, causal) < window).unsqueeze(-3)
    if keys.segments is not None:
        same = queries.segments.unsqueeze(-1) == keys.segments.unsqueeze(-2)
        visible = same.unsqueeze(1) if visible is None else visible & same.unsqueeze(1)
    if keys.padding is not None:
        real = ~keys.padding[:, None, None]
        visible = real if visible is None else visible & real
    return visible
