"""Run commands in forked processes, so that torch and fairseq are imported once.

A new interpreter needs several seconds of CPU time to import them, a large part of a run of one
minute. :class:`WarmChildren` forks multiprocessing's fork server, which has imported them. Run
folders and results are those of :class:`~lrpe_fairseq.experiments.runner.processes.Children`.
"""

import importlib
import importlib.metadata
import io
import multiprocessing
import os
import resource
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NoReturn

import torch

from lrpe_fairseq.experiments.runner.processes import KIB, ChildFailed, Children, Stopped

PRELOADED = "lrpe_fairseq.experiments.runner.preloaded"
CONTEXT = multiprocessing.get_context("forkserver")


def warm_up(*modules: str) -> None:
    """Start the server, which imports fairseq and ``modules``, without waiting for it."""
    CONTEXT.set_forkserver_preload([PRELOADED, *modules])
    forkserver.ensure_running()


class WarmChildren(Children):
    """Children that run console scripts and modules without a new interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self._code = super().code()

    def code(self) -> str:
        """Return the commit when this object was made: the server imports the code once."""
        return self._code

    def run(
        self,
        command: Sequence[str],
        log: Path,
        *,
        cwd: Path,
        environment: Mapping[str, str],
        lock: int | None = None,
    ) -> float:
        """As :meth:`Children.run`, for commands that :func:`become` supports."""
        reader, writer = CONTEXT.Pipe(duplex=False)
        inherited = writer, None if lock is None else DupFd(lock)
        words = (list(command), str(log), str(cwd), {**os.environ, **environment}, *inherited)
        process = CONTEXT.Process(target=_run_measured, args=words)
        with reader:
            self._begin(process, log)
            writer.close()
            process.join()
            with self._guard:
                self._alive.pop(process.pid)
            if self.stopping:
                raise Stopped
            if process.exitcode:
                raise ChildFailed(process.exitcode)
            return reader.recv()

    def _begin(self, process: BaseProcess, log: Path) -> None:
        """Start ``process``. The first start takes as long as the imports of the server."""
        if self.stopping:
            raise Stopped
        process.start()
        # Else the next start, in another thread, could read the exit status of this process.
        multiprocessing.process._children.discard(process)
        with self._guard:
            self._alive[process.pid] = log
            if self.stopping:  # since before it started: stop() has not seen it
                os.kill(process.pid, signal.SIGKILL)


def _run_measured(
    command: list[str],
    log: str,
    folder: str,
    environment: dict[str, str],
    memory: Connection,
    lock: Any,
) -> None:
    """Run in the child: become ``command`` and send the peak memory in MB to ``memory``.

    ``lock`` (a DupFd) stays open until the process ends.
    """
    os.setsid()  # a separate group: Ctrl-C reaches the runner only
    held = None if lock is None else lock.detach()
    if held is not None:
        os.set_inheritable(held, True)
    try:
        become(command, (log, log), folder, environment)
    finally:
        memory.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB)


def become(
    command: Sequence[str],
    outputs: tuple[str, str],
    folder: str,
    environment: Mapping[str, str],
    given: str = "",
) -> NoReturn:
    """In a forked process: run ``command`` and exit with its status.

    Args:
        command: the path of a console script, or ``python -m module``, and its arguments.
        outputs: files to which standard output and standard error are appended.
        folder: working directory. environment: all its variables. given: its standard input.
    """
    for descriptor, path in enumerate(outputs, start=1):
        _write_to(descriptor, path)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    # As in a new interpreter: with the server's method, every data-loading worker imports torch.
    multiprocessing.set_start_method(None, force=True)
    _limit_threads(environment.get("OMP_NUM_THREADS", ""))
    sys.stdin = io.StringIO(given)
    try:
        sys.exit(_run(list(command)))
    except Exception:  # as an interpreter does; multiprocessing does not call the hook
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None


def _run(command: list[str]) -> Any:
    if command[1:2] != ["-m"]:
        sys.argv = command
        return _script(Path(command[0]).name)()
    sys.argv = command[2:]
    if command[2].startswith("fairseq_cli."):  # imported already; the plugin has changed it
        return importlib.import_module(command[2]).cli_main()
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    return 0


def _write_to(descriptor: int, path: str) -> None:
    stream = (sys.stdout, sys.stderr)[descriptor - 1]
    with open(path, "ab") as output:
        stream.flush()
        os.dup2(output.fileno(), descriptor)
    stream.reconfigure(line_buffering=True)


def _limit_threads(threads: str) -> None:
    """Set the number of threads; torch read OMP_NUM_THREADS when the server imported it."""
    if threads.isdigit():
        torch.set_num_threads(int(threads))


def _script(name: str) -> Any:
    """Return the function of a console script, such as ``fairseq-eval-lm``."""
    (found,) = importlib.metadata.entry_points(group="console_scripts", name=name)
    return found.load()
