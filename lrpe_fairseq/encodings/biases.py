"""Helpers of score encodings: biases that depend on the lag only, and lookups by distance.

Axes: B batch, H heads, T query time, S key time.
"""

import torch
from torch import Tensor

from lrpe_fairseq.encodings.base import ScoreEncoding, check_positions
from lrpe_fairseq.kernels.dispatch import has_values

LOWEST = -3e4
"""Smallest bias: exp(-3e4) is 0 in every floating dtype, and float16 can represent -3e4."""


class LagBias(ScoreEncoding):
    """An additive bias that is a function of the lag n = s - t, defined by :meth:`of_lag`.

    The function is evaluated once for each different lag, O(T + S) times, if that is cheaper than
    once for each pair.
    """

    def of_lag(self, lag: Tensor) -> Tensor:
        """Return the bias of every lag.

        Args:
            lag: int64 of any shape. At least 0: n in causal attention, |n| in bidirectional.
        Returns: float32 or wider, (*lag.shape, H).
        """
        raise NotImplementedError

    def bias(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return (H, T, S), or (B, H, T, S) for positions with a batch axis, in the dtype of q."""
        check_positions(q_positions, q), check_positions(k_positions, k)
        lag = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)
        lag = lag.clamp_min(0) if self.spec.causal else lag.abs()
        return self._by_lag(lag).clamp_min(LOWEST).to(q.dtype).movedim(-1, -3)

    def _by_lag(self, lag: Tensor) -> Tensor:
        """Return ``of_lag(lag)``, evaluated on the range of the lags if that is smaller."""
        if lag.numel() == 0 or not has_values(lag):
            return self.of_lag(lag)
        first, last = int(lag.min()), int(lag.max())
        if last - first >= lag.numel():
            return self.of_lag(lag)
        table = self.of_lag(torch.arange(first, last + 1, device=lag.device))
        return table[lag - first]


def pick(table: Tensor, index: Tensor) -> Tensor:
    """Select one entry of a table per query for each key.

    Args:
        table: (B, H, T, R). index: int64 in [0, R), (T, S), (B, T, S) or (B, H, T, S).
    Returns: (B, H, T, S), table[b, h, t, index[..., t, s]].
    """
    index = index.unsqueeze(1) if index.dim() == 3 else index
    return table.gather(-1, index.expand(*table.shape[:3], index.shape[-1]))
