"""Contextual position encoding (CoPE; Golovneva, Wang, Weston and Sukhbaatar, 2024)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.options import MOST_ROWS, EncodingSpec, option
from lrpe_fairseq.encodings.core.positions import check_positions
from lrpe_fairseq.encodings.core.protocols import Card, Properties, ScoreEncoding
from lrpe_fairseq.encodings.scores.biases import pick, seen_keys


class CoPE(ScoreEncoding):
    """score_st + q_s.e[p_st] / sqrt D at the contextual position p_st = sum_(t<=u<=s) g_su.

    Keys are counted by the gates g_su = sigmoid(score_su), both ends included, and counts are
    limited to P - 1 with P = ``cope_positions``. The learned table e (P, D) is interpolated between
    floor(p) and ceil(p). Each layer has a separate table, which its heads share. It starts at zero.
    Only visible keys are counted, in the order of the keys in memory; positions are not used.

    Trap: where p is an integer (saturated gates, or the limit P - 1) it has no gradient.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of CoPE: the size of the table."""

        cope_positions: int = option(
            64,
            "CoPE: number of positions; larger counts share the last one",
            least=2,
            most=MOST_ROWS,
        )

    causal_only = True
    properties = Properties(contextual=True)
    card = Card(
        mechanism="content",
        equation=r"\frac{q_s^\top (k_t + e[p_{st}])}{\sqrt D}, \quad p_{st} = \min\left(P - 1, "
        r"\sum_{u=t}^{s} \sigma\!\left(\tfrac{q_s^\top k_u}{\sqrt D}\right)\right), "
        r"\quad e \text{ linear between whole } p",
        cost="B H T P D multiply-adds, and for B H T S entries a sigmoid, a cumulative sum and two "
        "gathers; P D parameters",
        beyond="Positions count the keys that the gates select, so they grow more slowly than the "
        "text. All counts from P - 1 on share one vector.",
        source="[Golovneva et al. (2024)](https://arxiv.org/abs/2405.18719)",
    )

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        count = self.options.cope_positions
        self.table = nn.Parameter(torch.zeros(count, spec.head_dim, device="cpu"))

    def forward(
        self,
        scores: Tensor,
        q: Tensor,
        k: Tensor,
        q_positions: Tensor,
        k_positions: Tensor,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Add q_s.e[p_st] to the scores; see :meth:`ScoreEncoding.forward`."""
        check_positions(q_positions, q)
        check_positions(k_positions, k)
        at = self.counts(scores, visible)
        by_position = q.to(at.dtype) @ self.table.to(at.dtype).mT  # B H T P
        low = at.floor()
        below, above = pick(by_position, self._row(low)), pick(by_position, self._row(at.ceil()))
        return scores + torch.lerp(below, above, at - low).to(scores.dtype)

    def _row(self, position: Tensor) -> Tensor:
        """Return the row of the table for a whole number, int64. NaN, in a model that diverged,
        must not become an index outside the table."""
        return position.long().clamp_(0, self.table.shape[0] - 1)

    def counts(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Return p (B, H, T, S), float32 or wider; its values for keys after s have no meaning."""
        wide = torch.promote_types(scores.dtype, torch.float32)
        hidden = ~seen_keys(scores, visible)
        gates = scores.to(wide).sigmoid().masked_fill(hidden, 0.0)
        counts = gates.flip(-1).cumsum(-1).flip(-1)
        return counts.clamp_max(self.table.shape[0] - 1)
