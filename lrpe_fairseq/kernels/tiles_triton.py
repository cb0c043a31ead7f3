"""Parts of the kernels of linear attention: tiles of C rows in the dtype of memory, and products.

Products are computed by tensor cores in the dtype of the rows, and summed in float32. A state,
which is float32, is split in two parts of that dtype, high and low, which together have 16 bits or
more. float16 has too small a range for sums, so a tile is divided by its largest number first.
Numbers down to 2^-28 of the largest one keep all bits.

Sums over rows or columns are products with 16 columns too: tensor cores compute them with fewer
instructions than a reduction over threads.
"""

import logging
import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrpe_fairseq.kernels.loader import release_of
from lrpe_fairseq.kernels.results import FARTHEST, LIMIT

PROGRAMS = 264
"""Number of programs into which sequences are divided at least, if they can be: two for each
multiprocessor of a large GPU."""

LARGEST = tl.constexpr(16384.0)  # in a tile of float16 after the division
TINY = tl.constexpr(1e-30)
SATURATED = tl.constexpr(LIMIT)


logger = logging.getLogger(__name__)

TILE = "LRPE_FAIRSEQ_LINEAR_TILE"
"""Environment variable with the tokens of a tile of quotients; see :func:`chosen_tile`."""
LARGE_TILES_SINCE = (3, 5)
"""The first release of Triton that compiles tiles of 64 tokens for H100 and B200."""

STATE = {8: 64 * 64, 9: 128 * 64}
"""Largest state, in numbers, of a program on GPUs of compute capability 8, and of 9 or more. Larger
ones do not fit in its registers. float32 rows have the chunked kernels of ``causal_triton``: a
product of them is three of tf32, for which no state is small enough."""


def fits_registers(q: Tensor, v: Tensor) -> bool:
    """True if the state of q (B, H, T, D) and v (B, H, S, E) is kept in registers."""
    blocks = power_of_two(q.shape[3]) * power_of_two(v.shape[3])
    return v.dtype != torch.float32 and blocks <= largest_state(v)


def largest_state(x: Tensor) -> int:
    """Return the largest state, in numbers, of a program on the device of ``x``."""
    return STATE[min(capability(x), 9)]


def capability(x: Tensor) -> int:
    """Return the major compute capability of the GPU of ``x``, on which tile sizes depend.

    It is 8 for 12.x (consumer Blackwell), which also spills larger states, and 9 for a CPU.
    """
    return _major_of(x.device) if x.is_cuda else 9


@cache
def _major_of(device: torch.device) -> int:
    """Return :func:`capability` of a GPU."""
    major, _ = torch.cuda.get_device_capability(device)
    return 8 if major == 12 else major


@cache
def chosen_tile() -> int:
    """Return the tokens of a tile of quotients without a decay: 32, or 64 if TILE says so.

    It counts in bfloat16 on H100, H200 and B200, for heads of up to 64. Elsewhere tiles of 64
    tokens spill many registers, and 32 or fewer are used. Which one is faster is not measured.
    Triton 3.4 does not compile them for B200: with it tiles have 32.
    Raises: ValueError for another value of TILE.
    """
    value = os.environ.get(TILE, "32")
    if value not in ("32", "64"):
        raise ValueError(f"{TILE} must be 32 or 64 (tokens of a tile), not {value!r}")
    if value == "64" and release_of(triton.__version__) < LARGE_TILES_SINCE:
        logger.warning(
            "%s=64 needs Triton 3.5 or newer, and this is %s: tiles have 32 tokens",
            TILE,
            triton.__version__,
        )
        return 32
    return int(value)


def straight(x: Tensor) -> Tensor:
    """Return ``x``, copied if a row is not contiguous or rows are :data:`FARTHEST` apart."""
    return x if x.stride(-1) == 1 and x.stride(2) < FARTHEST else x.contiguous()


def with_strides(*tensors: Tensor) -> list[Tensor | int]:
    """Return the arguments of a kernel for tensors (B, H, T, .): each, and its three strides."""
    return [argument for x in tensors for argument in (x, *x.stride()[:3])]


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up. On the host triton.cdiv takes longer than a small kernel."""
    return -(-a // b)


def power_of_two(width: int) -> int:
    """Return the side of a block, at least that of a tl.dot."""
    return max(16, 1 << (width - 1).bit_length())


# --- called by kernels ---------------------------------------------------------------------------


@triton.jit
def head(pointer, sequence, H, batch_stride, head_stride):
    """Return the address of a sequence (int64) in a tensor (B, H, T, .)."""
    return pointer + sequence // H * batch_stride + sequence % H * head_stride


@triton.jit
def load(pointer, first, stride, T, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load the rows of times ``first``, ..., (C, BLOCK), zero outside."""
    row, column = tl.arange(0, C), tl.arange(0, BLOCK)
    at = pointer + first.to(tl.int64) * stride + (row[:, None] * stride + column[None, :])
    return tl.load(at, mask=(first + row < T)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def store(pointer, x, first, stride, T, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write rows (C, BLOCK), cast to the dtype of the memory."""
    row, column = tl.arange(0, C), tl.arange(0, BLOCK)
    at = pointer + first.to(tl.int64) * stride + (row[:, None] * stride + column[None, :])
    mask = (first + row < T)[:, None] & (column < WIDTH)[None, :]
    tl.store(at, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_state(pointer, row, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """Load a state, D E + D numbers of memory: the sums of a^T b, (BD, BE), and of a, (BD,)."""
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    pointer += row * (D * E + D)
    mask = (d < D)[:, None] & (e < E)[None, :]
    state = tl.load(pointer + d[:, None] * E + e[None, :], mask=mask, other=0.0)
    return state, tl.load(pointer + D * E + d, mask=d < D, other=0.0)


@triton.jit
def store_state(
    pointer, state, sums, row,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Write a state; see ``load_state``."""
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    pointer += row * (D * E + D)
    mask = (d < D)[:, None] & (e < E)[None, :]
    tl.store(pointer + d[:, None] * E + e[None, :], state, mask=mask)
    tl.store(pointer + D * E + d, sums, mask=d < D)


@triton.jit
def scale_of(x, dtype: tl.constexpr):
    """Return the number by which x is divided in ``dtype``: 1 unless it is float16."""
    scale = 1.0
    if dtype == tl.float16:
        scale = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), TINY) / LARGEST
    return scale


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Return x / scale in ``dtype``, and the scale."""
    scale = scale_of(x, dtype)
    return (x * (1.0 / scale)).to(dtype), scale


@triton.jit
def leading(x, dtype: tl.constexpr):
    """Return float32 x, cut or rounded to a number of ``dtype``."""
    if dtype == tl.bfloat16:  # a mask is cheaper than a conversion to bfloat16 and back
        x = (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        x = x.to(dtype).to(tl.float32)
    return x


@triton.jit
def split(x, dtype: tl.constexpr):
    """Return (high, low, scale) with x = (high + low) scale; low is 0 in float32."""
    scale = scale_of(x, dtype)
    x = x * (1.0 / scale)
    high = leading(x, dtype)
    return high.to(dtype), (x - high).to(dtype), scale


@triton.jit
def parts(x, dtype: tl.constexpr, EXACT: tl.constexpr):
    """Return x (high, low, scale) for ``times``: split if EXACT, else rounded, and low is not used.

    EXACT for quotients, whose gradients are differences of large terms, and for gradients of gates.
    """
    if EXACT:
        high, low, scale = split(x, dtype)
    else:
        high, scale = cast(x, dtype)
        low = high
    return high, low, scale


@triton.jit
def times(a, high, low, scale, EXACT: tl.constexpr = True):
    """Return the product of a and a state that was split; of its high part only unless EXACT."""
    out = tl.dot(a, high)
    if EXACT:
        out = tl.dot(a, low, out)
    return out * scale


@triton.jit
def product(x, b):
    """Return x b, with float32 x rounded to the dtype of b."""
    x, scale = cast(x, b.dtype)
    return tl.dot(x, b) * scale


@triton.jit
def three_parts(x, dtype: tl.constexpr, BY_GROUP: tl.constexpr):
    """Split float32 x (N,) in three parts of ``dtype``, whose sum is x.

    Returns: (N, 16), with a part in every column of a group of four if BY_GROUP, else in every
        fourth column, and 0 in the remaining ones; and the scale of :func:`cast`.
    """
    column = tl.arange(0, 16)[None, :]
    part = column // 4 if BY_GROUP else column % 4
    x = tl.broadcast_to(x[:, None], x.shape[0], 16)
    scale = scale_of(x, dtype)
    x = x * (1.0 / scale)
    high = leading(x, dtype)
    middle = leading(x - high, dtype)
    low = x - high - middle
    x = tl.where(part < 2, tl.where(part == 0, high, middle), tl.where(part == 2, low, 0.0))
    return x.to(dtype), scale


@triton.jit
def row_products(a, x):
    """Return the products (C,) of the rows of a (C, N) and x (N,), by tensor cores."""
    b, scale = three_parts(x, a.dtype, True)
    return tl.sum(tl.dot(a, b), 1) * (scale / 4)


@triton.jit
def column_sums(a, weight, WEIGHTED: tl.constexpr):
    """Return the sums (N,) of the rows of a (C, N), times weights (C,) if WEIGHTED."""
    if WEIGHTED:
        b, scale = three_parts(weight, a.dtype, True)
        out = tl.sum(tl.dot(tl.trans(a), b), 1) * (scale / 4)
    else:
        ones = tl.full((a.shape[0], 16), 1.0, a.dtype)
        out = tl.sum(tl.dot(tl.trans(a), ones), 1) / 16
    return out


@triton.jit
def repeated(x, C: tl.constexpr, dtype: tl.constexpr):
    """Return x (N,) in each of C rows, (C, N), by tensor cores.

    It is faster than a broadcast, for which all threads load x in another order.
    """
    b, scale = three_parts(x, dtype, True)
    return tl.dot(tl.full((C, 16), 0.25, dtype), tl.trans(b)) * scale


@triton.jit
def outer_product(a, b, dtype: tl.constexpr):
    """Return a b^T (C, N) of a (C,) and b (N,) by tensor cores."""
    a, scale = three_parts(a, dtype, False)
    b, other = three_parts(b, dtype, True)
    return tl.dot(a, tl.trans(b)) * (scale * other)


@triton.jit
def outer(a, x, total, EXACT: tl.constexpr):
    """Return total + a^T x, with float32 x split in two parts if EXACT, else rounded to a's dtype.

    A product that is added to an earlier one needs fewer registers.
    """
    high, low, scale = parts(x, a.dtype, EXACT)
    if a.dtype == tl.float16:
        total += times(tl.trans(a), high, low, scale, EXACT)
    else:
        total = tl.dot(tl.trans(a), high, total)
        if EXACT:
            total = tl.dot(tl.trans(a), low, total)
    return total


@triton.jit
def incoming(
    go_ptr, first, stride, g, T,
    DTYPE: tl.constexpr, C: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Load incoming gradients (C, BE) in DTYPE.

    If the memory has another dtype, rows and g (C,) are divided by the largest number of both.
    Returns: the rows, g, and that number (C,), or 1.
    """
    go, unit = load(go_ptr, first, stride, T, C, E, BE), tl.full((C,), 1.0, tl.float32)
    if go.dtype != DTYPE:
        unit = tl.maximum(tl.maximum(tl.max(tl.abs(go), 1), tl.abs(g)), TINY)
        go, g = (go / unit[:, None]).to(DTYPE), g / unit
    return go, g, unit


@triton.jit
def unsaturated(go, o):
    """Set the gradients of results (C, BE) that saturate float16 to zero."""
    if o.dtype == tl.float16:
        go = tl.where(tl.abs(o.to(tl.float32)) >= SATURATED, 0.0, go)
    return go


@triton.jit
def saturated(out, dtype: tl.constexpr):
    """Return quotients, which saturate float16."""
    if dtype == tl.float16:
        out = tl.maximum(out, -SATURATED, tl.PropagateNan.ALL)
        out = tl.minimum(out, SATURATED, tl.PropagateNan.ALL)
    return out
