"""Timing by contest: all contestants run in turn, so that ratios are robust to noise."""

import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

SPIN = 4_000_000
"""GPU cycles, about 2 ms: the launches of a call end before its work begins."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one contestant per round, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median over rounds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(max - min) / median, a measure of the machine's noise."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    def ratio(self, other: "Timing") -> float:
        """Return the median over rounds of this contestant's time over the other's."""
        return statistics.median(self._ratios(other))

    def quartiles(self, other: "Timing | None" = None) -> tuple[float, float]:
        """Return the lower and upper quartiles of the ratios whose median is :meth:`ratio`.

        Without ``other`` those of the seconds.
        """
        values = self.seconds if other is None else self._ratios(other)
        if len(values) == 1:
            return values[0], values[0]
        lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
        return lower, upper

    def _ratios(self, other: "Timing") -> list[float]:
        pairs = zip(self.seconds, other.seconds, strict=True)
        return [mine / theirs for mine, theirs in pairs]


def contest(
    contestants: dict[Any, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    settle: Collection[Any] = (),
    without_launches: bool = False,
) -> dict[Any, Timing]:
    """Time every contestant once per round, in turn, after ``warmup`` uncounted rounds.

    ``settle``: contestants that get an untimed call before each timed one. After a contestant that
    needs gigabytes the allocator returns memory to the system; without ``settle`` the next
    contestant would pay for allocating it again, which does not happen in a real training.

    ``without_launches``: on a GPU, time its work only, by events, with an empty L2 cache.
    """
    clock = _time_work if without_launches and torch.cuda.is_available() else _time
    seconds: dict[Any, list[float]] = {name: [] for name in contestants}
    for number in range(warmup + rounds):
        for name, run in contestants.items():
            if name in settle:
                run()
            elapsed = clock(run)
            if number >= warmup:
                seconds[name].append(elapsed)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def _time(run: Callable[[], object]) -> float:
    _synchronize()
    start = time.perf_counter()
    run()
    _synchronize()
    return time.perf_counter() - start


def _time_work(run: Callable[[], object]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _synchronize()
    _larger_than_l2().zero_()
    torch.cuda._sleep(SPIN)
    first.record()
    run()
    last.record()
    _synchronize()
    return first.elapsed_time(last) / 1e3


@cache
def _larger_than_l2() -> torch.Tensor:
    return torch.empty(2**28, dtype=torch.int8, device="cuda")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
