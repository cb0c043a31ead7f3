"""Triton kernels of stick-breaking attention; see ``stick_triton``.

    z_ij = scale q_i . k_j,   b_ij = sigmoid(z_ij),   w_ij = -log(1 - b_ij)
    log weight_ij = log b_ij - sum of w_iu over nearer keys u > j
    dz_ij = a_ij (1 - b_ij) - b_ij (sum of a_iu over farther keys u < j),
    a_ij = weight_ij (grad_i . v_j)

Hidden keys have b = w = 0. Sums of w run from near to far and those of a from far to near: the sum
of all less that of the others would spread the rounding of the nearest keys to all. Logarithms are
in base 2.

Every query carries two sums from tile to tile: ``rest``, w of all nearer keys, and ``past``, a of
all farther ones. A weight is 0 in float32 where rest is END, so tiles behind it are not read.

Axes as in ``flash_kernels``; a part of the batch starts with sequence ``start`` of it.
"""

import triton
import triton.language as tl

from lrpe_fairseq.kernels.flash.flash_tiles import (
    LOG2E,
    dot,
    hidden,
    kept,
    key_tiles,
    load_rows,
    load_vector,
    place,
    query_tiles,
    store_rows,
    store_vector,
)

STRIDES = ["qb", "qh", "qt", "kb", "kh", "kt", "vb", "vh", "vt", "gb", "gh", "gt"]
STRIDES += ["ob", "oh", "ot", "pb", "ph", "pt"]
NUMBERS = ["T", "S", "H", "offset", "window", "threshold", "start", *STRIDES]
"""Arguments whose values are not compiled in."""

END = tl.constexpr(150.0)  # 2^-150 is 0 in float32
MOST = tl.constexpr(1024.0)  # of w, so that float16 holds it; the keys behind have no weight


@triton.jit(do_not_specialize=NUMBERS)
def output_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, padding_ptr, q_segment_ptr, k_segment_ptr, bounds_ptr, seed_ptr,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot,
    T, S, H, offset, window, threshold, scale, inverse,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, UNIT: tl.constexpr, WINDOWED: tl.constexpr, PADDED: tl.constexpr,
    SEGMENTS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Compute o (B, H, T, E)."""
    m, b, h, sequence = place(T, BM, H)
    q = load_rows(q_ptr + (b * qb + h * qh) * UNIT, m * BM, qt * UNIT, T, D, BM, DP)
    out, rest = tl.zeros((BM, EP), tl.float32), nothing_left(m, T, BM)
    first, full, n = key_tiles(
        m, b, bounds_ptr, T, S, offset, window, BM, BN, True, WINDOWED, PADDED or SEGMENTS
    )
    while (n > first) & (tl.min(rest) < END):
        n -= 1
        k = load_rows(k_ptr + (b * kb + h * kh) * UNIT, n * BN, kt * UNIT, S, D, BN, DP)
        v = load_rows(v_ptr + (b * vb + h * vh) * UNIT, n * BN, vt * UNIT, S, E, BN, EP)
        share, w = broken(
            dot(q, tl.trans(k)), m, n, b, padding_ptr, q_segment_ptr, k_segment_ptr, T, S, offset,
            window, scale, n >= full, BM, BN, WINDOWED, PADDED, SEGMENTS,
        )  # fmt: skip
        weight = tl.exp2(share - nearer(w, BN) - rest[:, None])
        if DROPS:
            weight = tl.where(kept(seed_ptr, sequence, m, n, threshold, BM, BN), weight, 0.0)
        out += dot(weight.to(v.dtype), v)
        rest += tl.sum(w, 1)
    store_rows(o_ptr + (b * ob + h * oh) * UNIT, out * inverse, m * BM, ot * UNIT, T, E, BM, EP)


@triton.jit(do_not_specialize=NUMBERS)
def rest_kernel(
    q_ptr, k_ptr, rest_ptr, reach_ptr, padding_ptr, q_segment_ptr, k_segment_ptr, bounds_ptr,
    seed_ptr, qb, qh, qt, kb, kh, kt, T, S, H, offset, window, threshold, start, scale, inverse,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, UNIT: tl.constexpr, WINDOWED: tl.constexpr, PADDED: tl.constexpr,
    SEGMENTS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Compute rest (L, N, T) at the tiles of keys within reach (L, M, 2), first and last."""
    m, b, h, line = place(T, BM, H)
    b += start
    q = load_rows(q_ptr + (b * qb + h * qh) * UNIT, m * BM, qt * UNIT, T, D, BM, DP)
    rest = nothing_left(m, T, BM)
    first, full, n = key_tiles(
        m, b, bounds_ptr, T, S, offset, window, BM, BN, True, WINDOWED, PADDED or SEGMENTS
    )
    reach_ptr += (line * tl.cdiv(T, BM) + m) * 2
    tl.store(reach_ptr + 1, n)
    while (n > first) & (tl.min(rest) < END):
        n -= 1
        store_vector(rest_ptr, rest, line * tl.cdiv(S, BN) + n, m, T, BM)
        k = load_rows(k_ptr + (b * kb + h * kh) * UNIT, n * BN, kt * UNIT, S, D, BN, DP)
        _share, w = broken(
            dot(q, tl.trans(k)), m, n, b, padding_ptr, q_segment_ptr, k_segment_ptr, T, S, offset,
            window, scale, n >= full, BM, BN, WINDOWED, PADDED, SEGMENTS,
        )  # fmt: skip
        rest += tl.sum(w, 1)
    tl.store(reach_ptr, n)


@triton.jit(do_not_specialize=NUMBERS)
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dq_ptr, rest_ptr, past_ptr, reach_ptr, padding_ptr,
    q_segment_ptr, k_segment_ptr, bounds_ptr, seed_ptr,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt, ob, oh, ot,
    T, S, H, offset, window, threshold, start, scale, inverse,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, UNIT: tl.constexpr, WINDOWED: tl.constexpr, PADDED: tl.constexpr,
    SEGMENTS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Compute dq (B, H, T, D) and past (L, N, T) at the tiles of keys within reach."""
    m, b, h, line = place(T, BM, H)
    b += start
    q = load_rows(q_ptr + (b * qb + h * qh) * UNIT, m * BM, qt * UNIT, T, D, BM, DP)
    grad = load_rows(grad_ptr + (b * gb + h * gh) * UNIT, m * BM, gt * UNIT, T, E, BM, EP)
    dq, past = tl.zeros((BM, DP), tl.float32), tl.zeros((BM,), tl.float32)
    _first, full, _last = key_tiles(
        m, b, bounds_ptr, T, S, offset, window, BM, BN, True, WINDOWED, PADDED or SEGMENTS
    )
    reach_ptr += (line * tl.cdiv(T, BM) + m) * 2
    for n in range(tl.load(reach_ptr), tl.load(reach_ptr + 1)):
        k = load_rows(k_ptr + (b * kb + h * kh) * UNIT, n * BN, kt * UNIT, S, D, BN, DP)
        v = load_rows(v_ptr + (b * vb + h * vh) * UNIT, n * BN, vt * UNIT, S, E, BN, EP)
        at = line * tl.cdiv(S, BN) + n
        store_vector(past_ptr, past, at, m, T, BM)
        rest = load_vector(rest_ptr, at, m, T, END, BM)
        _weight, a, dz = tile_gradient(
            dot(q, tl.trans(k)), dot(grad, tl.trans(v)), rest, past, m, n, b, b * H + h,
            padding_ptr, q_segment_ptr, k_segment_ptr, seed_ptr, T, S, offset, window, threshold,
            scale, inverse, n >= full, BM, BN, k.dtype == tl.float32, WINDOWED, PADDED, SEGMENTS,
            DROPS,
        )  # fmt: skip
        past += tl.sum(a, 1)
        dq += dot(dz.to(k.dtype), k)
    store_rows(dq_ptr + (b * ob + h * oh) * UNIT, dq * scale, m * BM, ot * UNIT, T, D, BM, DP)


@triton.jit(do_not_specialize=NUMBERS)
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, rest_ptr, past_ptr, reach_ptr, padding_ptr,
    q_segment_ptr, k_segment_ptr, bounds_ptr, seed_ptr,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt, ob, oh, ot, pb, ph, pt,
    T, S, H, offset, window, threshold, start, scale, inverse,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, UNIT: tl.constexpr, WINDOWED: tl.constexpr, PADDED: tl.constexpr,
    SEGMENTS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Compute dk (B, H, S, D) and dv (B, H, S, E)."""
    n, b, h, line = place(S, BN, H)
    b += start
    k = load_rows(k_ptr + (b * kb + h * kh) * UNIT, n * BN, kt * UNIT, S, D, BN, DP)
    v = load_rows(v_ptr + (b * vb + h * vh) * UNIT, n * BN, vt * UNIT, S, E, BN, EP)
    dk, dv = tl.zeros((BN, DP), tl.float32), tl.zeros((BN, EP), tl.float32)
    first, full, last = query_tiles(
        n, b, bounds_ptr, T, S, offset, window, BM, BN, True, WINDOWED, PADDED or SEGMENTS
    )
    at = line * tl.cdiv(S, BN) + n
    for m in range(first, last):
        reach = reach_ptr + (line * tl.cdiv(T, BM) + m) * 2
        if (tl.load(reach) <= n) & (tl.load(reach + 1) > n):
            q = load_rows(q_ptr + (b * qb + h * qh) * UNIT, m * BM, qt * UNIT, T, D, BM, DP)
            grad = load_rows(grad_ptr + (b * gb + h * gh) * UNIT, m * BM, gt * UNIT, T, E, BM, EP)
            weight, _a, dz = tile_gradient(
                dot(q, tl.trans(k)), dot(grad, tl.trans(v)),
                load_vector(rest_ptr, at, m, T, END, BM), load_vector(past_ptr, at, m, T, 0.0, BM),
                m, n, b, b * H + h, padding_ptr, q_segment_ptr, k_segment_ptr, seed_ptr, T, S,
                offset, window, threshold, scale, inverse, m < full, BM, BN, k.dtype == tl.float32,
                WINDOWED, PADDED, SEGMENTS, DROPS,
            )  # fmt: skip
            dv += dot(tl.trans(weight.to(grad.dtype)), grad)
            dk += dot(tl.trans(dz.to(q.dtype)), q)
    store_rows(dk_ptr + (b * ob + h * oh) * UNIT, dk * scale, n * BN, ot * UNIT, S, D, BN, DP)
    store_rows(dv_ptr + (b * pb + h * ph) * UNIT, dv * inverse, n * BN, pt * UNIT, S, E, BN, EP)


# --- one tile ------------------------------------------------------------------------------------


@triton.jit
def nothing_left(m, T, BM: tl.constexpr):
    """Return the sums of w before the nearest key: 0, or END past the last query."""
    return tl.where(m * BM + tl.arange(0, BM) < T, 0.0, END)


@triton.jit
def broken(
    product, m, n, b, padding_ptr, q_segment_ptr, k_segment_ptr, T, S, offset, window, scale, edge,
    BM: tl.constexpr, BN: tl.constexpr, WINDOWED: tl.constexpr, PADDED: tl.constexpr,
    SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Return log2 b and w of a tile (BM, BN) from its products q . k; -inf and 0 where hidden."""
    z = hidden(
        product * (scale * LOG2E), m, n, b, padding_ptr, q_segment_ptr, k_segment_ptr, T, S, offset,
        window, edge, BM, BN, True, WINDOWED, PADDED, SEGMENTS, False,
    )  # fmt: skip
    small = log2_of_one_and(tl.exp2(-tl.abs(z)))
    return tl.minimum(z, 0.0) - small, tl.minimum(tl.maximum(z, 0.0) + small, MOST)


@triton.jit
def log2_of_one_and(x):
    """Return log2(1 + x) of x in [0, 1] with a relative error of 2e-7.

    A long text has sums of many small w, which log2(1.0 + x) would round.
    """
    p = 0.0075491825 * x - 0.042567067
    p = p * x + 0.11285621
    p = p * x - 0.197119
    p = p * x + 0.27564144
    p = p * x - 0.35840848
    p = p * x + 0.48069295
    p = p * x - 0.7213402
    return (p * x + 1.442695) * x


@triton.jit
def nearer(w, BN: tl.constexpr):
    """Return the sums of w (BM, BN) over the later columns, by products of float16 with 0 and 1.

    w is split in two parts, which have 22 bits.
    """
    r = tl.arange(0, BN)
    later = (r[:, None] > r[None, :]).to(tl.float16)
    high = w.to(tl.float16)
    low = ((w - high.to(tl.float32)) * 4096.0).to(tl.float16)
    return tl.dot(low, later) * (1 / 4096.0) + tl.dot(high, later)


@triton.jit
def farther(a, BN: tl.constexpr, EXACT: tl.constexpr):
    """Return the sums of a (BM, BN) over the earlier columns; tf32 has the range of gradients."""
    r = tl.arange(0, BN)
    earlier = (r[:, None] < r[None, :]).to(tl.float32)
    return tl.dot(a, earlier, input_precision="tf32x3" if EXACT else "tf32")


@triton.jit
def tile_gradient(
    product, da, rest, past, m, n, b, sequence, padding_ptr, q_segment_ptr, k_segment_ptr,
    seed_ptr, T, S, offset, window, threshold, scale, inverse, edge,
    BM: tl.constexpr, BN: tl.constexpr, EXACT: tl.constexpr, WINDOWED: tl.constexpr,
    PADDED: tl.constexpr, SEGMENTS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Return the weights of a tile, 0 where dropped and without ``inverse``, a, and dz.

    da: grad . v of every pair. rest, past: (BM,), sums over the keys on either side of the tile.
    """
    share, w = broken(
        product, m, n, b, padding_ptr, q_segment_ptr, k_segment_ptr, T, S, offset, window, scale,
        edge, BM, BN, WINDOWED, PADDED, SEGMENTS,
    )  # fmt: skip
    weight = tl.exp2(share - nearer(w, BN) - rest[:, None])
    if DROPS:
        weight = tl.where(kept(seed_ptr, sequence, m, n, threshold, BM, BN), weight, 0.0)
    a = weight * (da * inverse)
    dz = a * tl.exp2(-w) - tl.exp2(share) * (past[:, None] + farther(a, BN, EXACT))
    return weight, a, dz
