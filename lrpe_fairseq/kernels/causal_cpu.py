"""The causal sums of linear attention on a CPU in C++: ``chunked`` without what PyTorch moves.

The same sums, chunk by chunk, with everything between arguments and results in the cache of the
core that works on a sequence, the triangle above the diagonal left out, and the states formed again
in the backward pass instead of kept. Where ``causal_cpu.cpp`` is not compiled ``chunked`` serves.
"""

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lrpe_fairseq.kernels import loader

SOURCE = Path(__file__).with_suffix(".cpp")
WANTED = ("numerator", "sums", "normalized")  # in the order of causal_cpu.cpp
SEGMENT = 256
"""Tokens between the states that are kept for the backward pass; what it does to a segment stays in
a core's cache. A multiple of the chunks of ``causal_cpu.cpp``."""

WIDEST = 256
"""Of keys and values: beyond, the state is too large for a core's cache."""


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether this form is for these (B, H, T, .): on a CPU, a sequence for every thread."""
    given = (q, k, v)
    return (
        q.shape == k.shape
        and q.shape[:3] == v.shape[:3]
        and all(x.numel() > 0 and x.shape[-1] <= WIDEST for x in given)
        and q.shape[0] * q.shape[1] >= torch.get_num_threads()
        and q.dtype in (torch.float32, torch.float64)
        and all(x.device.type == "cpu" and x.dtype == q.dtype for x in given)
        and not torch.compiler.is_compiling()
        and loader.compiled(SOURCE) is not None
    )


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """As ``chunked.causal_sums``."""
    return _Native.apply(q, k, v, wanted, log_decay, eps)


class _Native(torch.autograd.Function):
    """(result, denominator)."""

    @staticmethod
    def forward(ctx, q, k, v, wanted, log_decay, eps):
        q, k, v = (loader.rows(x) for x in (q, k, v))
        states = _states(q, v) if any(ctx.needs_input_grad) else None
        out = torch.empty_like(v)
        denominator = None if wanted == "numerator" else q.new_empty(q.shape[:3])
        ctx.settings = wanted, log_decay, eps
        _call("causal_forward", ctx.settings, q, k, v, states, out, denominator)
        kept = (out, denominator) if wanted == "normalized" else (None, None)
        ctx.save_for_backward(q, k, v, states, *kept)
        return out, denominator if wanted == "sums" else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, g):
        q, k, v, *kept = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        g = None if g is None else g.contiguous()
        _call("causal_backward", ctx.settings, q, k, v, *kept, loader.rows(grad), g, *grads)
        return *grads, None, None, None


def _states(q: Tensor, v: Tensor) -> Tensor:
    """Room for the state before every segment: D x E sums of k v^T, then D of k."""
    segments = math.ceil(q.shape[-2] / SEGMENT)
    return q.new_empty(*q.shape[:2], segments, q.shape[-1] * (v.shape[-1] + 1))


class _Call(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int64) for n in ("batch", "heads", "time", "keys", "values")),
        *((n, ctypes.c_int64) for n in ("segment", "wanted", "threads")),
        ("eps", ctypes.c_double),
        ("log_decay", ctypes.c_void_p),
    ]


def _call(name: str, settings: tuple[str, Tensor | None, float], *tensors: Tensor | None) -> None:
    """Run a function of the library on tensors, of which the first and third are q and v."""
    q, v = tensors[0], tensors[2]
    wanted, log_decay, eps = settings
    rates = None if log_decay is None else log_decay.double().expand(q.shape[1]).contiguous()
    call = _Call(
        *q.shape,
        v.shape[-1],
        SEGMENT,
        WANTED.index(wanted),
        torch.get_num_threads(),
        eps,
        None if rates is None else rates.data_ptr(),
    )
    run = getattr(loader.compiled(SOURCE), name)
    run(ctypes.byref(call), loader.views(*tensors), int(q.dtype == torch.float64))
