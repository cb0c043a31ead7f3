"""The identity of prepared data: sha256 checksums of the files that fairseq reads."""

import functools
import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from lrpe_fairseq.experiments.data.corpus import digest
from lrpe_fairseq.experiments.data.folders import manifest
from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.files import relative

DICTIONARY = "dictionary"
Checksums = dict[str, str]


def checksums(data: Path, splits: Collection[str]) -> Checksums:
    """Return a sha256 per split and one for the dictionaries of a data folder.

    Each covers the names and the contents of the files in ``bin`` that belong to it. A split
    without files is omitted; the result is empty if nothing is prepared.
    """
    parts: dict[str, list[str]] = {}
    for name, path in _files(data / "bin"):
        part = DICTIONARY if path.name.startswith("dict.") else path.name.split(".")[0]
        if part == DICTIONARY or part in splits:
            parts.setdefault(part, []).append(f"{name} {_digest_of(path)}\n")
    return {part: _sha256("".join(lines)) for part, lines in parts.items()}


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the parts of both that have different checksums."""
    return sorted(part for part in before.keys() & now.keys() if before[part] != now[part])


def verify(data: Path) -> None:
    """Check the files in ``bin`` against the manifest of data-prep, if there is one.

    Raises: UserError, which names the first file that is missing, damaged or replaced.
    """
    steps = manifest(data).get("steps", {}).values()
    written = {name: checksum for step in steps for name, checksum in step["writes"].items()}
    for name, checksum in written.items():
        path = data / name
        if name.startswith("bin/") and not (path.is_file() and _digest_of(path) == checksum):
            raise UserError(
                f"{relative(path)} is not the file that data-prep wrote (missing, damaged or "
                f"replaced): delete {relative(data)} and prepare it again"
            )


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name relative to ``folder``, path) of every file, sorted."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return ((name, path) for name, path in sorted(found.items()) if path.is_file())


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _digest_of(path: Path) -> str:
    """Return the sha256 of a file; recomputed only if its size or modification time changed."""
    about = path.stat()
    return _digest(path, about.st_size, about.st_mtime_ns)


@functools.cache
def _digest(path: Path, size: int, modified: int) -> str:
    return digest(path)
