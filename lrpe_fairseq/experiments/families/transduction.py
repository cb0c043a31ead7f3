"""Encoder-decoder models of transduction, on data that data-prep/algebraic generates.

They are scored with the true prefix as input (teacher forcing), and in columns with the protocol
``generate`` also by what they write without it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lrpe_fairseq.experiments.data import transduction
from lrpe_fairseq.experiments.families.translation import EncoderDecoderRun
from lrpe_fairseq.experiments.records.fairseq_log import DIVERGED, parse_validation
from lrpe_fairseq.experiments.records.runs import Evaluations, Run
from lrpe_fairseq.experiments.runner.processes import RunFailed, Shell

TEACHER, GENERATE = "teacher", "generate"
EXACT = ("token_accuracy", "exact_match", "samples")
METRICS = {  # by protocol: in a run file -> of fairseq-validate
    TEACHER: {"ppl": "teacher_ppl", "ppl_published": "ppl_published"} | {n: n for n in EXACT},
    GENERATE: {name: f"decoded_{name}" for name in EXACT},
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
    scripts = {}
    for scale in transduction.SCALES:
        for task in transduction.TASKS:
            # Sequences have no order of traversal.
            orders = [""] if task in transduction.SEQUENCES else transduction.ORDERS
            for order in orders:
                name = f"{transduction.Recipe(task, scale, order).name}-{scale}"
                script = f"data-prep/algebraic/prepare.py --task {task} --scale {scale}"
                scripts[name] = f"{script} --order {order}" if order else script
    return scripts


@dataclass(frozen=True)
class TransductionRun(EncoderDecoderRun):
    """One encoder-decoder model on one task."""

    configs: ClassVar[str] = "transduction"
    task: ClassVar[str] = "lrpe_transduction"
    data_scripts: ClassVar[Mapping[str, str]] = _scripts()
    curve: ClassVar[str] = "valid_teacher_ppl"
    data_name: ClassVar[str] = "{dataset}-{scale}"
    run_name: ClassVar[str] = "{scale}-{dataset}-{cell}-seed{seed}"
    always: ClassVar[Evaluations] = (("valid", TEACHER), ("test", TEACHER))
    evaluations: Evaluations = always

    def encoding_choices(self) -> dict[str, str]:
        """Return attention and encoding of both halves, and the tokens to score."""
        return {**super().encoding_choices(), "task.scored_tokens": scored_tokens(self.data)}

    def measure(self, run: Shell) -> Run:
        """Return :data:`METRICS` of every split and protocol of ``evaluations``.

        Raises: RunFailed for a protocol that does not exist.
        """
        metrics: Run = {}
        size = str(self.settings().dataset.batch_size)
        for split, name in self.evaluations:
            if name not in METRICS:
                raise RunFailed(f"there is no protocol {name!r}: choose from {', '.join(METRICS)}")
            log = self.folder / f"eval-{split}-{name}.log"
            # Greedy decoding reads one token at a time, so only the first samples are decoded.
            decode = ("--decode-samples", str(DECODED)) if name == GENERATE else ()
            run(self.validation(self.task, split, "--batch-size", size, *decode), log)
            metrics.setdefault(split, {})[name] = read_validation(log, split, name)
        used = {protocol for _, protocol in self.evaluations}
        return {"metrics": metrics, "protocol": {n: PROTOCOL[n] for n in PROTOCOL if n in used}}


def scored_tokens(folder: Path) -> str:
    """Return ``--scored-tokens`` of a data folder of this family, named ``<task>-<scale>``."""
    return SCORED.get(folder.name.partition("-")[0], SCORED_IN_TREES)


def read_validation(log: Path, split: str, protocol: str = TEACHER) -> dict[str, float]:
    """Return the :data:`METRICS` of a protocol, or ``diverged``. Raises: RunFailed without one."""
    values = parse_validation(log, split)
    names = METRICS[protocol]
    if missing := [name for name in names.values() if name not in values]:
        raise RunFailed(f"fairseq-validate printed no {missing[0]} for {split} ({log})")
    measured = {name: values[printed] for name, printed in names.items()}
    # Run files contain no inf or nan.
    finite = all(math.isfinite(value) for value in measured.values())
    return measured if finite else {DIVERGED: 1}
