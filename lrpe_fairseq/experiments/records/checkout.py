"""The git checkout that contains this package, if any."""

import os
import subprocess
from pathlib import Path

from lrpe_fairseq.experiments.records.files import ROOT

RENDERED = ("results", "docs", "README.md")
ELSEWHERE = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"}
"""Environment variables that select another repository; git sets them in hooks."""
STATED = "LRPE_FAIRSEQ_COMMIT"
"""Environment variable: the commit of a copy of the repository; git is not asked then."""


def require_checkout(root: Path = ROOT) -> None:
    """Check that ``root`` contains the configurations and scripts, which a wheel lacks.

    Raises: ValueError, which says what to do.
    """
    missing = [name for name in ("configs", "scripts") if not (root / name).is_dir()]
    if missing:
        raise ValueError(
            f"{root} has no {', '.join(missing)}: this command needs a checkout of the repository "
            "(git clone, then make install); an installed wheel holds the package only"
        )


def commit(root: Path = ROOT) -> str:
    """Return the commit of the repository at ``root``; ``-dirty`` if its files differ.

    Results and documentation do not count: a sweep renders them, and they have no effect on the
    next run. What :data:`STATED` says comes first. If ``root`` is not the top folder of a git
    repository, it is ``unknown``: a wheel may be installed inside one of another project.
    """
    if stated := os.environ.get(STATED):
        return stated
    top = _git(root, "rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != root.resolve():
        return "unknown"
    head = _git(root, "rev-parse", "HEAD")
    dirty = _git(root, "status", "--porcelain", "--", ".", *(f":!{path}" for path in RENDERED))
    return (head + "-dirty" if dirty else head) if head else "unknown"


def _git(root: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
