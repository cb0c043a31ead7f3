"""Evaluate a checkpoint by hand: ``scripts/eval_lm.sh``, ``eval_mt.sh``, ``eval_classifier.sh``.

The facts about the training are read from the checkpoint; the result is a run file. Two commands
are started by the runner and write metrics only: ``score_lm``, for protocols with lengths of their
own, and ``eval_glue``, for a fine-tuned model.
"""

import argparse
import json
import logging
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import Dictionary, data_utils
from torch import Tensor

import lrpe_fairseq  # noqa: F401  registers the models
from lrpe_fairseq.criterions.classification import scores
from lrpe_fairseq.encodings.rotations.scaling import BY_TEXT, SCALINGS
from lrpe_fairseq.experiments.data import corpus, folders, glue
from lrpe_fairseq.experiments.families import classification, preparation_of, translation
from lrpe_fairseq.experiments.families import lm as language_models
from lrpe_fairseq.experiments.families.translation import Decoding
from lrpe_fairseq.experiments.records import checkpoints, runs
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import (
    first_shard,
    relative,
    require_writable,
    write_json,
)
from lrpe_fairseq.experiments.records.protocols import BLOCKS, DOCUMENTS, FORMS, SLIDING, Protocol
from lrpe_fairseq.experiments.records.runs import Run, environment, write_run
from lrpe_fairseq.experiments.runner import scoring
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import Children
from lrpe_fairseq.experiments.runner.training import shell
from lrpe_fairseq.image_files import rows_and_columns
from lrpe_fairseq.tasks import images
from lrpe_fairseq.tasks.truncated_bptt import document_starts

CHECKPOINT = "checkpoint"
"""Field of a run file: the sha256 of the evaluated checkpoint."""
PROTOCOLS = (BLOCKS, SLIDING)
CLASSIFIERS = ("lrpe_classifier", "lrpe_vit")
SPLITS = ("valid", "test")
"""Evaluated by default, as far as the data have them."""
HEAD = "sentence_classification_head"
FACTORS_OF = "of longrope: a JSON file with short_factor and long_factor, as of transformers"
BATCH = 32
INPUTS, LABELS = "input0/dict.txt", "label/dict.txt"


# --- language models ------------------------------------------------------------------------------


@command("eval_lm")
def lm(arguments: list[str] | None = None) -> None:
    """Evaluate a language model: print the perplexities, write the run file."""
    parser = _arguments("eval_lm", "Evaluate a language model under several protocols.")
    add, said = parser.add_argument, f"of {FORMS}"
    add("--protocols", nargs="+", default=PROTOCOLS, metavar="PROTOCOL", help=said)
    add("--context-scaling", choices=SCALINGS, default="none")
    add("--context-factor", type=float, default=1.0, metavar="F")
    add("--longrope-factors", type=Path, metavar="FILE", help=FACTORS_OF)
    options = _parsed(parser, arguments)
    data, names = _data_folder(options.data), options.protocols
    scaling, scaled = options.context_scaling, options.context_factor != 1
    if (scaling == "none" and scaled) or not options.context_factor >= 1:
        raise ValueError("--context-factor, at least 1, needs --context-scaling")
    if scaling not in ("none", *BY_TEXT) and not scaled:
        raise ValueError(f"--context-scaling {scaling} needs --context-factor above 1")
    if scaling != "none":
        factor = str(options.context_factor).removesuffix(".0")
        names = [f"{name}+{scaling}-{factor}" for name in names]
    if options.longrope_factors and scaling != "longrope":
        raise ValueError("--longrope-factors needs --context-scaling longrope")
    factors = longrope_factors(options.longrope_factors) if options.longrope_factors else ""
    run = evaluate_lm(options.checkpoint, data, options.splits, names, factors)
    report(run, options.out, data)


def longrope_factors(path: Path) -> str:
    """Return the option ``longrope_factors`` of a JSON file with the lists of transformers.

    ``short_factor`` and ``long_factor`` stand at its top level, or in the ``rope_scaling`` or
    ``rope_parameters`` of a model's config.json. Raises: UserError for another file.
    """
    try:
        known = json.loads(path.read_text())
        own = known.get("rope_scaling") or known.get("rope_parameters") or known
        return ",".join(str(float(n)) for n in (*own["short_factor"], *own["long_factor"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} is no JSON file with the lists short_factor and long_factor: give the "
            "config.json of a model with longrope"
        ) from error


def evaluate_lm(
    checkpoint: Path,
    data: Path,
    splits: list[str],
    names: Sequence[str] = PROTOCOLS,
    factors: str = "",
) -> Run:
    """Evaluate ``checkpoint`` on ``splits`` of a data folder and return the run file.

    factors: ``longrope_factors`` of protocols with longrope; empty: those of the training.
    Raises: ValueError for an unknown protocol, a damaged or diverged checkpoint, one of another
        model, or data with another dictionary; UserError for learned positions that are too few;
        RunFailed if an evaluation fails or is empty.
    """
    wanted = [Protocol.parse(name) for name in names]
    config = checkpoints.options(checkpoints.require_model(checkpoint, "lrpe_lm"))
    config |= {language_models.FACTORS: factors} if factors else {}
    language_models.require_positions(config, config["task.tokens_per_sample"], wanted)
    _require_dictionary(checkpoint, first_shard(data) / "dict.txt", "decoder.embed_tokens.weight")
    pairs = tuple((split, name) for split in splits for name in names)
    folder = checkpoint.absolute().parent
    measured = language_models.measure(checkpoint, data, pairs, config, folder, _shown)
    return record(checkpoint, data, measured["metrics"], measured["protocol"])


def _shown(words: list[str], log: Path) -> None:
    print(shlex.join(words), flush=True)
    shell(Children(), Devices())(words, log)


@command("score_lm")
def score_lm(arguments: Sequence[str] | None = None) -> None:
    """Evaluate a split under protocols with lengths of their own; write the metrics as JSON."""
    options = _of_runner("score_lm", arguments)
    given = options.checkpoint, options.data, options.split, options.protocols
    found = score(*given, options.longrope_factors)
    write_json(options.out, found)


def score(
    checkpoint: Path, data: Path, split: str, names: Sequence[str], factors: str = ""
) -> dict[str, dict[str, float]]:
    """Return the metrics of every protocol of ``names``; the model is loaded once per scaling.

    factors: see :func:`evaluate_lm`.

    Raises: ValueError if the split is absent, a protocol does not fit, or the checkpoint is
        damaged, diverged or of another model, or ``documents`` does not list the documents.
    """
    trained = checkpoints.options(checkpoints.require_model(checkpoint, "lrpe_lm"))
    home, length = first_shard(data), trained["task.tokens_per_sample"]
    factors = factors or trained.get(language_models.FACTORS, "")
    dictionary = Dictionary.load(str(home / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(home / split), dictionary)
    if lines is None:
        raise ValueError(f"{data} has no split {split}")
    text = torch.cat([lines[index] for index in range(len(lines))]).long()
    starts = [0]
    if any(Protocol.parse(name).kind == DOCUMENTS for name in names):
        known = document_starts(data / "documents" / f"{split}.tsv", lines.sizes)
        starts += known[1:].tolist()  # what precedes the first one belongs to it
    found: dict[str, dict[str, float]] = {}
    for scaling in dict.fromkeys(name.partition("+")[2] for name in names):
        own = [name for name in names if name.partition("+")[2] == scaling]
        protocol = Protocol.parse(own[0])
        overrides = {"data": str(home), **protocol.overrides(length, factors)}
        (model,), _ = checkpoint_utils.load_model_ensemble([str(checkpoint)], overrides)
        model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        found |= scoring.evaluate(model, text, dictionary.eos(), length, own, starts)
    return {name: found[name] for name in names}


# --- translation ----------------------------------------------------------------------------------


@command("eval_mt")
def mt(arguments: list[str] | None = None) -> None:
    """Translate with a checkpoint: print the scores, write the run file."""
    options = _parse_mt(arguments)
    decoding = Decoding(options.beam, options.lenpen, options.average)
    data = _data_folder(options.data)
    run = evaluate_mt(options.checkpoint, data, options.splits, decoding)
    report(run, options.out, data)


def evaluate_mt(checkpoint: Path, data: Path, splits: list[str], decoding: Decoding) -> Run:
    """Return the run file of ``checkpoint``, or of the mean of the last ones in its folder.

    Raises: ValueError if there are no such checkpoints, or for a damaged or diverged one or one of
        another model; RunFailed if they do not match the data or a sentence is not translated.
    """
    checkpoints.require_model(checkpoint, "lrpe_transformer")
    translation.require_dictionaries(checkpoint, data)  # raises before a mean is written
    used = checkpoint
    if decoding.average > 1:
        used, decoding = decoding.mean(checkpoint.parent)
    logs = checkpoint.absolute().parent
    measured = translation.measure(used, data, splits, decoding, logs, shell(Children(), Devices()))
    return record(checkpoint, data, measured["metrics"], measured["protocol"], used)


def _parse_mt(arguments: list[str] | None) -> argparse.Namespace:
    parser = _arguments("eval_mt", "Translate with checkpoints and score.")
    add, usual = parser.add_argument, Decoding()
    said = "average the last N periodic checkpoints of this folder; 1: this checkpoint only"
    add("--beam", type=int, default=usual.beam)
    add("--lenpen", type=float, default=usual.length_penalty)
    add("--average", type=int, default=usual.average, metavar="N", help=said)
    return _parsed(parser, arguments)


# --- classifiers ----------------------------------------------------------------------------------


@command("eval_classifier")
def classifier(arguments: list[str] | None = None) -> None:
    """Evaluate a classifier: print accuracy and loss, write the run file."""
    parser = _arguments("eval_classifier", "Evaluate a checkpoint of a classifier.")
    parser.set_defaults(splits=None)
    longest = "longest input; longer ones are cut (default: training's)"
    parser.add_argument("--max-positions", type=int, help=longest)
    pixels = "pixels that lrpe_vit reads (default: training's)"
    parser.add_argument("--image-size", metavar="HxW", help=pixels)
    options = _parsed(parser, arguments)
    data = _data_folder(options.data)
    splits = options.splits or [s for s in SPLITS if _has_split(data, s)] or list(SPLITS)
    sizes = options.max_positions, options.image_size
    run = evaluate_classifier(options.checkpoint, data, splits, *sizes)
    report(run, options.out, data)


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
        _require_dictionary(checkpoint, inputs, "encoder.embed_tokens.weight", INPUTS)
    _require_dictionary(checkpoint, data / "bin" / LABELS, "", LABELS)  # classes: no embedding
    if _reads_files(trained):
        pixels = rows_and_columns(trained["task.image_size"])
        trained["task.max_positions"] = math.prod(pixels)
    elif image_size is not None:
        raise ValueError("--image-size is for models of images in files, of the task lrpe_images")
    longest = int(trained["task.max_positions"]) if max_positions is None else max_positions
    _require_length(checkpoint, longest, trained)
    overrides, metrics = _overrides(trained, longest, image_size), {}
    name = classification.ACCURACY + (f"-at-{image_size}" if image_size else "")
    for split in splits:
        found = predictions(checkpoint, data, split, lambda model, x: model(**x), overrides)
        metrics[split] = {name: scores(*found)}
    said = classification.protocol(data, longest, _cut(data, splits, longest))
    said += f" Images have {image_size} pixels." if image_size else ""
    return record(checkpoint, data, metrics, {name: said})


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
    return sum(int((own > longest).sum()) for own in lengths)


@torch.no_grad()
def predictions(
    checkpoint: Path,
    data: Path,
    split: str,
    call: Callable[[Any, Mapping[str, Any]], Tensor],
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (N, ...) of all examples of a split, and their targets (N,).

    Args:
        data: a folder of data-prep.
        call: (model, net_input of a batch) -> outputs (B, ...).
        overrides: options of the checkpoint that change, by flat names.
    Returns: on the CPU, in the order of the batches.
    """
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides={"data": str(data / "bin"), **(overrides or {})}
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = models[0].eval().to(device)
    task.load_dataset(split)
    batches = task.get_batch_iterator(task.dataset(split), max_sentences=BATCH)
    outputs, targets = [], []
    for sample in batches.next_epoch_itr(shuffle=False):
        sample = utils.move_to_cuda(sample) if device == "cuda" else sample
        outputs.append(call(model, sample["net_input"]).cpu())
        targets.append(sample["target"].view(-1).cpu())
    return torch.cat(outputs), torch.cat(targets)


@command("eval_glue")
def eval_glue(arguments: Sequence[str] | None = None) -> None:
    """Score a fine-tuned checkpoint on a split of a GLUE task; write the metrics as JSON."""
    options = _of_runner("eval_glue", arguments)
    predicted, right = predict(options.checkpoint, options.data, options.split)
    write_json(options.out, glue.scores(glue.named(options.data.name), predicted, right))


def predict(checkpoint: Path, data: Path, split: str) -> tuple[list[float], list[float]]:
    """Return the predictions for every example of a split, and the labels: classes or values."""
    checkpoints.require_model(checkpoint, "lrpe_roberta")
    logits, right = predictions(checkpoint, data, split, _classified)
    predicted = logits.argmax(-1) if glue.named(data.name).labels else logits.squeeze(-1)
    return predicted.tolist(), right.tolist()


def _classified(model: Any, net_input: Mapping[str, Any]) -> Tensor:
    return model(**net_input, features_only=True, classification_head_name=HEAD)[0]


# --- what all have in common ----------------------------------------------------------------------


def _arguments(script: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all evaluations: checkpoint, data, splits, out."""
    parser = argparse.ArgumentParser(prog=f"scripts/{script}.sh", description=description)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="a folder of data-prep, or its bin")
    parser.add_argument("--splits", nargs="+", default=["valid", "test"], metavar="SPLIT")
    parser.add_argument("--out", type=Path, help="the run file (default: beside the checkpoint)")
    return parser


def _of_runner(name: str, given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command that the runner starts."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="a folder of data-prep; of GLUE, such as …/RTE")
    parser.add_argument("split")
    parser.add_argument("protocols", nargs="*", metavar="PROTOCOL", help="of score_lm")
    parser.add_argument("--longrope-factors", default="", help="of score_lm")
    parser.add_argument("--out", type=Path, required=True)
    logging.basicConfig(level=logging.INFO)
    return parser.parse_args(given)


def _parsed(parser: argparse.ArgumentParser, given: list[str] | None) -> argparse.Namespace:
    """Return the options, with ``out``. Raises: UserError if that cannot be written."""
    options = parser.parse_args(given)
    out = options.out or options.checkpoint.with_suffix(".json")
    if options.out or out.parent.is_dir():
        require_writable(out.parent, "--out", out)
    return argparse.Namespace(**{**vars(options), "out": out})


def _data_folder(given: Path) -> Path:
    """Return the data folder that a script of data-prep made; its ``bin`` may be given instead.

    Raises: UserError if the folder contains no prepared data or differs from its manifest.
    """
    data = given.parent if given.name == "bin" else given
    folders.require(data, preparation_of(data))
    folders.verify(data)
    return data


def _require_dictionary(checkpoint: Path, path: Path, embedding: str, name: str = "") -> None:
    """Raise ValueError unless ``path`` is the dictionary of an embedding of the checkpoint."""
    if not checkpoints.same_dictionary(checkpoint, embedding, path, say=print, name=name):
        raise ValueError(
            f"{relative(path)} is not the dictionary that {relative(checkpoint)} was trained "
            "with: evaluate it on data with the dictionaries of its training"
        )


def record(
    checkpoint: Path, data: Path, metrics: Run, protocol: Run, evaluated: Path | None = None
) -> Run:
    """Return the run file of an evaluation; its training fields are from checkpoint and folder.

    evaluated: the file with the weights, if it is not ``checkpoint``.
    """
    state = checkpoints.load(checkpoint)
    speed = checkpoints.speed(state)
    return {
        CHECKPOINT: corpus.digest(evaluated or checkpoint),
        "experiment": runs.BY_HAND,
        "scale": runs.BY_HAND,
        "dataset": folders.dataset_name(data),
        **runs.settings_of(checkpoints.options(state)),
        "evaluated_update": checkpoints.updates(state),
        "metrics": metrics,
        "protocol": protocol,
        **({} if speed is None else {"tokens_per_second": speed}),
        "wall_seconds": checkpoints.seconds(state),
        "data": folders.checksums(data, set(metrics)),
        **environment(checkpoint.absolute().parent.glob("eval-*.log")),
        **runs.provenance(checkpoint.absolute().parent.parent),
    }


def report(run: Run, out: Path, data: Path) -> None:
    """Print the metrics of a run file and write it, with the other evaluations of ``out``."""
    for split, by_protocol in run["metrics"].items():
        for protocol, measured in by_protocol.items():
            numbers = ", ".join(f"{name} {value:,.6g}" for name, value in measured.items())
            print(f"{split}, {protocol}: {numbers}")
    write_run(out, _with_earlier(out, run, data))
    print(f"written to {out}")


def _with_earlier(out: Path, run: Run, data: Path) -> Run:
    """Add the evaluations that ``out`` has of the same checkpoint, data and protocols."""
    try:
        known = runs.read_run(out)
    except (OSError, ValueError):
        return run
    parts = known.get("data", {})
    same = known.get(CHECKPOINT) == run[CHECKPOINT]
    if not same or folders.checksums(data, parts) != parts:
        print(f"{out} had results of another checkpoint or other data, which are replaced")
        return run
    metrics = dict(run["metrics"])
    said = {**known["protocol"], **run["protocol"]}
    for split, by_protocol in known["metrics"].items():
        kept = {n: own for n, own in by_protocol.items() if said[n] == known["protocol"][n]}
        if dropped := sorted(by_protocol.keys() - kept.keys()):
            print(f"{split}: the earlier results of another protocol go: {', '.join(dropped)}")
        if kept:
            metrics[split] = {**kept, **metrics.get(split, {})}
    names = {name for own in metrics.values() for name in own}
    protocol = {name: said[name] for name in sorted(names)}
    return {**run, "metrics": metrics, "protocol": protocol, "data": {**parts, **run["data"]}}
