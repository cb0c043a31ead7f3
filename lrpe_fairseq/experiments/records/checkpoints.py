"""Check, read, average and delete fairseq's checkpoints, without fairseq.

A checkpoint records the checksums of its dictionaries (:mod:`lrpe_fairseq.dictionaries`), so that
it is not evaluated with other ones. Older checkpoints have them in a file next to them, if the
runner trained them (:func:`remember_dictionaries`). Without both, the dictionary in the data folder
of the training is compared; if there is none, or it is the one of the evaluation, which may have
been prepared again since, only the number of words is compared.
"""

import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lrpe_fairseq import dictionaries
from lrpe_fairseq.experiments.records.files import (
    ROOT,
    atomic_write,
    first_shard,
    read_json,
    write_json,
)
from lrpe_fairseq.safe_loading import load, load_sound, require_finite

LAST = "checkpoint_last.pt"
BEST = "checkpoint_best.pt"
AVERAGED = "checkpoint_averaged.pt"
CRASH = "crash.pt"  # fairseq saves it at an update whose gradients are not finite
PERIODIC = re.compile(r"checkpoint_\d+_(\d+)\.pt")
"""Name of a checkpoint that fairseq saves within an epoch; the number counts updates."""
DICTIONARIES = "dictionaries.json"
"""File next to the checkpoints: path of a dictionary in ``bin`` -> sha256 of its words in order."""
PLAIN = ("common", "distributed_training", "dataset", "optimization", "checkpoint")
"""Sections of fairseq's configuration with one class; the others have a class per ``_name``."""
SECTIONS = (*PLAIN, "task", "model", "criterion", "optimizer", "lr_scheduler")


def require_model(path: Path, *archs: str) -> dict[str, Any]:
    """Return the content of an undamaged checkpoint of one of ``archs`` or one of their presets.

    Raises: ValueError, one sentence, if it is damaged, diverged or of another model.
    """
    state = load_sound(path)
    name = str(options(state).get("model._name"))
    # A preset is named after its architecture, such as lrpe_lm_tiny.
    if not any(name == arch or name.startswith(f"{arch}_") for arch in archs):
        raise ValueError(f"{path} is a checkpoint of {name}, not of {' or '.join(archs)}")
    require_finite(path, state["model"])
    return state


def require_best(folder: Path) -> None:
    """Verify the best checkpoint. Raises: ValueError, which says what to do, if it is damaged."""
    try:
        load_sound(folder / BEST)
    except ValueError as error:
        raise ValueError(
            f"{error}: restore {BEST} from a copy, or delete {folder} to train again"
        ) from None


def updates(state: dict[str, Any]) -> int:
    """Return the number of updates before a loaded checkpoint was saved."""
    return state["optimizer_history"][-1]["num_updates"]


def seconds(state: dict[str, Any]) -> float:
    """Return the seconds of training before it was saved, in tenths, at least 0.1."""
    return max(0.1, round(float(state["extra_state"]["previous_training_time"]), 1))


def speed(state: dict[str, Any]) -> float | None:
    """Return training tokens per second since the start of the checkpoint's epoch, if it counts."""
    # fairseq stores its meters as (priority, name, class, state).
    meters = {name: values for _, name, _, values in state["extra_state"]["metrics"]["train"]}
    tokens, seconds = meters["wps"]["n"], meters["wps"]["init"]
    return round(tokens / seconds, 1) if tokens and seconds else None


def options(state: dict[str, Any]) -> dict[str, Any]:
    """Return every option of the training that saved the checkpoint; see :func:`dotted`."""
    sections = {name: state["cfg"].get(name) or {} for name in SECTIONS}
    return dotted({k: vars(v) if isinstance(v, Namespace) else v for k, v in sections.items()})


def dotted(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the options of a configuration by fairseq's dotted keys, such as ``model._name``.

    A nested section, such as a translation model's encoder, is part of the key:
    ``model.encoder.embed_dim``.
    """
    by_key = dict(pair for part, values in config.items() for pair in _dotted(part, values))
    # inf, nan and what JSON does not know become text
    return json.loads(json.dumps(by_key, default=str), parse_constant=lambda n: str(float(n)))


def _dotted(section: str, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and section == "model":
            yield from _dotted(f"{section}.{key}", value)
        elif key != "_name" or (value is not None and section in SECTIONS):
            yield f"{section}.{key}", value


def ready_to_resume(folder: Path, say: Callable[[str], None]) -> int:
    """Make ``checkpoint_last.pt`` resumable and return its number of updates.

    If it is damaged or not the newest, it is replaced by the undamaged checkpoint of ``folder``
    with the most updates. If there is none, it is renamed to ``checkpoint_last.pt.refused``, 0 is
    returned, and training starts over. Averages have no optimizer state and are never resumed.

    ``checkpoint_best.pt`` is replaced if the training has a better checkpoint.
    """
    last = folder / LAST
    resumable = _resumable(folder, say)
    if not resumable:
        if last.exists():
            # Kept for a look; fairseq would try to load it.
            last.replace(last.with_name(f"{LAST}.refused"))
            say(f"no checkpoint can be loaded; {LAST}.refused is the last; training starts over")
        return 0
    path = max(resumable, key=lambda path: resumable[path].updates)  # the first of several
    seen = resumable[path].updates
    if path != last:
        _copy(path, last)
        say(f"resuming from {path.name}, update {seen}")
    _restore_best(folder, resumable, resumable[path].best, say)
    return seen


def _restore_best(
    folder: Path, saved: Mapping[Path, "_Saved"], value: Any, say: Callable[[str], None]
) -> None:
    """Make ``checkpoint_best.pt`` the checkpoint whose validation has the best value so far.

    fairseq copies a checkpoint to ``checkpoint_best.pt`` after writing it. If it is killed between
    the two, the resumed training knows the value and would never write that file again.

    saved: the undamaged checkpoints. value: the best one that the resumed checkpoint knows; None
    without a validation.
    """
    best = folder / BEST
    # Of equal values fairseq takes the last one.
    reached = [path for path in saved if value is not None and saved[path].loss == value]
    path = max(reached, key=lambda path: saved[path].updates, default=best)
    if path != best and (best not in saved or saved[best].updates < saved[path].updates):
        _copy(path, best)
        say(f"{BEST} was not the best: it is {path.name} now, update {saved[path].updates}")


def _copy(source: Path, target: Path) -> None:
    """Copy a checkpoint: the other one may still be averaged or shared, so it is not renamed."""
    with open(source, "rb") as content, atomic_write(target, "wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)


def average(paths: Sequence[Path], target: Path) -> None:
    """Write a checkpoint with the mean of the weights of ``paths``; the rest is from the last one.

    Raises: ValueError if integer tensors, such as permutations, differ.
    """
    states = [load_sound(path) for path in paths]
    models = [state["model"] for state in states]
    mean = {name: _mean(name, [model[name] for model in models]) for name in models[-1]}
    with atomic_write(target, "wb") as file:
        # Without the optimizer's state it cannot be resumed by mistake.
        torch.save({**states[-1], "model": mean, "last_optimizer_state": None}, file)


def periodic(folder: Path) -> dict[int, Path]:
    """Return the periodic checkpoints of a folder by their updates, ascending."""
    # fairseq's own names sort by epoch as text: 10 comes before 9.
    named = [(PERIODIC.fullmatch(path.name), path) for path in folder.glob("checkpoint_*_*.pt")]
    return dict(sorted((int(name[1]), path) for name, path in named if name))


def newest(folder: Path, count: int) -> list[Path]:
    """Return the last ``count`` periodic checkpoints, ascending. Raises: ValueError without any."""
    every = list(periodic(folder).values())
    if not every:
        raise ValueError(
            f"{folder} has no periodic checkpoints to average: evaluate a single one (--average 1)"
        )
    return every[-count:]


def remove(folder: Path, names: str = "checkpoint*.pt*") -> None:
    """Delete every checkpoint of a folder, or those with such names."""
    for path in folder.glob(names):
        path.unlink()


def remember_dictionaries(folder: Path, data: Path) -> None:
    """Store the checksums of the dictionaries of ``data`` in a folder of checkpoints."""
    write_json(folder / DICTIONARIES, dictionaries.checksums(first_shard(data)))


def same_dictionary(
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
    """
    state = load(checkpoint)
    if not dictionary.is_file():
        return False
    weight = state["model"].get(embedding)
    size = len(dictionaries.words(dictionary)) + dictionaries.SPECIALS + added
    # Cheap and certain: another size is another dictionary.
    if weight is not None and size != len(weight):
        return False
    name = name or dictionary.name
    # What the checkpoint records itself comes last: it moves with the weights.
    recorded = {**read_json(checkpoint.with_name(DICTIONARIES)), **dictionaries.recorded(state)}
    trained = recorded.get(name) or recorded.get(dictionaries.EMBEDDINGS.get(embedding, ""))
    trained = trained or _in_training_data(checkpoint, state, dictionary, name)
    if not trained:
        say(
            f"{checkpoint} does not record the words of its dictionary: only the number of words "
            f"of {dictionary} was compared"
        )
    return trained in ("", dictionaries.checksum(dictionary))


def _in_training_data(checkpoint: Path, state: dict[str, Any], dictionary: Path, name: str) -> str:
    """Return the checksum of a dictionary in the data of the training; empty if there is none.

    ``dictionary`` itself proves nothing: the data may have been prepared again in their folder.
    """
    trained = options(state)
    data = str(trained.get("task.data", "")).split(":")[0]
    for folder in _started_in(checkpoint, str(trained.get("checkpoint.save_dir", ""))):
        there = folder / data / name
        if data and there.is_file():
            return "" if there.samefile(dictionary) else dictionaries.checksum(there)
    return ""


def _started_in(checkpoint: Path, save_dir: str) -> list[Path]:
    """Return the folder from which relative paths of a training count, or those that may be it.

    A checkpoint in a relative ``save_dir`` names the folder. One that was moved does not.
    """
    folder = checkpoint.absolute().parent.parts
    below = Path(os.path.normpath(save_dir)).parts
    above = len(folder) - len(below)
    if save_dir and folder[above:] == below:
        return [Path(*folder[:above])]
    return [Path.cwd(), ROOT]


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint says of its training.

    loss: the value of its own validation. best: the best value so far. None if it has none.
    """

    updates: int
    loss: Any
    best: Any


def _resumable(folder: Path, say: Callable[[str], None]) -> dict[Path, _Saved]:
    """Return the undamaged checkpoints by their paths; ``checkpoint_last.pt`` comes first."""
    saved = {}
    for path in sorted(folder.glob("checkpoint*.pt"), key=lambda path: path.name != LAST):
        try:
            state = load_sound(path)
        except ValueError as error:
            say(str(error))
            continue
        if state.get("last_optimizer_state", {}) is not None:
            extra = state.get("extra_state") or {}
            saved[path] = _Saved(updates(state), extra.get("val_loss"), extra.get("best"))
        elif path.name != AVERAGED:
            say(f"{path} is an average of checkpoints and is not resumed")
    return saved


def _mean(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of tensors; integer ones must be equal.

    Raises: ValueError if they are not.
    """
    if tensors[0].is_floating_point():
        # In float64: a sum of half-precision weights would lose digits.
        return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(tensors[0].dtype)
    if not all(torch.equal(tensor, tensors[0]) for tensor in tensors):
        raise ValueError(f"the checkpoints differ in {name}, whose values cannot be averaged")
    return tensors[0]
