"""The synthetic suite: accuracy of answers and of tokens, by multiple of the training length.

Every cell is trained with each learning rate of the table. A column shows the run with the lowest
validation loss.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lrpe_fairseq.experiments.data import synthetic
from lrpe_fairseq.experiments.data.folders import manifest
from lrpe_fairseq.experiments.records import fairseq_log
from lrpe_fairseq.experiments.records.fairseq_log import DIVERGED, Curve
from lrpe_fairseq.experiments.records.keys import Evaluations
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner.processes import RunFailed
from lrpe_fairseq.experiments.runner.training import Shell, TrainingRun

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
    """One model of one task with one learning rate."""

    configs: ClassVar[str] = "synthetic"
    data_scripts: ClassVar[Mapping[str, str]] = {
        f"synthetic-{task}-small": f"data-prep/synthetic/prepare.py --task {task}"
        for task in synthetic.TASKS
    }
    curve: ClassVar[Curve] = Curve("valid_answer_accuracy", "higher")
    data_name: ClassVar[str] = "{dataset}"
    run_name: ClassVar[str] = "{scale}-{cell}-{data}-lr{lr}-seed{seed}"
    always: ClassVar[Evaluations] = (VALID,)

    def measure(self, run: Shell) -> Run:
        """Return accuracies and loss of every split of ``evaluations``, in one process."""
        log = self.folder / "eval.log"
        splits = [split for split, _ in self.evaluations]
        run(self.evaluation_command(splits), log)
        text = log.read_text(encoding="utf-8")
        metrics = {split: {WHOLE: read_accuracy(text, self.data, split)} for split in splits}
        return {"metrics": metrics, "protocol": {WHOLE: PROTOCOL}}

    def evaluation_command(self, splits: list[str]) -> list[str]:
        """Return the fairseq-validate command for these splits."""
        return self.validation(TASK, ",".join(splits), "--max-tokens", str(MAX_TOKENS))


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
