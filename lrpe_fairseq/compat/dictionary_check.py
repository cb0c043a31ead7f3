"""A checkpoint records the words of its dictionaries, and is not read with others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import fairseq.models
from fairseq import checkpoint_utils, utils
from fairseq.trainer import Trainer

from lrpe_fairseq import dictionaries
from lrpe_fairseq.compat.patching import replace_method, replace_once
from lrpe_fairseq.errors import refuse

SIDES = ("source", "target")
ADDED = "<mask>"
"""A word that tasks add to the dictionary of their data."""


@dataclass(frozen=True)
class Trained:
    """What a checkpoint says of its dictionaries, by side. sizes: rows of the embeddings."""

    path: str
    sizes: dict[str, int]
    checksums: dict[str, str]


_read: list[Trained] = []
"""What is known of the checkpoint that is being loaded; fairseq builds its model next."""


def refuse_other_dictionaries() -> None:
    """Record the words of a training's dictionaries, and refuse to read its checkpoint with others.

    Break: a checkpoint has the path of its data only, and fairseq's commands take the dictionary
    from the data that they are given. Another one of the same size, such as one that was prepared
    again in that folder, gives every word the weights of another word, without an error; one of
    another size ends in a traceback about shapes. The record is a key of its own, which fairseq
    ignores (:mod:`lrpe_fairseq.dictionaries`).
    """
    replace_method(Trainer, "__init__", _start_with_dictionaries)
    replace_method(Trainer, "state_dict", _state_with_dictionaries)
    replace_once(checkpoint_utils, "load_checkpoint_to_cpu", _remember)
    replace_once(fairseq.models, "build_model", _compare_and_build)


def checksums_of_task(task: Any) -> dict[str, str]:
    """Return side -> checksum of the words of the dictionaries of a task."""
    return {
        side: _checksum(dictionary.symbols[dictionary.nspecial :])
        for side, dictionary in _dictionaries_of(task)
    }


def _checksum(words: list[str]) -> str:
    return dictionaries.checksum_of_words(word for word in words if word != ADDED)


def _dictionaries_of(task: Any) -> Iterator[tuple[str, Any]]:
    """Yield the side and the dictionary of every side of a task that has one."""
    for side in SIDES:
        try:
            dictionary = getattr(task, f"{side}_dictionary", None)
        except NotImplementedError:  # FairseqTask, whose dictionaries are properties
            continue
        if hasattr(dictionary, "symbols"):
            yield side, dictionary


def _start_with_dictionaries(original: Callable, self: Any, *rest: Any, **named: Any) -> None:
    original(self, *rest, **named)
    data = getattr(self.cfg.task, "data", None)
    # now, because the folder may be prepared again while the model trains
    in_folder = dictionaries.checksums(Path(data.split(":")[0])) if data else {}
    self.dictionaries = in_folder | checksums_of_task(self.task)


def _state_with_dictionaries(original: Callable, self: Any) -> dict:
    return {**original(self), dictionaries.KEY: self.dictionaries}


def _remember(original: Callable, path: str, *rest: Any, **keywords: Any) -> dict[str, Any]:
    """Load a checkpoint, and note what is known of its dictionaries."""
    state = original(path, *rest, **keywords)
    weights = state.get("model", {})
    embeddings = dictionaries.EMBEDDINGS.items()
    sizes = {side: len(weights[name]) for name, side in embeddings if name in weights}
    _read[:] = [Trained(path, sizes, _checksums_by_side(state))]
    return state


def _checksums_by_side(state: dict[str, Any]) -> dict[str, str]:
    """Return side -> checksum from the record of a checkpoint, or from its data if they exist."""
    recorded = dictionaries.recorded(state)
    names = _names_by_side(state.get("cfg"))
    by_side = {side: recorded.get(side) or recorded.get(names.get(side)) for side in SIDES}
    by_side = {side: checksum for side, checksum in by_side.items() if checksum}
    # older checkpoints: the data that they were trained on may still be there
    return by_side or _checksums_of_data(state.get("cfg"))


def _checksums_of_data(cfg: Any) -> dict[str, str]:
    """Return the checksums of the dictionaries of a checkpoint's training data, if they exist.

    For checkpoints without records of them.
    """
    task = cfg.get("task") if cfg else None
    folders = utils.split_paths(str(task.get("data") or "")) if hasattr(task, "get") else []
    # all shards have one dictionary
    if not folders:
        return {}
    files = {side: Path(folders[0], name) for side, name in _names_by_side(cfg).items()}
    return {
        side: _checksum(dictionaries.words(file)) for side, file in files.items() if file.is_file()
    }


def _names_by_side(cfg: Any) -> dict[str, str]:
    """Return side -> file name of the dictionaries of a training; {} for a task as a Namespace."""
    task = cfg.get("task") if cfg else None
    if not hasattr(task, "get"):
        return {}
    languages = {side: task.get(f"{side}_lang") for side in SIDES}
    return {side: f"dict.{lang}.txt" if lang else "dict.txt" for side, lang in languages.items()}


def _compare_and_build(
    original: Callable, cfg: Any, task: Any, from_checkpoint: bool = False, **keywords: Any
) -> Any:
    """Build a model; refuse one of a checkpoint if the task has other dictionaries."""
    # once: a training also builds models that are not of the checkpoint read last
    trained = _read.pop() if _read else None
    if from_checkpoint and trained is not None:
        _compare(trained, task)
    return original(cfg, task, from_checkpoint, **keywords)


def _compare(trained: Trained, task: Any) -> None:
    """Refuse a task with another dictionary; without a checksum only its size is compared."""
    of_task = checksums_of_task(task)
    for side, dictionary in _dictionaries_of(task):
        size = trained.sizes.get(side, len(dictionary))
        checksum = trained.checksums.get(side, of_task[side])
        if size != len(dictionary) or checksum != of_task[side]:
            _refuse(trained.path, side, task)


def _refuse(path: str, side: str, task: Any) -> NoReturn:
    options = getattr(task, "cfg", None) or getattr(task, "args", None)
    refuse(
        f"the {side} dictionary of {getattr(options, 'data', 'the data')} is not the one that "
        f"{path} was trained with: read it with data that were prepared with its dictionary "
        "(fairseq-preprocess --srcdict, --tgtdict)"
    )
