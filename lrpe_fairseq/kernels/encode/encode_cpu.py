"""Lambda P phi(x) on a CPU in C++: every row is read once and its features are written once.

The definition is ``encode.definition``. It is used in float64, and if ``encode_cpu.cpp`` does not
compile. Only the arguments are saved for the backward pass, and x only if a gradient depends on it.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from lrpe_fairseq.kernels import loader
from lrpe_fairseq.kernels.dispatch import gradients_of, is_plain
from lrpe_fairseq.kernels.encode.encode import Form, definition

SOURCE = Path(__file__).with_suffix(".cpp")
WIDEST = 1024
"""Largest supported width of rows."""

WIDEST_SPECTRUM = 128
"""Largest supported width with a Fourier matrix. A larger matrix does not fit a core's cache."""


def library() -> ctypes.CDLL | None:
    """Return the compiled kernel, or None if kernels are disabled or it does not compile."""
    return loader.load_library(SOURCE)


def serves(x: Tensor, form: Form) -> bool:
    """True if :func:`encode` supports x (B, H, T, D): float32 on a CPU, D even."""
    return (
        is_plain(x)
        and x.dim() == 4
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() > 0
        and x.shape[-1] % 2 == 0
        and x.shape[-1] <= (WIDEST_SPECTRUM if form.fourier else WIDEST)
        and library() is not None
    )


def encode(x: Tensor, p: Tensor | None, at: Tensor, form: Form) -> Tensor:
    """Compute Lambda P phi(x), (B, H, T, D) or twice as wide.

    Args:
        x: (B, H, T, D); see :func:`serves`.
        p: the unit vector (D,) of a reflection, the Fourier matrix [Re, Im] (D, 2D), or None.
        at: exp(i s theta), complex, (T, E) or (B, 1, T, E); the remaining features are unchanged.
            For a permutation its indices, int64, which broadcast to x.
    Raises: ValueError if the width or device of ``p`` or ``at`` is wrong: C++ would read out of
        bounds.
    """
    width = x.shape[-1]
    if any(y is not None and y.device != x.device for y in (p, at)):
        raise ValueError(f"x is on {x.device}, but P or Lambda is not")
    turned = width if form.permutes else at.shape[-1] * (1 if form.wide else 2)
    if turned > width or (form.wide and turned != width):
        raise ValueError(f"x has {width} features, but Lambda is for {turned} features")
    if p is not None and p.shape != ((width, 2 * width) if form.fourier else (width,)):
        raise ValueError(f"x has {width} features, but P is for {p.shape[0]} features")
    # copies are made here, inside the autograd graph
    x, p = loader.contiguous_rows(x), None if p is None else p.contiguous()
    if form.permutes:
        return _Encoded.apply(x, p, loader.contiguous_rows(at.expand(x.shape)), form)
    shape = (x.shape[2], -1) if at.dim() == 2 else (x.shape[0], 1, x.shape[2], -1)
    at = at.to(torch.complex64).expand(shape).resolve_conj().contiguous()
    return _Encoded.apply(x, p, at, form)


class _Encoded(torch.autograd.Function):
    """Lambda P phi with a hand-written gradient. ``at`` (T, .) is shared by all sequences."""

    @staticmethod
    def forward(ctx, x, p, at, form):
        out = x.new_empty(*x.shape[:3], x.shape[-1] * (2 if form.wide else 1))
        ctx.form, ctx.threads = form, torch.get_num_threads()
        _run("forward", ctx, x.shape, p, at, x=x, out=out)
        needs_x = form.phi or any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(x if needs_x else None, p, at)
        ctx.layout = torch.empty_like(x, device="meta")
        return out

    @staticmethod
    def backward(ctx, grad):
        x, p, at = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _gradients_as_graph(ctx, grad)
        grad_x, grad_units = torch.empty_like(ctx.layout, device=grad.device), None
        if ctx.needs_input_grad[1]:  # one row per thread, so the order of the sum is fixed
            grad_units = p.new_zeros(ctx.threads, len(p))
        grad_at = torch.empty_like(at) if ctx.needs_input_grad[2] else None
        tensors = {"x": x, "grad": loader.contiguous_rows(grad), "grad_x": grad_x}
        _run("backward", ctx, grad_x.shape, p, at, grad_at, grad_units, **tensors)
        grad_p = None if grad_units is None else grad_units.sum(0)
        return grad_x, grad_p, grad_at, None


def _gradients_as_graph(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a call with their graph, for second derivatives."""
    x, p, at = ctx.saved_tensors
    if x is None:  # the map is linear in x, so any x has the same gradient
        x = torch.zeros_like(ctx.layout, device=grad.device, requires_grad=True)
    found = gradients_of(
        lambda *inputs: definition(*inputs, ctx.form), (x, p, at), ctx.needs_input_grad[:3], (grad,)
    )
    return *found, None


def _over_batch(at: Tensor | None, batch: int) -> Tensor | None:
    """Return a real view (B, 1, T, 2E) of complex (T, E) or (B, 1, T, E)."""
    if at is None or not at.is_complex():
        return at
    return torch.view_as_real(at).flatten(-2).expand(batch, 1, -1, -1)


def _run(
    direction: str,
    ctx,
    shape: torch.Size,
    p: Tensor | None,
    at: Tensor,
    grad_at: Tensor | None = None,
    grad_units: Tensor | None = None,
    **tensors: Tensor | None,
) -> None:
    """Call the library's function for ``direction`` with named tensors."""
    simple = ctx.form._asdict()
    name = "fourier" if simple.pop("fourier") else "encode"
    tensors["at"], tensors["grad_at"] = (_over_batch(x, shape[0]) for x in (at, grad_at))
    call = library().Call(
        **dict(zip(("batch", "heads", "time", "width"), shape, strict=True)),
        **simple,
        turned=at.shape[-1],
        threads=ctx.threads,
        p=loader.pointer(p),
        grad_units=loader.pointer(grad_units),
        **{name: loader.view(x) for name, x in tensors.items()},
    )
    getattr(library(), f"{name}_{direction}")(ctypes.byref(call))
