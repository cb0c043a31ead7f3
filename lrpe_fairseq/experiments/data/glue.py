"""The tasks of GLUE: where their text stands in the official files, and how they are scored.

Classes are numbered as in the official scripts; in fairseq's label dictionary they are called
``0``, ``1`` and so on, so that a class is its number there too.
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

    inputs: columns of the sentence, or of the two. label: its column. labels: class -> what the
    files call it; empty for a regression. metrics: those of GLUE, the first one decides which
    checkpoint is best. files: split -> published name, without ``.tsv``. examples: of each
    split, officially. header: whether the files begin with names of columns.
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
        """Outputs of the head: the classes, or one number."""
        return len(self.labels) or 1

    @property
    def evaluations(self) -> tuple[str, ...]:
        """The splits that are scored."""
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

CRITERION = {  # metric -> how fairseq's criterion calls it, and the option that makes it report it
    "accuracy": ("accuracy", ""),
    "f1": ("f1", "report_acc_and_f1"),
    "matthews": ("mcc", "report_mcc"),
    "pearson": ("pearson", "report_pearson_and_spearman"),
    "spearman": ("spearman", "report_pearson_and_spearman"),
}


def named(name: str) -> GlueTask:
    """The task called ``name``. Raises: ValueError, naming those that there are."""
    if name not in TASKS:
        raise ValueError(f"GLUE has no task {name!r} here; there are {', '.join(TASKS)}")
    return TASKS[name]


def scores(task: GlueTask, predicted: Sequence[float], wanted: Sequence[float]) -> dict[str, float]:
    """Every metric of ``task``, times 100, and the number of ``examples``.

    predicted, wanted: class numbers, or values of a regression. A correlation with predictions
    that are all equal is 0: they say nothing.

    Raises: ValueError where the lengths differ or nothing was predicted.
    """
    if len(predicted) != len(wanted) or not len(wanted):
        raise ValueError(f"{len(predicted)} predictions for {len(wanted)} examples")
    sides = np.asarray(wanted, dtype=float), np.asarray(predicted, dtype=float)
    found = {name: 100 * METRICS[name](*sides) for name in task.metrics}
    return {**found, "examples": len(wanted)}


def _accuracy(wanted: Any, predicted: Any) -> float:
    return float((wanted == predicted).mean())


def _f1(wanted: Any, predicted: Any) -> float:
    """Of class 1; 0 where nothing of it was found."""
    both = float(((wanted == 1) & (predicted == 1)).sum())
    return 2 * both / (float((wanted == 1).sum() + (predicted == 1).sum()) or 1.0)


def _pearson(wanted: Any, predicted: Any) -> float:
    """Of two columns of 0 and 1 it is Matthews' correlation; 0 where a side is constant."""
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
