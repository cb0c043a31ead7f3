"""Commands in processes of the runner's fork server, for tests.

Each command still is a process of its own: it has an exit status, and nothing that fairseq, hydra
or logging keep in module globals reaches the next command. Such a process has the plugin imported
before ``--user-dir`` is read, so that the tests of the import itself, and of signals, start an
interpreter (:func:`tests.end_to_end.commands.start`).
"""

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.runner import warm

PATIENCE = 240  # seconds that one command may take before it counts as hung


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
    warm.warm_up("tests.end_to_end.preloaded")
    command = [tool, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        outputs = tuple(str(Path(folder) / name) for name in ("stdout", "stderr"))
        where = (str(cwd or Path.cwd()), dict(environment or os.environ), given)
        words = ([sys.executable, "-m", *command], outputs, *where)
        process = warm.CONTEXT.Process(target=_become_quietly, args=words)
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
    warm.become(*words)
