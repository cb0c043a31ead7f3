"""Runs that no table plans, in a folder of their own; their run files and checkpoints."""

import json
from pathlib import Path
from typing import Any, TypeVar

import torch

from lrpe_fairseq.experiments.families.lm import LMRun
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner import identity
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


def a_record(**changes: Any) -> Run:
    """The content of a run file, but for some changes."""
    return {
        "experiment": "trial",
        "dataset": "toy",
        "task": "language_modeling",
        "attention_type": "linear",
        "position_encoding": "none",
        "seed": 1,
        "scale": "small",
        "metrics": {"test": {"blocks": {"ppl": 50.0, "tokens": 1000}}},
        "protocol": {"blocks": "blocks."},
        "config": {},
        "commit": "0" * 40,
        "versions": {"python": "3.11", "torch": "2.13.0"},
        "hardware": {"cpu": "A CPU", "cores": 2, "gpus": []},
        "tokens_per_second": 1000.0,
        "wall_seconds": 10.0,
        "curve": [{"updates": 5, "tokens": 10, "valid_ppl": 60.0}],
        **changes,
    }


def trained(run: TrainingRun, **changes: Any) -> dict[str, Any]:
    """The options that a training of ``run`` would record, but for some changes."""
    return {**identity.options(identity.resolved(run.settings())), **changes}


def saved_config(run: TrainingRun) -> dict[str, Any]:
    """The configuration in the checkpoints of ``run``."""
    return json.loads(json.dumps(identity.resolved(run.settings()), default=str))


def checkpoint(path: Path, updates: int, **more: Any) -> Path:
    """Save what a training leaves after so many updates; the weights are their number."""
    state = {
        "cfg": {"model": {}},
        "model": {"weight": torch.full((1000,), float(updates))},
        "optimizer_history": [{"num_updates": updates}],
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)
    return path


def configurations(folder: Path) -> list[Path]:
    """The configurations of a folder, without the bases that they share."""
    return sorted(path for path in folder.glob("*.yaml") if not path.stem.startswith("base"))
