"""Commands in forked processes, for tests: torch and fairseq are imported once.

Each command still is a process of its own: it has an exit status, and nothing that fairseq, hydra
or logging keep in module globals reaches the next command. Such a process has the plugin imported
before ``--user-dir`` is read, so that the tests of the import itself, and of signals, start an
interpreter (:func:`tests.end_to_end.commands.start`).
"""

import importlib
import importlib.metadata
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

import torch

from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.runner.processes import Children, failure

PATIENCE = 240  # seconds that one command may take before it counts as hung
CONTEXT = multiprocessing.get_context("forkserver")


def warm_up() -> None:
    """Start the fork server, which imports fairseq, without waiting for it."""
    CONTEXT.set_forkserver_preload(["tests.end_to_end.preloaded"])
    forkserver.ensure_running()


def run_forked(
    tool: str,
    arguments: Sequence[str],
    *,
    given: str = "",
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess:
    """What ``python -m tool`` with ``arguments`` does; ``given`` is its standard input.

    Raises: subprocess.TimeoutExpired after PATIENCE.
    """
    warm_up()
    command = [tool, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        outputs = tuple(str(Path(folder) / name) for name in ("stdout", "stderr"))
        where = (str(cwd or Path.cwd()), dict(environment or os.environ), given)
        words = ([sys.executable, "-m", *command], outputs, *where)
        process = CONTEXT.Process(target=_become_quietly, args=words)
        process.start()
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(command, PATIENCE)
        said = [Path(path).read_text() for path in outputs]
    return subprocess.CompletedProcess(command, process.exitcode, *said)


def _become_quietly(*words: Any) -> None:
    """Like ``python -W ignore``."""
    warnings.simplefilter("ignore")
    become(*words)


class ForkedChildren(Children):
    """Children that run console scripts and modules without a new interpreter."""

    def run(self, command, log, *, environment, lock=None, cwd=ROOT):
        """As :meth:`Children.run`, for commands that :func:`become` supports."""
        warm_up()
        words = (list(command), (str(log), str(log)), str(cwd), {**os.environ, **environment})
        process = CONTEXT.Process(target=become, args=words)
        process.start()
        # Else the next start, in another thread, could read the exit status of this process.
        multiprocessing.process._children.discard(process)
        process.join()
        if process.exitcode:
            raise failure(log, process.exitcode)


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
