"""Score a fine-tuned checkpoint on a split of a GLUE task; the runner starts this command."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import lrpe_fairseq  # noqa: F401  registers the models
from lrpe_fairseq.experiments.data import glue
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import write_json
from lrpe_fairseq.experiments.runner.predictions import predictions

HEAD = "sentence_classification_head"


@command("eval_glue")
def main(arguments: Sequence[str] | None = None) -> None:
    """Write the scores as JSON."""
    parser = argparse.ArgumentParser(prog="eval_glue", description=__doc__.split(";")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="a folder of GLUE, such as …/RTE")
    parser.add_argument("split")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    predicted, labels = predict(options.checkpoint, options.data, options.split)
    write_json(options.out, glue.scores(glue.named(options.data.name), predicted, labels))


def predict(checkpoint: Path, data: Path, split: str) -> tuple[list[float], list[float]]:
    """Return the predictions for every example of a split, and the labels: classes or values."""
    checkpoints.require_model(checkpoint, "lrpe_roberta")
    logits, right = predictions(checkpoint, data, split, _classified)
    # A regression has one output: its value is the prediction.
    predicted = logits.argmax(-1) if glue.named(data.name).labels else logits.squeeze(-1)
    return predicted.tolist(), right.tolist()


def _classified(model: Any, net_input: Mapping[str, Any]) -> Tensor:
    return model(**net_input, features_only=True, classification_head_name=HEAD)[0]
