"""Read fairseq's checkpoints with torch's safe loading, without fairseq.

What they hold beside tensors is allowed by name. Options without a dataclass are an
``argparse.Namespace``. The best metric and the meters of BLEU, Pearson and MCC are numpy's arrays
and scalars.

Trap: numpy's own globals are not safe to allow. The state of a dtype comes from the file, and a
state that hides its object flag makes numpy read bytes of the file as addresses of Python objects,
which crashes or runs code. Stand-ins that only build numbers are registered under numpy's names
instead, for the names of numpy 2 and of numpy 1, and only while a checkpoint of fairseq loads.
Programs such as ``transformers.Trainer`` allow numpy's own.
"""

import contextlib
import threading
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

NUMERIC_KINDS = "biufc"
"""Kinds of dtype that a checkpoint may name: bool, signed, unsigned, float, complex."""


class _NumericDtype:
    """Replaces ``numpy.dtype`` while a checkpoint loads. Holds the code of a number type only."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        self.str = _numeric(code).str

    def __setstate__(self, state: tuple) -> None:
        self.str = _numeric(state[1] + self.str[1:]).str  # state[1]: byte order


class _NumericArray(np.ndarray):
    """Replaces ``numpy.ndarray`` while a checkpoint loads. It is saved as a plain array."""

    def __new__(cls) -> "_NumericArray":
        return super().__new__(cls, (0,))

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, fortran, data = state
        if self.size:  # a tensor made from this array may share its memory, which would be freed
            raise UnpicklingError("an array in a checkpoint is filled twice")
        super().__setstate__((1, shape, _numeric(dtype.str), fortran, data))

    def __reduce_ex__(self, protocol: int) -> tuple:
        return self.view(np.ndarray).__reduce_ex__(protocol)


def _numeric(code: str) -> np.dtype:
    """Return the dtype of ``code``. Everything else in the file about the dtype is ignored."""
    dtype = np.dtype(code)
    if dtype.kind not in NUMERIC_KINDS:
        raise UnpicklingError(f"a checkpoint may hold numbers only, not the dtype {code!r}")
    return dtype


def _reconstruct(kind: type, shape: tuple, code: bytes) -> _NumericArray:
    """Return an array for ``__setstate__`` to fill. The arguments, as numpy pickles them, are not
    needed."""
    return _NumericArray()


def _scalar(dtype: _NumericDtype, data: bytes) -> np.generic:
    """Return the one number in ``data``."""
    (value,) = np.frombuffer(data, _numeric(dtype.str))
    return value


def _numpy_stand_ins() -> list[tuple[Callable, str]]:
    stand_ins = [(_NumericDtype, "numpy.dtype"), (_NumericArray, "numpy.ndarray")]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):  # numpy 2, numpy 1
        stand_ins += [(_reconstruct, f"{module}._reconstruct"), (_scalar, f"{module}.scalar")]
    return stand_ins


ALLOWED = [Namespace, *_numpy_stand_ins()]
"""Arguments of ``torch.serialization.add_safe_globals``."""

_lock = threading.RLock()
"""What is allowed belongs to the process: two threads that load at once take turns."""


@contextlib.contextmanager
def allowed(*more: type) -> Iterator[None]:
    """Allow what fairseq's checkpoints hold, and ``more``, for ``torch.load`` within the block.

    Trap: torch keeps what is allowed in a set. If two entries have one name, as numpy's own dtype
    and its stand-in, chance decides which of them serves. So the stand-ins replace the others.
    """
    names = {name for _, name in _numpy_stand_ins()}
    with _lock:
        others = torch.serialization.get_safe_globals()
        kept = [other for other in others if _name(other) not in names]
        _set_safe_globals([*kept, *ALLOWED, *more])
        try:
            yield
        finally:
            _set_safe_globals(others)


def _set_safe_globals(entries: list[Any]) -> None:
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(entries)


def _name(entry: Any) -> str:
    """Return the name of an entry of torch's safe globals, as files spell it."""
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def load(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint, read with torch's safe loading.

    Raises: ValueError, one sentence, if it is absent, damaged or not a checkpoint of fairseq.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a checkpoint in it")
    # torch's error for it has a paragraph about formats of old releases
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} does not load: it is truncated, or not a checkpoint")
    state = _read(path, mmap=True)
    # other programs save state dicts and whole models under the same suffix
    if not isinstance(state, dict) or "optimizer_history" not in state or not state.get("cfg"):
        raise ValueError(f"{path} is not a checkpoint of fairseq-train")
    return state


def load_any(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint of any age, also in torch's form of before 2020.

    Raises: ValueError, one sentence, if it is absent or damaged, or has no weights.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    state = _read(path, mmap=zipfile.is_zipfile(path))
    if not isinstance(state, dict) or "model" not in state:
        raise ValueError(f"{path} is not a checkpoint of fairseq-train")
    return state


def _read(path: Path, mmap: bool) -> Any:
    try:
        with allowed():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises various types
        raise ValueError(
            f"{path} does not load: it is damaged, or contains Python objects that could run code "
            f"({type(error).__name__})"
        ) from None


def load_sound(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint after verifying the checksums of its archive.

    torch does not verify them, so damaged weights load without an error.

    Raises: ValueError, one sentence, as :func:`load` does, and for a wrong checksum.
    """
    state = load(path)
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return state


def require_finite(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError, one sentence, if the weights of a checkpoint are not finite numbers."""
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(
                f"{path} is of a diverged training: {name} contains values that are not finite"
            )
