"""The repository's folders and commit, and atomic writing of files.

Prepared data are in ``bin`` of their folder, or in shards ``bin/shard0``, ``bin/shard1``, …
fairseq takes shards as one path with colons. It trains on shard ``(epoch - 1) mod n`` and reads
the dictionary and the sets for evaluation of the first.
"""

import contextlib
import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from lrpe_fairseq.experiments.records.console import UserError

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs"
SHARD = re.compile(r"shard(\d+)")
RENDERED = ("results", "docs", "README.md")
ELSEWHERE = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"}
"""Environment variables that select another repository; git sets them in hooks."""
STATED = "LRPE_FAIRSEQ_COMMIT"
"""Environment variable: the commit of a copy of the repository; git is not asked then."""


def relative(path: Path) -> str:
    """Return ``path`` relative to the repository root if it is below it, otherwise absolute."""
    absolute = path.absolute()
    return str(absolute.relative_to(ROOT) if absolute.is_relative_to(ROOT) else absolute)


def shards_of(data: Path) -> list[Path]:
    """Return the folders of ``data`` that fairseq reads, shards in numeric order."""
    matches = {p: SHARD.fullmatch(p.name) for p in (data / "bin").glob("shard*")}
    # As numbers: shard10 comes after shard9, as fairseq reads them.
    numbered = {path: int(match[1]) for path, match in matches.items() if match}
    return sorted(numbered, key=numbered.__getitem__) or [data / "bin"]


def first_shard(data: Path) -> Path:
    """Return the folder with the dictionary and the sets for evaluation."""
    return shards_of(data)[0]


@contextlib.contextmanager
def atomic_write(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open ``path`` for writing atomically: the file appears after all of it is on the disk.

    The content is written to a temporary file in the same folder, whose name starts with a dot:
    readers of run files and checkpoints ignore it. After an error it is deleted and an older file
    is unchanged. Raises: OSError if the folder cannot be created or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # With the process id: two writers must not share a temporary file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        with open(temporary, mode, **text) as file:
            yield file
            file.flush()
            # Otherwise a crash of the machine may leave the new name with an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
        # The rename itself is an entry of the folder.
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def require_writable(folder: Path, option: str, file: Path | None = None) -> None:
    """Make ``folder``. Raises: UserError if it cannot be written, or if ``file`` is a folder."""
    if file is not None and file.is_dir():
        raise UserError(f"{file} is a folder: choose another {option}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permission bits do not say it all: a full or read-only disk fails here.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"{folder} is no folder that can be written ({error.strerror})"
        raise UserError(f"{reason}: choose another {option}.") from None


def write_json(path: Path, value: Any, *, sort_keys: bool = False) -> None:
    """Write ``value`` as indented JSON atomically. Raises: ValueError for nan or inf."""
    text = json.dumps(value, indent=1, ensure_ascii=False, sort_keys=sort_keys, allow_nan=False)
    with atomic_write(path) as file:
        file.write(text + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if it is missing. Raises: ValueError if invalid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def load_config(path: Path) -> Any:
    """Load a configuration of fairseq, over the bases beside it that its ``defaults`` name.

    An unchanged file is parsed only once, and the result is read-only. Raises: ValueError for
    invalid YAML or a missing task.
    """
    import yaml  # data preparation uses this module without yaml and omegaconf
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = _composed(path, path.stat().st_mtime_ns)
        if not OmegaConf.select(config, "task._name"):
            raise ValueError("it is not a configuration of fairseq: it has no task._name")
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise ValueError(f"{relative(path)} does not load: {error}") from None
    return config


@functools.lru_cache(maxsize=64)
def _composed(path: Path, changed: int) -> Any:
    """Return a configuration over its bases, as hydra composes them. changed: its mtime."""
    from omegaconf import OmegaConf

    config = OmegaConf.merge({}, OmegaConf.load(path))
    names = [name for name in config.pop("defaults", ()) if name != "_self_"]
    bases = [path.with_name(f"{name}.yaml") for name in names]
    merged = OmegaConf.merge(*(_composed(base, base.stat().st_mtime_ns) for base in bases), config)
    # It is cached: a change by one caller would reach all others.
    OmegaConf.set_readonly(merged, True)
    return merged


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the git checkout --------------------------------------------------------------------------


def require_checkout(root: Path = ROOT) -> None:
    """Raise ValueError if ``root`` lacks the configurations and scripts, as a wheel does."""
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
    # An installed package may lie in the repository of another project.
    if not top or Path(top).resolve() != root.resolve():
        return "unknown"
    head = _git(root, "rev-parse", "HEAD")
    dirty = _git(root, "status", "--porcelain", "--", ".", *(f":!{path}" for path in RENDERED))
    return (head + "-dirty" if dirty else head) if head else "unknown"


def _git(root: Path, *arguments: str) -> str:
    # In a git hook these name another repository.
    environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
