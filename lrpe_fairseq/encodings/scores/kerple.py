"""KERPLE (Chi, Fan, Ramadge and Rudnicky, 2022): logarithmic and power biases of the lag."""

from typing import ClassVar

import torch
from torch import Tensor

from lrpe_fairseq.encodings.core.options import EncodingSpec
from lrpe_fairseq.encodings.core.parameters import undecayed
from lrpe_fairseq.encodings.core.protocols import Card
from lrpe_fairseq.encodings.scores.biases import LagBias
from lrpe_fairseq.kernels.conditions import is_transformed

SMALLEST = 0.01
"""The smallest value of r1 and r2, as in the authors' code."""


class Kerple(LagBias):
    """A bias with two positive parameters r1 and r2 per head, which all layers share.

    As in the authors' code, the parameters are r1 and r2 themselves, without weight decay, and the
    forward pass clamps them. They are float32 (H,) and start from U(0, 1) times :attr:`largest`.

    Traps: the paper's first equation divides the bias by sqrt D together with q.k, but its code
    adds the bias to the scaled score. This class follows the code; r1 absorbs the factor. With half
    types the float32 copies that the optimizer updates are not clamped.
    """

    shared = True
    without_absolute = True
    stream: ClassVar[str]
    """The stream of the spec's generator."""
    largest: ClassVar[tuple[float, float]]
    """Upper ends of the uniform distributions that r1 and r2 start from."""
    largest_r2: ClassVar[float | None] = None
    """Upper limit of r2 in training."""

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        generator = spec.generator(self.stream)
        draw = torch.rand(2, spec.num_heads, generator=generator, dtype=torch.float64, device="cpu")
        self.r1, self.r2 = (
            undecayed((end * part).float(), by_any_adam=True)
            for end, part in zip(self.largest, draw, strict=True)
        )

    def share_with(self, owner: "Kerple") -> None:
        """Use the parameters of ``owner``."""
        self.r1 = owner.r1
        self.r2 = owner.r2

    def clamped(self) -> tuple[Tensor, Tensor]:
        """Clamp the parameters in place and return r1 and r2, (H,) float64."""
        if is_transformed():  # which refuses to write to them
            ends = SMALLEST, self.largest_r2
            return self.r1.double().clamp_min(SMALLEST), self.r2.double().clamp(*ends)
        self.r1.data.clamp_(SMALLEST)
        self.r2.data.clamp_(SMALLEST, self.largest_r2)
        return self.r1.double(), self.r2.double()


class KerpleLog(Kerple):
    """score_st - r1 log(1 + r2 n), n = |s - t|, r1 > 0 and r2 > 0 learned per head.

    See :class:`Kerple`.
    """

    stream = "kerple-log"
    largest = (2.0, 1.0)
    card = Card(
        mechanism="bias",
        equation=r"b_{st} = -r_1 \log(1 + r_2 |n|), \quad r_1, r_2 > 0 \text{ per head}",
        cost="2 H parameters in the whole model; one lookup per pair, O(H T S)",
        beyond="The weights keep falling, as slowly as n^(-r1): distant keys stay visible.",
        source="[Chi et al. (2022)](https://arxiv.org/abs/2205.09921), logarithmic form",
    )

    def of_lag(self, lag: Tensor) -> Tensor:
        """Return -r1 log(1 + r2 n), float64 (..., H)."""
        r1, r2 = self.clamped()
        return -r1 * torch.log1p(r2 * lag.abs().double().unsqueeze(-1))


class KerplePower(Kerple):
    """score_st - r1 n^r2, n = |s - t|, r1 > 0 and 0 < r2 <= 2 learned per head.

    r2 = 1 is ALiBi with learned slopes. See :class:`Kerple`.
    """

    stream = "kerple-power"
    largest = (1.0, 2.0)
    largest_r2 = 2.0
    card = Card(
        mechanism="bias",
        equation=r"b_{st} = -r_1 |n|^{r_2}, \quad r_1 > 0, \; 0 < r_2 \le 2 \text{ per head}",
        cost="2 H parameters in the whole model; one lookup per pair, O(H T S)",
        beyond="The weights keep falling as exp(-r1 n^r2), to 0 beyond a learned distance.",
        source="[Chi et al. (2022)](https://arxiv.org/abs/2205.09921), power form",
    )

    def of_lag(self, lag: Tensor) -> Tensor:
        """Return -r1 n^r2, float64 (..., H); 0 at n = 0, where n^r2 has no finite derivative."""
        r1, r2 = self.clamped()
        n = lag.abs().clamp_min(1).double().unsqueeze(-1)
        return -r1 * torch.exp(r2 * n.log()).masked_fill((lag == 0).unsqueeze(-1), 0.0)
