"""Write a checkpoint as a folder that transformers loads: ``experiments export``."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data.corpus import digest
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import ROOT, relative
from lrpe_fairseq.experiments.records.runs import Run, read_run

EMBEDDINGS = ("decoder.embed_tokens.weight", "encoder.sentence_encoder.embed_tokens.weight")
"""The embeddings of a language model, and of a masked one, whose dictionary lacks <mask>."""


@command("export")
def main(arguments: Sequence[str] | None = None) -> None:
    """Export a language model and print its folder."""
    try:
        from lrpe_fairseq.hf import export, tokenizers
    except ModuleNotFoundError as error:
        raise UserError(str(error)) from None
    from transformers.utils import logging

    logging.disable_progress_bar()
    options = _parse(arguments, ("auto", *tokenizers.KINDS, "none"))
    checkpoint = options.checkpoint
    data = options.data
    # A tokenizer of other words would decode every token as another one.
    if options.tokenizer != "none":
        data = data or _data_of(checkpoint)
        _require_dictionary(checkpoint, tokenizers.find_dictionary(data))
    export(
        checkpoint,
        options.folder,
        data=data,
        tokenizer=options.tokenizer,
        run=_run(checkpoint, options.run),
        license_name=options.license,
    )
    print(f"written to {options.folder}")


def _parse(arguments: Sequence[str] | None, tokenizers: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lrpe_fairseq.experiments export",
        description="Write a checkpoint as a folder that transformers loads.",
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="of lrpe_lm or lrpe_roberta")
    add("folder", type=Path, help="a new folder")
    add("--data", type=Path, help="folder of the training data (default: as in training)")
    add("--run", type=Path, help="run file with the results for the model card (default: its own)")
    add("--tokenizer", choices=tokenizers, default="auto", help="default: that of the data")
    add("--license", default="mit", help="of the weights, by Hugging Face's name (default: mit)")
    return parser.parse_args(arguments)


def _data_of(checkpoint: Path) -> Path:
    """Return the folder that a training read, relative to here or to the repository."""
    options = checkpoints.options(checkpoints.load(checkpoint))
    # Shards are joined by colons; the first has the dictionary.
    named = Path(str(options.get("task.data", "")).split(":")[0])
    return named if named.is_dir() else ROOT / named


def _require_dictionary(checkpoint: Path, dictionary: Path) -> None:
    """Raise UserError if a dictionary is not that of the training."""
    weights = checkpoints.load(checkpoint)["model"]
    for added, name in enumerate(EMBEDDINGS):
        if name not in weights:
            continue
        if not checkpoints.same_dictionary(checkpoint, name, dictionary, added, print):
            raise UserError(
                f"{dictionary} is not the dictionary that {checkpoint} was trained with: pass "
                "--data with the folder of its training data"
            )


def _run(checkpoint: Path, chosen: Path | None) -> Run | None:
    """Return the run file ``chosen``, or by default that of the training if it is at hand."""
    if chosen is not None:
        return read_run(chosen)
    for path in filter(Path.is_file, _run_files(checkpoint.absolute())):
        run = read_run(path)
        if "checkpoint" in run and run["checkpoint"] != digest(checkpoint):
            continue  # an evaluation of an earlier checkpoint of this name
        print(f"results of the model card: {relative(path)}")
        return run
    return None


def _run_files(checkpoint: Path) -> Iterator[Path]:
    """Yield the places of a run file: of an evaluation by hand, of ``quickstart``, of a table.

    Of a training in a table the best checkpoint was evaluated.
    """
    yield checkpoint.with_suffix(".json")
    folder = checkpoint.parent.parent
    if checkpoint.name == checkpoints.BEST and checkpoint.parent.name == "checkpoints":
        yield folder / "run.json"
        if folder.is_relative_to(ROOT / "runs"):
            name = folder.relative_to(ROOT / "runs")
            yield ROOT / "results" / "runs" / name.with_name(f"{name.name}.json")
