"""Prepare the bytes of GLUE's SST-2 for a classifier: download, verify, binarize.

    python data-prep/sst2-bytes/prepare.py --dest data/sst2-bytes

See the README in this folder for source, splits and files.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import examples
from lrpe_fairseq.experiments.data.examples import BYTES, Examples
from lrpe_fairseq.experiments.data.glue import named, obtain, read_examples
from lrpe_fairseq.experiments.records.console import command

TASK = "SST-2"
SEED = 42
HELD_OUT = 2_000  # phrases of GLUE's training set
MOST_HELD_OUT = 0.1  # of a smaller training set, given with --from


def read(path: Path) -> Examples:
    """Return the UTF-8 bytes and the label of every phrase, in the order of the file."""
    phrases = list(read_examples(path, named(TASK)))
    texts = [list(text.encode()) for (text,), _ in phrases]
    labels = [int(label) for _, label in phrases]
    return Examples(texts, labels)


def split(raw: Mapping[str, Path]) -> dict[str, Examples]:
    """Return train and valid, drawn from GLUE's training set, and test, its development set."""
    known = read(raw["train"])
    count = len(known.labels)
    order = np.random.RandomState(SEED).permutation(count)
    held_out = min(HELD_OUT, int(MOST_HELD_OUT * count))
    # sorted: the examples of a split stay in the order of the file
    valid, train = (known.chosen(np.sort(rows)) for rows in np.split(order, [held_out]))
    # the test set of GLUE has no labels
    return {"train": train, "valid": valid, "test": read(raw["valid"])}


def prepare(dest: Path, from_dir: Path | None = None) -> dict:
    """Prepare ``dest`` and return its manifest."""
    steps = prep.Steps(dest, "sst2", "bytes")
    raw = obtain(TASK, dest / "raw", from_dir)
    reads = {**raw, "script": Path(__file__), "seed": SEED}
    make = functools.partial(split, raw)
    return examples.prepare(steps, reads, make, symbols=BYTES, classes=2, eos=True)


@command("data-prep/sst2-bytes/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the phrases."""
    parser = prep.parser(__doc__, "folder with SST-2/train.tsv")
    options = parser.parse_args(argv)
    prep.say(f"SST-2, bytes -> {options.dest}")
    prepare(options.dest, options.from_dir)


if __name__ == "__main__":
    sys.exit(main())
