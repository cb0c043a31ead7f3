"""The bases of configurations: run files hold what differs from ``base-<scale>.json`` beside them.

The first run of a scale writes the base, which never changes: a later edit of a YAML or of a
default does not reinterpret a run.
"""

import contextlib
import hashlib
import json
import os
import uuid
from functools import lru_cache
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records.files import read_json, write_json

Run = dict[str, Any]
PREFIX = "base-"


class BaseError(ValueError):
    """The base of a run file is missing or another one; the run file itself may be whole."""


def _home(run_file: Path, scale: str) -> Path:
    """Return the path of the base of a run file."""
    return run_file.parent / f"{PREFIX}{scale}.json"


def _digest(config: Run) -> str:
    """Return the hash of a whole configuration."""
    return hashlib.sha256(_text(config).encode()).hexdigest()[:16]


def packed(run: Run, target: Path) -> Run:
    """Return ``run`` with the differences of its configuration; the first run writes the base."""
    config = run["config"]
    base = _base_for(_home(target, run["scale"]), config)
    # Compared as JSON text: in Python 1, 1.0 and True are equal.
    base_texts = {key: _text(value) for key, value in base.items()}
    changed = {key: value for key, value in config.items() if base_texts.get(key) != _text(value)}
    packed_run = {**run, "config": changed, "config_hash": _digest(config)}
    if missing := sorted(base.keys() - config.keys()):
        packed_run["without"] = missing
    return packed_run


def unpacked(run: Run, source: Path) -> Run:
    """Return a run with its whole configuration. Raises: BaseError without base and equal hash."""
    # An evaluation by hand, or a file of a pack, which has its whole configuration.
    if "config_hash" not in run:
        return run
    path = _home(source, str(run.get("scale")))
    if not path.exists():
        raise BaseError(f"its base {path.name} is missing: restore it from the repository")
    missing = set(run.pop("without", ()))
    config_hash = run.pop("config_hash")
    try:
        base = _read(path, path.stat().st_mtime_ns)
    except ValueError as error:
        raise BaseError(f"{error}: restore it from the repository") from error
    config = {key: value for key, value in base.items() if key not in missing} | run["config"]
    # The hash finds a base that was edited after its runs, which would change what they say.
    if _digest(config) != config_hash:
        raise BaseError(
            f"its config_hash does not agree with its config and {path.name}: restore both from "
            "the repository, or delete the run file to train it again"
        )
    return {**run, "config": config}


def _base_for(path: Path, config: Run) -> Run:
    """Return the base at ``path``; if there is none, ``config`` becomes it."""
    if not path.exists():
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        write_json(part, config, sort_keys=True)
        try:
            _become(part, path)
        finally:
            part.unlink()
    return read_json(path)


def _become(part: Path, path: Path) -> None:
    """Give the content of ``part`` the name ``path``, unless another runner has written it."""
    try:
        # A link, unlike a rename, fails if the name exists.
        os.link(part, path)
    except FileExistsError:
        return
    except OSError:
        # A file system without hard links.
        with contextlib.suppress(FileExistsError), open(path, "xb") as file:
            file.write(part.read_bytes())


@lru_cache(maxsize=256)
def _read(path: Path, changed: int) -> Run:
    """Return the base at ``path``; ``changed``, its time of modification, is a key of the cache."""
    return read_json(path)


def _text(value: Any) -> str:
    """Return the JSON text of a value, in which 1, 1.0 and True differ."""
    return json.dumps(value, sort_keys=True)
