"""Classification runs: :class:`TrainingRun` scored by accuracy."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lrpe_fairseq.experiments.data.folders import manifest
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.fairseq_log import Curve
from lrpe_fairseq.experiments.records.files import relative
from lrpe_fairseq.experiments.records.runs import Run, read_run
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import Children, run_child
from lrpe_fairseq.experiments.runner.training import TrainingRun

ACCURACY = "accuracy"
"""The protocol, and its first metric."""
CHOSEN = "The checkpoint is the one with the best validation accuracy."


@dataclass(frozen=True)
class ClassificationRun(TrainingRun):
    """The training and evaluation of one classifier."""

    configs: ClassVar[str] = "classification"
    data_scripts: ClassVar[Mapping[str, str]] = {
        "digits": "data-prep/digits/prepare.py",
        "mnist5k-14": "data-prep/mnist5k/prepare.py --size 14",
        "listops-20-100": "data-prep/listops/prepare.py --length 20-100",
        "listops-100-400": "data-prep/listops/prepare.py --length 100-400",
        "listops": "data-prep/listops/prepare.py --length 500-2000",
        "sst2-bytes": "data-prep/sst2-bytes/prepare.py",
        "imagenet": "data-prep/imagenet/prepare.py",
    }
    option_keys: ClassVar[Mapping[str, str]] = {
        "position-grid": "model.position_grid",
        "grid-width": "model.grid_width",
        "norm": "model.norm",
        "pooling": "model.pooling",
        "patch": "model.patch",
        "encoder-learned-pos": "model.encoder_learned_pos",
    }
    curve: ClassVar[Curve] = Curve("valid_accuracy", "higher")
    next_step: ClassVar[str] = "evaluate with: scripts/eval_classifier.sh {best} {data}"
    evaluations: tuple[tuple[str, str], ...] = (("valid", ACCURACY), ("test", ACCURACY))

    def measure(self, children: Children, devices: Devices, lock: int) -> Run:
        """Return accuracy and loss of every split of ``evaluations``."""
        log, found = (self.folder / f"eval.{kind}" for kind in ("log", "json"))
        log.unlink(missing_ok=True)
        found.unlink(missing_ok=True)
        best = self.checkpoints / checkpoints.BEST
        splits = list(dict.fromkeys(split for split, _ in self.evaluations))
        run_child(children, evaluation_command(best, self.data, splits, found), log, devices, lock)
        measured = read_run(found)
        said = {ACCURACY: f"{measured['protocol'][ACCURACY]} {CHOSEN}"}
        return {"metrics": measured["metrics"], "protocol": said}


def evaluation_command(checkpoint: Path, data: Path, splits: list[str], out: Path) -> list[str]:
    """Return the command that evaluates a checkpoint and writes a run file to ``out``."""
    return [
        *(sys.executable, "-m", "lrpe_fairseq.experiments.commands.eval_classifier"),
        *(relative(checkpoint), relative(data)),
        *("--splits", *splits, "--out", relative(out)),
    ]


def protocol(data: Path, longest: int, cut: int) -> str:
    """Return the protocol in words. cut: number of evaluated inputs cut at ``longest`` tokens."""
    sizes = manifest(data).get("splits", {})
    named = ", ".join(f"{split} {found['examples']:,}" for split, found in sizes.items())
    return (
        "Accuracy times 100, and cross-entropy in bits per example, over all examples of a split."
        + (f" Examples: {named}." if named else "")
        + (f" {cut:,} inputs are cut at {longest:,} tokens." if cut else "")
    )
