"""The sums of linear attention over all keys on CUDA, with the state in registers.

There is one state, the total of k_t v_t^T and that of the keys. One launch computes it, one the
results. The first launch backward computes the gradients of q and of the state in one pass, the
second those of k and v. The quotient and its gradient are computed inside. The definition is
``causal.full_definition``.

Axes: L = B H sequences, N parts of a sequence, T query time, S key time, D key width, E value
width.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrpe_fairseq.kernels import proof
from lrpe_fairseq.kernels.conditions import gradients_of
from lrpe_fairseq.kernels.linear import causal
from lrpe_fairseq.kernels.loader import empty_rows, launch
from lrpe_fairseq.kernels.results import aligned, gradient_rows, narrow, result_like, result_type
from lrpe_fairseq.kernels.tiles_triton import (
    PROGRAMS,
    cast,
    cdiv,
    column_sums,
    head,
    incoming,
    load,
    load_state,
    outer_product,
    parts,
    power_of_two,
    row_products,
    saturated,
    store,
    store_state,
    straight,
    times,
    unsaturated,
    with_strides,
)

TILE = 64
"""Longest tile in tokens."""


def full_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`causal.full_definition` of q, k and v of one dtype.

    Returns: the result (B, H, T, E), see :func:`result_type` (quotients saturate float16 at 1/64
        of its range); and the denominators for "sums".
    """
    out, denominator = _Full.apply(*map(straight, (q, k, v)), wanted, eps)
    return out, (denominator if wanted == "sums" else None)


class _Full(torch.autograd.Function):
    """(result, denominator) with a hand-written gradient."""

    @staticmethod
    def forward(ctx, q, k, v, wanted, eps):
        out = result_like(q, v.shape[3], result_type(v, wanted))
        denominator = q.new_empty(q.shape[:3], dtype=torch.float32)
        sums_of_parts = _per_part(k, v)
        _launch(_total_kernel, k, v, *with_strides(k, v), sums_of_parts)
        state = sums_of_parts.sum(1)
        rows = with_strides(q, out)
        _launch(_output_kernel, q, v, *rows, denominator, state, eps, **_modes(wanted))
        kept = (out, denominator) if wanted == "normalized" else (None, None)
        ctx.save_for_backward(q, k, v, state, *kept)
        ctx.settings, ctx.key = (wanted, eps), proof.current()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*([] if wanted == "sums" else [denominator]))
        return out, denominator

    @staticmethod
    def backward(ctx, grad, grad_denominator):
        if grad is None and grad_denominator is None:
            return (None,) * 5
        saved = ctx.saved_tensors  # read once, as checkpointing allows
        q, _, v, state, *_ = saved
        if grad is None:
            grad = state.new_zeros(()).expand(*q.shape[:3], v.shape[3])
        if ctx.settings[0] == "sums" and grad_denominator is None:
            grad_denominator = state.new_zeros(q.shape[:3])
        by_definition = partial(_defined_gradients, ctx, saved[:3], grad, grad_denominator)
        if torch.is_grad_enabled():
            return *by_definition(), None, None
        by_kernels = partial(_gradients, ctx.settings, saved, grad, grad_denominator)
        return *proof.backward(ctx.key, by_kernels, by_definition), None, None


def _gradients(
    settings: tuple[str, float],
    saved: tuple[Tensor, ...],
    grad: Tensor,
    grad_denominator: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v."""
    q, k, v, state, out, denominator = saved
    wanted, eps = settings
    grad = gradient_rows(grad)
    modes = _modes(wanted)
    # a kernel that does not read a pointer still needs one: any tensor of the device will do
    g = q if grad_denominator is None else aligned(grad_denominator.float().contiguous())
    inverses = q if denominator is None else denominator
    dq, dk, dv = (empty_rows(x) for x in (q, k, v))
    sums_of_parts = _per_part(q, v)
    rows = with_strides(q, grad, grad if out is None else out, dq)
    _launch(_query_kernel, q, v, *rows, inverses, g, state, sums_of_parts, eps, **modes)
    grad_state = sums_of_parts.sum(1)
    _launch(_key_kernel, k, v, *with_strides(k, v, dk, dv), grad_state, KEYS=modes["KEYS"])
    return dq, dk, dv


def _modes(wanted: str) -> dict[str, bool]:
    return {"KEYS": wanted != "numerator", "DIVIDE": wanted == "normalized"}


def _defined_gradients(
    ctx, inputs: tuple[Tensor, ...], grad: Tensor, grad_denominator: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of the definition, under create_graph with their graph."""

    def definition(*rows: Tensor) -> tuple[Tensor, ...]:
        sums = causal.full_definition(*(x.float() for x in rows), *ctx.settings)
        return tuple(narrow(x, grad.dtype) for x in causal.present(*sums))

    grads = causal.present(grad, grad_denominator)
    return gradients_of(definition, inputs, ctx.needs_input_grad[:3], grads)


def _parts(x: Tensor) -> tuple[int, int]:
    """Return the number of tiles of x (B, H, T, .) in a part, and that of parts."""
    tiles = cdiv(x.shape[2], _tile(x))
    each = cdiv(tiles, max(1, PROGRAMS // (x.shape[0] * x.shape[1])))
    return each, cdiv(tiles, each)


def _tile(x: Tensor) -> int:
    """Return the tokens of a tile of x (B, H, T, .): fewer for wide features and short texts."""
    return min(TILE if x.shape[3] <= 64 else TILE // 2, power_of_two(x.shape[2]))


def _per_part(x: Tensor, v: Tensor) -> Tensor:
    """Return float32 memory for a state of every part of x, (L, N, D E + D)."""
    size = x.shape[3] * (v.shape[3] + 1)
    sequences = x.shape[0] * x.shape[1]
    return x.new_empty(sequences, _parts(x)[1], size, dtype=torch.float32)


def _launch(kernel, x: Tensor, v: Tensor, *arguments: Any, **constants: bool) -> None:
    """Launch a program per sequence and part of x, q or k."""
    each, parts = _parts(x)
    batch, heads, time, keys = x.shape
    key_block, value_block = power_of_two(keys), power_of_two(v.shape[3])
    launch(
        kernel,
        (batch * heads, parts),
        *arguments,
        *(time, heads, each),
        D=keys,
        E=v.shape[3],
        C=_tile(x),
        BD=key_block,
        BE=value_block,
        num_warps=8 if max(key_block, value_block) > 64 else 4,
        **constants,
    )


# --- kernels: program 0 is the sequence, program 1 the part -------------------------------------

SIZES = ["T", "H", "each"]  # any value in one compiled kernel


@triton.jit(do_not_specialize=SIZES)
def _total_kernel(
    k_ptr, kb, kh, kt, v_ptr, vb, vh, vt, state_ptr, T, H, each,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Write the sums of every part (L, N, D E + D)."""
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k_ptr, v_ptr = head(k_ptr, sequence, H, kb, kh), head(v_ptr, sequence, H, vb, vh)
    state, keys = tl.zeros((BD, BE), tl.float32), tl.zeros((BD,), tl.float32)
    for i in range(part * each, tl.minimum(part * each + each, tl.cdiv(T, C))):
        first = i * C
        k, v = load(k_ptr, first, kt, T, C, D, BD), load(v_ptr, first, vt, T, C, E, BE)
        state = tl.dot(tl.trans(k), v, state)
        keys += column_sums(k, keys, False)
    row = sequence * tl.num_programs(1) + part
    store_state(state_ptr, state, keys, row, D, E, BD, BE)


@triton.jit(do_not_specialize=SIZES)
def _output_kernel(
    q_ptr, qb, qh, qt, o_ptr, ob, oh, ot, den_ptr, state_ptr, eps, T, H, each,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    KEYS: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """Write the results (B, H, T, E) and, with KEYS, the denominators (L, T) or, with DIVIDE, their
    inverses."""
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_ptr, o_ptr = head(q_ptr, sequence, H, qb, qh), head(o_ptr, sequence, H, ob, oh)
    state, keys = load_state(state_ptr, sequence, D, E, BD, BE)
    high, low, scale = parts(state, q_ptr.dtype.element_ty, KEYS)
    for i in range(part * each, tl.minimum(part * each + each, tl.cdiv(T, C))):
        first = i * C
        q, t = load(q_ptr, first, qt, T, C, D, BD), first + tl.arange(0, C)
        out = times(q, high, low, scale, KEYS)
        if KEYS:
            den = row_products(q, keys)
            if DIVIDE:
                den = 1.0 / tl.maximum(den, eps, tl.PropagateNan.ALL)
                out = saturated(out * den[:, None], q.dtype)
            tl.store(den_ptr + sequence * T + t, den, mask=t < T)
        store(o_ptr, out, first, ot, T, C, E, BE)


@triton.jit(do_not_specialize=SIZES)
def _query_kernel(
    q_ptr, qb, qh, qt, go_ptr, gob, goh, got, o_ptr, ob, oh, ot, dq_ptr, dqb, dqh, dqt,
    den_ptr, g_ptr, state_ptr, grad_state_ptr, eps, T, H, each,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    KEYS: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of q, and that of the state which comes from every part.

    The gradients of the numerators are f G, those of the denominators f g. In a quotient g is minus
    G times the result, which is q times its gradient, divided by the denominator.
    """
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_ptr, go_ptr = head(q_ptr, sequence, H, qb, qh), head(go_ptr, sequence, H, gob, goh)
    o_ptr, dq_ptr = head(o_ptr, sequence, H, ob, oh), head(dq_ptr, sequence, H, dqb, dqh)
    den_ptr, g_ptr = den_ptr + sequence * T, g_ptr + sequence * T
    state, keys = load_state(state_ptr, sequence, D, E, BD, BE)
    high, low, scale = parts(tl.trans(state), q_ptr.dtype.element_ty, KEYS)
    grad_state = tl.zeros((BE, BD), tl.float32)
    grad_keys = tl.zeros((BD,), tl.float32)
    for i in range(part * each, tl.minimum(part * each + each, tl.cdiv(T, C))):
        first = i * C
        q, t = load(q_ptr, first, qt, T, C, D, BD), first + tl.arange(0, C)
        g = tl.zeros((C,), tl.float32)
        if KEYS and not DIVIDE:
            g = tl.load(g_ptr + t, mask=t < T, other=0.0)
        go, g, f = incoming(go_ptr, first, got, g, T, q.dtype, C, E, BE)
        if DIVIDE and q.dtype == tl.float16:
            go = unsaturated(go, load(o_ptr, first, ot, T, C, E, BE))
        dq = times(go, high, low, scale, KEYS)
        if DIVIDE:
            f = tl.load(den_ptr + t, mask=t < T, other=1.0)
            g = tl.where(f < 1.0 / eps, -tl.sum(q.to(tl.float32) * dq, 1) * f, 0.0)
        rows, unit = cast(q.to(tl.float32) * f[:, None], q.dtype)
        if KEYS:
            dq += outer_product(g, keys, q.dtype)
            grad_keys += column_sums(rows, g, True) * unit
        store(dq_ptr, dq * f[:, None], first, dqt, T, C, D, BD)
        grad_state += tl.dot(tl.trans(go), rows) * unit
    row = sequence * tl.num_programs(1) + part
    store_state(grad_state_ptr, tl.trans(grad_state), grad_keys, row, D, E, BD, BE)


@triton.jit(do_not_specialize=SIZES)
def _key_kernel(
    k_ptr, kb, kh, kt, v_ptr, vb, vh, vt, dk_ptr, dkb, dkh, dkt, dv_ptr, dvb, dvh, dvt, state_ptr,
    T, H, each, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of k and v from that of the state."""
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k_ptr, v_ptr = head(k_ptr, sequence, H, kb, kh), head(v_ptr, sequence, H, vb, vh)
    dk_ptr, dv_ptr = head(dk_ptr, sequence, H, dkb, dkh), head(dv_ptr, sequence, H, dvb, dvh)
    state, keys = load_state(state_ptr, sequence, D, E, BD, BE)
    high, low, scale = parts(state, k_ptr.dtype.element_ty, KEYS)
    for i in range(part * each, tl.minimum(part * each + each, tl.cdiv(T, C))):
        first = i * C
        k, v = load(k_ptr, first, kt, T, C, D, BD), load(v_ptr, first, vt, T, C, E, BE)
        store(dv_ptr, times(k, high, low, scale, KEYS), first, dvt, T, C, E, BE)
        dk = times(v, tl.trans(high), tl.trans(low), scale, KEYS)
        if KEYS:
            dk += keys[None, :]
        store(dk_ptr, dk, first, dkt, T, C, D, BD)
