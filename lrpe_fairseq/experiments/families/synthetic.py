"""The synthetic suite: accuracy of answers and of tokens, by multiple of the training length.

Every cell is trained with each learning rate of the table. A column shows the run with the lowest
validation loss.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from lrpe_fairseq.experiments.data import synthetic
from lrpe_fairseq.experiments.data.folders import manifest
from lrpe_fairseq.experiments.records import fairseq_log
from lrpe_fairseq.experiments.records.fairseq_log import DIVERGED, Curve
from lrpe_fairseq.experiments.records.files import ROOT, load_config
from lrpe_fairseq.experiments.records.layout import Table
from lrpe_fairseq.experiments.records.recipes import Cell
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner import validation
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import Children, RunFailed, run_child
from lrpe_fairseq.experiments.runner.training import TrainingRun

WHOLE = "whole"
VALID = ("valid", WHOLE)
PROTOCOL = (
    "fairseq-validate on every sequence of the split, with the true tokens given: answer_accuracy "
    "is the fraction of sequences without a wrong scored token, token_accuracy that of the scored "
    "tokens; loss is in bits per scored token."
)
TASK = "lrpe_synthetic"
MAX_TOKENS = 4096  # tokens per batch of an evaluation


@dataclass(frozen=True)
class SyntheticRun(TrainingRun):
    """One model of one task with one learning rate.

    ``lr``: peak learning rate. The other fields are those of every run.
    """

    configs: ClassVar[str] = "synthetic"
    data_scripts: ClassVar[Mapping[str, str]] = {
        f"synthetic-{task}-small": f"data-prep/synthetic/prepare.py --task {task}"
        for task in synthetic.TASKS
    }
    curve: ClassVar[Curve] = Curve("valid_answer_accuracy", "higher")
    lr: float = 0.003

    @classmethod
    def of_cell(
        cls, table: Table, cell: Cell, scale: str, config: Path, seed: int
    ) -> list[TrainingRun]:
        """Return one run of a cell per learning rate, on the data set of the cell's column.

        Raises: ValueError if a column has no data set.
        """
        if not cell.dataset:
            raise ValueError(f"table {table.name} needs a dataset in every column")
        [run] = super().of_cell(table, cell, scale, config, seed)
        rates = table.rates_at(scale, cell.rates) or list(load_config(config).optimization.lr)
        evaluations = (VALID, *run.evaluations)
        run = replace(run, data=ROOT / "data" / cell.dataset, evaluations=evaluations)
        return [run._at(table.name, f"{scale}-{cell.name}", lr) for lr in rates]

    def _at(self, table: str, cell: str, lr: float) -> "SyntheticRun":
        """Return this run with the learning rate ``lr``; its name has data set and rate."""
        name = f"{cell}-{self.data.name}-lr{lr:g}-seed{self.seed}"
        return replace(
            self,
            folder=ROOT / "runs" / table / name,
            result=ROOT / "results" / "runs" / table / f"{name}.json",
            lr=lr,
        )

    def encoding_choices(self) -> dict[str, str]:
        """Attention type, encoding and learning rate of the run."""
        return {**super().encoding_choices(), "optimization.lr": f"[{self.lr:g}]"}

    def measure(self, children: Children, devices: Devices, lock: int) -> Run:
        """Return accuracies and loss of every split of ``evaluations``, in one process."""
        log = self.folder / "eval.log"
        log.unlink(missing_ok=True)
        splits = [split for split, _ in self.evaluations]
        run_child(children, self.evaluation_command(splits), log, devices, lock)
        text = log.read_text(encoding="utf-8")
        metrics = {split: {WHOLE: read_accuracy(text, self.data, split)} for split in splits}
        return {"metrics": metrics, "protocol": {WHOLE: PROTOCOL}}

    def evaluation_command(self, splits: list[str]) -> list[str]:
        """Return the fairseq-validate command for these splits."""
        size = str(MAX_TOKENS)
        return validation.command(self, TASK, ",".join(splits), "--max-tokens", size)


def read_accuracy(log: str, data: Path, split: str) -> dict[str, float]:
    """Return the metrics of a split in the output of fairseq-validate.

    If the loss is not finite: ``diverged`` and the counts.

    Raises: RunFailed unless every sample and answer of the manifest was counted. fairseq drops
        long samples silently if it is told to skip them.
    """
    try:
        found = fairseq_log.parse_validation(log, split)
    except ValueError as error:
        raise RunFailed(str(error)) from None
    counts = {name: int(found[name]) for name in ("samples", "answers")}
    known = manifest(data).get("splits", {}).get(split, counts)
    for name, number in counts.items():
        if number != known[name]:
            raise RunFailed(f"{number} of {known[name]} {name} of {split} were evaluated")
    if not math.isfinite(found["exact_loss"]):
        return {DIVERGED: 1, **counts}
    accuracies = {name: found[name] for name in ("answer_accuracy", "token_accuracy")}
    return {**accuracies, "loss": found["exact_loss"], **counts}
