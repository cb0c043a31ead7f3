"""Triton kernels of flash attention: the output, three of the gradients, and two small ones.

Nothing is summed by atomic operations, so equal inputs give equal bits. Strides are in units of
UNIT elements. Tensors of sums of log gates are those of ``flash_triton``.

Axes: B batch, H heads, L = B H sequences, T query time, S key time, D key width, E value width,
M tiles of BM queries, N tiles of BN keys, R lags of a table, C lags of biases of every token,
from C0 on.
"""

import triton
import triton.language as tl

from lrpe_fairseq.kernels.flash.flash_tiles import (
    dot,
    in_log2,
    kept,
    key_term_gradients,
    key_tiles,
    lag_range,
    load_pairs,
    load_rows,
    place,
    query_term_gradients,
    query_tiles,
    scored,
    segment_range,
    statistics,
    store_lags,
    store_own_ends,
    store_rows,
    store_vector,
    tile_gradient,
)

STRIDES = ["qb", "qh", "qt", "kb", "kh", "kt", "vb", "vh", "vt", "gb", "gh", "gt"]
STRIDES += ["ob", "oh", "ot", "pb", "ph", "pt"]
NUMBERS = ["T", "S", "H", "R", "first_lag", "far", "C", "C0", "offset", "window", "threshold"]
NUMBERS += ["diagonals", "least", *STRIDES]
"""Arguments whose values are not compiled in."""


@triton.jit(do_not_specialize=NUMBERS)
def output_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    table_ptr, decay_ptr, score_decay_ptr, q_gate_ptr, k_gate_ptr, by_query_ptr, by_key_ptr,
    padding_ptr, q_segment_ptr, k_segment_ptr, bounds_ptr, seed_ptr,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot,
    T, S, H, R, first_lag, far, C, C0, offset, window, threshold, scale, inverse,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, PLAIN: tl.constexpr, TABLE: tl.constexpr, DECAY: tl.constexpr,
    SCORE_DECAY: tl.constexpr, GATED: tl.constexpr, BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr,
    CLIPPED: tl.constexpr, EXACT: tl.constexpr, PADDED: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """Compute o (B, H, T, E) and the log2 of the softmax's sums, lse (L, T), inf without a key."""
    m, b, h, sequence = place(T, BM, H)
    q = load_rows(q_ptr + (b * qb + h * qh) * UNIT, m * BM, qt * UNIT, T, D, BM, DP)
    out = tl.zeros((BM, EP), tl.float32)
    top, total = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    first, full, last = key_tiles(
        m, b, bounds_ptr, T, S, offset, window, BM, BN, CAUSAL, WINDOWED, PADDED or SEGMENTS
    )
    for n in range(first, last):
        k = load_rows(k_ptr + (b * kb + h * kh) * UNIT, n * BN, kt * UNIT, S, D, BN, DP)
        s = scored(
            dot(q, tl.trans(k)), m, n, b, h, sequence,
            table_ptr, decay_ptr, score_decay_ptr, q_gate_ptr, k_gate_ptr, by_query_ptr,
            by_key_ptr, padding_ptr, q_segment_ptr, k_segment_ptr, T, S, R, first_lag, far, C, C0,
            offset, window, scale, n >= full, BM, BN, CAUSAL, WINDOWED, PLAIN, TABLE, DECAY,
            SCORE_DECAY, GATED, BY_QUERY, BY_KEY, CLIPPED, EXACT, PADDED, SEGMENTS, False,
        )  # fmt: skip
        v = load_rows(v_ptr + (b * vb + h * vh) * UNIT, n * BN, vt * UNIT, S, E, BN, EP)
        unit = in_log2(scale, PLAIN)
        higher = tl.maximum(top, tl.max(s, 1) * unit)
        p = tl.exp2(s * unit - tl.where(higher == float("-inf"), 0.0, higher)[:, None])
        shrink = tl.exp2(top - tl.where(higher == float("-inf"), 0.0, higher))
        total, top = total * shrink + tl.sum(p, 1), higher
        if DROPS:
            p = tl.where(kept(seed_ptr, sequence, m, n, threshold, BM, BN), p, 0.0)
        out = out * shrink[:, None] + dot(p.to(v.dtype), v)
    seen = total != 0  # NaN is seen
    out = tl.where(seen[:, None], out * (inverse / tl.where(seen, total, 1.0))[:, None], 0.0)
    store_rows(o_ptr + (b * ob + h * oh) * UNIT, out, m * BM, ot * UNIT, T, E, BM, EP)
    lse = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("inf"))
    store_vector(lse_ptr, lse, sequence, m, T, BM)


@triton.jit(do_not_specialize=NUMBERS)
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, grad_ptr, lse_ptr, stats_ptr, dq_ptr, dgate_ptr, dquery_ptr,
    table_ptr, decay_ptr, score_decay_ptr, q_gate_ptr, k_gate_ptr, by_query_ptr, by_key_ptr,
    padding_ptr, q_segment_ptr, k_segment_ptr, bounds_ptr, seed_ptr,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt, ob, oh, ot, pb, ph, pt,
    T, S, H, R, first_lag, far, C, C0, offset, window, threshold, scale, inverse,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, PLAIN: tl.constexpr, TABLE: tl.constexpr, DECAY: tl.constexpr,
    SCORE_DECAY: tl.constexpr, GATED: tl.constexpr, BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr,
    CLIPPED: tl.constexpr, EXACT: tl.constexpr, PADDED: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """Compute dq (B, H, T, D), the queries' stats (L, ., 2), which hold lse and delta = grad . o,
    and the gradients of gates (L, T), unless CAUSAL, and of biases of every query (L, T, C)."""
    m, b, h, sequence = place(T, BM, H)
    q = load_rows(q_ptr + (b * qb + h * qh) * UNIT, m * BM, qt * UNIT, T, D, BM, DP)
    grad = load_rows(grad_ptr + (b * gb + h * gh) * UNIT, m * BM, gt * UNIT, T, E, BM, EP)
    o = load_rows(o_ptr + (b * ob + h * oh) * UNIT, m * BM, ot * UNIT, T, E, BM, EP)
    lse, delta = statistics(o, grad, lse_ptr, stats_ptr, sequence, m, T, BM)
    dq, dgate = tl.zeros((BM, DP), tl.float32), tl.zeros((BM,), tl.float32)
    low, high = dgate, dgate
    first, full, last = key_tiles(
        m, b, bounds_ptr, T, S, offset, window, BM, BN, CAUSAL, WINDOWED, PADDED or SEGMENTS
    )
    for n in range(first, last):
        k = load_rows(k_ptr + (b * kb + h * kh) * UNIT, n * BN, kt * UNIT, S, D, BN, DP)
        v = load_rows(v_ptr + (b * vb + h * vh) * UNIT, n * BN, vt * UNIT, S, E, BN, EP)
        _, ds = tile_gradient(
            dot(q, tl.trans(k)), dot(grad, tl.trans(v)), lse[:, None], delta[:, None], m, n, b, h,
            sequence, table_ptr, decay_ptr, score_decay_ptr, q_gate_ptr, k_gate_ptr, by_query_ptr,
            by_key_ptr, padding_ptr, q_segment_ptr, k_segment_ptr, seed_ptr, T, S, R, first_lag,
            far, C, C0, offset, window, threshold, scale, inverse, n >= full, BM, BN, CAUSAL,
            WINDOWED, PLAIN, TABLE, DECAY, SCORE_DECAY, GATED, BY_QUERY, BY_KEY, CLIPPED, EXACT,
            PADDED, SEGMENTS, DROPS, False,
        )  # fmt: skip
        ds, dgate, low, high = query_term_gradients(
            ds, dgate, low, high, m, n, h, sequence, dquery_ptr, score_decay_ptr, q_gate_ptr,
            k_gate_ptr, T, S, C, C0, offset, BM, BN, CAUSAL, SCORE_DECAY, GATED, BY_QUERY,
            CLIPPED, EXACT,
        )  # fmt: skip
        dq += dot(ds.to(k.dtype), k)
    store_rows(dq_ptr + (b * pb + h * ph) * UNIT, dq * scale, m * BM, pt * UNIT, T, D, BM, DP)
    if GATED and not CAUSAL:
        store_vector(dgate_ptr, dgate, sequence, m, T, BM)
    store_own_ends(dquery_ptr, low, high, m * BM, T, sequence, C, BM, BY_QUERY, CLIPPED)


@triton.jit(do_not_specialize=NUMBERS)
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, stats_ptr, dk_ptr, dv_ptr, dgate_ptr, dkey_ptr,
    table_ptr, decay_ptr, score_decay_ptr, q_gate_ptr, k_gate_ptr, by_query_ptr,
    by_key_ptr, padding_ptr, q_segment_ptr, k_segment_ptr, bounds_ptr, seed_ptr, qb, qh, qt, kb,
    kh, kt, vb, vh, vt, gb, gh, gt, ob, oh, ot, pb, ph, pt, T, S, H, R, first_lag, far, C, C0,
    offset, window, threshold, scale, inverse, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, PLAIN: tl.constexpr, TABLE: tl.constexpr, DECAY: tl.constexpr,
    SCORE_DECAY: tl.constexpr, GATED: tl.constexpr, BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr,
    CLIPPED: tl.constexpr, EXACT: tl.constexpr, PADDED: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """Compute dk, dv, and the gradients of gates (L, S) and of biases of every key (L, S, C)."""
    n, b, h, sequence = place(S, BN, H)
    k = load_rows(k_ptr + (b * kb + h * kh) * UNIT, n * BN, kt * UNIT, S, D, BN, DP)
    v = load_rows(v_ptr + (b * vb + h * vh) * UNIT, n * BN, vt * UNIT, S, E, BN, EP)
    dk, dv = tl.zeros((BN, DP), tl.float32), tl.zeros((BN, EP), tl.float32)
    dgate = tl.zeros((BN,), tl.float32)
    low, high = dgate, dgate
    first, full, last = query_tiles(
        n, b, bounds_ptr, T, S, offset, window, BM, BN, CAUSAL, WINDOWED, PADDED or SEGMENTS
    )
    for m in range(first, last):
        q = load_rows(q_ptr + (b * qb + h * qh) * UNIT, m * BM, qt * UNIT, T, D, BM, DP)
        grad = load_rows(grad_ptr + (b * gb + h * gh) * UNIT, m * BM, gt * UNIT, T, E, BM, EP)
        lse, delta = load_pairs(stats_ptr, sequence, m, T, BM)
        p, ds = tile_gradient(
            dot(k, tl.trans(q)), dot(v, tl.trans(grad)), lse[None, :], delta[None, :], m, n, b, h,
            sequence, table_ptr, decay_ptr, score_decay_ptr, q_gate_ptr, k_gate_ptr, by_query_ptr,
            by_key_ptr, padding_ptr, q_segment_ptr, k_segment_ptr, seed_ptr, T, S, R, first_lag,
            far, C, C0, offset, window, threshold, scale, inverse, m < full, BM, BN, CAUSAL,
            WINDOWED, PLAIN, TABLE, DECAY, SCORE_DECAY, GATED, BY_QUERY, BY_KEY, CLIPPED, EXACT,
            PADDED, SEGMENTS, DROPS, True,
        )  # fmt: skip
        dv += dot(p.to(grad.dtype), grad)
        ds, dgate, low, high = key_term_gradients(
            ds, dgate, low, high, m, n, h, sequence, dkey_ptr, score_decay_ptr, q_gate_ptr,
            k_gate_ptr, T, S, C, C0, offset, BM, BN, CAUSAL, SCORE_DECAY, GATED, BY_KEY,
            CLIPPED, EXACT,
        )  # fmt: skip
        dk += dot(ds.to(q.dtype), q)
    store_rows(dk_ptr + (b * ob + h * oh) * UNIT, dk * scale, n * BN, ot * UNIT, S, D, BN, DP)
    store_rows(dv_ptr + (b * pb + h * ph) * UNIT, dv * inverse, n * BN, pt * UNIT, S, E, BN, EP)
    if GATED:
        store_vector(dgate_ptr, dgate, sequence, n, S, BN)
    store_own_ends(dkey_ptr, low, high, n * BN, S, sequence, C, BN, BY_KEY, CLIPPED)


@triton.jit(do_not_specialize=NUMBERS)
def lag_gradient_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, stats_ptr, dtable_ptr,
    table_ptr, decay_ptr, score_decay_ptr, q_gate_ptr, k_gate_ptr, by_query_ptr, by_key_ptr,
    padding_ptr, q_segment_ptr, k_segment_ptr, bounds_ptr, seed_ptr,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt,
    T, S, H, R, first_lag, far, C, C0, offset, window, threshold, diagonals, least, scale, inverse,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, PLAIN: tl.constexpr, TABLE: tl.constexpr, DECAY: tl.constexpr,
    SCORE_DECAY: tl.constexpr, GATED: tl.constexpr, BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr,
    CLIPPED: tl.constexpr, EXACT: tl.constexpr, PADDED: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a table in rows by lag (L, BM / BN + 1, count).

    A program has the tiles (m, n) of a diagonal, whose lags are the same: it adds them up first.
    """
    tile, b, h, sequence = place(diagonals * BN, BN, H)
    d = least // BN + diagonals - tile  # from least + BN on; the longest diagonals first
    total = tl.zeros((BM, BN), tl.float32)
    first, full, last = lag_range(d, T, S, offset, BM, BN, CAUSAL)
    for m in range(first, last):
        n = m * (BM // BN) - d
        q = load_rows(q_ptr + (b * qb + h * qh) * UNIT, m * BM, qt * UNIT, T, D, BM, DP)
        grad = load_rows(grad_ptr + (b * gb + h * gh) * UNIT, m * BM, gt * UNIT, T, E, BM, EP)
        k = load_rows(k_ptr + (b * kb + h * kh) * UNIT, n * BN, kt * UNIT, S, D, BN, DP)
        v = load_rows(v_ptr + (b * vb + h * vh) * UNIT, n * BN, vt * UNIT, S, E, BN, EP)
        lse, delta = load_pairs(stats_ptr, sequence, m, T, BM)
        _, ds = tile_gradient(
            dot(q, tl.trans(k)), dot(grad, tl.trans(v)), lse[:, None], delta[:, None], m, n, b, h,
            sequence, table_ptr, decay_ptr, score_decay_ptr, q_gate_ptr, k_gate_ptr, by_query_ptr,
            by_key_ptr, padding_ptr, q_segment_ptr, k_segment_ptr, seed_ptr, T, S, R, first_lag,
            far, C, C0, offset, window, threshold, scale, inverse, m >= full, BM, BN, CAUSAL,
            WINDOWED, PLAIN, TABLE, DECAY, SCORE_DECAY, GATED, BY_QUERY, BY_KEY, CLIPPED, EXACT,
            PADDED, SEGMENTS, DROPS, False,
        )  # fmt: skip
        total += ds
    store_lags(dtable_ptr, total, d, sequence, (diagonals + BM // BN) * BN, least, BM, BN)


@triton.jit(do_not_specialize=["B", "H", "N", "count", "R", "shift"])
def lag_sums_kernel(
    part_ptr, sum_ptr, B, H, N, count, R, shift, ROWS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Sum part (B, H, N, count) over B and N: column r of sum (H, R) has entry r + shift, or 0."""
    h, tile = tl.program_id(0) % H, tl.program_id(0) // H
    column = tile * SIZE + tl.arange(0, SIZE)
    entry = column + shift
    known = (entry >= 0) & (entry < count)
    total = tl.zeros((SIZE,), tl.float32)
    for start in range(0, B * N, ROWS):
        row = start + tl.arange(0, ROWS)
        line = ((row // N) * H + h).to(tl.int64) * N + row % N
        at = part_ptr + line[:, None] * count + entry[None, :]
        total += tl.sum(tl.load(at, mask=(row < B * N)[:, None] & known[None, :], other=0.0), 0)
    tl.store(sum_ptr + h * R + column, total, mask=column < R)


@triton.jit(do_not_specialize=["X", "Y"])
def bounds_kernel(
    own_ptr, other_ptr, own_padding_ptr, other_padding_ptr, bounds_ptr, X, Y,
    SIZE: tl.constexpr, OTHER: tl.constexpr, SEGMENTS: tl.constexpr, OWN_PADDED: tl.constexpr,
    OTHER_PADDED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write bounds (B, tiles of SIZE of X tokens, 2): the first and the last (exclusive) of the
    tiles of OTHER of Y tokens that have a pair with it, by padding and ranges of segments."""
    tiles, row = tl.cdiv(X, SIZE), tl.arange(0, GROUP)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    own = (tl.program_id(0) % tiles * SIZE + tl.arange(0, SIZE))[None, :]
    low, high = segment_range(
        own_ptr + b * X, own_padding_ptr + b * X, own, X, SEGMENTS, OWN_PADDED
    )
    first, last = tl.full((GROUP,), 2147483647, tl.int32), tl.zeros((GROUP,), tl.int32)
    for start in range(0, tl.cdiv(Y, OTHER), GROUP):
        t = (start + row)[:, None] * OTHER + tl.arange(0, OTHER)[None, :]
        other_low, other_high = segment_range(
            other_ptr + b * Y, other_padding_ptr + b * Y, t, Y, SEGMENTS, OTHER_PADDED
        )
        seen = (other_low <= high) & (other_high >= low)
        first = tl.minimum(first, tl.where(seen, start + row, 2147483647))
        last = tl.maximum(last, tl.where(seen, start + row + 1, 0))
    at = bounds_ptr + tl.program_id(0) * 2
    tl.store(at, tl.min(first, 0))
    tl.store(at + 1, tl.max(last, 0))
