"""Prepared data folders: ``bin/``, and the ``manifest.json`` that data-prep writes next to it."""

import functools
import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.data.corpus import digest
from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.files import ROOT, SHARD, read_json, relative, shards_of

DICTIONARY = "dictionary"
Checksums = dict[str, str]


def manifest(data: Path) -> dict[str, Any]:
    """Return the manifest of a data folder; empty if data-prep did not make the folder."""
    return read_json(data / "manifest.json")


def dataset_name(data: Path) -> str:
    """Return corpus and level, such as ``wikitext-2-bpe``; the folder's name if no manifest."""
    known = manifest(data)
    return f"{known['corpus']}-{known['level']}" if "corpus" in known else data.name


def is_prepared(data: Path) -> bool:
    """True if ``data`` contains binarized text with its dictionary, from a script that finished."""
    known = manifest(data)
    # A manifest with steps and without splits is of a preparation that was interrupted.
    return ("splits" in known or "steps" not in known) and any((data / "bin").rglob("dict*.txt"))


def joined_shards(data: Path) -> str:
    """Return fairseq's path of ``data``: ``task.data``."""
    return ":".join(map(relative, shards_of(data)))


def data_home(path: str) -> Path:
    """Return the data folder of fairseq's path.

    >>> data_home("data/wikibook/bin/shard0:data/wikibook/bin/shard1")
    PosixPath('data/wikibook')
    """
    folder = Path(path.split(":")[0])
    # Shards lie one folder deeper than plain data.
    return folder.parent.parent if SHARD.fullmatch(folder.name) else folder.parent


def require(data: Path, preparation: Sequence[str]) -> None:
    """Raise UserError, with the command ``preparation`` if one is known, for missing data."""
    how = f"run .venv/bin/python {shlex.join(preparation)}"
    if not preparation:
        folder = relative(data / "bin")
        how = f"write data of your own with fairseq-preprocess --destdir {folder}"
    if not is_prepared(data):
        raise UserError(f"{relative(data)} is not prepared: {how}")


def require_splits(data: Path, splits: Sequence[str]) -> None:
    """Raise UserError if the manifest of ``data`` lacks one of ``splits``."""
    known = manifest(data).get("splits", {})
    for split in splits:
        # Data without a manifest are the user's own; fairseq finds out.
        if known and split not in known:
            raise UserError(
                f"{relative(data)} has no split {split} to evaluate; it has {', '.join(known)}"
            )


def prepare(data: Path, preparation: Sequence[str], source: Path | None = None) -> None:
    """Run ``preparation`` unless ``data`` is prepared; ``source`` replaces the download.

    With ``source`` the script always runs: it skips finished steps and refuses another source. A
    script that generates its data takes none, and runs without it.

    Raises: UserError if the script fails, or if none is known.
    """
    # A table with several data sets passes --from to all of them.
    if source and preparation and not takes_source(preparation):
        print(f"{relative(data)} is generated, so --from does not apply to it", flush=True)
        source = None
    if is_prepared(data) and source is None:
        return
    if not preparation:
        require(data, preparation)
    script = [*preparation, *(["--from", str(source.absolute())] if source else [])]
    print(shlex.join([sys.executable, *script]), flush=True)
    if _run(script).returncode:
        raise UserError(f"the preparation of {relative(data)} failed")


def takes_source(preparation: Sequence[str]) -> bool:
    """True if the data-prep script has the option ``--from``."""
    shown = _run([preparation[0], "--help"], capture_output=True, text=True)
    return "--from " in shown.stdout


def _run(script: Sequence[str], **options: Any) -> subprocess.CompletedProcess:
    """Run a script of data-prep with this Python from the repository root."""
    # Scripts of data-prep import this checkout, also where another version is installed.
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *script], cwd=ROOT, env=env, **options)


# ------------------------------------------------------------------------------------ checksums


def checksums(data: Path, splits: Collection[str]) -> Checksums:
    """Return a sha256 per split and one for the dictionaries of a data folder.

    Each covers the names and the contents of the files in ``bin`` that belong to it. A split
    without files is omitted; the result is empty if nothing is prepared.
    """
    parts: dict[str, str] = {}
    files = {path.relative_to(data / "bin").as_posix(): path for path in (data / "bin").rglob("*")}
    for name, path in sorted(files.items()):
        # Files of a split begin with its name: train.bin, train.en-de.en.idx.
        part = DICTIONARY if path.name.startswith("dict.") else path.name.split(".")[0]
        if path.is_file() and (part == DICTIONARY or part in splits):
            parts[part] = parts.get(part, "") + f"{name} {digest_of(path)}\n"
    return {part: hashlib.sha256(lines.encode()).hexdigest() for part, lines in parts.items()}


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the parts of both that have different checksums."""
    # A part that one side does not know, such as in an old run file, proves no change.
    return sorted(part for part in before.keys() & now.keys() if before[part] != now[part])


def verify(data: Path) -> None:
    """Check the files in ``bin`` against the manifest of data-prep, if there is one.

    Raises: UserError, which names the first file that is missing, damaged or replaced.
    """
    for step in manifest(data).get("steps", {}).values():
        for name, checksum in step["writes"].items():
            path = data / name
            # Only what fairseq reads: raw texts and pieces may be deleted to save space.
            if name.startswith("bin/") and not (path.is_file() and digest_of(path) == checksum):
                raise UserError(
                    f"{relative(path)} is not the file that data-prep wrote (missing, damaged or "
                    f"replaced): delete {relative(data)} and prepare it again"
                )


def digest_of(path: Path) -> str:
    """Return the sha256 of a file; recomputed only if its size or modification time changed."""
    about = path.stat()
    # Hashing gigabytes for every run of a table would take longer than small trainings.
    return _digest(path, about.st_size, about.st_mtime_ns)


@functools.cache
def _digest(path: Path, size: int, modified: int) -> str:
    return digest(path)
