"""Relative position representations (Shaw, Uszkoreit and Vaswani, 2018)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.forms import ByToken
from lrpe_fairseq.encodings.core.options import MOST_ROWS, EncodingSpec, option
from lrpe_fairseq.encodings.core.positions import Lags, check_positions
from lrpe_fairseq.encodings.core.protocols import Card, ScoreEncoding
from lrpe_fairseq.encodings.scores.biases import pick


class Shaw(ScoreEncoding):
    """score_st = q_s.(k_t + w[clip(t - s, -K, K)]) / sqrt D, a learned vector w (D,) per distance.

    K is ``shaw_distance``. The table w is (2K + 1, D). A causal model needs the K + 1 rows with
    t <= s only. Each layer has a separate table, which its heads share, with Xavier's uniform
    distribution. q.w is computed for every row and gathered, so no tensor (T, S, D) is formed.

    The paper also adds such vectors to the values. They are left out here, as in LRPE's canonical
    version of this method (Appendix C.1).
    """

    @dataclass(frozen=True)
    class Options:
        """Options of Shaw's representations: the largest distance."""

        shaw_distance: int = option(
            16, "Shaw: all distances from this on share one vector", least=0, most=MOST_ROWS
        )

    card = Card(
        mechanism="content",
        equation=r"\frac{1}{\sqrt D}\, q_s^\top \left(k_t + w_{\mathrm{clip}(t - s, -K, K)}"
        r"\right)",
        cost="B H T (2 K + 1) D multiply-adds (causal: K + 1) and a gather of B H T S entries",
        beyond="All distances from K on share one vector; the order of such keys is lost.",
        source="[Shaw et al. (2018)](https://arxiv.org/abs/1803.02155), without vectors for values",
    )

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        self.distance = self.options.shaw_distance
        rows = self.distance + 1 if spec.causal else 2 * self.distance + 1
        table = torch.empty(rows, spec.head_dim, device="cpu")
        nn.init.xavier_uniform_(table, generator=spec.generator("shaw"))
        self.table = nn.Parameter(table)

    def bias(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return q_s.w of every pair, (B, H, T, S) in the dtype of q, which is scaled already."""
        check_positions(q_positions, q)
        check_positions(k_positions, k)
        index = self.row(k_positions.unsqueeze(-2) - q_positions.unsqueeze(-1))
        return pick(q @ self.table.to(q.dtype).mT, index)

    def by_token(self, q: Tensor, k: Tensor, lags: Lags) -> ByToken:
        """Return q_s.w by lag; see :meth:`ScoreEncoding.by_token`."""
        rows = (self.softmax_scale * self.table).to(q.dtype).flip(0)
        return ByToken(q, 0 if self.spec.causal else -self.distance, q @ rows.mT)

    def row(self, ahead: Tensor) -> Tensor:
        """Return the row of the table for t - s, int64 of any shape.

        In a causal model a key after the query is treated as distance 0; attention masks it.
        """
        last = 0 if self.spec.causal else self.distance
        return ahead.clamp(-self.distance, last) + self.distance
