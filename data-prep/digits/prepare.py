"""Prepare scikit-learn's digits, images of 8 x 8 pixels, for fairseq.

    python data-prep/digits/prepare.py --dest data/digits

See the README in this folder for source, splits and files.
"""

import sys
from collections.abc import Sequence

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.examples import DIGITS, prepare_images
from lrpe_fairseq.experiments.records.console import command


@command("data-prep/digits/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the images."""
    parser = prep.parser(__doc__, "folder with digits.csv.gz")
    options = parser.parse_args(argv)
    prep.say(f"digits -> {options.dest}")
    prepare_images(options.dest, DIGITS, DIGITS.side, options.from_dir)


if __name__ == "__main__":
    sys.exit(main())
