"""Tasks of the Long-Range Arena (Tay et al., 2020): text, retrieval, pathfinder and image.

The fifth, ListOps, is generated: :mod:`.listops`. Texts are bytes and end with fairseq's end of
sentence; images are pixels from 0 to 255, row by row.
"""

import functools
import io
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.experiments.data import archives, examples
from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.archives import Archive, Member
from lrpe_fairseq.experiments.data.examples import BYTES, Examples
from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.image_files import read_image

SEED = 42
RELEASE = "lra_release.gz"
RELEASE_URLS = ("https://storage.googleapis.com/long-range-arena/lra_release.gz",)


@dataclass(frozen=True)
class Task:
    """One task: its archive, and the number of examples of every published part.

    name: in the manifest, after ``lra-``. classes: their number. eos: True for texts. longest: of
    a text, in bytes without the end of sentence.
    """

    name: str
    archive: Archive
    sizes: Mapping[str, int]
    classes: int = 2
    eos: bool = False
    longest: int = 0
    pairs: bool = field(default=False)


TEXT = Task(
    name="text",
    archive=Archive(
        "aclImdb_v1.tar.gz",
        ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
        "7c2ac02c03563afcf9b574c7e56c153a",
        r"(train|test)/(neg|pos)/(\d+_\d+\.txt)",
    ),
    sizes={"train": 25_000, "test": 25_000},
    eos=True,
    longest=4_095,
)
RETRIEVAL = Task(
    name="retrieval",
    archive=Archive(RELEASE, RELEASE_URLS, "", r"(new_aan_pairs\.(train|eval|test)\.tsv)"),
    sizes={"train": 147_086, "eval": 18_090, "test": 17_437},
    eos=True,
    longest=4_000,
    pairs=True,
)
HARD = r"pathfinder32/curv_contour_length_14"
PATHFINDER = Task(
    name="pathfinder32",
    archive=Archive(
        RELEASE,
        RELEASE_URLS,
        "",
        rf"{HARD}/(?:metadata/\d+\.npy|(imgs/\d+)/(sample_\d+\.png))",
    ),
    sizes={},  # not published; the manifest counts them
)
IMAGE = Task(
    name="image",
    archive=Archive(
        "cifar-10-binary.tar.gz",
        ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        "c32a1d4ab5d03f1284b67883e8d87530",
        r"(data_batch_[1-5]|test_batch)\.bin",
    ),
    sizes={"train": 50_000, "test": 10_000},
    classes=10,
)


def prepare(
    task: Task, dest: Path, from_dir: Path | None = None, *, published_splits: bool = False
) -> dict:
    """Prepare ``dest`` and return its manifest.

    published_splits: for TEXT, train on all of its training set and validate on its test set.
    """
    level = f"{task.name}-published-splits" if published_splits else task.name
    steps = prep.Steps(dest, "lra", level)
    source = archives.obtain(task.archive, dest / "raw", from_dir)
    reads: dict[str, Any] = {"source": archives.fingerprint(task.archive, source), "seed": SEED}
    reads["script"] = Path(__file__)
    if task.pairs:
        source = _unpack(steps, task, source, reads)
    splits = {"text": text, "retrieval": retrieval, "pathfinder32": pathfinder, "image": image}
    chosen = {"published": True} if published_splits else {}
    make = functools.partial(splits[task.name], task, source, **chosen)
    shape = {"symbols": BYTES, "classes": task.classes, "eos": task.eos, "pairs": task.pairs}
    examples.binarize(steps, reads, make, **shape)
    return examples.report(steps.finish(lambda: examples.count(dest, task.classes)))


def _require(found: int, expected: int, what: str, source: Path) -> None:
    """Raise UserError unless there are as many examples as published."""
    if found != expected:
        raise UserError(
            f"{source} has {found:,} {what} instead of {expected:,}: fetch it again, whole."
        )


# --- text --------------------------------------------------------------------------------------


def text(task: Task, source: Path, published: bool = False) -> dict[str, Examples]:
    """Return IMDB's reviews; negative ones have class 0, positive ones class 1.

    Every tenth review of a class, in the order of the file names, is held out of the training set
    for validation; with ``published``, none is, and validation is on the test set.
    """
    found: dict[str, dict[tuple[str, str], bytes]] = {part: {} for part in task.sizes}
    for match, stream in archives.files(task.archive, source):
        part, feeling, name = match.groups()
        found[part][feeling, name] = stream.read(task.longest)
    for part, size in task.sizes.items():
        _require(len(found[part]), size, f"reviews in {part}", source)
    known, test = (sorted(found[part].items()) for part in ("train", "test"))
    held_out = set() if published else _every_tenth([key for key, _ in known])
    train = [item for item in known if item[0] not in held_out]
    valid = test if published else [item for item in known if item[0] in held_out]
    return {"train": _reviews(train), "valid": _reviews(valid), "test": _reviews(test)}


def _every_tenth(keys: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    feelings = {feeling for feeling, _ in keys}
    return {key for own in feelings for key in [k for k in keys if k[0] == own][9::10]}


def _reviews(items: Sequence[tuple[tuple[str, str], bytes]]) -> Examples:
    return Examples([body for _, body in items], [int(key[0] == "pos") for key, _ in items])


# --- retrieval ---------------------------------------------------------------------------------


def _unpack(steps: prep.Steps, task: Task, source: Path, reads: Mapping[str, Any]) -> Path:
    """Step: write the wanted files of the archive to ``raw/``; return that folder."""
    raw = steps.dest / "raw"
    names = [f"new_aan_pairs.{part}.tsv" for part in task.sizes]

    def write() -> None:
        for match, stream in archives.files(task.archive, source):
            with prep.written_whole(raw / match[1], "wb") as out:
                shutil.copyfileobj(stream, out, prep.BLOCK)
        for name in names:
            if not (raw / name).is_file():
                raise UserError(f"{source} contains no {name}: fetch it again, whole.")

    steps.run("unpack", {"source": reads["source"]}, [raw / name for name in names], write)
    return raw


@dataclass(frozen=True)
class Column:
    """The texts in one column of a file of pairs, read anew by every iteration."""

    path: Path
    number: int
    longest: int

    def __iter__(self) -> Iterator[bytes]:
        for fields in pairs(self.path):
            yield fields[self.number][: self.longest]


def pairs(path: Path) -> Iterator[list[bytes]]:
    """Yield the fields of each line: label, two names and two texts. Quotes have no meaning.

    Raises: UserError for a line with other fields or another label.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            if len(fields) != 5 or fields[0] not in (b"0.0", b"1.0"):
                raise UserError(
                    f"line {number} of {path} is not a label, two names and two texts, separated "
                    "by tabs: fetch it again."
                )
            yield fields


def retrieval(task: Task, source: Path) -> dict[str, Examples]:
    """Return pairs of papers; class 1 if one cites the other."""
    found = {}
    for split, part in zip(prep.SPLITS, ("train", "eval", "test"), strict=True):
        path = source / f"new_aan_pairs.{part}.tsv"
        labels = [int(fields[0] == b"1.0") for fields in pairs(path)]
        _require(len(labels), task.sizes[part], "pairs", path)
        first, second = (Column(path, number, task.longest) for number in (3, 4))
        found[split] = Examples(first, labels, second)
    return found


# --- pathfinder --------------------------------------------------------------------------------


def pathfinder(task: Task, source: Path) -> dict[str, Examples]:
    """Return images of 32 x 32 pixels; class 1 if both markers are on one path.

    The splits are 80, 10 and 10 percent of a permutation of the images, which are first sorted by
    the names of folder and file as text: ``sample_10.png`` precedes ``sample_2.png``. Empty files,
    of which the release has one, are left out with a message.
    """
    images: dict[tuple[str, str], bytes] = {}
    labels: dict[tuple[str, str], int] = {}
    for match, stream in archives.files(task.archive, source):
        if match[1] is None:
            labels.update(_metadata(stream))
        elif body := stream.read():
            images[match[1], match[2]] = gray_png(body, 32, match[0])
        else:
            prep.say(f"  {match[0]} is empty and left out")
    if not images or not images.keys() <= labels.keys():
        missing = len(images.keys() - labels.keys())
        raise UserError(
            f"{source} has {len(images):,} images of pathfinder32, {missing:,} of them without a "
            "label: fetch it again, whole."
        )
    return _tenths([images[k] for k in sorted(images)], [labels[k] for k in sorted(images)])


def _metadata(stream: Member) -> dict[tuple[str, str], int]:
    """Return (folder, file) -> label of a metadata file, which is text in spite of its name.

    Raises: UserError for a line that does not have a label of 0 or 1.
    """
    found = {}
    for line in filter(str.strip, stream.read().decode(errors="replace").splitlines()):
        match line.split():
            case [folder, name, _, ("0" | "1") as label, *_]:
                found[folder, name] = int(label)
            case _:
                raise UserError(f"A line of pathfinder32's labels is {line!r}: fetch them again.")
    return found


def _tenths(images: Sequence[bytes], labels: Sequence[int]) -> dict[str, Examples]:
    order = np.random.RandomState(SEED).permutation(len(labels))
    ends = [0, 8 * len(labels) // 10, 9 * len(labels) // 10, len(labels)]
    own = {s: np.sort(order[a:b]) for s, a, b in zip(prep.SPLITS, ends, ends[1:], strict=False)}
    return {
        split: Examples([images[i] for i in rows], [labels[i] for i in rows])
        for split, rows in own.items()
    }


def gray_png(content: bytes, side: int, name: str) -> bytes:
    """Return the pixels of a gray image of ``side`` x ``side`` pixels, row by row.

    Raises: UserError for another image, and without Pillow.
    """
    try:
        image = read_image(io.BytesIO(content), name).convert("L")
    except ChoiceError as error:
        raise UserError(f"{error}.") from None
    if image.size != (side, side):
        raise UserError(f"{name} has {image.width} x {image.height} pixels, not {side} x {side}.")
    return image.tobytes()


# --- image -------------------------------------------------------------------------------------


def image(task: Task, source: Path) -> dict[str, Examples]:
    """Return CIFAR-10's images as luma; validation is a tenth of the training set."""
    parts = {
        match[1]: np.frombuffer(stream.read(), np.uint8)
        for match, stream in archives.files(task.archive, source)
    }
    train = _records([parts[name] for name in sorted(parts) if name != "test_batch"], source)
    test = _records([parts[name] for name in sorted(parts) if name == "test_batch"], source)
    for part, rows in (("train", train), ("test", test)):
        _require(len(rows), task.sizes[part], f"images in {part}", source)
    order = np.random.RandomState(SEED).permutation(len(train))
    held_out = np.sort(order[: len(train) // 10])
    kept = np.sort(order[len(train) // 10 :])
    chosen = {"train": train[kept], "valid": train[held_out], "test": test}
    return {
        split: Examples(luma(rows[:, 1:]), rows[:, 0].tolist()) for split, rows in chosen.items()
    }


def _records(parts: Sequence[np.ndarray], source: Path) -> np.ndarray:
    """Return rows of a class and the pixels, first all red ones: (N, 1 + 3 x 1024)."""
    flat = np.concatenate([np.empty(0, np.uint8), *parts])
    width = 1 + 3 * 1024
    if flat.size % width:
        raise UserError(f"{source} has a truncated record: fetch it again.")
    return flat.reshape(-1, width)


def luma(pixels: np.ndarray) -> np.ndarray:
    """Return .299 R + .587 G + .114 B, rounded as Pillow's mode ``L``: (N, 3 P) -> (N, P)."""
    red, green, blue = pixels.astype(np.uint32).reshape(len(pixels), 3, -1).swapaxes(0, 1)
    return ((19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16).astype(np.uint8)
