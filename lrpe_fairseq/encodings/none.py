"""No relative encoding: the baseline ("Base" in LRPE, Table 2, with absolute positions only)."""

from torch import Tensor

from lrpe_fairseq.encodings.core.positions import check_positions
from lrpe_fairseq.encodings.core.protocols import Card, QueryKeyEncoding


class Unchanged(QueryKeyEncoding):
    """q~ = q, k~ = k. A subclass may have a decay."""

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return q and k unchanged."""
        check_positions(q_positions, q)
        check_positions(k_positions, k)
        return q, k


class NoEncoding(Unchanged):
    """q~ = q, k~ = k. Costs nothing. Absolute positions may be added to the embeddings."""

    card = Card(
        mechanism="none",
        equation=r"q_s^\top k_t",
        cost="none",
        beyond="nothing; without absolute positions only the causal mask carries the order",
        source="the row Base of [LRPE](https://openreview.net/forum?id=xMWFqb5Uyk), Table 2",
    )
    reads_nodes = True  # it reads no positions

    @property
    def softmax_scale(self) -> float:
        """``score_scale``, or D^-0.5, as stock attention has under every departure."""
        own = self.spec.score_scale
        return self.spec.head_dim**-0.5 if own is None else own
