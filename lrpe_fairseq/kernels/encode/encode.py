"""The definition of Lambda P phi(x) of the LRPE family in one call.

:class:`Transform` says as data what is computed. :func:`definition` computes it in PyTorch from
phases, and :func:`both` from angles and positions. The kernels are ``encode_cpu`` (C++) and
``encode_triton``; ``dispatch`` chooses.

Axes: B batch, H heads, T time, D width, E rotated pairs (of a wide variant: rotated features).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.kernels.conditions import is_transformed

EPS = 1e-6
"""Smallest norm by which the normal of a reflection is divided."""


class Angles(NamedTuple):
    """The angles of Lambda^(s): feature or pair e turns by s theta_e.

    theta, column: radians, (E,) or (H, E), float64 if fixed, float32 if learned. With ``column``
    positions are on a grid: a pair turns by row theta_e + column column_e, row = s // grid and
    column = s mod grid, or s and 0 if ``grid`` is 0.
    """

    theta: Tensor
    column: Tensor | None = None
    grid: int = 0


class Turns(NamedTuple):
    """Complex numbers exp(i s theta) as two real tensors, under torch.compile and torch.export.

    Compilers generate no code for complex tensors. It has the methods of a complex tensor that the
    definitions call.
    """

    real: Tensor
    imag: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of both parts."""
        return self.real.shape

    @property
    def device(self) -> torch.device:
        """The device of both parts."""
        return self.real.device

    def dim(self) -> int:
        """Return the number of axes."""
        return self.real.dim()

    def both(self, change: Callable[[Tensor], Tensor]) -> "Turns":
        """Return ``change`` of both parts."""
        return Turns(change(self.real), change(self.imag))

    def expand(self, *shape: int) -> "Turns":
        """Return both parts expanded."""
        return self.both(lambda x: x.expand(*shape))

    def unsqueeze(self, axis: int) -> "Turns":
        """Return both parts with one more axis."""
        return self.both(lambda x: x.unsqueeze(axis))

    def flatten(self, first: int, last: int) -> "Turns":
        """Return both parts with axes joined."""
        return self.both(lambda x: x.flatten(first, last))

    def times(self, other: "Turns") -> "Turns":
        """Return the complex product."""
        re = self.real * other.real - self.imag * other.imag
        return Turns(re, self.real * other.imag + self.imag * other.real)


def complex_of(real: Tensor, imag: Tensor) -> Tensor | Turns:
    """Return a complex tensor, or :class:`Turns` where a compiler may trace."""
    return Turns(real, imag) if is_transformed() else torch.complex(real, imag)


def each_part(turn: Tensor | Turns, change: Callable[[Tensor], Tensor]) -> Tensor | Turns:
    """Return ``change`` of a complex tensor; of both parts of :class:`Turns`."""
    return turn.both(change) if isinstance(turn, Turns) else change(turn)


class Variant(NamedTuple):
    """Which of the maps Lambda P phi is computed.

    phi: True if 1 + elu is applied first. halves: True if pairs are (j, D/2 + j), as after the
    odd-even permutation, instead of (2j, 2j + 1). wide: True if Lambda is the unitary diagonal of
    real features, which doubles the width. permutes: True if Lambda is a permutation. fourier: True
    if P is a Fourier matrix and Lambda unitary.
    """

    phi: bool = True
    halves: bool = False
    wide: bool = False
    permutes: bool = False
    fourier: bool = False


class Transform(NamedTuple):
    """Lambda^(s) P phi of one encoding, as data from which a kernel computes it in one pass."""

    variant: Variant
    powers: Callable[[Tensor, torch.dtype], Tensor]
    """(positions, dtype) -> Lambda^(s): phases or indices; see :func:`definition`."""
    angles: Callable[[torch.device], Angles | Tensor | None] | None = None
    """device -> that from which a GPU kernel computes Lambda^(s) itself: angles, or the cycles of a
    permutation (:func:`along_cycles`). None, or a result of None: it reads :attr:`powers`."""
    normal: Tensor | None = None
    """The normal (D,) of the reflection P, of any length."""
    matrix: Callable[[torch.dtype, torch.device], Tensor] | None = None
    """(dtype, device) -> the Fourier matrix P as [Re, Im], (D, 2D)."""


def feature_map(x: Tensor) -> Tensor:
    """Compute phi(x) = 1 + elu(x) > 0 (Katharopoulos et al., 2020; LRPE, Section 4.1).

    The sum is in float32: in bfloat16 it would cancel, and 1 + elu(-7) = 0.0009 would be 0.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if torch.compiler.is_compiling():
        # the gradient of torch's elu has other strides than a compiler is told
        below = torch.expm1(wide.clamp_max(0.0))
        return (torch.where(wide > 0, wide, below) + 1.0).to(x.dtype)
    return F.elu(wide).add_(1.0).to(x.dtype)


def definition(x: Tensor, p: Tensor | None, power: Tensor | Turns, variant: Variant) -> Tensor:
    """Compute Lambda P phi(x), (B, H, T, D) or twice as wide, in differentiable operations.

    Args:
        x: (B, H, T, D).
        p: the unit vector (D,) of a reflection, the Fourier matrix [Re, Im] (D, 2D), or None.
        power: Lambda^(s) as exp(i s theta), complex, (T, E) or (B, 1, T, E); the remaining features
            are unchanged. For a permutation as its indices, int64 (B, H, T, D).
    """
    z = feature_map(x) if variant.phi else x
    z = z.unflatten(-1, (2, -1)).mT.flatten(-2) if variant.halves else z
    if variant.fourier:
        re, im = (z @ p).chunk(2, -1)
        turned = (re * power.real - im * power.imag, re * power.imag + im * power.real)
        return torch.cat(turned, -1)
    z = z if p is None else z - 2.0 * (z @ p).unsqueeze(-1) * p
    if variant.permutes:
        return z.gather(-1, power)
    if variant.wide:
        return torch.cat([z * power.real, z * power.imag], -1)
    return rotated(z, power)


def both(
    q: Tensor,
    k: Tensor,
    normal: Tensor | None,
    angles: Angles | Tensor | None,
    q_positions: Tensor,
    k_positions: Tensor,
    variant: Variant,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`definition` of q and k in float32 or wider; the result has their dtype.

    Args: see ``encode_triton.encode``.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    unit = None if normal is None else unit_vector(normal.to(wide))

    def encoded(x: Tensor, positions: Tensor) -> Tensor:
        if variant.permutes:
            power = _order_of(angles, positions, x)
        elif angles is not None:
            power = phases_of(angles, positions, wide)
        else:
            power = positions  # phases are given
        return definition(x.to(wide), unit, power, variant).to(x.dtype)

    return encoded(q, q_positions), encoded(k, k_positions)


def unit_vector(v: Tensor) -> Tensor:
    """Return v (D,) divided by its norm."""
    return v / v.norm().clamp_min(EPS)


def phases_of(angles: Angles, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(i s theta), complex (1 or B, 1 or H, T, E); the angle is float64."""
    theta, column, grid = angles
    s = positions if positions.dim() == 2 else positions.unsqueeze(0)
    row, col = (s // grid, s % grid) if grid else (s, s * 0)
    angle = _products(row, theta)
    if column is not None:
        angle = angle + _products(col, column)
    return complex_of(angle.cos().to(dtype), angle.sin().to(dtype))


def along_cycles(cycles: Tensor, s: Tensor) -> Tensor:
    """Return pi^s(j), int64, s.shape + pi.shape.

    cycles: int64 (4, ..., D): ``members`` lists the elements of pi cycle by cycle, that after j by
        n steps is members[start[j] + (step[j] + n) mod length[j]].
    """
    start, step, length, members = cycles
    index = start + (step + s.reshape(s.shape + (1,) * start.dim())) % length
    return members.expand(index.shape).gather(-1, index)


def _order_of(cycles: Tensor, positions: Tensor, x: Tensor) -> Tensor:
    """Return the indices (B, H, T, D) of pi^s for x (B, H, T, D)."""
    order = along_cycles(cycles, positions if positions.dim() == 2 else positions.unsqueeze(0))
    order = order.transpose(1, 2) if cycles.dim() == 3 else order.unsqueeze(1)
    return order.expand(x.shape)


def _products(s: Tensor, theta: Tensor) -> Tensor:
    """Return s theta, float64 (B, 1 or H, T, E), for s (B, T) and theta (E,) or (H, E)."""
    theta_by_head = theta.double().reshape(-1, 1, theta.shape[-1])
    return s[:, None, :, None].double() * theta_by_head


def rotated(x: Tensor, turn: Tensor | Turns) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of x (..., T, D) by complex ``turn`` (..., T, E).

    Only real operations are used. Features from 2E on are unchanged.
    """
    width = 2 * turn.shape[-1]
    if not width:
        return x
    a, b = x[..., :width].unflatten(-1, (-1, 2)).unbind(-1)
    cos = turn.real
    sin = turn.imag
    pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return pairs if width == x.shape[-1] else torch.cat([pairs, x[..., width:]], -1)
