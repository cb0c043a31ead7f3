"""Stick-breaking attention (Tan et al., 2025): weights by recency in place of the softmax."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.forms import Form
from lrpe_fairseq.encodings.core.networks import log_sigmoid
from lrpe_fairseq.encodings.core.positions import Lags, check_positions
from lrpe_fairseq.encodings.core.protocols import Card, Properties, ScoreEncoding
from lrpe_fairseq.encodings.scores.biases import seen_keys


class StickBreaking(ScoreEncoding):
    """weight_st = b_st prod_(t<u<s) (1 - b_su) for t < s, with b = sigmoid(q_s.k_t / sqrt D).

    Read from the newest key to the oldest, each key takes the share b of what is left (Tan et al.,
    2025; the paper writes the key's index first). The query's own key takes nothing. The weights of
    a row sum to 1 - prod_(u<s) (1 - b_su), which is at most 1, and the first token attends to
    nothing. The remainder is not added to the output.

    The order is that of the keys in memory, not of positions. Hidden keys (padding) take nothing
    and leave the rest unchanged.

    Trap: adding a constant to all scores of a row changes the weights, unlike in a softmax.
    """

    causal_only = True
    properties = Properties(contextual=True)
    without_absolute = True
    card = Card(
        mechanism="content",
        equation=r"\beta_{st} \prod_{t<u<s} (1 - \beta_{su}), \quad \beta_{st} = "
        r"\sigma\!\left(q_s^\top k_t / \sqrt D\right), \quad t < s",
        cost="softplus, cumulative sum and exponential of B H T S entries; no parameters",
        beyond="The newest matching key wins at any distance. Keys behind it have almost no "
        "weight, so longer texts add little to a row that has a match.",
        source="[Tan et al. (2025)](https://arxiv.org/abs/2410.17980)",
    )

    def form(self, lags: Lags | None, positions: Tensor) -> Form:
        """Return :meth:`weigh`, marked as shares."""
        return Form(weigh=self.weigh, shares=True)

    def forward(
        self,
        scores: Tensor,
        q: Tensor,
        k: Tensor,
        q_positions: Tensor,
        k_positions: Tensor,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Return the scores unchanged; :meth:`weigh` defines the method."""
        check_positions(q_positions, q)
        check_positions(k_positions, k)
        return scores

    def weigh(self, scores: Tensor, visible: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return exp(log b_st + sum_(t<u<s) log(1 - b_su)), 0 for keys that are not before s.

        Computed in float32 or wider. A key that is not seen gets the lowest score, with which b is
        0 and log(1 - b) = -softplus(score) is 0. Shares below the smallest normal number, 1e-38
        in float32, become 0 without being computed: there torch's exp is ten times slower on a CPU.
        """
        wide = torch.promote_types(scores.dtype, torch.float32)
        seen = seen_keys(scores, visible, before=1)
        z = scores.to(wide).masked_fill(~seen, torch.finfo(wide).min)
        left = F.pad(F.softplus(z), (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)
        normal = torch.finfo(wide).tiny
        # the clamped shares lie between the number and the threshold, whichever way they round
        shares = (log_sigmoid(z) - left).clamp_min(math.log(normal) + 1e-5).exp()
        return F.threshold(shares, normal * (1 + 2e-5), 0.0).to(dtype)
