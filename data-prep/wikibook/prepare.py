"""Prepare WikiBook, the pre-training data of Wettig et al. 2022, in its public form of shards.

    python data-prep/wikibook/prepare.py --dest data/wikibook

The data are already binarized for fairseq; this script obtains and verifies them. See the README in
this folder for sources, sizes and what is verified.
"""

import functools
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lrpe_fairseq import dictionaries
from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.pieces import GPT2, SHA256, obtain_gpt2
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import shards_of

FILES = ("dict.txt", "train.bin", "train.idx", "valid.bin", "valid.idx")
AVAILABLE = 16  # two orders of the same text, in 8 shards each
TYPES = 50_264  # of fairseq's dictionary; with <mask>, which the task adds, 50,265


@dataclass(frozen=True)
class Source:
    """The published data set. files, listing: addresses; ``{}`` stands for a folder."""

    files: str = (
        "https://huggingface.co/datasets/princeton-nlp/wikibook_fairseq_format/resolve/main/{}/"
    )
    listing: str = (
        "https://huggingface.co/api/datasets/princeton-nlp/wikibook_fairseq_format/tree/main/{}"
    )


# ---------------------------------------------------------------------------------------- obtain


def published(number: int) -> str:
    """Return the published name of a shard, which counts from 0."""
    return f"bin-shard{number}-8"


def obtain(
    number: int, into: Path, from_dir: Path | None, listings: Path, source: Source | None = None
) -> None:
    """Write the files of a shard to ``into``, copied from ``from_dir`` or downloaded.

    listings: a folder for the publisher's list of checksums.
    Raises: UserError if a file is missing or damaged.
    """
    name = published(number)
    if from_dir is not None:
        for file in FILES:
            path = from_dir / name / file
            if not path.is_file():
                raise UserError(
                    f"{path} does not exist: put it there, or omit --from to download it."
                )
            prep.unpack(functools.partial(open, path, "rb"), into / file)
        return
    source = source or Source()
    known = checksums(name, listings, source)
    for file in FILES:
        prep.obtain(file, [source.files.format(name) + file], known.get(file, ""), into)


def checksums(name: str, folder: Path, source: Source) -> dict[str, str]:
    """Return file -> sha256 for the files of a shard for which the publisher's list has one."""
    path = prep.obtain(f"{name}.json", [source.listing.format(name)], "", folder)
    entries = json.loads(path.read_text(encoding="utf-8"))
    return {Path(e["path"]).name: e["lfs"]["oid"] for e in entries if "lfs" in e}


# ---------------------------------------------------------------------------------------- verify


def verify(folders: Sequence[Path], tokenizer: GPT2, types: int = TYPES) -> None:
    """Check that all files are complete and share the dictionary of GPT-2's pieces.

    Raises: UserError, which names the first file that is not.
    """
    first = folders[0] / "dict.txt"
    words = dictionaries.words(first)
    size = len(words) + prep.FAIRSEQ_SPECIALS
    # the pieces are looked up by their text, so that an order of its own is no defect
    if size != types or set(tokenizer.vocabulary()) - set(words):
        raise UserError(
            f"{first} is not the dictionary of GPT-2's pieces with {types:,} types: fetch it again."
        )
    for folder in folders:
        if (folder / "dict.txt").read_bytes() != first.read_bytes():
            raise UserError(f"{folder / 'dict.txt'} differs from {first}: fetch both again.")
        for split in ("train", "valid"):
            require_whole(folder / split, size)


def require_whole(prefix: Path, types: int) -> None:
    """Raise UserError unless ``prefix``.bin has the tokens of .idx, all below ``types``."""
    tokens = int(prep.row_lengths(prefix).sum(dtype=np.int64))
    width = np.dtype(np.uint16).itemsize
    size = os.path.getsize(f"{prefix}.bin")
    # fairseq reads a truncated file without an error, up to the missing part
    if not tokens or size != tokens * width:
        raise UserError(
            f"{prefix}.bin has {size:,} bytes instead of the {tokens * width:,} of its index: "
            "delete it and run the same command again."
        )
    # memory-mapped: a shard has gigabytes
    largest = int(np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r").max())
    if largest >= types:
        raise UserError(f"{prefix}.bin has the token {largest}, but dict.txt {types:,} types only.")


# --------------------------------------------------------------------------------------- prepare


def prepare(
    dest: Path,
    count: int = 8,
    from_dir: Path | None = None,
    *,
    source: Source | None = None,
    sha256: Mapping[str, str] = SHA256,
    types: int = TYPES,
) -> dict:
    """Prepare ``dest`` with ``count`` shards and return its manifest; finished steps are skipped.

    ``bin`` appears when all shards are complete, so that no training sees a part of them.
    Raises: UserError for a number of shards that there is not, or a damaged shard.
    """
    if not 1 <= count <= AVAILABLE:
        raise UserError(f"--shards is from 1 to {AVAILABLE}, not {count}.")
    prep.say(f"WikiBook, {count} shards -> {dest}")
    steps = prep.Steps(dest, "wikibook", "gpt2")
    tokenizer = obtain_gpt2(dest, from_dir, sha256)

    def make() -> None:
        raw = _reopened(dest, count)
        for number in range(count):
            obtain(number, raw / f"shard{number}", from_dir, dest / "listing", source)
        verify([raw / f"shard{number}" for number in range(count)], tokenizer, types)
        os.replace(raw, dest / "bin")  # at once, when everything is verified

    writes = [dest / "bin" / f"shard{n}" / file for n in range(count) for file in FILES]
    steps.run("obtain", {"shards": count}, writes, make)
    return steps.finish(functools.partial(results, dest))


def _reopened(dest: Path, count: int) -> Path:
    """Return ``raw`` with the shards that are there already, without those above ``count``."""
    raw = dest / "raw"
    # data of another number of shards: those that are there are not fetched again
    if (dest / "bin").is_dir() and not raw.exists():
        os.replace(dest / "bin", raw)
    shutil.rmtree(dest / "bin", ignore_errors=True)
    for folder in raw.glob("shard*"):
        if folder.name not in {f"shard{number}" for number in range(count)}:
            shutil.rmtree(folder)
    return raw


def results(dest: Path) -> dict:
    """Return the counts: of all shards for train, and of the first one, which fairseq reads, for
    valid."""
    folders = shards_of(dest)
    parts = [prep.count_binary(folder / "train") for folder in folders]
    train = {key: sum(part[key] for part in parts) for key in parts[0]}
    train["tokens_by_shard"] = [part["tokens"] for part in parts]
    splits = {"train": train, "valid": prep.count_binary(folders[0] / "valid")}
    return {"splits": splits, "dictionary": prep.count_types(folders[0] / "dict.txt")}


@command("data-prep/wikibook/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the data."""
    parser = prep.parser(__doc__, "folder with the source files")
    parser.add_argument(
        "--shards", type=int, default=8, help=f"number of shards, at most {AVAILABLE}"
    )
    args = parser.parse_args(argv)
    prepare(args.dest, args.shards, args.from_dir)


if __name__ == "__main__":
    sys.exit(main())
