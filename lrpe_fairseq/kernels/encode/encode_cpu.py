"""Lambda P phi(x) on a CPU in C++: every row is read once and its features are written once.

The definition is ``encode.definition``. It is used in float64, and if ``encode_cpu.cpp`` does not
compile. Only the arguments are saved for the backward pass, and x only if a gradient depends on it.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from lrpe_fairseq.kernels import loader
from lrpe_fairseq.kernels.conditions import gradients_of, is_plain
from lrpe_fairseq.kernels.encode.encode import Transform, Variant, definition, unit_vector

SOURCE = Path(__file__).with_suffix(".cpp")
WIDEST = 1024
"""Largest supported width of rows."""

WIDEST_SPECTRUM = 128
"""Largest supported width with a Fourier matrix. A larger matrix does not fit a core's cache."""


def library() -> ctypes.CDLL | None:
    """Return the compiled kernel, or None if kernels are disabled or it does not compile."""
    return loader.load_library(SOURCE)


def serves(q: Tensor, k: Tensor, variant: Variant) -> bool:
    """True if :func:`encode` supports q and k (B, H, ., D): float32 on a CPU, D even."""
    widest = WIDEST_SPECTRUM if variant.fourier else WIDEST
    return (
        is_plain(q, k)
        and q.dim() == k.dim() == 4
        and q.device.type == k.device.type == "cpu"
        and q.dtype == k.dtype == torch.float32
        and q.shape[-1] % 2 == k.shape[-1] % 2 == 0
        and max(q.shape[-1], k.shape[-1]) <= widest
        and library() is not None
    )


def encode_both(
    q: Tensor, k: Tensor, transform: Transform, q_positions: Tensor, k_positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute Lambda P phi of q and k at their positions; see :func:`encode`."""
    p = _projection_of(transform, q)
    # phases of self-attention are computed once
    q_power = transform.powers(q_positions, q.dtype)
    same = k_positions is q_positions
    k_power = q_power if same else transform.powers(k_positions, q.dtype)
    return encode(q, p, q_power, transform.variant), encode(k, p, k_power, transform.variant)


def encode_one(x: Tensor, transform: Transform, positions: Tensor) -> Tensor:
    """Compute Lambda P phi of x at its positions; see :func:`encode`."""
    power = transform.powers(positions, x.dtype)
    return encode(x, _projection_of(transform, x), power, transform.variant)


def _projection_of(transform: Transform, x: Tensor) -> Tensor | None:
    """Return P as :func:`encode` takes it."""
    if transform.matrix is not None:
        return transform.matrix(x.dtype, x.device)
    return None if transform.normal is None else unit_vector(transform.normal.to(x.dtype))


def encode(x: Tensor, p: Tensor | None, power: Tensor, variant: Variant) -> Tensor:
    """Compute Lambda P phi(x), (B, H, T, D) or twice as wide.

    Args:
        x: (B, H, T, D); see :func:`serves`.
        p: the unit vector (D,) of a reflection, the Fourier matrix [Re, Im] (D, 2D), or None.
        power: exp(i s theta), complex, (T, E) or (B, 1, T, E), or per head, (H, T, E) or
            (B, H, T, E); the remaining features are unchanged. For a permutation its indices,
            int64, which broadcast to x.
    Raises: ValueError if the width or device of ``p`` or ``power`` is wrong: C++ would read out of
        bounds.
    """
    _check(x, p, power, variant)
    # copies are made here, inside the autograd graph
    if p is not None:
        p = p.contiguous()
    if variant.permutes:
        order = loader.contiguous_rows(power.expand(x.shape))
        return _Encoded.apply(loader.contiguous_rows(x), p, order, variant)
    batch, heads, time, _ = x.shape
    power = power.to(torch.complex64)
    if power.dim() == 2:
        power = power.expand(time, -1)
    elif power.dim() == 4 and power.shape[1] == 1:
        power = power.expand(batch, 1, time, -1)
    elif power.dim() == 3:  # the kernel takes no phases per head: the heads become the batch
        out = encode(x.transpose(0, 1), p, power.unsqueeze(1), variant)
        return out.transpose(0, 1)
    else:
        out = encode(x.flatten(0, 1).unsqueeze(1), p, power.flatten(0, 1).unsqueeze(1), variant)
        return out.squeeze(1).unflatten(0, (batch, heads))
    power = power.resolve_conj().contiguous()
    return _Encoded.apply(loader.contiguous_rows(x), p, power, variant)


def _check(x: Tensor, p: Tensor | None, power: Tensor, variant: Variant) -> None:
    """Raise ValueError where C++ would read out of bounds."""
    width = x.shape[-1]
    if power.device != x.device or (p is not None and p.device != x.device):
        raise ValueError(f"x is on {x.device}, but P or Lambda is not")
    turned = width
    if not variant.permutes:
        turned = power.shape[-1] * (1 if variant.wide else 2)
    if turned > width or (variant.wide and turned != width):
        raise ValueError(f"x has {width} features, but Lambda is for {turned} features")
    if p is not None and p.shape != ((width, 2 * width) if variant.fourier else (width,)):
        raise ValueError(f"x has {width} features, but P is for {p.shape[0]} features")


class _Encoded(torch.autograd.Function):
    """Lambda P phi with a hand-written gradient. ``power`` (T, .) is shared by all sequences."""

    @staticmethod
    def forward(ctx, x, p, power, variant):
        out = x.new_empty(*x.shape[:3], x.shape[-1] * (2 if variant.wide else 1))
        ctx.variant = variant
        ctx.threads = torch.get_num_threads()
        _run("forward", ctx, x.shape, p, power, x=x, out=out)
        # the gradient of a linear map of x does not depend on x
        needs_x = variant.phi or any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(x if needs_x else None, p, power)
        ctx.layout = torch.empty_like(x, device="meta")
        return out

    @staticmethod
    def backward(ctx, grad):
        x, p, power = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _gradients_as_graph(ctx, grad)
        grad_x = torch.empty_like(ctx.layout, device=grad.device)
        grad_units = None
        if ctx.needs_input_grad[1]:  # one row per thread, so the order of the sum is fixed
            grad_units = p.new_zeros(ctx.threads, len(p))
        grad_power = torch.empty_like(power) if ctx.needs_input_grad[2] else None
        _run(
            "backward",
            ctx,
            grad_x.shape,
            p,
            power,
            grad_units=grad_units,
            x=x,
            grad=loader.contiguous_rows(grad),
            grad_x=grad_x,
            grad_at=_over_batch(grad_power, len(grad)),
        )
        grad_p = None if grad_units is None else grad_units.sum(0)
        return grad_x, grad_p, grad_power, None


def _gradients_as_graph(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a call with their graph, for second derivatives."""
    x, p, power = ctx.saved_tensors
    if x is None:  # the map is linear in x, so any x has the same gradient
        x = torch.zeros_like(ctx.layout, device=grad.device, requires_grad=True)

    def defined(x: Tensor, p: Tensor | None, power: Tensor) -> Tensor:
        return definition(x, p, power, ctx.variant)

    needed = ctx.needs_input_grad[:3]
    return *gradients_of(defined, (x, p, power), needed, (grad,)), None


def _over_batch(power: Tensor | None, batch: int) -> Tensor | None:
    """Return a real view (B, 1, T, 2E) of complex (T, E) or (B, 1, T, E)."""
    if power is None or not power.is_complex():
        return power
    return torch.view_as_real(power).flatten(-2).expand(batch, 1, -1, -1)


def _run(
    direction: str,
    ctx,
    shape: torch.Size,
    p: Tensor | None,
    power: Tensor,
    grad_units: Tensor | None = None,
    **tensors: Tensor | None,
) -> None:
    """Call the library's function for ``direction`` with the named tensors of its struct."""
    batch, heads, time, width = shape
    variant = ctx.variant
    cpp = library()
    call = cpp.Call(
        batch=batch,
        heads=heads,
        time=time,
        width=width,
        turned=power.shape[-1],
        phi=variant.phi,
        halves=variant.halves,
        wide=variant.wide,
        permutes=variant.permutes,
        threads=ctx.threads,
        p=loader.pointer(p),
        grad_units=loader.pointer(grad_units),
    )
    loader.set_views(call, {"at": _over_batch(power, batch), **tensors})
    name = "fourier" if variant.fourier else "encode"
    getattr(cpp, f"{name}_{direction}")(ctypes.byref(call))
