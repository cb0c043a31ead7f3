"""Run several trainings in parallel: skip finished ones, retry a crashed one once.

Each event is one line on the screen and in a log; a terminal also shows a live line. Ctrl-C and
SIGTERM end the child processes; the same command resumes the runs.
"""

import collections
import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lrpe_fairseq.experiments.records.console import UserError, format_duration
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import Busy, Children, Stopped, is_locked
from lrpe_fairseq.experiments.runner.training import TrainingRun

ATTEMPTS = 2
BUSY_SECONDS = 5.0  # between two attempts at a run that another process trains
LIVE_SECONDS = 1.0
QUIET_SECONDS = 60.0  # between two progress lines without a terminal
ERROR = "error.txt"  # in the run folder: the reason why the last attempt failed


class Events:
    """Reports each event as one line with the time, on the screen and in ``log``."""

    def __init__(self, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._guard = threading.Lock()
        self.terminal = sys.stdout.isatty()

    def say(self, text: str) -> None:
        """Print an event and append it to the log.

        Errors of writing are ignored: standard output may be a file on a full disk, and a worker
        must not end because of that.
        """
        line = f"{time.strftime('%H:%M:%S')} {text}"
        with self._guard:
            with contextlib.suppress(OSError):
                print(f"\r\033[K{line}" if self.terminal else line, flush=True)
            with contextlib.suppress(OSError), open(self._log, "a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%Y-%m-%d')} {line}\n")

    def live(self, text: str) -> None:
        """Show ``text`` on the terminal's last line until the next event."""
        with self._guard:
            width = os.get_terminal_size().columns - 1
            print(f"\r\033[K{text[:width]}", end="", flush=True)


class Schedule:
    """Runs ``runs`` in one thread per entry of ``devices``, each a share of the machine.

    seconds: after this time all is stopped; a run is not started if less is left than the longest
    one took. finished: called with each run that this process has finished, one at a time.
    """

    def __init__(
        self,
        runs: Sequence[TrainingRun],
        devices: Sequence[Devices],
        events: Events,
        children: Children | None = None,
        seconds: float = math.inf,
        finished: Callable[[TrainingRun], None] = lambda run: None,
    ) -> None:
        self._runs = [run for run in runs if not run.finished()]
        self._skipped = len(runs) - len(self._runs)
        self._devices = devices
        self._events = events
        self._finished = finished
        self._children = children or Children()
        # Not the wall clock, which may be set.
        self._end = time.monotonic() + seconds
        self._limited = seconds < math.inf
        self._longest = 0.0  # seconds of a finished run
        self._waiting = collections.deque(self._runs)
        self._running: dict[str, TrainingRun] = {}
        self._attempts: collections.Counter[str] = collections.Counter()
        self._busy: set[str] = set()
        self._done = 0
        self._failed = 0
        self._elsewhere = 0  # finished by other processes in the meantime
        self._guard = threading.Lock()

    def run(self) -> int:
        """Run all; return the number of failed runs: without a limit of time, all unfinished ones.

        Raises: KeyboardInterrupt after Ctrl-C or SIGTERM, once every child process has ended.
        """
        if self._skipped:
            self._events.say(f"{self._skipped} runs are finished already")
        threads = [
            # Daemons: Ctrl-C ends the program even if one waits for a child.
            threading.Thread(target=self._work, args=(devices,), daemon=True)
            for devices in self._devices[: len(self._runs)]
        ]
        # Slurm and service managers send SIGTERM, a user Ctrl-C.
        with _terminated_like_interrupted():
            try:
                for thread in threads:
                    thread.start()
                self._watch(threads)
            except KeyboardInterrupt:
                self._events.say("stopping; the same command resumes")
                self._children.stop()
                raise
        unfinished = len(self._runs) - self._done - self._elsewhere
        # With a limit of time, a run that was stopped has not failed.
        failed = self._failed if self._limited else unfinished
        left = unfinished - failed
        more = f", {self._elsewhere} finished by other processes" if self._elsewhere else ""
        more += f", {left} left for the next call" if left else ""
        self._events.say(f"{self._done} runs finished, {failed} failed{more}")
        return failed

    def _work(self, devices: Devices) -> None:
        while not self._children.stopping and (run := self._next()):
            try:
                self._attempt(run, devices)
            except Stopped:
                return
            except Busy:
                self._put_off(run)
            except Exception as error:  # a failed run must not end the others
                self._fail(run, error)
            finally:
                with self._guard:
                    self._running.pop(run.name, None)

    def _next(self) -> TrainingRun | None:
        with self._guard:
            # A run that cannot end in time would only be stopped and resumed later.
            if not self._waiting or self._end - time.monotonic() < self._longest:
                return None
            run = self._waiting.popleft()
            self._running[run.name] = run
            return run

    def _attempt(self, run: TrainingRun, devices: Devices) -> None:
        if run.name not in self._busy:
            update, _ = run.progress()
            self._say(run, f"resumed at {update}" if update else "started")
        begun = time.monotonic()
        worked = run.work(self._children, devices, functools.partial(self._say, run))
        with contextlib.suppress(OSError):
            (run.folder / ERROR).unlink(missing_ok=True)
        if not worked:
            with self._guard:
                self._elsewhere += 1
            self._say(run, "finished by another process")
            return
        seconds = time.monotonic() - begun
        with self._guard:
            self._done += 1
            # Runs of a table take about as long as each other.
            self._longest = max(self._longest, seconds)
            self._finished(run)
        self._say(run, f"finished after {format_duration(seconds)}")

    def _say(self, run: TrainingRun, text: str) -> None:
        self._events.say(f"{run.name}: {text}")

    def _put_off(self, run: TrainingRun) -> None:
        if run.name not in self._busy:
            self._busy.add(run.name)
            self._say(run, "another process trains this run; checking again later")
        with self._guard:
            self._waiting.append(run)
        time.sleep(BUSY_SECONDS)

    def _fail(self, run: TrainingRun, error: Exception) -> None:
        reason = str(error) if isinstance(error, (UserError, ValueError, OSError)) else repr(error)
        with contextlib.suppress(OSError):  # the run may have failed because the disk is full
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / ERROR).write_text(reason + "\n", encoding="utf-8")
        with self._guard:
            self._attempts[run.name] += 1
            again = self._attempts[run.name] < ATTEMPTS
            if again:
                # At once: a crash by chance needs no second turn of the whole table.
                self._waiting.appendleft(run)
            self._failed += not again
        self._say(run, f"{'crashed, trying again' if again else 'FAILED'}: {reason}")

    def _watch(self, threads: Sequence[threading.Thread]) -> None:
        """Show progress until every thread has ended, in the main thread, which gets signals."""
        before = sum(run.progress()[0] for run in self._runs)
        begun = shown = time.monotonic()
        show = self._events.live if self._events.terminal else self._events.say
        while any(thread.is_alive() for thread in threads):
            time.sleep(LIVE_SECONDS / 5)
            now = time.monotonic()
            if now >= self._end and not self._children.stopping:
                self._events.say("the time is over; the same command resumes")
                self._children.stop()
            # A terminal is redrawn every second; a log file gets a line per minute.
            elif now - shown >= (LIVE_SECONDS if self._events.terminal else QUIET_SECONDS):
                shown = now
                show(self._line(before, now - begun))

    def _line(self, before: int, seconds: float) -> str:
        """Return the progress. before: updates that were done ``seconds`` ago."""
        seen = {run.name: run.progress() for run in self._runs}
        done = sum(min(update, total) for update, total in seen.values())
        left = sum(total for _, total in seen.values()) - done
        eta = format_duration(seconds * left / (done - before)) if done > before else "?"
        with self._guard:
            current = "; ".join("{} {}/{}".format(n, *seen[n]) for n in self._running)
        ended = self._done + self._elsewhere + self._failed + self._skipped
        return f"{ended}/{len(self._runs) + self._skipped} runs, ETA {eta} | {current}"


def shares(parallel: int, gpus_per_run: int | None = None) -> list[Devices]:
    """Divide the machine into ``parallel`` equal shares of cores and, if it has any, GPUs.

    OMP_NUM_THREADS, if set, limits the threads of each run.
    gpus_per_run: default one, or all GPUs for a single run.
    Raises: ValueError if the machine has fewer GPUs.
    """
    # The cores of this process: a container may have fewer than the machine.
    threads = max(1, len(os.sched_getaffinity(0)) // parallel)
    if (limit := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        threads = max(1, min(threads, int(limit)))
    gpus = torch.cuda.device_count()
    if (gpus_per_run or 0) > gpus:
        raise ValueError(f"a run cannot have {gpus_per_run} GPUs: there are {gpus}")
    # One run has all GPUs: fairseq distributes it.
    if not gpus or (parallel == 1 and not gpus_per_run):
        return [Devices(threads)] * parallel
    each = gpus_per_run or 1
    groups = [tuple(range(n * each, (n + 1) * each)) for n in range(gpus // each)]
    return [Devices(threads, groups[slot % len(groups)]) for slot in range(parallel)]


def state(run: TrainingRun) -> str:
    """Return the state: done, running, failed with the reason, trained, half done or pending."""
    if run.finished():
        return f"done, {run.outcome()}"
    update, total = run.progress()
    # Before the log: a run that was resumed still has its old lines.
    if is_locked(run.folder):
        return f"running {update}/{total}" if update else "running"
    error = run.folder / ERROR
    if error.exists():
        return f"failed: {error.read_text(encoding='utf-8').strip()}"
    if 0 < total <= update:
        return "trained, to be evaluated"
    return f"half done {update}/{total}" if update else "pending"


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C. Further ones are ignored, so that children end properly."""

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is interrupt:
            signal.signal(signal.SIGTERM, before)
