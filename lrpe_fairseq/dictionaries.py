"""The words of a dictionary as a checksum: checkpoints record those of their training.

A dictionary that was prepared again may have other words in equal number, so that its size says
nothing. ``compat`` lets fairseq write the record; ``experiments/records/checkpoints.py`` compares
it before an evaluation.

This module imports nothing of this package, of torch or of fairseq.
"""

import hashlib
from pathlib import Path

KEY = "dictionaries"
"""Key of the record in a checkpoint: path of a dictionary in the data's folder -> checksum."""
PATTERNS = ("dict*.txt", "*/dict*.txt")
"""The dictionaries of a folder: of the text, or of inputs and labels in folders of their own."""


def words(dictionary: Path) -> list[str]:
    """Return the symbols of a ``dict.txt`` in order."""
    lines = dictionary.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [line.rpartition(" ")[0] for line in lines]


def checksum(dictionary: Path) -> str:
    """Return the sha256 of the words of a ``dict.txt`` in order."""
    return hashlib.sha256("\n".join(words(dictionary)).encode()).hexdigest()


def checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of every dictionary in a folder that fairseq reads, by relative path."""
    found = sorted(path for pattern in PATTERNS for path in folder.glob(pattern))
    return {path.relative_to(folder).as_posix(): checksum(path) for path in found}
