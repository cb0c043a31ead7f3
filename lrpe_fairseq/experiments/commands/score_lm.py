"""Evaluate a split under protocols with lengths of their own; the runner starts this command."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils

import lrpe_fairseq  # noqa: F401  registers the models
from lrpe_fairseq.experiments.families.lm import FACTORS
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import first_shard, write_json
from lrpe_fairseq.experiments.records.protocols import DOCUMENTS, Protocol
from lrpe_fairseq.experiments.runner import scoring
from lrpe_fairseq.tasks.truncated_bptt import document_starts


@command("score_lm")
def main(arguments: Sequence[str] | None = None) -> None:
    """Write the metrics of the protocols as JSON."""
    parser = argparse.ArgumentParser(prog="score_lm", description=__doc__.split(";")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="a folder of data-prep")
    parser.add_argument("split")
    parser.add_argument("protocols", nargs="*", metavar="PROTOCOL")
    parser.add_argument("--longrope-factors", default="", help="of protocols with longrope")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    words = options.checkpoint, options.data, options.split, options.protocols
    metrics = score(*words, options.longrope_factors)
    write_json(options.out, metrics)


def score(
    checkpoint: Path, data: Path, split: str, names: Sequence[str], factors: str = ""
) -> dict[str, dict[str, float]]:
    """Return the metrics of every protocol of ``names``; the model is loaded once per scaling.

    factors: ``longrope_factors`` of protocols with longrope; empty: those of the training.

    Raises: ValueError if the split is absent, a protocol does not fit, or the checkpoint is
        damaged, diverged or of another model, or ``documents`` does not list the documents.
    """
    trained = checkpoints.options(checkpoints.require_model(checkpoint, "lrpe_lm"))
    home = first_shard(data)
    length = trained["task.tokens_per_sample"]
    factors = factors or trained.get(FACTORS, "")
    dictionary = Dictionary.load(str(home / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(home / split), dictionary)
    if lines is None:
        raise ValueError(f"{data} has no split {split}")
    text = torch.cat([lines[index] for index in range(len(lines))]).long()
    starts = [0]
    if any(Protocol.parse(name).kind == DOCUMENTS for name in names):
        known = document_starts(data / "documents" / f"{split}.tsv", lines.sizes)
        starts += known[1:].tolist()  # what precedes the first one belongs to it
    metrics: dict[str, dict[str, float]] = {}
    # A scaling changes the model, so each one loads it again.
    for scaling in dict.fromkeys(name.partition("+")[2] for name in names):
        same_scaling = [name for name in names if name.partition("+")[2] == scaling]
        protocol = Protocol.parse(same_scaling[0])
        overrides = {"data": str(home), **protocol.overrides(length, factors)}
        (model,), _ = checkpoint_utils.load_model_ensemble([str(checkpoint)], overrides)
        model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        metrics |= scoring.evaluate(model, text, dictionary.eos(), length, same_scaling, starts)
    return {name: metrics[name] for name in names}
