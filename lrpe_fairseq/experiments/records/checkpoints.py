"""fairseq's checkpoints, read without fairseq: does one load, and what options does it hold?"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lrpe_fairseq.experiments.records.files import written_whole

LAST = "checkpoint_last.pt"
BEST = "checkpoint_best.pt"
SECTIONS = (
    "common",
    "distributed_training",
    "dataset",
    "optimization",
    "checkpoint",
    "task",
    "model",
    "criterion",
    "optimizer",
    "lr_scheduler",
)
NAMES = {"model": "arch", "lr_scheduler": "lr-scheduler"}  # of a section's ``_name``


def load(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, under torch's safe loading.

    Raises: ValueError, one sentence, if it is absent, truncated or no checkpoint of fairseq.
    """
    if not path.exists():
        raise ValueError(f"{path} is not there")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises half a dozen types on a file that is cut short
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{path} does not load: {reason[0]}") from None
    if not isinstance(state, dict) or "optimizer_history" not in state or not state.get("cfg"):
        raise ValueError(f"{path} is no checkpoint of fairseq-train")
    return state


def updates(state: dict[str, Any]) -> int:
    """The number of updates that a loaded checkpoint has seen."""
    return state["optimizer_history"][-1]["num_updates"]


def seconds(state: dict[str, Any]) -> float:
    """Wall-clock seconds of the training until then, without the time it lay interrupted."""
    return round(float(state["extra_state"]["previous_training_time"]), 1)  # a group's is a tensor


def options(state: dict[str, Any]) -> dict[str, Any]:
    """Every option of the training that wrote the checkpoint; see :func:`named`."""
    return named({section: state["cfg"].get(section) or {} for section in SECTIONS})


def named(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The values of a configuration by section, by their command-line names.

    The chosen classes stand under ``arch``, ``task``, ``criterion``, ``optimizer`` and
    ``lr-scheduler``; a section in a section, such as a translation model's encoder, gives
    ``encoder-embed-dim``.
    """
    found: dict[str, Any] = {}
    for section, values in config.items():
        for name, value in _flat(section, values):
            if value is not None or name not in found:
                found[name] = _plain(value)
    found.pop("common", None)
    return found


def _flat(section: str, values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = NAMES.get(section, section) if key == "_name" else key.replace("_", "-")
        if section == "model" and isinstance(value, dict):
            yield from ((n, v) for n, v in _flat(section, value, f"{prefix}{name}-") if n != "arch")
        else:
            yield (name if key == "_name" else prefix + name), value


def ready_to_resume(folder: Path, say: Callable[[str], None]) -> int:
    """Make ``checkpoint_last.pt`` loadable, or absent, and return the updates it has seen.

    If it is truncated, the newest checkpoint of ``folder`` that loads takes its place; if none
    does, training will start over. Stock fairseq dies on a truncated checkpoint instead.
    """
    last = folder / LAST
    for path in _newest_first(folder):
        try:
            seen = updates(load(path))
        except ValueError as error:
            say(str(error))
            continue
        if path != last:
            _put(path, last)
            say(f"going on from {path.name}, update {seen}")
        return seen
    if last.exists():
        last.unlink()
        say("no checkpoint loads, so training starts over")
    return 0


def average(paths: Sequence[Path], target: Path) -> None:
    """Write the mean of the models of several checkpoints; all else is the last one's.

    Integer tensors, such as permutations, must agree. Raises: ValueError if they do not.
    """
    states = [load(path) for path in paths]
    models = [state["model"] for state in states]
    mean = {name: _mean(name, [model[name] for model in models]) for name in models[-1]}
    _write({**states[-1], "model": mean, "last_optimizer_state": None}, target)


def newest(folder: Path, count: int) -> list[Path]:
    """The ``count`` periodic checkpoints with the most updates, or those that there are, ascending.

    Raises: ValueError if there is none.
    """
    found = sorted(folder.glob("checkpoint_*_*.pt"), key=lambda path: int(path.stem.split("_")[-1]))
    if not found:
        raise ValueError(
            f"{folder} has no periodic checkpoints to average: evaluate one alone (--average 1)"
        )
    return found[-count:]


def drop_intermediate(folder: Path) -> None:
    """Keep the last and the best checkpoint of a finished run."""
    for path in folder.glob("checkpoint_*_*.pt"):
        path.unlink()


def remove_all(folder: Path) -> None:
    """Remove every checkpoint."""
    for path in folder.glob("checkpoint*.pt"):
        path.unlink()


def _newest_first(folder: Path) -> list[Path]:
    """``checkpoint_last.pt``, then the others by age."""
    others = [path for path in folder.glob("checkpoint*.pt") if path.name != LAST]
    others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return [path for path in (folder / LAST, *others) if path.exists()]


def _mean(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if tensors[0].is_floating_point():
        return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(tensors[0].dtype)
    if not all(torch.equal(tensor, tensors[0]) for tensor in tensors):
        raise ValueError(f"the checkpoints differ in {name}, which has no mean")
    return tensors[0]


def _write(state: dict[str, Any], target: Path) -> None:
    with written_whole(target, "wb") as file:
        torch.save(state, file)


def _put(source: Path, target: Path) -> None:
    with open(source, "rb") as content, written_whole(target, "wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)


def _plain(value: Any) -> Any:
    """A value that JSON knows."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
