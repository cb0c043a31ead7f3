"""Softmax attention whose scores depend on the lag, on gates, and on masks of tokens.

    score_ij  = scale exp(r |n|) q_i . k_j + a |n| + b[n] + x_i[n] + y_j[n] + min(c_i - d_j, 0)
    weight_ij = softmax over the visible keys j, then dropout;      o_i = sum_j weight_ij v_j

n = (slot of i) - j is the lag. a (``decay``) and r (``score_decay``) are numbers for every head, b
(``table``) are values by lag for every head, x (``by_query``) and y (``by_key``) also for every
token; c and d (``gates``) are sums of log gates. The slot of query i is i, or S - T + i in causal
attention, where the queries are the last T of S keys. :func:`definition` computes this with all
scores in memory. The kernel is ``flash_triton.flash_attention``, with the same arguments.

Axes: B batch, H heads, T query time, S key time, D key width, E value width, R lags of a table,
C lags of x and y.
"""

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""A tensor of the queries and one of the keys."""

WIDEST_KEY, WIDEST_VALUE = {True: 128, False: 256}, 128
"""Widths of keys and values that the kernels support. True: in float32."""

STEPS = 2**16
"""Dropout's probability is a multiple of 1 / STEPS."""


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    table: Tensor | None = None,
    first_lag: int = 0,
    far: int | None = None,
    decay: Tensor | None = None,
    score_decay: Tensor | None = None,
    gates: Pair | None = None,
    by_query: Tensor | None = None,
    by_key: Tensor | None = None,
    padding: Tensor | None = None,
    segments: Pair | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """Compute the attention of this module in differentiable operations.

    Args:
        q, k, v: (B, H, T, D), (B, H, S, D), (B, H, S, E).
        causal: True if a query sees no later key. scale: positive.
        table: biases by lag, (H, R); the column of lag n is n - first_lag. None for 0.
        far: the table is constant from this lag on (>= 1), and up to -far. None: not known.
        decay, score_decay: log decays per token of weights and of q . k, (H,), at most 0; or None.
        gates: sums c (B, H, T) of the queries and d (B, H, S) of the keys, float64. In causal
            attention c_i <= d_j for every visible key.
        by_query, by_key: biases by lag of every token, (B, H, T, C) and (B, H, S, C); the column of
            lag n is the one of n - first_lag, or the nearest one.
        padding: (B, S) bool, true at keys that no query sees.
        segments: int32 numbers of documents, (B, T) and (B, S). Only equal numbers see each other.
        window: a query sees the last ``window`` keys, its own one included. Causal only.
        dropout: of the weights; rounded to a multiple of 1 / STEPS.
        seed: int64 with one element, which determines the dropped weights; see :func:`kept`.
    Returns: (B, H, T, E). A query without a visible key gets zeros.
    """
    check(q, k, causal, window, table, first_lag, decay, score_decay)
    check_own(q, k, by_query, by_key)
    lag = lags(q, k, causal)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _decayed(q.to(wide) @ k.to(wide).mT * scale, lag.abs(), decay, score_decay, gates)
    scores = _with_lags(scores, lag - first_lag, table, by_query, by_key)
    hidden = ~visible(lag, causal, padding, segments, window)
    blind = hidden.all(-1, keepdim=True)
    weights = scores.masked_fill(hidden & ~blind, -torch.inf).softmax(-1).masked_fill(blind, 0.0)
    return dropped(weights, dropout, seed).to(v.dtype) @ v


def _decayed(
    scores: Tensor,
    distance: Tensor,
    decay: Tensor | None,
    score_decay: Tensor | None,
    gates: Pair | None,
) -> Tensor:
    """Return scores (B, H, T, S) with the decays (H,), by distance (T, S), and the gates."""
    if score_decay is not None:
        scores = scores * torch.exp(score_decay[:, None, None] * distance)
    if decay is not None:
        scores = scores + decay[:, None, None] * distance
    if gates is None:
        return scores
    difference = gates[0].unsqueeze(-1) - gates[1].unsqueeze(-2)
    return scores + difference.clamp_max(0.0).to(scores.dtype)


def _with_lags(
    scores: Tensor,
    columns: Tensor,
    table: Tensor | None,
    by_query: Tensor | None,
    by_key: Tensor | None,
) -> Tensor:
    """Return scores (B, H, T, S) with the values by lag, by column (T, S)."""
    if table is not None:
        scores = scores + of_lags(table, columns)
    if by_query is not None:
        scores = scores + of_own_lags(by_query, columns)
    if by_key is not None:
        scores = scores + of_own_lags(by_key, columns.mT).mT
    return scores


def lags(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return the lag of every pair, (T, S): the slot of the query minus that of the key."""
    rows, columns = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    return rows.unsqueeze(-1) + offset_of(q, k, causal) - columns


def offset_of(q: Tensor, k: Tensor, causal: bool) -> int:
    """Return the slot of the first query: S - T in causal attention, else 0."""
    return k.shape[2] - q.shape[2] if causal else 0


def of_lags(values: Tensor, columns: Tensor) -> Tensor:
    """Select values (H, R) by column, (T, S) -> (H, T, S). Those of hidden pairs are arbitrary."""
    return values[:, columns.clamp(0, values.shape[1] - 1)]


def of_own_lags(values: Tensor, columns: Tensor) -> Tensor:
    """Select values (B, H, T, C) by column (T, S), or the nearest one: (B, H, T, S)."""
    columns = columns.clamp(0, values.shape[3] - 1)
    return values.gather(-1, columns.expand(*values.shape[:2], -1, -1))


def visible(
    lag: Tensor, causal: bool, padding: Tensor | None, segments: Pair | None, window: int | None
) -> Tensor:
    """Return a bool mask broadcastable to (B, H, T, S), true if the query sees the key."""
    seen = lag >= 0 if causal else torch.ones_like(lag, dtype=torch.bool)
    if window is not None:
        seen = seen & (lag < window)
    if padding is not None:
        seen = seen & ~padding[:, None, None, :]
    if segments is not None:
        seen = seen & (segments[0][:, None, :, None] == segments[1][:, None, None, :])
    return seen


def dropout_of(dropout: float) -> tuple[int, float]:
    """Return the number of STEPS at which a weight is dropped, and the factor of the others."""
    threshold = round(dropout * STEPS)
    return threshold, (STEPS / (STEPS - threshold) if threshold < STEPS else 0.0)


def dropped(weights: Tensor, dropout: float, seed: Tensor | None) -> Tensor:
    """Return the weights (B, H, T, S) after dropout."""
    threshold, inverse = dropout_of(dropout)
    return weights * kept(seed, weights.shape, threshold) * inverse if threshold else weights


def kept(seed: Tensor, shape: torch.Size, threshold: int) -> Tensor:
    """Return dropout's mask of the weights (B, H, T, S), true where a weight is kept.

    Philox (Salmon et al., 2011) with key ``seed`` and counter (j // 8, i, b H + h, 0) gives 128
    bits for 8 neighbouring keys. A weight is dropped if its 16 bits are below ``threshold``.
    """
    batch, heads, rows, columns = shape
    groups = torch.arange(-(-columns // 8), device=seed.device)
    row = torch.arange(rows, device=seed.device).unsqueeze(-1)
    sequence = torch.arange(batch * heads, device=seed.device)[:, None, None]
    counter = torch.broadcast_tensors(groups, row, sequence, groups * 0)
    words = torch.stack(_philox(seed, counter), -1)
    drawn = torch.stack([words & 0xFFFF, words >> 16], -1).flatten(-3)
    return drawn[..., :columns].unflatten(0, (batch, heads)) >= threshold


def _philox(seed: Tensor, counter: tuple[Tensor, ...]) -> list[Tensor]:
    """Compute Philox 4x32 with ten rounds: four words of 32 bits as int64."""
    word = 2**32 - 1
    key = [seed & word, (seed >> 32) & word]
    c = list(counter)
    for _ in range(10):
        a = c[0] * 0xD2511F53  # modulo 2^64
        b = c[2] * 0xCD9E8D57
        high_a, low_a = (a >> 32) & word, a & word
        high_b, low_b = (b >> 32) & word, b & word
        c = [high_b ^ c[1] ^ key[0], low_b, high_a ^ c[3] ^ key[1], low_a]
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return c


def fits(q: Tensor, v: Tensor) -> bool:
    """True if the kernels support the widths of q (B, H, T, D) and v (B, H, S, E)."""
    return q.shape[3] <= WIDEST_KEY[q.dtype == torch.float32] and v.shape[3] <= WIDEST_VALUE


def check(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: int | None,
    table: Tensor | None = None,
    first_lag: int = 0,
    *decays: Tensor | None,
) -> None:
    """Raise ValueError for a window that is not causal, and for a table or decays of other heads
    or lags."""
    if window is not None and (not causal or window < 1):
        raise ValueError(f"a window needs causal attention and at least one key, got {window}")
    last = q.shape[2] - 1 + offset_of(q, k, causal)
    first = 0 if causal else 1 - k.shape[2]
    last = last if window is None else min(last, window - 1)
    heads = q.shape[1]
    if any(x is not None and x.shape != (heads,) for x in decays):
        raise ValueError(f"decays must be ({heads},), one number for every head")
    if table is None:
        return
    if table.dim() != 2 or len(table) != heads:
        raise ValueError(f"a table by lag must be ({heads}, lags), not {tuple(table.shape)}")
    if not first_lag <= first <= last < first_lag + table.shape[1]:
        raise ValueError(
            f"a table by lag has lags {first_lag} to {first_lag + table.shape[1] - 1}, but "
            f"attention needs {first} to {last}"
        )


def check_own(q: Tensor, k: Tensor, by_query: Tensor | None, by_key: Tensor | None) -> None:
    """Raise ValueError unless biases of every token have its shape, and equally many lags."""
    given = [(x, of) for x, of in ((by_query, q), (by_key, k)) if x is not None]
    if any(x.shape != (*of.shape[:3], given[0][0].shape[3]) for x, of in given):
        raise ValueError(
            f"biases by lag of every token must be (B, H, T, C) and (B, H, S, C) for "
            f"queries {tuple(q.shape)} and keys {tuple(k.shape)}, got "
            f"{', '.join(str(tuple(x.shape)) for x, _ in given)}"
        )


class NoSecondDerivative(torch.autograd.Function):
    """The identity map of its first argument, whose derivative raises an error.

    The other arguments are what the first one was computed from.
    """

    @staticmethod
    def forward(ctx, x: Tensor, *sources: Tensor) -> Tensor:  # noqa: D102
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        raise RuntimeError(
            "torch's fused softmax attention has no second derivative: run the forward pass under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )
