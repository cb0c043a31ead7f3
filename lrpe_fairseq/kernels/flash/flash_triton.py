"""Softmax attention with biases by lag, gates and masks on CUDA, as Triton kernels.

The definition is ``flash.definition``. No T x S matrix is stored, tiles without a visible pair are
skipped, and equal inputs give equal bits. The kernels are in ``flash_kernels``.

Axes: B batch, H heads, L = B H sequences, T query time, S key time, D key width, E value width,
R lags of a table, C lags of biases of every token.
"""

from functools import cached_property, lru_cache, partial
from math import gcd
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.kernels import proof
from lrpe_fairseq.kernels.conditions import gradients_of, is_plain
from lrpe_fairseq.kernels.flash import flash, flash_kernels, flash_tiles
from lrpe_fairseq.kernels.loader import launch, on_device
from lrpe_fairseq.kernels.results import aligned, gradient_rows, result_like, with_near_heads
from lrpe_fairseq.kernels.tiles_triton import cdiv, power_of_two, straight

MARGIN = flash_tiles.MARGIN.value


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a program, and stages of its loop's pipeline."""

    queries: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 2


def serves(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> bool:
    """True if the kernels support q, k, v of one dtype, and ``others``: all other tensors.

    They are on one Ampere or newer GPU, or on a CPU in Triton's interpreter; q, k and v are not
    float64; keys have at most 256 features, in float32 128, and values 128. Never under
    ``sdpa_kernel(MATH)``, as the kernels have no second derivatives, nor with a Triton without
    ``gather``. ``loader.triton_kernels`` refuses all that do not compile them.
    """
    given = (q, k, v, *(x for x in others if x is not None))
    sdp = torch.backends.cuda
    return (
        hasattr(tl, "gather")
        and (sdp.flash_sdp_enabled() or sdp.mem_efficient_sdp_enabled())
        and is_plain(*given)
        and all(x.device == q.device for x in given)
        and q.dtype == k.dtype == v.dtype
        and flash.fits(q, v)
        and (on_device(q) or _interpreted(q))
    )


def _interpreted(x: Tensor) -> bool:
    in_interpreter = not isinstance(flash_kernels.output_kernel, triton.JITFunction)
    return in_interpreter and x.dtype in (torch.float32, torch.float16, torch.bfloat16)


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
    seed: Tensor | None = None,
) -> Tensor:
    """Compute :func:`flash.definition`, with the same arguments, in the dtype of q, k and v.

    Gradients: of all but decays, masks and seed, the same bits in every run. ``seed`` None means a
    number from torch's generator of the device. The result lies in memory as q does, heads inside.
    Raises: ValueError as :func:`flash.check`; RuntimeError for second derivatives.
    Trap: table and decays are float32 and gates float64. The dtype of the gradients is theirs.
    """
    flash.check(q, k, causal, window, table, first_lag, decay, score_decay)
    flash.check_own(q, k, by_query, by_key)
    if dropout and seed is None:
        seed = torch.randint(2**63 - 1, (1,), device=q.device)
    decays = decay, score_decay
    masks = padding, segments, window
    options = Options(causal, scale, *masks, dropout, seed, first_lag, decays, far)
    c, d = (None, None) if gates is None else gates
    own = (
        x.expand(-1, -1, -1, 2) if x is not None and x.shape[3] == 1 else x
        for x in (by_query, by_key)
    )
    return _Flash.apply(q, k, v, table, c, d, *own, options)


NO_LIMIT = 99
LARGE_MEMORY = {
    "output": ((1, Tile(128, 64)), (8, Tile(128, 64, 8)), (NO_LIMIT, Tile(64, 32))),
    "query_gradient": (
        (1, Tile(128, 32)),
        (6, Tile()),
        (10, Tile(64, 32)),
        (NO_LIMIT, Tile(32, 32, 2)),
    ),
    "key_gradient": ((2, Tile()), (5, Tile(32, 64)), (NO_LIMIT, Tile(16, 64))),
    "lag_gradient": ((8, Tile(128, 64, 8)), (NO_LIMIT, Tile(64, 32))),
}
"""Tiles of each kernel on GPUs with 227 KiB of shared memory, after the largest load that they
bear. A warp has 16 rows at least (of queries, or of keys in ``key_gradient``): of fewer rows,
several warps would compute the same."""
OTHERS = {
    "output": ((3, Tile(128, 64, 8)), (8, Tile(64, 32)), (NO_LIMIT, Tile(64, 16))),
    "query_gradient": ((8, Tile(64, 32)), (NO_LIMIT, Tile(32, 16, 2))),
    "key_gradient": ((2, Tile(32, 64)), (4, Tile(32, 32, 2)), (NO_LIMIT, Tile(16, 32, 2))),
    "lag_gradient": ((NO_LIMIT, Tile(64, 32)),),
}
FLOAT32 = {name: ((NO_LIMIT, Tile(32, 16, 2, 1)),) for name in OTHERS}
FLOAT32["key_gradient"] = ((NO_LIMIT, Tile(16, 32, 2, 1)),)


def tile_of(name: str, call: "_Call") -> Tile:
    """Return the tile of a kernel for a call: a large one with which it spills no registers.

    Kernels of float32 spill. ``python -m benchmarks.compiled`` shows the figures.
    """
    major, _ = capability_of(call.given[0].device)
    wide = call.given[0].dtype == torch.float32
    return _tile_of(name, major, wide, call.load, max(64, call.queries))


@lru_cache
def _tile_of(name: str, major: int, wide: bool, load: int, longest: int) -> Tile:
    tiles = OTHERS
    if wide:
        tiles = FLOAT32
    elif major in (9, 10):
        tiles = LARGE_MEMORY
    return next(tile for limit, tile in tiles[name] if load <= limit and tile.queries <= longest)


@lru_cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; that of an H100 for a CPU, in the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


class _Side(NamedTuple):
    """The queries or the keys of a call, in tiles."""

    tokens: int
    size: int
    segments: Tensor | None
    padding: Tensor | None


class Options(NamedTuple):
    """The arguments that need no gradients; see :func:`flash.definition`."""

    causal: bool
    scale: float
    padding: Tensor | None
    segments: flash.Pair | None
    window: int | None
    dropout: float
    seed: Tensor | None
    first_lag: int = 0
    decays: tuple[Tensor | None, Tensor | None] = (None, None)
    far: int | None = None


class _Flash(torch.autograd.Function):
    """Flash attention with a hand-written gradient."""

    @staticmethod
    def forward(ctx, q, k, v, table, c, d, by_query, by_key, options):
        terms = table, c, d, by_query, by_key
        call = _Call(*map(rows_of, (q, k, v)), *terms, options)
        out, lse = call.output()
        ctx.save_for_backward(q, k, v, *terms, out, lse)
        ctx.call, call.given, ctx.key = call, (), proof.current()
        return out

    @staticmethod
    def backward(ctx, grad):
        *given, out, lse = ctx.saved_tensors
        ctx.call.given = tuple(map(rows_of, given[:3]))
        found = proof.backward(
            ctx.key,
            lambda: ctx.call.gradients(gradient_of(grad), out, lse, ctx.needs_input_grad),
            lambda: _defined_gradients(ctx, given, grad),
        )
        ctx.call.given = ()
        if torch.is_grad_enabled():
            sources = [x for x in (grad, *given) if x is not None]
            found = [x if x is None else flash.NoSecondDerivative.apply(x, *sources) for x in found]
        return *found, None


def _defined_gradients(ctx, given: list[Tensor | None], grad: Tensor) -> list[Tensor | None]:
    """Return the gradients of the definition, which has all scores in memory."""
    definition = partial(defined, options=ctx.call.options)
    return gradients_of(definition, given, ctx.needs_input_grad[:8], (grad,))


def defined(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    c: Tensor | None,
    d: Tensor | None,
    by_query: Tensor | None,
    by_key: Tensor | None,
    options: Options,
) -> Tensor:
    """Compute :func:`flash.definition` of the arguments of the autograd function."""
    decay, score_decay = options.decays
    return flash.definition(
        *(q, k, v),
        table=table,
        gates=None if c is None else (c, d),
        by_query=by_query,
        by_key=by_key,
        decay=decay,
        score_decay=score_decay,
        **{name: x for name, x in options._asdict().items() if name != "decays"},
    )


def rows_of(x: Tensor) -> Tensor:
    """Return x with contiguous rows, of which MARGIN lie within 2^31 elements, as heads do."""
    return with_near_heads(straight(x.detach().resolve_neg()))


def gradient_of(grad: Tensor) -> Tensor:
    """Return an incoming gradient as :func:`rows_of`, in memory as in proofs."""
    return gradient_rows(with_near_heads(grad.detach().resolve_neg()))


def _rounded(count: int) -> int:
    """Return the number of tokens of the tiles of ``count`` tokens, at most."""
    return cdiv(count, MARGIN) * MARGIN


def _gate_sums(sums: Tensor, exact: bool) -> Tensor:
    """Return float64 sums of gates (B, H, T) for the kernels: float32, a line for each sequence.

    exact: every sum as two floats, whose sum has a relative error of 2^-48. Otherwise first the
    sums since the start of their block of MARGIN tokens, then twice the sum at each start.
    """
    batch, heads, count = sums.shape
    sums = F.pad(sums.detach().double(), (0, _rounded(count) - count)).view(-1, MARGIN)
    first = sums.float() if exact else sums[:, :1].float()
    rest = (sums - first).float()
    if exact:
        return torch.stack([first, rest], -1)
    rows = rest.view(batch * heads, -1), first.expand(-1, 2).reshape(batch * heads, -1)
    return torch.cat(rows, 1)


def _vector_of(x: Tensor) -> Tensor:
    """Return a decay (H,) for the kernels."""
    return aligned(x.detach().float().contiguous())


def _own_of(x: Tensor) -> Tensor:
    """Return biases of tokens (B, H, T, C) for the kernels."""
    return aligned(x.detach().contiguous())


class MaskedCall:
    """One call of kernels of attention over tiles: its sizes, masks and dropout, and launches.

    A kernel has as arguments: ``pointers``, :attr:`terms`, the masks, dropout's seed, strides in
    units of UNIT elements, T, S, H, :attr:`term_numbers`, the offset, the window, dropout's
    threshold, ``numbers``, the scale, and dropout's factor.
    """

    kernels: ModuleType = flash_kernels
    terms: tuple[Tensor | None, ...] = ()
    """Tensors of the terms of the scores, and their numbers."""
    term_numbers: tuple[int | None, ...] = ()
    padding_type = torch.int16
    """Of padding with half types; int32 with float32.

    Trap: from bytes and dropout's ``join`` Triton 3.6 infers operands of 4 bits and lays out 8
    neighbours per thread. Products over 16 tokens are wrong then, without an error.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
        self.given, self.options = (q, k, v), options
        self.batch, self.heads, self.queries, self.width = q.shape
        self.keys, self.values = k.shape[2], v.shape[3]
        self.offset, self.window = flash.offset_of(q, k, options.causal), options.window
        wide = torch.int32 if q.dtype == torch.float32 else self.padding_type
        self.padding = None if options.padding is None else options.padding.to(wide).contiguous()
        numbers = options.segments or (None, None)
        self.segments = [None if x is None else aligned(x.int().contiguous()) for x in numbers]
        self.seed = None if options.seed is None else aligned(options.seed)
        self.threshold, self.inverse = flash.dropout_of(options.dropout)
        self.bounds: dict[tuple[int, int, bool], Tensor] = {}

    def tile(self, name: str) -> Tile:
        """Return the tile of a kernel."""
        raise NotImplementedError

    @cached_property
    def _constants(self) -> dict[str, Any]:
        return self.constants()

    def constants(self) -> dict[str, Any]:
        """Return the other compile-time arguments of every kernel, without strides."""
        return {
            "D": self.width,
            "E": self.values,
            "DP": power_of_two(self.width),
            "EP": power_of_two(self.values),
            "WINDOWED": self.window is not None,
            "PADDED": self.padding is not None,
            "SEGMENTS": self.segments[0] is not None,
            "DROPS": self.threshold > 0,
        }

    def launch(
        self,
        name: str,
        pointers: tuple[Tensor | None, ...],
        strided: tuple[Tensor, ...],
        numbers: tuple[int, ...] = (),
        batch: int | None = None,
        tiles: int | None = None,
    ) -> None:
        """Launch the kernel of that name for ``tiles``; None: for all of queries, or of keys.

        batch: how many sequences of the batch; None: all.
        """
        tile, options, of_keys = self.tile(name), self.options, name == "key_gradient"
        tokens, size = (self.keys, tile.keys) if of_keys else (self.queries, tile.queries)
        count = cdiv(tokens, size) if tiles is None else tiles
        masks = (self.padding, *self.segments, self._bounds(tile, of_keys))
        strides = [n for x in strided for n in x.stride()[:3]]
        # with the widths, which gradients have in their strides too
        unit = gcd(16, self.width, self.values, *strides)
        launch(
            getattr(self.kernels, f"{name}_kernel"),
            (count * (batch or self.batch) * self.heads,),
            *(*pointers, *self.terms, *masks, self.seed),
            *[n // unit for n in strides],
            *(self.queries, self.keys, self.heads, *self.term_numbers, self.offset),
            *(self.window or 0, self.threshold, *numbers, options.scale, self.inverse),
            UNIT=unit,
            BM=tile.queries,
            BN=tile.keys,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **self._constants,
        )

    def _bounds(self, tile: Tile, of_keys: bool) -> Tensor | None:
        """Return the range of tiles that every tile of keys, or of queries, has a pair with."""
        segments, padding = self.segments, self.padding
        if segments[0] is None and padding is None:
            return None
        key = (tile.queries, tile.keys, of_keys)
        if key in self.bounds:
            return self.bounds[key]
        of_queries = _Side(self.queries, tile.queries, segments[0], None)
        of_all_keys = _Side(self.keys, tile.keys, segments[1], padding)
        own, other = (of_all_keys, of_queries) if of_keys else (of_queries, of_all_keys)
        masks = (own.segments, other.segments, own.padding, other.padding)
        count = cdiv(own.tokens, own.size)
        like = self.given[0]
        bounds = torch.empty(self.batch, count, 2, dtype=torch.int32, device=like.device)
        self.bounds[key] = bounds
        launch(
            flash_kernels.bounds_kernel,
            (self.batch * count,),
            *(like if x is None else x for x in masks),  # a pointer that is not read
            bounds,
            own.tokens,
            other.tokens,
            SIZE=own.size,
            OTHER=other.size,
            SEGMENTS=segments[0] is not None,
            OWN_PADDED=own.padding is not None,
            OTHER_PADDED=other.padding is not None,
            GROUP=16,
        )
        return bounds


class _Call(MaskedCall):
    """One call of the kernels of flash attention: the terms of its scores, and what it returns."""

    def __init__(self, q, k, v, table, c, d, by_query, by_key, options: Options) -> None:
        super().__init__(q, k, v, options)
        first_lag, self.table = self._with_margins(table)
        self.lags = 0 if table is None else table.shape[1]
        columns = 0 if table is None else self.table.shape[1]
        self.decays = [None if x is None else _vector_of(x) for x in options.decays]
        exact = q.dtype == torch.float32
        of_queries = None if c is None else _gate_sums(c, exact)
        self.gates = of_queries, of_queries if d is c else _gate_sums(d, exact)
        self.own = [None if x is None else _own_of(x) for x in (by_query, by_key)]
        own_columns = next((x.shape[3] for x in self.own if x is not None), 0)
        self.terms = (self.table, *self.decays, *self.gates, *self.own)
        self.term_numbers = (columns, first_lag, options.far, own_columns, options.first_lag)

    def _with_margins(self, table: Tensor | None) -> tuple[int, Tensor | None]:
        """Return the first lag, and a table (H, R) that has the lags of all pairs of all tiles."""
        first = self.options.first_lag
        if table is None:
            return first, None
        least = -2 * MARGIN if self.options.causal else -_rounded(self.keys)
        before = max(0, first - least)
        after = max(0, _rounded(self.queries) + self.offset - first - table.shape[1])
        table = table.detach().float()
        table = F.pad(table, (before, after)) if before or after else table.contiguous()
        return first - before, aligned(table)

    def output(self) -> tuple[Tensor, Tensor]:
        """Return o (B, H, T, E) and lse (L, T)."""
        q, k, v = self.given
        out = result_like(q, self.values)
        lse = q.new_empty(self.batch * self.heads, self.queries, dtype=torch.float32)
        self.launch("output", (q, k, v, out, lse), (q, k, v, out))
        return out, lse

    def gradients(
        self, grad: Tensor, out: Tensor, lse: Tensor, needed: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Return the gradients of q, k, v, table, both sums of gates, and the biases of every query
        and key."""
        q, k, v = self.given
        stats = lse.new_empty(lse.shape[0], _rounded(self.queries), 2)
        if self.queries < stats.shape[1]:
            stats[:, self.queries :, 0].fill_(torch.inf)
            stats[:, self.queries :, 1].zero_()
        gated = self.gates[0] is not None
        own = torch.zeros_like(lse) if gated else None  # remain 0 in causal attention
        dq, dk = (result_like(x, self.width) for x in (q, k))
        dv = result_like(v, self.values)
        of_tokens = [None if x is None else torch.zeros_like(x) for x in self.own]
        pointers = (q, k, v, out, grad, lse, stats, dq, own, of_tokens[0])
        self.launch("query_gradient", pointers, (q, k, v, grad, out, dq))
        of_keys = lse.new_empty(lse.shape[0], self.keys) if gated else None
        pointers = (q, k, v, grad, stats, dk, dv, of_keys, of_tokens[1])
        self.launch("key_gradient", pointers, (q, k, v, grad, dk, dv))
        of_table = self._table_gradient(grad, stats) if needed[3] else None
        gates = (
            x.view(self.batch, self.heads, -1).double() if need else None
            for x, need in zip((own, of_keys), needed[4:6], strict=True)
        )
        return [dq, dk, dv, of_table, *gates, *of_tokens]

    def _table_gradient(self, grad: Tensor, stats: Tensor) -> Tensor:
        """Return the gradient (H, R) of a table."""
        q, k, v = self.given
        tile = self.tile("lag_gradient")
        rows, size = tile.queries, tile.keys
        ratio, offset, window = rows // size, self.offset, self.window
        least, most = 1 - cdiv(self.keys, size), (cdiv(self.queries, rows) - 1) * ratio
        if self.options.causal:
            least = max(least, -((offset + rows - 1) // size))
        if window is not None:
            most = min(most, (window - offset + size - 2) // size)
        diagonals, lags = max(1, most - least + 1), self.lags
        shape = (self.batch * self.heads, ratio + 1, (diagonals + ratio) * size)
        part, out = stats.new_zeros(shape), stats.new_empty(self.heads, lags)
        least = (least - 1) * size  # of the lags of part
        numbers = (diagonals, least)
        pointers = (q, k, v, grad, stats, part)
        self.launch("lag_gradient", pointers, (q, k, v, grad), numbers, tiles=diagonals)
        shift = self.options.first_lag - offset - least
        launch(
            flash_kernels.lag_sums_kernel,
            (self.heads * cdiv(lags, 64),),
            *(part, out, self.batch, self.heads, *shape[1:], lags, shift),
            ROWS=64,
            SIZE=64,
        )
        return out

    def tile(self, name: str) -> Tile:
        """Return the tile of a kernel."""
        return tile_of(name, self)

    @cached_property
    def load(self) -> int:
        """What needs registers: terms of the scores, and width."""
        table, *decays = (x is not None for x in (self.table, *self.decays))
        own = sum(x is not None for x in self.own)
        gates = 0
        if self.gates[0] is not None:
            gates = 1 if self.options.causal else 4
        terms = 2 * table + decays[0] + 2 * decays[1] + gates + 3 * (self.threshold > 0) + 3 * own
        width = power_of_two(self.width) + power_of_two(self.values)
        wide = 4 * (width > 128) + 2 * (width > 192) + 4 * (width > 256)
        return max(7 * (own > 0), terms + wide)

    def constants(self) -> dict[str, Any]:
        """Return the compile-time arguments of all kernels, without tiles and strides."""
        return super().constants() | {
            "CAUSAL": self.options.causal,
            "PLAIN": all(x is None for x in self.terms),
            "TABLE": 0 if self.table is None else 1 + (self.options.far is not None),
            "DECAY": self.decays[0] is not None,
            "SCORE_DECAY": self.decays[1] is not None,
            "GATED": self.gates[0] is not None,
            "BY_QUERY": self.own[0] is not None,
            "BY_KEY": self.own[1] is not None,
            "CLIPPED": self._clipped(),
            "EXACT": self.given[0].dtype == torch.float32,
        }

    def _clipped(self) -> bool:
        """True if visible pairs have other lags than the biases of every token."""
        *_, columns, first = self.term_numbers
        least = 0 if self.options.causal else 1 - self.keys
        most = self.queries - 1 + self.offset
        most = most if self.window is None else min(most, self.window - 1)
        return columns > 0 and not first <= least <= most < first + columns
