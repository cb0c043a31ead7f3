"""Measure n-grams beside language models: ``python -m lrpe_fairseq.experiments ngrams DATA``.

Modified Kneser-Ney of the orders 1 to 6, alone and with a cache of the context, trained on as many
tokens as a model read, on the tokens that the model is evaluated on.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data import folders
from lrpe_fairseq.experiments.families import ngrams, preparation_of
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import relative
from lrpe_fairseq.experiments.records.protocols import FORMS, REPEATED, Protocol
from lrpe_fairseq.experiments.records.runs import Run, write_run

SPLITS = ("valid", "test")


@command("ngrams")
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the perplexities, and write run files."""
    options = _parse(arguments)
    data = options.data.parent if options.data.name == "bin" else options.data
    folders.require(data, preparation_of(data))
    folders.verify(data)
    folders.require_splits(data, options.splits)
    if options.tables:
        wanted = ngrams.yardsticks(data)
        if not wanted:
            raise UserError(f"no table trains a language model on data named {data.name}")
    else:
        pairs = [(split, name) for split in options.splits for name in options.protocols]
        wanted = [ngrams.by_hand(data, options.tokens, options.length, tuple(pairs))]
    for one, run in zip(wanted, ngrams.measure(wanted), strict=True):
        _show(one, run)
        out = one.result if options.tables else options.out
        if out:
            write_run(out, run)
            print(f"written to {relative(out)}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ngrams", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("data", type=Path, help="a folder of data-prep, or its bin")
    add("--tokens", type=int, metavar="N", help="training tokens, in random blocks (default: all)")
    add("--length", type=int, default=512, metavar="T", help="tokens of a model's training blocks")
    add("--splits", nargs="+", default=list(SPLITS), metavar="SPLIT")
    add("--protocols", nargs="+", default=["blocks"], metavar="PROTOCOL", help=f"of {FORMS}")
    add("--out", type=Path, help="the run file (default: none)")
    add("--tables", action="store_true", help="write what the tables with these data need")
    options = parser.parse_args(arguments)
    if options.tokens is not None and options.tokens < 1:
        parser.error("--tokens must be at least 1")
    if options.length < 1:
        parser.error("--length must be at least 1")
    for protocol in map(Protocol.parse, options.protocols):
        if protocol.kind == REPEATED or protocol.changes_model:
            parser.error("n-grams have no repeated spans, rotations to scale or normalizers")
    return options


def _show(wanted: ngrams.Yardstick, run: Run) -> None:
    print(f"{run['dataset']}, {wanted.tokens:,} tokens, blocks of {wanted.length}:")
    for split, by_protocol in run["metrics"].items():
        for name, metrics in by_protocol.items():
            orders = [metrics[f"ppl-{order}"] for order in range(1, ngrams.ORDERS + 1)]
            listed = ", ".join(f"{value:,.2f}" for value in orders)
            print(
                f"  {split}, {name}: orders 1 to {len(orders)}: {listed}; with a cache of "
                f"{metrics['cache-window']} tokens: {metrics['cache-ppl']:,.2f}"
            )
