"""ALiBi (Press, Smith and Lewis, 2022): attention with linear biases."""

import torch
from torch import Tensor

from lrpe_fairseq.encodings.core.positions import constant
from lrpe_fairseq.encodings.core.protocols import Card
from lrpe_fairseq.encodings.none import Unchanged
from lrpe_fairseq.encodings.scores.slopes import alibi_slopes


class ALiBi(Unchanged):
    """score_st - m_h n: a decay e^(-m_h) per token, with a fixed slope m_h per head.

    In softmax attention -m_h n is added to the scaled score (Section 3). Linear attention
    multiplies the score of its kernel by e^(-m_h n). A bidirectional model uses |n|, which the
    paper does not define. n counts real tokens, also with explicit positions.

    Trap: the slopes were designed for softmax attention. Linear attention keeps them, so that head
    0 of 4 has a half-life of 2.8 tokens. With normalizer "content" the denominator is not decayed,
    and the output of a head shrinks like 1/T.
    """

    without_absolute = True
    card = Card(
        mechanism="decay",
        equation=r"z_{st} - m_h\,|n|,\quad m_h = 2^{-8(h+1)/H} \text{ for } H = 2, 4, 8, \dots",
        cost="one bias (H, T, S) in softmax attention; in linear attention none",
        beyond="Designed for it: keys much farther than 1 / m_h have no weight at any length.",
        source="[Press, Smith and Lewis (2022)](https://arxiv.org/abs/2108.12409), Section 3",
    )

    def log_decay(self, device: torch.device | str = "cpu") -> Tensor:
        """Return -m_h, (H,) float32."""
        slopes = tuple(-m for m in alibi_slopes(self.spec.num_heads))
        return constant(slopes, torch.float32, torch.device(device))
