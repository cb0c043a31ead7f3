"""Sandwich (Chi, Fan, Rudnicky and Ramadge, 2023): the inner product of sinusoids as a bias."""

import torch
from torch import Tensor

from lrpe_fairseq.encodings.core.options import EncodingSpec
from lrpe_fairseq.encodings.core.protocols import Card
from lrpe_fairseq.encodings.rotations.cores import BASE
from lrpe_fairseq.encodings.scores.biases import LagBias
from lrpe_fairseq.errors import ChoiceError


class Sandwich(LagBias):
    """score_st + H / (8(h+1)) (sum_i cos(n w_i) - w/2), n = s - t, w_i = 10000^(-2i/w), i = 1..w/2.

    The sum is the inner product of two sinusoidal embeddings of width w = ``width``. The offset
    makes the bias 0 at n = 0 and negative elsewhere. Cosines are float64.

    Trap: the bias equals an inner product that is *added* to the score. Linear attention applies a
    feature map before the product and cannot use it.

    Raises: ChoiceError unless the width is even and positive.
    """

    without_absolute = True
    card = Card(
        mechanism="bias",
        equation=r"b_{st} = \frac{H}{8(h+1)} \Big( \sum_{i=1}^{w/2} "
        r"\cos\big(n \, 10000^{-2i/w}\big) - \frac{w}{2} \Big), \quad w = 128",
        cost="no parameters; O((T + S) w) cosines and one lookup per pair, O(H T S)",
        beyond="The bias falls about as log n, with oscillations; nothing is learned.",
        source="[Chi et al. (2023)](https://arxiv.org/abs/2212.10356)",
    )

    def __init__(self, spec: EncodingSpec, width: int = 128) -> None:
        super().__init__(spec)
        if width < 2 or width % 2:
            raise ChoiceError(f"the width of sandwich must be even and positive, got {width}")
        self._terms = width // 2

    def of_lag(self, lag: Tensor) -> Tensor:
        """Return the bias, which :meth:`fixed` has computed."""
        return lag

    def fixed(self, lag: Tensor) -> Tensor:
        """Return the bias of every lag, float64 (..., H)."""
        lag = super().fixed(lag)
        double = {"dtype": torch.float64, "device": lag.device}
        frequency = BASE ** -(torch.arange(1, self._terms + 1, **double) / self._terms)
        total = (lag.unsqueeze(-1) * frequency).cos().sum(-1) - self._terms
        heads = self.spec.num_heads
        factor = heads / (8 * torch.arange(1, heads + 1, **double))
        return total.unsqueeze(-1) * factor
