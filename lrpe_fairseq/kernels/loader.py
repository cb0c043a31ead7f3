"""Whether this package's kernels are used: those in Triton on a GPU, those in C++ on a CPU.

The environment variable LRPE_FAIRSEQ_KERNELS decides: 0 none, 1 all; unset, those that have been
run on the hardware they are for, which are those in C++. Triton's are proved in its interpreter
and compile for A100 and H100, but have not been run on a GPU yet.
"""

import ctypes
import hashlib
import importlib
import importlib.util
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

HEADERS = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", f"-I{HEADERS}")

logger = logging.getLogger(__name__)


def wished(unasked: bool) -> bool:
    """What LRPE_FAIRSEQ_KERNELS says; ``unasked`` where it says nothing."""
    return {"0": False, "1": True}.get(os.environ.get("LRPE_FAIRSEQ_KERNELS", ""), unasked)


@lru_cache(maxsize=8)
def load(module: str) -> ModuleType | None:
    """The module of Triton kernels of that name where there are a GPU, Triton and the wish."""
    able = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    return importlib.import_module(module) if able and wished(unasked=False) else None


def on_device(x: Tensor) -> bool:
    """Whether kernels can take ``x``: on a GPU since Ampere, not float64."""
    return (
        x.is_cuda
        and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


# --- C++ ---------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def compiled(source: Path) -> ctypes.CDLL | None:
    """The library of that .cpp; None where it is not wished or cannot be compiled.

    It is compiled once for a machine, by ``$CXX`` or ``c++``, into the user's cache folder.
    """
    if not wished(unasked=True):
        return None
    try:
        return ctypes.CDLL(str(_library(source)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # no home, no compiler
        logger.warning(
            "the kernel %s does not compile, so PyTorch runs in its place, more slowly (%s); "
            "set CXX to GCC 12, clang 14 or newer, or LRPE_FAIRSEQ_KERNELS=0",
            source.name,
            _reason(error),
        )
        return None


def _reason(error: Exception) -> str:
    """The line that says what is wrong: of a compiler's, its first error."""
    lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    return next((line for line in lines if "error" in line), [*lines, type(error).__name__][0])


def _library(source: Path) -> Path:
    """That of this machine, from the cache folder or put there, whole, now."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), *FLAGS]
    read = [path.read_bytes() for path in (source, *sorted(HEADERS.glob("*.h")))]
    made_of = (*read, " ".join(command).encode(), _processor().encode())
    name = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    target = _cache() / f"{source.stem}-{name}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder, target.name)
            done = [*command, "-o", str(built), str(source)]
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


class _View(ctypes.Structure):
    """``Tensor`` of vectors.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("batch", "head", "time")),
    ]


def views(*tensors: Tensor | None) -> ctypes.Array:
    """What C++ sees of tensors (B, H, T, .) or (B, H, T)."""
    found = (_View() if x is None else _View(x.data_ptr(), *x.stride()[:3]) for x in tensors)
    return (_View * len(tensors))(*found)


def rows(x: Tensor) -> Tensor:
    """``x`` as it is, with every row in one piece of memory."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
