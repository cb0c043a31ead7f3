"""``lrpe_classification``: cross-entropy and accuracy of models that return logits (B, classes)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.options import option
from lrpe_fairseq.errors import one_sentence_errors, refuse

TOP = 5
LOG2 = math.log(2)


@dataclass
class ClassificationCriterionConfig(FairseqDataclass):
    """Options of the criterion."""

    label_smoothing: float = option(
        0.0, "probability that is spread over all classes in training; validation has none"
    )


@register_criterion("lrpe_classification", dataclass=ClassificationCriterionConfig)
class ClassificationCriterion(FairseqCriterion):
    """Cross-entropy over classes, computed in float32 and summed over the examples of a batch.

    ``sample["target"]`` holds classes, int64 (B,), or probabilities, (B, classes), as mixing two
    examples gives them. Label smoothing applies in training only, so that validation losses of
    trainings with and without it are comparable.

    Logged: ``loss`` (mean per example, base 2), ``accuracy`` (times 100) and, with more than
    10 classes, ``top5``: the examples whose class is among the 5 largest logits, times 100. A soft
    target counts as its most probable class.

    Raises: Refusal for a label smoothing outside [0, 1).
    """

    def __init__(self, task: Any, label_smoothing: float = 0.0) -> None:
        super().__init__(task)
        if not 0 <= label_smoothing < 1:
            refuse(f"--label-smoothing must be at least 0 and less than 1, not {label_smoothing:g}")
        self.label_smoothing = label_smoothing

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Return the loss (base e), the number of examples and the sums to log.

        reduce: True for the sum over examples, False for one loss per example, (B,).
        """
        with one_sentence_errors():  # of images that are not made of patches
            logits = model(**sample["net_input"]).float()
            target = sample["target"]
        smoothing = self.label_smoothing if model.training else 0.0
        losses = cross_entropy(logits, target, smoothing)
        loss = losses.sum() if reduce else losses
        log = {
            "loss": losses.detach().sum(),
            "ntokens": sample["ntokens"],
            "nsentences": len(target),
            "sample_size": len(target),
            **hits(logits.detach(), target),
        }
        return loss, len(target), log

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Log the means over all examples of all processes."""

        def total(name: str) -> float:
            return float(sum(log.get(name, 0) for log in logging_outputs))

        examples = total("sample_size")
        metrics.log_scalar("loss", total("loss") / examples / LOG2, examples, round=6)
        for name in ("accuracy", f"top{TOP}"):
            if any(f"_{name}" in log for log in logging_outputs):
                metrics.log_scalar(name, 100 * total(f"_{name}") / examples, examples)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """True: every logged value is a sum over examples."""
        return True


def cross_entropy(logits: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return -sum_c p_c log softmax(logits)_c per example, (B,).

    p is (1 - smoothing) target + smoothing / classes.

    Args:
        logits: (B, classes). target: classes int64 (B,), or probabilities (B, classes).
    """
    if target.is_floating_point():
        target = target.to(logits.dtype)  # probabilities come in float64
    return F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)


def hits(logits: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return the number of examples that are classified correctly.

    ``_accuracy``: the largest logit is that of the target. ``_top5``: the target is among the 5
    largest; only with more than 10 classes.
    """
    classes = target.argmax(1) if target.is_floating_point() else target
    places = {"_accuracy": 1}
    if logits.shape[1] > 2 * TOP:  # among fewer classes it says little
        places[f"_top{TOP}"] = TOP
    return {
        name: logits.topk(most, 1).indices.eq(classes.unsqueeze(1)).any(1).sum()
        for name, most in places.items()
    }


def scores(logits: Tensor, target: Tensor) -> dict[str, float]:
    """Return ``accuracy``, ``top5`` where there is one (times 100), ``examples`` and ``loss``.

    logits: (N, classes) of all examples; target: classes int64 (N,). The loss is in bits per
    example, without label smoothing.
    """
    count = len(target)
    percentages = {
        name.removeprefix("_"): 100 * int(right) / count
        for name, right in hits(logits, target).items()
    }
    loss = float(cross_entropy(logits.to(torch.float64), target).sum()) / count / LOG2
    return {**percentages, "loss": loss, "examples": count}
