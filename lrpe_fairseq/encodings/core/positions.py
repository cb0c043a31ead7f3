"""Positions of tokens: their checks, what attention knows of them, and what is cached by them.

Axes: B batch, H heads, T time, X anything.
"""

from collections.abc import Callable
from functools import lru_cache
from operator import is_
from typing import Any

import torch
from torch import Tensor

from lrpe_fairseq.encodings.core.companions import POSITIONS, check_companion
from lrpe_fairseq.kernels.conditions import is_captured, is_transformed

Lags = tuple[int, int]
"""The smallest and the largest lag s - t of a call."""


def check_positions(positions: Tensor, x: Tensor, name: str = "positions") -> Tensor:
    """Return ``positions`` if it is int64 (T,) or (B, T), on the device of x (B, ..., T, D).

    Floating-point positions are refused because float32 cannot represent all integers above 2^24.
    Other shapes, such as (T, 2), are refused because they would broadcast as a batch.
    Raises: ValueError for these.
    """
    batch, length = x.shape[0], x.shape[-2]
    shapes = (length,), (batch, length)
    return check_companion(name, positions, POSITIONS, "(T,) or (B, T)", shapes, x)


def exact_type(device: torch.device) -> torch.dtype:
    """Return the dtype of angles: float64, or float32 on a device without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def over_heads(per_position: Tensor, positions: Tensor) -> Tensor:
    """Add an axis for the heads: (T, X) is returned unchanged, (B, T, X) as (B, 1, T, X)."""
    return per_position if positions.dim() == 1 else per_position.unsqueeze(1)


def counted(end: int, device: torch.device, first: int = 0) -> Tensor:
    """Return first, ..., end - 1 (int64); the same tensor object for the same arguments."""
    # a traced or fake tensor must not be cached; a CUDA graph counts in every replay
    if is_transformed() or is_captured(device):
        return with_known_range(torch.arange(first, end, device=device), first, end - 1)
    return _cached_count(end, device, first)


@lru_cache(maxsize=256)
def _cached_count(end: int, device: torch.device, first: int) -> Tensor:
    with torch.inference_mode(False):
        return with_known_range(torch.arange(first, end, device=device), first, end - 1)


def with_known_range(positions: Tensor, first: int, last: int) -> Tensor:
    """Note on ``positions`` (T,) or (B, T) that attention has counted them from first to last.

    If there are last - first + 1 of them, each row has every number once, and (T,) has them in
    order. The note is an attribute of this tensor object; :func:`known_range` reads it.
    """
    positions.known_range = first, last
    return positions


def known_range(positions: Tensor) -> tuple[int, int] | None:
    """Return the smallest and largest position, without reading them; None if it is not known."""
    return getattr(positions, "known_range", None)


def known_lags(q_positions: Tensor, k_positions: Tensor) -> Lags | None:
    """Return the smallest and largest lag s - t, without reading; None if it is not known."""
    of_q, of_k = known_range(q_positions), known_range(k_positions)
    if of_q is None or of_k is None or of_k[1] < of_k[0]:
        return None
    return of_q[0] - of_k[1], of_q[1] - of_k[0]


BLOCKS = 8
"""Number of blocks of queries whose positions a cache keeps."""


def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``values`` on a device; the same tensor for the same arguments, copied there once."""
    if is_transformed():  # a traced or fake tensor must not be cached
        return torch.tensor(values, dtype=dtype, device=device)
    known = _cached_constant(values, dtype, device)
    if is_captured(device):
        _of_graphs[values, dtype, device] = known
    return known


_of_graphs: dict[tuple[tuple[float, ...], torch.dtype, torch.device], Tensor] = {}
"""Constants that CUDA graphs read by address, so that they are kept."""


@lru_cache(maxsize=256)
def _cached_constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def _is_recorded(tensors: tuple[Tensor, ...]) -> bool:
    """True if a graph of operations is recorded, by a compiler, a tracer or CUDA."""
    return is_transformed() or (bool(tensors) and is_captured(tensors[0].device))


class PositionCache:
    """A cache of the last values computed from some tensors, outside the state dict.

    Attention passes the *same* positions object to every layer and step of one length, so tensors
    are compared by identity: no values are compared and no device is synchronized. An in-place
    edit invalidates the entry. Trap: an edit through ``.data`` does not, so a parameter or buffer
    may be a source only if its values are checked as well.

    Threads may share a cache: the entries are one tuple, replaced after a value is computed.

    size: the number of values. Two serve cross-attention, which alternates between the positions of
        a source and of a target; several serve attention in blocks of queries.
    """

    def __init__(self, size: int = 1) -> None:
        self._size = size
        self._entries = ()

    def get(
        self, sources: Tensor | tuple[Tensor, ...], key: Any, compute: Callable[[], Any]
    ) -> Any:
        """Return the cached value, or ``compute()`` if the source objects or ``key`` are new.

        ``key`` holds everything else that the value depends on, such as its dtype.
        """
        sources = sources if isinstance(sources, tuple) else (sources,)
        if _is_recorded(sources):
            return compute()  # the graph would keep a cached value for all its calls
        if torch.is_inference_mode_enabled() or any(s.is_inference() for s in sources):
            return compute()  # inference tensors have no version and cannot be used in training
        versions = [s._version for s in sources]  # an edit in place changes it
        for entry in self._entries:
            if entry[1:3] == (versions, key) and all(map(is_, entry[0], sources)):
                return entry[3]
        value = compute()
        # one assignment: another thread sees the old entries or the new ones
        self._entries = ((sources, versions, key, value), *self._entries[: self._size - 1])
        return value

    def __deepcopy__(self, memo: dict) -> "PositionCache":
        return PositionCache(self._size)

    def __reduce__(self) -> tuple:
        return PositionCache, (self._size,)
