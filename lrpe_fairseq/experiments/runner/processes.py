"""Start child processes, and end them with the runner.

A run folder is locked while a process trains in it. The lock is an open file that every child
inherits, so it is held until the last child ends: after ``kill -9`` of the runner, a second runner
does not write to the folder of a training that is still running.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.errors import BAD_INPUT
from lrpe_fairseq.experiments.records import fairseq_log
from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.files import ROOT, read_json, relative

Shell = Callable[[list[str], Path], None]
"""Runs a command from the repository root with a new log. Raises: RunFailed, Stopped."""
SPEAKERS = ("lrpe_fairseq", "score_lm", "eval_glue")
"""What stands before the sentence of a refusal: the package in fairseq's commands, and the commands
that the runner starts."""
GRACE = "LRPE_FAIRSEQ_GRACE"
"""Environment variable: seconds that a training has to save after a signal."""
GRACE_SECONDS = 25.0  # by default: a cluster sends SIGKILL after 30 s
PR_SET_CHILD_SUBREAPER = 36  # of Linux: orphans of children become children of this process


def grace() -> float:
    """Return the seconds that a training has to save after a signal."""
    return float(os.environ.get(GRACE) or GRACE_SECONDS)


class Stopped(Exception):
    """The runner was stopped while this child ran."""


class Busy(UserError):
    """Another process has locked the run folder."""


class RunFailed(UserError):
    """A training or an evaluation failed; the text is the last line of its output."""


class Diverged(RunFailed):
    """A training ended because its gradients were not finite."""


class Children:
    """Runs child processes for several threads and ends them all on :meth:`stop`."""

    def __init__(self) -> None:
        # Workers whose training was killed would otherwise be out of reach and hold the GPU.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._guard = threading.Lock()
        self._alive: set[int] = set()
        self._stopping = threading.Event()

    @property
    def stopping(self) -> bool:
        """True after :meth:`stop` was called."""
        return self._stopping.is_set()

    def run(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str],
        lock: int | None = None,
        cwd: Path = ROOT,
    ) -> None:
        """Run ``command``; its output is appended to ``log``.

        lock: a file descriptor that the child keeps open.
        Raises: Stopped; RunFailed with the last line of the output.
        """
        # Within the guard: a child that starts while stop() runs would be missed.
        with self._guard, open(log, "ab") as output:
            if self.stopping:
                raise Stopped
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**os.environ, **environment},
                start_new_session=True,  # a separate group: Ctrl-C reaches the runner only
                pass_fds=() if lock is None else (lock,),
            )
            self._alive.add(process.pid)
        process.wait()
        with contextlib.suppress(ChildProcessError):  # none is left
            # a training on several GPUs ends before the processes of its GPUs have saved
            while self.stopping:
                os.waitpid(-process.pid, 0)
        with self._guard:
            self._alive.remove(process.pid)
        if self.stopping:
            raise Stopped
        if process.returncode:
            raise failure(log, process.returncode)

    def stop(self) -> None:
        """End every child and its descendants, by SIGUSR1 and then SIGKILL; start no more.

        On SIGUSR1 a training saves a checkpoint and exits, and other processes end. SIGTERM would
        also end the training's data-loading workers, and the training would fail before saving.
        """
        with self._guard:
            self._stopping.set()
        self._signal(signal.SIGUSR1)
        end = time.monotonic() + grace()
        while self._alive and time.monotonic() < end:
            time.sleep(0.1)
        # What has not ended by now would keep the lock and the GPU.
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with self._guard:
            for pid in self._alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, number)


def written_by(run: Shell, out: Path, *words: object) -> dict[str, Any]:
    """Run a subcommand of this program, and return the JSON file ``out`` that it writes.

    words: of the command, without ``--out``. Its log is beside ``out``, with the same name.
    """
    # A file of an earlier call must not pass for the result of one that fails.
    out.unlink(missing_ok=True)
    # Relative paths keep logs the same on every machine.
    plain = [relative(w) if isinstance(w, Path) else str(w) for w in (*words, "--out", out)]
    run([sys.executable, "-m", "lrpe_fairseq.experiments", *plain], out.with_suffix(".log"))
    return read_json(out)


def failure(log: Path, status: int) -> RunFailed:
    """Return the error of a command with this log and nonzero exit status.

    A refusal says everything itself: the command that was started, and its log, are left out.
    """
    said = fairseq_log.last_line(log)
    speaker, _, sentence = said.partition(": ")
    if status == BAD_INPUT and speaker in SPEAKERS:
        return RunFailed(sentence)
    return RunFailed(f"{said} (exit status {status}, {relative(log)})")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock a run folder; yield the file descriptor for the children. Raises: Busy."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"{folder} is in use by another process") from None
        yield descriptor
    finally:
        os.close(descriptor)  # the lock is released when its last holder ends


def is_locked(folder: Path) -> bool:
    """True if a process trains in the run folder. Needs no write access."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # Shared: two that only look do not see each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
