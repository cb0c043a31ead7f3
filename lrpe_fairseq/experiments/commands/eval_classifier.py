"""Evaluate a checkpoint of a classifier: ``scripts/eval_classifier.sh``.

The facts about the training are read from the checkpoint; the result is a run file.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

import lrpe_fairseq  # noqa: F401  registers the models
from lrpe_fairseq.criterions.classification import scores
from lrpe_fairseq.experiments.data import corpus
from lrpe_fairseq.experiments.families import classification, preparation_of
from lrpe_fairseq.experiments.records import checkpoints, dictionaries
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import relative
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner import by_hand
from lrpe_fairseq.experiments.runner.predictions import predictions
from lrpe_fairseq.tasks import images

ARCHS = ("lrpe_classifier", "lrpe_vit")
SPLITS = ("valid", "test")
"""Evaluated by default, as far as the data have them."""
EMBEDDING = "encoder.embed_tokens.weight"
INPUTS, LABELS = "input0/dict.txt", "label/dict.txt"


@command("eval_classifier")
def main(arguments: list[str] | None = None) -> None:
    """Evaluate, print accuracy and loss, write the run file."""
    parser = by_hand.arguments("scripts/eval_classifier.sh", __doc__)
    parser.set_defaults(splits=None)
    parser.add_argument(
        "--max-positions", type=int, help="longest input; longer ones are cut (default: training's)"
    )
    options = by_hand.parsed(parser, arguments)
    data = by_hand.data_folder(options.data, preparation_of)
    splits = options.splits or [s for s in SPLITS if _has_split(data, s)] or list(SPLITS)
    run = evaluate(options.checkpoint, data, splits, options.max_positions)
    by_hand.report(run, options.out, data)


def evaluate(
    checkpoint: Path, data: Path, splits: list[str], max_positions: int | None = None
) -> Run:
    """Evaluate ``checkpoint`` on ``splits`` of a data folder and return the run file.

    max_positions: length at which inputs are cut; None for that of the training.

    Raises: ValueError for a damaged or diverged checkpoint, one of another model, data with other
        dictionaries, an absent split, or a length that the model does not support.
    """
    for split in splits:
        _require_split(data, split)
    trained = checkpoints.options(checkpoints.require_model(checkpoint, *ARCHS))
    _require_dictionaries(checkpoint, data, trained)
    if _reads_files(trained):
        trained["task.max_positions"] = trained["task.image_size"] ** 2  # pixels
    longest = int(trained["task.max_positions"]) if max_positions is None else max_positions
    _require_length(checkpoint, longest, trained)
    metrics: Run = {}
    for split in splits:
        found = predictions(checkpoint, data, split, _logits, _overrides(trained, longest))
        metrics[split] = {classification.ACCURACY: scores(*found)}
    said = classification.protocol(data, longest, _cut(data, splits, longest))
    protocol = {classification.ACCURACY: said}
    return by_hand.record(checkpoint, data, metrics, protocol)


def _reads_files(trained: Run) -> bool:
    """True for a model of images in files, which are resized and not cut."""
    return trained["task._name"] == images.NAME


def _overrides(trained: Run, longest: int) -> dict[str, Any]:
    """Return the options that change in evaluation: no augmentation of images."""
    if _reads_files(trained):
        return {"no_augmentation": True, "repeats": 1}
    return {"max_positions": longest}


def _has_split(data: Path, split: str) -> bool:
    places = (Path("input0", f"{split}.idx"), Path(f"{split}.tsv"))
    return any((data / "bin" / place).is_file() for place in places)


def _require_split(data: Path, split: str) -> None:
    if not _has_split(data, split):
        raise ValueError(f"{relative(data)} has no split {split}: choose others with --splits")


def _logits(model: Any, net_input: Mapping[str, Tensor]) -> Tensor:
    return model(**net_input)


def _require_dictionaries(checkpoint: Path, data: Path, trained: Run) -> None:
    known = {INPUTS: EMBEDDING, LABELS: ""}  # classes have no embedding
    if _reads_files(trained):
        del known[INPUTS]
    for name, embedding in known.items():
        path = data / "bin" / name
        if not dictionaries.agree(checkpoint, embedding, path, say=print, name=name):
            raise ValueError(
                f"{relative(path)} is not the dictionary that {relative(checkpoint)} was trained "
                "with: evaluate it on data with the dictionaries of its training"
            )


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
    return sum(int((own > longest).sum()) for own in lengths)


if __name__ == "__main__":
    sys.exit(main())
