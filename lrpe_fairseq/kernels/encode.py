"""Lambda P phi(x) of the LRPE family in one call: what every compiled form computes.

:class:`Form` names the variant and :func:`definition` is its meaning in PyTorch; the compiled
forms are ``encode_cpu`` (C++) and ``encode_triton``.

Axes: B batch, H heads, T time, D width, E pairs (features of a wide form) that turn.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Form(NamedTuple):
    """What is done to x.

    phi: 1 + elu comes first. halves: pairs are (j, D/2 + j), as after the odd-even permutation, not
    (2j, 2j + 1). wide: the unitary diagonal of real features, which doubles the width. permutes:
    Lambda is a permutation. fourier: P is a Fourier matrix, Lambda unitary.
    """

    phi: bool = True
    halves: bool = False
    wide: bool = False
    permutes: bool = False
    fourier: bool = False

    @property
    def simple(self) -> bool:
        """True if Lambda is a rotation or the unitary diagonal and P at most a reflection."""
        return not self.permutes and not self.fourier


def definition(x: Tensor, p: Tensor | None, at: Tensor, form: Form) -> Tensor:
    """Lambda P phi(x), (B, H, T, D) or twice as wide, in differentiable operations.

    Args:
        x: (B, H, T, D).
        p: of a reflection the unit vector (D,); the Fourier matrix [Re, Im], (D, 2D); or None.
        at: exp(i s theta), complex, (T, E) or (B, 1, T, E); the features beyond E stay. Of a
            permutation the indices, int64 (B, H, T, D).
    """
    z = F.elu(x) + 1.0 if form.phi else x
    z = z.unflatten(-1, (2, -1)).mT.flatten(-2) if form.halves else z
    if form.fourier:
        re, im = (z @ p).chunk(2, -1)
        turned = (re * at.real - im * at.imag, re * at.imag + im * at.real)
        return torch.cat(turned, -1)
    z = z if p is None else z - 2.0 * (z @ p).unsqueeze(-1) * p
    if form.permutes:
        return z.gather(-1, at)
    if form.wide:
        return torch.cat([z * at.real, z * at.imag], -1)
    return rotated(z, at)


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Pairs (2i, 2i+1) of x (..., T, D) turned by complex ``turn`` (..., T, E), in real numbers."""
    width = 2 * turn.shape[-1]
    a, b = x[..., :width].unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turn.real, turn.imag
    pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return pairs if width == x.shape[-1] else torch.cat([pairs, x[..., width:]], -1)
