"""Lambda P phi(x) or Lambda P x of queries and keys on CUDA: one launch, and one for the gradients.

P is a reflection, odd-even or the identity, and Lambda a rotation, unitary or a permutation. The
kernel reads q and k, computes phases or indices from the positions and writes the features once.
The gradient recomputes intermediate results. Sums are in float32. The definition is
``encode.both``.

A program processes BT positions of one sequence of queries or of keys, with all heads. It stores
its sums for the gradients of angles and reflection, which are added up afterwards, so equal inputs
give equal bits. Strides are multiples of UNIT elements.

An angle is a fixed-point number of turns, theta / 2 pi mod 1 in units of 2^-64. An integer product
that wraps around multiplies it by a position without rounding, so phases are exact to float32 at
any position.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrpe_fairseq.kernels import proof
from lrpe_fairseq.kernels.conditions import gradients_of, is_plain
from lrpe_fairseq.kernels.encode import encode as defined
from lrpe_fairseq.kernels.encode.encode import Angles, Transform, Variant
from lrpe_fairseq.kernels.loader import launch, on_device
from lrpe_fairseq.kernels.results import gradient_rows, result_like
from lrpe_fairseq.kernels.tiles_triton import cdiv

ELEMENTS = 2048  # maximum number of features of one head in the registers of a program
SMALLEST = tl.constexpr(defined.EPS)


Arguments = tuple[Tensor, Tensor, Tensor | None, Angles | Tensor | None, Tensor, Tensor, Variant]
"""Those of :func:`encode`."""


def serves(q: Tensor, k: Tensor, variant: Variant) -> bool:
    """True if the kernels support q (B, H, T, D) and k: device, dtype, and D a power of two."""
    width = q.shape[-1]
    fit = width >= 16 and width & (width - 1) == 0 and q.stride(-1) == k.stride(-1) == 1
    alike = q.dtype == k.dtype and q.device == k.device and k.shape[-1] == width
    return is_plain(q, k) and not variant.fourier and fit and alike and on_device(q)


def arguments_of_both(
    q: Tensor, k: Tensor, transform: Transform, q_positions: Tensor, k_positions: Tensor
) -> Arguments:
    """Return the arguments of :func:`encode` for a transform of q and k at their positions."""
    angles = _angles_of(transform, q_positions)
    if angles is None:
        q_power = transform.powers(q_positions, torch.float32)
        same = k_positions is q_positions
        k_positions = q_power if same else transform.powers(k_positions, torch.float32)
        q_positions = q_power
    return q, k, transform.normal, angles, q_positions, k_positions, transform.variant


def arguments_of_one(x: Tensor, transform: Transform, positions: Tensor) -> Arguments:
    """Return the arguments for x (B, H, T, D) alone: its keys have no tokens."""
    angles, keys = _angles_of(transform, positions), x[:, :, :0]
    none = positions[..., :0]
    if angles is None:
        positions = transform.powers(positions, torch.float32)
        none = positions[..., :0, :]
    return x, keys, transform.normal, angles, positions, none, transform.variant


def arguments_of_phi(q: Tensor, k: Tensor | None = None) -> Arguments:
    """Return the arguments for phi of q (B, H, T, D) and k (B, H, S, D), without P and Lambda."""
    k = q[:, :, :0] if k is None else k
    nowhere = torch.empty(0, dtype=torch.int64, device=q.device)
    return q, k, None, None, nowhere, nowhere, Variant()


def _angles_of(transform: Transform, positions: Tensor) -> Angles | Tensor | None:
    """Return that from which the kernel computes Lambda; None if it needs phases.

    The phases of sums of increments, which are floating-point numbers, are those of each token.
    """
    if transform.angles is None or positions.is_floating_point():
        return None
    return transform.angles(positions.device)


def encode(
    q: Tensor,
    k: Tensor,
    normal: Tensor | None,
    angles: Angles | Tensor | None,
    q_positions: Tensor,
    k_positions: Tensor,
    variant: Variant,
) -> tuple[Tensor, Tensor]:
    """Compute Lambda P phi of q and k, (B, H, T, D) and (B, H, S, D) or twice as wide.

    Args:
        q, k: last axis contiguous, otherwise of any strides.
        normal: of the reflection (D,), of any length, float32, or None.
        angles: E angles, for pairs (features if ``wide``); the others are unchanged. If
            ``permutes`` the cycles of the permutation, int64 (4, D) or (4, H, D); see
            ``encode.along_cycles``. None: phases are given.
        q_positions, k_positions: int64 (T,) or (B, T) and (S,) or (B, S). For given phases these,
            complex64 (H, T, E) or (B, H, T, E). A gradient is that of phases of absolute value 1,
            for (B, H, T, E).
        variant: which of the maps.
    """
    theta, column, grid = angles if isinstance(angles, Angles) else (angles, None, 0)
    return _Encoded.apply(q, k, normal, theta, column, q_positions, k_positions, grid, variant)


def feature_maps(q: Tensor, k: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute phi of q (B, H, T, D) and k (B, H, S, D): :func:`encode` without P and Lambda."""
    return encode(*arguments_of_phi(q, k))


class _Encoded(torch.autograd.Function):
    """Lambda P phi of q and k with a hand-written gradient of q, k, v, the angles and phases."""

    @staticmethod
    def forward(ctx, q, k, v, theta, column, q_positions, k_positions, grid, variant):
        twice = 2 if variant.wide else 1
        out = [result_like(q, x.shape[3] * twice, time=x.shape[2]) for x in (q, k)]
        ctx.shapes, ctx.grid, ctx.variant = (q.shape, k.shape), grid, variant
        ctx.rows = min(32, max(1, ELEMENTS // (twice * q.shape[3])))  # of a program; a power of two
        ctx.programs = sum(len(x) * cdiv(x.shape[2], ctx.rows) for x in (q, k))
        parameters = v, theta, column, q_positions, k_positions
        _launch(_encode, ctx, (q, k), parameters, out)
        reads_x = variant.phi or any(ctx.needs_input_grad[2:7])
        ctx.key = proof.current()
        ctx.save_for_backward(*((q, k) if reads_x else (None, None)), *parameters)
        return tuple(out)

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        saved = ctx.saved_tensors  # read once, as checkpointing allows
        by_definition = partial(_defined_gradients, ctx, saved, (grad_q, grad_k))
        if torch.is_grad_enabled():
            return *by_definition(), None, None
        by_kernels = partial(_Encoded._gradients, ctx, saved, grad_q, grad_k)
        return *proof.backward(ctx.key, by_kernels, by_definition), None, None

    @staticmethod
    def _gradients(
        ctx, saved: tuple[Tensor | None, ...], grad_q: Tensor, grad_k: Tensor
    ) -> list[Tensor | None]:
        q, k, v, theta, column, *positions = saved
        grads = [gradient_rows(g) for g in (grad_q, grad_k)]
        of_rows = [result_like(grads[0], width, time=time) for _, _, time, width in ctx.shapes]
        of_v, turns = ctx.needs_input_grad[2], any(ctx.needs_input_grad[3:5])
        learned = (theta if turns else None, column if turns else None, v if of_v else None)
        sizes = [0 if x is None else x.numel() for x in learned]
        sums = grads[0].new_empty(ctx.programs, sum(sizes), dtype=torch.float32)
        phased = any(ctx.needs_input_grad[5:7])
        turned = [x.new_empty(x.shape, dtype=torch.float32) if phased else None for x in positions]
        flags = {"READS_X": q is not None, "ANGLES_LEARN": turns or phased, "UNIT_LEARNS": of_v}
        rows = (*(grads if q is None else (q, k)), *grads)
        parameters = (v, theta, column, *positions)
        _launch(_encode_gradient, ctx, rows, parameters, (*of_rows, sums, *turned), flags)
        parts: Sequence[Tensor | None] = [None] * len(sizes)
        if any(sizes):
            parts = sums.sum(0).split(sizes)
        of_theta, of_column, of_v = (
            None if x is None else part.view_as(x) for x, part in zip(learned, parts, strict=True)
        )
        of_phases = (
            1j * phase * turn if phased else None
            for phase, turn in zip(positions, turned, strict=True)
        )
        return [*of_rows, of_v, of_theta, of_column, *of_phases]


def _defined_gradients(
    ctx, saved: tuple[Tensor | None, ...], grads: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Return the gradients of the definition, under create_graph with their graph."""
    q, k, *parameters = saved
    if q is None:  # the map is linear in q and k, so any of them have the same gradient
        q, k = (grads[0].new_zeros(shape).requires_grad_() for shape in ctx.shapes)

    def definition(q, k, v, theta, column, q_positions, k_positions):
        angles = Angles(theta, column, ctx.grid)
        angles = theta if theta is None or ctx.variant.permutes else angles
        return defined.both(q, k, v, angles, q_positions, k_positions, ctx.variant)

    return gradients_of(definition, (q, k, *parameters), ctx.needs_input_grad[:7], grads)


def _with_steps(positions: Tensor) -> tuple[Tensor, list[int]]:
    """Return positions, or given phases as (B or 1, H, T, E, 2), and three strides.

    They lead to the next sequence, head and token, and are 0 on axes of length 1.
    """
    if positions.is_complex():
        phases = torch.view_as_real(positions.resolve_conj().contiguous())
        phases = phases if phases.dim() == 5 else phases.unsqueeze(0)
        axes = zip(phases.shape[:3], phases.stride()[:3], strict=True)
        return phases, [step if size > 1 else 0 for size, step in axes]
    rows, length = (1, len(positions)) if positions.dim() == 1 else positions.shape
    by_row = positions.stride(0) if rows > 1 else 0
    return positions, [by_row, 0, positions.stride(-1) if length > 1 else 0]


def _launch(kernel, ctx, rows, parameters, results, flags=None) -> None:
    """Launch a kernel.

    rows: tensors (B, H, T, .) whose strides it needs. parameters: v, theta, column, and the
        positions of q and of k. results: the first two have one layout of ``result_like``.
    """
    q_shape, k_shape = ctx.shapes
    batch, heads, queries, width = q_shape
    keys = k_shape[2]
    v, theta, column, q_positions, k_positions = parameters
    permutes = ctx.variant.permutes
    q_places, q_steps = _with_steps(q_positions)
    k_places, k_steps = q_places, q_steps
    if k_positions is not q_positions:
        k_places, k_steps = _with_steps(k_positions)
    strides = [n for x in rows for n in x.stride()[:3]]
    phased = q_positions.is_complex()
    pairs = q_places.shape[3] if phased else 0
    if theta is not None and not permutes:
        pairs = theta.shape[-1]
    unit = math.gcd(16, *strides)
    apart = results[0].stride(2) // (heads * results[0].shape[3])
    tensors = (*rows, q_places, k_places, v, theta, column, *results)
    launch(
        kernel,
        (ctx.programs,),
        *[rows[0] if x is None else x for x in tensors],  # a pointer that is not read
        *(batch, heads, queries, keys, ctx.grid, *q_steps, *k_steps),
        *[n // unit for n in strides],
        apart,
        D=width,
        E=pairs,
        BT=ctx.rows,
        UNIT=unit,
        REFLECTS=v is not None,
        HALVES=ctx.variant.halves,
        WIDE=ctx.variant.wide,
        PHI=ctx.variant.phi,
        PHASED=phased,
        GRID=column is not None,
        PERMUTES=permutes,
        HEADWISE=phased or (theta is not None and theta.dim() == (3 if permutes else 2)),
        num_warps=8 if permutes else 4,  # with 4 some would spill registers
        **(flags or {}),
    )


NUMBERS = ["B", "H", "T", "S", "grid", "qb", "qh", "qt", "kb", "kh", "kt"]
NUMBERS += ["gb", "gh", "gt", "fb", "fh", "ft", "ab", "ah", "at", "cb", "ch", "ct"]
NUMBERS += ["apart"]
"""Arguments whose values are not compiled in: sizes, and strides of q, k, their gradients and their
positions or phases. Tokens of a sequence are ``apart`` in the results: 1, or B if time is first."""

# --- phases ------------------------------------------------------------------------------------

HIGH, MIDDLE, LOW = (
    tl.constexpr(n * 2.0**-e) for n, e in ((10680707, 26), (7228996, 50), (1387004, 74))
)
"""1 / 2 pi as a sum of three numbers of 24 bits."""
RADIANS = tl.constexpr(math.tau / 2**34)


@triton.jit
def _fixed(turns):
    """Return the fraction of float64 turns in units of 2^-64, int64."""
    return ((turns - tl.floor(turns + 0.5)) * 18446744073709551616.0).to(tl.int64)


@triton.jit
def _turns_of(theta):
    """Return theta / 2 pi mod 1 in units of 2^-64, int64, of theta in radians.

    Every product but the last has at most 53 bits and is exact.
    """
    theta = theta.to(tl.float64)
    first = ((theta.to(tl.int64, bitcast=True) >> 27) << 27).to(tl.float64, bitcast=True)
    second = theta - first
    turns = _fixed(first * HIGH) + _fixed(second * HIGH) + _fixed(first * MIDDLE)
    return turns + _fixed(second * MIDDLE + theta * LOW)


@triton.jit
def _cosine_and_sine(turns):
    """Return cosine and sine, float32, of turns in units of 2^-64; errors are about 1e-7."""
    quarter = (turns + (1 << 61)) >> 62
    rest = (turns - (quarter << 62)) >> 30  # at most an eighth, in units of 2^-34
    x = rest.to(tl.int32).to(tl.float32) * RADIANS
    z = x * x
    sine = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    cosine = z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    cosine = 1.0 - 0.5 * z + z * cosine
    odd = (quarter & 1) == 1
    c, s = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    return tl.where(((quarter + 1) & 2) == 0, c, -c), tl.where((quarter & 2) == 0, s, -s)


@triton.jit
def _turned(
    at, theta, column, row, col, here, h,
    E: tl.constexpr, W: tl.constexpr, GRID: tl.constexpr, PHASED: tl.constexpr,
):  # fmt: skip
    """Return the cosines and sines (BT, W) of head h; 1 and 0 for columns from E on.

    at: pointers to the phases of the rows, if PHASED. row, col: positions (BT,).
    """
    pairs = tl.arange(0, W)
    if PHASED:
        place, known = at[:, None] + 2 * pairs[None, :], here[:, None] & (pairs < E)[None, :]
        cos, sin = tl.load(place, mask=known, other=1.0), tl.load(place + 1, mask=known, other=0.0)
    else:
        theta = tl.load(theta + h * E + pairs, mask=pairs < E, other=0.0)
        turns, wrong = row[:, None] * _turns_of(theta)[None, :], theta * 0.0  # 0, or NaN
        if GRID:
            column = tl.load(column + h * E + pairs, mask=pairs < E, other=0.0)
            turns += col[:, None] * _turns_of(column)[None, :]
            wrong += column * 0.0
        cos, sin = _cosine_and_sine(turns)
        cos, sin = cos + wrong.to(tl.float32)[None, :], sin + wrong.to(tl.float32)[None, :]
    return cos, sin


@triton.jit
def _positions(at, here, grid, READS: tl.constexpr, GRID: tl.constexpr):
    """Return the positions (BT,), or with GRID row and column of the grid, int64."""
    row = here.to(tl.int64)
    if READS:
        row = tl.load(at, mask=here, other=0)
    col = row * 0
    if GRID:  # noqa: SIM102  (a constant)
        if grid > 0:
            s = row
            row = s // grid
            col = s - row * grid
            row, col = tl.where(col < 0, row - 1, row), tl.where(col < 0, col + grid, col)
    return row, col


# --- permutations ------------------------------------------------------------------------------


@triton.jit
def _moves(
    cycles, s, h, size, BACK: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr
):  # fmt: skip
    """Return by how many columns the source of every feature of Lambda P x is away, (BT, D).

    With BACK features are those of x, and sources those of its gradient. s: positions (BT,), below
    2^50. size: numbers in each row of the cycles. s mod length is the high word of the product of
    the length and the fraction of s / length.
    """
    columns = tl.arange(0, D)
    element = columns
    if BACK and HALVES:  # the place of each feature after the odd-even permutation
        element = tl.where(columns < D // 2, 2 * columns, 2 * columns - D + 1)
    at = cycles + h * D + element
    start, step, length = tl.load(at), tl.load(at + size), tl.load(at + 2 * size)
    inverse = ((1 << 62) // length) * 4 + 4
    n = tl.umulhi(tl.abs(s)[:, None] * inverse[None, :], length[None, :])
    n = tl.where((s < 0)[:, None] != BACK, length[None, :] - n, n) + step[None, :]
    n = tl.where(n >= length[None, :], n - length[None, :], n)
    source = tl.load(cycles + 3 * size + h * D + start[None, :] + n)
    if HALVES and not BACK:
        source = source // 2 + (source % 2) * (D // 2)
    return (source - columns[None, :]).to(tl.int32)


# --- steps -------------------------------------------------------------------------------------


@triton.jit
def _phi(x):
    """Compute 1 + elu(x)."""
    return tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0, tl.PropagateNan.ALL)))


@triton.jit
def _unit(v, D: tl.constexpr, REFLECTS: tl.constexpr):
    """Return the unit vector (D,) in the direction of v, and the norm of v."""
    u = tl.zeros((D,), tl.float32)
    norm = 1.0
    if REFLECTS:
        u = tl.load(v + tl.arange(0, D)).to(tl.float32)
        norm = tl.sqrt(tl.sum(u * u, 0))
        u = u / tl.maximum(norm, SMALLEST)
    return u, norm


@triton.jit
def _reflected(p, u, REFLECTS: tl.constexpr):
    """Reflect the rows of p (BT, D) in the hyperplane normal to u, if REFLECTS."""
    if REFLECTS:
        p = p - 2.0 * tl.sum(p * u[None, :], 1)[:, None] * u[None, :]
    return p


@triton.jit
def _projected(
    x, v, moves, u, norm, known,
    D: tl.constexpr, REFLECTS: tl.constexpr, PHI: tl.constexpr, PERMUTES: tl.constexpr,
):  # fmt: skip
    """Return P phi(x) (BT, D) of the rows at x, a reflection if any; permuted if PERMUTES."""
    p = tl.load(x, mask=known, other=0.0).to(tl.float32)
    z = _reflected(_phi(p) if PHI else p, u, REFLECTS)
    if PERMUTES:
        z = tl.load(x + moves, mask=known, other=0.0).to(tl.float32)
        z = _phi(z) if PHI else z
        if REFLECTS:
            along = tl.sum((_phi(p) if PHI else p) * u[None, :], 1)[:, None]
            other = tl.load(v + tl.arange(0, D)[None, :] + moves) / tl.maximum(norm, SMALLEST)
            z -= 2.0 * along * other
    return z


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
def _of_unit(g, p, u):
    """Return the gradient (D,) of u in p - 2 u (u . p), whose gradient is g, summed over rows."""
    g_along = tl.sum(g * u[None, :], 1)[:, None]
    p_along = tl.sum(p * u[None, :], 1)[:, None]
    return tl.sum(-2.0 * (p_along * g + g_along * p), 0)


@triton.jit
def _through(
    x, first, second, u, cos, sin,
    BT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, REFLECTS: tl.constexpr,
    HALVES: tl.constexpr, WIDE: tl.constexpr, PHI: tl.constexpr,
):  # fmt: skip
    """Return the gradients of x (BT, D), of angles times position and of u from a head's gradient.

    ``second`` is the gradient of the second half of wide features. Unused results cost nothing,
    because the compiler removes them.
    """
    p = _phi(x) if PHI else x
    z = _reflected(p, u, REFLECTS)
    if WIDE:
        z = _paired(z, BT, D, HALVES)
        g, of_angle = first * cos + second * sin, z * (second * cos - first * sin)
        g = _unpaired(g, BT, D, HALVES)
    elif E > 0:
        re, im = _apart(first, BT, D, False)
        a, c = _apart(z, BT, D, HALVES)
        of_a, of_c = re * cos + im * sin, im * cos - re * sin
        g, of_angle = _together(of_a, of_c, BT, D, HALVES), a * of_c - c * of_a
    else:  # phi alone
        g, of_angle = first, cos
    of_unit = _of_unit(g, p, u)
    g = _reflected(g, u, REFLECTS)
    if PHI:
        g = tl.where(x > 0, g, g * p)  # below zero phi' = phi
    return g, of_angle, of_unit


@triton.jit
def _store_angles(
    to, of_angle, row, col, step, E: tl.constexpr, W: tl.constexpr, GRID: tl.constexpr
):
    """Write the sums over rows of the gradients (BT, W) times the positions; column ones after."""
    pairs = tl.arange(0, W)
    by_row = tl.sum(of_angle * row.to(tl.float32)[:, None], 0)
    tl.store(to + pairs, by_row, mask=pairs < E)
    if GRID:
        by_column = tl.sum(of_angle * col.to(tl.float32)[:, None], 0)
        tl.store(to + step + pairs, by_column, mask=pairs < E)


@triton.jit
def _store_phases(to, of_angle, rows, here, E: tl.constexpr, W: tl.constexpr):
    """Write the gradients (BT, W) of the angles of given phases."""
    pairs = tl.arange(0, W)[None, :]
    tl.store(to + rows[:, None] * E + pairs, of_angle, mask=here[:, None] & (pairs < E))


@triton.jit
def _store_unit(to, of_unit, u, norm, D: tl.constexpr):
    """Write the gradient of v, for the gradient (D,) of the unit vector u."""
    along = tl.where(norm >= SMALLEST, tl.sum(of_unit * u, 0), 0.0)
    tl.store(to + tl.arange(0, D), (of_unit - along * u) / tl.maximum(norm, SMALLEST))


# --- kernels -----------------------------------------------------------------------------------


@triton.jit
def _place(T, S, B, BT: tl.constexpr):
    """Return True for queries, their number, the sequence, rows (BT,) and which of them exist.

    Rows and sequence are int64, because a batch may have more than 2^31 elements.
    """
    program, of_q = tl.program_id(0), tl.cdiv(T, BT) * B
    is_q = program < of_q
    program = tl.where(is_q, program, program - of_q)
    time = tl.where(is_q, T, S)
    parts = tl.cdiv(time, BT)
    rows = (program % parts).to(tl.int64) * BT + tl.arange(0, BT)
    return is_q, time, (program // parts).to(tl.int64), rows, rows < time


@triton.jit
def _rows_of(
    is_q, q, k, b, rows, qb, qt, kb, kt, D: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Return pointers (BT, D) to rows of sequence b of q or of k, in the first head."""
    start = tl.where(is_q, q, k) + b * tl.where(is_q, qb, kb) * UNIT
    return start + rows[:, None] * (tl.where(is_q, qt, kt) * UNIT) + tl.arange(0, D)[None, :]


@triton.jit
def _results_of(is_q, q, k, b, rows, time, apart, H, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return pointers (BT, D) to the same rows of a result, which is WIDTH wide."""
    row = b * tl.where(apart == 1, time, 1) + rows * apart
    return tl.where(is_q, q, k) + row[:, None] * (H * WIDTH) + tl.arange(0, D)[None, :]


@triton.jit(do_not_specialize=NUMBERS)
def _encode(
    q, k, q_at, k_at, v, theta, column, q_out, k_out,
    B, H, T, S, grid, ab, ah, at, cb, ch, ct, qb, qh, qt, kb, kh, kt, apart,
    D: tl.constexpr, E: tl.constexpr, BT: tl.constexpr, UNIT: tl.constexpr,
    REFLECTS: tl.constexpr, HALVES: tl.constexpr, WIDE: tl.constexpr, PHI: tl.constexpr,
    PHASED: tl.constexpr, GRID: tl.constexpr, PERMUTES: tl.constexpr, HEADWISE: tl.constexpr,
):  # fmt: skip
    """Compute the features of all heads at the positions of this program."""
    W: tl.constexpr = D if WIDE else D // 2
    width: tl.constexpr = 2 * D if WIDE else D
    is_q, time, b, rows, here = _place(T, S, B, BT)
    known = here[:, None] & (tl.arange(0, D) >= 0)[None, :]
    x = _rows_of(is_q, q, k, b, rows, qb, qt, kb, kt, D, UNIT)
    to = _results_of(is_q, q_out, k_out, b, rows, time, apart, H, D, width)
    place = tl.where(is_q, q_at, k_at) + b * tl.where(is_q, ab, cb) + rows * tl.where(is_q, at, ct)
    u, norm = _unit(v, D, REFLECTS)
    row, col = _positions(place, here, grid, (E > 0 or PERMUTES) and not PHASED, GRID)
    size = D * H if HEADWISE else D
    moves = _moves(theta, row, 0, size, False, D, HALVES) if PERMUTES else 0
    cos, sin = _turned(place, theta, column, row, col, here, 0, E, W, GRID, PHASED)
    for h in range(H):
        if HEADWISE:
            head = place + h * tl.where(is_q, ah, ch).to(tl.int64)
            cos, sin = _turned(head, theta, column, row, col, here, h, E, W, GRID, PHASED)
            if PERMUTES:
                moves = _moves(theta, row, h, size, False, D, HALVES)
        z = _projected(x, v, moves, u, norm, known, D, REFLECTS, PHI, PERMUTES)
        if WIDE:
            z = _paired(z, BT, D, HALVES)
            tl.store(to, (z * cos).to(q_out.dtype.element_ty), mask=known)
            tl.store(to + D, (z * sin).to(q_out.dtype.element_ty), mask=known)
        else:
            if E > 0:
                a, c = _apart(z, BT, D, HALVES)
                z = _together(a * cos - c * sin, a * sin + c * cos, BT, D, False)
            tl.store(to, z.to(q_out.dtype.element_ty), mask=known)
        x += tl.where(is_q, qh, kh).to(tl.int64) * UNIT
        to += width


@triton.jit(do_not_specialize=NUMBERS)
def _encode_gradient(
    q, k, q_grad, k_grad, q_at, k_at, v, theta, column, of_q, of_k, sums, of_q_at, of_k_at,
    B, H, T, S, grid, ab, ah, at, cb, ch, ct, qb, qh, qt, kb, kh, kt, gb, gh, gt, fb, fh, ft,
    apart, D: tl.constexpr, E: tl.constexpr, BT: tl.constexpr, UNIT: tl.constexpr,
    REFLECTS: tl.constexpr, HALVES: tl.constexpr, WIDE: tl.constexpr, PHI: tl.constexpr,
    PHASED: tl.constexpr, GRID: tl.constexpr, PERMUTES: tl.constexpr, HEADWISE: tl.constexpr,
    READS_X: tl.constexpr, ANGLES_LEARN: tl.constexpr, UNIT_LEARNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q or k and of given phases, and this program's sums of others."""
    W: tl.constexpr = D if WIDE else D // 2
    is_q, time, b, rows, here = _place(T, S, B, BT)
    known = here[:, None] & (tl.arange(0, D) >= 0)[None, :]
    x = _rows_of(is_q, q, k, b, rows, qb, qt, kb, kt, D, UNIT)
    grads = _rows_of(is_q, q_grad, k_grad, b, rows, gb, gt, fb, ft, D, UNIT)
    to = _results_of(is_q, of_q, of_k, b, rows, time, apart, H, D, D)
    place = tl.where(is_q, q_at, k_at) + b * tl.where(is_q, ab, cb) + rows * tl.where(is_q, at, ct)
    u, norm = _unit(v, D, REFLECTS)
    row, col = _positions(place, here, grid, (E > 0 or PERMUTES) and not PHASED, GRID)
    size = D * H if HEADWISE else D
    moves = _moves(theta, row, 0, size, True, D, HALVES) if PERMUTES else 0
    cos, sin = _turned(place, theta, column, row, col, here, 0, E, W, GRID, PHASED)
    of_angle, of_unit = tl.zeros((BT, W), tl.float32), tl.zeros((D,), tl.float32)
    angles = (H if HEADWISE else 1) * E if ANGLES_LEARN and not PHASED else 0
    columns = angles if GRID else 0
    sums += tl.program_id(0).to(tl.int64) * (angles + columns + (D if UNIT_LEARNS else 0))
    for h in range(H):
        if HEADWISE:
            head = place + h * tl.where(is_q, ah, ch).to(tl.int64)
            cos, sin = _turned(head, theta, column, row, col, here, h, E, W, GRID, PHASED)
            if PERMUTES:
                moves = _moves(theta, row, h, size, True, D, HALVES)
        first = tl.load(grads + moves, mask=known, other=0.0).to(tl.float32)
        second = tl.load(grads + (D if WIDE else 0), mask=known, other=0.0).to(tl.float32)
        values = tl.load(x, mask=known, other=0.0).to(tl.float32) if READS_X else first
        g, d_angle, d_unit = _through(
            values, first, second, u, cos, sin, BT, D, E, REFLECTS, HALVES, WIDE, PHI
        )
        tl.store(to, g.to(of_q.dtype.element_ty), mask=known)
        if ANGLES_LEARN and PHASED:
            to_at = tl.where(is_q, of_q_at, of_k_at) + (b * H + h) * time * E
            _store_phases(to_at, d_angle, rows, here, E, W)
        elif ANGLES_LEARN and HEADWISE:
            _store_angles(sums + h * E, d_angle, row, col, angles, E, W, GRID)
        of_angle, of_unit = of_angle + d_angle, of_unit + d_unit
        x, to = x + tl.where(is_q, qh, kh).to(tl.int64) * UNIT, to + D
        grads += tl.where(is_q, gh, fh).to(tl.int64) * UNIT
    if ANGLES_LEARN and not HEADWISE:
        _store_angles(sums, of_angle, row, col, angles, E, W, GRID)
    if UNIT_LEARNS:
        _store_unit(sums + angles + columns, of_unit, u, norm, D)
