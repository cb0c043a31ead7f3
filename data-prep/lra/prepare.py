"""Prepare a task of the Long-Range Arena for fairseq: download, verify, binarize.

    python data-prep/lra/prepare.py text --dest data/lra-text

See the README in this folder for sources, splits and files. ListOps is in data-prep/listops.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data import lra
from lrpe_fairseq.experiments.data.corpus import say
from lrpe_fairseq.experiments.records.console import UserError, command

TASKS = {
    "text": lra.TEXT,
    "retrieval": lra.RETRIEVAL,
    "pathfinder": lra.PATHFINDER,
    "image": lra.IMAGE,
}


@command("data-prep/lra/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare a task."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=list(TASKS), help="the task")
    parser.add_argument("--dest", type=Path, required=True, help="output folder")
    parser.add_argument(
        "--from",
        dest="from_dir",
        type=Path,
        help="folder with the archive, or with its files, instead of the download",
    )
    parser.add_argument(
        "--published-splits",
        action="store_true",
        help="text: train on the whole training set and validate on the test set",
    )
    options = parser.parse_args(argv)
    if options.published_splits and options.task != "text":
        raise UserError("--published-splits is an option of the task text.")
    say(f"Long-Range Arena, {options.task} -> {options.dest}")
    task = TASKS[options.task]
    lra.prepare(task, options.dest, options.from_dir, published_splits=options.published_splits)


if __name__ == "__main__":
    sys.exit(main())
