"""Memory that a training on a CPU frees and needs again."""

import ctypes
import os

VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Settings of glibc's allocator by which a user chooses."""

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of the parameters in malloc.h
NEVER = -1
LARGEST = 2**30, 2**25
"""Sizes of memory in bytes that is kept, the best first: old versions of glibc take only 32 MB."""


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next tensors, up to 1 GB each.

    Break: by default it gives tensors of 32 MB or more, and what is free at the end of its memory,
    back to the system. The next tensor of that size gets pages that the system has to clear, which
    takes about a tenth of a training step of a small model. A process keeps the memory of its
    largest step.

    Other allocators have no such function, or ignore it. With one of ``VARIABLES`` set, nothing
    changes.
    """
    if any(name in os.environ for name in VARIABLES):
        return
    allocator = getattr(ctypes.CDLL(None), "mallopt", None)
    if allocator is not None and any(allocator(MMAP_THRESHOLD, size) for size in LARGEST):
        allocator(TRIM_THRESHOLD, NEVER)
