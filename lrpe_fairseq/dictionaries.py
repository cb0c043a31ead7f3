"""The words of a dictionary as a checksum: checkpoints record those of their training.

A dictionary that was prepared again may have other words in equal number, so that its size says
nothing. ``compat.dictionary_check`` writes the record and compares it in fairseq's commands;
``experiments/records/checkpoints.py`` compares it before an evaluation.

This module imports nothing of this package, of torch or of fairseq.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

KEY = "dictionaries"
"""Key of the record in a checkpoint: path of a dictionary in the data's folder, and side of the
model (source or target) -> checksum."""
SIDES_KEY = "lrpe_dictionaries"
"""Key of an older record, of the sides only."""
SPECIALS = 4
"""Symbols that fairseq adds before those of a dictionary: <s>, <pad>, </s> and <unk>."""
EMBEDDINGS = {
    "encoder.embed_tokens.weight": "source",
    "encoder.sentence_encoder.embed_tokens.weight": "source",
    "decoder.embed_tokens.weight": "target",
}
"""Weights of a checkpoint that have a row for every word of a dictionary -> its side."""
PATTERNS = ("dict*.txt", "*/dict*.txt")
"""The dictionaries of a folder: of the text, or of inputs and labels in folders of their own."""


def words(dictionary: Path) -> list[str]:
    """Return the symbols of a ``dict.txt`` in order.

    Raises: OSError if it cannot be read.
    """
    # not splitlines, which would also split at characters that are words
    lines = dictionary.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [line.rpartition(" ")[0] for line in lines]


def checksum_of_words(symbols: Iterable[str]) -> str:
    """Return the sha256 of the words of a dictionary in order, without special symbols."""
    return hashlib.sha256("\n".join(symbols).encode()).hexdigest()


def checksum(dictionary: Path) -> str:
    """Return the sha256 of the words of a ``dict.txt`` in order."""
    return checksum_of_words(words(dictionary))


def checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of every dictionary in a folder that fairseq reads, by relative path."""
    paths = sorted(path for pattern in PATTERNS for path in folder.glob(pattern))
    return {path.relative_to(folder).as_posix(): checksum(path) for path in paths}


def recorded(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the record of a checkpoint, also of one with an older record; {} without any."""
    return {**state.get(SIDES_KEY, {}), **state.get(KEY, {})}
