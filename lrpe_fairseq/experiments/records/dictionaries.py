"""Is the dictionary of a data folder the one that a checkpoint was trained with?"""

from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.files import ROOT

SPECIALS = 4  # <s>, <pad>, </s>, <unk>: in every fairseq dictionary, in no dict.txt


def agree(state: dict[str, Any], embedding: str, dictionary: Path, added: int = 0) -> bool:
    """True if ``dictionary`` is that of a checkpoint's ``embedding``.

    The words and their numbers are compared if the data of the training are there; otherwise only
    the number of words. added: symbols that the task adds, such as ``<mask>``.
    """
    size = len(state["model"][embedding])
    if not dictionary.is_file() or len(words(dictionary)) + SPECIALS + added != size:
        return False
    trained = ROOT / str(checkpoints.options(state).get("data", "")) / dictionary.name
    return not trained.is_file() or words(trained) == words(dictionary)


def words(dictionary: Path) -> list[str]:
    """The symbols of a ``dict.txt`` in their order."""
    lines = dictionary.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [line.rpartition(" ")[0] for line in lines]
