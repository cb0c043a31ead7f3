"""Check that a data folder has the dictionary that a checkpoint was trained with.

A training stores the checksums of its dictionaries next to its checkpoints (:func:`remember`). For
a checkpoint without them, the dictionary in the data folder of its training is compared; if that
was deleted, only the number of words is compared.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records import checkpoints, shards
from lrpe_fairseq.experiments.records.files import ROOT, read_json, write_json

FILE = "dictionaries.json"
"""File next to the checkpoints: path of a dictionary in ``bin`` -> sha256 of its words in order."""

SPECIALS = 4  # <s>, <pad>, </s>, <unk>: in every fairseq dictionary, but not in dict.txt


def remember(folder: Path, data: Path) -> None:
    """Store the checksums of the dictionaries of ``data`` in a folder of checkpoints."""
    home = shards.first(data)
    found = sorted(home.rglob("dict*.txt"))
    write_json(folder / FILE, {p.relative_to(home).as_posix(): _sha256(p) for p in found})


def agree(
    checkpoint: Path,
    embedding: str,
    dictionary: Path,
    added: int = 0,
    say: Callable[[str], None] = lambda text: None,
    name: str = "",
) -> bool:
    """True if ``dictionary`` is the one of the ``embedding`` of ``checkpoint``.

    added: symbols that the task adds, such as ``<mask>``. say: called with a sentence if only the
    numbers of words were compared. name: the path of ``dictionary`` in ``bin``, by default its
    file name. The size of an adaptive input, which has no single embedding, is not compared.

    Raises: ValueError if the checkpoint does not load.
    """
    state = checkpoints.load(checkpoint)
    if not dictionary.is_file():
        return False
    weight = state["model"].get(embedding)
    if weight is not None and len(words(dictionary)) + SPECIALS + added != len(weight):
        return False
    trained = _trained_with(checkpoint, state, name or dictionary.name)
    if not trained:
        say(
            f"{checkpoint} does not tell the words of its dictionary and the data of its training "
            f"are gone: only the number of words of {dictionary} was compared"
        )
    return trained in ("", _sha256(dictionary))


def _trained_with(checkpoint: Path, state: dict[str, Any], name: str) -> str:
    """Return the sha256 of the dictionary of the training; empty if it is unknown."""
    kept = read_json(checkpoint.with_name(FILE)).get(name)
    there = ROOT / str(checkpoints.options(state).get("task.data", "")).split(":")[0] / name
    return str(kept) if kept else _sha256(there) if there.is_file() else ""


def _sha256(dictionary: Path) -> str:
    return hashlib.sha256("\n".join(words(dictionary)).encode()).hexdigest()


def words(dictionary: Path) -> list[str]:
    """Return the symbols of a ``dict.txt`` in order."""
    lines = dictionary.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [line.rpartition(" ")[0] for line in lines]
