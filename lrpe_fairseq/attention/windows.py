"""Attention with a window as one batch of blocks, for compiled graphs of any length.

The T queries are cut into N blocks of R, which become rows of the batch. Each has the R keys of its
block and the R before them, so R is at least the window. Slots before and after the text are
padding. A loop over blocks would write the number of blocks into the graph.

Axes: B batch, H heads, T query time, S key time, N blocks, X anything.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.attention.tokens import Tokens
from lrpe_fairseq.kernels.conditions import is_exporting

ROWS = 64
"""R, if the window is shorter. Without a graph a block has as many queries."""


class Windows(NamedTuple):
    """Blocks of one call. rows: R. count: N. queries: T. earlier: S - T, keys before the first."""

    rows: int
    count: int
    queries: int
    earlier: int

    def cut(self, x: Tensor) -> Tensor:
        """Cut features of queries (B, H, T, X) into (B N, H, R, X)."""
        return _cut(x.movedim(2, 1), self.rows, self.count).transpose(1, 2)

    def cut_keys(self, x: Tensor) -> Tensor:
        """Cut features of keys (B, H, S, X) into (B N, H, 2 R, X)."""
        return self._pairs(x.movedim(2, 1), 0).transpose(1, 2)

    def joined(self, x: Tensor) -> Tensor:
        """Join blocks (B N, H, R, X) to (B, H, T, X)."""
        x = x.transpose(1, 2).unflatten(0, (-1, self.count)).flatten(1, 2)
        return x[:, : self.queries].transpose(1, 2)

    def cut_tokens(self, queries: Tokens, keys: Tokens, batch: int) -> tuple[Tokens, Tokens]:
        """Cut the tokens of T queries and S keys, B = ``batch``."""
        shown = keys.padding
        if shown is None:
            shown = keys.positions.new_zeros(batch, self.earlier + self.queries, dtype=torch.bool)
        in_slots = queries.first_slot is not None and keys.first_slot is not None
        of_queries = {
            name: _cut(x, self.rows, self.count) for name, x in _by_time(queries, batch).items()
        }
        of_keys = {name: self._pairs(x, 0) for name, x in _by_time(keys, batch).items()}
        for cut in (of_queries, of_keys):
            if "sums" in cut:
                cut["sums"] = cut["sums"].transpose(1, 2)
        of_keys["padding"] = self._pairs(shown, True)
        slots = (self.rows, 0) if in_slots else (None, None)
        return (
            queries._replace(**of_queries, first_slot=slots[0], phases=None),
            keys._replace(**of_keys, first_slot=slots[1], phases=None),
        )

    def _pairs(self, x: Tensor, value: float) -> Tensor:
        """Cut x (B, S, ...) into (B N, 2 R, ...), filled with ``value`` outside the text."""
        before = x.new_full((x.shape[0], self.rows, *x.shape[2:]), value)
        x = torch.cat([before, x], 1)[:, self.earlier :]
        blocks = _padded(x, (self.count + 1) * self.rows, value)
        blocks = blocks.unflatten(1, (self.count + 1, self.rows))
        return torch.cat([blocks[:, :-1], blocks[:, 1:]], 2).flatten(0, 1)


def is_cut(window: int | None) -> bool:
    """True for a window in a compiled graph. An export computes all T x S pairs at once."""
    return window is not None and torch.compiler.is_compiling() and not is_exporting()


def windows_of(queries: int, keys: int, window: int) -> Windows:
    """Return the blocks of T ``queries``, the last of S ``keys``."""
    rows = max(window, ROWS)
    return Windows(rows, (queries + rows - 1) // rows, queries, keys - queries)


def _by_time(tokens: Tokens, batch: int) -> dict[str, Tensor]:
    """Return what tokens have for each of N, (B, N) or (B, N, H)."""
    every = {name: getattr(tokens, name) for name in ("positions", "counts", "padding", "segments")}
    found = {n: x.expand(batch, x.shape[-1]) for n, x in every.items() if x is not None}
    return found if tokens.sums is None else {**found, "sums": tokens.sums.transpose(1, 2)}


def _cut(x: Tensor, rows: int, count: int) -> Tensor:
    """Cut x (B, T, ...) into (B N, R, ...), padded with zeros."""
    return _padded(x, count * rows, 0).unflatten(1, (count, rows)).flatten(0, 1)


def _padded(x: Tensor, length: int, value: float) -> Tensor:
    """Lengthen x (B, T, ...) to ``length`` tokens with ``value``."""
    missing = length - x.shape[1]
    return torch.cat([x, x.new_full((x.shape[0], missing, *x.shape[2:]), value)], 1)
