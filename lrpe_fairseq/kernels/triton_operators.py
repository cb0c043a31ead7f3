"""Operators of compiled graphs that call the Triton kernels of linear and softmax attention.

Each calls a function of eager execution (``triton_calls``), so its kernels are proved at first use,
and the definition serves where a proof or a launch fails, or where a graph runs on a machine
without them. Trap: that of softmax attention then has all T x S scores in memory.

Features of queries and keys need no operator here, because compilers fuse them with what surrounds
them.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lrpe_fairseq.kernels import loader, triton_calls
from lrpe_fairseq.kernels.conditions import called_in_tracing
from lrpe_fairseq.kernels.flash import flash, stick
from lrpe_fairseq.kernels.linear import causal
from lrpe_fairseq.kernels.recomputed import RecomputedOperator
from lrpe_fairseq.kernels.results import narrow, result_like, result_type
from lrpe_fairseq.kernels.triton_calls import CAUSAL, FLASH

# --- conditions, which a compiler takes for constants --------------------------------------------


@called_in_tracing
def has_triton(module: str) -> bool:
    """True if this process has these Triton kernels."""
    return loader.has_triton_kernels(module)


@called_in_tracing
def _runs_on(kind: str, number: int | None) -> bool:
    """True if the kernels run on a device, by ``type`` and ``index`` of torch.device."""
    return loader.runs_on(torch.device(kind, number))


@called_in_tracing
def _largest_state(kind: str, number: int | None) -> int:
    """Return how many numbers ``tiles_triton.fits_registers`` allows on a device."""
    tiles = importlib.import_module("lrpe_fairseq.kernels.tiles_triton")
    return tiles.largest_state(torch.empty(0, device=torch.device(kind, number)))


def has_flash(x: Tensor) -> bool:
    """True if a graph has the kernel of softmax attention on the device of x."""
    return has_triton(FLASH) and _runs_on(x.device.type, x.device.index)


def serves_linear(q: Tensor, v: Tensor, both_ways: bool) -> bool:
    """True if a graph calls kernels for linear attention of q (B, H, T, D) and v (B, H, S, E).

    Whether they serve the tensors of a call is decided when it runs.

    both_ways: True without a causal mask and without a decay.
    """
    if not (has_triton(CAUSAL) and _serves(v)):
        return False
    if not both_ways:
        return True
    largest = _largest_state(v.device.type, v.device.index)
    return v.dtype != torch.float32 and _block(q) * _block(v) <= largest


def _block(x: Tensor) -> int:
    """Return the columns of a block of x (B, H, T, .), as ``tiles_triton.power_of_two``.

    By comparisons, which a compiler allows of a symbolic width.
    """
    columns = 16
    while columns < x.shape[3]:
        columns *= 2
    return columns


def serves_softmax(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """As :func:`serves_linear`, for softmax attention of q (B, H, T, D), k and v (B, H, S, E)."""
    alike = q.dtype == k.dtype == v.dtype
    return has_triton(FLASH) and _serves(v) and alike and flash.fits(q, v)


def _serves(x: Tensor) -> bool:
    half = x.dtype in (torch.float16, torch.bfloat16)
    return (half or x.dtype == torch.float32) and _runs_on(x.device.type, x.device.index)


# --- linear attention ----------------------------------------------------------------------------


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute ``causal.definition`` of q, k and v of one dtype."""
    out, *denominators = _causal_sums(q, k, v, wanted, log_decay, eps)
    return out, (denominators[0] if denominators else None)


def _call_causal_sums(q, k, v, wanted, log_decay, eps):
    triton = loader.triton_kernels(CAUSAL)
    serves = triton is not None and triton.serves(q, v, log_decay)
    compute = triton_calls.causal_sums if serves else triton_calls.causal_sums_without
    return _rounded(v, wanted, *compute(q, k, v, wanted, log_decay, eps))


def _rounded(v: Tensor, wanted: str, out: Tensor, denominators: Tensor | None) -> Sequence[Tensor]:
    """Return the results in the dtypes of the kernels; definitions compute float32."""
    dtype = result_type(v, wanted)
    return causal.present(out if out.dtype == dtype else narrow(out, dtype), denominators)


def _fake_sums(q, k, v, wanted, *_: Any):
    out = result_like(q, v.shape[3], result_type(v, wanted))
    denominators = q.new_empty(q.shape[:3], dtype=torch.float32)
    return [out, denominators] if wanted == "sums" else [out]


_causal_sums = RecomputedOperator(
    "causal_sums_on_gpu",
    "Tensor q, Tensor k, Tensor v, str wanted, Tensor? log_decay, float eps",
    _call_causal_sums,
    _fake_sums,
)


def full_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute ``causal.full_definition`` of q, k and v of one dtype."""
    out, *denominators = _full_sums(q, k, v, wanted, eps)
    return out, (denominators[0] if denominators else None)


def _call_full_sums(q, k, v, wanted, eps):
    triton = loader.triton_kernels(CAUSAL)
    serves = triton is not None and triton.serves(q, v) and triton.fits_registers(q, v)
    compute = triton_calls.full_sums if serves else triton_calls.full_sums_without
    return _rounded(v, wanted, *compute(q, k, v, wanted, eps))


_full_sums = RecomputedOperator(
    "full_sums_on_gpu",
    "Tensor q, Tensor k, Tensor v, str wanted, float eps",
    _call_full_sums,
    _fake_sums,
)


# --- softmax attention ---------------------------------------------------------------------------


def flash_attention(
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
    gates: flash.Pair | None = None,
    by_query: Tensor | None = None,
    by_key: Tensor | None = None,
    padding: Tensor | None = None,
    segments: flash.Pair | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute ``flash.definition``; the graph draws dropout's seed."""
    terms = table, decay, score_decay, *(gates or (None, None)), by_query, by_key
    masks = padding, *(segments or (None, None)), _seed(q, dropout)
    return _flash(q, k, v, *terms, *masks, causal, scale, first_lag, far, window, dropout)[0]


def _seed(q: Tensor, dropout: float) -> Tensor | None:
    """Return the seed of a call with dropout: its gradient must drop the same weights."""
    return torch.randint(2**63 - 1, (1,), device=q.device) if dropout else None


def _pair(first: Tensor | None, second: Tensor | None) -> flash.Pair | None:
    return None if first is None else (first, second)


def _call_flash(q, k, v, *given: Any):
    table, decay, score_decay, c, d, by_query, by_key, *rest = given
    padding, of_queries, of_keys, seed, causal, scale, first_lag, far, window, dropout = rest
    arguments = {
        "causal": causal,
        "scale": scale,
        "table": table,
        "first_lag": first_lag,
        "far": far,
        "decay": decay,
        "score_decay": score_decay,
        "gates": _pair(c, d),
        "by_query": by_query,
        "by_key": by_key,
        "padding": padding,
        "segments": _pair(of_queries, of_keys),
        "window": window,
        "dropout": dropout,
        "seed": seed,
    }
    return _attended(triton_calls.flash_attention, flash.definition, (q, k, v), arguments)


def _attended(
    kernels: Callable[..., Tensor | None],
    definition: Callable[..., Tensor],
    rows: tuple[Tensor, ...],
    arguments: dict[str, Any],
) -> tuple[Tensor]:
    """Return the result of ``kernels``, or of ``definition`` where they do not serve."""
    out = kernels(*rows, **arguments)
    if out is None:
        loader.log_served("softmax attention in a graph", "definition", rows[0].device.type)
        out = definition(*rows, **arguments)
    return (out,)


def _fake_attention(q, k, v, *_: Any):
    return [result_like(q, v.shape[3])]


_flash = RecomputedOperator(
    "flash_attention",
    "Tensor q, Tensor k, Tensor v, Tensor? table, Tensor? decay, Tensor? score_decay, Tensor? c, "
    "Tensor? d, Tensor? by_query, Tensor? by_key, Tensor? padding, Tensor? of_queries, "
    "Tensor? of_keys, Tensor? seed, bool causal, float scale, SymInt first_lag, int? far, "
    "SymInt? window, float dropout",
    _call_flash,
    _fake_attention,
)


def stick_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    padding: Tensor | None = None,
    segments: flash.Pair | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute ``stick.definition``; the graph draws dropout's seed."""
    masks = padding, *(segments or (None, None)), _seed(q, dropout)
    return _stick(q, k, v, *masks, scale, window, dropout)[0]


def _call_stick(q, k, v, padding, of_queries, of_keys, seed, scale, window, dropout):
    arguments = {
        "scale": scale,
        "padding": padding,
        "segments": _pair(of_queries, of_keys),
        "window": window,
        "dropout": dropout,
        "seed": seed,
    }
    return _attended(triton_calls.stick_attention, stick.definition, (q, k, v), arguments)


_stick = RecomputedOperator(
    "stick_attention",
    "Tensor q, Tensor k, Tensor v, Tensor? padding, Tensor? of_queries, Tensor? of_keys, "
    "Tensor? seed, float scale, SymInt? window, float dropout",
    _call_stick,
    _fake_attention,
)
