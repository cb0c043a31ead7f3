"""No relative encoding: the baseline ("Base" in LRPE, Table 2, with absolute positions only)."""

from torch import Tensor

from lrpe_fairseq.encodings.base import QueryKeyEncoding, check_positions


class NoEncoding(QueryKeyEncoding):
    """q~ = q, k~ = k. Costs nothing. Absolute positions may be added to the embeddings."""

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return q and k unchanged."""
        check_positions(q_positions, q), check_positions(k_positions, k)
        return q, k
