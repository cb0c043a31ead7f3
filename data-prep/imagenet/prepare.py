"""Prepare ImageNet-1k, or other images in class folders, for fairseq.

    python data-prep/imagenet/prepare.py --dest data/imagenet --from FOLDER

The images become an index of files; nothing is decoded or resized. ``images/train`` and
``images/val`` are links to the given folders, or are unpacked from the official archives;
``bin/<split>.tsv`` lists a class, the size of a file in bytes, and its path on each line, in the
order of the class folders' names.
"""

import hashlib
import io
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import examples
from lrpe_fairseq.experiments.records.console import UserError, command

FOLDERS = {"train": "train", "valid": "val"}
"""Split -> its folder in ``images/``. There is no test set with labels."""
SUFFIXES = (".jpeg", ".jpg", ".png")
CLASS = r"n\d{8}"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
SYNSETS = "meta.mat"


@dataclass(frozen=True)
class Archives:
    """The official archives: name -> md5, as torchvision lists them."""

    train: tuple[str, str] = ("ILSVRC2012_img_train.tar", "1d675b47d978889d74fa0da5fadfb00e")
    val: tuple[str, str] = ("ILSVRC2012_img_val.tar", "29b22e2961454d5413ddabcf34fc5622")
    devkit: tuple[str, str] = ("ILSVRC2012_devkit_t12.tar.gz", "fa75699e90414af021442c21a62c3abf")

    def all(self) -> list[tuple[str, str]]:
        """Return every archive."""
        return [self.train, self.val, self.devkit]


@dataclass(frozen=True)
class Source:
    """Which images: name and level in the manifest, and their published numbers.

    sizes: split -> images; empty for any. classes: their number; 0 for any.
    """

    name: str
    level: str
    sizes: Mapping[str, int]
    classes: int


IMAGENET = Source("imagenet", "1k", {"train": 1_281_167, "valid": 50_000}, 1000)
FOLDER = Source("images", "folders", {}, 0)


def prepare(
    dest: Path, from_dir: Path, source: Source = IMAGENET, archives: Archives = Archives()
) -> dict[str, Any]:
    """Prepare ``dest`` from class folders or the official archives; return its manifest.

    Raises: UserError if neither is there, or for another number of images or classes.
    """
    steps = prep.Steps(dest, source.name, source.level)
    images = dest / "images"
    if all((from_dir / name).is_dir() for name in FOLDERS.values()):
        _link(images, from_dir)
    else:
        _unpack(steps, from_dir, archives)
    # the training set decides the classes; listing compares the other split
    names = class_names(images / FOLDERS["train"])
    index = {s: listing(images / folder, names) for s, folder in FOLDERS.items()}
    _require_published(source, names, index, from_dir)
    _write_index(steps, names, index)
    return steps.finish(lambda: count(dest))


def _link(images: Path, from_dir: Path) -> None:
    images.mkdir(exist_ok=True)
    for name in FOLDERS.values():
        link = images / name
        target = (from_dir / name).resolve()
        if link.is_symlink():
            link.unlink()
        # --from is the folder images/ of --dest, whose links would point to themselves
        if target == link.resolve():
            raise UserError(f"{from_dir} lies in --dest, where this command writes: move it.")
        if link.exists():
            raise UserError(f"{link} was unpacked before: delete it, or choose another --dest.")
        link.symlink_to(target, target_is_directory=True)


def class_names(folder: Path) -> list[str]:
    """Return the names of the class folders, sorted: the class is the place in this list.

    Raises: UserError for a name with characters that are not printable.
    """
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    for name in names:
        if not name.isprintable():
            raise UserError(
                f"the name of the class folder {name!r} of {folder} has a tab, a line "
                "end or another character that is not printable: rename it."
            )
    return names


def listing(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the lines of the index of a split: class, bytes and path of every image.

    Raises: UserError for other classes than ``names``, for a class without images, for an empty
        image, and for a file that is no image by its name.
    """
    if class_names(folder) != list(names):
        raise UserError(f"{folder} has other class folders than the training set: fetch it again.")
    lines = []
    for label, name in enumerate(names):
        for entry in sorted(os.scandir(folder / name), key=lambda entry: entry.name):
            size = entry.stat().st_size if entry.is_file() else 0  # a folder has no image's size
            if not (size and entry.name.lower().endswith(SUFFIXES) and entry.name.isprintable()):
                raise UserError(
                    f"{entry.path!r} is empty or no image (.JPEG, .jpg or .png): remove it."
                )
            lines.append(f"{label}\t{size}\timages/{folder.name}/{name}/{entry.name}")
        if not any(os.scandir(folder / name)):
            raise UserError(f"{folder / name} has no images: remove it in both splits.")
    return lines


def _require_published(
    source: Source, names: Sequence[str], index: Mapping[str, Sequence[str]], from_dir: Path
) -> None:
    counts = {"classes": len(names), **{split: len(lines) for split, lines in index.items()}}
    expected = {"classes": source.classes, **source.sizes}
    for part, number in counts.items():
        if not number:
            raise UserError(f"{from_dir} has no images in class folders (part: {part}).")
        if expected.get(part) and number != expected[part]:
            raise UserError(
                f"{from_dir} is not ImageNet-1k: it has {number:,} {part} instead of "
                f"{expected[part]:,}; pass --any-images for other images."
            )


def _write_index(
    steps: prep.Steps, names: Sequence[str], index: Mapping[str, Sequence[str]]
) -> None:
    bin_dir = steps.dest / "bin"
    texts = {f"{split}.tsv": lines for split, lines in index.items()}
    texts["classes.txt"] = names
    texts["label/dict.txt"] = [f"{number} 1" for number in range(len(names))]

    def write() -> None:
        with prep.atomic_folder(bin_dir) as part:
            for file, lines in texts.items():
                prep.write_lines(part / file, lines)

    # the images themselves may be on a slow disk: their names and sizes stand for them
    reads = {s: hashlib.sha256("\n".join(lines).encode()).hexdigest() for s, lines in index.items()}
    steps.run("index", reads, [bin_dir / file for file in texts], write)


def count(dest: Path) -> dict[str, Any]:
    """Count a finished destination, for its manifest; ``majority`` as in :mod:`.examples`."""
    splits = {}
    for split in FOLDERS:
        text = (dest / "bin" / f"{split}.tsv").read_text(encoding="utf-8")
        rows = [line.split("\t") for line in text.splitlines()]
        majority = examples.accuracy_from_key([0] * len(rows), [int(label) for label, *_ in rows])
        size = sum(int(size) for _, size, _ in rows)
        splits[split] = {"examples": len(rows), "bytes": size, "majority": round(majority, 2)}
    classes = sum(1 for _ in prep.read_lines(dest / "bin" / "classes.txt"))
    return {"splits": splits, "classes": classes}


def _unpack(steps: prep.Steps, from_dir: Path, archives: Archives) -> None:
    """Step: unpack the archives to ``images/``; an interrupted step keeps its whole classes."""
    absent = [name for name, _ in archives.all() if not (from_dir / name).is_file()]
    if absent:
        raise UserError(
            f"{from_dir} has neither the folders train and val with one folder per class, nor "
            f"{', '.join(absent)}: register at https://image-net.org/download and put them there."
        )
    images = steps.dest / "images"

    def make() -> None:
        for name, checksum in archives.all():
            prep.say(f"  checking {name}")
            if not prep.has_checksum(from_dir / name, checksum):
                raise UserError(
                    f"{from_dir / name} is truncated or not the expected version: its md5 is not "
                    f"{checksum}, so fetch it again."
                )
        train, val, devkit = (from_dir / name for name, _ in archives.all())
        with prep.readable(from_dir):
            _unpack_train(train, images / FOLDERS["train"])
            _unpack_val(val, images / FOLDERS["valid"], validation_classes(devkit))
        # last: its existence says that everything is unpacked
        prep.write_lines(images / "unpacked.txt", map(" ".join, archives.all()))

    steps.run("unpack", dict(archives.all()), [images / "unpacked.txt"], make)


def _unpack_train(archive: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for match, stream in prep.tar_members(archive, rf"({CLASS})\.tar"):
        # a class appears when it is whole; an interrupted step goes on after it
        if not (folder / match[1]).is_dir():
            with prep.atomic_folder(folder / match[1]) as part:
                for image, content in prep.tar_members(stream, rf"{CLASS}_\d+\.JPEG"):
                    _copy(content, part / image[0])


def _unpack_val(archive: Path, folder: Path, classes: Sequence[str]) -> None:
    """Write the images to the folders of their classes; ``classes`` in the order of the numbers."""
    with prep.atomic_folder(folder) as part:
        for match, stream in prep.tar_members(archive, r"ILSVRC2012_val_(\d{8})\.JPEG"):
            home = part / classes[int(match[1]) - 1]  # images count from 1
            home.mkdir(exist_ok=True)
            _copy(stream, home / match[0])


def _copy(stream: IO[bytes], path: Path) -> None:
    with open(path, "wb") as out:
        shutil.copyfileobj(stream, out, prep.BLOCK)


def validation_classes(devkit: Path) -> list[str]:
    """Return the class folder of every validation image, in the order of their numbers.

    Raises: UserError without scipy, which reads the table of classes; ValueError for a damaged
        archive.
    """
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError(
            "The table of classes needs scipy: run pip install scipy, or pass class folders."
        ) from None
    wanted = f"data/({re.escape(GROUND_TRUTH)}|{re.escape(SYNSETS)})"
    members = {match[1]: stream.read() for match, stream in prep.tar_members(devkit, wanted)}
    if len(members) < 2:
        raise ValueError(f"{devkit} lacks {GROUND_TRUTH} or {SYNSETS}")
    rows = loadmat(io.BytesIO(members[SYNSETS]), squeeze_me=True)["synsets"]
    names = {int(row[0]): str(row[1]) for row in rows if int(row[4]) == 0}  # without children
    return [names[int(number)] for number in members[GROUND_TRUTH].split()]


@command("data-prep/imagenet/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the images."""
    parser = prep.parser(
        __doc__,
        "folder with train/ and val/, each with one folder per class, or the three archives",
    )
    parser.add_argument(
        "--any-images", action="store_true", help="accept other images than ImageNet-1k's"
    )
    options = parser.parse_args(argv)
    if options.from_dir is None:
        raise UserError(
            "ImageNet has no public download: register at https://image-net.org/download, and pass "
            "the folder with its archives, or with train and val, with --from."
        )
    source = FOLDER if options.any_images else IMAGENET
    prep.say(f"{source.name}, {source.level} -> {options.dest}")
    prepare(options.dest, options.from_dir, source)


if __name__ == "__main__":
    sys.exit(main())
