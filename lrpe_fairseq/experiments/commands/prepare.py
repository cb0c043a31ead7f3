"""Prepare own text for a language model: ``python -m lrpe_fairseq.experiments prepare FILES``."""

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
    add("files", nargs="+", type=Path, help="one text, which is split, or train, valid and test")
    add("--dest", type=Path, required=True, help="output folder, such as data/mine")
    add("--vocabulary", type=int, default=VOCABULARY, help="pieces (default: %(default)s)")
    add("--workers", type=int, default=1, help="processes (default: 1)")
    options = parser.parse_args(arguments)
    own_text.prepare(options.files, options.dest, options.vocabulary, options.workers)
    print(f"data: {relative(options.dest / 'bin')}")
    print(f"tokenizer: {relative(options.dest / SPM)}")
