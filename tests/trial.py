"""Runs that no table plans, in a folder of their own."""

from pathlib import Path
from typing import Any, TypeVar

from lrpe_fairseq.experiments.families.lm import LMRun
from lrpe_fairseq.experiments.runner.training import TrainingRun

SomeRun = TypeVar("SomeRun", bound=TrainingRun)


def trial(folder: Path, kind: type[SomeRun] = LMRun, **changes: Any) -> SomeRun:
    """A run of ``kind`` with its data, its checkpoints and its result in ``folder``."""
    given = {
        "experiment": "trial",
        "label": "Base",
        "config": "wikitext2",
        "data": folder / "data",
        "attention_type": "linear",
        "position_encoding": "none",
        "seed": 1,
        "scale": "small",
        "folder": folder / "work",
        "result": folder / "run.json",
    }
    return kind(**given | changes)
