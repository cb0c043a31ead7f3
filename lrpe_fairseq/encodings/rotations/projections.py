"""The unitary maps P of the LRPE family, on the last axis (LRPE ICLR, Eq. 74, 75 and C.7).

Each map takes a real x (..., D) and returns its planes, (re,) or (re, im), each (..., D).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.forms import Planes
from lrpe_fairseq.encodings.core.options import EncodingSpec, option
from lrpe_fairseq.kernels.encode.encode import unit_vector


@dataclass(frozen=True)
class LRPEOptions:
    """Options of the learned Householder map."""

    lrpe_householder_start: str = option(
        "normal",
        "LRPE, learned Householder vector: start from N(0, I), as in the paper, or at norm 1, "
        "which learns faster",
        choices=("normal", "unit"),
    )


class Identity(nn.Module):
    """P = I."""

    latex = r"P = I"

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Planes:
        """(..., D) -> one plane (..., D)."""
        return (x,)


class Householder(nn.Module):
    """P = I - 2 v v^T / (v^T v) with a fixed v drawn from N(0, I) (Eq. 74)."""

    latex = r"P = I - 2\, v v^\top / v^\top v \text{ with a fixed } v"

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        v = _householder_vector(spec)
        self.register_buffer("v", v / v.norm())

    def forward(self, x: Tensor) -> Planes:
        """(..., D) -> one plane (..., D), the reflection of x."""
        return (reflect(x, self.unit(x.dtype)),)

    def unit(self, dtype: torch.dtype) -> Tensor:
        """Return v normalized to length 1, (D,)."""
        return unit_vector(self.v.to(dtype))


class LearnedHouseholder(Householder):
    """The Householder map with a learned v, initialized from N(0, I) (pseudo-code of Type 3).

    The map depends only on the direction of v, but a step of an adaptive optimizer turns v by an
    angle inversely proportional to its norm. A sample of N(0, I) has a norm of about sqrt(D); with
    norm 1 (``lrpe_householder_start="unit"``) v turns about sqrt(D) times as fast.
    """

    latex = r"P = I - 2\, v v^\top / v^\top v \text{ with a learned } v"

    def __init__(self, spec: EncodingSpec) -> None:
        nn.Module.__init__(self)
        v = _householder_vector(spec)
        unit = spec.options.of(LRPEOptions).lrpe_householder_start == "unit"
        self.v = nn.Parameter(v / v.norm() if unit else v)


class OddEven(nn.Module):
    """P = the permutation y[2k] = x[k], y[2k+1] = x[ceil(d/2) + k] (Eq. 75 and pseudo-code).

    Trap: Eq. 75 prints floor(d/2) + 1 for + k, which is not a permutation. For odd d the floor must
    be a ceiling, too.
    """

    latex = r"P = \text{odd-even permutation}"

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Planes:
        """(..., D) -> one plane (..., D), with the memory layout of x."""
        if x.stride(-1) != 1 and x.dim() > 1:
            return (_interleave_halves(x.mT, -2).mT,)
        return (_interleave_halves(x, -1),)


def _interleave_halves(x: Tensor, axis: int) -> Tensor:
    """Apply Eq. 75 to a negative ``axis`` with one copy, and one more for the gradient."""
    pairs, odd = divmod(x.shape[axis], 2)
    if odd:
        first, middle, last = x.split([pairs, 1, pairs], axis)
        even = _interleave_halves(torch.cat([first, last], axis), axis)
        return torch.cat([even, middle], axis)
    return x.unflatten(axis, (2, pairs)).transpose(axis - 1, axis).flatten(axis - 1, axis)


class Fourier(nn.Module):
    """P = the unitary discrete Fourier matrix F_jk = exp(-2 pi i jk / d) / sqrt(d)."""

    latex = r"P = \text{unitary Fourier matrix}"

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        index = torch.arange(spec.head_dim, dtype=torch.int64, device="cpu")
        turn = torch.outer(index, index) % spec.head_dim
        angle = turn.double() * (2 * math.pi / spec.head_dim)
        self.exact = torch.cat([angle.cos(), -angle.sin()], dim=1) / math.sqrt(spec.head_dim)
        self.copies: dict[tuple, Tensor] = {}

    def forward(self, x: Tensor) -> Planes:
        """(..., D) -> the planes (re, im), each (..., D)."""
        return (x @ self.matrix(x.dtype, x.device)).chunk(2, dim=-1)

    def matrix(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return [Re F, Im F], (D, 2D); one copy per dtype and device is cached."""
        if (dtype, device) not in self.copies:
            with torch.inference_mode(False):
                self.copies[dtype, device] = self.exact.to(dtype=dtype, device=device)
        return self.copies[dtype, device]


def reflect(x: Tensor, unit: Tensor) -> Tensor:
    """Compute x - 2 u (u^T x) for every row of x (..., D) and one unit vector u (D,)."""
    return x - (x @ unit).unsqueeze(-1) * (2.0 * unit)


def _householder_vector(spec: EncodingSpec) -> Tensor:
    """Draw v (D,) from N(0, I)."""
    return torch.randn(spec.head_dim, generator=spec.generator("householder"), device="cpu")


PROJECTIONS = {
    "identity": Identity,
    "householder": Householder,
    "householder-learned": LearnedHouseholder,
    "odd-even": OddEven,
    "fourier": Fourier,
}
"""P by name: the projections of the names ``lrpe:<P>:<Lambda>``."""
