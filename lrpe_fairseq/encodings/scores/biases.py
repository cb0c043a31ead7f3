"""Helpers of score encodings: biases by lag, lookups by distance, and the keys that are counted.

Axes: B batch, H heads, T query time, S key time.
"""

import torch
from torch import Tensor

from lrpe_fairseq.encodings.core.forms import LOWEST
from lrpe_fairseq.encodings.core.options import EncodingSpec
from lrpe_fairseq.encodings.core.positions import (
    BLOCKS,
    PositionCache,
    check_positions,
    counted,
    known_lags,
)
from lrpe_fairseq.encodings.core.protocols import ScoreEncoding
from lrpe_fairseq.kernels.conditions import may_read_values


class LagBias(ScoreEncoding):
    """An additive bias that is a function of the lag n = s - t, defined by :meth:`of_lag`.

    The function is evaluated once for each lag, or once for each pair if that is cheaper.
    """

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        self._ends, self._lags = PositionCache(BLOCKS), PositionCache()

    def of_lag(self, lag: Tensor) -> Tensor:
        """Return the bias of every lag.

        Args:
            lag: the result of :meth:`fixed`; by default lags s - t, int64 of any shape.
        Returns: float32 or wider, (..., H).
        """
        raise NotImplementedError

    def bias(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return (H, T, S), or (B, H, T, S) for positions with a batch axis, in the dtype of q."""
        check_positions(q_positions, q)
        check_positions(k_positions, k)
        lag = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)
        wide = torch.promote_types(q.dtype, torch.float32)  # its gradient sums over pairs
        ends = known_lags(q_positions, k_positions)
        if ends is None and lag.numel() and may_read_values(lag):  # once for the same positions
            both = q_positions, k_positions
            ends = self._ends.get(both, None, lambda: (int(lag.min()), int(lag.max())))
        if ends is None or ends[1] - ends[0] >= lag.numel():
            bias = self.bias_of(lag).to(wide)
        else:
            bias = self.bias_of(torch.arange(ends[0], ends[1] + 1, device=lag.device))
            bias = bias.to(wide)[lag - ends[0]]
        return bias.to(q.dtype).movedim(-1, -3)

    def bias_by_lag(self, first: int, last: int, device: torch.device) -> Tensor | None:
        """Return the bias of every lag; see :meth:`ScoreEncoding.bias_by_lag`."""
        lags = counted(last + 1, device, first)
        fixed = self._lags.get(lags, None, lambda: self.fixed(lags))
        return self.of_lag(fixed).clamp_min(LOWEST).t()

    def fixed(self, lag: Tensor) -> Tensor:
        """Return the argument of :meth:`of_lag` for lags of any sign. It is cached, so parameters
        cannot affect it. Default: the lags, clamped to at least 0 in causal attention."""
        return lag.clamp_min(0) if self.spec.causal else lag

    def bias_of(self, lag: Tensor) -> Tensor:
        """Return :meth:`of_lag` for lags of any sign, clamped from below."""
        return self.of_lag(self.fixed(lag)).clamp_min(LOWEST)


def pick(table: Tensor, index: Tensor) -> Tensor:
    """Select one entry of a table per query for each key.

    Args:
        table: (B, H, T, R). index: int64 in [0, R), (T, S), (B, T, S) or (B, H, T, S).
    Returns: (B, H, T, S), table[b, h, t, index[..., t, s]].
    """
    index = index.unsqueeze(1) if index.dim() == 3 else index
    return table.gather(-1, index.expand(*table.shape[:3], index.shape[-1]))


def seen_keys(scores: Tensor, visible: Tensor | None, before: int = 0) -> Tensor:
    """Return the keys that count in causal attention, a bool mask broadcastable to (B, H, T, S).

    They are visible, and at least ``before`` columns before the query's own key, which is column
    S - T + i for row i. scores: (B, H, T, S), only for its shape and device.
    """
    rows, columns = scores.shape[-2:]
    earlier = torch.ones(rows, columns, dtype=torch.bool, device=scores.device)
    earlier = earlier.tril(columns - rows - before)
    return earlier if visible is None else visible & earlier
