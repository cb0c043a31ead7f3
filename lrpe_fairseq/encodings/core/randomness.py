"""Random numbers of encodings in several processes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_readers: list[int] = []


@contextmanager
def noise_of(rank: int) -> Iterator[None]:
    """Let this process draw the numbers of process ``rank``, which reads the same text."""
    _readers.append(rank)
    try:
        yield
    finally:
        _readers.pop()


def noise_rank() -> int:
    """Return the rank of the process whose numbers this one draws: its own, or that given."""
    if _readers:
        return _readers[-1]
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if group else 0
