"""Timing by contest: all contestants in one run, in turn; ratios survive a noisy machine."""

import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one contestant in every round, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median over rounds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(max - min) / median: how noisy the machine was."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    def ratio(self, other: "Timing") -> float:
        """Median over rounds of this one's seconds over the other's in the same round."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def contest(
    contestants: dict[Any, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    settle: Collection[Any] = (),
) -> dict[Any, Timing]:
    """Time every contestant once per round, in turn; the first ``warmup`` rounds do not count.

    ``settle``: the contestants that get an untimed call just before each timed one. One that needs
    gigabytes makes the allocator hand memory back, and the next would pay for fetching it again,
    which it never does in a training of its own.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in contestants}
    for number in range(warmup + rounds):
        for name, run in contestants.items():
            if name in settle:
                run()
            elapsed = _time(run)
            if number >= warmup:
                seconds[name].append(elapsed)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def _time(run: Callable[[], object]) -> float:
    _synchronize()
    start = time.perf_counter()
    run()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
