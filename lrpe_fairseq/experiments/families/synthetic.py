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
from lrpe_fairseq.experiments.records.protocols import BLOCKS, BOUNDED, Protocol
from lrpe_fairseq.experiments.records.runs import Evaluations, Run
from lrpe_fairseq.experiments.runner.processes import RunFailed, Shell
from lrpe_fairseq.experiments.runner.training import TrainingRun

WHOLE = "whole"
WHOLE_PROTOCOL = (
    "fairseq-validate on every sequence of the split, with the true tokens given: answer_accuracy "
    "is the fraction of sequences without a wrong scored token, token_accuracy that of the scored "
    "tokens; loss is in bits per scored token."
)
SCALED_PROTOCOL = "{whole} {scaling} scales the rotations, for this evaluation only, by {factor:g}."
MAX_TOKENS = 4096  # tokens per batch of an evaluation


@dataclass(frozen=True)
class SyntheticRun(TrainingRun):
    """One model of one task with one learning rate."""

    configs: ClassVar[str] = "synthetic"
    data_scripts: ClassVar[Mapping[str, str]] = {
        f"synthetic-{task}-small": f"data-prep/synthetic/prepare.py --task {task}"
        for task in synthetic.TASKS
    } | {
        f"synthetic-{task}-many": f"data-prep/synthetic/prepare.py --scale many --task {task}"
        for task in synthetic.SCALES["many"].lengths
    }
    curve: ClassVar[str] = "valid_answer_accuracy"
    data_name: ClassVar[str] = "{dataset}"
    run_name: ClassVar[str] = "{scale}-{cell}-{data}-lr{lr}-seed{seed}"
    always: ClassVar[Evaluations] = (("valid", WHOLE),)

    def measure(self, run: Shell) -> Run:
        """Return accuracies and loss of every split of ``evaluations``.

        Protocols are ``whole`` and, with rotations that are scaled for the evaluation, such as
        ``whole+yarn-4``. Each is evaluated in one process.
        """
        metrics: Run = {split: {} for split, _ in self.evaluations}
        names = list(dict.fromkeys(name for _, name in self.evaluations))
        for name in names:
            # In one process: starting Python takes longer than these tests.
            splits = [split for split, of_split in self.evaluations if of_split == name]
            overrides = scaling_of(name).overrides(self.trained)
            scaled = ("--model-overrides", str(overrides)) if overrides else ()
            options = ("--max-tokens", str(MAX_TOKENS), *scaled)
            log = self.folder / f"eval-{name}.log"
            run(self.validation("lrpe_synthetic", ",".join(splits), *options), log)
            for split in splits:
                metrics[split][name] = read_accuracy(log, self.data, split)
        return {"metrics": metrics, "protocol": {name: sentence(name) for name in names}}

    @property
    def trained(self) -> int:
        """The training length in tokens."""
        return int(manifest(self.data)["length"])


def scaling_of(name: str) -> Protocol:
    """Return the scaling of rotations of a protocol. Raises: ValueError for an unknown protocol."""
    whole, plus, scaled = name.partition("+")
    if whole != WHOLE or scaled.endswith(BOUNDED):
        raise ValueError(f"there is no protocol {name!r}: use {WHOLE}, or {WHOLE}+yarn-4")
    # Protocols of language models name scalings in the same way.
    return Protocol.parse(BLOCKS + plus + scaled)


def sentence(name: str) -> str:
    """Return what a protocol does, in a sentence or two."""
    scaled = scaling_of(name)
    if scaled.scaling == "none":
        return WHOLE_PROTOCOL
    return SCALED_PROTOCOL.format(whole=WHOLE_PROTOCOL, **vars(scaled))


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
