"""Whole configurations of runs, stored as differences from a base beside the run files.

A run file holds in ``config`` what differs from ``base-<scale>.json`` of its folder, in ``without``
the keys of the base that it lacks, and in ``config_hash`` a hash of the whole configuration. The
first run of a scale writes the base, which never changes: a later edit of a YAML or of a default
does not reinterpret a run. An evaluation by hand has its whole configuration in its file.
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

Config = dict[str, Any]
PREFIX = "base-"
BY_HAND = "by-hand"
"""Experiment and scale of an evaluation by hand."""


def is_base(path: Path) -> bool:
    """True for the name of a base."""
    return path.name.startswith(PREFIX)


def all_in(folder: Path) -> list[Path]:
    """Return the bases of the run files of a folder."""
    return sorted(folder.glob(f"{PREFIX}*.json"))


def home(run_file: Path, scale: str) -> Path:
    """Return the path of the base of a run file."""
    return run_file.parent / f"{PREFIX}{scale}.json"


def digest(config: Config) -> str:
    """Return the hash of a whole configuration."""
    return hashlib.sha256(_text(config).encode()).hexdigest()[:16]


def packed(run: dict[str, Any], target: Path) -> dict[str, Any]:
    """Return ``run`` with the differences of its configuration; the first run writes the base."""
    if run["experiment"] == BY_HAND:
        return run
    config, base = run["config"], _base_for(home(target, run["scale"]), run["config"])
    known = {key: _text(value) for key, value in base.items()}
    own = {key: value for key, value in config.items() if known.get(key) != _text(value)}
    lacks = sorted(base.keys() - config.keys())
    without = {"without": lacks} if lacks else {}
    return {**run, "config": own, **without, "config_hash": digest(config)}


def unpacked(run: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return a run file's content with its whole configuration.

    Raises: ValueError if the base is missing or the hash does not agree.
    """
    if "config_hash" not in run:
        return run
    path = home(source, str(run.get("scale")))
    if not path.exists():
        raise ValueError(f"its base {path.name} is missing: restore it from the repository")
    lacks, known = set(run.pop("without", ())), run.pop("config_hash")
    base = _read(path, path.stat().st_mtime_ns)
    whole = {key: value for key, value in base.items() if key not in lacks} | run["config"]
    if digest(whole) != known:
        raise ValueError(f"its config_hash does not agree with its config and {path.name}")
    return {**run, "config": whole}


def _base_for(path: Path, config: Config) -> Config:
    """Return the base at ``path``; if there is none, ``config`` becomes it."""
    if not path.exists():
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        write_json(part, config, sort_keys=True)
        try:
            with contextlib.suppress(FileExistsError):  # another runner was first
                os.link(part, path)
        finally:
            part.unlink()
    return read_json(path)


@lru_cache(maxsize=256)
def _read(path: Path, changed: int) -> Config:
    """Return the base at ``path``; ``changed`` is its time of modification."""
    return read_json(path)


def _text(value: Any) -> str:
    """Return the JSON text of a value, in which 1, 1.0 and True differ."""
    return json.dumps(value, sort_keys=True)
