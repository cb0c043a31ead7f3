"""phi, P and Lambda in one pass over memory: a Triton kernel and its gradient.

x is read once and the encoded features are written once, whatever of phi (1 + elu), a Householder
reflection or the odd-even permutation, and a rotation or the unitary diagonal is to be done; the
gradient reads x and the gradient once and makes the rest anew. Sums are float32. The reference is
``LRPE.forward`` of ``feature_map``.

A program takes BT positions of one sequence and all its heads, so that the gradient of the angles
needs no atomic additions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from lrpe_fairseq.kernels.encode_blocks import Form
from lrpe_fairseq.kernels.loader import on_device

NUMBERS = 2048  # of a head that a program holds in its registers


def serves(x: Tensor, form: Form) -> bool:
    """Whether the kernels are for x (B, H, T, D): a fit device and type, D a power of two."""
    width = x.shape[-1]
    fit = width >= 16 and width & (width - 1) == 0 and x.stride(-1) == 1
    return form.simple and fit and on_device(x)


def encode(x: Tensor, unit: Tensor | None, turn: Tensor, form: Form) -> Tensor:
    """Lambda P phi(x), (B, H, T, D) or twice as wide, in the type of x.

    Args:
        x: (B, H, T, D), last axis contiguous. unit: (D,), float32, of the reflection, or None.
        turn: exp(i s theta), complex64, (T, E) or (B, 1, T, E); E pairs (features if ``wide``)
            are turned, the others stay.
        form: phi always comes first here.
    """
    return _Encoded.apply(x, unit, turn, form)


class _Encoded(torch.autograd.Function):
    """The gradient of ``turn`` has its real part where that of the cosine stands, as torch's."""

    @staticmethod
    def forward(ctx, x, unit, turn, form):
        batch, heads, time, width = x.shape
        out = x.new_empty(batch, heads, time, width * (2 if form.wide else 1))
        parts = torch.view_as_real(turn.contiguous())
        _encode[_grid(x)](
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
    @once_differentiable
    def backward(ctx, grad):
        x, unit, turn = ctx.saved_tensors
        grad, parts = grad.contiguous(), torch.view_as_real(turn.contiguous())
        batch, _, time, width = x.shape
        grid, grad_x = _grid(x), torch.empty_like(x)
        learns = {
            "TURN_LEARNS": turn.requires_grad,
            "UNIT_LEARNS": unit is not None and unit.requires_grad,
        }
        turned = x.new_empty(
            (batch, time, turn.shape[-1], 2) if learns["TURN_LEARNS"] else (1,), dtype=torch.float32
        )
        reflected = x.new_empty(
            (grid[0] * grid[1], width) if learns["UNIT_LEARNS"] else (1,), dtype=torch.float32
        )
        _encode_gradient[grid](
            x,
            x if unit is None else unit,
            parts,
            grad,
            grad_x,
            turned,
            reflected,
            *_sizes(x, parts),
            *grad_x.stride()[:3],
            **_constants(x, unit, turn, ctx.form),
            **learns,
        )
        grad_turn = grad_unit = None
        if learns["TURN_LEARNS"]:
            sums = torch.view_as_complex(turned)
            grad_turn = sums.sum(0) if turn.dim() == 2 else sums.unsqueeze(1)
        if learns["UNIT_LEARNS"]:
            grad_unit = reflected.sum(0)
        return grad_x, grad_unit, grad_turn, None


def _rows(x: Tensor) -> int:
    """Positions that one program takes: a power of two."""
    return min(32, max(1, NUMBERS // x.shape[-1]))


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[2], _rows(x)), x.shape[0]


def _sizes(x: Tensor, parts: Tensor) -> tuple[int, ...]:
    """Heads, time, strides of x, stride of ``parts`` from sequence to sequence."""
    return x.shape[1], x.shape[2], *x.stride()[:3], parts.stride(0) if parts.dim() == 5 else 0


def _constants(x: Tensor, unit: Tensor | None, turn: Tensor, form: Form) -> dict:
    return {
        "D": x.shape[-1],
        "E": turn.shape[-1],
        "BT": _rows(x),
        "REFLECTS": unit is not None,
        "HALVES": form.halves,
        "WIDE": form.wide,
        "num_warps": 4,
    }


@triton.jit
def _place(BT: tl.constexpr):
    """Positions (BT,) and sequence of this program, 64 bits wide as all that is computed of them:
    a batch may hold more than 2^31 numbers."""
    return (
        tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT),
        tl.program_id(1).to(tl.int64),
    )


@triton.jit
def _turns(turn, rows, T, E: tl.constexpr, W: tl.constexpr):
    """Cosines and sines (BT, W) of the rows; 1 and 0 beyond the E that turn."""
    columns = tl.arange(0, W)
    at = rows[:, None] * (2 * E) + 2 * columns[None, :]
    known = (rows[:, None] < T) & (columns[None, :] < E)
    return tl.load(turn + at, mask=known, other=1.0), tl.load(turn + at + 1, mask=known, other=0.0)


@triton.jit
def _phi(x):
    """1 + elu(x)."""
    return tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))


@triton.jit
def _reflected(p, u, REFLECTS: tl.constexpr):
    if REFLECTS:
        p = p - 2.0 * tl.sum(p * u[None, :], 1)[:, None] * u[None, :]
    return p


@triton.jit
def _apart(z, BT: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr):
    """First and second of every pair of z (BT, D): (BT, D / 2) each."""
    if HALVES:
        pairs = tl.permute(tl.reshape(z, (BT, 2, D // 2)), (0, 2, 1))
    else:
        pairs = tl.reshape(z, (BT, D // 2, 2))
    return tl.split(pairs)


@triton.jit
def _together(a, c, BT: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr):
    """What :func:`_apart` took apart."""
    pairs = tl.join(a, c)
    if HALVES:
        pairs = tl.permute(pairs, (0, 2, 1))
    return tl.reshape(pairs, (BT, D))


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
):
    rows, b = _place(BT)
    columns = tl.arange(0, D)
    here = (rows < T)[:, None] & (columns >= 0)[None, :]
    W: tl.constexpr = D if WIDE else D // 2
    cos, sin = _turns(turn + b * tb, rows, T, E, W)
    u = tl.load(unit + columns).to(tl.float32)
    at = x + b * xb + rows[:, None] * xt + columns[None, :]
    width: tl.constexpr = 2 * D if WIDE else D
    to = out + (b * H * T + rows[:, None]) * width + columns[None, :]
    for _ in range(H):
        z = tl.load(at, mask=here, other=0.0).to(tl.float32)
        z = _reflected(_phi(z), u, REFLECTS)
        if WIDE:
            tl.store(to, (z * cos).to(out.dtype.element_ty), mask=here)
            tl.store(to + D, (z * sin).to(out.dtype.element_ty), mask=here)
        else:
            a, c = _apart(z, BT, D, HALVES)
            y = _together(a * cos - c * sin, a * sin + c * cos, BT, D, False)
            tl.store(to, y.to(out.dtype.element_ty), mask=here)
        at += xh
        to += T * width


@triton.jit
def _encode_gradient(
    x,
    unit,
    turn,
    grad,
    grad_x,
    turned,
    reflected,
    H,
    T,
    xb,
    xh,
    xt,
    tb,
    gb,
    gh,
    gt,
    D: tl.constexpr,
    E: tl.constexpr,
    BT: tl.constexpr,
    REFLECTS: tl.constexpr,
    HALVES: tl.constexpr,
    WIDE: tl.constexpr,
    TURN_LEARNS: tl.constexpr,
    UNIT_LEARNS: tl.constexpr,
):
    rows, b = _place(BT)
    columns = tl.arange(0, D)
    here = (rows < T)[:, None] & (columns >= 0)[None, :]
    W: tl.constexpr = D if WIDE else D // 2
    cos, sin = _turns(turn + b * tb, rows, T, E, W)
    u = tl.load(unit + columns).to(tl.float32)
    at = x + b * xb + rows[:, None] * xt + columns[None, :]
    to = grad_x + b * gb + rows[:, None] * gt + columns[None, :]
    width: tl.constexpr = 2 * D if WIDE else D
    of = grad + (b * H * T + rows[:, None]) * width + columns[None, :]
    of_cos, of_sin = tl.zeros((BT, W), tl.float32), tl.zeros((BT, W), tl.float32)
    of_unit = tl.zeros((D,), tl.float32)
    for _ in range(H):
        given = tl.load(at, mask=here, other=0.0).to(tl.float32)
        p = _phi(given)
        z = _reflected(p, u, REFLECTS)
        first = tl.load(of, mask=here, other=0.0).to(tl.float32)
        if WIDE:
            second = tl.load(of + D, mask=here, other=0.0).to(tl.float32)
            of_cos += first * z
            of_sin += second * z
            g = first * cos + second * sin
        else:
            re, im = _apart(first, BT, D, False)
            a, c = _apart(z, BT, D, HALVES)
            of_cos += re * a + im * c
            of_sin += im * a - re * c
            g = _together(re * cos + im * sin, im * cos - re * sin, BT, D, HALVES)
        if REFLECTS:
            along = tl.sum(g * u[None, :], 1)[:, None]
            if UNIT_LEARNS:
                of_unit += tl.sum(-2.0 * (tl.sum(p * u[None, :], 1)[:, None] * g + along * p), 0)
            g = g - 2.0 * along * u[None, :]
        g = tl.where(given > 0, g, g * p)  # phi is its own derivative below zero
        tl.store(to, g.to(grad_x.dtype.element_ty), mask=here)
        at += xh
        to += gh
        of += T * width
    if TURN_LEARNS:
        pairs = tl.arange(0, W)
        place = turned + (b * T + rows[:, None]) * (2 * E) + 2 * pairs[None, :]
        known = (rows[:, None] < T) & (pairs[None, :] < E)
        tl.store(place, of_cos, mask=known)
        tl.store(place + 1, of_sin, mask=known)
    if UNIT_LEARNS:
        program = b * tl.num_programs(0) + tl.program_id(0)
        tl.store(reflected + program * D + columns, of_unit)
