"""Scores of all samples, or none."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.multilingual_language_modeling import MultilingualLanguageModelingTask

from lrpe_fairseq.compat.patching import replace_method
from lrpe_fairseq.errors import refuse

logger = logging.getLogger(__name__)


def refuse_partial_scores() -> None:
    """Refuse to score only some of the samples; the error counts the tokens left out.

    Break: samples that are longer than the model's maximum are skipped. ``fairseq-eval-lm`` prints
    the perplexity of the rest (1.00 if nothing is left) and ends with status 0. Other commands end
    with a traceback, or print the score of the rest with
    ``--skip-invalid-size-inputs-valid-test``. That stays possible, and the log counts the tokens.
    """
    for task in (LanguageModelingTask, MultilingualLanguageModelingTask):
        replace_method(task, "eval_lm_dataloader", _load_whole_text)
    replace_method(FairseqTask, "filter_indices_by_size", _filter_or_refuse)


def _load_whole_text(
    original: Callable, self: Any, dataset: Any, *rest: Any, **keywords: Any
) -> Any:
    limit = keywords.get("max_positions")
    indices = np.arange(len(dataset))
    # asked before: the original drops them with a warning among many lines
    ignored = dataset.filter_indices_by_size(indices, limit)[1] if limit is not None else ()
    if len(ignored):
        refuse(
            f"{_too_long(dataset, indices, ignored, limit)} would be left out: set "
            f"--tokens-per-sample to at most {limit}, or score longer texts with scripts/eval_lm.sh"
        )
    return original(self, dataset, *rest, **keywords)


def _filter_or_refuse(
    original: Callable,
    self: Any,
    indices: Any,
    dataset: Any,
    max_positions: Any = None,
    ignore_invalid_inputs: bool = False,
) -> Any:
    _, ignored = dataset.filter_indices_by_size(indices, max_positions)
    if len(ignored):
        said = _too_long(dataset, indices, ignored, max_positions)
        # --skip-invalid-size-inputs-valid-test, and the training set, which is filtered as ever
        if not ignore_invalid_inputs:
            refuse(
                f"{said} would be left out: shorten the samples{_how_to_shorten(self)}"
                ", or pass --skip-invalid-size-inputs-valid-test to read the rest only"
            )
        logger.warning("%s are left out", said)
    return original(self, indices, dataset, max_positions, ignore_invalid_inputs)


def _how_to_shorten(task: Any) -> str:
    """Return the options of a task that shorten its samples, in brackets; empty if it has none."""
    if isinstance(task, LanguageModelingTask):
        return (
            " (--tokens-per-sample N --max-target-positions N reads N tokens, "
            "--sample-break-mode eos lines)"
        )
    if hasattr(getattr(task, "cfg", None), "truncate_source"):
        return " (--truncate-source cuts sources)"
    return ""


def _too_long(dataset: Any, indices: Any, ignored: Any, limit: Any) -> str:
    # tokens, because a few long samples may be most of a text
    tokens = sum(int(dataset.num_tokens(index)) for index in ignored)
    samples = f"{len(ignored):,} of {len(indices):,} samples"
    return f"{tokens:,} tokens in {samples}, which are longer than the maximum of {limit},"
