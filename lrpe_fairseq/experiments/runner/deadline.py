"""A time limit for several trainings: what may still start, and what has to give way.

Trainings side by side on one GPU share it. Without this module eight trainings that need a little
more than the time left would all be cut off; if the least important are stopped in time, the
others end.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

EVALUATION = 0.25
"""Time of the evaluation after a training, as a fraction of the training's."""
MEASURED_SECONDS = 15.0
"""Shortest time from which a speed is taken."""


class Timed(Protocol):
    """A job whose progress is known."""

    @property
    def name(self) -> str:
        """A name that is unique."""
        ...

    def progress(self) -> tuple[int, int]:
        """Return the updates done, and those of the whole job."""
        ...


class Deadline:
    """Predicts which jobs end in time, from the progress of those that run.

    seconds: from now to the deadline. devices: how many jobs can run without slowing each other.
    """

    def __init__(self, seconds: float, devices: int) -> None:
        self._end, self._devices = time.monotonic() + seconds, devices
        self._begun: dict[str, float] = {}
        self._before: dict[str, int] = {}  # updates when first seen
        self._longest = 0.0  # of the finished jobs
        self._full = False
        self._beside: set[str] = set()
        self._seen: dict[str, list[tuple[float, float]]] = {}  # (time, share of updates), changes
        self._whole: dict[str, float] = {}  # seconds of a whole training, as last measured

    def left(self) -> float:
        """Return the seconds left, negative after the deadline."""
        return self._end - time.monotonic()

    def fits(self) -> bool:
        """True if a job as long as the longest finished one would end in time.

        After a job had to be stopped, none fits until one has finished.
        """
        return not self._full and self.left() > self._longest

    def begin(self, job: Timed) -> None:
        """Note that ``job`` starts."""
        self._begun[job.name] = time.monotonic()

    def finish(self, job: Timed) -> None:
        """Note that ``job`` has ended successfully."""
        self._longest = max(self._longest, time.monotonic() - self._begun[job.name])
        self._full = False

    def lost(self, running: Sequence[Timed]) -> Timed | None:
        """Return the job to stop so that others end in time, the least important one; or None.

        running: the most important first. A job that ends in time at its present speed stays. If n
        jobs share a device, a job needs 1/n of the device's time until its end. No job is named
        until all speeds are known; they are measured anew after each stop.
        """
        self._observe(running)
        rest = {job.name: self._rest(job.name) for job in running}
        sharing = len(running) / self._devices
        if None in rest.values() or sharing <= 1:
            return None
        left = self.left()
        late = {name for name, seconds in rest.items() if seconds > left}
        budget, lost = left * self._devices, None
        for job in sorted(running, key=lambda job: job.name in late):  # stable
            alone = rest[job.name] / sharing
            if job.name in late and alone > budget:
                lost = job
            else:
                budget -= alone
        self._full |= lost is not None
        return lost

    def _observe(self, running: Iterable[Timed]) -> None:
        """Note the progress; speeds are measured anew after a job has started or ended.

        A job's time until its first progress does not count: it loads data and compiles kernels.
        """
        now, names = time.monotonic(), {job.name for job in running}
        if names != self._beside:
            self._beside = names
            self._seen = {name: seen[-1:] for name, seen in self._seen.items() if name in names}
        for job in running:
            done, total = job.progress()
            seen = self._seen.setdefault(job.name, [])
            if done > self._before.setdefault(job.name, done) and (
                not seen or done / total > seen[-1][1]
            ):
                seen.append((now, done / total))

    def _rest(self, name: str) -> float | None:
        """Return the seconds until the end of a job, evaluation included; None if unknown."""
        if not self._seen[name]:
            return None
        (begun, before), (newest, done) = self._seen[name][0], self._seen[name][-1]
        if newest - begun >= MEASURED_SECONDS:
            self._whole[name] = (newest - begun) / (done - before)
        elif done < 1:
            return None
        spent = time.monotonic() - newest
        return max(0.0, (1 + EVALUATION - done) * self._whole.get(name, 0.0) - spent)
