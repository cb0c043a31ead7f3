"""The tasks of GLUE: the columns of the official files, and the metrics.

Classes are numbered as in the official scripts. fairseq's label dictionary lists them as ``0``,
``1``, ... in this order, so that a class has the same number there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lrpe_fairseq.experiments.data import correlation

PAIR_TAGS = ("entailment", "not_entailment")
BINARY = ("0", "1")


@dataclass(frozen=True)
class GlueTask:
    """One task.

    inputs: columns of the one or two sentences. label: column of the label. labels: class ->
    label in the files; empty for a regression. metrics: GLUE's metrics; the first selects the best
    checkpoint. files: split -> published name, without ``.tsv``. examples: official number of
    examples per split. header: True if the files start with a line of column names.
    """

    inputs: tuple[int, ...]
    label: int
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    examples: Mapping[str, int]
    files: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "valid": "dev"})
    header: bool = True

    @property
    def classes(self) -> int:
        """Number of outputs of the head: the classes, or 1 for a regression."""
        return len(self.labels) or 1

    @property
    def evaluations(self) -> tuple[str, ...]:
        """The splits to score."""
        return tuple(split for split in self.files if split != "train")


TASKS = {
    "CoLA": GlueTask(
        (3,), 1, BINARY, ("matthews",), {"train": 8_551, "valid": 1_043}, header=False
    ),
    "SST-2": GlueTask((0,), 1, BINARY, ("accuracy",), {"train": 67_349, "valid": 872}),
    "MRPC": GlueTask((3, 4), 0, BINARY, ("accuracy", "f1"), {"train": 3_668, "valid": 408}),
    "STS-B": GlueTask((7, 8), 9, (), ("pearson", "spearman"), {"train": 5_749, "valid": 1_500}),
    "QQP": GlueTask((3, 4), 5, BINARY, ("accuracy", "f1"), {"train": 363_846, "valid": 40_430}),
    "MNLI": GlueTask(
        (8, 9),
        -1,  # 12 columns in train, 16 in dev
        ("contradiction", "entailment", "neutral"),
        ("accuracy",),
        {"train": 392_702, "valid": 9_815, "valid1": 9_832},
        {"train": "train", "valid": "dev_matched", "valid1": "dev_mismatched"},
    ),
    "QNLI": GlueTask((1, 2), -1, PAIR_TAGS, ("accuracy",), {"train": 104_743, "valid": 5_463}),
    "RTE": GlueTask((1, 2), -1, PAIR_TAGS, ("accuracy",), {"train": 2_490, "valid": 277}),
}

CRITERION = {  # metric -> its name in fairseq's criterion, and the option that enables it
    "accuracy": ("accuracy", ""),
    "f1": ("f1", "report_acc_and_f1"),
    "matthews": ("mcc", "report_mcc"),
    "pearson": ("pearson", "report_pearson_and_spearman"),
    "spearman": ("spearman", "report_pearson_and_spearman"),
}


def named(name: str) -> GlueTask:
    """Return the task called ``name``. Raises: ValueError, which lists the known tasks."""
    if name not in TASKS:
        raise ValueError(f"unknown GLUE task {name!r}; choose from {', '.join(TASKS)}")
    return TASKS[name]


def scores(task: GlueTask, predicted: Sequence[float], wanted: Sequence[float]) -> dict[str, float]:
    """Return every metric of ``task``, times 100, and the number of ``examples``.

    predicted, wanted: class numbers, or values of a regression. A correlation with constant
    predictions is 0.

    Raises: ValueError if the lengths differ or there are no predictions.
    """
    if len(predicted) != len(wanted) or not len(wanted):
        raise ValueError(f"{len(predicted)} predictions for {len(wanted)} examples")
    sides = np.asarray(wanted, dtype=float), np.asarray(predicted, dtype=float)
    found = {name: 100 * METRICS[name](*sides) for name in task.metrics}
    return {**found, "examples": len(wanted)}


def _accuracy(wanted: Any, predicted: Any) -> float:
    return float((wanted == predicted).mean())


def _f1(wanted: Any, predicted: Any) -> float:
    """F1 of class 1; 0 without a true positive."""
    both = float(((wanted == 1) & (predicted == 1)).sum())
    return 2 * both / (float((wanted == 1).sum() + (predicted == 1).sum()) or 1.0)


def _pearson(wanted: Any, predicted: Any) -> float:
    """Equals Matthews' correlation for columns of 0 and 1; 0 if a side is constant."""
    return correlation.pearson(wanted, predicted) or 0.0


def _spearman(wanted: Any, predicted: Any) -> float:
    return correlation.spearman(wanted, predicted) or 0.0


METRICS: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews": _pearson,
    "pearson": _pearson,
    "spearman": _spearman,
}
