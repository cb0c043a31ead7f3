"""Run several trainings in parallel: skip finished ones, retry a crashed one once.

Each event is one line on the screen and in a log; a terminal also shows a live line. Ctrl-C and
SIGTERM end the child processes; the same command resumes the runs.
"""

import collections
import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from lrpe_fairseq.experiments.records.console import UserError, clock
from lrpe_fairseq.experiments.runner.deadline import Deadline
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import Busy, Children, Stopped, is_locked

ATTEMPTS = 2
BUSY_SECONDS = 5.0  # between two attempts at a run that another process trains
LIVE_SECONDS = 1.0
QUIET_SECONDS = 60.0  # between two progress lines without a terminal
ERROR = "error.txt"  # in the run folder: the reason why the last attempt failed


class Job(Protocol):
    """A run that can be scheduled, such as ``training.TrainingRun``."""

    @property
    def name(self) -> str:
        """A name that is unique among the jobs of a schedule."""
        ...

    @property
    def folder(self) -> Path:
        """The folder of checkpoints and logs, which is locked while a process works in it."""
        ...

    def finished(self) -> bool:
        """True if a valid run file exists."""
        ...

    def progress(self) -> tuple[int, int]:
        """Return the updates of the last checkpoint or log line, and those of the whole run."""
        ...

    def outcome(self) -> str:
        """Return the current metrics as short text."""
        ...

    def work(self, children: Children, devices: Devices, say: Callable[[str], None]) -> bool:
        """Train, evaluate and write the run file; return True if this process did all of it.

        ``say`` reports an event. Raises: Busy if another process works in the folder; Stopped if
            ``children`` are stopped; any other exception counts as a failed attempt.
        """
        ...


class Events:
    """Reports each event as one line with the time, on the screen and in ``log``."""

    def __init__(self, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log, self._guard = log, threading.Lock()
        self.terminal = sys.stdout.isatty()

    def say(self, text: str) -> None:
        """Print an event and append it to the log.

        Errors of writing are ignored: standard output may be a file on a full disk, and a worker
        must not end because of that.
        """
        line = f"{time.strftime('%H:%M:%S')} {text}"
        with self._guard:
            with contextlib.suppress(OSError):
                self._clear()
                print(line, flush=True)
            with contextlib.suppress(OSError), open(self._log, "a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%Y-%m-%d')} {line}\n")

    def live(self, text: str) -> None:
        """Show ``text`` on the terminal's last line until the next event."""
        with self._guard:
            self._clear()
            width = os.get_terminal_size().columns - 1
            print(text[:width], end="", flush=True)

    def _clear(self) -> None:
        if self.terminal:
            print("\r\033[K", end="")


class Schedule:
    """Runs ``jobs`` in one thread per entry of ``devices``, each a share of the machine.

    deadline: when all is stopped; before, no job is started that would not end in time, and if the
    running ones would not, the last of them are stopped. finished: called with each job that this
    process has finished, one at a time.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        devices: Sequence[Devices],
        events: Events,
        children: Children | None = None,
        deadline: Deadline | None = None,
        finished: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self._deadline, self._finished = deadline, finished
        self._ended: set[str] = set()  # stopped in favor of more important ones
        self._jobs = [job for job in jobs if not job.finished()]
        self._devices = devices
        self._events, self._children = events, children or Children()
        self._waiting = collections.deque(self._jobs)
        self._running: dict[str, Job] = {}
        self._attempts: collections.Counter[str] = collections.Counter()
        self._busy: set[str] = set()
        self._done, self._failed = 0, 0
        self._guard = threading.Lock()
        self._skipped = len(jobs) - len(self._jobs)

    def run(self) -> int:
        """Run all jobs; return the number of failed ones.

        Without a deadline all that are not finished have failed.

        Raises: KeyboardInterrupt after Ctrl-C or SIGTERM, once every child process has ended.
        """
        if self._skipped:
            self._events.say(f"{self._skipped} runs are finished already")
        threads = [
            threading.Thread(target=self._work, args=(devices,), daemon=True)
            for devices in self._devices[: len(self._jobs)]
        ]
        with _terminated_like_interrupted():
            try:
                for thread in threads:
                    thread.start()
                self._watch(threads)
            except KeyboardInterrupt:
                self._events.say("stopping; the same command resumes")
                self._children.stop()
                raise
        left = len(self._jobs) - self._done - self._failed
        if not self._deadline:
            self._failed, left = self._failed + left, 0  # jobs that no thread took
        more = f", {left} left for the next call" if left else ""
        done = self._done + self._skipped
        self._events.say(f"{done} runs finished, {self._failed} failed{more}")
        return self._failed

    def _work(self, devices: Devices) -> None:
        while not self._children.stopping and (job := self._next()):
            try:
                self._attempt(job, devices)
            except Stopped:
                return
            except Busy:
                self._put_off(job)
            except Exception as error:  # a failed run must not end the others
                self._fail(job, error)
            finally:
                with self._guard:
                    self._running.pop(job.name, None)

    def _next(self) -> Job | None:
        with self._guard:
            if not self._waiting or (self._deadline and not self._deadline.fits()):
                return None
            job = self._waiting.popleft()
            self._running[job.name] = job
            return job

    def _attempt(self, job: Job, devices: Devices) -> None:
        if job.name not in self._busy:
            update, _ = job.progress()
            self._say(job, f"resumed at {update}" if update else "started")
        begun = time.monotonic()
        if self._deadline:
            self._deadline.begin(job)
        say = functools.partial(self._say, job)
        job.work(self._children, devices, say)
        with contextlib.suppress(OSError):
            (job.folder / ERROR).unlink(missing_ok=True)
        with self._guard:
            self._done += 1
            if self._deadline:
                self._deadline.finish(job)
            self._finished(job)
        say(f"finished after {clock(time.monotonic() - begun)}")

    def _say(self, job: Job, text: str) -> None:
        self._events.say(f"{job.name}: {text}")

    def _put_off(self, job: Job) -> None:
        if job.name not in self._busy:
            self._busy.add(job.name)
            self._say(job, "another process trains this run; checking again later")
        with self._guard:
            self._waiting.append(job)
        time.sleep(BUSY_SECONDS)

    def _fail(self, job: Job, error: Exception) -> None:
        if job.name in self._ended:
            return
        reason = str(error) if isinstance(error, (UserError, ValueError, OSError)) else repr(error)
        with contextlib.suppress(OSError):  # the run may have failed because the disk is full
            job.folder.mkdir(parents=True, exist_ok=True)
            (job.folder / ERROR).write_text(reason + "\n", encoding="utf-8")
        with self._guard:
            self._attempts[job.name] += 1
            again = self._attempts[job.name] < ATTEMPTS
            if again:
                self._waiting.appendleft(job)
            self._failed += not again
        self._say(job, f"{'crashed, trying again' if again else 'FAILED'}: {reason}")

    def _watch(self, threads: Sequence[threading.Thread]) -> None:
        """Show progress until every thread has ended, in the main thread, which gets signals."""
        total = {job.name: job.progress()[1] for job in self._jobs}
        before = sum(job.progress()[0] for job in self._jobs)
        begun = shown = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            time.sleep(LIVE_SECONDS / 5)
            self._keep_to_the_deadline()
            now = time.monotonic()
            if now - shown < (LIVE_SECONDS if self._events.terminal else QUIET_SECONDS):
                continue
            shown = now
            show = self._events.live if self._events.terminal else self._events.say
            show(self._line(total, before, now - begun))

    def _keep_to_the_deadline(self) -> None:
        """Stop everything at the deadline, and before it the jobs without which others end."""
        if not self._deadline or self._children.stopping:
            return
        if self._deadline.left() <= 0:
            self._events.say("the time is over; the same command resumes")
            self._children.stop()
            return
        with self._guard:
            running = [job for job in self._jobs if job.name in self._running]
        if job := self._deadline.lost([job for job in running if job.name not in self._ended]):
            self._ended.add(job.name)
            self._say(job, "stopped, so that more important runs end in time")
            self._children.end(job.folder)

    def _line(self, total: dict[str, int], before: int, seconds: float) -> str:
        done = sum(min(job.progress()[0], total[job.name]) for job in self._jobs)
        left = sum(total.values()) - done
        gained = done - before
        eta = clock(seconds * left / gained) if gained > 0 else "?"
        with self._guard:
            running = list(self._running.values())
        current = "; ".join(f"{j.name} {j.progress()[0]}/{total[j.name]}" for j in running)
        runs = self._done + self._failed + self._skipped
        return f"{runs}/{len(self._jobs) + self._skipped} runs, ETA {eta} | {current}"


def shares(parallel: int, gpus_per_run: int | None = None) -> list[Devices]:
    """Divide the machine into ``parallel`` equal shares of cores and, if it has any, GPUs.

    OMP_NUM_THREADS, if set, limits the threads of each run.
    gpus_per_run: default one, or all GPUs for a single run.
    Raises: ValueError if the machine has fewer GPUs.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // parallel)
    if (limit := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        threads = max(1, min(threads, int(limit)))
    gpus = torch.cuda.device_count()
    if (gpus_per_run or 0) > gpus:
        raise ValueError(f"a run cannot have {gpus_per_run} GPUs: there are {gpus}")
    if not gpus or (parallel == 1 and not gpus_per_run):
        return [Devices(threads)] * parallel
    each = gpus_per_run or 1
    groups = [tuple(range(n * each, (n + 1) * each)) for n in range(gpus // each)]
    return [Devices(threads, groups[slot % len(groups)]) for slot in range(parallel)]


def state(job: Job) -> str:
    """Return the state: done, running, failed with the reason, trained, half done or pending."""
    if job.finished():
        return f"done, {job.outcome()}"
    update, total = job.progress()
    if is_locked(job.folder):
        return f"running {update}/{total}, {job.outcome()}" if update else "running"
    error = job.folder / ERROR
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
