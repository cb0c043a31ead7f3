"""GRAPE-AP (Zhang et al., 2026): a bias summed along the path from the key to the query."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.departures import Departure
from lrpe_fairseq.encodings.core.forms import LOWEST
from lrpe_fairseq.encodings.core.networks import as_stored, log_sigmoid
from lrpe_fairseq.encodings.core.options import EncodingSpec
from lrpe_fairseq.encodings.core.positions import check_positions, constant
from lrpe_fairseq.encodings.core.protocols import Card, Properties, ScoreEncoding
from lrpe_fairseq.encodings.rotations.cores import phases, rotate_pairs
from lrpe_fairseq.encodings.scores.biases import seen_keys
from lrpe_fairseq.encodings.scores.slopes import alibi_slopes
from lrpe_fairseq.kernels.conditions import without_autocast

WIDTH = 8
"""d, the width of the positional features of a head, as in the authors' code."""
EPS = torch.finfo(torch.float32).eps
"""Added to the mean square, as in the authors' code."""
FIXED_QUERY = "grape-ap-fixed-query"


class GrapeAP(ScoreEncoding):
    """score_st + sum_(t<l<=s) a_h log sigmoid(p_s^T R_(l-s) p_l / d), causal only.

    p = RMS(W_p x) are d = 8 further features of a head, of the input x of the layer. R_l turns each
    of their pairs by l radians, and a_h are ALiBi's slopes (Zhang et al., 2026, Section 5;
    model-architectures/GRAPE f5b539f3, ``model/llama-mha-grape-ap-v1.py``, lines 126-185). W_p
    starts from N(0, 0.25 / C) (``init_utils.py``, lines 41-50) and has no bias.

    The paper turns p_l only, by its position l, so that a bias depends on the position of the text.
    Here p_s is turned by s, too, so that the score is relative; see :attr:`departures`.

    Every query has its own sums, which start at the newest key: differences of sums from the
    oldest one, as in the authors' code, lose digits. The order of keys is that in memory. Hidden
    keys (padding) add nothing. With p_s = 0 it is ALiBi with slopes a_h ln 2.

    Attention keeps p beside the features of q and k: [q, p_s, 0] and [k, 0, R_t p_t], whose inner
    product is that of q and k. A state of decoding is 2 d numbers per key and head larger.
    """

    causal_only = True
    without_absolute = True
    departures: ClassVar = {
        FIXED_QUERY: Departure(
            paper="p_s R_l p_l with a query that does not turn (GRAPE, Eq. 5.1 and 5.2), so that "
            "the bias changes with the position of a text: by 8 % from position 0 to 1",
            code="the same, and p_s is not normalized",
            ours="p_s turns by s and is normalized: the bias depends on lags only",
        ),
    }
    keys_by_head = True
    card = Card(
        mechanism="content",
        equation=r"b_{st} = \sum_{l=t+1}^{s} a_h \log \sigma\!\left( p_s^\top R_{l-s}\, p_l / d "
        r"\right), \quad p = \mathrm{RMS}(W_p x)",
        cost="8 H C parameters; a second product of width 8, and a cumulative sum of B H T S "
        "entries",
        beyond="As a forget gate that the query sets too: far keys count as long as the path to "
        "them stays open.",
        source="[Zhang et al. (2026)](https://arxiv.org/abs/2512.07805), Section 5",
    )

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        self.fixed_query = FIXED_QUERY in spec.options.fidelity
        if self.fixed_query:
            self.properties = Properties(relative="no")
        width = spec.input_width
        draw = torch.randn(
            spec.num_heads * WIDTH, width, generator=spec.generator("grape-ap"), device="cpu"
        )
        self.weight = nn.Parameter(0.5 * width**-0.5 * draw)

    @property
    def feature_dim(self) -> int:
        """D + 2 d, the width of keys in a state."""
        return self.spec.head_dim + 2 * WIDTH

    def widened(self, x: Tensor, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return [q, p_s, 0] and [k, 0, R_t p_t]; see :meth:`ScoreEncoding.widened`."""
        check_positions(positions, q)
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        with without_autocast(x):
            p = as_stored(lambda x: F.linear(x, self.weight.to(wide)), x.to(wide))
            raw = p.unflatten(-1, (self.spec.num_heads, WIDTH)).transpose(1, 2)  # B H T d
            p = raw * raw.square().mean(-1, keepdim=True).add(EPS).rsqrt()
            once = constant((1.0,) * (WIDTH // 2), torch.float64, p.device)
            turned = rotate_pairs(p, phases(positions, once, wide))
        of_query = raw if self.fixed_query else turned
        zeros = torch.zeros_like(p)
        q = torch.cat([q, of_query.to(q.dtype), zeros.to(q.dtype)], -1)
        return q, torch.cat([k, zeros.to(k.dtype), turned.to(k.dtype)], -1)

    def forward(
        self,
        scores: Tensor,
        q: Tensor,
        k: Tensor,
        q_positions: Tensor,
        k_positions: Tensor,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Add the sums to the scores; q and k are :meth:`widened`. See :meth:`ScoreEncoding`."""
        check_positions(q_positions, q)
        check_positions(k_positions, k)
        wide = torch.promote_types(q.dtype, torch.float32)
        first = self.spec.head_dim
        of_query = q[..., first : first + WIDTH].to(wide) / self.softmax_scale
        of_key = k[..., first + WIDTH :].to(wide)
        slopes = constant(tuple(alibi_slopes(self.spec.num_heads)), wide, q.device)
        edges = slopes.view(-1, 1, 1) * log_sigmoid(of_query @ of_key.mT / WIDTH)
        edges = edges.masked_fill(~seen_keys(scores, visible), 0.0)
        later = F.pad(edges, (0, 1))[..., 1:]  # the key's own edge is not on the path
        return scores + later.flip(-1).cumsum(-1).flip(-1).clamp_min(LOWEST).to(scores.dtype)
