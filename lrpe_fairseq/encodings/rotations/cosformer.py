"""cosFormer (Qin et al., 2022): linear attention whose weights fall as a cosine of the distance."""

import math
from dataclasses import dataclass

import torch

from lrpe_fairseq.encodings.core.options import LONGEST, EncodingSpec, option
from lrpe_fairseq.encodings.core.protocols import Card
from lrpe_fairseq.encodings.rotations.cores import Unitary
from lrpe_fairseq.encodings.rotations.lrpe import LRPE


@dataclass(frozen=True)
class CosFormerOptions:
    """Options of cosFormer."""

    cosformer_length: int = option(
        4096,
        "cosFormer: M, the distance at which the weight is 0; set it to at least the length of the "
        "longest text, also of those that are only evaluated",
        least=1,
        most=LONGEST,
    )


class CosFormer(LRPE):
    """score_st = q_s.k_t cos(pi (s - t) / 2M): the unitary core of LRPE with one angle pi / 2M.

    The cosine of a difference decomposes (cosFormer, Section 3.2, Eq. 9-10):

        q~_s = [q_s cos(a s), q_s sin(a s)], k~_t likewise, a = pi / 2M.

    This is LRPE with P = I and Lambda^(s) = exp(i a s) I (LRPE, C.1). The feature map is 1 + elu;
    the paper's is ReLU. In softmax attention the cosine multiplies q.k before the softmax, which
    the paper does not do.

    M = ``cosformer_length`` is fixed: the authors' causal code takes M from the length of its
    input, so that a further token changes all earlier outputs.

    Trap: beyond distance M the score is negative, and the denominator of Eq. 39 can vanish. With M
    much larger than the text all weights are close to 1, as without an encoding.
    """

    Options = CosFormerOptions
    card = Card(
        mechanism="rotation",
        equation=r"q_s^\top k_t \cos\frac{\pi n}{2M}",
        cost="features of width 2D",
        beyond="No promise beyond M: the score is 0 at distance M and negative from there to 3M.",
        source="[Qin et al. (2022)](https://arxiv.org/abs/2202.08791), cosFormer, Section 3.2",
    )

    def __init__(self, spec: EncodingSpec) -> None:
        length = spec.options.of(CosFormerOptions).cosformer_length
        angle = math.pi / (2 * length)
        theta = torch.full((spec.head_dim,), angle, dtype=torch.float64, device="cpu")
        super().__init__(spec, "identity", Unitary(spec, theta))
        self.scales = ""  # M is its length
