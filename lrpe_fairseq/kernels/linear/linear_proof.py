"""What is compiled into the Triton kernels of linear attention, and a tiny call with the same; see
``kernels.proof``.

The arguments are those of ``causal.definition``, and of ``causal.full_definition``, for whose calls
there is no decay.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from lrpe_fairseq.kernels.linear import causal, causal_triton, full_triton, sweep_triton
from lrpe_fairseq.kernels.proof import Example, Key, Numbers, Tensors, alignment, key_of
from lrpe_fairseq.kernels.tiles_triton import (
    PROGRAMS,
    cdiv,
    chosen_tile,
    fits_registers,
    power_of_two,
)

CAUSAL, FULL = "causal linear attention", "linear attention over all keys"
HEADS, TIME = 2, 130
"""Sizes of an example of long texts: three blocks of tokens, the last one short."""
LONG = 128
"""Longer texts are alike. Shorter ones have smaller tiles, or one block."""


def causal_key_of(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> Key:
    """Return the family, the device and the constants of ``causal_triton.causal_sums``."""
    decay = None
    if log_decay is not None:
        decay = log_decay.dim(), log_decay.dtype, log_decay.requires_grad
    batch, heads, time = q.shape[:3]
    if fits_registers(q, v):
        parts: Any = _in_parts(batch * heads, time, log_decay), chosen_tile()
        read = q, k, v, log_decay
    else:
        parts = _blocks_of(_chunked_shape(q, v, log_decay))
        # the others are copied
        given = (x for x in (q, k, v, log_decay) if x is not None)
        read = tuple(x if x.is_contiguous() else None for x in given)
    return key_of(CAUSAL, q.device, (*_constants(q, k, v, wanted), decay, parts), read)


def full_key_of(q: Tensor, k: Tensor, v: Tensor, wanted: str, eps: float) -> Key:
    """Return the family, the device and the constants of ``full_triton.full_sums``."""
    return key_of(FULL, q.device, _constants(q, k, v, wanted), (q, k, v))


def _constants(q: Tensor, k: Tensor, v: Tensor, wanted: str) -> tuple[Any, ...]:
    return (
        v.dtype,
        q.shape[3],
        v.shape[3],
        wanted,
        min(LONG, power_of_two(q.shape[2])),
        *(alignment(x) == 16 for x in (q, k, v)),
        q.requires_grad or k.requires_grad or v.requires_grad,
    )


def _in_parts(sequences: int, time: int, log_decay: Tensor | None) -> bool:
    """True if a sequence is divided, so that its parts start from a state in memory."""
    blocks = cdiv(time, sweep_triton.SPAN)
    span = cdiv(blocks, max(1, PROGRAMS // sequences)) * sweep_triton.SPAN
    if log_decay is not None and log_decay.requires_grad:
        span = min(span, sweep_triton.GATED)
    return time > span


def _chunked_shape(q: Tensor, v: Tensor, log_decay: Tensor | None) -> causal_triton._Shape:
    """Return the sizes of ``causal_triton.chunked_sums``, which expands a learned decay."""
    if log_decay is not None and log_decay.dim() == 1 and log_decay.requires_grad:
        log_decay = log_decay[None, :, None].expand(q.shape[:3])
    return causal_triton._shape_of(q, v, log_decay)


def _blocks_of(shape: causal_triton._Shape) -> tuple[int, int]:
    """Return the sides of the blocks of the scan."""
    scan = causal_triton._for_scan(shape)
    return scan.key_block, scan.value_block


def causal_example_of(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> Example:
    """Return a tiny call with the constants of ``causal_triton.causal_sums``."""
    in_registers = fits_registers(q, v)
    batch = _batch_of(q, v, log_decay)
    inputs = _rows(q, k, v, batch, _time_of(q))
    if not in_registers:
        inputs = {name: _contiguous(x) for name, x in inputs.items()}
    expands = in_registers or (log_decay is not None and log_decay.requires_grad)
    inputs["log_decay"] = _decay(log_decay, (batch, HEADS, _time_of(q)), expands)
    function = sweep_triton._Sweep if in_registers else causal_triton._Sums
    definition = partial(_definition, causal.definition, wanted=wanted, eps=eps)
    return Example(function, inputs, (wanted, eps), definition)


def _contiguous(x: Tensor) -> Tensor:
    return x.detach().contiguous().requires_grad_(x.requires_grad)


def _decay(like: Tensor | None, shape: tuple[int, int, int], expands: bool) -> Tensor | None:
    """Return a decay like ``like``, constant or per token; constant ones per token if expanded."""
    if like is None:
        return None
    numbers = Numbers(like.device)
    if like.dim() == 1:
        decay = -numbers.uniform(shape[1])
        decay = decay[None, :, None].expand(shape) if expands else decay
    else:
        decay = -numbers.uniform(*shape)
    return decay.to(like.dtype).requires_grad_(like.requires_grad)


def _time_of(q: Tensor) -> int:
    """Return the length of an example."""
    size = power_of_two(q.shape[2])
    return size - 3 if size < LONG else TIME


def _batch_of(q: Tensor, v: Tensor, log_decay: Tensor | None) -> int:
    """Return the texts of an example: so many that its constants are the same."""
    batch, heads, time = q.shape[:3]
    if fits_registers(q, v):
        whole = power_of_two(time) >= LONG and not _in_parts(batch * heads, time, log_decay)
        return cdiv(PROGRAMS // 2 + 1, HEADS) if whole else 1
    shape = _chunked_shape(q, v, log_decay)

    def same(texts: int) -> bool:
        return _blocks_of(shape._replace(sequences=texts * HEADS)) == _blocks_of(shape)

    return next((n for n in range(1, 1 + batch * heads) if same(n)), 1)


def full_example_of(q: Tensor, k: Tensor, v: Tensor, wanted: str, eps: float) -> Example:
    """Return a tiny call with the constants of ``full_triton.full_sums``."""
    inputs = _rows(q, k, v, 1, _time_of(q))
    definition = partial(_definition, causal.full_definition, wanted=wanted, eps=eps)
    return Example(full_triton._Full, inputs, (wanted, eps), definition)


def _rows(q: Tensor, k: Tensor, v: Tensor, batch: int, time: int) -> Tensors:
    """Return positive features of q and k, whose denominators are far from 0, and values."""
    numbers = Numbers(q.device)
    features = [numbers.rows(x, batch, HEADS, time, positive=True) for x in (q, k)]
    rows = dict(zip("qkv", (*features, numbers.rows(v, batch, HEADS, time)), strict=True))
    learn = any(x.requires_grad for x in (q, k, v))
    return {name: x.detach().to(v.dtype).requires_grad_(learn) for name, x in rows.items()}


def _definition(
    sums: Callable[..., tuple[Tensor, Tensor | None]], inputs: Tensors, wanted: str, eps: float
) -> tuple[Tensor, ...]:
    q, k, v, *decay = inputs.values()
    return causal.present(*sums(q, k, v, wanted, *decay, eps))
