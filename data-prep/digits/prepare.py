"""Prepare scikit-learn's digits, images of 8 x 8 pixels, for fairseq.

    python data-prep/digits/prepare.py --dest data/digits

See the README in this folder for source, splits and files.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data.corpus import say
from lrpe_fairseq.experiments.data.examples import DIGITS, prepare_images
from lrpe_fairseq.experiments.records.console import command


@command("data-prep/digits/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the images."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dest", type=Path, required=True, help="output folder")
    parser.add_argument("--from", dest="from_dir", type=Path, help="folder with digits.csv.gz")
    options = parser.parse_args(argv)
    say(f"digits -> {options.dest}")
    prepare_images(options.dest, DIGITS, DIGITS.side, options.from_dir)


if __name__ == "__main__":
    sys.exit(main())
