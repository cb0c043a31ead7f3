"""Transformer-XL's relative attention (Dai et al., 2019, Section 3.3 and Appendix B)."""

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.forms import ByToken
from lrpe_fairseq.encodings.core.networks import applied, key_projection
from lrpe_fairseq.encodings.core.options import EncodingSpec, query_scale
from lrpe_fairseq.encodings.core.positions import (
    BLOCKS,
    Lags,
    PositionCache,
    check_positions,
    known_lags,
)
from lrpe_fairseq.encodings.core.protocols import Card, ScoreEncoding
from lrpe_fairseq.encodings.rotations.cores import BASE
from lrpe_fairseq.encodings.scores.biases import pick
from lrpe_fairseq.kernels.conditions import may_read_values


class TransformerXL(ScoreEncoding):
    """score_st = q_s.k_t (a) + q_s.W R_(s-t) (b) + u.k_t (c) + v.W R_(s-t) (d), all over sqrt D.

    W (H D x H D, the paper's W_kR) maps the sinusoid R of width H D to position keys of every head.
    In the paper R is as wide as the model, which is H D wide unless ``head_dim`` is given. u and v
    (H, D) replace the query in the terms that must not depend on its position. W is initialized
    like a key projection of fairseq (Xavier, gain 1/sqrt 2), and u and v from N(0, 0.02^2).

    Terms (b) and (d) take one product with W R at every distance that occurs, as in Appendix B, and
    a gather. A causal model sets them to zero for keys after the query; the mask removes (a), (c).

    Trap: q is already scaled by D^-0.5, so u and v are scaled here, and W R is not.
    """

    card = Card(
        mechanism="content",
        equation=r"\frac{q_s^\top k_t + q_s^\top W R_{s-t} + u_h^\top k_t"
        r" + v_h^\top W R_{s-t}}{\sqrt D}",
        cost="a projection of S sinusoids, and O(T S D) per head for the second product",
        beyond="sinusoids of larger distances, which training has not seen",
        source="[Dai et al. (2019)](https://arxiv.org/abs/1901.02860), Section 3.3",
    )

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        generator = spec.generator("transformer-xl")
        width = spec.num_heads * spec.head_dim
        self.r_proj = key_projection(width, generator, bias=False)
        shape = (spec.num_heads, spec.head_dim)
        self.u = nn.Parameter(0.02 * torch.randn(shape, generator=generator, device="cpu"))
        self.v = nn.Parameter(0.02 * torch.randn(shape, generator=generator, device="cpu"))
        self._sinusoids = PositionCache(BLOCKS)

    def bias(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return the sum of terms (b), (c) and (d), (B, H, T, S), for q times ``query_scale``."""
        check_positions(q_positions, q)
        check_positions(k_positions, k)
        q, of_keys = self._content(q, k)
        if q.numel() == 0 or k.numel() == 0:
            return of_keys
        return of_keys + self._by_distance(q, q_positions, k_positions)

    def by_token(self, q: Tensor, k: Tensor, lags: Lags) -> ByToken:
        """Return q + u, and terms (b) and (d) by lag; see :meth:`ScoreEncoding.by_token`."""
        scale = self.softmax_scale
        width = self.r_proj.in_features

        def sinusoids() -> Tensor:
            return scale * sinusoid(torch.arange(lags[0], lags[1] + 1, device=q.device), width)

        r = self._sinusoids.get((), (lags, q.device), sinusoids)
        u, v = (x.to(q.dtype).unsqueeze(-2) for x in (self.u, self.v))
        return ByToken(q + u, lags[0], (q + v) @ self.position_keys(r, q.dtype).mT)

    def position_keys(self, r: Tensor, dtype: torch.dtype) -> Tensor:
        """Return W R for sinusoids r (..., N, H D): (..., H, N, D), or (H, T, S, D) for pairs."""
        keys = applied(self.r_proj, r, dtype).unflatten(-1, (self.spec.num_heads, -1))
        return keys.movedim(-2, 0 if r.dim() < 4 else 1)

    def _content(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q + v (B, H, T, D) and term (c) (B, H, 1, S), both scaled."""
        scale = query_scale(self.spec)
        u, v = (scale * self.u).to(q.dtype), (scale * self.v).to(q.dtype)
        return q + v.unsqueeze(-2), (k @ u.unsqueeze(-1)).mT

    def _by_distance(self, q: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Compute (b) + (d) with a product with W R at every distance that occurs, and a gather."""
        distance = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)
        after = (distance < 0).unsqueeze(-3)
        lags = known_lags(q_positions, k_positions)
        if self.spec.causal:
            distance = distance.clamp_min(0)
            if lags is not None:
                lags = max(0, lags[0]), max(0, lags[1])
        if lags is None and not may_read_values(distance):  # every pair, as in decoding by a graph
            keys = self.position_keys(sinusoid(distance, self.r_proj.in_features), q.dtype)
            scores = (q.unsqueeze(-2) @ keys.mT).squeeze(-2)
            return scores.masked_fill(after, 0.0) if self.spec.causal else scores
        occurring, index = _distinct_distances(distance, lags)
        r = sinusoid(occurring, self.r_proj.in_features)
        scores = pick(q @ self.position_keys(r, q.dtype).transpose(-1, -2), index)
        return scores.masked_fill(after, 0.0) if self.spec.causal else scores


def sinusoid(distance: Tensor, width: int) -> Tensor:
    """Return R = [sin(d w_i), cos(d w_i)] for int64 distances d (...): (..., width) float64.

    w_i = 10000^(-2i/width). An odd width has no last cosine. R is not stored in a buffer, because
    half precision would round it.
    """
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=distance.device) / width
    angle = distance.unsqueeze(-1).double() * BASE**-exponent
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[..., :width]


def _distinct_distances(distance: Tensor, lags: Lags | None) -> tuple[Tensor, Tensor]:
    """Return distances (N,) that include all of ``distance`` (..., T, S), and each pair's index.

    lags: their smallest and largest one, if that is known.
    """
    if lags is None:
        low, high = (int(end) for end in distance.aminmax())
    else:
        low, high = lags
    if high - low < sum(distance.shape[-2:]):  # true if padding is the only irregularity
        return torch.arange(low, high + 1, device=distance.device), distance - low
    return distance.unique(return_inverse=True)
