"""Score a fine-tuned checkpoint on a split of a prepared GLUE task."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from fairseq import checkpoint_utils, utils

import lrpe_fairseq  # noqa: F401  registers the models
from lrpe_fairseq.experiments.data import glue
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import write_json

HEAD = "sentence_classification_head"


@torch.no_grad()
def predict(checkpoint: Path, data: Path, split: str) -> tuple[list[float], list[float]]:
    """Return the predictions for every example of a split, and the labels: classes or values.

    Raises: ValueError if the split is absent, the head has another number of classes, or the
        checkpoint is damaged, diverged or of another model.
    """
    if not (data / "bin" / "input0" / f"{split}.idx").is_file():
        raise ValueError(f"{data} has no split {split}: prepare it with data-prep/glue")
    wanted = glue.named(data.name)
    trained = checkpoints.options(checkpoints.require_model(checkpoint, "lrpe_roberta")).get(
        "num-classes", 0
    )
    if trained != wanted.classes:
        raise ValueError(
            f"{checkpoint} has a head for {trained} classes, and {data.name} needs {wanted.classes}"
        )
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides={"data": str(data / "bin")}
    )
    model = models[0].eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    task.load_dataset(split)
    batches = task.get_batch_iterator(task.dataset(split), max_sentences=32)
    predicted, right = [], []
    for sample in batches.next_epoch_itr(shuffle=False):
        sample = utils.move_to_cuda(sample) if device == "cuda" else sample
        logits = model(**sample["net_input"], features_only=True, classification_head_name=HEAD)[0]
        said = logits.argmax(-1) if wanted.labels else logits.squeeze(-1)
        predicted += said.tolist()
        right += sample["target"].view(-1).tolist()
    return predicted, right


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
