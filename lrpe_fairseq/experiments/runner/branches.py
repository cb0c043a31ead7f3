"""Trainings that are the same at first: the longer one goes on from a checkpoint of the shorter.

With the schedule ``lrpe_trapezoid`` (:mod:`lrpe_fairseq.optim.trapezoid`) two trainings that differ
in the number of updates only are equal until the first of them lowers its rate. A run that has no
checkpoint copies the newest common one of another run of its experiment. The training is the one
that it would have been from its first update; ``wall_seconds`` count the copied updates too.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records import checkpoints, fairseq_log
from lrpe_fairseq.experiments.records.files import atomic_write
from lrpe_fairseq.experiments.records.provenance import USAGE

SCHEDULE = "lrpe_trapezoid"
LENGTH = frozenset({"optimization.max_update", "lr_scheduler.max_update"})
"""The options in which the runs may differ."""


def common_updates(config: Mapping[str, Any], updates: int) -> int:
    """Return the updates that a training of ``updates`` shares with that of ``config``.

    config: the options of the other training, by dotted key. 0 without the schedule of this module.
    """
    if config.get("lr_scheduler._name") != SCHEDULE:
        return 0
    shorter = min(int(config["optimization.max_update"]), updates)
    # Until the shorter one lowers its rate, both have the same updates.
    return round(shorter * (1 - float(config["lr_scheduler.decay_share"])))


def kept(settings: Any) -> int:
    """Return the interval of updates whose checkpoints a finished run keeps for others; 0: none.

    settings: its configuration.
    """
    interval = int(settings.checkpoint.get("keep_interval_updates_pattern", -1))
    # Other schedules depend on the length from the first update.
    return interval if settings.lr_scheduler._name == SCHEDULE and interval > 0 else 0


def copy_trunk(source: Path, folder: Path, updates: int) -> None:
    """Copy a checkpoint of another run's folder to the run in ``folder``, with its log until then.

    source: ``<run>/checkpoints/checkpoint_*_<updates>.pt``. It is the last checkpoint and the best
    one so far.
    """
    home = source.parent.parent
    target = folder / "checkpoints"
    target.mkdir(parents=True, exist_ok=True)
    # The copy is the same training: its commits and its data are those of the trunk.
    for name in (USAGE, f"checkpoints/{checkpoints.DICTIONARIES}"):
        shutil.copyfile(home / name, folder / name)
    log = (home / "train.log").read_text(encoding="utf-8", errors="replace")
    with atomic_write(folder / "train.log") as file:
        # Later lines are of the other branch.
        file.writelines(_until(log, updates))
    for name in (checkpoints.BEST, checkpoints.LAST):
        with open(source, "rb") as content, atomic_write(target / name, "wb") as file:
            shutil.copyfileobj(content, file, 1 << 20)


def is_best(state: Mapping[str, Any]) -> bool:
    """Return whether no earlier checkpoint of its training was better.

    The copy of a trunk is also ``checkpoint_best.pt``. If an earlier checkpoint was better, fairseq
    knows its value and would keep the copy in its place.
    """
    extra = state.get("extra_state") or {}
    return extra.get("best") is None or extra.get("val_loss") == extra["best"]


def candidates(folder: Path) -> dict[Path, int]:
    """Return the periodic checkpoints of the other runs beside ``folder``, most updates first."""
    updates_of = {
        path: updates
        for other in sorted(folder.parent.glob("*/checkpoints"))
        if other.parent != folder
        for updates, path in checkpoints.periodic(other).items()
    }
    return dict(sorted(updates_of.items(), key=lambda item: -item[1]))


def _until(log: str, updates: int) -> list[str]:
    """Return the lines of a training log before the first one of a later update."""
    lines = log.splitlines(keepends=True)
    for number, line in enumerate(lines):
        entry = fairseq_log.statistics_of(line)
        if entry is None:
            continue
        values = entry[1]
        # A validation logs its updates under another name.
        if int(values.get("num_updates", values.get("valid_num_updates", 0))) > updates:
            return lines[:number]
    return lines
