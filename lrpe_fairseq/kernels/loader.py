"""Find, compile and load the kernels: C++ on a CPU, Triton on a GPU.

The environment variable ``LRPE_FAIRSEQ_KERNELS`` selects the kernels:

- unset: all kernels that the device supports.
- ``0``: no kernels; PyTorch is used everywhere.
- ``1``: as unset, and a warning says why a GPU does not run the Triton kernels.

Any other value raises ValueError when a kernel is first requested.
"""

import atexit
import ctypes
import hashlib
import importlib
import importlib.util
import itertools
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.kernels.conditions import called_in_tracing, is_captured, is_transformed

VARIABLE = "LRPE_FAIRSEQ_KERNELS"
HEADERS = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", f"-I{HEADERS}")
AMPERE = (8, 0)
"""Minimum compute capability of the Triton kernels."""

OLDEST_TRITON = (3, 4)
"""Triton 3.3 does not compile flash attention, and 3.2 ends the process on linear attention."""

INTERPRETER = "Triton's interpreter"

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

logger = logging.getLogger(__name__)


def kernels_enabled() -> bool:
    """Return False if ``LRPE_FAIRSEQ_KERNELS`` is 0, True if it is 1 or unset.

    Raises: ValueError for any other value.
    """
    value = os.environ.get(VARIABLE)
    if value not in (None, "0", "1"):
        raise ValueError(
            f"{VARIABLE} must be 0 (no kernels), 1 or unset (all kernels), not {value!r}"
        )
    return value != "0"


def kernels_in_use(device: str | None = None) -> dict[str, str]:
    """Return the kernels that are available on ``device``, for run files.

    Args: device: "cuda" or "cpu"; None means "cuda" if a GPU is available.
    Returns: ``device``; ``causal`` and ``encode``, each "cpu-c++", "triton" or "pytorch"; and
        ``reason`` if PyTorch is used. Some calls use PyTorch in any case, for example those in half
        precision on a CPU.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kernels, reason = _kernels_of(device)
    record = {"device": device, **kernels}
    return {**record, "reason": reason} if "pytorch" in kernels.values() else record


SERVED: dict[str, list[str]] = {}
"""Kernel names by operation, for the run file; see :func:`log_served`."""


@called_in_tracing
def log_served(what: str, kernel: str, device: str) -> None:
    """Record, and log once, which kernel computes ``what``, such as "softmax attention of t5".

    Run files have these records: :func:`.fairseq_log.served` reads them in a log.
    """
    known = SERVED.setdefault(what, [])
    kernel = f"{kernel} on {device}"
    if kernel not in known:
        known.append(kernel)
        logger.info("%s runs as %s", what, kernel)


def _kernels_of(device: str) -> tuple[dict[str, str], str]:
    names = ("causal", "encode")
    if device != "cpu":
        reason = why_unsupported() or _why_triton_fails()
        return dict.fromkeys(names, "pytorch" if reason else "triton"), reason
    reason = "the C++ kernels do not compile here"
    if not kernels_enabled():
        reason = f"{VARIABLE}=0"
    modules = (
        importlib.import_module("lrpe_fairseq.kernels.linear.causal_cpu"),
        importlib.import_module("lrpe_fairseq.kernels.encode.encode_cpu"),
    )
    kernels = {}
    for name, module in zip(names, modules, strict=True):
        kernels[name] = "pytorch" if module.library() is None else "cpu-c++"
    return kernels, reason


# --- Triton ------------------------------------------------------------------------------------


def triton_kernels(module: str) -> ModuleType | None:
    """Import the Triton kernels, or return None without Triton or an Ampere or newer NVIDIA GPU.

    Also None with a Triton that is older than OLDEST_TRITON, and under torch.compile and similar
    transformations, where PyTorch is used. While a CUDA graph is captured, a module that has not
    been used before is None: whether Triton runs is found by a kernel whose result is read.
    """
    return None if is_transformed() else _after_first_use(module)


def has_triton_kernels(module: str) -> bool:
    """True if :func:`triton_kernels` has the module in eager execution."""
    return _after_first_use(module) is not None


_used: set[str] = set()
"""The modules of kernels that have been asked for."""


def _after_first_use(module: str) -> ModuleType | None:
    if module not in _used and _captures():
        return None
    _used.add(module)
    return _triton_kernels(module)


def _captures() -> bool:
    """True while a CUDA graph is captured on the current device."""
    return torch.cuda.is_initialized() and is_captured(torch.device("cuda"))


@lru_cache(maxsize=8)
def _triton_kernels(module: str) -> ModuleType | None:
    # each call then asks for the device of its own tensors: see on_device
    unsupported = "" if _has_gpu_for_kernels() else why_unsupported()
    reason = unsupported or _why_too_old() or _why_triton_fails()
    # a machine without a GPU is no reason to warn, unless kernels were asked for
    asked = os.environ.get(VARIABLE) == "1" and torch.cuda.is_available()
    if reason and (asked or not unsupported):
        logger.warning("the Triton kernels of %s are not used: %s", module, reason)
    return None if reason else importlib.import_module(module)


def why_unsupported() -> str:
    """Return the reason why the current device does not support the Triton kernels, if any."""
    if not kernels_enabled():
        return f"{VARIABLE}=0"
    return "" if _interpreting else _why_gpu_unsupported()


def _why_gpu_unsupported() -> str:
    if not torch.cuda.is_available():
        return "no GPU is available"
    if is_rocm():
        name = torch.cuda.get_device_name()
        return f"{name} runs ROCm, and the kernels have NVIDIA's instructions, so PyTorch is used"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability() < AMPERE:
        name = torch.cuda.get_device_name()
        return f"{name} is older than Ampere (compute capability 8.0), so PyTorch is used"
    return ""


@lru_cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU. torch takes longer to say it than a small kernel."""
    return torch.cuda.get_device_capability(device)


def _gpus_for_kernels() -> list[int]:
    """Return the numbers of the GPUs that are new enough for the Triton kernels."""
    numbers = range(torch.cuda.device_count())
    return [n for n in numbers if capability_of(torch.device("cuda", n)) >= AMPERE]


def _has_gpu_for_kernels() -> bool:
    """True if a GPU of this process supports the kernels, be it the current one or not."""
    if not kernels_enabled() or not torch.cuda.is_available() or is_rocm():
        return False
    return importlib.util.find_spec("triton") is not None and bool(_gpus_for_kernels())


def is_rocm() -> bool:
    """True for a torch that is built for AMD GPUs, which call themselves "cuda".

    Their compute capability says nothing: that of gfx942 is (9, 4).
    """
    return torch.version.hip is not None


def release_of(version: str) -> tuple[int, ...]:
    """Return the release of a version of Triton: (3, 10) of "3.10.0+git1"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _why_too_old() -> str:
    """Return the reason why this release of Triton does not compile the kernels, if it does not."""
    version = importlib.import_module("triton").__version__
    if release_of(version) >= OLDEST_TRITON:
        return ""
    needed = ".".join(map(str, OLDEST_TRITON))
    return (
        f"they need Triton {needed} or newer (torch 2.8 or newer), and this is {version}, "
        "so PyTorch is used"
    )


@lru_cache(maxsize=1)
def _why_triton_fails() -> str:
    """Run a small kernel; return the reason if Triton cannot, for example without a C compiler."""
    try:
        device = "cpu" if _interpreting else f"cuda:{_gpu_to_probe()}"
        # a new thread has no dispatch mode, such as fake tensors
        with ThreadPoolExecutor(max_workers=1) as pool:
            pool.submit(_probe, device).result()
    except Exception as error:  # whatever Triton, its compiler or CUDA raises
        return (
            f"Triton does not run here ({_reason(error)}); it needs a C compiler and a writable "
            f"cache folder (TRITON_CACHE_DIR); {VARIABLE}=0 ends this warning"
        )
    return ""


def _gpu_to_probe() -> int:
    """Return the number of the current GPU, or of the first that supports the kernels."""
    current = torch.cuda.current_device()
    supported = _gpus_for_kernels()
    return supported[0] if supported and current not in supported else current


def _probe(device: str) -> None:
    importlib.import_module("lrpe_fairseq.kernels.probe_triton").run(device)


_interpreting = False


def interpret(*, on: bool = True) -> None:
    """Let Triton's interpreter run the kernels on CPU tensors: for tests and ``doctor --kernels``.

    It needs TRITON_INTERPRET=1 before triton is imported. It is slow, and knows no bfloat16.
    """
    global _interpreting
    _interpreting = on
    _used.clear()
    _triton_kernels.cache_clear()
    _why_triton_fails.cache_clear()


class LaunchError(RuntimeError):
    """A Triton kernel did not compile or could not be launched."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a Triton kernel on the device of its first argument; see :func:`_launch`.

    Raises: LaunchError for whatever Triton, its compilers or CUDA raise. No argument has changed
        then, apart from the memory of results.
    """
    try:
        _launch(kernel, grid, args, constants)
    except Exception as error:
        name = getattr(kernel, "__name__", type(kernel).__name__)
        raise LaunchError(f"{name}: {_reason(error)} ({type(error).__name__})") from error


def _launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Launch a Triton kernel.

    Triton itself launches on the current device. ``grid``: number of programs on each axis; CUDA
    allows 2^31 - 1 on the first and 65,535 on the others, so what grows with the input is first.
    A compiled kernel is kept for calls that differ in nothing its code depends on: Triton's own
    search for it takes longer, and a training step is often as fast as the host.
    """
    with torch.cuda.device_of(args[0]):
        key = _key(kernel, args, constants)
        known = _compiled.get(key)
        if known is not None:
            compiled, rest = known
            compiled[(*grid, 1, 1)](*args, *rest)
            return
        compiled = kernel[grid](*args, **constants)
        if compiled is not None and _runs_compiled():
            names = kernel.arg_names[len(args) :]
            _compiled[key] = compiled, [constants[name] for name in names]


_compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}
"""Compiled kernels and their constants in order, by all that the code depends on."""


class _Arguments(NamedTuple):
    """Which arguments of a kernel its code depends on."""

    kernel: Any
    """Held, because its id may belong to another kernel when it is gone."""
    specialized: tuple[int, ...]
    """Places of arguments for whose properties Triton specializes."""
    sizes: tuple[int, ...]
    """Places of integers (``do_not_specialize``): only their width counts."""


_arguments: dict[int, _Arguments] = {}
"""By the id of the kernel."""


def _arguments_of(kernel: Any, count: int) -> _Arguments:
    params = getattr(kernel, "params", ())[:count]
    sizes = tuple(n for n, x in enumerate(params) if getattr(x, "do_not_specialize", False))
    others = tuple(n for n in range(count) if n not in sizes)
    return _arguments.setdefault(id(kernel), _Arguments(kernel, others, sizes))


def _key(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """Return all that the compiled code of a call depends on.

    For a tensor that is its type, and if it is aligned to 16 bytes; for an integer if it is 1, a
    multiple of 16, or wider than 32 bits. At the places of sizes are integers, for which the width
    alone counts, or None, which a constant says. Bool is no argument of a kernel.
    """
    _, specialized, sizes = _arguments.get(id(kernel)) or _arguments_of(kernel, len(args))
    key = [id(kernel), args[0].device, *constants, *constants.values()]
    for n in specialized:
        x = args[n]
        if isinstance(x, Tensor):
            key += x.dtype, x.data_ptr() % 16 == 0
        elif isinstance(x, int):
            key.append((x % 16 == 0) + 2 * (x == 1) + 4 * (x.bit_length() > 31))
        else:
            key.append(type(x))
    wide = [n for n in sizes if args[n] is not None and not -WIDE < args[n] < WIDE]
    return *key, *wide


WIDE = 2**31
"""Smallest integer of more than 32 bits with its sign."""


@lru_cache(maxsize=1)
def _runs_compiled() -> bool:
    """True if a compiled kernel takes all arguments of its source, as from Triton 3.3 on."""
    return importlib.import_module("lrpe_fairseq.kernels.probe_triton").runs_compiled("cuda")


def on_device(x: Tensor) -> bool:
    """True if Triton kernels support ``x``: on an Ampere or newer NVIDIA GPU, not float64."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    return _is_new(x.device) if x.is_cuda else runs_on(x.device)


def runs_on(device: torch.device) -> bool:
    """True for an Ampere or newer NVIDIA GPU, and for a CPU in Triton's interpreter."""
    if device.type == "cuda":
        return _is_new(device)
    return _interpreting and device.type == "cpu"


def _is_new(gpu: torch.device) -> bool:
    return not is_rocm() and capability_of(gpu) >= AMPERE


# --- C++: compile ------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def load_library(source: Path) -> ctypes.CDLL | None:
    """Load the library of the .cpp file ``source``.

    It is compiled once per machine with ``$CXX`` or ``c++`` into the user's cache folder. Its
    attribute ``Call`` is the C++ struct of that name.
    Returns: None, with a warning, if it does not compile; None if kernels are disabled.
    Raises: ImportError if ``Tensor`` differs between C++ and Python. This is a bug.
    """
    if not kernels_enabled():
        return None
    try:
        library = ctypes.CDLL(str(_library(source)))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        logger.warning(
            "the kernel %s does not compile, so the slower PyTorch code is used (%s); "
            "set CXX to GCC 12, clang 14 or newer, or %s=0",
            source.name,
            _reason(error),
            VARIABLE,
        )
        return None
    library.Call = _call(library)
    return library


def _reason(error: Exception) -> str:
    """Return the first error line of a compiler's output, or the first line of another error."""
    said = _said_by_triton(error) or getattr(error, "stderr", None) or str(error)
    lines = said.strip().splitlines()
    for line in lines:
        if "error" in line:
            return line
    return lines[0] if lines else type(error).__name__


def _said_by_triton(error: BaseException | None) -> str:
    """Return what Triton's compiler says of the innermost function; "" for another error.

    The text of its errors begins with a place in the source. Errors of functions that a kernel
    calls are their cause.
    """
    found = ""
    while error is not None:
        found = getattr(error, "error_message", None) or found
        error = error.__cause__
    return found


def _library(source: Path) -> Path:
    """Return the path of the library for this machine; compile it if it is not in the cache."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), *FLAGS]
    read = [path.read_bytes() for path in (source, *sorted(HEADERS.glob("*.h")))]
    # another compiler, processor, source or flag gives another file
    made_of = (*read, " ".join(command).encode(), _processor().encode())
    digest = hashlib.sha256(b"\0".join(made_of)).hexdigest()
    name = f"{source.stem}-{digest[:16]}.so"
    target = _cache() / name
    if target.is_symlink() or target.exists():
        if not _is_private(target):
            logger.warning(
                "%s is not a private file of this user, so the kernel is compiled elsewhere", target
            )
            target = _temporary_folder() / name
        if _is_complete(target):
            return target
    _compile([*command, str(source)], target)
    return target


@lru_cache(maxsize=1)
def _log_compiling() -> None:
    """Say once in a process why its first update, or call, takes up to minutes."""
    logger.info("compiling the CPU kernels, once for this machine")


def _compile(command: list[str], target: Path) -> None:
    """Compile to ``target`` atomically, with a checksum appended, accessible to this user only."""
    _log_compiling()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # other processes may compile the same file now: each writes its own, and the last replaces
        built = Path(folder, target.name)
        done = [*command, "-o", str(built)]
        subprocess.run(done, check=True, capture_output=True, text=True, timeout=300)
        content = built.read_bytes()
        with open(built, "ab") as file:
            file.write(hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        built.chmod(0o700)
        built.replace(target)


def _is_complete(library: Path) -> bool:
    """True if the file ends with the checksum of its content, which :func:`_compile` appended.

    The dynamic linker ignores data after the sections. Loading a truncated library would crash the
    process without a message.
    """
    try:
        content = library.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return content[-size:] == hashlib.sha256(content[:-size]).digest()


def _is_private(path: Path) -> bool:
    """True for a regular file or folder that is owned by, and writable for, this user only."""
    status = path.lstat()  # not that of the target of a link, which others may replace
    plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return plain and status.st_uid == os.getuid() and not status.st_mode & WRITABLE_BY_OTHERS


def _cache() -> Path:
    """Return the user's cache folder, mode 0700, or a temporary folder if it cannot be used."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "lrpe_fairseq"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = "" if _is_private(folder) else "is not a private folder of this user"
        if not os.access(folder, os.W_OK | os.X_OK):
            reason = "is not writable"
    except (OSError, RuntimeError) as error:  # no home folder
        folder = "the cache folder"
        reason = f"cannot be used ({error})"
    if not reason:
        return folder
    elsewhere = _temporary_folder()
    logger.warning("%s %s, so kernels are compiled in %s", folder, reason, elsewhere)
    return elsewhere


@lru_cache(maxsize=1)
def _temporary_folder() -> Path:
    """Create a folder for this process, mode 0700, which is removed at exit."""
    folder = tempfile.mkdtemp(prefix="lrpe_fairseq-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _processor() -> str:
    """Return the properties of the processor on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    kept = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "\n".join(sorted(kept))


# --- C++: arguments ----------------------------------------------------------------------------


class View(ctypes.Structure):
    """``Tensor`` of vectors.h: data and the strides of (B, H, T, .) in elements."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "time")),
    ]


class Field(ctypes.Structure):
    """``Field`` of vectors.h: one field of a struct."""

    _fields_ = [("name", ctypes.c_char_p), ("kind", ctypes.c_char_p)]


KINDS = {
    b"int64": ctypes.c_int64,
    b"double": ctypes.c_double,
    b"pointer": ctypes.c_void_p,
    b"Tensor": View,
}


def _fields(library: ctypes.CDLL, table: str) -> list[tuple[str, Any]]:
    """Return the fields of a C++ struct. ``table`` lists them; its last row has no name."""
    rows = ctypes.pointer(Field.in_dll(library, table))
    fields = []
    for index in itertools.count():
        row = rows[index]
        if not row.name:
            break
        fields.append((row.name.decode(), KINDS[row.kind]))
    return fields


def _call(library: ctypes.CDLL) -> type[ctypes.Structure]:
    """Return ``Call`` of a library; other keywords than its fields raise AttributeError.

    Raises: ImportError if :class:`View` is not ``Tensor`` of vectors.h.
    """
    if _fields(library, "tensor_fields") != View._fields_:
        raise ImportError("loader.View and Tensor of vectors.h have different fields")
    fields = {"_fields_": _fields(library, "call_fields"), "__slots__": ()}
    return type("Call", (ctypes.Structure,), fields)


def set_views(call: ctypes.Structure, tensors: dict[str, Tensor | None]) -> None:
    """Set fields of a ``Call`` to views of tensors (B, H, T, .) or (B, H, T); None has no data."""
    for name, x in tensors.items():
        setattr(call, name, View() if x is None else View(x.data_ptr(), *x.stride()[:3]))


def pointer(x: Tensor | None) -> int | None:
    """Return the address of a contiguous tensor's data, or None."""
    return None if x is None else x.data_ptr()


def contiguous_rows(x: Tensor) -> Tensor:
    """Return ``x``, copied unless every row (last axis) is contiguous in memory."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def empty_rows(x: Tensor) -> Tensor:
    """Return memory of the shape and dtype of ``x`` whose rows (last axis) are contiguous.

    It is laid out as ``x`` if it can be. ``torch.empty_like`` alone has other rows for columns, and
    for rows that overlap, such as windows of ``unfold``.
    """
    out = torch.empty_like(x)
    return out if out.stride(-1) == 1 or out.shape[-1] == 1 else x.new_empty(x.shape)
