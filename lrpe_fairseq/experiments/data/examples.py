"""Examples of classification in fairseq's layout: ``input0/``, ``label/`` and dictionaries.

The layout is that of data-prep/glue; pairs have ``input1/`` too. A class is a symbol of
``label/dict.txt``, at its own number. Bytes and pixels are symbols of one dictionary,
:data:`BYTES`.
"""

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


INPUTS = ("input0", "input1")


@dataclass(frozen=True)
class Examples:
    """Examples of one split.

    inputs: the number of each token in the dictionary, from 0. labels: classes, from 0. seconds:
    the second inputs of pairs. A row may be ``bytes``.
    """

    inputs: Iterable[Sequence[int]]
    labels: Sequence[int]
    seconds: Iterable[Sequence[int]] | None = None


def binarize(
    steps: prep.Steps,
    reads: Mapping[str, Any],
    make: Callable[[], Mapping[str, Examples]],
    *,
    symbols: Sequence[str],
    classes: int,
    eos: bool = False,
    pairs: bool = False,
) -> None:
    """Step: write ``bin/`` with the splits train, valid and test.

    Args:
        reads: what the examples depend on; see ``corpus.Steps.run``.
        make: returns the examples of every split.
        symbols: of the dictionary. classes: their number. eos: True to end every input with
            fairseq's end of sentence. pairs: True for examples with second inputs.
    """
    bin_dir = steps.dest / "bin"
    parts = [*INPUTS[: 2 if pairs else 1], "label"]
    kinds = [f"{split}.{kind}" for split in prep.SPLITS for kind in ("bin", "idx")]
    files = [bin_dir / part / name for part in parts for name in ("dict.txt", *kinds)]

    def write() -> None:
        with prep.folder_written_whole(bin_dir) as part:
            _write(part, make(), symbols, classes, eos)

    steps.run("binarize", reads, files, write)


def _write(
    folder: Path,
    splits: Mapping[str, Examples],
    symbols: Sequence[str],
    classes: int,
    eos: bool,
) -> None:
    numbers = [str(number) for number in range(classes)]
    for split, examples in splits.items():
        given = dict(zip(INPUTS, (examples.inputs, examples.seconds), strict=True))
        for part, rows in given.items():
            if rows is not None:
                _write_part(folder / part, split, symbols, rows, eos)
        labels = ([label] for label in examples.labels)
        _write_part(folder / "label", split, numbers, labels, True)  # as in GLUE


def _write_part(
    folder: Path, split: str, symbols: Sequence[str], rows: Iterable[Sequence[int]], end: bool
) -> None:
    if not folder.exists():
        with prep.written_whole(folder / "dict.txt") as out:
            out.writelines(f"{symbol} 1\n" for symbol in symbols)
    prep.write_indexed(_ids(rows, end), folder / split, np.uint16)


def _ids(rows: Iterable[Sequence[int]], end: bool) -> Iterable[np.ndarray]:
    """Yield fairseq's ids of each row, with the end of sentence if ``end``."""
    tail = np.array([prep.FAIRSEQ_EOS] if end else [], dtype=np.int64)
    for row in rows:
        values = np.frombuffer(row, np.uint8) if isinstance(row, bytes) else np.asarray(row)
        yield np.append(values.astype(np.int64) + prep.FAIRSEQ_SPECIALS, tail)


def count(dest: Path, classes: int) -> dict[str, Any]:
    """Count a finished destination, for its manifest.

    ``majority``: the accuracy, times 100, of always predicting the most frequent class.
    """
    splits = {}
    for split in prep.SPLITS:
        parts = [part for part in INPUTS if (dest / "bin" / part).is_dir()]
        lengths = np.stack([prep.row_lengths(dest / "bin" / part / split) for part in parts])
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
    """Return the classes that :func:`binarize` wrote, int64 (N,)."""
    stored = np.fromfile(f"{prefix}.bin", dtype=np.uint16).reshape(-1, 2)[:, 0]
    return stored.astype(np.int64) - prep.FAIRSEQ_SPECIALS


def report(manifest: dict[str, Any]) -> dict[str, Any]:
    """Print the counts of a finished destination and return its manifest."""
    prep.say(f"  {'':6}{'examples':>10}{'tokens':>13}{'longest':>9}{'majority':>10}")
    for split, counts in manifest["splits"].items():
        prep.say(
            f"  {split:6}{counts['examples']:10,}{counts['tokens']:13,}{counts['longest']:9,}"
            f"{counts['majority']:8.2f} %"
        )
    prep.say(f"  {manifest['classes']} classes; ready for fairseq-train")
    return manifest


def stratified(labels: Sequence[int], sizes: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Draw disjoint splits in which every class has its share, up to rounding.

    Args:
        labels: (N,). sizes: split -> number of examples, together N.
        seed: of the draw. numpy guarantees the stream of ``RandomState``.
    Returns: split -> indices, ascending.
    """
    labels = np.asarray(labels)
    draw = np.random.RandomState(seed).permutation(len(labels))
    place = np.empty(len(labels))
    for label in np.unique(labels):
        own = draw[labels[draw] == label]
        place[own] = (np.arange(len(own)) + 0.5) / len(own)
    order = draw[np.argsort(place[draw], kind="stable")]
    ends = np.cumsum([0, *sizes.values()])
    if ends[-1] != len(labels):
        raise ValueError(f"splits of {ends[-1]} examples cannot be drawn from {len(labels)}")
    return {s: np.sort(order[a:b]) for s, a, b in zip(sizes, ends[:-1], ends[1:], strict=True)}


def accuracy_from_key(keys: Iterable[Any], labels: Sequence[int]) -> float:
    """Return the accuracy, times 100, of the best prediction of the label from the key alone."""
    counts: dict[Any, Counter[int]] = {}
    for key, label in zip(keys, labels, strict=True):
        counts.setdefault(key, Counter())[int(label)] += 1
    return 100 * sum(max(own.values()) for own in counts.values()) / len(labels)


def packaged_file(
    file: str,
    package: str,
    inside: str,
    distribution: str,
    sha256: str,
    into: Path,
    from_dir: Path | None,
) -> Path:
    """Return ``into / file``, a data file of an installed Python package, verified.

    The package is located but not imported.

    Args:
        package: its import name. inside: the file's folder in it. distribution: its name for pip.
        sha256: of the plain file, which may be stored as ``file.gz``.
        from_dir: a folder with the file, instead of the package.
    Raises: UserError if the package is not installed, or the file is absent or another version.
    """
    if from_dir is None:
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            raise UserError(
                f"{file} is part of the Python package {distribution}, which is not installed: run "
                f"pip install {distribution}, or pass a folder with {file}.gz with --from."
            )
        from_dir = Path(found.origin).parent / inside
    return prep.obtain(file, (), sha256, into, from_dir)
