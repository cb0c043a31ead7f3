"""phi, P and Lambda on a CPU in C++: every row is read once and its features are written once.

As ``blocks``, which serves in float64 and where ``encode_cpu.cpp`` is not compiled. Nothing is kept
for the backward pass but the arguments, and x only where its gradient or a parameter's asks for it.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lrpe_fairseq.kernels import loader
from lrpe_fairseq.kernels.encode_blocks import Form

SOURCE = Path(__file__).with_suffix(".cpp")
WIDEST = 1024
WIDEST_SPECTRUM = 128
"""Beyond, the Fourier matrices do not fit a core's cache, and torch's products are faster."""


def serves(x: Tensor, form: Form) -> bool:
    """Whether :func:`encode` is for x (B, H, T, D): float32 on a CPU, D even."""
    return (
        x.dim() == 4
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() > 0
        and x.shape[-1] % 2 == 0
        and x.shape[-1] <= (WIDEST_SPECTRUM if form.fourier else WIDEST)
        and not torch.compiler.is_compiling()
        and loader.compiled(SOURCE) is not None
    )


def encode(x: Tensor, p: Tensor | None, at: Tensor | tuple[Tensor, Tensor], form: Form) -> Tensor:
    """Lambda P phi(x), (B, H, T, D) or twice as wide.

    Args:
        x: (B, H, T, D), see :func:`serves`.
        p: of a reflection the unit vector (D,); the Fourier matrix [Re, Im], (D, 2D); or None.
        at: exp(i s theta), complex, (T, E) or (B, 1, T, E); what is beyond E stays. Of a
            permutation the indices, int64, to be expanded to x, and those of its inverse.
    Raises: ValueError where ``p`` or ``at`` are of another width: C++ would read what is not there.
    """
    width = x.shape[-1]
    turned = width if form.permutes else at.shape[-1] * (1 if form.wide else 2)
    if turned > width or (form.wide and turned != width):
        raise ValueError(f"x has {width} features, but its encoding turns {turned}")
    if p is not None and p.shape != ((width, 2 * width) if form.fourier else (width,)):
        raise ValueError(f"x has {width} features, but P is for {p.shape[0]}")
    if form.permutes:
        return _Encoded.apply(x, p, at[0].expand(x.shape), form)
    shape = (x.shape[2], -1) if at.dim() == 2 else (x.shape[0], 1, x.shape[2], -1)
    return _Encoded.apply(x, p, at.to(torch.complex64).expand(shape), form)


class _Encoded(torch.autograd.Function):
    """What ``at`` says of (T, .) is for every sequence."""

    @staticmethod
    def forward(ctx, x, p, at, form):
        x, p = loader.rows(x), None if p is None else p.contiguous()
        at = loader.rows(at) if form.permutes else at.resolve_conj().contiguous()
        out = x.new_empty(*x.shape[:3], x.shape[-1] * (2 if form.wide else 1))
        *simple, fourier = form
        ctx.kind = "fourier" if fourier else "encode"
        of_unit = ctx.needs_input_grad[1]
        ctx.call = _Call(*x.shape, at.shape[-1], *simple, of_unit, torch.get_num_threads())
        _run(f"{ctx.kind}_forward", ctx.call, loader.views(x, out, _over_batch(at, x)), p)
        asked = form.phi or of_unit or ctx.needs_input_grad[2]
        ctx.save_for_backward(x if asked else None, p, at)
        ctx.layout = torch.empty_like(x, device="meta")
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, p, at = ctx.saved_tensors
        grad, grad_units = loader.rows(grad), None
        grad_x = torch.empty_like(ctx.layout, device=grad.device)
        if ctx.needs_input_grad[1]:  # of every thread, as their sum must not depend on a race
            grad_units = p.new_zeros(ctx.call.threads, len(p))
        grad_at = torch.empty_like(at) if ctx.needs_input_grad[2] else None
        of_turn = None if grad_at is None else _over_batch(grad_at, grad)
        views = loader.views(x, grad, _over_batch(at, grad), grad_x, of_turn)
        _run(f"{ctx.kind}_backward", ctx.call, views, p, grad_units)
        grad_unit = None if grad_units is None else grad_units.sum(0)
        return grad_x, grad_unit, grad_at, None


def _over_batch(at: Tensor, x: Tensor) -> Tensor:
    """(T, E) or (B, 1, T, E) as (B, 1, T, 2E), complex numbers as two real ones; a view."""
    if not at.is_complex():
        return at
    return torch.view_as_real(at).flatten(-2).expand(x.shape[0], 1, -1, -1)


class _Call(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int64) for n in ("batch", "heads", "time", "width", "turned")),
        *((n, ctypes.c_int64) for n in ("phi", "halves", "wide", "permutes")),
        *((n, ctypes.c_int64) for n in ("of_unit", "threads")),
    ]


def _run(name: str, call: _Call, views: ctypes.Array, *vectors: Tensor | None) -> None:
    """A function of the library."""
    pointers = (ctypes.c_void_p(None if x is None else x.data_ptr()) for x in vectors)
    getattr(loader.compiled(SOURCE), name)(ctypes.byref(call), views, *pointers)
