"""phi, P and Lambda on a CPU, block by block: each block is read once and written once.

What lies between is done in place while the block is in the cache, and nothing is allocated but the
result. The reference is ``LRPE.forward`` of ``feature_map``; ``fused`` does the same on a GPU.

Axes: B batch, H heads, T time, D width, E pairs (features of a wide form) that turn.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 2**18
"""Numbers of a block: 1 MB in float32, within the cache of a core."""


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
        """Whether Lambda only turns and P at most reflects: what all forms can do."""
        return not self.permutes and not self.fourier


def serves(x: Tensor, form: Form) -> bool:
    """Whether :func:`encode` is for x (B, H, T, D): on a CPU, not of a half type, D even."""
    fit = form.simple and x.dim() == 4 and x.shape[-1] % 2 == 0 and x.stride(-1) == 1
    return fit and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def encode(x: Tensor, unit: Tensor | None, turn: Tensor, form: Form) -> Tensor:
    """Lambda P phi(x), (B, H, T, D) or twice as wide.

    Args:
        x: (B, H, T, D), see :func:`serves`.
        unit: (D,), of the reflection, or None.
        turn: exp(i s theta), complex, (T, E) or (B, 1, T, E); what is beyond E stays.
    """
    return _Encoded.apply(x, unit, turn, form)


class _Encoded(torch.autograd.Function):
    """The gradient goes back block by block in the same way."""

    @staticmethod
    def forward(ctx, x, unit, turn, form):
        width = x.shape[-1] * (2 if form.wide else 1)
        out = x.new_empty(*x.shape[:3], width)
        for here in _blocks(x):
            _encode(x[here], unit, _at(turn, here), out[here], form)
        learns = turn.requires_grad or (unit is not None and unit.requires_grad)
        ctx.save_for_backward(x, unit, turn, out if learns else None)
        ctx.form = form
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, unit, turn, out = ctx.saved_tensors
        grad_x, back = torch.empty_like(x), turn.conj().resolve_conj()
        grad_turn = torch.zeros_like(turn) if ctx.needs_input_grad[2] else None
        grad_unit = torch.zeros_like(unit) if ctx.needs_input_grad[1] else None
        for here in _blocks(x):
            at = _at(back, here)
            if grad_turn is not None:
                _add_gradient_of_turn(_at(grad_turn, here), out[here], grad[here], ctx.form)
            turned = _turned_back(grad[here], at, ctx.form)
            if grad_unit is not None:
                mirrored = _turned_back(out[here], at, ctx.form)
                grad_unit += _gradient_of_unit(mirrored, turned, unit)
            if unit is not None:
                _reflect(turned, unit)
            _through_phi(turned, x[here], grad_x[here], ctx.form)
        if grad_turn is not None:
            grad_turn = grad_turn * turn  # out is turned already
        return grad_x, grad_unit, grad_turn, None


Place = tuple[slice, slice, slice]


def _blocks(x: Tensor) -> Iterator[Place]:
    """Some sequences each, or a part of one, with all heads."""
    batch, heads, time, width = x.shape
    tokens = max(1, BLOCK // (heads * width))
    sequences = max(1, tokens // max(1, time))
    for b in range(0, batch, sequences):
        for t in range(0, time, tokens):
            yield slice(b, b + sequences), slice(None), slice(t, t + tokens)


def _at(turn: Tensor, here: Place) -> Tensor:
    return turn[here[2]] if turn.dim() == 2 else turn[here]


def _encode(x: Tensor, unit: Tensor | None, turn: Tensor, out: Tensor, form: Form) -> None:
    z = _shuffled_phi(x, form, torch.empty_like(x) if form.wide else out)
    if unit is not None:
        _reflect(z, unit)
    if form.wide:
        for half, part in zip(out.chunk(2, -1), (turn.real, turn.imag), strict=True):
            torch.mul(z, part, out=half)
    else:
        _pairs(z, turn).mul_(turn)


def _shuffled_phi(x: Tensor, form: Form, out: Tensor) -> Tensor:
    """Fill ``out`` with phi(x) or x, in the order of the odd-even P if ``form`` says so."""
    if form.phi:
        z = torch.empty_like(out) if form.halves else out
        x = torch.ops.aten.elu.out(x, out=z).add_(1.0)
    if x is not out:
        source, target = _in_order(x, out, form)
        target.copy_(source)
    return out


def _in_order(x: Tensor, shuffled: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Views of both with corresponding features at the same place."""
    if not form.halves:
        return x, shuffled
    return x.unflatten(-1, (2, -1)), shuffled.unflatten(-1, (-1, 2)).mT


def _reflect(z: Tensor, unit: Tensor) -> None:
    """Mirror the rows of z, in place."""
    z.addcmul_((z @ unit).unsqueeze(-1), unit, value=-2)


def _pairs(z: Tensor, turn: Tensor) -> Tensor:
    """The pairs of z that turn, as complex numbers: a view."""
    return torch.view_as_complex(z[..., : 2 * turn.shape[-1]].unflatten(-1, (-1, 2)))


def _turned_back(y: Tensor, back: Tensor, form: Form) -> Tensor:
    """Lambda^H y: of the result P phi(x), of its gradient that of P phi(x).

    ``back`` is the conjugate of what turned.
    """
    if not form.wide:
        z = y.clone(memory_format=torch.contiguous_format)
        _pairs(z, back).mul_(back)
        return z
    re, im = y.chunk(2, -1)
    return (re * back.real).addcmul_(im, back.imag, value=-1)


def _add_gradient_of_turn(total: Tensor, out: Tensor, grad: Tensor, form: Form) -> None:
    """Add the sum over what shares an angle of grad conj(out), which is turned to much."""
    if form.wide:
        (re, im), (of_re, of_im) = out.chunk(2, -1), grad.chunk(2, -1)
        both = torch.complex(of_re * re + of_im * im, of_im * re - of_re * im)
    else:
        grad = grad.contiguous()
        both = _pairs(out, total).conj_physical().mul_(_pairs(grad, total))
    total += both.sum_to_size(total.shape)


def _gradient_of_unit(z: Tensor, grad: Tensor, unit: Tensor) -> Tensor:
    """That of z = p - 2 u (u . p), from z and its gradient (B, H, T, D): p is the mirrored z."""
    z, grad = z.flatten(0, 2), grad.flatten(0, 2)
    z_along, grad_along = z @ unit, grad @ unit
    return -2 * (z.T @ grad_along - grad.T @ z_along - 2 * (z_along @ grad_along) * unit)


def _through_phi(grad: Tensor, x: Tensor, grad_x: Tensor, form: Form) -> None:
    """Fill in ``grad_x`` of phi and of the odd-even P."""
    if form.halves:
        ordered = torch.empty_like(grad)
        target, source = _in_order(ordered, grad, form)
        target.copy_(source)
        grad = ordered
    if form.phi:
        torch.ops.aten.elu_backward.grad_input(grad, 1.0, 1.0, 1.0, False, x, grad_input=grad_x)
    else:
        grad_x.copy_(grad)
