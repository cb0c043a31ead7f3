"""Ranks of a distributed training agree on the kernels that serve, without waiting for each other.

Ranks reach a new kind of call at different times, or never: a batch of one rank has padding, that
of another has none. A collective operation there could meet the gradients' own, and hang. So ranks
write what they find to the store of ``torch.distributed``, and read it:

- After a proof, a rank waits for the others' results, but for a bounded time (:func:`settle`).
  Ranks that are at the same call agree before its first result is used.
- Afterwards each rank reads the failures of the others, at most once every POLL seconds. Until
  then it uses a kernel that it has proved, whose results differ by rounding only.
"""

import logging
import threading
import time
from typing import Any

import torch.distributed as dist

POLL = 1.0
"""Seconds between two looks at the failures of other ranks."""
PREFIX = "lrpe_fairseq/kernels"

logger = logging.getLogger(__name__)
_lock = threading.Lock()


class _Board:
    """What the ranks have written, as far as this one has read it."""

    def __init__(self) -> None:
        self._reset(None, None)

    def _reset(self, base: Any, store: Any) -> None:
        """Forget what was read, and use another store."""
        self.base = base
        self.store = store
        self.failures: set[str] = set()
        self.told: set[str] = set()
        self.read = 0
        self.next_look = 0.0

    def connect(self) -> Any:
        """Return the store of the present process group; None without other ranks."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return None
        base = dist.distributed_c10d._get_default_store()
        if base is not self.base:  # of a new process group
            self._reset(base, dist.PrefixStore(PREFIX, base))
        return self.store

    def tell(self, name: str, passed: bool) -> None:
        """Count this rank's result of a proof, once."""
        result = f"{name}:{'passed' if passed else 'failed'}"
        if result in self.told:
            return
        self.told.add(result)
        if not passed:
            number = self.store.add("failures", 1)
            self.store.set(f"failure:{number}", name)
        self.store.add(result, 1)

    def look(self) -> None:
        """Read the failures that have been added."""
        self.next_look = time.monotonic() + POLL
        for number in range(self.read + 1, self.store.add("failures", 0) + 1):
            if not self.store.check([f"failure:{number}"]):
                return  # it is being written
            self.failures.add(self.store.get(f"failure:{number}").decode())
            self.read = number


_board = _Board()


def settle(name: str, passed: bool, seconds: float) -> bool:
    """Tell the other ranks the result of a proof; return False if one of them has failed.

    name: of the proof, the same on all ranks. seconds: how long to wait for their results at most.
    """
    end = time.monotonic() + seconds
    try:
        with _lock:
            if _board.connect() is None:
                return passed
            _board.tell(name, passed)
        while passed:
            with _lock:
                counts = [_board.store.add(f"{name}:{x}", 0) for x in ("passed", "failed")]
            passed = counts[1] == 0
            if sum(counts) >= dist.get_world_size() or time.monotonic() > end:
                break
            time.sleep(0.02)
    except Exception as error:  # a store of another kind, or one that is gone
        logger.info("ranks do not agree on kernels: %s", error)
    return passed


def failures() -> set[str]:
    """Return the proofs that have failed on other ranks; looks once every POLL seconds."""
    if time.monotonic() > _board.next_look:
        with _lock:
            try:
                if _board.connect() is not None:
                    _board.look()
            except Exception as error:  # as above
                logger.info("ranks do not agree on kernels: %s", error)
            _board.next_look = time.monotonic() + POLL
    return _board.failures
