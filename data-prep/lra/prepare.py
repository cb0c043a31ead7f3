"""Prepare a task of the Long-Range Arena for fairseq: download, verify, binarize.

    python data-prep/lra/prepare.py text --dest data/lra-text

Texts are bytes and end with fairseq's end of sentence; images are pixels from 0 to 255, row by row.
See the README in this folder for sources, splits and files. ListOps is in data-prep/listops.
"""

import functools
import hashlib
import io
import lzma
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from re import Match
from typing import IO, Any

import numpy as np

from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import examples
from lrpe_fairseq.experiments.data.examples import BYTES, Examples
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import atomic_write
from lrpe_fairseq.image_files import read_image

SEED = 42
RELEASE = "lra_release.gz"
RELEASE_URLS = ("https://storage.googleapis.com/long-range-arena/lra_release.gz",)


@dataclass(frozen=True)
class Archive:
    """A tar archive, compressed with gzip.

    file: its name. urls: where it is published. checksum: md5 or sha256; empty if none is
    published. wanted: the end of the names of its files, see ``corpus.tar_members``. tables: name
    -> sha256 of tables, compressed with xz, that also have the content of these files.
    """

    file: str
    urls: Sequence[str]
    checksum: str
    wanted: str
    tables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One task: its archive, and the number of examples of every published part.

    name: in the manifest, after ``lra-``. read: returns the splits, from the task and its source.
    classes: their number. eos: True for texts. longest: of a text, in bytes without the end of
    sentence. pairs: True for examples of two texts.
    """

    name: str
    archive: Archive
    sizes: Mapping[str, int]
    read: Callable[..., dict[str, Examples]]
    classes: int = 2
    eos: bool = False
    longest: int = 0
    pairs: bool = False


def prepare(
    task: Task, dest: Path, from_dir: Path | None = None, *, published_splits: bool = False
) -> dict:
    """Prepare ``dest`` and return its manifest.

    from_dir: a folder with the archive, its files or its tables. published_splits: for TEXT, train
    on all of its training set and validate on its test set.

    Raises: UserError if the archive is absent, truncated or another version.
    """
    level = f"{task.name}-published-splits" if published_splits else task.name
    steps = prep.Steps(dest, "lra", level)
    source = _source(task.archive, dest / "raw", from_dir)
    reads: dict[str, Any] = {"source": _fingerprint(task.archive, source), "seed": SEED}
    reads["script"] = Path(__file__)
    with prep.readable(source):
        # pairs are read once per column, which an archive would decompress each time
        if task.pairs:
            source = _unpack(steps, task, source, reads["source"])
        chosen = {"published": True} if published_splits else {}
        make = functools.partial(task.read, task, source, **chosen)
        shape = {"classes": task.classes, "eos": task.eos, "pairs": task.pairs}
        return examples.prepare(steps, reads, make, symbols=BYTES, **shape)


# --- sources -----------------------------------------------------------------------------------


def _source(archive: Archive, raw: Path, from_dir: Path | None) -> Path:
    """Return the archive, verified where a checksum is published, or the folder of its files."""
    if from_dir is None:
        return prep.obtain(archive.file, archive.urls, archive.checksum, raw)
    packed = from_dir / archive.file
    if not packed.is_file():
        # the first wanted file is enough; examples are counted later
        if _has_tables(archive, from_dir) or any(True for _ in _wanted_files(archive, from_dir)):
            return from_dir
        raise UserError(
            f"{from_dir} contains neither {archive.file} nor the files of that archive: put one of "
            "them there, or omit --from to download it."
        )
    if not prep.has_checksum(packed, archive.checksum):
        raise UserError(
            f"{packed} is truncated or not the expected version: its checksum is not "
            f"{archive.checksum}, so fetch it again."
        )
    return packed


def _has_tables(archive: Archive, folder: Path) -> bool:
    """True if the tables are there. Raises: UserError if one of them is another version."""
    tables = {name: folder / name for name in archive.tables if (folder / name).is_file()}
    # also if others are missing: a damaged table is never passed over
    for name, path in tables.items():
        if not prep.has_checksum(path, archive.tables[name]):
            raise UserError(f"{path} is truncated or not the expected version: fetch it again.")
    return bool(tables) and len(tables) == len(archive.tables)


def _fingerprint(archive: Archive, source: Path) -> str:
    """Return a checksum of the content of a source."""
    if source.is_file():
        return archive.checksum or prep.digest(source)
    if _has_tables(archive, source):
        return " ".join(archive.tables.values())
    hasher = hashlib.sha256()
    for match, path in _wanted_files(archive, source):
        hasher.update(f"{match.string} {prep.digest(path)}\n".encode())
    return hasher.hexdigest()


def _wanted_files(archive: Archive, folder: Path) -> Iterator[tuple[Match[str], Path]]:
    """Yield match of the name and path of the wanted files below ``folder``, without links."""
    for path in sorted(folder.rglob("*")):
        match = prep.wanted(path.relative_to(folder).as_posix(), archive.wanted)
        # a link could name a file that is not below the folder
        if match and path.is_file() and not path.is_symlink():
            yield match, path


def _files(archive: Archive, source: Path) -> Iterator[tuple[Match[str], IO[bytes]]]:
    """Yield match of the name and content of every wanted file of a source."""
    if source.is_file():
        yield from prep.tar_members(source, archive.wanted)
    elif _has_tables(archive, source):
        yield from _rows(archive, source)
    else:
        for match, path in _wanted_files(archive, source):
            with path.open("rb") as stream:
                yield match, stream


def _rows(archive: Archive, folder: Path) -> Iterator[tuple[Match[str], IO[bytes]]]:
    """Yield what :func:`_files` does, from tables of reviews: class, rating, number and text."""
    for table in archive.tables:
        with lzma.open(folder / table, "rt", encoding="utf-8", newline="\n") as lines:
            for line in lines:
                feeling, rating, number, body = line.rstrip("\n").split("\t")
                name = f"{table.partition('.')[0]}/{feeling}/{number}_{rating}.txt"
                yield prep.wanted(name, archive.wanted), io.BytesIO(body.encode())


def _require(count: int, expected: int, what: str, source: Path) -> None:
    """Raise UserError unless there are as many examples as published."""
    if count != expected:
        raise UserError(
            f"{source} has {count:,} {what} instead of {expected:,}: fetch it again, whole."
        )


# --- text --------------------------------------------------------------------------------------


def text(task: Task, source: Path, published: bool = False) -> dict[str, Examples]:
    """Return IMDB's reviews; negative ones have class 0, positive ones class 1.

    Every tenth review of a class, in the order of the file names, is held out of the training set
    for validation; with ``published``, none is, and validation is on the test set.
    """
    reviews: dict[str, dict[tuple[str, str], bytes]] = {part: {} for part in task.sizes}
    for match, stream in _files(task.archive, source):
        part, feeling, name = match.groups()
        reviews[part][feeling, name] = stream.read(task.longest)  # as the model would cut it
    for part, size in task.sizes.items():
        _require(len(reviews[part]), size, f"reviews in {part}", source)
    known = sorted(reviews["train"].items())
    test = sorted(reviews["test"].items())
    tenths: set[tuple[str, str]] = set()
    for feeling in ("neg", "pos"):
        keys = [key for key, _ in known if key[0] == feeling]
        tenths.update(keys[9::10])
    held_out = set() if published else tenths
    train = [item for item in known if item[0] not in held_out]
    valid = test if published else [item for item in known if item[0] in held_out]
    return {"train": _reviews(train), "valid": _reviews(valid), "test": _reviews(test)}


def _reviews(items: Sequence[tuple[tuple[str, str], bytes]]) -> Examples:
    return Examples([body for _, body in items], [int(key[0] == "pos") for key, _ in items])


# --- retrieval ---------------------------------------------------------------------------------


def _unpack(steps: prep.Steps, task: Task, source: Path, fingerprint: str) -> Path:
    """Step: write the wanted files of the archive to ``raw/``; return that folder."""
    raw = steps.dest / "raw"
    names = [f"new_aan_pairs.{part}.tsv" for part in task.sizes]

    def write() -> None:
        for match, stream in _files(task.archive, source):
            with atomic_write(raw / match[0], "wb") as out:
                shutil.copyfileobj(stream, out, prep.BLOCK)
        # an archive may end early without an error
        for name in names:
            if not (raw / name).is_file():
                raise UserError(f"{source} contains no {name}: fetch it again, whole.")

    steps.run("unpack", {"source": fingerprint}, [raw / name for name in names], write)
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
    by_split = {}
    for split, part in zip(prep.SPLITS, ("train", "eval", "test"), strict=True):
        path = source / f"new_aan_pairs.{part}.tsv"
        labels = [int(fields[0] == b"1.0") for fields in pairs(path)]
        _require(len(labels), task.sizes[part], "pairs", path)
        first, second = (Column(path, number, task.longest) for number in (3, 4))
        by_split[split] = Examples(first, labels, second)
    return by_split


# --- pathfinder --------------------------------------------------------------------------------


def pathfinder(task: Task, source: Path) -> dict[str, Examples]:
    """Return images of 32 x 32 pixels; class 1 if both markers are on one path.

    The splits are 80, 10 and 10 percent of a permutation of the images, which are first sorted by
    the names of folder and file as text: ``sample_10.png`` precedes ``sample_2.png``. Empty files,
    of which the release has one, are left out with a message.
    Raises: UserError for images without labels, or no images.
    """
    images: dict[tuple[str, str], bytes] = {}
    labels: dict[tuple[str, str], int] = {}
    for match, stream in _files(task.archive, source):
        body = stream.read()
        if match[1] is None:  # a file of labels
            labels.update(_metadata(body))
        elif body:
            images[match[1], match[2]] = gray_png(body, 32, match[0])
        else:
            prep.say(f"  {match[0]} is empty and left out")
    missing = len(images.keys() - labels.keys())
    if not images or missing:
        raise UserError(
            f"{source} has {len(images):,} images of pathfinder32, {missing:,} of them without a "
            "label: fetch it again, whole."
        )
    keys = sorted(images)
    every = Examples([images[key] for key in keys], [labels[key] for key in keys])
    count = len(images)
    ends = [8 * count // 10, 9 * count // 10]
    # RandomState, whose permutations do not change between versions of numpy
    rows_of = np.split(np.random.RandomState(SEED).permutation(count), ends)
    return {
        split: every.chosen(sorted(rows)) for split, rows in zip(prep.SPLITS, rows_of, strict=True)
    }


def _metadata(content: bytes) -> dict[tuple[str, str], int]:
    """Return (folder, file) -> label of a metadata file, which is text in spite of its name.

    Raises: UserError for a line that does not have a label of 0 or 1.
    """
    label_of = {}
    for line in filter(str.strip, content.decode(errors="replace").splitlines()):
        match line.split():
            # folder, file, number in the folder, label, parameters of the drawing
            case [folder, name, _, ("0" | "1") as label, *_]:
                label_of[folder, name] = int(label)
            case _:
                raise UserError(f"A line of pathfinder32's labels is {line!r}: fetch them again.")
    return label_of


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
    """Return CIFAR-10's images as luma; validation is a tenth of the training set.

    A record of the source is a class and the pixels, first all red ones: 1 + 3 x 1024 bytes.
    """
    parts = {match[1]: stream.read() for match, stream in _files(task.archive, source)}
    # the order of the batches decides which images are held out
    train = b"".join(parts[name] for name in sorted(parts) if name != "test_batch")
    rows = {}
    for part, content in (("train", train), ("test", parts.get("test_batch", b""))):
        # a truncated batch gives a fraction, which is no published number either
        _require(len(content) / 3073, task.sizes[part], f"images in {part}", source)
        rows[part] = np.frombuffer(content, np.uint8).reshape(-1, 3073)
    count = len(rows["train"])
    held_out, kept = np.split(np.random.RandomState(SEED).permutation(count), [count // 10])
    known = {
        part: Examples(luma(rows_of_part[:, 1:]), rows_of_part[:, 0].tolist())
        for part, rows_of_part in rows.items()
    }
    train = known["train"].chosen(sorted(kept))
    valid = known["train"].chosen(sorted(held_out))
    return {"train": train, "valid": valid, "test": known["test"]}


def luma(pixels: np.ndarray) -> np.ndarray:
    """Return .299 R + .587 G + .114 B, rounded as Pillow's mode ``L``: (N, 3 P) -> (N, P)."""
    red, green, blue = pixels.astype(np.uint32).reshape(len(pixels), 3, -1).swapaxes(0, 1)
    return ((19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16).astype(np.uint8)


TEXT = Task(
    name="text",
    archive=Archive(
        "aclImdb_v1.tar.gz",
        ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
        "7c2ac02c03563afcf9b574c7e56c153a",
        r"(train|test)/(neg|pos)/(\d+_\d+\.txt)",
        {  # see the README
            "train.tsv.xz": "b674956176f04f9a52d499936092b60cfffb2029da52c11e8b60d67008a7f867",
            "test.tsv.xz": "43269319002fd00b21763ea4b96504762dafc8ea36db9deada9991c5e99617d2",
        },
    ),
    sizes={"train": 25_000, "test": 25_000},
    read=text,
    eos=True,
    longest=4_095,
)
RETRIEVAL = Task(
    name="retrieval",
    archive=Archive(RELEASE, RELEASE_URLS, "", r"new_aan_pairs\.(?:train|eval|test)\.tsv"),
    sizes={"train": 147_086, "eval": 18_090, "test": 17_437},
    read=retrieval,
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
    read=pathfinder,
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
    read=image,
    classes=10,
)
TASKS = {"text": TEXT, "retrieval": RETRIEVAL, "pathfinder": PATHFINDER, "image": IMAGE}


@command("data-prep/lra/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare a task."""
    parser = prep.parser(
        __doc__, "folder with the archive, its files or its tables, instead of the download"
    )
    parser.add_argument("task", choices=list(TASKS), help="the task")
    parser.add_argument(
        "--published-splits",
        action="store_true",
        help="text: train on the whole training set and validate on the test set",
    )
    options = parser.parse_args(argv)
    if options.published_splits and options.task != "text":
        raise UserError("--published-splits is an option of the task text.")
    prep.say(f"Long-Range Arena, {options.task} -> {options.dest}")
    task = TASKS[options.task]
    prepare(task, options.dest, options.from_dir, published_splits=options.published_splits)


if __name__ == "__main__":
    sys.exit(main())
