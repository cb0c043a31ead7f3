"""ImageNet-1k (ILSVRC2012), or any images in class folders, as an index of files.

Nothing is decoded or resized. ``images/train`` and ``images/val`` are links to the given folders,
or are unpacked from the official archives; ``bin/<split>.tsv`` lists a class, the size of a file in
bytes, and its path on each line, in the order of the class folders' names.
"""

import hashlib
import io
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.records.console import UserError

FOLDERS = {"train": "train", "valid": "val"}
"""Split -> its folder in ``images/``. There is no test set with labels."""
SUFFIXES = (".jpeg", ".jpg", ".png")
CLASS = r"n\d{8}"
DEVKIT = "ILSVRC2012_devkit_t12/data"
GROUND_TRUTH, SYNSETS = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
UNREADABLE = (tarfile.TarError, *prep.UNREADABLE)


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
    if _has_folders(from_dir):
        _link(images, from_dir)
    else:
        _unpack(steps, from_dir, archives)
    names = class_names(images / FOLDERS["train"])
    index = {s: listing(images / folder, names) for s, folder in FOLDERS.items()}
    _require_published(source, names, index, from_dir)
    _write_index(steps, names, index)
    return report(steps.finish(lambda: count(dest)))


def _has_folders(folder: Path) -> bool:
    return all((folder / name).is_dir() for name in FOLDERS.values())


def _link(images: Path, from_dir: Path) -> None:
    images.mkdir(exist_ok=True)
    for name in FOLDERS.values():
        link, target = images / name, (from_dir / name).resolve()
        if link.is_symlink() and link.resolve() != target:
            link.unlink()
        if not link.is_symlink():
            if link.exists():
                raise UserError(f"{link} was unpacked before: delete it, or choose another --dest.")
            link.symlink_to(target, target_is_directory=True)


def class_names(folder: Path) -> list[str]:
    """Return the names of the class folders, sorted: the class is the place in this list."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())


def listing(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the lines of the index of a split: class, bytes and path of every image.

    Raises: UserError for other classes than ``names``, for an empty image, and for a file that is
        no image by its name.
    """
    if class_names(folder) != list(names):
        raise UserError(f"{folder} has other class folders than the training set: fetch it again.")
    lines = []
    for label, name in enumerate(names):
        for entry in sorted(os.scandir(folder / name), key=lambda entry: entry.name):
            _require_image(entry)
            path = f"images/{folder.name}/{name}/{entry.name}"
            lines.append(f"{label}\t{entry.stat().st_size}\t{path}")
    return lines


def _require_image(entry: os.DirEntry) -> None:
    named = entry.name.lower().endswith(SUFFIXES) and entry.name.isprintable()
    if not named or not entry.is_file():
        raise UserError(f"{entry.path!r} is no image (.JPEG, .jpg or .png): remove it.")
    if not entry.stat().st_size:
        raise UserError(f"{entry.path} is empty: fetch it again.")


def _require_published(
    source: Source, names: Sequence[str], index: Mapping[str, Sequence[str]], from_dir: Path
) -> None:
    found = {"classes": len(names), **{split: len(lines) for split, lines in index.items()}}
    expected = {"classes": source.classes, **source.sizes}
    for part, number in found.items():
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
        with prep.folder_written_whole(bin_dir) as part:
            for file, lines in texts.items():
                with prep.written_whole(part / file) as out:
                    out.writelines(f"{line}\n" for line in lines)

    reads = {split: _digest(lines) for split, lines in index.items()}
    steps.run("index", reads, [bin_dir / file for file in texts], write)


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def count(dest: Path) -> dict[str, Any]:
    """Count a finished destination, for its manifest; ``majority`` as in :mod:`.examples`."""
    splits = {}
    for split in FOLDERS:
        lines = (dest / "bin" / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
        labels = np.bincount([int(line.split("\t")[0]) for line in lines])
        size = sum(int(line.split("\t")[1]) for line in lines)
        majority = round(100 * int(labels.max()) / len(lines), 2)
        splits[split] = {"examples": len(lines), "bytes": size, "majority": majority}
    names = (dest / "bin" / "classes.txt").read_text(encoding="utf-8").splitlines()
    return {"splits": splits, "classes": len(names)}


def report(manifest: dict[str, Any]) -> dict[str, Any]:
    """Print the counts of a finished destination and return its manifest."""
    for split, counts in manifest["splits"].items():
        prep.say(f"  {split:6}{counts['examples']:10,} images, {counts['bytes']:,} bytes")
    prep.say(f"  {manifest['classes']} classes; ready for fairseq-train")
    return manifest


# --- the official archives ---------------------------------------------------------------------


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
        _unpack_train(from_dir / archives.train[0], images / FOLDERS["train"])
        classes = validation_classes(from_dir / archives.devkit[0])
        _unpack_val(from_dir / archives.val[0], images / FOLDERS["valid"], classes)
        with prep.written_whole(images / "unpacked.txt") as out:
            out.writelines(f"{name} {checksum}\n" for name, checksum in archives.all())

    reads = dict(archives.all())
    steps.run("unpack", reads, [images / "unpacked.txt"], make)


def members(
    archive: Path, wanted: str, opened: IO[bytes] | None = None
) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield name and content of every member of a tar archive, in one pass.

    Nothing is extracted under a name that the archive chooses freely: a name is a bare file name
    that ``wanted``, a regular expression, describes.

    Args:
        opened: a stream, for an archive within ``archive``.
    Raises: UserError for an unreadable archive, and for any other member.
    """
    try:
        where = {"name": archive} if opened is None else {"fileobj": opened}
        with tarfile.open(mode="r|*", **where) as tar:
            for member in tar:
                if not (member.isfile() and re.fullmatch(wanted, member.name)):
                    raise UserError(
                        f"{archive} is refused: its member {member.name!r} is not a file of that "
                        "archive, so fetch it from its publisher again."
                    )
                yield member.name, tar.extractfile(member)
    except UNREADABLE as why:
        raise UserError(f"{archive} cannot be unpacked ({why}): fetch it again.") from None


def _unpack_train(archive: Path, folder: Path) -> None:
    for name, stream in members(archive, rf"{CLASS}\.tar"):
        target = folder / name.removesuffix(".tar")
        if target.is_dir():
            continue
        with prep.folder_written_whole(target) as part:
            for file, content in members(archive, rf"{CLASS}_\d+\.JPEG", stream):
                _copy(content, part / file)


def _unpack_val(archive: Path, folder: Path, classes: Sequence[str]) -> None:
    """Write the images to the folders of their classes; ``classes`` in the order of the numbers."""
    with prep.folder_written_whole(folder) as part:
        for name, stream in members(archive, r"ILSVRC2012_val_\d{8}\.JPEG"):
            number = int(name[-13:-5])
            if not 0 < number <= len(classes):
                raise UserError(f"{archive} has {name}, which has no label: fetch it again.")
            home = part / classes[number - 1]
            home.mkdir(exist_ok=True)
            _copy(stream, home / name)


def _copy(stream: IO[bytes], path: Path) -> None:
    with open(path, "wb") as out:
        shutil.copyfileobj(stream, out, prep.BLOCK)


def validation_classes(devkit: Path) -> list[str]:
    """Return the class folder of every validation image, in the order of their numbers.

    Raises: UserError without scipy, which reads the table of classes, or for a damaged archive.
    """
    found: dict[str, bytes] = {}
    pattern = rf"{DEVKIT}/({re.escape(GROUND_TRUTH)}|{re.escape(SYNSETS)})"
    try:
        with tarfile.open(devkit) as tar:
            for member in tar:
                if member.isfile() and (match := re.fullmatch(pattern, member.name)):
                    found[match[1]] = tar.extractfile(member).read()
    except UNREADABLE as why:
        raise UserError(f"{devkit} cannot be unpacked ({why}): fetch it again.") from None
    if len(found) < 2:
        raise UserError(f"{devkit} lacks {GROUND_TRUTH} or {SYNSETS}: fetch it again.")
    names = synsets(found[SYNSETS])
    return [names[int(number)] for number in found[GROUND_TRUTH].split()]


def synsets(content: bytes) -> dict[int, str]:
    """Return ILSVRC's number -> class folder, of the classes without children, from meta.mat."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError(
            "The table of classes needs scipy: run pip install scipy, or pass class folders."
        ) from None
    rows = loadmat(io.BytesIO(content), squeeze_me=True)["synsets"]
    return {int(row[0]): str(row[1]) for row in rows if int(row[4]) == 0}
