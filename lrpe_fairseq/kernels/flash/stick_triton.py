"""Stick-breaking attention (Tan et al., 2025) on CUDA, as Triton kernels.

The definition is ``stick.definition``. No T x S matrix is stored, equal inputs
give equal bits, and the time of a text is proportional to the keys that have a weight in float32.
The kernels, and the sums that they carry, are in ``stick_kernels``.

Axes: B batch, H heads, L = B H sequences, T query time, S key time, D key width, E value width,
M tiles of BM queries, N tiles of BN keys.
"""

from functools import partial

import torch
from torch import Tensor

from lrpe_fairseq.kernels import proof
from lrpe_fairseq.kernels.conditions import gradients_of
from lrpe_fairseq.kernels.flash import flash, flash_triton, stick, stick_kernels
from lrpe_fairseq.kernels.flash.flash_triton import MaskedCall, Options, Tile, gradient_of, rows_of
from lrpe_fairseq.kernels.flash.flash_triton import serves as serves
from lrpe_fairseq.kernels.results import result_like
from lrpe_fairseq.kernels.tiles_triton import cdiv

MEMORY = 2**28
"""Bytes for the carries of a backward pass, which takes the batch in parts. A sequence has
8 T S / BN bytes for every head."""


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
    seed: Tensor | None = None,
) -> Tensor:
    """Compute :func:`stick.definition`, with the same arguments.

    Returns: (B, H, T, E) in the dtype of q, k and v; it lies in memory
    as q does, heads inside. A query without a visible key before it gets zeros.
    Raises: ValueError for a window without a key; RuntimeError for second derivatives.
    """
    flash.check(q, k, True, window)
    if dropout and seed is None:
        seed = torch.randint(2**63 - 1, (1,), device=q.device)
    options = Options(True, scale, padding, segments, window, dropout, seed)
    return _Stick.apply(q, k, v, options)


class _Stick(torch.autograd.Function):
    """Stick-breaking attention with a hand-written gradient."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        call = _Call(*map(rows_of, (q, k, v)), options)
        out = call.output()
        ctx.save_for_backward(q, k, v)
        ctx.call, call.given, ctx.key = call, (), proof.current()
        return out

    @staticmethod
    def backward(ctx, grad):
        given = ctx.saved_tensors
        ctx.call.given = tuple(map(rows_of, given))
        definition = partial(defined, options=ctx.call.options)
        found = proof.backward(
            ctx.key,
            lambda: ctx.call.gradients(gradient_of(grad)),
            lambda: gradients_of(definition, given, ctx.needs_input_grad[:3], (grad,)),
        )
        ctx.call.given = ()
        if torch.is_grad_enabled():
            found = [flash.NoSecondDerivative.apply(x, grad, *given) for x in found]
        return *found, None


def defined(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """Compute ``stick.definition`` of the arguments of the autograd function."""
    names = "scale", "padding", "segments", "window", "dropout", "seed"
    return stick.definition(q, k, v, **{name: getattr(options, name) for name in names})


def tile_of(call: "_Call") -> Tile:
    """Return the tile of all kernels of a call: the largest with which they spill no registers.

    They share it, because sums are carried from tile to tile.
    """
    major, _ = flash_triton.capability_of(call.given[0].device)
    masks = (call.window, call.padding, call.segments[0])
    extra = call.threshold or any(mask is not None for mask in masks)
    if call.given[0].dtype == torch.float32:
        return Tile(32, 16, stages=1)
    wide = max(call.width, call.values) > 64
    if major in (9, 10) and call.queries > 64 and not (wide and extra):
        return Tile(128, 32, 8)
    if wide:
        return Tile(32, 32, 8)
    if extra:
        return Tile(32, 32, 8 if major == 12 else 4)
    return Tile(64, 32)


class _Call(MaskedCall):
    """One call of the kernels. A query sees the keys before its own: the offset is one less."""

    kernels = stick_kernels
    padding_type = torch.uint8  # its products are over 32 tokens or more; int16 spills registers

    def __init__(self, q, k, v, options: Options) -> None:
        super().__init__(q, k, v, options)
        self.offset -= 1
        self.window = None if self.window is None else self.window - 1

    def tile(self, name: str) -> Tile:
        """Return the tile of a kernel."""
        return tile_of(self)

    def output(self) -> Tensor:
        """Return o (B, H, T, E)."""
        q, k, v = self.given
        out = result_like(q, self.values)
        self.launch("output", (q, k, v, out), (q, k, v, out))
        return out

    def gradients(self, grad: Tensor) -> list[Tensor]:
        """Return the gradients of q, k and v."""
        q, k, v = self.given
        dq, dk = (result_like(x, self.width) for x in (q, k))
        dv = result_like(v, self.values)
        rows, columns, *_ = tile_of(self)
        shape = (self.heads, cdiv(self.keys, columns), self.queries)
        part = max(1, min(self.batch, MEMORY // (8 * shape[0] * shape[1] * shape[2])))
        # each of its own, so that both are aligned
        rest, past = (q.new_empty(part, *shape, dtype=torch.float32) for _ in range(2))
        tiles = cdiv(self.queries, rows)
        reach = q.new_empty(part, self.heads, tiles, 2, dtype=torch.int32)
        given, carries = (q, k, v, grad), (rest, past, reach)
        for start in range(0, self.batch, part):
            group = {"numbers": (start,), "batch": min(part, self.batch - start)}
            self.launch("rest", (q, k, rest, reach), (q, k), **group)
            self.launch("query_gradient", (*given, dq, *carries), (*given, dq), **group)
            self.launch("key_gradient", (*given, dk, dv, *carries), (*given, dk, dv), **group)
        return [dq, dk, dv]
