"""The synthetic suite, on data that data-prep/synthetic generates.

Every cell is trained with each learning rate of the table; a column shows the run with the lowest
validation loss.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lrpe_fairseq.experiments.data import synthetic
from lrpe_fairseq.experiments.data.folders import manifest
from lrpe_fairseq.experiments.records.fairseq_log import DIVERGED, parse_validation
from lrpe_fairseq.experiments.records.runs import Evaluations, Run
from lrpe_fairseq.experiments.runner.processes import RunFailed, Shell
from lrpe_fairseq.experiments.runner.training import TrainingRun

WHOLE = "whole"
WHOLE_PROTOCOL = (
    "fairseq-validate on every sequence of the split, with the true tokens given: answer_accuracy "
    "is the fraction of sequences without a wrong scored token, token_accuracy that of the scored "
    "tokens; loss is in bits per scored token."
)
MAX_TOKENS = 4096  # tokens per batch of an evaluation


@dataclass(frozen=True)
class SyntheticRun(TrainingRun):
    """One model of one task with one learning rate."""

    configs: ClassVar[str] = "synthetic"
    data_scripts: ClassVar[Mapping[str, str]] = {
        f"synthetic-{task}-small": f"data-prep/synthetic/prepare.py --task {task}"
        for task in synthetic.TASKS
    }
    curve: ClassVar[str] = "valid_answer_accuracy"
    data_name: ClassVar[str] = "{dataset}"
    run_name: ClassVar[str] = "{scale}-{cell}-{data}-lr{lr}-seed{seed}"
    always: ClassVar[Evaluations] = (("valid", WHOLE),)

    def measure(self, run: Shell) -> Run:
        """Return accuracies and loss of every split of ``evaluations``, in one process."""
        log = self.folder / "eval.log"
        # In one process: starting Python takes longer than these tests.
        splits = [split for split, _ in self.evaluations]
        options = ("--max-tokens", str(MAX_TOKENS))
        run(self.validation("lrpe_synthetic", ",".join(splits), *options), log)
        metrics = {split: {WHOLE: read_accuracy(log, self.data, split)} for split in splits}
        return {"metrics": metrics, "protocol": {WHOLE: WHOLE_PROTOCOL}}


def read_accuracy(log: Path, data: Path, split: str) -> dict[str, float]:
    """Return the metrics of a split in the output of fairseq-validate.

    If the loss is not finite: ``diverged`` and the counts.

    Raises: RunFailed unless every sample and answer of the manifest was counted. fairseq drops
        long samples silently if it is told to skip them.
    """
    printed = parse_validation(log, split)
    counts = {name: int(printed[name]) for name in ("samples", "answers")}
    known = manifest(data).get("splits", {}).get(split, counts)
    # fairseq leaves out samples above the maximum without an error.
    for name, number in counts.items():
        if number != known[name]:
            raise RunFailed(f"{number} of {known[name]} {name} of {split} were evaluated")
    if not math.isfinite(printed["exact_loss"]):
        return {DIVERGED: 1, **counts}
    accuracies = {name: printed[name] for name in ("answer_accuracy", "token_accuracy")}
    return {**accuracies, "loss": printed["exact_loss"], **counts}
