"""The causal sums of linear attention on CUDA, with the states in registers.

A program sweeps over the tiles (C tokens) of a sequence with the state sum_t k_t v_t^T and the sum
of the keys. There are one forward and two backward launches: the gradient of q from left to right,
those of k, v and the gates from right to left. The quotient and its gradient are computed inside.
If there are too few sequences to occupy a GPU, each is divided into parts, whose first states come
from a scan. The definition is ``causal.definition``.

A decay is 2 to the power of a sum of logarithms, which are at most 0. A launch before all others
sums them over every :data:`SPAN` tokens. They are split into multiples of 1/1024, whose float32
sums are exact, and a rest, whose sums are small. So a difference of sums is above 0 by rounding
only. A document begins with a logarithm of :data:`LOWEST`, which removes the state.

Axes: B batch, H heads, L = B H sequences, N parts, T time, D key width, E value width. A state is
D E + D numbers in memory: sum_t k_t v_t^T, then sum_t k_t.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.kernels import proof
from lrpe_fairseq.kernels.conditions import gradients_of
from lrpe_fairseq.kernels.linear import causal
from lrpe_fairseq.kernels.loader import empty_rows, launch
from lrpe_fairseq.kernels.results import aligned, gradient_rows, narrow, result_like, result_type
from lrpe_fairseq.kernels.tiles_triton import (
    PROGRAMS,
    capability,
    cdiv,
    chosen_tile,
    column_sums,
    head,
    incoming,
    load,
    load_state,
    outer,
    outer_product,
    parts,
    power_of_two,
    product,
    repeated,
    row_products,
    saturated,
    store,
    store_state,
    straight,
    times,
    unsaturated,
    with_strides,
)

GATED = 1024
"""Longest part, in tokens, if gates need a gradient. It is a sum of differences over later tokens,
which starts anew in every part, so that rounding errors do not add up."""

MOST_PARTS = 65535
"""Parts of a sequence, which are on the second axis of a grid. With gates, those of a text above
2^26 tokens are longer than :data:`GATED`."""

SPAN = 64
"""Tokens; the parts of a sequence are multiples of it, and no tile is longer."""

BLOCK = tl.constexpr(SPAN)
LOWEST = tl.constexpr(-152.0)  # 2^-152 is 0 in float32; smaller logarithms are set to it
GRID = tl.constexpr(1024.0)  # sums of up to 107 multiples of 1 / GRID, at least LOWEST, are exact
LOG2_E = tl.constexpr(1.4426950408889634)


def causal_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    wanted: str,
    log_decay: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`causal.definition` of q, k and v of one dtype.

    Returns: the result (B, H, T, E), see :func:`result_type` (quotients saturate float16 at 1/64
        of its range); and the denominators for "sums".
    """
    if log_decay is not None and log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(q.shape[:3])
    out, denominator = _Sweep.apply(*map(straight, (q, k, v)), log_decay, wanted, eps)
    return out, (denominator if wanted == "sums" else None)


class Tile(NamedTuple):
    """Tokens of a tile, warps of a program, and stages of its loop's pipeline."""

    tokens: int = 32
    warps: int = 4
    stages: int = 3


def tile_of(name: str, call: "_Call") -> Tile:
    """Return the tile of a kernel for a call: the largest that spills few registers.

    Trap: with gates those of "query" and "key" are equal; each adds its share of a tile's products.
    Trap: with 64 tokens and 4 warps all products are asynchronous (wgmma). The assembler of Triton
    3.6 then makes wrong code of quotients and decays, so that only sums without a denominator have
    them. With 8 warps the code of quotients is right, and :func:`chosen_tile` may choose it.
    """
    large, half = capability(call.q) >= 9, call.q.dtype == torch.float16
    wide = max(call.blocks) > 64
    roomy = large and not half
    backward = name in ("query", "key")
    small = (name == "key" and not large) or (backward and call.decays and not roomy)
    sweeps = roomy and not call.decays and (backward or name == "forward")
    time = power_of_two(call.q.shape[2])
    if wide or small:
        tokens = 16
    elif sweeps and call.wanted == "normalized" and time >= 64 and chosen_tile() == 64:
        return Tile(64, 8, 2)
    elif sweeps and call.wanted == "numerator":
        tokens = 64
    else:
        tokens = 32
    warps = 8 if wide or (half and small and not large) else 4
    return Tile(min(tokens, time), warps, 2 if tokens == 64 else 3)


@dataclass(frozen=True)
class _Call:
    """The sizes of one call, and what all its launches share."""

    q: Tensor
    v: Tensor
    wanted: str
    eps: float
    decays: bool
    with_gates: bool

    @cached_property
    def sequences(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    @cached_property
    def blocks(self) -> tuple[int, int]:
        return power_of_two(self.q.shape[3]), power_of_two(self.v.shape[3])

    @cached_property
    def span(self) -> int:
        """The number of tokens in a part."""
        span = SPAN * cdiv(cdiv(self.q.shape[2], SPAN), max(1, PROGRAMS // self.sequences))
        if not self.with_gates:
            return span
        fewest = SPAN * cdiv(self.q.shape[2], SPAN * MOST_PARTS)
        return min(span, max(GATED, fewest))

    @cached_property
    def parts(self) -> int:
        return cdiv(self.q.shape[2], self.span)

    @cached_property
    def constants(self) -> dict:
        """The compile-time arguments of all kernels."""
        return {
            "D": self.q.shape[3],
            "E": self.v.shape[3],
            "BD": self.blocks[0],
            "BE": self.blocks[1],
            "DECAYS": self.decays,
        }

    @cached_property
    def modes(self) -> dict:
        """The compile-time arguments of the kernels that read or write results."""
        divides = self.wanted == "normalized"
        return {"KEYS": self.wanted != "numerator", "DIVIDE": divides, "STARTS": self.parts > 1}

    def launch(self, name: str, *arguments: Tensor | float, **constants: bool) -> None:
        """Launch a program per sequence and part; times and sizes are the last arguments."""
        tile = tile_of(name, self)
        _, heads, time, _ = self.q.shape
        constants |= {**self.constants, "C": tile.tokens}
        constants |= {"num_warps": tile.warps, "num_stages": tile.stages}
        tiles_of_a_part = self.span // tile.tokens
        grid = self.sequences, self.parts
        kernel = globals()[f"_{name}_kernel"]
        launch(kernel, grid, *arguments, time, heads, tiles_of_a_part, **constants)

    def vector(self, *shape: int) -> Tensor:
        return self.q.new_empty(self.sequences, *shape, dtype=torch.float32)

    def scan(self, sums: Tensor, whole: Tensor, reverse: bool) -> None:
        """Replace the sums of every part by those before it, or after it."""
        size = sums.shape[-1]
        grid = self.sequences, cdiv(size, 256)
        constants = {"SIZE": size, "REVERSE": reverse, "BLOCK": 256, "num_warps": 2}
        launch(_scan_kernel, grid, sums, whole, self.parts, **constants)


class _Sweep(torch.autograd.Function):
    """(result, denominator) with a hand-written gradient."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, wanted, eps):
        call = _Call(q, v, wanted, eps, log_decay is not None, ctx.needs_input_grad[3])
        out = result_like(q, v.shape[3], result_type(v, wanted))
        denominator = call.vector(q.shape[2])
        logs = _sums_of_logarithms(call, log_decay) if call.decays else q
        states = whole = q  # not read with one part, but a kernel needs a pointer
        if call.parts > 1:
            width = q.shape[3] * (v.shape[3] + 1)
            states, whole = call.vector(call.parts, width), call.vector(call.parts)
            call.launch("sums", *with_strides(k, v), logs, states, whole)
            call.scan(states, whole, reverse=False)
        rows = with_strides(q, k, v, out)
        call.launch("forward", *rows, logs, denominator, states, eps, **call.modes)
        kept = (out, denominator) if wanted == "normalized" else (None, None)
        ctx.save_for_backward(q, k, v, log_decay, logs, states, whole, *kept)
        ctx.settings, ctx.key = (wanted, eps), proof.current()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*([] if wanted == "sums" else [denominator]))
        return out, denominator.unflatten(0, q.shape[:2])

    @staticmethod
    def backward(ctx, grad, grad_denominator):
        if grad is None and grad_denominator is None:
            return (None,) * 6
        saved = ctx.saved_tensors  # read once, as checkpointing allows
        q, k, v, log_decay, *kept = saved
        wanted, eps = ctx.settings
        if grad is None:
            grad = v.new_zeros((), dtype=torch.float32).expand(*q.shape[:3], v.shape[3])
        if wanted == "sums" and grad_denominator is None:
            grad_denominator = grad.new_zeros(q.shape[:3])
        by_definition = partial(_defined_gradients, ctx, saved[:4], grad, grad_denominator)
        if torch.is_grad_enabled():
            return *by_definition(), None, None

        def by_kernels() -> list[Tensor | None]:
            call = _Call(q, v, wanted, eps, log_decay is not None, ctx.needs_input_grad[3])
            rows = gradient_rows(grad)
            *grads, of_gates = _gradients(call, q, k, v, rows, grad_denominator, *kept)
            if of_gates is not None:
                of_gates = of_gates.unflatten(0, q.shape[:2]).to(log_decay.dtype)
            return [*grads, of_gates]

        return *proof.backward(ctx.key, by_kernels, by_definition), None, None


def _sums_of_logarithms(call: _Call, gates: Tensor) -> Tensor:
    """Return the sums (L, N, 2, SPAN) of the logarithms of a decay; see ``_logarithms_kernel``."""
    _, heads, time, _ = call.q.shape
    logs = call.vector(cdiv(time, SPAN), 2, SPAN)
    rows = with_strides(gates.detach())
    grid = (call.sequences * logs.shape[1],)  # CUDA allows 65,535 blocks on the other axes
    launch(_logarithms_kernel, grid, *rows, logs, time, heads, num_warps=2)
    return logs


def _defined_gradients(
    ctx, inputs: tuple[Tensor | None, ...], grad: Tensor, grad_denominator: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of the definition, under create_graph with their graph."""
    wanted, eps = ctx.settings

    def definition(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> tuple[Tensor, ...]:
        rows = (x.float() for x in (q, k, v))
        sums = causal.present(*causal.definition(*rows, wanted, log_decay, eps))
        return tuple(narrow(x, grad.dtype) for x in sums)

    grads = causal.present(grad, grad_denominator)
    return gradients_of(definition, inputs, ctx.needs_input_grad[:4], grads)


def _gradients(
    call: _Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    grad_denominator: Tensor | None,
    logs: Tensor,
    states: Tensor,
    whole: Tensor,
    out: Tensor | None,
    denominator: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v and gates (L, T) or None."""
    if out is None:  # only a quotient has them; the kernels do not read these pointers
        out, denominator = grad, q
    g = call.vector(q.shape[2]) if grad_denominator is None else grad_denominator
    g = aligned(g.float().contiguous())
    grads = [empty_rows(x) for x in (q, k, v)]
    dq, dk, dv = grads
    products = call.vector(q.shape[2]) if call.with_gates else q
    rows, sums = with_strides(q, k, v, grad, out), (logs, denominator, g)
    constants = {**call.modes, "GRADS": call.with_gates}
    # this launch writes g of a quotient, which the next ones read
    call.launch("query", *rows, *with_strides(dq), *sums, products, states, call.eps, **constants)
    later = q  # not read with one part
    if call.parts > 1:
        later = torch.empty_like(states)
        call.launch("later", *with_strides(q, grad, out), *sums, later, **constants)
        call.scan(later, whole, reverse=True)
    call.launch("key", *rows, *with_strides(dk, dv), *sums, products, later, **constants)
    if not call.with_gates:
        return *grads, None
    across = q  # not read with one part
    if call.parts > 1:
        across = F.pad((states[:, 1:] * later[:, :-1]).sum(-1), (0, 1))
    grid, starts = (call.sequences, call.parts), call.modes["STARTS"]
    launch(_gates_kernel, grid, products, across, q.shape[2], call.span, STARTS=starts, BLOCK=256)
    return *grads, products


# --- kernels: program 0 is the sequence, program 1 the part -------------------------------------
#
# Times take any value in one compiled kernel. Strides of rows keep Triton's two kinds, multiples of
# 16 or not, because loads of 16 bytes need multiples.

SIZES = ["T", "H", "each"]


@triton.jit(do_not_specialize=["gb", "gh", "gt", "T", "H"])
def _logarithms_kernel(gate_ptr, gb, gh, gt, log_ptr, T, H):
    """Write the sums of logarithms up to each token of a block (L, N, 2, BLOCK): the exact part,
    and the rest. There is a program for every block of every sequence."""
    blocks = tl.cdiv(T, BLOCK)
    sequence, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    row = tl.arange(0, BLOCK)
    t = block * BLOCK + row
    at = head(gate_ptr, sequence, H, gb, gh) + t.to(tl.int64) * gt
    log = tl.load(at, mask=t < T, other=0.0).to(tl.float32) * LOG2_E
    log = tl.maximum(log, LOWEST, tl.PropagateNan.ALL)
    step = tl.ceil(log * GRID) / GRID
    log_ptr += (sequence * blocks + block) * 2 * BLOCK + row
    tl.store(log_ptr, tl.cumsum(step, 0))
    tl.store(log_ptr + BLOCK, tl.cumsum(log - step, 0))


@triton.jit
def _factors(log_ptr, first, C: tl.constexpr, DECAYS: tl.constexpr):
    """Return the decay of a tile.

    Returns: sums of the logarithms up to each token (C,), as coarse + fine, of which coarse is
        exact; the factors (C,) from the state before the tile to each query, and from each key to
        the state after it; and the factor of the state over the whole tile.
    """
    coarse, fine = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    into, out_of, whole = coarse + 1.0, coarse + 1.0, 1.0
    if DECAYS:
        row = tl.arange(0, C)
        before_tile = first % BLOCK  # tokens of the block before this tile
        log_ptr += tl.multiple_of(first // BLOCK * (2 * BLOCK) + before_tile, C)
        coarse, fine = tl.load(log_ptr + row), tl.load(log_ptr + BLOCK + row)
        last, rest = tl.load(log_ptr + C - 1), tl.load(log_ptr + BLOCK + C - 1)
        before, more = 0.0, 0.0
        if C < BLOCK:
            before = tl.load(log_ptr - 1, mask=before_tile > 0, other=0.0)
            more = tl.load(log_ptr + BLOCK - 1, mask=before_tile > 0, other=0.0)
        into = tl.exp2((coarse - before) + (fine - more))
        out_of = tl.exp2((last - coarse) + (rest - fine))
        whole = tl.exp2((last - before) + (rest - more))
    return coarse, fine, into, out_of, whole


@triton.jit
def _logs_of(log_ptr, sequence, T):
    """Return the address of the sums of a sequence; see ``_logarithms_kernel``."""
    return log_ptr + sequence * tl.cdiv(T, BLOCK) * (2 * BLOCK)


@triton.jit
def _first_state(
    state_ptr, row, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    STARTS: tl.constexpr,
):  # fmt: skip
    """Return the state (BD, BE) and the sum of the keys (BD,) before a part, or zeros."""
    state, keys = tl.zeros((BD, BE), tl.float32), tl.zeros((BD,), tl.float32)
    if STARTS:
        state, keys = load_state(state_ptr, row, D, E, BD, BE)
    return state, keys


@triton.jit
def _visible(x, coarse, fine, BY_KEY: tl.constexpr, DECAYS: tl.constexpr, C: tl.constexpr):
    """Apply decay and causal mask to x (C, C), whose rows are queries, or keys if BY_KEY."""
    row = tl.arange(0, C)
    seen = row[:, None] <= row[None, :] if BY_KEY else row[:, None] >= row[None, :]
    if DECAYS:
        log = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
        x = x * tl.exp2(tl.minimum(-log if BY_KEY else log, 0.0))
    return tl.where(seen, x, 0.0)


@triton.jit
def _added(state, a, b, factor, whole, WEIGHTED: tl.constexpr, EXACT: tl.constexpr):
    """Return state * whole + a^T (b * factor)."""
    if WEIGHTED:
        b = b.to(tl.float32) * factor[:, None]
        state = outer(a, b, state * whole, EXACT)
    else:
        state = tl.dot(tl.trans(a), b, state)
    return state


@triton.jit
def _incoming(
    go_ptr, got, o_ptr, ot, den_ptr, g_ptr, first, T, dtype: tl.constexpr, C: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, KEYS: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """Return G (C, BE) in ``dtype``, g and f (C,).

    f G are the gradients of the numerators, f g those of the denominators. In a quotient,
    ``_query_kernel`` computes g.
    """
    t = first + tl.arange(0, C)
    g = tl.zeros((C,), tl.float32)
    if KEYS:
        g = tl.load(g_ptr + t, mask=t < T, other=0.0)
    go, g, f = incoming(go_ptr, first, got, g, T, dtype, C, E, BE)
    if DIVIDE:
        f *= tl.load(den_ptr + t, mask=t < T, other=1.0)
        if dtype == tl.float16:
            go = unsaturated(go, load(o_ptr, first, ot, T, C, E, BE))
    return go, g, f


@triton.jit
def _gradient_of_denominators(den_ptr, g_ptr, first, T, dq, q, pairs, f, eps, C: tl.constexpr):
    """Return and write g (C,) of a quotient, which is minus G times the result.

    dq: the gradient of q through the state. pairs: score times its gradient, both (C, C). Their
    sums are G times the numerator, more exactly than with results in half precision.
    """
    t = first + tl.arange(0, C)
    inverse = tl.load(den_ptr + t, mask=t < T, other=1.0)
    g = -(tl.sum(q.to(tl.float32) * dq, 1) + tl.sum(pairs, 1)) * f
    g = tl.where(inverse < 1.0 / eps, g, 0.0)
    tl.store(g_ptr + t, g, mask=t < T)
    return g


@triton.jit(do_not_specialize=SIZES)
def _sums_kernel(
    k_ptr, kb, kh, kt, v_ptr, vb, vh, vt, log_ptr, state_ptr, whole_ptr, T, H, each,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """Write the sums of every part (L, N, D E + D), and its decay (L, N)."""
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k_ptr, v_ptr = head(k_ptr, sequence, H, kb, kh), head(v_ptr, sequence, H, vb, vh)
    log_ptr = _logs_of(log_ptr, sequence, T)
    state, keys, decay = tl.zeros((BD, BE), tl.float32), tl.zeros((BD,), tl.float32), 1.0
    for i in range(part * each, tl.minimum(part * each + each, tl.cdiv(T, C))):
        first = i * C
        k, v = load(k_ptr, first, kt, T, C, D, BD), load(v_ptr, first, vt, T, C, E, BE)
        _, _, _, out_of, whole = _factors(log_ptr, first, C, DECAYS)
        state = _added(state, k, v, out_of, whole, DECAYS, True)
        keys = keys * whole + column_sums(k, out_of, DECAYS)
        decay = decay * whole
    row = sequence * tl.num_programs(1) + part
    store_state(state_ptr, state, keys, row, D, E, BD, BE)
    tl.store(whole_ptr + row, decay)


@triton.jit(do_not_specialize=["N"])
def _scan_kernel(
    sum_ptr, whole_ptr, N, SIZE: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr
):
    """Replace the sums of every part (L, N, SIZE) by those before it, or after it if REVERSE."""
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(N):
        row = sequence * N + (N - 1 - i if REVERSE else i)
        at = sum_ptr + row * SIZE + column
        part_sums = tl.load(at, mask=column < SIZE, other=0.0)
        tl.store(at, total, mask=column < SIZE)
        total = total * tl.load(whole_ptr + row) + part_sums


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    q_ptr, qb, qh, qt, k_ptr, kb, kh, kt, v_ptr, vb, vh, vt, o_ptr, ob, oh, ot,
    log_ptr, den_ptr, state_ptr, eps, T, H, each,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    DECAYS: tl.constexpr, KEYS: tl.constexpr, DIVIDE: tl.constexpr,
    STARTS: tl.constexpr,
):  # fmt: skip
    """Write the results (B, H, T, E) and, with KEYS, the denominators (L, T) or, with DIVIDE, their
    inverses."""
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_ptr, k_ptr = head(q_ptr, sequence, H, qb, qh), head(k_ptr, sequence, H, kb, kh)
    v_ptr, o_ptr = head(v_ptr, sequence, H, vb, vh), head(o_ptr, sequence, H, ob, oh)
    den_ptr, log_ptr = den_ptr + sequence * T, _logs_of(log_ptr, sequence, T)
    row = sequence * tl.num_programs(1) + part
    state, keys = _first_state(state_ptr, row, D, E, BD, BE, STARTS)
    for i in range(part * each, tl.minimum(part * each + each, tl.cdiv(T, C))):
        first = i * C
        t = first + tl.arange(0, C)
        q, k = load(q_ptr, first, qt, T, C, D, BD), load(k_ptr, first, kt, T, C, D, BD)
        v = load(v_ptr, first, vt, T, C, E, BE)
        coarse, fine, into, out_of, whole = _factors(log_ptr, first, C, DECAYS)
        high, low, scale = parts(state, q.dtype, KEYS)
        out = times(q, high, low, scale, KEYS) * into[:, None]
        scores = tl.dot(q, tl.trans(k))
        scores = _visible(scores, coarse, fine, False, DECAYS, C)
        out += product(scores, v)
        if KEYS:
            den = row_products(q, keys) * into + tl.sum(scores, 1)
            if DIVIDE:
                den = 1.0 / tl.maximum(den, eps, tl.PropagateNan.ALL)
                out = saturated(out * den[:, None], v.dtype)
            tl.store(den_ptr + t, den, mask=t < T)
            keys = keys * whole + column_sums(k, out_of, DECAYS)
        store(o_ptr, out, first, ot, T, C, E, BE)
        state = _added(state, k, v, out_of, whole, DECAYS, True)


@triton.jit(do_not_specialize=SIZES)
def _query_kernel(
    q_ptr, qb, qh, qt, k_ptr, kb, kh, kt, v_ptr, vb, vh, vt, go_ptr, gob, goh, got, o_ptr, ob, oh,
    ot, dq_ptr, dqb, dqh, dqt, log_ptr, den_ptr, g_ptr, product_ptr, state_ptr, eps, T, H, each,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    DECAYS: tl.constexpr, KEYS: tl.constexpr, DIVIDE: tl.constexpr,
    STARTS: tl.constexpr, GRADS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of q, g of a quotient (see ``_incoming``) and, with GRADS, the product of
    q with the part of its gradient through the state (L, T). The state is transposed."""
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_ptr, k_ptr = head(q_ptr, sequence, H, qb, qh), head(k_ptr, sequence, H, kb, kh)
    v_ptr, o_ptr = head(v_ptr, sequence, H, vb, vh), head(o_ptr, sequence, H, ob, oh)
    go_ptr, dq_ptr = head(go_ptr, sequence, H, gob, goh), head(dq_ptr, sequence, H, dqb, dqh)
    den_ptr, g_ptr = den_ptr + sequence * T, g_ptr + sequence * T
    product_ptr, log_ptr = product_ptr + sequence * T, _logs_of(log_ptr, sequence, T)
    row = sequence * tl.num_programs(1) + part
    state, keys = _first_state(state_ptr, row, D, E, BD, BE, STARTS)
    state = tl.trans(state)
    for i in range(part * each, tl.minimum(part * each + each, tl.cdiv(T, C))):
        first = i * C
        q, k = load(q_ptr, first, qt, T, C, D, BD), load(k_ptr, first, kt, T, C, D, BD)
        v = load(v_ptr, first, vt, T, C, E, BE)
        go, g, f = _incoming(
            go_ptr, got, o_ptr, ot, den_ptr, g_ptr, first, T, k.dtype, C, E, BE,
            KEYS and not DIVIDE, DIVIDE,
        )  # fmt: skip
        coarse, fine, into, out_of, whole = _factors(log_ptr, first, C, DECAYS)
        high, low, scale = parts(state, k.dtype, KEYS or GRADS)
        dq = times(go, high, low, scale, KEYS or GRADS) * into[:, None]
        p = tl.dot(go, tl.trans(v))
        if DIVIDE:
            scores = tl.dot(q, tl.trans(k))
            pairs = _visible(scores * p, coarse, fine, False, DECAYS, C)
            g = _gradient_of_denominators(den_ptr, g_ptr, first, T, dq, q, pairs, f, eps, C)
        if KEYS:
            dq += outer_product(g * into, keys, k.dtype)
            p += g[:, None]
            keys = keys * whole + column_sums(k, out_of, DECAYS)
        if GRADS:
            t = first + tl.arange(0, C)
            tl.store(product_ptr + t, tl.sum(q.to(tl.float32) * dq, 1) * f, mask=t < T)
        dq += product(_visible(p, coarse, fine, False, DECAYS, C), k)
        store(dq_ptr, dq * f[:, None], first, dqt, T, C, D, BD)
        state = _added(state, v, k, out_of, whole, DECAYS, True)


@triton.jit(do_not_specialize=SIZES)
def _later_kernel(
    q_ptr, qb, qh, qt, go_ptr, gob, goh, got, o_ptr, ob, oh, ot, log_ptr, den_ptr,
    g_ptr, sum_ptr, T, H, each,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    DECAYS: tl.constexpr, KEYS: tl.constexpr, DIVIDE: tl.constexpr,
    STARTS: tl.constexpr, GRADS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the state before every part that come from the queries in it."""
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_ptr, go_ptr = head(q_ptr, sequence, H, qb, qh), head(go_ptr, sequence, H, gob, goh)
    o_ptr, log_ptr = head(o_ptr, sequence, H, ob, oh), _logs_of(log_ptr, sequence, T)
    den_ptr, g_ptr = den_ptr + sequence * T, g_ptr + sequence * T
    state, keys = tl.zeros((BD, BE), tl.float32), tl.zeros((BD,), tl.float32)
    end = tl.minimum(part * each + each, tl.cdiv(T, C))
    for i in range(part * each, end):
        first = (end - 1 - (i - part * each)) * C
        q = load(q_ptr, first, qt, T, C, D, BD)
        go, g, f = _incoming(go_ptr, got, o_ptr, ot, den_ptr, g_ptr, first, T, q.dtype, C, E, BE,
                             KEYS, DIVIDE)  # fmt: skip
        _, _, into, _, whole = _factors(log_ptr, first, C, DECAYS)
        state = _added(state, q, go, f * into, whole, True, GRADS)
        if KEYS:
            keys = keys * whole + column_sums(q, f * into * g, True)
    row = sequence * tl.num_programs(1) + part
    store_state(sum_ptr, state, keys, row, D, E, BD, BE)


@triton.jit
def _with_queries(
    state, keys, q, rows, unit, go, f, g, into, whole, KEYS: tl.constexpr, DECAYS: tl.constexpr,
    GRADS: tl.constexpr,
):  # fmt: skip
    """Return the gradients of the sums (BE, BD) and of the keys' sum (BD,) with those of a tile.

    rows times unit: q times f.
    """
    if DECAYS:
        rows, unit, g = q, 1.0, f * into * g
        state = _added(state, go, q, f * into, whole, True, GRADS)
    else:
        state += tl.dot(tl.trans(go), rows) * unit
    if KEYS:
        keys = keys * whole + column_sums(rows, g, True) * unit
    return state, keys


@triton.jit
def _subtract_keys(product_ptr, first, T, k, dk, pairs, C: tl.constexpr):
    """Replace the products of a tile, q . dq, by q . dq - k . dk.

    dk: the gradient of k through the state. pairs: score times its gradient, keys by queries.
    """
    t = first + tl.arange(0, C)
    products = tl.load(product_ptr + t, mask=t < T, other=0.0)
    products += tl.sum(pairs, 0) - tl.sum(pairs, 1) - tl.sum(k.to(tl.float32) * dk, 1)
    tl.store(product_ptr + t, products, mask=t < T)


@triton.jit(do_not_specialize=["T", "span"])
def _gates_kernel(product_ptr, across_ptr, T, span, STARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Replace q . dq - k . dk (L, T) by the gradients of the gates, its sums over a token and all
    later ones. across (L, N): the sums over the tokens after a part."""
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    product_ptr += sequence * T
    start, total = part * span, 0.0
    end = tl.minimum(start + span, T)
    if STARTS:
        total = tl.load(across_ptr + sequence * tl.num_programs(1) + part)
    for last in range(end, start, -BLOCK):
        t = last - 1 - tl.arange(0, BLOCK)
        products = tl.load(product_ptr + t, mask=t >= start, other=0.0)
        of_gates = tl.where(t > 0, total + tl.cumsum(products, 0), 0.0)
        tl.store(product_ptr + t, of_gates, mask=t >= start)
        total += tl.sum(products, 0)


@triton.jit(do_not_specialize=SIZES)
def _key_kernel(
    q_ptr, qb, qh, qt, k_ptr, kb, kh, kt, v_ptr, vb, vh, vt, go_ptr, gob, goh, got, o_ptr, ob, oh,
    ot, dk_ptr, dkb, dkh, dkt, dv_ptr, dvb, dvh, dvt, log_ptr, den_ptr, g_ptr, product_ptr,
    state_ptr, T, H, each,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    DECAYS: tl.constexpr, KEYS: tl.constexpr, DIVIDE: tl.constexpr,
    STARTS: tl.constexpr, GRADS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of k and v and, with GRADS, subtract k . dk from the products (L, T).
    The state is that of the sums, transposed."""
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = sequence * tl.num_programs(1) + part
    q_ptr, k_ptr = head(q_ptr, sequence, H, qb, qh), head(k_ptr, sequence, H, kb, kh)
    v_ptr, o_ptr = head(v_ptr, sequence, H, vb, vh), head(o_ptr, sequence, H, ob, oh)
    dk_ptr, dv_ptr = head(dk_ptr, sequence, H, dkb, dkh), head(dv_ptr, sequence, H, dvb, dvh)
    go_ptr, log_ptr = head(go_ptr, sequence, H, gob, goh), _logs_of(log_ptr, sequence, T)
    den_ptr, g_ptr = den_ptr + sequence * T, g_ptr + sequence * T
    product_ptr += sequence * T
    state, keys = _first_state(state_ptr, row, D, E, BD, BE, STARTS)
    state = tl.trans(state)
    exact: tl.constexpr = KEYS or GRADS
    end = tl.minimum(part * each + each, tl.cdiv(T, C))
    for i in range(part * each, end):
        first = (end - 1 - (i - part * each)) * C
        q, k = load(q_ptr, first, qt, T, C, D, BD), load(k_ptr, first, kt, T, C, D, BD)
        v = load(v_ptr, first, vt, T, C, E, BE)
        go, g, f = _incoming(go_ptr, got, o_ptr, ot, den_ptr, g_ptr, first, T, k.dtype, C, E, BE,
                             KEYS, DIVIDE)  # fmt: skip
        coarse, fine, into, out_of, whole = _factors(log_ptr, first, C, DECAYS)
        rows, rest, unit = parts(q.to(tl.float32) * f[:, None], k.dtype, GRADS)
        scores = times(k, tl.trans(rows), tl.trans(rest), unit, GRADS)
        scores = _visible(scores, coarse, fine, True, DECAYS, C)
        high, low, scale = parts(state, k.dtype, exact)
        dv = times(k, tl.trans(high), tl.trans(low), scale, exact) * out_of[:, None]
        store(dv_ptr, dv + product(scores, go), first, dvt, T, C, E, BE)
        dk = times(v, high, low, scale, exact)
        p = tl.dot(v, tl.trans(go))
        if KEYS:
            dk += repeated(keys, C, k.dtype)
            p += repeated(g, C, k.dtype)
        dk *= out_of[:, None]
        if GRADS:
            _subtract_keys(product_ptr, first, T, k, dk, scores * p, C)
        dk += product(_visible(p, coarse, fine, True, DECAYS, C), rows) * unit
        store(dk_ptr, dk, first, dkt, T, C, D, BD)
        state, keys = _with_queries(
            state, keys, q, rows, unit, go, f, g, into, whole, KEYS, DECAYS, GRADS
        )
