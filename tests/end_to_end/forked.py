"""Commands in processes forked from one that has already imported torch and fairseq.

The import takes several seconds of CPU, a fork some milliseconds. Each command still is a process
of its own: it has an exit status, and nothing that fairseq, hydra or logging keep in module
globals reaches the next command. Such a process has the plugin imported before ``--user-dir`` is
read, so that the tests of the import itself, and of signals, start an interpreter
(:func:`tests.end_to_end.commands.start`).
"""

import importlib
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from lrpe_fairseq.experiments.runner.processes import ChildFailed, Children

PATIENCE = 240  # seconds that one command may take before it counts as hung
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.end_to_end.preloaded"])


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
    command = [tool, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [str(Path(folder) / name) for name in ("stdout", "stderr")]
        where = (dict(environment or os.environ), str(cwd or Path.cwd()))
        process = SERVER.Process(target=_command, args=(command, given, outputs, *where))
        process.start()
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(command, PATIENCE)
        said = [Path(path).read_text() for path in outputs]
    return subprocess.CompletedProcess(command, process.exitcode, *said)


def _command(
    command: list[str], given: str, outputs: list[str], environment: dict[str, str], cwd: str
) -> None:
    """Within the new process: become the command."""
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv, sys.stdin = command, io.StringIO(given)
    warnings.simplefilter("ignore")
    try:
        if command[0].startswith("fairseq_cli."):
            importlib.import_module(command[0]).cli_main()
        else:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except Exception:  # as an interpreter ends; multiprocessing knows no hook
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None


def run_child_forked(
    children: Children,
    command: Sequence[str],
    log: Path,
    *,
    cwd: Path,
    environment: Mapping[str, str],
    lock: int | None = None,
) -> float:
    """In place of :meth:`Children.run`; the memory is not measured, but returned as 1 MB."""
    tool, *arguments = _as_module(command)
    where = {"environment": {**os.environ, **environment}, "cwd": cwd}
    ended = run_forked(tool, arguments, **where)
    with open(log, "a") as output:
        output.write(ended.stdout + ended.stderr)
    if ended.returncode:
        raise ChildFailed(ended.returncode)
    return 1.0


def _as_module(command: Sequence[str]) -> list[str]:
    """``fairseq-hydra-train ...`` or ``python -m module ...`` as a module and its arguments."""
    program = Path(command[0]).name
    if program.startswith("fairseq-"):
        name = program.removeprefix("fairseq-").replace("-", "_")
        return [f"fairseq_cli.{name}", *command[1:]]
    assert command[1] == "-m", command
    return list(command[2:])
