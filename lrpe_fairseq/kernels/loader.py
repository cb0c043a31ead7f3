"""Find, compile and load the kernels: C++ on a CPU, Triton on a GPU.

The environment variable ``LRPE_FAIRSEQ_KERNELS`` decides which kernels may run:

- unset: those in C++. The Triton kernels pass their tests in Triton's interpreter and compile for
  A100 and H100, but have not been run on a GPU yet.
- ``0``: none; the PyTorch forms run everywhere.
- ``1``: all, those in Triton included.

Any other value is refused with a ValueError when a kernel is first looked for.
"""

import atexit
import ctypes
import hashlib
import importlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from lrpe_fairseq.kernels.dispatch import is_transformed

VARIABLE = "LRPE_FAIRSEQ_KERNELS"
HEADERS = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", f"-I{HEADERS}")
AMPERE = (8, 0)
"""Compute capability that the Triton kernels need."""

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

logger = logging.getLogger(__name__)


class LayoutError(ImportError):
    """A struct differs between C++ and Python. Never turned into a slower form: it is a bug."""


def kernels_enabled(default: bool) -> bool:
    """What ``LRPE_FAIRSEQ_KERNELS`` says; ``default`` where it is unset.

    Raises: ValueError for a value other than 0 and 1.
    """
    value = os.environ.get(VARIABLE)
    if value not in (None, "0", "1"):
        raise ValueError(
            f"{VARIABLE} must be 0 (no kernels), 1 (all kernels) or unset (C++ only), not {value!r}"
        )
    return default if value is None else value == "1"


def kernels_in_use(device: str | None = None) -> dict[str, str]:
    """Which form computes causal sums and encodings on ``device``, for run files.

    Returns: ``device``; ``causal`` and ``encode``, each "cpu-c++", "triton" or "pytorch"; and
        ``reason`` where PyTorch serves. Single calls may still need PyTorch, for example in half
        types on a CPU. ``device`` is "cuda" or "cpu"; None means "cuda" where there is a GPU.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    forms, reason = _forms_of(device)
    found = {"device": device, **forms}
    return {**found, "reason": reason} if "pytorch" in forms.values() else found


def _forms_of(device: str) -> tuple[dict[str, str], str]:
    names = ("causal", "encode")
    if device != "cpu":
        reason = _why_no_triton()
        return dict.fromkeys(names, "pytorch" if reason else "triton"), reason
    reason = "the C++ kernels do not compile here"
    if not kernels_enabled(default=True):
        reason = f"{VARIABLE}=0"
    modules = (importlib.import_module(f"lrpe_fairseq.kernels.{name}_cpu") for name in names)
    loaded = (module.library() is not None for module in modules)
    return {
        n: "cpu-c++" if able else "pytorch" for n, able in zip(names, loaded, strict=True)
    }, reason


# --- Triton ------------------------------------------------------------------------------------


def triton_kernels(module: str) -> ModuleType | None:
    """Import the Triton kernels, or return None without opt-in, a GPU since Ampere, or Triton.

    None under torch.compile and the like, where the PyTorch forms serve.
    """
    return None if is_transformed() else _triton_kernels(module)


@lru_cache(maxsize=8)
def _triton_kernels(module: str) -> ModuleType | None:
    reason = _why_no_triton()
    if reason and kernels_enabled(default=False) and torch.cuda.is_available():
        logger.warning("the Triton kernels of %s are not used: %s", module, reason)
    return None if reason else importlib.import_module(module)


def _why_no_triton() -> str:
    """The reason for which no Triton kernel runs here; empty if they do."""
    if not kernels_enabled(default=False):
        return f"the Triton kernels run only with {VARIABLE}=1"
    if not torch.cuda.is_available():
        return "there is no GPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability() < AMPERE:
        name = torch.cuda.get_device_name()
        return f"{name} is older than Ampere (compute capability 8.0), so the PyTorch forms run"
    return ""


def on_device(x: Tensor) -> bool:
    """True if Triton kernels can take ``x``: on a GPU since Ampere, not float64."""
    return (
        x.is_cuda
        and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and torch.cuda.get_device_capability(x.device) >= AMPERE
    )


# --- C++: compile ------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def compiled(source: Path, call: type[ctypes.Structure]) -> ctypes.CDLL | None:
    """Load the library of that .cpp file; None where kernels are off or it does not compile.

    It is compiled once for a machine, by ``$CXX`` or ``c++``, into the user's cache folder.
    ``call`` is the Python form of the C++ struct ``Call``.
    Raises: LayoutError if the two, or those of ``Tensor``, differ.
    """
    if not kernels_enabled(default=True):
        return None
    try:
        library = ctypes.CDLL(str(_library(source)))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        logger.warning(
            "the kernel %s does not compile, so PyTorch runs in its place, more slowly (%s); "
            "set CXX to GCC 12, clang 14 or newer, or %s=0",
            source.name,
            _reason(error),
            VARIABLE,
        )
        return None
    check_layout(library, "tensor_fields", View)
    check_layout(library, "call_fields", call)
    return library


def _reason(error: Exception) -> str:
    """The first error line of a compiler's output, or the first line of another error."""
    lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    return next((line for line in lines if "error" in line), [*lines, type(error).__name__][0])


def _library(source: Path) -> Path:
    """The library for this machine, from the cache folder or compiled into it now."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), *FLAGS]
    read = [path.read_bytes() for path in (source, *sorted(HEADERS.glob("*.h")))]
    made_of = (*read, " ".join(command).encode(), _processor().encode())
    digest = hashlib.sha256(b"\0".join(made_of)).hexdigest()
    name = f"{source.stem}-{digest[:16]}.so"
    target = _cache() / name
    if target.is_symlink() or target.exists():
        if not _is_private(target):
            logger.warning("%s is not ours alone, so the kernel is compiled elsewhere", target)
            target = _temporary_folder() / name
        if _is_whole(target):
            return target
    _compile([*command, str(source)], target)
    return target


def _compile(command: list[str], target: Path) -> None:
    """Compile into ``target`` whole or not at all, readable by the user alone, with a checksum."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
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


def _is_whole(library: Path) -> bool:
    """True if the file ends with the checksum of all before it, which :func:`_compile` appended.

    The dynamic linker ignores what follows the sections. Loading half a library would end the
    process without a message.
    """
    try:
        content = library.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return content[-size:] == hashlib.sha256(content[:-size]).digest()


def _is_private(path: Path) -> bool:
    """True for a plain file or folder of this user that nobody else can write."""
    found = path.lstat()
    plain = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    return plain and found.st_uid == os.getuid() and not found.st_mode & WRITABLE_BY_OTHERS


def _cache() -> Path:
    """The user's cache folder, mode 0700, or a private temporary folder where it cannot serve."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "lrpe_fairseq"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = "" if _is_private(folder) else "is not ours alone"
        if not os.access(folder, os.W_OK | os.X_OK):
            reason = "is not writable"
    except (OSError, RuntimeError) as error:  # no home
        folder, reason = "the cache folder", f"cannot be used ({error})"
    if not reason:
        return folder
    elsewhere = _temporary_folder()
    logger.warning("%s %s, so kernels are compiled in %s", folder, reason, elsewhere)
    return elsewhere


@lru_cache(maxsize=1)
def _temporary_folder() -> Path:
    """A folder of this process, mode 0700, removed at its end."""
    folder = tempfile.mkdtemp(prefix="lrpe_fairseq-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _processor() -> str:
    """The properties of the processor that -march=native depends on."""
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

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("offset", "size")),
    ]


KINDS = {
    ctypes.c_int64: b"int64",
    ctypes.c_double: b"double",
    ctypes.c_void_p: b"pointer",
    View: b"Tensor",
}


def check_layout(library: ctypes.CDLL, table: str, structure: type[ctypes.Structure]) -> None:
    """Compare the fields of ``structure`` with the C++ struct that ``table`` describes.

    ``table`` is an array of Field; its last row has no name and the size of the whole struct.
    Raises: LayoutError, naming the first difference.
    """
    names = [name for name, _ in structure._fields_]
    rows = (Field * (len(names) + 1)).in_dll(library, table)
    for row, (name, kind) in zip(rows, structure._fields_, strict=False):
        place = getattr(structure, name)
        ours = (name.encode(), KINDS[kind], place.offset, place.size)
        theirs = (row.name, row.kind, row.offset, row.size)
        if ours != theirs:
            raise LayoutError(f"{structure.__name__} in Python has {ours}, C++ has {theirs}")
    last = rows[len(names)]
    if last.name is not None or last.size != ctypes.sizeof(structure):
        raise LayoutError(f"{structure.__name__} has another size in C++ than in Python")


def view(x: Tensor | None) -> View:
    """What C++ sees of a tensor (B, H, T, .) or (B, H, T); no data for None."""
    return View() if x is None else View(x.data_ptr(), *x.stride()[:3])


def pointer(x: Tensor | None) -> int | None:
    """The address of a contiguous tensor's data."""
    return None if x is None else x.data_ptr()


def contiguous_rows(x: Tensor) -> Tensor:
    """``x``, copied unless every row (last axis) is contiguous in memory."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
