"""Lambda P phi(x) or Lambda P x on CUDA: a Triton kernel and its gradient, for P a reflection or
odd-even.

The kernel reads x once and writes the encoded features once. The gradient reads x and the incoming
gradient once and recomputes intermediate results. Sums are computed in float32. The definition is
``encode.definition``.

A program processes BT positions of one sequence with all heads, so that the gradient of the angles
needs no atomic additions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrpe_fairseq.kernels.dispatch import gradients_of, is_plain
from lrpe_fairseq.kernels.encode import Form, definition
from lrpe_fairseq.kernels.loader import launch, on_device

NUMBERS = 2048  # maximum number of elements of one head in the registers of a program


def serves(x: Tensor, form: Form) -> bool:
    """True if the kernels support x (B, H, T, D): its device, its dtype, and D a power of two."""
    if not is_plain(x):
        return False
    width = x.shape[-1]
    fit = width >= 16 and width & (width - 1) == 0 and x.stride(-1) == 1
    return form.simple and fit and on_device(x)


def encode(x: Tensor, unit: Tensor | None, turn: Tensor, form: Form) -> Tensor:
    """Compute Lambda P phi(x), (B, H, T, D) or twice as wide, in the dtype of x.

    Args:
        x: (B, H, T, D), last axis contiguous.
        unit: the unit vector (D,) of the reflection, float32, or None.
        turn: exp(i s theta), complex64, (T, E) or (B, 1, T, E). E pairs (features if ``wide``) are
            rotated, the others are unchanged.
        form: the variant.
    """
    return _Encoded.apply(x, unit, turn.resolve_conj().contiguous(), form)


def feature_map(x: Tensor) -> Tensor:
    """Compute phi(x), (B, H, T, D), in the dtype of x: :func:`encode` without P and Lambda."""
    nothing = torch.empty(x.shape[2], 0, dtype=torch.complex64, device=x.device)
    return encode(x, None, nothing, Form())


class _Encoded(torch.autograd.Function):
    """Lambda P phi with a hand-written gradient.

    The gradient of ``turn`` is complex: the real part is that of the cosines, the imaginary part
    that of the sines.
    """

    @staticmethod
    def forward(ctx, x, unit, turn, form):
        batch, heads, time, width = x.shape
        out = x.new_empty(batch, heads, time, width * (2 if form.wide else 1))
        parts = torch.view_as_real(turn)
        launch(
            _encode,
            _grid(x),
            x,
            x if unit is None else unit,
            parts,
            out,
            *_sizes(x, parts),
            **_constants(x, unit, turn, form),
        )
        ctx.save_for_backward(x, unit, turn)
        ctx.form = form
        return out

    @staticmethod
    def backward(ctx, grad):
        x, unit, turn = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = gradients_of(
                lambda *inputs: definition(*inputs, ctx.form).to(x.dtype),
                ctx.saved_tensors,
                ctx.needs_input_grad[:3],
                (grad,),
            )
            return *found, None
        grad_x, turned, reflected = _gradients(x, unit, turn, grad.contiguous(), ctx)
        grad_turn = grad_unit = None
        if ctx.needs_input_grad[2]:
            sums = torch.view_as_complex(turned)
            grad_turn = sums.sum(0) if turn.dim() == 2 else sums.unsqueeze(1)
        if ctx.needs_input_grad[1]:
            grad_unit = reflected.sum(0)
        return grad_x, grad_unit, grad_turn, None


def _gradients(
    x: Tensor, unit: Tensor | None, turn: Tensor, grad: Tensor, ctx
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of turn for each sequence (B, T, E, 2), and of unit for each
    program (., D)."""
    parts, grid, grad_x = torch.view_as_real(turn), _grid(x), torch.empty_like(x)
    batch, _, time, width = x.shape
    _, unit_learns, turn_learns, _ = ctx.needs_input_grad
    options = {"dtype": torch.float32, "device": x.device}
    turned = torch.empty((batch, time, turn.shape[-1], 2) if turn_learns else (1,), **options)
    reflected = torch.empty((*grid, width) if unit_learns else (1,), **options)
    launch(
        _encode_gradient,
        grid,
        *(x, x if unit is None else unit, parts, grad, grad_x, turned, reflected),
        *_sizes(x, parts),
        *grad_x.stride()[:3],
        **_constants(x, unit, turn, ctx.form),
        TURN_LEARNS=turn_learns,
        UNIT_LEARNS=unit_learns,
    )
    return grad_x, turned, reflected


def _rows(x: Tensor) -> int:
    """Return the number of positions per program, a power of two."""
    return min(32, max(1, NUMBERS // x.shape[-1]))


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.shape[2], _rows(x)) * x.shape[0],)


def _sizes(x: Tensor, parts: Tensor) -> tuple[int, ...]:
    """Return heads, time, the strides of x, and the batch stride of ``parts``."""
    return x.shape[1], x.shape[2], *x.stride()[:3], parts.stride(0) if parts.dim() == 5 else 0


def _constants(x: Tensor, unit: Tensor | None, turn: Tensor, form: Form) -> dict:
    return {
        "D": x.shape[-1],
        "E": turn.shape[-1],
        "BT": _rows(x),
        "REFLECTS": unit is not None,
        "HALVES": form.halves,
        "WIDE": form.wide,
        "PHI": form.phi,
        "num_warps": 4,
    }


@triton.jit
def _place(T, BT: tl.constexpr):
    """Return the positions (BT,) and the sequence of this program.

    Both are int64, because a batch may have more than 2^31 elements.
    """
    program, parts = tl.program_id(0), tl.cdiv(T, BT)  # int32, which divides faster
    rows = (program % parts).to(tl.int64) * BT + tl.arange(0, BT)
    return rows, (program // parts).to(tl.int64)


@triton.jit
def _turns(turn, rows, T, E: tl.constexpr, W: tl.constexpr):
    """Load the cosines and sines (BT, W) of the rows; 1 and 0 for columns from E on."""
    columns = tl.arange(0, W)
    at = rows[:, None] * (2 * E) + 2 * columns[None, :]
    known = (rows[:, None] < T) & (columns[None, :] < E)
    return tl.load(turn + at, mask=known, other=1.0), tl.load(turn + at + 1, mask=known, other=0.0)


@triton.jit
def _begin(unit, turn, T, tb, D: tl.constexpr, E: tl.constexpr, W: tl.constexpr, BT: tl.constexpr):
    """Return this program's positions, sequence, columns, mask (BT, D), turns and u (D,)."""
    rows, b = _place(T, BT)
    columns = tl.arange(0, D)
    here = (rows < T)[:, None] & (columns >= 0)[None, :]
    cos, sin = _turns(turn + b * tb, rows, T, E, W)
    return rows, b, columns, here, cos, sin, tl.load(unit + columns).to(tl.float32)


@triton.jit
def _phi(x):
    """Compute 1 + elu(x)."""
    return tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))


@triton.jit
def _reflected(p, u, REFLECTS: tl.constexpr):
    """Reflect the rows of p (BT, D) in the hyperplane normal to u, if REFLECTS."""
    if REFLECTS:
        p = p - 2.0 * tl.sum(p * u[None, :], 1)[:, None] * u[None, :]
    return p


@triton.jit
def _apart(z, BT: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr):
    """Split z (BT, D) into the first and second elements of its pairs, (BT, D / 2) each."""
    if HALVES:
        pairs = tl.permute(tl.reshape(z, (BT, 2, D // 2)), (0, 2, 1))
    else:
        pairs = tl.reshape(z, (BT, D // 2, 2))
    return tl.split(pairs)


@triton.jit
def _together(a, c, BT: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr):
    """Join the elements of pairs: the inverse of :func:`_apart`."""
    pairs = tl.join(a, c)
    if HALVES:
        pairs = tl.permute(pairs, (0, 2, 1))
    return tl.reshape(pairs, (BT, D))


@triton.jit
def _paired(z, BT: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr):
    """Put the elements of every pair side by side, if HALVES: the odd-even permutation."""
    if HALVES:
        a, c = _apart(z, BT, D, True)
        z = _together(a, c, BT, D, False)
    return z


@triton.jit
def _unpaired(z, BT: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr):
    """Undo :func:`_paired`."""
    if HALVES:
        a, c = _apart(z, BT, D, False)
        z = _together(a, c, BT, D, True)
    return z


@triton.jit
def _turned_back(grad, z, cos, sin, BT: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr):
    """Return the gradients of z (BT, D) and of the cosines and sines (BT, D / 2)."""
    re, im = _apart(grad, BT, D, False)
    a, c = _apart(z, BT, D, HALVES)
    g = _together(re * cos + im * sin, im * cos - re * sin, BT, D, HALVES)
    return g, re * a + im * c, im * a - re * c


@triton.jit
def _of_unit(g, p, u):
    """Return the gradient (D,) of u in p - 2 u (u . p), whose gradient is g, summed over rows."""
    g_along = tl.sum(g * u[None, :], 1)[:, None]
    p_along = tl.sum(p * u[None, :], 1)[:, None]
    return tl.sum(-2.0 * (p_along * g + g_along * p), 0)


@triton.jit
def _store_turns(to, of_cos, of_sin, rows, T, E: tl.constexpr, W: tl.constexpr):
    """Write the gradients (BT, W) of the E cosines and sines of the rows."""
    pairs = tl.arange(0, W)
    place = to + rows[:, None] * (2 * E) + 2 * pairs[None, :]
    known = (rows[:, None] < T) & (pairs[None, :] < E)
    tl.store(place, of_cos, mask=known)
    tl.store(place + 1, of_sin, mask=known)


@triton.jit
def _through(
    x,
    first,
    second,
    u,
    cos,
    sin,
    BT: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    REFLECTS: tl.constexpr,
    HALVES: tl.constexpr,
    WIDE: tl.constexpr,
    PHI: tl.constexpr,
):
    """Return the gradients of x (BT, D), cosines, sines and u from that of a head's features.

    ``second`` is the gradient of the second half of wide features. Unused results cost nothing,
    because the compiler removes them.
    """
    p = _phi(x) if PHI else x
    z = _reflected(p, u, REFLECTS)
    if WIDE:
        z = _paired(z, BT, D, HALVES)
        g, of_cos, of_sin = first * cos + second * sin, first * z, second * z
        g = _unpaired(g, BT, D, HALVES)
    elif E > 0:
        g, of_cos, of_sin = _turned_back(first, z, cos, sin, BT, D, HALVES)
    else:  # phi alone
        g, of_cos, of_sin = first, cos, sin
    of_unit = _of_unit(g, p, u)
    g = _reflected(g, u, REFLECTS)
    if PHI:
        g = tl.where(x > 0, g, g * p)  # below zero phi' = phi
    return g, of_cos, of_sin, of_unit


@triton.jit
def _encode(
    x,
    unit,
    turn,
    out,
    H,
    T,
    xb,
    xh,
    xt,
    tb,
    D: tl.constexpr,
    E: tl.constexpr,
    BT: tl.constexpr,
    REFLECTS: tl.constexpr,
    HALVES: tl.constexpr,
    WIDE: tl.constexpr,
    PHI: tl.constexpr,
):
    """Compute the features of all heads at the positions of this program."""
    W: tl.constexpr = D if WIDE else D // 2
    rows, b, columns, here, cos, sin, u = _begin(unit, turn, T, tb, D, E, W, BT)
    at = x + b * xb + rows[:, None] * xt + columns[None, :]
    width: tl.constexpr = 2 * D if WIDE else D
    to = out + (b * H * T + rows[:, None]) * width + columns[None, :]
    for _ in range(H):
        z = tl.load(at, mask=here, other=0.0).to(tl.float32)
        z = _reflected(_phi(z) if PHI else z, u, REFLECTS)
        if WIDE:
            z = _paired(z, BT, D, HALVES)
            tl.store(to, (z * cos).to(out.dtype.element_ty), mask=here)
            tl.store(to + D, (z * sin).to(out.dtype.element_ty), mask=here)
        else:
            if E > 0:
                a, c = _apart(z, BT, D, HALVES)
                z = _together(a * cos - c * sin, a * sin + c * cos, BT, D, False)
            tl.store(to, z.to(out.dtype.element_ty), mask=here)
        at += xh
        to += T * width


@triton.jit
def _encode_gradient(
    x, unit, turn, grad, grad_x, turned, reflected,
    H, T, xb, xh, xt, tb, gb, gh, gt,
    D: tl.constexpr,
    E: tl.constexpr,
    BT: tl.constexpr,
    REFLECTS: tl.constexpr,
    HALVES: tl.constexpr,
    WIDE: tl.constexpr,
    PHI: tl.constexpr,
    TURN_LEARNS: tl.constexpr,
    UNIT_LEARNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x, and the sums over heads for those of turn and unit."""
    W: tl.constexpr = D if WIDE else D // 2
    rows, b, columns, here, cos, sin, u = _begin(unit, turn, T, tb, D, E, W, BT)
    at = x + b * xb + rows[:, None] * xt + columns[None, :]
    to = grad_x + b * gb + rows[:, None] * gt + columns[None, :]
    width: tl.constexpr = 2 * D if WIDE else D
    of = grad + (b * H * T + rows[:, None]) * width + columns[None, :]
    of_cos, of_sin = tl.zeros((BT, W), tl.float32), tl.zeros((BT, W), tl.float32)
    of_unit = tl.zeros((D,), tl.float32)
    for _ in range(H):
        given = tl.load(at, mask=here, other=0.0).to(tl.float32)
        first = tl.load(of, mask=here, other=0.0).to(tl.float32)
        second = tl.load(of + (D if WIDE else 0), mask=here, other=0.0).to(tl.float32)
        g, d_cos, d_sin, d_u = _through(
            given, first, second, u, cos, sin, BT, D, E, REFLECTS, HALVES, WIDE, PHI
        )
        of_cos, of_sin, of_unit = of_cos + d_cos, of_sin + d_sin, of_unit + d_u
        tl.store(to, g.to(grad_x.dtype.element_ty), mask=here)
        at, to, of = at + xh, to + gh, of + T * width
    if TURN_LEARNS:
        _store_turns(turned + b * T * (2 * E), of_cos, of_sin, rows, T, E, W)
    if UNIT_LEARNS:
        tl.store(reflected + tl.program_id(0).to(tl.int64) * D + columns, of_unit)
