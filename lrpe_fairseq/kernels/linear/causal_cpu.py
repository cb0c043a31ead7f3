"""The causal sums of linear attention in C++ for a CPU.

The sums equal ``causal.definition``. Intermediate results stay in the cache of the core that
processes a sequence, scores above the diagonal are not computed, and states are recomputed in the
backward pass. The definition is used if ``causal_cpu.cpp`` does not compile.
"""

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from lrpe_fairseq.kernels import loader
from lrpe_fairseq.kernels.conditions import called_in_tracing, gradients_of, is_plain
from lrpe_fairseq.kernels.linear import causal

SOURCE = Path(__file__).with_suffix(".cpp")
WANTED = ("numerator", "sums", "normalized")
SEGMENT = 256
"""Number of tokens between saved states, so that the backward pass of a segment fits a core's
cache. A multiple of CHUNK in ``causal_cpu.cpp``."""

WIDEST = 256
"""Largest supported width of keys and values. A wider state does not fit a core's cache."""

GRADIENTS = ("grad_q", "grad_k", "grad_v", "grad_gates")


def library() -> ctypes.CDLL | None:
    """Return the compiled kernel, or None if kernels are disabled or it does not compile."""
    return loader.load_library(SOURCE)


@called_in_tracing
def has_library() -> bool:
    """True if :func:`library` has the kernel."""
    return library() is not None


def serves(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> bool:
    """True if the kernel supports q, k, v (B, H, T, .) and half of the threads get a sequence."""
    return (
        is_plain(q, k, v, log_decay)
        and all(x.numel() > 0 for x in (q, k, v))
        # with fewer sequences threads would wait, and the definition is parallel inside too
        and 2 * q.shape[0] * q.shape[1] >= torch.get_num_threads()
        and fits(q, k, v)
    )


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if the kernel supports the dtype, device and widths of q, k, v (B, H, T, .)."""
    rows = (q, k, v)
    return (
        q.shape == k.shape
        and q.shape[:3] == v.shape[:3]
        and all(x.shape[-1] <= WIDEST for x in rows)
        and q.dtype in (torch.float32, torch.float64)
        and all(x.device.type == "cpu" and x.dtype == q.dtype for x in rows)
        and has_library()
    )


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`causal.definition`."""
    log_decay = by_token_if_learned(log_decay, q)
    rows = (loader.contiguous_rows(x) for x in (q, k, v))  # copied here, inside the autograd graph
    return _CausalSums.apply(*rows, log_decay, wanted, eps)


def by_token_if_learned(log_decay: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a decay (H,) that needs a gradient as one per token (B, H, T); others as they are."""
    if log_decay is not None and log_decay.dim() == 1 and log_decay.requires_grad:
        return log_decay[None, :, None].expand(q.shape[:3])
    return log_decay


class _CausalSums(torch.autograd.Function):
    """The causal sums as (result, denominator), with a hand-written gradient."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, wanted, eps):
        keeps = any(ctx.needs_input_grad)
        out, denominators, states = sums(q, k, v, log_decay, wanted, eps, keeps)
        kept = (out, denominators) if wanted == "normalized" else (None, None)
        ctx.settings = wanted, eps
        ctx.save_for_backward(q, k, v, log_decay, states, *kept)
        return out, (denominators if wanted == "sums" else None)

    @staticmethod
    def backward(ctx, grad, grad_denominators):
        if torch.is_grad_enabled():
            return _gradients_as_graph(ctx, grad, grad_denominators)
        saved = ctx.saved_tensors  # read once, as checkpointing allows
        rows, kept = saved[:4], saved[4:]
        of_gates = ctx.needs_input_grad[3]
        return *gradients(grad, grad_denominators, rows, kept, ctx.settings, of_gates), None, None


def sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    wanted: str,
    eps: float,
    keeps: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the result, the denominators, and the states that :func:`gradients` reads.

    keeps: True for the states. The backward pass starts each segment from its saved state and
        recomputes the rest.
    """
    states = states_of(q, v) if keeps else None
    out = loader.empty_rows(v)
    denominators = None if wanted == "numerator" else q.new_empty(q.shape[:3])
    tensors = {"states": states, "out": out, "denominators": denominators}
    _run("causal_forward", log_decay, (wanted, eps), q=q, k=k, v=v, **tensors)
    return out, denominators, states


def gradients(
    grad: Tensor,
    grad_denominators: Tensor | None,
    rows: tuple[Tensor, Tensor, Tensor, Tensor | None],
    kept: tuple[Tensor, Tensor | None, Tensor | None],
    settings: tuple[str, float],
    of_gates: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of ``rows``: q, k, v, and the decay if ``of_gates``.

    kept: the states, and for "normalized" results and denominators. settings: wanted and eps.
    """
    q, k, v, log_decay = rows
    states, out, denominators = kept
    grads = {name: loader.empty_rows(x) for name, x in zip(GRADIENTS, (q, k, v), strict=False)}
    if of_gates:
        grads["grad_gates"] = q.new_empty(q.shape[:3], dtype=torch.float64)
    given = {"states": states, "out": out, "denominators": denominators}
    if grad_denominators is not None:
        given["grad_denominators"] = grad_denominators.contiguous()
    grad = loader.contiguous_rows(grad)
    _run("causal_backward", log_decay, settings, q=q, k=k, v=v, grad=grad, **given, **grads)
    grad_gates = grads.pop("grad_gates", None)
    grad_gates = None if grad_gates is None else grad_gates.to(log_decay.dtype)
    return *grads.values(), grad_gates


def _gradients_as_graph(
    ctx, grad: Tensor, grad_denominators: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a call with their graph, for second derivatives."""
    wanted, eps = ctx.settings

    def definition(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> tuple[Tensor, ...]:
        return causal.present(*causal.definition(q, k, v, wanted, log_decay, eps))

    inputs = ctx.saved_tensors[:4]
    needed = ctx.needs_input_grad[:4]
    grads = causal.present(grad, grad_denominators)
    return *gradients_of(definition, inputs, needed, grads), None, None


def states_of(q: Tensor, v: Tensor) -> Tensor:
    """Allocate memory for the state before every segment: D x E for k v^T, then D for k.

    It is flat, because an exported program would not take other lengths if an axis could be 1.
    """
    return q.new_empty(math.prod(shape_of_states(q, v)))


def shape_of_states(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the axes (B, H, segments, D E + D) of :func:`states_of`."""
    segments = -(-q.shape[-2] // SEGMENT)
    return *q.shape[:2], segments, q.shape[-1] * (v.shape[-1] + 1)


def _run(
    name: str, log_decay: Tensor | None, settings: tuple[str, float], **tensors: Tensor | None
) -> None:
    """Call the function ``name`` of the library with named tensors."""
    wanted, eps = settings
    q, v = tensors["q"], tensors["v"]
    rates, tensors["gates"] = _decay_of(log_decay, q)
    batch, heads, time, keys = q.shape
    call = library().Call(
        batch=batch,
        heads=heads,
        time=time,
        keys=keys,
        values=v.shape[-1],
        segment=SEGMENT,
        threads=torch.get_num_threads(),
        double_precision=q.dtype == torch.float64,
        with_denominators=wanted != "numerator",
        normalizes=wanted == "normalized",
        eps=eps,
        log_decay=loader.pointer(rates),
    )
    if tensors.get("states") is not None:
        tensors["states"] = tensors["states"].view(shape_of_states(q, v))
    loader.set_views(call, tensors)
    getattr(library(), name)(ctypes.byref(call))


def _decay_of(log_decay: Tensor | None, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return a constant decay (H,) and one per token (B, H, T), in float64; one of them is None."""
    if log_decay is None:
        return None, None
    wide = log_decay.detach().double()
    if log_decay.dim() == 1:
        return wide.expand(q.shape[1]).contiguous(), None
    return None, wide.expand(q.shape[:3])
