"""Prepare own text, or own pairs of texts: ``python -m lrpe_fairseq.experiments prepare FILES``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data import own_text
from lrpe_fairseq.experiments.data.pieces import SPM
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import relative

VOCABULARY = 8000


@command("prepare")
def main(arguments: Sequence[str] | None = None) -> None:
    """Split, tokenize and binarize; print the counts and where the data and the tokenizer are."""
    parser = argparse.ArgumentParser(
        prog="python -m lrpe_fairseq.experiments prepare", description=__doc__.split(":")[0]
    )
    add = parser.add_argument
    # One file is split at line ends, so a user needs no splits of their own.
    files = "one text, which is split, or train, valid and test; with --languages: paths of train, "
    add("files", nargs="+", type=Path, help=f"{files}valid and test without the language")
    add("--dest", type=Path, required=True, help="output folder, such as data/mine")
    pieces = parser.add_mutually_exclusive_group()
    number = f"pieces to train (default: {VOCABULARY})"
    pieces.add_argument("--vocabulary", type=int, default=VOCABULARY, help=number)
    trained = "a trained model of SentencePiece, in place of a new one"
    pieces.add_argument("--tokenizer", type=Path, metavar="FILE.model", help=trained)
    pair = "for translation, such as en de: train.en and train.de are pairs of lines"
    add("--languages", nargs=2, metavar=("SOURCE", "TARGET"), help=pair)
    add("--workers", type=int, default=1, help="processes (default: 1)")
    options = parser.parse_args(arguments)
    model = options.tokenizer or options.vocabulary
    if options.languages:
        own_text.prepare_pairs(
            options.files, options.languages, options.dest, model, options.workers
        )
    else:
        own_text.prepare(options.files, options.dest, model, options.workers)
    print(f"data: {relative(options.dest / 'bin')}")
    print(f"tokenizer: {relative(options.dest / SPM)}")
