"""Transduction runs: scores on the synthetic tasks of data-prep/algebraic.

Models are scored with the true prefix as input (teacher forcing), and in columns with the protocol
``generate`` also by what they write without it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lrpe_fairseq.experiments.data import transduction as data
from lrpe_fairseq.experiments.families.translation import EncoderDecoderRun
from lrpe_fairseq.experiments.records import fairseq_log
from lrpe_fairseq.experiments.records.fairseq_log import Curve
from lrpe_fairseq.experiments.records.keys import Evaluations
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner.processes import RunFailed
from lrpe_fairseq.experiments.runner.training import Shell, parse_validation

TASK = "lrpe_transduction"
TEACHER, GENERATE = "teacher", "generate"
METRICS = {  # by protocol: in a run file -> of fairseq-validate
    TEACHER: {
        "ppl": "teacher_ppl",
        "ppl_published": "ppl_published",
        "token_accuracy": "token_accuracy",
        "exact_match": "exact_match",
        "samples": "samples",
    },
    GENERATE: {
        "token_accuracy": "decoded_token_accuracy",
        "exact_match": "decoded_exact_match",
        "samples": "decoded_samples",
    },
}
DECODED = 256
"""Samples of a split that the protocol ``generate`` decodes."""
SCORED = {"copy": "all", "repeat": "inner", "reverse": "inner"}
"""The tokens that the paper scores in a task (``--scored-tokens``)."""
SCORED_IN_TREES = "no-end"
PROTOCOL = {
    TEACHER: "fairseq-validate with the true prefix as input. ppl: exp of the mean "
    "negative log-likelihood (base e) of the tokens that --scored-tokens selects; ppl_published: "
    "the same losses with the published code's count of tokens; token_accuracy: scored tokens "
    "without an error; exact_match: targets whose scored tokens have none.",
    GENERATE: f"fairseq-validate --decode-samples {DECODED}: greedy decoding of the first samples "
    "of the split without the true prefix. token_accuracy: tokens of the targets, end of sentence "
    "included, that the output has at the same place; exact_match: targets that equal the output.",
}


def _scripts() -> dict[str, str]:
    """Return name of a data folder, such as ``tree-ops-depth-small`` -> script with arguments."""
    found = {}
    for scale in data.SCALES:
        for task in data.TASKS:
            for order in [""] if task in data.SEQUENCES else data.ORDERS:
                name = f"{data.Recipe(task, scale, order).name}-{scale}"
                script = f"data-prep/algebraic/prepare.py --task {task} --scale {scale}"
                found[name] = f"{script} --order {order}" if order else script
    return found


@dataclass(frozen=True)
class TransductionRun(EncoderDecoderRun):
    """One encoder-decoder model on one task."""

    configs: ClassVar[str] = "transduction"
    task: ClassVar[str] = TASK
    data_scripts: ClassVar[Mapping[str, str]] = _scripts()
    curve: ClassVar[Curve] = Curve("valid_teacher_ppl", "lower")
    data_name: ClassVar[str] = "{dataset}-{scale}"
    run_name: ClassVar[str] = "{scale}-{dataset}-{cell}-seed{seed}"
    always: ClassVar[Evaluations] = (("valid", TEACHER), ("test", TEACHER))
    evaluations: Evaluations = always

    def encoding_choices(self) -> dict[str, str]:
        """Return attention and encoding of both halves, and the tokens to score."""
        return {**super().encoding_choices(), "task.scored_tokens": scored_tokens(self.data)}

    def validation_command(self, split: str, protocol: str = TEACHER) -> list[str]:
        """Return fairseq-validate of the best checkpoint on one split."""
        size = str(self.settings().dataset.batch_size)
        decode = ("--decode-samples", str(DECODED)) if protocol == GENERATE else ()
        return self.validation(TASK, split, "--batch-size", size, *decode)

    def measure(self, run: Shell) -> Run:
        """Return :data:`METRICS` of every split and protocol of ``evaluations``.

        Raises: RunFailed for a protocol that does not exist.
        """
        metrics: Run = {}
        for split, name in self.evaluations:
            if name not in METRICS:
                raise RunFailed(f"there is no protocol {name!r}: choose from {', '.join(METRICS)}")
            log = self.folder / f"eval-{split}-{name}.log"
            run(self.validation_command(split, name), log)
            metrics.setdefault(split, {})[name] = read_validation(log, split, name)
        used = {protocol for _, protocol in self.evaluations}
        return {"metrics": metrics, "protocol": {n: PROTOCOL[n] for n in PROTOCOL if n in used}}


def scored_tokens(folder: Path) -> str:
    """Return ``--scored-tokens`` of a data folder of this family, named ``<task>-<scale>``."""
    return SCORED.get(folder.name.partition("-")[0], SCORED_IN_TREES)


def read_validation(log: Path, split: str, protocol: str = TEACHER) -> dict[str, float]:
    """Read the :data:`METRICS` of a protocol, or ``diverged``, from fairseq-validate's output.

    Raises: RunFailed if one of them is missing.
    """
    found, names = parse_validation(log, split), METRICS[protocol]
    if missing := [name for name in names.values() if name not in found]:
        raise RunFailed(f"fairseq-validate printed no {missing[0]} for {split} ({log})")
    measured = {name: found[printed] for name, printed in names.items()}
    finite = all(math.isfinite(value) for value in measured.values())
    return measured if finite else {fairseq_log.DIVERGED: 1}
