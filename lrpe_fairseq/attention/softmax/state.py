"""The state of causal softmax attention: the keys and values so far, and their tokens.

Axes: B batch, H heads, S key time, D key width, E value width.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.attention.operators import carried
from lrpe_fairseq.attention.tokens import Tokens
from lrpe_fairseq.encodings.core.forms import Transport
from lrpe_fairseq.encodings.core.positions import known_range, with_known_range


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
        self.tokens = tokens
        self.used = 0

    def views(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Return views of tokens ``first`` to ``last`` (exclusive) of every buffer."""
        pairs = zip(self.buffers, self.AXES, strict=True)
        return tuple(buffer.narrow(axis, first, last - first) for buffer, axis in pairs)

    def has(self, keys: Tensor, first: int) -> bool:
        """True if ``keys`` are a view of this buffer that starts at token ``first``."""
        if first + keys.shape[2] > self.tokens:
            return False
        view = self.buffers[0].narrow(2, first, keys.shape[2])
        return keys.data_ptr() == view.data_ptr() and keys.shape == view.shape

    def fits(self, seen: int, more: int) -> bool:
        """True if ``more`` tokens may be appended to a state of ``seen`` tokens."""
        writable = torch.is_inference_mode_enabled() or not self.buffers[0].is_inference()
        return writable and self.used == seen and seen + more <= self.tokens

    def append(self, parts: Iterable[Tensor], tokens: int) -> None:
        """Write ``tokens`` tokens after the used ones."""
        views = self.views(self.used, self.used + tokens)
        for view, part in zip(views, parts, strict=True):
            view.copy_(part)
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
    first: int = 0  # the index of the first token in the buffer

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors with an entry for each token, in the order of ``KVBuffer.AXES``."""
        return self.keys, self.values, self.positions, self.padding, self.sums

    def with_parts(
        self, parts: Iterable[Tensor], buffer: KVBuffer | None = None, first: int = 0
    ) -> "SoftmaxState":
        """Return a state of other tokens with the same flags; see :attr:`parts`."""
        keys, values, positions, padding, sums = parts
        return self._replace(
            keys=keys,
            values=values,
            positions=positions,
            padding=padding,
            sums=sums,
            buffer=buffer,
            first=first,
        )

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
    padding = tokens.padding
    if padding is None:
        padding = torch.zeros(batch, length, dtype=torch.bool, device=k.device)
    sums = tokens.sums
    if sums is None:
        sums = k.new_empty(batch, 0, length, dtype=torch.float64)
    positions = tokens.positions.expand(batch, length)
    known = known_range(tokens.positions)
    if known is not None:
        with_known_range(positions, *known)
    return SoftmaxState(
        keys=k,
        values=v,
        positions=positions,
        padding=padding,
        sums=sums,
        padded=tokens.padding is not None,
        counted=tokens.counts is None,
        packed=tokens.segments is not None,
    )


def extend_state(past: SoftmaxState | None, new: SoftmaxState) -> SoftmaxState:
    """Return the state after the tokens of ``new``. ``past`` stays valid.

    Without gradients the tokens are appended to a preallocated buffer, whose capacity is doubled
    when it is full, so a token costs O(1) copies on average instead of O(S). With gradients, and in
    a compiled graph, which cannot ask where a tensor lies, all tensors are concatenated.
    """
    if past is None:
        return new
    after = new._replace(
        padded=past.padded or new.padded,
        counted=past.counted and new.counted,
        packed=past.packed or new.packed,
    )
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        pairs = zip(past.parts, new.parts, strict=True)
        return after.with_parts(map(torch.cat, pairs, KVBuffer.AXES))
    seen, more = past.keys.shape[2], new.keys.shape[2]
    buffer = past.buffer
    first = past.first
    in_buffer = buffer is not None and buffer.has(past.keys, first)
    # an older state, whose next tokens another one has written, is copied to a buffer of its own
    if not in_buffer or not buffer.fits(first + seen, more):
        buffer = KVBuffer(past.parts, 2 * (seen + more))
        first = 0
        buffer.append(past.parts, seen)
    buffer.append(new.parts, more)
    return after.with_parts(buffer.views(first, buffer.used), buffer, first)


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
        return state.with_parts(views, state.buffer, state.first + more)
    # rows have their padding at different tokens: each takes its last real ones
    order = (~state.padding).byte().argsort(dim=1, stable=True)[:, more:]  # B count: padding first
    axes = {4: order[:, None, :, None], 3: order[:, None], 2: order}
    parts = (part.take_along_dim(axes[part.dim()], axis) for part, axis in pairs)
    return state.with_parts(parts)


def reorder_state(state: SoftmaxState, new_order: Tensor) -> SoftmaxState:
    """Return the state of the beams ``new_order`` (B',), int64 indices into the batch.

    The new buffer has the capacity of the old one.
    """
    if state.buffer is None:
        parts = (part.index_select(0, new_order) for part in state.parts)
        return state.with_parts(parts)
    seen = state.keys.shape[2]
    # beams may outnumber the rows, and each writes to a buffer of its own
    shapes = (part[:1].expand(len(new_order), *part.shape[1:]) for part in state.parts)
    buffer = KVBuffer(shapes, state.buffer.tokens)
    for view, part in zip(buffer.views(0, seen), state.parts, strict=True):
        torch.index_select(part, 0, new_order, out=view)
    buffer.used = seen
    return state.with_parts(buffer.views(0, seen), buffer)
