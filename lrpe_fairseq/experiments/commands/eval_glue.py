"""Score a fine-tuned checkpoint on a split of a prepared GLUE task."""

import argparse
import sys
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


def predict(checkpoint: Path, data: Path, split: str) -> tuple[list[float], list[float]]:
    """Return the predictions for every example of a split, and the labels: classes or values.

    Raises: ValueError if the split is absent, the head has another number of classes, or the
        checkpoint is damaged, diverged or of another model.
    """
    if not (data / "bin" / "input0" / f"{split}.idx").is_file():
        raise ValueError(f"{data} has no split {split}: prepare it with data-prep/glue")
    wanted = glue.named(data.name)
    trained = checkpoints.options(checkpoints.require_model(checkpoint, "lrpe_roberta")).get(
        "task.num_classes", 0
    )
    if trained != wanted.classes:
        raise ValueError(
            f"{checkpoint} has a head for {trained} classes, and {data.name} needs {wanted.classes}"
        )
    logits, right = predictions(checkpoint, data, split, _classified)
    predicted = logits.argmax(-1) if wanted.labels else logits.squeeze(-1)
    return predicted.tolist(), right.tolist()


def _classified(model: Any, net_input: Mapping[str, Any]) -> Tensor:
    return model(**net_input, features_only=True, classification_head_name=HEAD)[0]


@command("eval_glue")
def main(arguments: Sequence[str] | None = None) -> None:
    """Write the metrics as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="a folder made by data-prep/glue, such as …/RTE")
    parser.add_argument("--split", default="valid")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    predicted, right = predict(options.checkpoint, options.data, options.split)
    write_json(options.out, glue.scores(glue.named(options.data.name), predicted, right))


if __name__ == "__main__":
    sys.exit(main())
