"""Disentangled attention (DeBERTa; He, Liu, Gao and Chen, 2021)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.forms import ByToken
from lrpe_fairseq.encodings.core.networks import Linear, applied, key_projection
from lrpe_fairseq.encodings.core.options import MOST_ROWS, EncodingSpec, option
from lrpe_fairseq.encodings.core.positions import (
    BLOCKS,
    Lags,
    PositionCache,
    check_positions,
    known_lags,
)
from lrpe_fairseq.encodings.core.protocols import Card, ScoreEncoding
from lrpe_fairseq.encodings.scores.biases import pick
from lrpe_fairseq.kernels.conditions import may_read_values


class DeBERTa(ScoreEncoding):
    """score_st = (q_s.k_t + q_s.Kr[d(s, t)] + k_t.Qr[d(t, s)]) / sqrt(3 D), Kr = P W_k, Qr = P W_q.

    P (2K, H D) is a learned table with K = ``deberta_distance``, and d(a, b) = clip(a - b + K, 0,
    2K - 1) is the row of a difference (so K - 1 and all larger differences share the last one). W_k
    and W_q (H D x H D, with bias) split their results into heads, as the content projections do.

    All layers share P, as in the paper. P is initialized from N(0, 0.02^2), W_k and W_q like
    fairseq's key projection (Xavier, gain 1/sqrt 2). Dropout of P, the log buckets and the shared
    projections of DeBERTa V2 and V3 are not part of this method.

    Trap: q is already scaled by (3 D)^-0.5, so the term of k_t is scaled here.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of DeBERTa: the largest distance."""

        deberta_distance: int = option(
            512,
            "DeBERTa: all distances from this on share one vector; the table has twice as many "
            "rows",
            least=1,
            most=MOST_ROWS,
        )

    content_scale = 3**-0.5
    shared = True
    card = Card(
        mechanism="content",
        equation=r"\frac{q_s^\top k_t + q_s^\top K^r_{\delta(s,t)} + k_t^\top Q^r_{\delta(t,s)}}"
        r"{\sqrt{3D}}, \quad \delta(a, b) = \mathrm{clip}(a - b + K, 0, 2K - 1)",
        cost="up to 4 K (H D)^2 multiply-adds for two projections of the table, 2 B H T 2 K D for "
        "products with it, and two gathers of B H T S entries",
        beyond="All distances from K on share one vector; the order of such keys is lost.",
        source="[He et al. (2021)](https://arxiv.org/abs/2006.03654), first version (V1)",
    )

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        self.distance = self.options.deberta_distance
        generator = spec.generator("deberta")
        width = spec.num_heads * spec.head_dim
        draw = torch.randn(2 * self.distance, width, generator=generator, device="cpu")
        self.table = nn.Parameter(0.02 * draw)
        self.key_proj = key_projection(width, generator, bias=True)
        self.query_proj = key_projection(width, generator, bias=True)
        self._ends = PositionCache(BLOCKS)

    def share_with(self, owner: "DeBERTa") -> None:
        """Use the table of ``owner``. Each layer keeps separate projections."""
        self.table = owner.table

    def bias(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return both terms of positions, (B, H, T, S). A causal model treats a key after the query
        as distance 0; attention masks it."""
        check_positions(q_positions, q)
        check_positions(k_positions, k)
        lag = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)
        lag = lag.clamp_min(0) if self.spec.causal else lag
        low, high = self.ends(q_positions, k_positions)
        of_queries = self._term(q, self.key_proj, lag, (low, high))
        k = self.softmax_scale * k
        ends = (-high, -low)
        return of_queries + self._term(k, self.query_proj, -lag.mT, ends).mT

    def by_token(self, q: Tensor, k: Tensor, lags: Lags) -> ByToken:
        """Return both terms of positions by lag; see :meth:`ScoreEncoding.by_token`."""
        first, last = (min(max(end, -self.distance), self.distance) for end in lags)
        lag = torch.arange(first, last + 1, device=q.device)
        of_queries = self._rows(self.key_proj, self.row(lag), q.dtype).permute(1, 2, 0)
        of_keys = self._rows(self.query_proj, self.row(-lag), k.dtype).permute(1, 2, 0)
        scale = self.softmax_scale
        return ByToken(q, first, q @ (scale * of_queries), k @ (scale * of_keys))

    def row(self, difference: Tensor) -> Tensor:
        """Return d of the difference a - b, int64 of any shape."""
        return (difference + self.distance).clamp(0, 2 * self.distance - 1)

    def ends(self, q_positions: Tensor, k_positions: Tensor) -> Lags:
        """Return bounds of s - t, between -K and K. The result is cached."""
        empty = not (q_positions.numel() and k_positions.numel())
        if empty or not may_read_values(q_positions, k_positions):
            return -self.distance, self.distance

        def compute() -> Lags:
            lags = known_lags(q_positions, k_positions)
            if lags is None:
                lags = (
                    int(q_positions.min() - k_positions.max()),
                    int(q_positions.max() - k_positions.min()),
                )
            least = 0 if self.spec.causal else -self.distance
            return tuple(min(max(end, least), self.distance) for end in lags)

        return self._ends.get((q_positions, k_positions), None, compute)

    def _term(self, x: Tensor, projection: Linear, difference: Tensor, ends: Lags) -> Tensor:
        """Return the product of x_a and the projected row d(a, b), (B, H, A, B').

        x: (B, H, A, D). difference: a - b, int64 (A, B') or (B, A, B'). ends: its bounds.
        """
        first, last = (min(end + self.distance, 2 * self.distance - 1) for end in ends)
        rows = self._rows(projection, slice(first, last + 1), x.dtype)
        index = self.row(difference) - first
        if index.shape[-1] == 1:  # one row for each x_a: less work than the products with all
            own = rows[index.squeeze(-1)].transpose(-3, -2)  # H A D or B H A D
            return (x * own).sum(-1, keepdim=True)
        return pick(x @ rows.permute(1, 2, 0), index)

    def _rows(self, projection: Linear, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Return projected rows of the table, (N, H, D)."""
        return applied(projection, self.table[rows], dtype).unflatten(-1, (self.spec.num_heads, -1))
