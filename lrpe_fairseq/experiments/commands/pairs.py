"""Measure which pairs of features carry the denominators of a trained language model.

    python -m lrpe_fairseq.experiments pairs CHECKPOINT DATA --label "lrpe-type2" \
        --out results/bench/pairs/lrpe-type2.json

The texts are blocks of 16 T tokens, T the length of training, and the queries the last T tokens of
each. ``make docs`` shows all files of results/bench/pairs on the page of the table ``angles``.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils

import lrpe_fairseq  # noqa: F401  registers the models
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import first_shard, relative, write_json
from lrpe_fairseq.experiments.records.machine import environment
from lrpe_fairseq.experiments.records.protocols import LONGEST
from lrpe_fairseq.experiments.runner.pairs import counted_pairs


@command("pairs")
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the parts of the denominators, and write them as JSON."""
    parser = argparse.ArgumentParser(prog="pairs", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="a folder of data-prep")
    parser.add_argument("--split", default="test")
    parser.add_argument("--blocks", type=int, default=8, metavar="N", help="blocks that are read")
    parser.add_argument("--label", required=True, help="the name of the row on the page")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.blocks < 1:
        parser.error("--blocks must be at least 1")
    trained = checkpoints.options(checkpoints.require_model(options.checkpoint, "lrpe_lm"))
    length = int(trained["task.tokens_per_sample"])
    edges = edges_of(length)
    rows = measure(options.checkpoint, options.data, options.split, options.blocks, edges)
    about = {"label": options.label, "trained": length, "blocks": options.blocks}
    write_json(options.out, {"part": "pairs", **about, **environment(), "rows": rows})
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    print(f"written to {relative(options.out)}")


def edges_of(trained: int) -> list[int]:
    """Return the edges of the bins of distances for T = ``trained``, from 0 to 16 T.

    >>> edges_of(128)
    [0, 16, 128, 512, 2048]
    """
    return [0, max(1, trained // 8), trained, 4 * trained, LONGEST * trained]


@torch.no_grad()
def measure(
    checkpoint: Path, data: Path, split: str, blocks: int, edges: Sequence[int]
) -> list[dict[str, object]]:
    """Return the rows of ``runner.pairs.counted_pairs`` for the first blocks of a split.

    Raises: UserError if the split has no block of that length, ValueError for a model without pairs
        under a denominator.
    """
    home = first_shard(data)
    dictionary = Dictionary.load(str(home / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(home / split), dictionary)
    if lines is None:
        raise UserError(f"{data} has no split {split}")
    text = torch.cat([lines[index] for index in range(len(lines))]).long()
    size = edges[-1]
    if len(text) < size:
        raise UserError(f"split {split} has {len(text)} tokens, but a block has {size}")
    (model,), _ = checkpoint_utils.load_model_ensemble([str(checkpoint)], {"data": str(home)})
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    device = next(model.parameters()).device
    before = torch.cat([text.new_tensor([dictionary.eos()]), text[:-1]])
    with counted_pairs(model, edges[2], edges) as rows:
        for start in range(0, min(blocks, len(text) // size) * size, size):
            model(before[None, start : start + size].to(device))
    return rows
