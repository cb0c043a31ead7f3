"""Triton functions of flash attention: addresses, loads, masks and scores of one tile.

Tile (m, n) has the queries from m BM and the keys from n BN on. It has a row for each query, or, if
TURNED, a column.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MARGIN = tl.constexpr(128)  # tokens; no tile is longer


@triton.jit
def place(count, SIZE: tl.constexpr, H):
    """Return the tile of ``count`` rows, the batch (int64), the head, and both as one (int64).

    The last tiles come first: in causal attention they have the most keys.
    """
    tiles = tl.cdiv(count, SIZE)
    sequence = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles
    return tile, (sequence // H).to(tl.int64), sequence % H, sequence.to(tl.int64)


@triton.jit
def load_rows(base, start, stride, count, W: tl.constexpr, ROWS: tl.constexpr, WP: tl.constexpr):
    """Load the rows from ``start`` on of a matrix (count, W): (ROWS, WP), zero outside."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WP)
    inside = (start + row < count)[:, None]
    if W < WP:
        inside = inside & (column < W)[None, :]
    base += stride.to(tl.int64) * start
    return tl.load(base + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(
    base, x, start, stride, count, W: tl.constexpr, ROWS: tl.constexpr, WP: tl.constexpr
):  # fmt: skip
    """Write the rows x (ROWS, WP) from ``start`` on of a matrix (count, W)."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WP)
    inside = (start + row < count)[:, None]
    if W < WP:
        inside = inside & (column < W)[None, :]
    base += stride.to(tl.int64) * start
    to = base + row[:, None] * stride + column[None, :]
    tl.store(to, x.to(base.dtype.element_ty), mask=inside)


INTERPRETED = tl.constexpr(not isinstance(load_rows, triton.JITFunction))


@triton.jit
def fetched(pointer):
    """Load float32 numbers where they are used. ``tl.load`` passes them through shared memory."""
    if INTERPRETED:
        x = tl.load(pointer)
    else:
        x = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [pointer.to(tl.int64)], tl.float32, True, 1
        )
    return x


@triton.jit
def key_tiles(
    m, b, bounds_ptr, T, S, offset, window,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """Return the first and the last (exclusive) key tile of query tile m, and one between them.

    Every query of the tile sees every key of the tiles before the one between.
    """
    slot = m * BM + offset  # of the first query
    first, last, full = 0, tl.cdiv(S, BN), S // BN
    if CAUSAL:
        last = tl.minimum(last, tl.cdiv(tl.maximum(slot + BM, 0), BN))
        full = tl.minimum(full, tl.maximum(slot + 1, 0) // BN)
    if WINDOWED:
        first = tl.maximum(slot - window + 1, 0) // BN
    if BOUNDED:
        at = bounds_ptr + (b * tl.cdiv(T, BM) + m) * 2
        first = tl.maximum(first, tl.load(at))
        last = tl.minimum(last, tl.load(at + 1))
    return first, full, last


@triton.jit
def statistics(o, grad, lse_ptr, stats_ptr, sequence, m, T, BM: tl.constexpr):
    """Return the lse of a tile's queries, and delta = grad . o; write both to stats (L, ., 2)."""
    lse = load_vector(lse_ptr, sequence, m, T, float("inf"), BM)
    delta = tl.sum(grad.to(tl.float32) * o.to(tl.float32), 1)
    row = tl.arange(0, BM)
    at = stats_ptr + pairs_before(sequence, m, T, BM) + 2 * row
    tl.store(at, lse, mask=m * BM + row < T)
    tl.store(at + 1, delta, mask=m * BM + row < T)
    return lse, delta


@triton.jit
def pairs_before(sequence, tile, count, SIZE: tl.constexpr):
    """Return the place of a tile's pairs in a tensor (L, ., 2) for ``count`` tokens and margins."""
    return (sequence * (tl.cdiv(count, MARGIN) * MARGIN) + tile * SIZE) * 2


@triton.jit
def load_pairs(base, sequence, tile, count, SIZE: tl.constexpr):
    """Load a tile of two vectors per sequence, which have no end: see ``pairs_before``.

    Trap: with a mask every number would be loaded by an instruction of its own.
    """
    row, which = tl.arange(0, SIZE), tl.arange(0, 2)
    base += pairs_before(sequence, tile, count, SIZE)
    return tl.split(tl.load(base + 2 * row[:, None] + which[None, :]))


@triton.jit
def load_vector(base, sequence, tile, count, other, SIZE: tl.constexpr):
    """Load a tile of a vector per sequence (L, count), ``other`` past its end."""
    t = tile * SIZE + tl.arange(0, SIZE)
    return tl.load(base + sequence * count + t, mask=t < count, other=other)


@triton.jit
def store_vector(base, x, sequence, tile, count, SIZE: tl.constexpr):
    """Write a tile of a vector per sequence (L, count)."""
    t = tile * SIZE + tl.arange(0, SIZE)
    tl.store(base + sequence * count + t, x, mask=t < count)


@triton.jit
def query_tiles(
    n, b, bounds_ptr, T, S, offset, window,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """Return the first and the last (exclusive) query tile of key tile n, and one between them.

    Every query from the one between on sees every key of the tile.
    """
    start = n * BN - offset  # the query in the slot of the first key
    first, last, full = 0, tl.cdiv(T, BM), 0
    if CAUSAL:
        first = tl.maximum(start, 0) // BM
        full = tl.cdiv(tl.maximum(start + BN - 1, 0), BM)
    if WINDOWED:
        last = tl.minimum(last, tl.cdiv(tl.maximum(start + BN - 1 + window, 0), BM))
    if BOUNDED:
        at = bounds_ptr + (b * tl.cdiv(S, BN) + n) * 2
        first = tl.maximum(first, tl.load(at))
        last = tl.minimum(last, tl.load(at + 1))
    full = tl.where((n + 1) * BN <= S, tl.minimum(full, last), last)
    return first, full, last


@triton.jit
def pairs(m, n, BM: tl.constexpr, BN: tl.constexpr, TURNED: tl.constexpr):
    """Return the queries and the keys of a tile, of shapes that broadcast to it."""
    i, j = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    if TURNED:
        i, j = i[None, :], j[:, None]
    else:
        i, j = i[:, None], j[None, :]
    return i, j


@triton.jit
def hidden(
    s, m, n, b, padding_ptr, q_segment_ptr, k_segment_ptr, T, S, offset, window, edge,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    PADDED: tl.constexpr, SEGMENTS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Return the scores s of a tile, -inf where the query does not see the key.

    edge: False if neither a lag nor the end of the keys hides a pair of the tile.
    """
    if edge or WINDOWED or PADDED or SEGMENTS:
        i, j = pairs(m, n, BM, BN, TURNED)
        ok = j <= tl.minimum(i + offset, S - 1) if CAUSAL else j < S
        if WINDOWED:
            ok = ok & (j > i + (offset - window))
        if PADDED:
            ok = ok & (tl.load(padding_ptr + b * S + j, mask=j < S, other=1) == 0)
        if SEGMENTS:
            own = tl.load(q_segment_ptr + b * T + i, mask=i < T, other=0)
            ok = ok & (own == tl.load(k_segment_ptr + b * S + j, mask=j < S, other=0))
        s = tl.where(ok, s, float("-inf"))
    return s


@triton.jit
def log_decay(
    m, n, sequence, q_gate_ptr, k_gate_ptr, T, S, BM: tl.constexpr, BN: tl.constexpr,
    EXACT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Return c_i - d_j of the pairs of a tile.

    EXACT: correct to float32, from sums that are two floats each. Otherwise correct to 2^-23 of the
    sum of a block's log gates, from sums since the start of a block, in one operation per pair.
    """
    i, j = pairs(0, 0, BM, BN, TURNED)
    x, query_rest = sums_of(q_gate_ptr, i, m * BM, sequence, T, EXACT)
    y, key_rest = sums_of(k_gate_ptr, j, n * BN, sequence, S, EXACT)
    rest = query_rest - key_rest
    if EXACT:
        difference = (x - y) + rest
    else:
        difference = (x + rest) - y
    return difference


@triton.jit
def sums_of(base, t, first, sequence, count, EXACT: tl.constexpr):
    """Return a tile's sums of log gates and what they lack: low parts, or the sum of blocks before.

    No token has a mask: with one, every number would be loaded by an instruction of its own.
    """
    blocks = tl.cdiv(count, MARGIN)
    if EXACT:
        base += (sequence * (blocks * MARGIN) + first) * 2
        found, rest = tl.load(base + 2 * t), tl.load(base + 2 * t + 1)
    else:
        base += sequence * (blocks * (MARGIN + 2))
        found = tl.load(base + first + t)
        rest = tl.load(base + blocks * MARGIN + 2 * (first // MARGIN))
    return found, rest


@triton.jit
def in_log2(scale, PLAIN: tl.constexpr):
    """Return the factor by which the result of :func:`scored` is an exponent of 2."""
    return scale * LOG2E if PLAIN else LOG2E


@triton.jit
def of_lags(m, n, factor, offset, BM: tl.constexpr, BN: tl.constexpr, TURNED: tl.constexpr):
    """Return factor times the lags of the pairs of a tile, float32."""
    i, j = pairs(0, 0, BM, BN, TURNED)
    first = (m * BM - n * BN + offset).to(tl.float32)
    return factor * (i.to(tl.float32) + first) - factor * j.to(tl.float32)


@triton.jit
def with_table(
    s, base, m, n, h, R, first_lag, far, offset, BM: tl.constexpr, BN: tl.constexpr,
    TABLE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Add biases by lag to the scores of a tile.

    TABLE 2: all lags from ``far`` on have one bias, and so have all up to -far. A tile of such lags
    loads one number. With an else, registers would spill.
    """
    i, j = pairs(0, 0, BM, BN, TURNED)
    base += h * R + offset - first_lag + m * BM - n * BN
    if TABLE == 1:
        s += fetched(base + (i - j))
    else:
        lag = m * BM - n * BN + offset  # of the first query and the first key
        near = (lag - (BN - 1) < far) & (lag + (BM - 1) > -far)
        if near:
            s += fetched(base + (i - j))
        s += tl.load(base + (tl.where(lag > 0, far, -far) - lag), mask=near == 0, other=0.0)
    return s


@triton.jit
def scored(
    product, m, n, b, h, sequence,
    table_ptr, decay_ptr, score_decay_ptr, q_gate_ptr, k_gate_ptr, by_query_ptr, by_key_ptr,
    padding_ptr, q_segment_ptr, k_segment_ptr,
    T, S, R, first_lag, far, C, C0, offset, window, scale, edge,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    PLAIN: tl.constexpr, TABLE: tl.constexpr, DECAY: tl.constexpr, SCORE_DECAY: tl.constexpr,
    GATED: tl.constexpr, BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr, CLIPPED: tl.constexpr,
    EXACT: tl.constexpr, PADDED: tl.constexpr, SEGMENTS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile from its products q . k, -inf where hidden.

    edge: see :func:`hidden`. PLAIN: the scores are without ``scale``, which :func:`in_log2`
    applies.
    """
    i, j = pairs(m, n, BM, BN, TURNED)
    s = product if PLAIN else product * scale
    s = decayed(s, score_decay_ptr, m, n, h, offset, BM, BN, SCORE_DECAY, CAUSAL, TURNED)
    if TABLE:
        s = with_table(
            s, table_ptr, m, n, h, R, first_lag, far, offset, BM, BN, TABLE, TURNED
        )  # fmt: skip
    if DECAY:
        log = of_lags(m, n, tl.load(decay_ptr + h), offset, BM, BN, TURNED)
        s += log if CAUSAL else -tl.abs(log)
    if BY_QUERY:
        s = with_own(
            s, by_query_ptr, i, m * BM, T, m, n, sequence, C, offset - C0,
            BM, BN, CLIPPED, TURNED,
        )  # fmt: skip
    if BY_KEY:
        s = with_own(
            s, by_key_ptr, j, n * BN, S, m, n, sequence, C, offset - C0,
            BM, BN, CLIPPED, TURNED,
        )  # fmt: skip
    if GATED:
        difference = log_decay(m, n, sequence, q_gate_ptr, k_gate_ptr, T, S, BM, BN, EXACT, TURNED)
        s += difference if CAUSAL else tl.minimum(difference, 0.0)
    return hidden(
        s, m, n, b, padding_ptr, q_segment_ptr, k_segment_ptr, T, S, offset, window, edge,
        BM, BN, CAUSAL, WINDOWED, PADDED, SEGMENTS, TURNED,
    )  # fmt: skip


@triton.jit
def kept(seed_ptr, sequence, m, n, threshold, BM: tl.constexpr, BN: tl.constexpr):
    """Return dropout's mask of a tile (BM, BN); see ``flash.kept``. It depends on no tile size."""
    i = m * BM + tl.arange(0, BM)[:, None] + tl.zeros((1, BN // 8), tl.int32)
    group = n * (BN // 8) + tl.arange(0, BN // 8)[None, :] + tl.zeros((BM, 1), tl.int32)
    a, b, c, d = tl.philox(
        tl.load(seed_ptr), group, i, sequence.to(tl.int32) + 0 * group, 0 * group
    )
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BM, BN // 2))
    drawn = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BM, BN))
    return drawn.to(tl.int32) >= threshold


@triton.jit
def tile_gradient(
    product, dp, lse, delta, m, n, b, h, sequence,
    table_ptr, decay_ptr, score_decay_ptr, q_gate_ptr, k_gate_ptr, by_query_ptr, by_key_ptr,
    padding_ptr, q_segment_ptr, k_segment_ptr, seed_ptr,
    T, S, R, first_lag, far, C, C0, offset, window, threshold, scale, inverse, edge,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    PLAIN: tl.constexpr, TABLE: tl.constexpr, DECAY: tl.constexpr, SCORE_DECAY: tl.constexpr,
    GATED: tl.constexpr, BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr, CLIPPED: tl.constexpr,
    EXACT: tl.constexpr, PADDED: tl.constexpr, SEGMENTS: tl.constexpr, DROPS: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Return the weights of a tile, 0 where dropped, and the gradient of its scores.

    dp: grad . v of every pair. lse and delta have shapes that broadcast to the tile. The weights
    lack dropout's factor ``inverse``.
    """
    s = scored(
        product, m, n, b, h, sequence, table_ptr, decay_ptr, score_decay_ptr, q_gate_ptr,
        k_gate_ptr, by_query_ptr, by_key_ptr, padding_ptr, q_segment_ptr, k_segment_ptr,
        T, S, R, first_lag, far, C, C0, offset, window, scale, edge, BM, BN, CAUSAL, WINDOWED,
        PLAIN, TABLE, DECAY, SCORE_DECAY, GATED, BY_QUERY, BY_KEY, CLIPPED, EXACT, PADDED, SEGMENTS,
        TURNED,
    )  # fmt: skip
    p = tl.exp2(s * in_log2(scale, PLAIN) - lse)
    if DROPS:
        keep = kept(seed_ptr, sequence, m, n, threshold, BM, BN)
        if TURNED:
            keep = tl.trans(keep)
        ds = p * (tl.where(keep, dp * inverse, 0.0) - delta)
        p = tl.where(keep, p, 0.0)
    else:
        ds = p * (dp - delta)
    return p, ds


@triton.jit
def gate_gradient(
    ds, m, n, sequence, q_gate_ptr, k_gate_ptr, T, S, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, EXACT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Return the sums of a tile's rows over the pairs whose c_i - d_j is not clamped to 0."""
    if not CAUSAL:
        difference = log_decay(m, n, sequence, q_gate_ptr, k_gate_ptr, T, S, BM, BN, EXACT, TURNED)
        ds = tl.where(difference <= 0, ds, 0.0)
    return tl.sum(ds, 1)


@triton.jit
def decayed(
    x, score_decay_ptr, m, n, h, offset, BM: tl.constexpr, BN: tl.constexpr,
    SCORE_DECAY: tl.constexpr, CAUSAL: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Return scale q . k, or its gradient, after the decay of the scores.

    Factors of hidden pairs are at most 1, because 0 times infinity is no gradient.
    """
    if SCORE_DECAY:
        log = of_lags(m, n, tl.load(score_decay_ptr + h) * LOG2E, offset, BM, BN, TURNED)
        x *= tl.exp2(tl.minimum(log, 0.0) if CAUSAL else -tl.abs(log))
    return x


@triton.jit
def lag_range(d, T, S, offset, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the first and the last (exclusive) query tile m of the tiles (m, n) of diagonal d.

    They have m BM - n BN = d BN. Between both lies the first one with a hidden pair, as far as
    the lags and the last key hide any.
    """
    ratio: tl.constexpr = BM // BN
    first = tl.maximum(d + ratio - 1, 0) // ratio
    last = tl.minimum(tl.cdiv(T, BM), tl.maximum(tl.cdiv(S, BN) + d + ratio - 1, 0) // ratio)
    full = tl.minimum(last, tl.maximum(S // BN + d + ratio - 1, 0) // ratio)
    if CAUSAL:
        full = tl.where(d * BN + offset >= BN - 1, full, first)
    return first, tl.maximum(full, first), last


@triton.jit
def store_lags(
    base, x, d, sequence, count, least, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Write the sums over pairs of the same lag of x (BM, BN), of diagonal d, to (L, ., count).

    The lags start at d BN - BN. Every BN of them have a row, so that no two tiles write to a place.
    """
    r, j = tl.arange(0, BM), tl.arange(0, BN)[None, :]
    query = r[:, None] + j  # of row r and key j: one lag per row
    turned = tl.gather(x, query & (BM - 1), 0)
    base += sequence * (BM // BN + 1) * count + (d * BN - least)
    tl.store(base + (1 + r // BN) * count + r, tl.sum(tl.where(query < BM, turned, 0.0), 1))
    before = tl.sum(tl.where(query < BM, 0.0, turned), 1)
    tl.store(base + (r - BM), before, mask=r >= BM - BN)


@triton.jit
def query_term_gradients(
    ds, dgate, low, high, m, n, h, sequence, dquery_ptr, score_decay_ptr, q_gate_ptr, k_gate_ptr,
    T, S, C, C0, offset,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, SCORE_DECAY: tl.constexpr,
    GATED: tl.constexpr, BY_QUERY: tl.constexpr, CLIPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add what a tile contributes to the gradients of gates and of the biases of every query.

    Returns: the gradient of scale q . k, that of the queries' gates, and the sums of two columns.
    """
    low, high = own_gradient(
        dquery_ptr, low, high, ds, m * BM, T, m, n, sequence, C, offset - C0,
        BM, BN, BY_QUERY, CLIPPED, False,
    )  # fmt: skip
    if GATED and not CAUSAL:
        dgate += gate_gradient(
            ds, m, n, sequence, q_gate_ptr, k_gate_ptr, T, S, BM, BN, CAUSAL, EXACT, False
        )
    ds = decayed(ds, score_decay_ptr, m, n, h, offset, BM, BN, SCORE_DECAY, CAUSAL, False)
    return ds, dgate, low, high


@triton.jit
def key_term_gradients(
    ds, dgate, low, high, m, n, h, sequence, dkey_ptr, score_decay_ptr, q_gate_ptr, k_gate_ptr,
    T, S, C, C0, offset,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, SCORE_DECAY: tl.constexpr,
    GATED: tl.constexpr, BY_KEY: tl.constexpr, CLIPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add what a turned tile contributes to the gradients of gates and of the biases of every key.

    Returns: the gradient of scale q . k, that of the keys' gates, and the sums of two columns.
    """
    low, high = own_gradient(
        dkey_ptr, low, high, ds, n * BN, S, m, n, sequence, C, offset - C0,
        BM, BN, BY_KEY, CLIPPED, True,
    )  # fmt: skip
    if GATED:
        dgate -= gate_gradient(
            ds, m, n, sequence, q_gate_ptr, k_gate_ptr, T, S, BM, BN, CAUSAL, EXACT, True
        )
    ds = decayed(ds, score_decay_ptr, m, n, h, offset, BM, BN, SCORE_DECAY, CAUSAL, True)
    return ds, dgate, low, high


@triton.jit
def dot(a, b):
    """Return a b in float32; a product of float32 is that of three tf32 products."""
    return tl.dot(a, b, input_precision="tf32x3" if a.dtype == tl.float32 else "tf32")


@triton.jit
def segment_range(
    segment_ptr, padding_ptr, t, count, SEGMENTS: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Return the smallest and the largest segment in the rows of t (., .) that is no padding.

    The smallest is larger than the largest if there is none. All segments are 0 if not SEGMENTS.
    """
    real = t < count
    if PADDED:
        real = real & (tl.load(padding_ptr + t, mask=t < count, other=1) == 0)
    segment = tl.zeros_like(t)
    if SEGMENTS:
        segment = tl.load(segment_ptr + t, mask=t < count, other=0)
    low = tl.min(tl.where(real, segment, 2147483647), 1)
    return low, tl.max(tl.where(real, segment, -2147483648), 1)


@triton.jit
def own_columns(m, n, shift, BM: tl.constexpr, BN: tl.constexpr, TURNED: tl.constexpr):
    """Return the column of every pair of a tile, and the least and the largest of them."""
    i, j = pairs(m, n, BM, BN, TURNED)
    least = m * BM - n * BN - (BN - 1) + shift
    return i - j + shift, least, least + (BM + BN - 2)


@triton.jit
def with_own(
    s, base, t, start, count, m, n, sequence, C, shift,
    BM: tl.constexpr, BN: tl.constexpr, CLIPPED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Add biases by lag of the tokens t, which are the queries or the keys, to the scores.

    CLIPPED: pairs may lie outside the C columns. A tile of such pairs has one bias for each token.
    """
    column, least, largest = own_columns(m, n, shift, BM, BN, TURNED)
    base, row = base + (sequence * count + start) * C, (t - start) * C
    near = row + tl.minimum(tl.maximum(column, 0), C - 1)
    if not CLIPPED:
        s += tl.load(base + near, mask=t < count, other=0.0)
    elif (least >= C - 1) | (largest <= 0):
        row += tl.minimum(tl.maximum(least, 0), C - 1)
        s += tl.load(base + row, mask=t < count, other=0.0)
    else:
        s += tl.load(base + near, mask=t < count, other=0.0)
    return s


@triton.jit
def own_gradient(
    base, low, high, ds, start, count, m, n, sequence, C, shift,
    BM: tl.constexpr, BN: tl.constexpr, GIVEN: tl.constexpr, CLIPPED: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Write the gradients of biases by lag of the tokens of a tile's rows: one pair for each.

    CLIPPED: the first and the last column have many pairs; their sums are added to low and high.
    """
    if GIVEN:
        column, least, largest = own_columns(m, n, shift, BM, BN, TURNED)
        t = start + tl.arange(0, ds.shape[0])[:, None]
        to = base + (sequence * count + start) * C + ((t - start) * C + column)
        x = ds.to(base.dtype.element_ty)
        if not CLIPPED:
            tl.store(to, x, mask=(t < count) & (column >= 0) & (column < C))
        elif (least >= C - 1) | (largest <= 0):
            total, before = tl.sum(ds, 1), least < 0
            low += tl.where(before, total, 0.0)
            high += tl.where(before, 0.0, total)
        else:
            tl.store(to, x, mask=(t < count) & (column > 0) & (column < C - 1))
            low += tl.sum(tl.where(column <= 0, ds, 0.0), 1)
            high += tl.sum(tl.where(column >= C - 1, ds, 0.0), 1)
    return low, high


@triton.jit
def store_own_ends(
    base, low, high, start, count, sequence, C,
    SIZE: tl.constexpr, GIVEN: tl.constexpr, CLIPPED: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the first and the last column."""
    if GIVEN and CLIPPED:
        t = start + tl.arange(0, SIZE)
        rows = base + (sequence * count + start) * C + (t - start) * C
        tl.store(rows, low.to(base.dtype.element_ty), mask=t < count)
        tl.store(rows + C - 1, high.to(base.dtype.element_ty), mask=t < count)
