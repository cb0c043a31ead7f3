"""What is compiled into the Triton kernels of softmax and of stick-breaking attention, and a tiny
call with the same; see ``kernels.proof``.

The arguments are those of ``flash.definition`` and of ``stick_triton.stick_attention``.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lrpe_fairseq.kernels.flash import flash, flash_triton, stick_triton
from lrpe_fairseq.kernels.flash.flash_triton import Options
from lrpe_fairseq.kernels.proof import Example, Key, Numbers, Tensors, alignment
from lrpe_fairseq.kernels.proof import key_of as proof_key

FLASH, STICK = "softmax attention", "stick-breaking attention"
BATCH, HEADS = 2, 2
"""Sizes of an example: a kernel that takes another head or another text is wrong in it."""
LENGTHS = (64, 60), (127, 127), (None, 150)
"""Numbers of queries from which tiles are alike, and those of an example. Tiles have up to 128."""
CACHE = 40
"""Largest difference of the numbers of queries and keys in an example."""
FAR = 20
"""From which lag on a table of an example is constant, if that of its call is from any lag on."""
TERMS = ("table", "decay", "score_decay", "by_query", "by_key")


def key_of(
    family: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    gates: flash.Pair | None = None,
    padding: Tensor | None = None,
    segments: flash.Pair | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    **terms: Any,
) -> Key:
    """Return the family, the device and the constants of a call of either kernel."""
    given = [terms.get(name) for name in TERMS]
    given.append(None if gates is None else gates[0])
    constants = (
        q.dtype,
        q.shape[3],
        v.shape[3],
        causal,
        _length_like(q.shape[2]),
        min(alignment(x) for x in (q, k, v)),
        q.requires_grad or k.requires_grad or v.requires_grad,
        *(None if x is None else (x.dtype, x.requires_grad) for x in given),
        padding is not None,
        segments is not None,
        window is not None,
        flash.dropout_of(dropout)[0] > 0,
        _is_clipped(q, k, causal, window, **terms),
        terms.get("far") is not None,
    )
    return proof_key(family, q.device, constants, (q, k, v))


def _length_like(count: int) -> int:
    """Return the number of queries of an example for a call with ``count``."""
    return next(length for most, length in LENGTHS if most is None or count <= most)


def _is_clipped(q: Tensor, k: Tensor, causal: bool, window: int | None, **terms: Any) -> bool:
    """True if visible pairs have other lags than the biases of every token."""
    own = next(
        (terms[name] for name in ("by_query", "by_key") if terms.get(name) is not None), None
    )
    if own is None:
        return False
    least, most = _lags(q.shape[2], k.shape[2], causal, window)
    first = terms.get("first_lag", 0)
    return not first <= least <= most < first + max(2, own.shape[3])


def _lags(queries: int, keys: int, causal: bool, window: int | None) -> tuple[int, int]:
    """Return the first and the last lag that a query sees."""
    first = 0 if causal else 1 - keys
    last = keys - 1 if causal else queries - 1
    if window is not None:
        last = min(last, window - 1)
    return first, last


def example_of(
    family: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    gates: flash.Pair | None = None,
    padding: Tensor | None = None,
    segments: flash.Pair | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    **terms: Any,
) -> Example:
    """Return a tiny call with the constants of a call of either kernel."""
    queries, keys = _length_like(q.shape[2]), _length_like(k.shape[2])
    if causal:
        keys = max(1, queries + min(CACHE, max(-CACHE, k.shape[2] - q.shape[2])))
    numbers = Numbers(q.device)
    learn = q.requires_grad or k.requires_grad or v.requires_grad
    sizes = ((q, queries), (k, keys), (v, keys))
    rows = [numbers.rows(x, BATCH, HEADS, time).detach().requires_grad_(learn) for x, time in sizes]
    inputs: Tensors = dict(zip("qkv", rows, strict=True))
    short = None if window is None else min(window, 100)
    options = Options(
        causal,
        q.shape[3] ** -0.5,
        None if padding is None else _padding(BATCH, keys, q.device),
        None if segments is None else _segments(BATCH, queries, keys, q.device),
        short,
        dropout,
        torch.tensor([7], device=q.device) if dropout else None,
    )
    if family == STICK:
        definition = partial(_stick_definition, options=_on_cpu(options))
        return Example(stick_triton._Stick, inputs, (options,), definition)
    clipped = _is_clipped(q, k, causal, window, **terms)
    lags = _lags(queries, keys, causal, short)
    inputs |= _terms(numbers, gates, terms, (BATCH, queries, keys), lags, clipped)
    first = lags[0]
    if clipped and inputs["table"] is None:
        first += 1
    decays = [_decay(terms.get(name), numbers) for name in ("decay", "score_decay")]
    far = None if terms.get("far") is None else FAR
    options = options._replace(first_lag=first, decays=tuple(decays), far=far)
    definition = partial(_flash_definition, options=_on_cpu(options))
    return Example(flash_triton._Flash, inputs, (options,), definition)


def _terms(
    numbers: Numbers,
    gates: flash.Pair | None,
    terms: dict[str, Any],
    sizes: tuple[int, int, int],
    lags: tuple[int, int],
    clipped: bool,
) -> Tensors:
    """Return the table, gates, and biases of tokens that a call has, with names in their order."""
    found: Tensors = dict.fromkeys(("table", "c", "d", "by_query", "by_key"))
    (batch, queries, keys), (least, most) = sizes, lags
    table = terms.get("table")
    if table is not None:
        lag = torch.arange(least, most + 1)
        if terms.get("far") is not None:
            lag = lag.clamp(-FAR, FAR)
        values = numbers.normal(HEADS, 2 * max(-least, most, FAR) + 1)
        found["table"] = _like(table, values[:, lag - lag.min()])
    if gates is not None:
        time = max(queries, keys)
        sums = (-numbers.uniform(batch, HEADS, time, dtype=torch.float64) / 5).cumsum(2)
        found["c"] = _like(gates[0], sums[..., time - queries :].clone())
        found["d"] = _like(gates[1], sums[..., time - keys :].clone())
    for name, time in (("by_query", queries), ("by_key", keys)):
        x = terms.get(name)
        if x is not None:
            # without the first lag they are clipped
            lags = max(2, min(max(2, x.shape[3]), 8) if clipped else most - least + 1)
            found[name] = _like(x, numbers.normal(batch, HEADS, time, lags))
    return found


def _like(x: Tensor, values: Tensor) -> Tensor:
    return values.detach().to(x.dtype).requires_grad_(x.requires_grad)


def _decay(x: Tensor | None, numbers: Numbers) -> Tensor | None:
    return None if x is None else -numbers.uniform(HEADS) / 8


def _padding(batch: int, keys: int, device: torch.device) -> Tensor:
    """Return padding (B, S) at the start of the first text and at the end of the last one."""
    hidden = torch.zeros(batch, keys, dtype=torch.bool, device=device)
    hidden[0, : keys // 8] = hidden[-1, keys - keys // 4 :] = True
    return hidden


def _segments(batch: int, queries: int, keys: int, device: torch.device) -> flash.Pair:
    """Return the numbers of documents of 40 tokens."""
    time = max(queries, keys)
    number = (torch.arange(time, device=device) // 40).int().expand(batch, -1)
    return number[:, time - queries :], number[:, time - keys :]


def _on_cpu(options: Options) -> Options:
    """Return options for the definition."""
    found = {
        name: None if x is None else x.cpu()
        for name, x in (("padding", options.padding), ("seed", options.seed))
    }
    segments = options.segments
    return options._replace(
        segments=None if segments is None else tuple(x.cpu() for x in segments),
        decays=tuple(x if x is None else x.cpu().double() for x in options.decays),
        **found,
    )


def _flash_definition(inputs: Tensors, options: Options) -> tuple[Tensor]:
    return (flash_triton.defined(*inputs.values(), options),)


def _stick_definition(inputs: Tensors, options: Options) -> tuple[Tensor]:
    return (stick_triton.defined(*inputs.values(), options),)
