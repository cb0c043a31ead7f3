"""Lambda P phi(x) on a CPU in C++: every row is read once and its features are written once.

The definition is ``encode.definition``. It is used in float64, and if ``encode_cpu.cpp`` does not
compile. Only the arguments are saved for the backward pass, and x only if a gradient depends on it.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lrpe_fairseq.kernels import loader
from lrpe_fairseq.kernels.conditions import called_in_tracing, gradients_of, is_plain
from lrpe_fairseq.kernels.encode.encode import Transform, Turns, Variant, definition, unit_vector

SOURCE = Path(__file__).with_suffix(".cpp")
WIDEST = 1024
"""Largest supported width of rows."""

WIDEST_SPECTRUM = 128
"""Largest supported width with a Fourier matrix. A larger matrix does not fit a core's cache."""


def library() -> ctypes.CDLL | None:
    """Return the compiled kernel, or None if kernels are disabled or it does not compile."""
    return loader.load_library(SOURCE)


@called_in_tracing
def has_library() -> bool:
    """True if :func:`library` has the kernel."""
    return library() is not None


def serves(q: Tensor, k: Tensor, variant: Variant) -> bool:
    """True if :func:`encode` supports q and k (B, H, ., D): float32 on a CPU, D even."""
    return is_plain(q, k) and fits(q, k, variant)


def fits(q: Tensor, k: Tensor, variant: Variant) -> bool:
    """True if the kernel supports the dtype, device and widths of q and k (B, H, ., D)."""
    widest = WIDEST_SPECTRUM if variant.fourier else WIDEST
    return (
        q.dim() == k.dim() == 4
        and q.device.type == k.device.type == "cpu"
        and q.dtype == k.dtype == torch.float32
        and q.shape[-1] % 2 == k.shape[-1] % 2 == 0
        and max(q.shape[-1], k.shape[-1]) <= widest
        and has_library()
    )


Apply = Callable[[Tensor, Tensor | None, Tensor | Turns, Variant], Tensor]
"""What computes Lambda P phi of arguments as the kernel takes them."""


def recorded(x: Tensor, p: Tensor | None, power: Tensor, variant: Variant) -> Tensor:
    """Compute Lambda P phi(x) in C++ with its gradient; copies are inside the autograd graph."""
    if not variant.permutes:
        power = power.to(torch.complex64).resolve_conj()
    return _Encoded.apply(
        loader.contiguous_rows(x),
        None if p is None else p.contiguous(),
        loader.contiguous_rows(power) if variant.permutes else power.contiguous(),
        variant,
    )


def encode_both(
    q: Tensor,
    k: Tensor,
    transform: Transform,
    q_positions: Tensor,
    k_positions: Tensor,
    apply: Apply = recorded,
) -> tuple[Tensor, Tensor]:
    """Compute Lambda P phi of q and k at their positions; see :func:`encode`."""
    p = _projection_of(transform, q)
    # phases of self-attention are computed once
    q_power = transform.powers(q_positions, q.dtype)
    same = k_positions is q_positions
    k_power = q_power if same else transform.powers(k_positions, q.dtype)
    rows = (q, q_power), (k, k_power)
    return tuple(encode(x, p, power, transform.variant, apply) for x, power in rows)


def encode_one(
    x: Tensor, transform: Transform, positions: Tensor, apply: Apply = recorded
) -> Tensor:
    """Compute Lambda P phi of x at its positions; see :func:`encode`."""
    power = transform.powers(positions, x.dtype)
    return encode(x, _projection_of(transform, x), power, transform.variant, apply)


def _projection_of(transform: Transform, x: Tensor) -> Tensor | None:
    """Return P as :func:`encode` takes it."""
    if transform.matrix is not None:
        return transform.matrix(x.dtype, x.device)
    return None if transform.normal is None else unit_vector(transform.normal.to(x.dtype))


def encode(
    x: Tensor,
    p: Tensor | None,
    power: Tensor | Turns,
    variant: Variant,
    apply: Apply = recorded,
) -> Tensor:
    """Compute Lambda P phi(x), (B, H, T, D) or twice as wide.

    Args:
        x: (B, H, T, D); see :func:`serves`.
        p: the unit vector (D,) of a reflection, the Fourier matrix [Re, Im] (D, 2D), or None.
        power: exp(i s theta), complex, (T, E) or (B, 1, T, E), or per head, (H, T, E) or
            (B, H, T, E); the remaining features are unchanged. For a permutation its indices,
            int64, which broadcast to x.
        apply: what computes it.
    Raises: ValueError if the width or device of ``p`` or ``power`` is wrong: C++ would read out of
        bounds.
    """
    _check(x, p, power, variant)
    if variant.permutes:
        return apply(x, p, power.expand(x.shape), variant)
    batch, heads, time, _ = x.shape
    if power.dim() == 2:
        power = power.expand(time, -1)
    elif power.dim() == 4 and power.shape[1] == 1:
        power = power.expand(batch, 1, time, -1)
    elif power.dim() == 3:  # the kernel takes no phases per head: the heads become the batch
        return encode(x.transpose(0, 1), p, power.unsqueeze(1), variant, apply).transpose(0, 1)
    else:
        sequences = x.flatten(0, 1).unsqueeze(1), p, power.flatten(0, 1).unsqueeze(1)
        return encode(*sequences, variant, apply).squeeze(1).unflatten(0, (batch, heads))
    return apply(x, p, power, variant)


def _check(x: Tensor, p: Tensor | None, power: Tensor | Turns, variant: Variant) -> None:
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
        ctx.variant = variant
        # the gradient of a linear map of x does not depend on x
        needs_x = variant.phi or any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(x if needs_x else None, p, power)
        # not on the meta device: its Python takes longer than a small kernel
        ctx.layout = x.shape, loader.empty_rows(x).stride()
        return encoded(x, p, power, variant)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            return _gradients_as_graph(ctx, grad)
        grad_x = torch.empty_strided(*ctx.layout, dtype=torch.float32)
        of_p, of_power = ctx.needs_input_grad[1:3]
        found = gradients(grad, *ctx.saved_tensors, grad_x, ctx.variant, of_p, of_power)
        return grad_x, *found, None


def encoded(x: Tensor, p: Tensor | None, power: Tensor, variant: Variant) -> Tensor:
    """Return Lambda P phi(x), with arguments as the kernel takes them."""
    out = x.new_empty(*x.shape[:3], x.shape[-1] * (2 if variant.wide else 1))
    _run("forward", variant, x.shape, p, power, x=x, out=out)
    return out


def gradients(
    grad: Tensor,
    x: Tensor | None,
    p: Tensor | None,
    power: Tensor,
    grad_x: Tensor,
    variant: Variant,
    of_p: bool,
    of_power: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Write the gradient of x to ``grad_x``; return those of P and Lambda, if they are needed.

    x: may be None for a linear map if neither is needed.
    """
    threads = torch.get_num_threads()
    # one row per thread, so the order of the sum is fixed
    grad_units = p.new_zeros(threads, len(p)) if of_p else None
    grad_power = torch.empty_like(power) if of_power else None
    _run(
        "backward",
        variant,
        grad_x.shape,
        p,
        power,
        grad_units=grad_units,
        threads=threads,
        x=x,
        grad=loader.contiguous_rows(grad),
        grad_x=grad_x,
        grad_at=_over_batch(grad_power, len(grad)),
    )
    return None if grad_units is None else grad_units.sum(0), grad_power


def _gradients_as_graph(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a call with their graph, for second derivatives."""
    x, p, power = ctx.saved_tensors
    if x is None:  # the map is linear in x, so any x has the same gradient
        x = torch.empty_strided(*ctx.layout, dtype=torch.float32).zero_().requires_grad_()

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
    variant: Variant,
    shape: torch.Size,
    p: Tensor | None,
    power: Tensor,
    grad_units: Tensor | None = None,
    threads: int | None = None,
    **tensors: Tensor | None,
) -> None:
    """Call the library's function for ``direction`` with the named tensors of its struct."""
    batch, heads, time, width = shape
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
        threads=torch.get_num_threads() if threads is None else threads,
        p=loader.pointer(p),
        grad_units=loader.pointer(grad_units),
    )
    loader.set_views(call, {"at": _over_batch(power, batch), **tensors})
    name = "fourier" if variant.fourier else "encode"
    getattr(cpp, f"{name}_{direction}")(ctypes.byref(call))
