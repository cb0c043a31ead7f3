"""The causal sums of linear attention on a CPU in C++: ``chunked`` without what PyTorch moves.

The same sums, chunk by chunk, with everything between arguments and results in the cache of the
core that works on a sequence, the triangle above the diagonal left out, and the states formed again
in the backward pass instead of kept. ``native.cpp`` is compiled once for a machine, by ``$CXX`` or
``c++``, into the user's cache folder; where that fails, or is not wished, ``chunked`` serves.
"""

import ctypes
import hashlib
import logging
import math
import os
import platform
import shlex
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lrpe_fairseq.encodings import kernels

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
WANTED = ("numerator", "sums", "normalized")  # in the order of native.cpp
SEGMENT = 256
"""Tokens between the states that are kept for the backward pass; what it does to a segment stays in
a core's cache. A multiple of the chunks of ``native.cpp``."""

WIDEST = 256
"""Of keys and values: beyond, the state is too large for a core's cache."""

logger = logging.getLogger(__name__)


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
        and library() is not None
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
        q, k, v = (_rows(x) for x in (q, k, v))
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
        _call("causal_backward", ctx.settings, q, k, v, *kept, _rows(grad), g, *grads)
        return *grads, None, None, None


def _states(q: Tensor, v: Tensor) -> Tensor:
    """Room for the state before every segment: D x E sums of k v^T, then D of k."""
    segments = math.ceil(q.shape[-2] / SEGMENT)
    return q.new_empty(*q.shape[:2], segments, q.shape[-1] * (v.shape[-1] + 1))


def _rows(x: Tensor) -> Tensor:
    """``x`` with every row as it is, in one piece of memory."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


# --- the library -------------------------------------------------------------------------------


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("batch", "head", "time")),
    ]

    @classmethod
    def of(cls, x: Tensor | None) -> "_Tensor":
        """Of x (B, H, T, .) or (B, H, T)."""
        return cls() if x is None else cls(x.data_ptr(), *x.stride()[:3])


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
    views = (_Tensor * len(tensors))(*(_Tensor.of(x) for x in tensors))
    getattr(library(), name)(ctypes.byref(call), views, int(q.dtype == torch.float64))


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """``native.cpp``, compiled; None where it is not wanted or cannot be compiled."""
    if not kernels.wished(unasked=True):
        return None
    try:
        return ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        logger.warning(
            "linear attention runs in PyTorch, more slowly than in C++: %s does not compile (%s); "
            "set CXX to a C++17 compiler, or LRPE_FAIRSEQ_KERNELS=0 to have it so",
            SOURCE.name,
            why[-1] if why else type(error).__name__,
        )
        return None


def _compiled() -> Path:
    """The library for this machine, from the cache folder or put there, whole, now."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), *FLAGS]
    made_of = (SOURCE.read_bytes(), " ".join(command).encode(), _processor().encode())
    name = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    target = _cache() / f"native-{name}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder, target.name)
            done = [*command, "-o", str(built), str(SOURCE)]
            subprocess.run(done, check=True, capture_output=True, text=True, timeout=300)
            built.replace(target)
    return target


def _cache() -> Path:
    """The user's folder for what can be made again."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lrpe_fairseq")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    kept = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "\n".join(sorted(kept))
