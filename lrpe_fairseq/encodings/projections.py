"""The unitary maps P of the LRPE family, on the last axis (LRPE ICLR, Eq. 74, 75 and C.7).

A complex vector is represented by its *planes*, the tuple (re, im), and a real vector by (re,).
Each map takes a real x (..., D) and returns its planes, each (..., D).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.base import EncodingSpec, Planes, option
from lrpe_fairseq.kernels.dispatch import is_plain

EPS = 1e-6
"""Smallest norm by which a learned Householder vector is divided."""


@dataclass(frozen=True)
class LRPEOptions:
    """Options of the learned Householder map."""

    lrpe_householder_start: str = option(
        "normal",
        "LRPE, learned Householder vector: start from N(0, I), as in the paper, or at norm 1, "
        "where it turns faster",
        choices=("normal", "unit"),
    )


class Identity(nn.Module):
    """P = I."""

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Planes:
        """(..., D) -> one plane (..., D)."""
        return (x,)


class Householder(nn.Module):
    """P = I - 2 v v^T / (v^T v) with v drawn from a standard normal, fixed (Eq. 74)."""

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        v = _householder_vector(spec)
        self.register_buffer("v", v / v.norm())

    def forward(self, x: Tensor) -> Planes:
        """(..., D) -> one plane (..., D), the mirror image of x."""
        return (reflect(x, self.unit(x.dtype)),)

    def unit(self, dtype: torch.dtype) -> Tensor:
        """v of length 1."""
        return _unit(self.v.to(dtype))


class LearnedHouseholder(Householder):
    """The Householder map whose v is a parameter, started from N(0, I) (Type 3's pseudo-code).

    The map depends on the direction of v only, but learning depends on its length: the gradient
    is orthogonal to v and inversely proportional to its norm, and a step of an adaptive optimizer
    turns v by an angle inversely proportional to it. N(0, I) has norm sqrt(D) or so; a start at
    norm 1 (``lrpe_householder_start="unit"``) turns about sqrt(D) times as fast.
    """

    def __init__(self, spec: EncodingSpec) -> None:
        nn.Module.__init__(self)
        v = _householder_vector(spec)
        unit = spec.options.of(LRPEOptions).lrpe_householder_start == "unit"
        self.v = nn.Parameter(v / v.norm() if unit else v)


class OddEven(nn.Module):
    """P = the permutation y[2k] = x[k], y[2k+1] = x[ceil(d/2) + k] (Eq. 75 and pseudo-code).

    Eq. 75 prints floor(d/2) + 1 for the odd case, a misprint: it would not be a permutation.
    """

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Planes:
        """(..., D) -> one plane (..., D), in the order of memory that x has."""
        if x.stride(-1) != 1 and x.dim() > 1:
            return (_shuffled(x.mT, -2).mT,)
        return (_shuffled(x, -1),)


def _shuffled(x: Tensor, axis: int) -> Tensor:
    """Eq. 75 on an axis counted from the end, by one copy, and by one for the gradient."""
    pairs, odd = divmod(x.shape[axis], 2)
    if odd:
        first, middle, last = x.split([pairs, 1, pairs], axis)
        return torch.cat([_shuffled(torch.cat([first, last], axis), axis), middle], axis)
    return x.unflatten(axis, (2, pairs)).transpose(axis - 1, axis).flatten(axis - 1, axis)


class Fourier(nn.Module):
    """P = the unitary discrete Fourier matrix F_jk = exp(-2 pi i jk / d) / sqrt(d)."""

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
        """[Re F, Im F], (D, 2D); one copy per dtype and device, outside the state dict."""
        if (dtype, device) not in self.copies:
            with torch.inference_mode(False):
                self.copies[dtype, device] = self.exact.to(dtype=dtype, device=device)
        return self.copies[dtype, device]


def reflect(x: Tensor, unit: Tensor) -> Tensor:
    """x - 2 u (u^T x) for every row of x (..., D) and one vector u (D,) of length 1."""
    if not is_plain(x, unit):
        return x - 2.0 * (x @ unit).unsqueeze(-1) * unit
    return _Reflection.apply(x, unit)


def _unit(v: Tensor) -> Tensor:
    return v / v.norm().clamp_min(EPS)


class _Reflection(torch.autograd.Function):
    """The mirror image of x in the plane normal to a unit vector u; its own transpose.

    Hence the gradient of x is the mirror image of the gradient: two passes over memory where
    automatic differentiation takes six. Differentiable any number of times.
    """

    @staticmethod
    def forward(ctx, x, unit):
        ctx.save_for_backward(unit, x if ctx.needs_input_grad[1] else None)
        return _mirror(x, unit)

    @staticmethod
    def backward(ctx, grad):
        unit, x = ctx.saved_tensors
        grad_x = reflect(grad, unit) if ctx.needs_input_grad[0] else None
        if x is None:
            return grad_x, None
        g, x = grad.reshape(-1, unit.numel()), x.reshape(-1, unit.numel())
        return grad_x, -2 * (x.T @ (g @ unit) + g.T @ (x @ unit))


def _mirror(x: Tensor, unit: Tensor) -> Tensor:
    along = (x.transpose(1, 2) @ unit).transpose(1, 2) if _heads_inside(x) else x @ unit
    return torch.addcmul(x, along.unsqueeze(-1), unit, value=-2)


def _heads_inside(x: Tensor) -> bool:
    """True if x (B, H, T, D) lies in memory as (B, T, H, D), which ``@`` would copy."""
    return x.dim() == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous()


def _householder_vector(spec: EncodingSpec) -> Tensor:
    """(D,) from N(0, I)."""
    return torch.randn(spec.head_dim, generator=spec.generator(stream=1), device="cpu")


PROJECTIONS = {
    "identity": Identity,
    "householder": Householder,
    "householder-learned": LearnedHouseholder,
    "odd-even": OddEven,
    "fourier": Fourier,
}
"""P by name."""
