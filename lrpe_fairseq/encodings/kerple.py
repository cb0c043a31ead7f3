"""KERPLE (Chi, Fan, Ramadge and Rudnicky, 2022): logarithmic and power biases of the lag."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.encodings.base import Card, EncodingSpec, option
from lrpe_fairseq.encodings.biases import LagBias

SMALLEST = 0.01
"""The authors' code raises smaller values of r1 and r2 to this one; here, initial values only."""


class Kerple(LagBias):
    """A bias with two positive parameters r1 and r2 per head, which all layers share.

    The stored numbers are unconstrained: r1 = softplus(rho1), and a subclass maps rho2 to r2. They
    are float32 (H,), set so that r1 and r2 start from U(0, 1) times :attr:`largest`, as in the
    authors' code, drawn with the spec's generator. Their code clamps the parameters in the forward
    pass instead; the set of functions is the same. Lags and biases are float64 until the bias is
    cast. Costs O(T + S) evaluations and one lookup per pair.

    Trap: the paper's first equation divides the bias by sqrt D together with q.k, but its code adds
    the bias to the scaled score. This class follows the code; r1 absorbs the factor.
    """

    @dataclass(frozen=True)
    class Options:
        """Option of both forms: True if all layers share r1 and r2, as in the paper."""

        kerple_shared: bool = option(True, "KERPLE: one set of parameters in all layers")

    without_absolute = True
    stream: ClassVar[int]
    """The stream of the spec's generator."""
    largest: ClassVar[tuple[float, float]]
    """Upper ends of the uniform distributions that r1 and r2 start from."""

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        self.shared = self.options.kerple_shared
        generator = spec.generator(self.stream)
        draw = torch.rand(2, spec.num_heads, generator=generator, dtype=torch.float64, device="cpu")
        r1, r2 = (
            (end * part).clamp_min(SMALLEST) for end, part in zip(self.largest, draw, strict=True)
        )
        self.rho1 = nn.Parameter(inverse_softplus(r1).float())
        self.rho2 = nn.Parameter(self.start_of_rho2(r2).float())

    def share_with(self, owner: "Kerple") -> None:
        """Use the parameters of ``owner``."""
        self.rho1, self.rho2 = owner.rho1, owner.rho2

    @staticmethod
    def start_of_rho2(r2: Tensor) -> Tensor:
        """Return the stored number rho2 (H,) for r2 (H,)."""
        raise NotImplementedError

    @property
    def r1(self) -> Tensor:
        """The factor of the bias, (H,) float64, not negative."""
        return F.softplus(self.rho1.double())


class KerpleLog(Kerple):
    """score_st - r1 log(1 + r2 n), n = |s - t|, r1 > 0 and r2 > 0 learned per head.

    r2 = softplus(rho2). See :class:`Kerple`.
    """

    stream, largest = 20, (2.0, 1.0)
    card = Card(
        equation=r"b_{st} = -r_1 \log(1 + r_2 |n|), \quad r_1, r_2 > 0 \text{ per head}",
        cost="2 H parameters in the whole model; one lookup per pair, O(H T S)",
        beyond="The weights keep falling, as slowly as n^(-r1): distant keys stay visible.",
        source="Chi, Fan, Ramadge and Rudnicky, 2022, logarithmic form",
    )

    @staticmethod
    def start_of_rho2(r2: Tensor) -> Tensor:
        """Invert r2 = softplus(rho2)."""
        return inverse_softplus(r2)

    def of_lag(self, lag: Tensor) -> Tensor:
        """Return -r1 log(1 + r2 n), float64 (..., H)."""
        n = lag.double().unsqueeze(-1)
        return -self.r1 * torch.log1p(F.softplus(self.rho2.double()) * n)


class KerplePower(Kerple):
    """score_st - r1 n^r2, n = |s - t|, r1 > 0 and 0 < r2 <= 2 learned per head.

    r2 = 2 sigmoid(rho2). r2 = 1 is ALiBi with learned slopes. See :class:`Kerple`.
    """

    stream, largest = 21, (1.0, 2.0)
    card = Card(
        equation=r"b_{st} = -r_1 |n|^{r_2}, \quad r_1 > 0, \; 0 < r_2 \le 2 \text{ per head}",
        cost="2 H parameters in the whole model; one lookup per pair, O(H T S)",
        beyond="The weights keep falling as exp(-r1 n^r2), to 0 beyond a learned distance.",
        source="Chi, Fan, Ramadge and Rudnicky, 2022, power form",
    )

    @staticmethod
    def start_of_rho2(r2: Tensor) -> Tensor:
        """Invert r2 = 2 sigmoid(rho2)."""
        return torch.logit(r2 / 2)

    def of_lag(self, lag: Tensor) -> Tensor:
        """Return -r1 n^r2, float64 (..., H); 0 at n = 0, where n^r2 has no finite derivative."""
        n = lag.clamp_min(1).double().unsqueeze(-1)
        power = torch.exp(2 * torch.sigmoid(self.rho2.double()) * n.log())
        return -self.r1 * power.masked_fill((lag == 0).unsqueeze(-1), 0.0)


def inverse_softplus(x: Tensor) -> Tensor:
    """Return y with softplus(y) = x > 0, accurate for small x too."""
    return x + torch.log(-torch.expm1(-x))
