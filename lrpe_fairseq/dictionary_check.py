"""A checkpoint records the words of its dictionaries, and is not read with others.

fairseq's commands take the dictionary from the data that they are given. Another one of the same
size gives every word the weights of another word, without an error; one of another size ends in a
traceback about shapes.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fairseq.models
from fairseq import checkpoint_utils, utils
from fairseq.trainer import Trainer

from lrpe_fairseq.compat import replace_once
from lrpe_fairseq.errors import refuse

KEY = "lrpe_dictionaries"
"""Of a checkpoint: side (source or target) -> checksum of the words."""
SIDES = ("source", "target")
EMBEDDINGS = {
    "encoder.embed_tokens.weight": "source",
    "encoder.sentence_encoder.embed_tokens.weight": "source",
    "decoder.embed_tokens.weight": "target",
}
"""Weights of a checkpoint that have a row for every word of a dictionary."""
ADDED = "<mask>"
"""A word that tasks add to the dictionary of their data."""

_read: dict[str, Any] = {}
"""What :func:`_remember` has found in the checkpoint that is being loaded."""


@functools.cache
def apply() -> None:
    """Record and compare dictionaries, in this process. A second call does nothing."""
    Trainer.state_dict = _recording(Trainer.state_dict)
    replace_once(checkpoint_utils, "load_checkpoint_to_cpu", _remember)
    replace_once(fairseq.models, "build_model", _compare_and_build)


def checksums(task: Any) -> dict[str, str]:
    """Return side -> checksum of the words of the dictionaries of a task."""
    return {
        side: checksum(dictionary.symbols[dictionary.nspecial :]) for side, dictionary in _of(task)
    }


def checksum(words: Sequence[str]) -> str:
    """Return the checksum of the words of a dictionary, in order and without special symbols."""
    return hashlib.sha256("\n".join(w for w in words if w != ADDED).encode()).hexdigest()


def _of(task: Any) -> Iterator[tuple[str, Any]]:
    """Yield the side and the dictionary of every side of a task that has one."""
    for side in SIDES:
        try:
            dictionary = getattr(task, f"{side}_dictionary", None)
        except NotImplementedError:
            continue
        if hasattr(dictionary, "symbols"):
            yield side, dictionary


def _recording(state_dict: Callable) -> Callable:
    @functools.wraps(state_dict)
    def recording(self: Trainer) -> dict[str, Any]:
        return {**state_dict(self), KEY: checksums(self.task)}

    return recording


def _remember(original: Callable, path: str, *rest: Any, **keywords: Any) -> dict[str, Any]:
    """Load a checkpoint, and note what is known of its dictionaries."""
    state = original(path, *rest, **keywords)
    sizes = {
        s: len(state["model"][n]) for n, s in EMBEDDINGS.items() if n in state.get("model", {})
    }
    known = state.get(KEY) or _checksums_of_data(state.get("cfg"))
    _read.clear()
    _read.update(path=path, sizes=sizes, checksums=known)
    return state


def _checksums_of_data(cfg: Any) -> dict[str, str]:
    """Return the checksums of the dictionaries of a checkpoint's training data, if they exist.

    For checkpoints without records of them.
    """
    task = cfg.get("task") if cfg else None
    folders = utils.split_paths(str(task.get("data") or "")) if hasattr(task, "get") else []
    if not folders:
        return {}
    languages = {side: task.get(f"{side}_lang") for side in SIDES}
    names = {side: f"dict.{lang}.txt" if lang else "dict.txt" for side, lang in languages.items()}
    files = {side: Path(folders[0], name) for side, name in names.items()}
    return {side: checksum(_words(file)) for side, file in files.items() if file.is_file()}


def _words(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [line.rpartition(" ")[0] for line in lines]


def _compare_and_build(
    original: Callable, cfg: Any, task: Any, from_checkpoint: bool = False, **keywords: Any
) -> Any:
    """Build a model; refuse one of a checkpoint if the task has other dictionaries."""
    found = dict(_read)
    _read.clear()
    if from_checkpoint and found:
        given = checksums(task)
        for side, dictionary in _of(task):
            size = found["sizes"].get(side, len(dictionary))
            if size != len(dictionary) or found["checksums"].get(side, given[side]) != given[side]:
                _refuse(found["path"], side, task)
    return original(cfg, task, from_checkpoint, **keywords)


def _refuse(path: str, side: str, task: Any) -> None:
    options = getattr(task, "cfg", None) or getattr(task, "args", None)
    refuse(
        f"the {side} dictionary of {getattr(options, 'data', 'the data')} is not the one that "
        f"{path} was trained with: read it with data that were prepared with its dictionary "
        "(fairseq-preprocess --srcdict, --tgtdict)"
    )
