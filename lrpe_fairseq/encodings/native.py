"""phi, P and Lambda on a CPU in C++: every row is read once and its features are written once.

As ``blocks``, which serves in float64 and where ``native.cpp`` is not compiled. Nothing is kept
for the backward pass but the arguments, and x only where its gradient or a parameter's asks for it.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lrpe_fairseq.encodings import kernels
from lrpe_fairseq.encodings.blocks import Form

SOURCE = Path(__file__).with_suffix(".cpp")
WIDEST = 1024


def serves(x: Tensor, form: Form) -> bool:
    """Whether :func:`encode` is for x (B, H, T, D): float32 on a CPU, D even."""
    return (
        x.dim() == 4
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() > 0
        and x.shape[-1] % 2 == 0
        and x.shape[-1] <= WIDEST
        and not torch.compiler.is_compiling()
        and kernels.compiled(SOURCE) is not None
    )


def encode(
    x: Tensor, unit: Tensor | None, at: Tensor | tuple[Tensor, Tensor], form: Form
) -> Tensor:
    """Lambda P phi(x), (B, H, T, D) or twice as wide.

    Args:
        x: (B, H, T, D), see :func:`serves`.
        unit: (D,), of the reflection, or None.
        at: exp(i s theta), complex, (T, E) or (B, 1, T, E); what is beyond E stays. Of a
            permutation the indices (T, D) or (B, 1, T, D), int64, and those of its inverse.
    """
    at = at[0] if form.permutes else at.to(torch.complex64)
    shape = (x.shape[2], -1) if at.dim() == 2 else (x.shape[0], 1, x.shape[2], -1)
    return _Encoded.apply(x, unit, at.expand(shape), form)


class _Encoded(torch.autograd.Function):
    """What ``at`` says of (T, .) is for every sequence."""

    @staticmethod
    def forward(ctx, x, unit, at, form):
        x, unit = kernels.rows(x), None if unit is None else unit.contiguous()
        at = at.resolve_conj().contiguous()
        out = x.new_empty(*x.shape[:3], x.shape[-1] * (2 if form.wide else 1))
        call = _Call(*x.shape, at.shape[-1], *form, torch.get_num_threads())
        _run("encode_forward", call, kernels.views(x, out, _over_batch(at, x)), unit)
        asked = form.phi or any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(x if asked else None, unit, at)
        ctx.call, ctx.layout = call, torch.empty_like(x, device="meta")
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, unit, at = ctx.saved_tensors
        grad, grad_units = kernels.rows(grad), None
        grad_x = torch.empty_like(ctx.layout, device=grad.device)
        if ctx.needs_input_grad[1]:  # of every thread, as their sum must not depend on a race
            grad_units = unit.new_zeros(ctx.call.threads, len(unit))
        grad_at = torch.empty_like(at) if ctx.needs_input_grad[2] else None
        of_turn = None if grad_at is None else _over_batch(grad_at, grad)
        views = kernels.views(x, grad, _over_batch(at, grad), grad_x, of_turn)
        _run("encode_backward", ctx.call, views, unit, grad_units)
        grad_unit = None if grad_units is None else grad_units.sum(0)
        return grad_x, grad_unit, grad_at, None


def _over_batch(at: Tensor, x: Tensor) -> Tensor:
    """(T, E) or (B, 1, T, E) as (B, 1, T, E), complex numbers as two real ones; a view."""
    real = torch.view_as_real(at).flatten(-2) if at.is_complex() else at
    return real.expand(x.shape[0], 1, -1, -1)


class _Call(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int64) for n in ("batch", "heads", "time", "width", "turned")),
        *((n, ctypes.c_int64) for n in ("phi", "halves", "wide", "permutes", "threads")),
    ]


def _run(name: str, call: _Call, views: ctypes.Array, *vectors: Tensor | None) -> None:
    """A function of the library."""
    pointers = (ctypes.c_void_p(None if x is None else x.data_ptr()) for x in vectors)
    getattr(kernels.compiled(SOURCE), name)(ctypes.byref(call), views, *pointers)
