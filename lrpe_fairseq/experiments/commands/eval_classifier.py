"""Evaluate a classifier by hand: ``scripts/eval_classifier.sh``."""

import math
from pathlib import Path
from typing import Any

from torch import Tensor

import lrpe_fairseq  # noqa: F401  registers the models
from lrpe_fairseq.criterions.classification import scores
from lrpe_fairseq.experiments.data import corpus
from lrpe_fairseq.experiments.families import classification, preparation_of
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.fairseq_log import DIVERGED
from lrpe_fairseq.experiments.records.files import relative
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner import by_hand
from lrpe_fairseq.experiments.runner.predictions import predictions
from lrpe_fairseq.image_files import rows_and_columns
from lrpe_fairseq.tasks import images

CLASSIFIERS = ("lrpe_classifier", "lrpe_vit", "lrpe_cct")
INPUTS, LABELS = "input0/dict.txt", "label/dict.txt"


@command("eval_classifier")
def main(arguments: list[str] | None = None) -> None:
    """Evaluate a classifier: print accuracy and loss, write the run file."""
    parser = by_hand.arguments("eval_classifier", "Evaluate a checkpoint of a classifier.")
    # The default depends on the data: ImageNet has no test split.
    parser.set_defaults(splits=None)
    longest = "longest input; longer ones are cut (default: training's)"
    parser.add_argument("--max-positions", type=int, help=longest)
    pixels = "pixels that lrpe_vit reads (default: training's)"
    parser.add_argument("--image-size", metavar="HxW", help=pixels)
    options = by_hand.parsed(parser, arguments)
    data = by_hand.data_folder(options.data, preparation_of)
    there = [split for split in by_hand.SPLITS if _has_split(data, split)]
    run = evaluate_classifier(
        options.checkpoint,
        data,
        options.splits or there or list(by_hand.SPLITS),  # absent ones are refused in one sentence
        max_positions=options.max_positions,
        image_size=options.image_size,
    )
    by_hand.report(run, options.out, data)


def evaluate_classifier(
    checkpoint: Path,
    data: Path,
    splits: list[str],
    max_positions: int | None = None,
    image_size: str | None = None,
) -> Run:
    """Evaluate ``checkpoint`` on ``splits`` of a data folder and return the run file.

    max_positions: length at which inputs are cut; None for that of the training. image_size: of
        images in files, rows x columns; None for that of the training.

    Raises: ValueError for a damaged or diverged checkpoint, one of another model, data with other
        dictionaries, an absent split, or a length that the model does not support.
    """
    for split in splits:
        if not _has_split(data, split):
            raise ValueError(f"{relative(data)} has no split {split}: choose others with --splits")
    trained = checkpoints.options(checkpoints.require_model(checkpoint, *CLASSIFIERS))
    if not _reads_files(trained):
        inputs = data / "bin" / INPUTS
        by_hand.require_dictionary(checkpoint, inputs, "encoder.embed_tokens.weight", INPUTS)
    # Classes have no embedding: their dictionary is compared with that of the training data.
    by_hand.require_dictionary(checkpoint, data / "bin" / LABELS, "", LABELS)
    if _reads_files(trained):
        pixels = rows_and_columns(trained["task.image_size"])
        trained["task.max_positions"] = math.prod(pixels)
    elif image_size is not None:
        raise ValueError("--image-size is for models of images in files, of the task lrpe_images")
    longest = int(trained["task.max_positions"]) if max_positions is None else max_positions
    _require_length(checkpoint, longest, trained)
    overrides = _overrides(trained, longest, image_size)
    metrics: Run = {}
    name = classification.ACCURACY + (f"-at-{image_size}" if image_size else "")
    for split in splits:
        logits, targets = predictions(
            checkpoint, data, split, lambda model, x: model(**x), overrides
        )
        metrics[split] = {name: _measured(logits, targets)}
    sentence = classification.protocol(data, longest, _cut(data, splits, longest))
    sentence += f" Images have {image_size} pixels." if image_size else ""
    return by_hand.record(checkpoint, data, metrics, {name: sentence})


def _measured(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Return the scores of logits (N, classes) and classes (N,).

    If the loss is not finite: ``diverged`` and the number of examples.
    """
    found = scores(logits, targets)
    return found if math.isfinite(found["loss"]) else {DIVERGED: 1, "examples": found["examples"]}


def _reads_files(trained: Run) -> bool:
    """True for a model of images in files, which are resized and not cut."""
    return trained["task._name"] == images.NAME


def _overrides(trained: Run, longest: int, image_size: str | None) -> dict[str, Any]:
    """Return the options that change in evaluation: the size, and no augmentation of images."""
    if not _reads_files(trained):
        return {"max_positions": longest}
    plain = {"no_augmentation": True, "repeats": 1}
    if image_size is None:
        return plain
    grid = {"grid_width": 0, "grid_height": 0, "max_positions": None}  # those of the images
    return {**plain, **grid, "image_size": image_size}


def _has_split(data: Path, split: str) -> bool:
    places = (Path("input0", f"{split}.idx"), Path(f"{split}.tsv"))
    return any((data / "bin" / place).is_file() for place in places)


def _require_length(checkpoint: Path, longest: int, trained: Run) -> None:
    """Refuse a length with positions that the model has not learned."""
    learned = (
        trained["model.encoder_learned_pos"] and not trained["model.no_token_positional_embeddings"]
    )
    if longest < 1 or (learned and longest != trained["task.max_positions"]):
        raise ValueError(
            f"{relative(checkpoint)} does not support --max-positions {longest}: it has "
            f"{trained['task.max_positions']}" + (" learned absolute positions" if learned else "")
        )


def _cut(data: Path, splits: list[str], longest: int) -> int:
    """Return the number of inputs of ``splits`` that are longer than ``longest``."""
    folders = sorted((data / "bin").glob("input*"))
    lengths = (corpus.row_lengths(folder / split) for folder in folders for split in splits)
    return sum(int((rows > longest).sum()) for rows in lengths)
