"""The causal sums of linear attention on CUDA as Triton kernels.

In half precision, states of usual widths are kept in registers (``sweep_triton``; ``full_triton``
for all keys). This file has the kernels for float32 and for wide heads. At T = 512 with heads of 64
in bfloat16 they compute 2.4 times as many tokens as the definition in PyTorch and 0.26 times as
many as ``sweep_triton`` (results/bench/attention.csv, causal.csv); in float32 and of wide heads
they are not measured.

A scan writes the state before every chunk in float32. Then all chunks are computed in parallel from
their rows and their states. The same pass divides by the denominator. No T x T matrix and no
float32 copy of q, k or v is stored. The definition is ``causal.definition``.

Logarithms of a decay are summed within a chunk in float64. Only differences of these sums are
exponentiated, and they are at most 0.

Axes: L = B H sequences, T time, N chunks of C rows, D key width, E value width.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrpe_fairseq.kernels import proof
from lrpe_fairseq.kernels.conditions import gradients_of, is_plain
from lrpe_fairseq.kernels.linear import causal, sweep_triton
from lrpe_fairseq.kernels.loader import launch, on_device
from lrpe_fairseq.kernels.results import aligned
from lrpe_fairseq.kernels.tiles_triton import cdiv, fits_registers, power_of_two

CHUNK = 64
WIDEST_BLOCK = {True: 32, False: 64}
"""Maximum number of columns of D or E per program, in float32 (True) and in half precision. A
float32 product consists of three tf32 products, which need more registers. Its gradient with a
decay per token needs the smallest blocks."""
MINIMUM = 16  # smallest side of a tl.dot
PROGRAMS = 256
"""Number of programs that a scan is divided into at least, if it can be: a GPU has over a hundred
multiprocessors, and a few long sequences alone do not occupy them."""


def serves(q: Tensor, v: Tensor, log_decay: Tensor | None = None) -> bool:
    """True if the kernels support q and v: on an Ampere or newer GPU, not float64, of equal length.

    The caller casts q and k to the dtype of v.
    """
    plain = q.shape[2] == v.shape[2] and is_plain(q, v, log_decay)
    return plain and on_device(q) and on_device(v)


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`causal.definition`.

    The result is float32 or, unless ``wanted`` is "sums", may be rounded to the dtype of v; see
    :func:`results.result_type`.
    """
    if fits_registers(q, v):
        return sweep_triton.causal_sums(q, k, v, wanted, log_decay, eps)
    return chunked_sums(q, k, v, wanted, log_decay, eps)


def chunked_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`causal.definition` with the states of all chunks in memory, in float32."""
    if log_decay is not None and log_decay.dim() == 1 and log_decay.requires_grad:
        log_decay = log_decay[None, :, None].expand(q.shape[:3])
    rows = (x.contiguous() for x in (q, k, v))  # copied here, inside the autograd graph
    out, denominator = _Sums.apply(*rows, log_decay, wanted, eps)
    return out, (denominator if wanted == "sums" else None)


class _Shape(NamedTuple):
    """Sizes of one call, passed to every kernel."""

    sequences: int
    heads: int
    time: int
    chunks: int
    keys: int
    values: int
    key_block: int
    value_block: int

    @property
    def key_blocks(self) -> int:
        return cdiv(self.keys, self.key_block)

    @property
    def value_blocks(self) -> int:
        return cdiv(self.values, self.value_block)

    def programs(self, blocks: int) -> tuple[int]:
        """Return the grid of kernels that compute ``blocks`` of every chunk; see ``_place``."""
        return (self.chunks * blocks * self.sequences,)


class _Sums(torch.autograd.Function):
    """(result, denominator) with a hand-written gradient.

    g is the gradient of the denominators. A denominator is a numerator whose values are 1.
    """

    @staticmethod
    def forward(ctx, q, k, v, log_decay, wanted, eps):
        shape = _shape_of(q, v, log_decay)
        inputs = q, k, v, log_decay
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        decay = _decay_of(log_decay, shape)
        with_keys = wanted != "numerator"
        states, keys = _scan(k, v, None, decay, shape, with_keys, reverse=False)
        out, denominator = _outputs(q, k, v, states, keys, decay, shape, wanted, eps)
        kept = (out, denominator) if wanted == "normalized" else (None, None)
        ctx.save_for_backward(*inputs, states, keys, decay, *kept)
        ctx.shape, ctx.settings, ctx.key = shape, (wanted, eps), proof.current()
        rows = (shape.sequences // shape.heads, shape.heads)
        ctx.mark_non_differentiable(*([] if with_keys else [denominator]))
        return out.unflatten(0, rows), denominator.unflatten(0, rows)

    @staticmethod
    def backward(ctx, grad, grad_denominator):
        saved = ctx.saved_tensors  # read once, as checkpointing allows
        by_definition = partial(_defined_gradients, ctx, saved[:4], grad, grad_denominator)
        if torch.is_grad_enabled():
            return by_definition()
        by_kernels = partial(_Sums._gradients, ctx, saved, grad, grad_denominator)
        return proof.backward(ctx.key, by_kernels, by_definition)

    @staticmethod
    def _gradients(
        ctx, saved: tuple[Tensor | None, ...], grad: Tensor, grad_denominator: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, states, keys, decay, out, denominator = saved
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        grad = aligned(grad.contiguous().flatten(0, 1).float())
        g = None
        wanted, eps = ctx.settings
        if wanted == "sums":
            g = aligned(grad_denominator.contiguous().flatten(0, 1).float())
        if wanted == "normalized":
            grad, g = _through_quotient(grad, out, denominator, eps)
        with_gates = ctx.needs_input_grad[3]
        *grads, gates = _gradients(
            q, k, v, grad, g, states, keys, decay, ctx.shape, with_gates=with_gates
        )
        rows = (ctx.shape.sequences // ctx.shape.heads, ctx.shape.heads)
        gates = gates.unflatten(0, rows).to(log_decay.dtype) if with_gates else None
        return *(x.unflatten(0, rows) for x in grads), gates, None, None


def _decay_of(log_decay: Tensor | None, shape: _Shape) -> Tensor | None:
    """Return a constant decay (H,), or the sums of one per token within its chunk, (L, N, C)."""
    if log_decay is None:
        return None
    if log_decay.dim() == 1:
        return log_decay.detach().float().contiguous()
    gates = log_decay.detach().double().flatten(0, 1)
    gates = torch.nn.functional.pad(gates, (0, shape.chunks * CHUNK - shape.time))
    return gates.unflatten(-1, (shape.chunks, CHUNK)).cumsum(-1).contiguous()


def _defined_gradients(
    ctx, inputs: tuple[Tensor | None, ...], grad: Tensor, grad_denominator: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the definition, under create_graph with their graph."""
    wanted, eps = ctx.settings

    def definition(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> tuple[Tensor, ...]:
        rows = (x.float() for x in (q, k, v))
        return causal.present(*causal.definition(*rows, wanted, log_decay, eps))

    grads = (grad, grad_denominator) if wanted == "sums" else (grad,)
    return *gradients_of(definition, inputs, ctx.needs_input_grad[:4], grads), None, None


def _through_quotient(
    grad: Tensor, out: Tensor, denominator: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of numerators (L, T, E) and denominators (L, T) of a quotient."""
    clamped = denominator.clamp_min(eps)
    g = -(grad * out).sum(-1) / clamped
    return grad / clamped.unsqueeze(-1), g.masked_fill(denominator < eps, 0.0)


def _shape_of(q: Tensor, v: Tensor, log_decay: Tensor | None) -> _Shape:
    batch, heads, time, keys = q.shape
    widest = WIDEST_BLOCK[v.dtype == torch.float32]
    if v.dtype == torch.float32 and log_decay is not None and log_decay.dim() == 3:
        widest = MINIMUM
    blocks = (min(widest, power_of_two(width)) for width in (keys, v.shape[-1]))
    chunks = max(1, cdiv(time, CHUNK))
    return _Shape(batch * heads, heads, time, chunks, keys, v.shape[-1], *blocks)


def _constants(shape: _Shape, like: Tensor, decay: Tensor | None) -> dict:
    """Return the compile-time arguments of all kernels."""
    decays = 0
    if decay is not None:
        decays = 1 if decay.dim() == 1 else 2
    return {
        "D": shape.keys,
        "E": shape.values,
        "C": CHUNK,
        "BD": shape.key_block,
        "BE": shape.value_block,
        "DECAYS": decays,
        "PRECISION": "tf32x3" if like.dtype == torch.float32 else "tf32",
        "num_warps": 4,
    }


def _scan(
    a: Tensor,
    b: Tensor,
    weights: Tensor | None,
    decay: Tensor | None,
    shape: _Shape,
    with_keys: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Compute float32 sums over all chunks before each chunk, or after it if ``reverse``.

    Returns: the sums of a^T b, (L, N, D, E), and of a times ``weights`` (ones if None), (L, N, D).
    """
    options = {"dtype": torch.float32, "device": a.device}
    states = torch.empty(shape.sequences, shape.chunks, shape.keys, shape.values, **options)
    keys = torch.empty(shape.sequences, shape.chunks, shape.keys, **options)
    shape = _for_scan(shape)
    launch(
        _scan_kernel,
        (shape.sequences, shape.key_blocks, shape.value_blocks),
        *(a, b, a if weights is None else weights, states, keys),
        *(a if decay is None else decay, shape.time, shape.chunks, shape.heads),
        KEYS=with_keys,
        WEIGHTED=weights is not None,
        REVERSE=reverse,
        **_constants(shape, a, decay),
    )
    return states, keys


def _for_scan(shape: _Shape) -> _Shape:
    """Return the shape with smaller blocks, as far as the scan has too few programs."""
    while (
        shape.sequences * shape.key_blocks * shape.value_blocks < PROGRAMS
        and max(shape.key_block, shape.value_block) > MINIMUM
    ):
        if shape.key_block > shape.value_block:
            shape = shape._replace(key_block=shape.key_block // 2)
        else:
            shape = shape._replace(value_block=shape.value_block // 2)
    return shape


def _outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    keys: Tensor,
    decay: Tensor | None,
    shape: _Shape,
    wanted: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the results (L, T, E) and the denominators (L, T)."""
    options = {"dtype": torch.float32, "device": q.device}
    out = torch.empty(shape.sequences, shape.time, shape.values, **options)
    denominator = torch.empty(shape.sequences, shape.time, **options)
    launch(
        _output_kernel,
        shape.programs(shape.value_blocks),
        *(q, k, v, states, keys, q if decay is None else decay, out, denominator),
        *(shape.time, shape.chunks, shape.heads, eps),
        KEYS=wanted != "numerator",
        NORMALIZE=wanted == "normalized",
        **_constants(shape, q, decay),
    )
    return out, denominator


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    g: Tensor | None,
    states: Tensor,
    keys: Tensor,
    decay: Tensor | None,
    shape: _Shape,
    with_gates: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v and gates (or None) from those of both sums."""
    after, keys_after = _scan(q, grad, g, decay, shape, g is not None, reverse=True)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    products = grad.new_empty(shape.sequences, shape.key_blocks, shape.time)
    rate = q if decay is None else decay
    sizes = (shape.time, shape.chunks, shape.heads)
    constants = _constants(shape, q, decay)
    launch(
        _key_gradient_kernel,
        shape.programs(shape.key_blocks),
        *(q, k, v, grad, grad if g is None else g, states, keys, after, keys_after),
        *(rate, grads[0], grads[1], products, *sizes),
        KEYS=g is not None,
        **constants,
    )
    launch(
        _value_gradient_kernel,
        shape.programs(shape.value_blocks),
        *(q, k, grad, after, rate, grads[2], *sizes),
        **constants,
    )
    if not with_gates:
        return *grads, None
    across = _across(states, after) + (0 if g is None else _across(keys, keys_after))
    return *grads, _gradient_of_gates(products.double().sum(1), across, shape)


def _across(states: Tensor, after: Tensor) -> Tensor:
    """Return the gradient of a gate at the end of every chunk, (L, N); 0 for the last one.

    It is the product of the sums over everything before that gate and over everything after it.
    """
    at_ends = (states[:, 1:] * after[:, :-1]).flatten(2).sum(-1, dtype=torch.float64)
    return torch.nn.functional.pad(at_ends, (0, 1))


def _gradient_of_gates(products: Tensor, across: Tensor, shape: _Shape) -> Tensor:
    """Return the gradient (L, T) from ``products`` = q . dq - k . dk, summed over later tokens.

    Sums start anew at every chunk, from ``across`` (L, N), so that rounding errors do not add up.
    The gate of the first token acts on nothing.
    """
    products = torch.nn.functional.pad(products, (0, shape.chunks * CHUNK - shape.time))
    in_chunk = products.unflatten(-1, (shape.chunks, CHUNK)).flip(-1).cumsum(-1).flip(-1)
    of_gates = (in_chunk + across.unsqueeze(-1)).flatten(1)[:, : shape.time]
    first = torch.zeros(1, dtype=torch.int64, device=of_gates.device)
    return of_gates.index_fill(-1, first, 0.0)


# --- kernels -----------------------------------------------------------------------------------


SIZES = ["T", "N", "H"]
"""Arguments whose values are not compiled in."""


@triton.jit
def _rows(base, sequence, t, column, inside, T, WIDTH: tl.constexpr):
    """Load a block of (L, T, WIDTH) as float32, zero outside."""
    at = (sequence * T + t[:, None]) * WIDTH + column[None, :]  # int64
    return tl.load(base + at, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def _state(base, sequence, n, N, d, e, D: tl.constexpr, E: tl.constexpr):
    """Load a block of the states (L, N, D, E), zero outside."""
    at = (sequence * N + n) * D * E + d[:, None] * E + e[None, :]
    return tl.load(base + at, mask=(d < D)[:, None] & (e < E)[None, :], other=0.0)


@triton.jit
def _place(T, WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Return the chunk, the block of columns and the sequence (int64) of this program.

    Chunks vary fastest, so that the blocks of a sequence find its rows in the cache.
    """
    chunks, blocks = tl.cdiv(T, C), tl.cdiv(WIDTH, BLOCK)
    program = tl.program_id(0)
    sequence = program // (chunks * blocks)
    return program % chunks, program // chunks % blocks, sequence.to(tl.int64)


@triton.jit
def _chunk(n, T, C: tl.constexpr):
    """Return the rows of chunk n: index in the chunk, time, and a mask of times below T."""
    row = tl.arange(0, C)
    return row, n * C + row, n * C + row < T


@triton.jit
def _logs(decay_ptr, sequence, n, N, H, C: tl.constexpr, DECAYS: tl.constexpr):
    """Return the sums of the decay's logarithms in chunk n up to each token (C,), and in all.

    DECAYS: 0 for none, 1 if constant, 2 if per token. The sums are float64, because only their
    differences are exponentiated.
    """
    row = tl.arange(0, C)
    total, last = tl.zeros((C,), dtype=tl.float64), tl.zeros((1,), dtype=tl.float64)
    if DECAYS == 2:
        first = decay_ptr + (sequence * N + n) * C
        total, last = tl.load(first + row), tl.load(first + C - 1 + tl.zeros((1,), dtype=tl.int32))
    elif DECAYS == 1:
        rate = tl.load(decay_ptr + sequence % H).to(tl.float64)
        total, last = rate * (row + 1), rate * C + last
    return total, last


@triton.jit
def _exp(log):
    """Return the exponential in float32."""
    return tl.exp(log.to(tl.float32))


@triton.jit
def _visible(scores, row, total, DECAYS: tl.constexpr):
    """Apply the decay and the causal mask to the scores (C, C) of a chunk."""
    seen = row[:, None] >= row[None, :]
    if DECAYS > 0:
        scores = scores * _exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
    return tl.where(seen, scores, 0.0)


@triton.jit
def _store_rows(base, x, sequence, t, column, inside, T, WIDTH: tl.constexpr):
    """Write a block of (L, T, WIDTH), cast to the dtype of the memory."""
    at = (sequence * T + t[:, None]) * WIDTH + column[None, :]  # int64
    mask = inside[:, None] & (column < WIDTH)[None, :]
    tl.store(base + at, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _store_state(base, x, sequence, n, N, d, e, D: tl.constexpr, E: tl.constexpr):
    """Write a block of the states (L, N, D, E)."""
    at = (sequence * N + n) * D * E + d[:, None] * E + e[None, :]
    tl.store(base + at, x, mask=(d < D)[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=SIZES)
def _scan_kernel(
    a_ptr, b_ptr, weight_ptr, state_ptr, key_ptr, decay_ptr, T, N, H, D: tl.constexpr,
    E: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, DECAYS: tl.constexpr,
    PRECISION: tl.constexpr, KEYS: tl.constexpr, WEIGHTED: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Compute one block of the states of one sequence, chunk by chunk."""
    sequence = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    e = tl.program_id(2) * BE + tl.arange(0, BE)
    state = tl.zeros((BD, BE), dtype=tl.float32)
    key = tl.zeros((BD,), dtype=tl.float32)
    for i in range(N):
        n = N - 1 - i if REVERSE else i
        _store_state(state_ptr, state, sequence, n, N, d, e, D, E)
        if KEYS:  # noqa: SIM102  (KEYS is known at compile time, the next condition is not)
            if tl.program_id(2) == 0:
                tl.store(key_ptr + (sequence * N + n) * D + d, key, mask=d < D)
        _, t, inside = _chunk(n, T, C)
        a = _rows(a_ptr, sequence, t, d, inside, T, D)
        b = _rows(b_ptr, sequence, t, e, inside, T, E)
        if DECAYS > 0:
            total, last = _logs(decay_ptr, sequence, n, N, H, C, DECAYS)
            a = a * _exp(total if REVERSE else last - total)[:, None]
            state, key = state * _exp(last)[:, None], key * _exp(last)
        state += tl.dot(tl.trans(a), b, input_precision=PRECISION)
        if KEYS:
            if WEIGHTED:
                weight = tl.load(weight_ptr + sequence * T + t, mask=inside, other=0.0)
                a = a * weight[:, None]
            key += tl.sum(a, axis=0)


@triton.jit
def _key(key_ptr, sequence, n, N, d, D: tl.constexpr):
    """Load a block of the sums of keys (L, N, D) as a row, (1, BD)."""
    return tl.load(key_ptr + (sequence * N + n) * D + d, mask=d < D, other=0.0)[None, :]


@triton.jit(do_not_specialize=SIZES)
def _output_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, key_ptr, decay_ptr, out_ptr, denominator_ptr, T, N, H, eps,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    DECAYS: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Compute one block of columns of the results of one chunk."""
    n, block_of_e, sequence = _place(T, E, C, BE)
    e = block_of_e * BE + tl.arange(0, BE)
    row, t, inside = _chunk(n, T, C)
    scores, out = tl.zeros((C, C), dtype=tl.float32), tl.zeros((C, BE), dtype=tl.float32)
    denominator = tl.zeros((C,), dtype=tl.float32)
    total, _ = _logs(decay_ptr, sequence, n, N, H, C, DECAYS)
    for block in tl.static_range(0, D, BD):
        d = block + tl.arange(0, BD)
        q = _rows(q_ptr, sequence, t, d, inside, T, D)
        k = _rows(k_ptr, sequence, t, d, inside, T, D)
        scores += tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if DECAYS > 0:
            q = q * _exp(total)[:, None]
        state = _state(state_ptr, sequence, n, N, d, e, D, E)
        out += tl.dot(q, state, input_precision=PRECISION)
        if KEYS:
            denominator += tl.sum(q * _key(key_ptr, sequence, n, N, d, D), axis=1)
    scores = _visible(scores, row, total, DECAYS)
    v = _rows(v_ptr, sequence, t, e, inside, T, E)
    out += tl.dot(scores, v, input_precision=PRECISION)
    if KEYS:
        denominator += tl.sum(scores, axis=1)
        if block_of_e == 0:
            tl.store(denominator_ptr + sequence * T + t, denominator, mask=inside)
    if NORMALIZE:
        out = out / tl.maximum(denominator, eps, tl.PropagateNan.ALL)[:, None]
    _store_rows(out_ptr, out, sequence, t, e, inside, T, E)


@triton.jit
def _through_values(
    v_ptr,
    grad_ptr,
    state_ptr,
    after_ptr,
    sequence,
    n,
    d,
    t,
    inside,
    T,
    N,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return G v^T (C, C), G S^T and v dS^T (C, BD): sums over E in the gradients of q and k."""
    grad_scores = tl.zeros((C, C), dtype=tl.float32)
    grad_q = tl.zeros((C, BD), dtype=tl.float32)
    grad_k = tl.zeros((C, BD), dtype=tl.float32)
    for block in tl.static_range(0, E, BE):
        e = block + tl.arange(0, BE)
        grad = _rows(grad_ptr, sequence, t, e, inside, T, E)
        v = _rows(v_ptr, sequence, t, e, inside, T, E)
        grad_scores += tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        state = _state(state_ptr, sequence, n, N, d, e, D, E)
        grad_q += tl.dot(grad, tl.trans(state), input_precision=PRECISION)
        after = _state(after_ptr, sequence, n, N, d, e, D, E)
        grad_k += tl.dot(v, tl.trans(after), input_precision=PRECISION)
    return grad_scores, grad_q, grad_k


@triton.jit
def _store_products(product_ptr, x, row, t, inside, T, DECAYS: tl.constexpr):
    """Write the sums of x (C, BD) in a row of (L, blocks of D, T), for a decay per token."""
    if DECAYS == 2:
        tl.store(product_ptr + row * T + t, tl.sum(x, axis=1), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, g_ptr, state_ptr, key_ptr, after_ptr, key_after_ptr, decay_ptr,
    grad_q_ptr, grad_k_ptr, product_ptr, T, N, H, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, DECAYS: tl.constexpr, PRECISION: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Compute one block of columns of dq, dk and, for gates, q . dq - k . dk of one chunk."""
    n, block, sequence = _place(T, D, C, BD)
    d = block * BD + tl.arange(0, BD)
    row, t, inside = _chunk(n, T, C)
    grad_scores, grad_q, grad_k = _through_values(
        v_ptr, grad_ptr, state_ptr, after_ptr, sequence, n, d, t, inside, T, N, D, E, C, BD, BE,
        PRECISION,  # not starred: triton 3.2
    )  # fmt: skip
    if KEYS:
        g = tl.load(g_ptr + sequence * T + t, mask=inside, other=0.0)[:, None]
        grad_scores += g
        grad_q += g * _key(key_ptr, sequence, n, N, d, D)
        grad_k += _key(key_after_ptr, sequence, n, N, d, D)
    total, last = _logs(decay_ptr, sequence, n, N, H, C, DECAYS)
    if DECAYS > 0:
        grad_q, grad_k = grad_q * _exp(total)[:, None], grad_k * _exp(last - total)[:, None]
    grad_scores = _visible(grad_scores, row, total, DECAYS)
    q = _rows(q_ptr, sequence, t, d, inside, T, D)
    k = _rows(k_ptr, sequence, t, d, inside, T, D)
    grad_q += tl.dot(grad_scores, k, input_precision=PRECISION)
    grad_k += tl.dot(tl.trans(grad_scores), q, input_precision=PRECISION)
    to = sequence * tl.cdiv(D, BD) + block
    _store_products(product_ptr, q * grad_q - k * grad_k, to, t, inside, T, DECAYS)
    _store_rows(grad_q_ptr, grad_q, sequence, t, d, inside, T, D)
    _store_rows(grad_k_ptr, grad_k, sequence, t, d, inside, T, D)


@triton.jit(do_not_specialize=SIZES)
def _value_gradient_kernel(
    q_ptr, k_ptr, grad_ptr, after_ptr, decay_ptr, grad_v_ptr, T, N, H, D: tl.constexpr,
    E: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, DECAYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one block of columns of the gradient of v of one chunk."""
    n, block_of_e, sequence = _place(T, E, C, BE)
    e = block_of_e * BE + tl.arange(0, BE)
    row, t, inside = _chunk(n, T, C)
    scores = tl.zeros((C, C), dtype=tl.float32)
    grad_v = tl.zeros((C, BE), dtype=tl.float32)
    total, last = _logs(decay_ptr, sequence, n, N, H, C, DECAYS)
    for block in tl.static_range(0, D, BD):
        d = block + tl.arange(0, BD)
        k = _rows(k_ptr, sequence, t, d, inside, T, D)
        q = _rows(q_ptr, sequence, t, d, inside, T, D)
        scores += tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if DECAYS > 0:
            k = k * _exp(last - total)[:, None]
        after = _state(after_ptr, sequence, n, N, d, e, D, E)
        grad_v += tl.dot(k, after, input_precision=PRECISION)
    scores = _visible(scores, row, total, DECAYS)
    grad = _rows(grad_ptr, sequence, t, e, inside, T, E)
    grad_v += tl.dot(tl.trans(scores), grad, input_precision=PRECISION)
    _store_rows(grad_v_ptr, grad_v, sequence, t, e, inside, T, E)
