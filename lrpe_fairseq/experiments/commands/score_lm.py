"""Evaluate a language model on a split under protocols with lengths of their own.

The runner and ``scripts/eval_lm.sh`` start this command. It loads the model once for all protocols
and writes the metrics by protocol as JSON.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils

import lrpe_fairseq  # noqa: F401  registers the models
from lrpe_fairseq.experiments.records import checkpoints, shards
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import write_json
from lrpe_fairseq.experiments.records.protocols import DOCUMENTS, Protocol
from lrpe_fairseq.experiments.runner import scoring
from lrpe_fairseq.tasks.truncated_bptt import document_starts


def score(
    checkpoint: Path, data: Path, split: str, names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return the metrics of every protocol of ``names``, in evaluation mode.

    Raises: ValueError if the split is absent, a protocol does not fit, or the checkpoint is
        damaged, diverged or of another model, or ``documents`` does not list the documents.
    """
    trained = checkpoints.options(checkpoints.require_model(checkpoint, "lrpe_lm"))
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides={"data": str(shards.first(data))}
    )
    dictionary = task.source_dictionary
    lines = data_utils.load_indexed_dataset(str(shards.first(data) / split), dictionary)
    if lines is None:
        raise ValueError(f"{data} has no split {split}")
    text = torch.cat([lines[index] for index in range(len(lines))]).long()
    starts = [0]
    if any(Protocol.parse(name).kind == DOCUMENTS for name in names):
        known = document_starts(data / "documents" / f"{split}.tsv", lines.sizes)
        starts += known[1:].tolist()  # what precedes the first one belongs to it
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).eval()
    length = trained["task.tokens_per_sample"]
    return scoring.evaluate(model, text, dictionary.eos(), length, names, starts)


@command("score_lm")
def main(arguments: Sequence[str] | None = None) -> None:
    """Write the metrics as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="a folder of data-prep")
    parser.add_argument("split")
    parser.add_argument("protocols", nargs="+", metavar="PROTOCOL")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    found = score(options.checkpoint, options.data, options.split, options.protocols)
    write_json(options.out, found)


if __name__ == "__main__":
    sys.exit(main())
