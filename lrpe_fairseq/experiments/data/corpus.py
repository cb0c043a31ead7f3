"""Steps shared by the data-prep scripts: download, unpack, binarize, count, record.

A script under ``data-prep/`` declares its sources and splits; this module does the rest. Files are
written atomically. Invalid input raises ``UserError`` with one sentence that says what to do. A
finished step runs again only if one of its inputs or outputs has changed.

Words are the ``str.split()`` words of a line, as in fairseq and in the published token counts.
fairseq is imported only to binarize.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import hashlib
import http.client
import itertools
import json
import lzma
import os
import re
import shutil
import struct
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from lrpe_fairseq.dictionaries import SPECIALS as FAIRSEQ_SPECIALS
from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.files import (
    atomic_write,
    read_json,
    require_writable,
    write_json,
)

SPLITS = ("train", "valid", "test")
FAIRSEQ_EOS, FAIRSEQ_UNK = 2, 3
BLOCK = 1 << 20
COMPRESSED = (zlib.error, gzip.BadGzipFile, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)
Opener = Callable[[], AbstractContextManager[IO[bytes]]]
ATTEMPTS = 3  # per address
USER_AGENT = "lrpe-fairseq data-prep"  # some mirrors refuse Python's own


def parser(description: str, source: str = "") -> argparse.ArgumentParser:
    """Return a script's parser with ``--dest`` and, if ``source`` describes it, ``--from``."""
    script_parser = argparse.ArgumentParser(description=description.split("\n")[0])
    script_parser.add_argument("--dest", type=Path, required=True, help="output folder")
    if source:
        script_parser.add_argument("--from", dest="from_dir", type=Path, help=source)
    return script_parser


def say(message: str) -> None:
    """Print one line of progress and flush, so that it also appears through a pipe."""
    print(message, flush=True)


# ---------------------------------------------------------------------------------------- files


def read_lines(path: Path) -> Iterator[str]:
    r"""Yield the lines of a text with whitespace collapsed and stripped.

    Lines end at "\n" only: U+0085, U+2028 and "\r" within a line are whitespace, not line ends.
    """
    # Python's default would also end lines at "\r".
    with open(path, encoding="utf-8", newline="\n") as text:
        for line in text:
            yield " ".join(line.split())


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    """Write one line per item atomically."""
    with atomic_write(path) as out:
        out.writelines(f"{line}\n" for line in lines)


def digest(path: Path, like: str = "0" * 64) -> str:
    """Return the checksum of a file; the length of ``like`` selects md5, sha1 or sha256."""
    with open(path, "rb") as stream:
        # Publishers use all three.
        kind = {32: "md5", 40: "sha1", 64: "sha256"}[len(like)]
        return hashlib.file_digest(stream, kind).hexdigest()


def has_checksum(path: Path, checksum: str) -> bool:
    """True if ``path`` is a file with this md5, sha1 or sha256, or any file for an empty one."""
    return path.is_file() and (not checksum or digest(path, checksum) == checksum)


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces ``folder`` at the end; after an error it is deleted."""
    # On the same disk, so that the rename is atomic.
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        yield part
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


# --------------------------------------------------------------------------------------- obtain


def obtain(
    file: str,
    urls: Sequence[str],
    checksum: str,
    into: Path,
    from_dir: Path | None = None,
    *,
    packed: bool = False,
) -> Path:
    """Return ``into / file`` with a verified checksum: reused, copied from a folder, or downloaded.

    With ``from_dir`` the file is read from there (plain, ``.gz``, ``.xz`` or ``.zip``) without
    network access. Otherwise the URLs are tried in turn; an interrupted download is kept as
    ``file.part`` and resumed by the next attempt or call. checksum: of the plain file; empty if
    none is published. packed: the URLs serve the file compressed with gzip.

    Raises: UserError if it is missing, truncated or another version; no file is left then.
    """
    target = into / file
    if has_checksum(target, checksum):
        return target
    if from_dir is not None:
        return unpack(_stored(file, from_dir), target, checksum)
    part = target.with_name(f"{file}.part")
    # A complete part is what a kill before the rename leaves.
    if not checksum or not has_checksum(part, checksum):
        _download(urls, part)
    if packed:
        # The published checksum is of the plain file.
        unpack(functools.partial(gzip.open, part), target, checksum)
        part.unlink()
    elif has_checksum(part, checksum):
        os.replace(part, target)
    else:
        part.unlink()
        raise UserError(
            f"The downloaded {file} has the wrong checksum and was deleted: run the same command "
            f"again, or fetch {file} yourself and pass its folder with --from."
        )
    return target


def unpack(opener: Opener, target: Path, checksum: str = "") -> Path:
    """Copy the stream of ``opener`` to ``target`` atomically.

    Raises: UserError if the source is truncated or has another checksum; ``target`` is unchanged.
    """
    with readable(target.name), opener() as stream, atomic_write(target, "wb") as out:
        shutil.copyfileobj(stream, out, BLOCK)
        # The checksum is read from the file on the disk, before it gets its name.
        out.flush()
        if not has_checksum(Path(out.name), checksum):
            raise ValueError(f"its checksum is not {checksum}")
    return target


@contextlib.contextmanager
def readable(source: object) -> Iterator[None]:
    """Turn the errors of a damaged file or archive into a UserError that names ``source``.

    Raises: UserError.
    """
    try:
        yield
    except (ValueError, EOFError, *COMPRESSED) as why:
        raise UserError(
            f"{source} is truncated or not the expected version ({why}): fetch it again and run "
            "the same command."
        ) from None


@contextlib.contextmanager
def zip_member(archive: Path, file: str) -> Iterator[IO[bytes]]:
    """Open the archive member with this file name, in any folder of the archive.

    Raises: ValueError unless there is exactly one such member.
    """
    with zipfile.ZipFile(archive) as zipped:
        members = [name for name in zipped.namelist() if PurePosixPath(name).name == file]
        if len(members) != 1:
            raise ValueError(f"{archive} has {len(members)} members named {file}")
        with zipped.open(members[0]) as stream:
            yield stream


def tar_members(archive: Path | IO[bytes], pattern: str) -> Iterator[tuple[re.Match, IO[bytes]]]:
    """Yield the files of a tar archive whose names match ``pattern``, see :func:`wanted`.

    Each comes as the match of its name and its content, to be read before the next one. Nothing is
    extracted under a name that the archive chooses freely, and links are left out. Use it within
    :func:`readable`.
    """
    where = {"name": archive} if isinstance(archive, Path) else {"fileobj": archive}
    # As a stream: archives of books have a gigabyte, and no index.
    with tarfile.open(mode="r|*", **where) as tar:
        for member in tar:
            match = wanted(member.name, pattern)
            if match and member.isfile():
                yield match, tar.extractfile(member)


def wanted(name: str, pattern: str) -> re.Match[str] | None:
    """Match the end of a path with ``pattern``, from the start of a folder's or file's name on."""
    return re.search(rf"(?<![^/])(?:{pattern})$", name)


def _stored(file: str, folder: Path) -> Opener:
    """Return what opens a file of a folder, plain or compressed.

    Raises: UserError if it is in none of the forms.
    """
    openers = {"": functools.partial(open, mode="rb"), ".gz": gzip.open, ".xz": lzma.open}
    openers[".zip"] = functools.partial(zip_member, file=file)
    for suffix, opener in openers.items():
        if (path := folder / f"{file}{suffix}").is_file():
            return functools.partial(opener, path)
    raise UserError(
        f"{folder} contains no {file}, {file}.gz, {file}.xz or {file}.zip: put the file there, "
        f"or omit --from to download it."
    )


def _download(urls: Sequence[str], part: Path) -> None:
    """Complete ``part`` from the first address that answers.

    Raises: UserError if no address answers.
    """
    file = part.stem
    reason = "no URL is known"
    part.parent.mkdir(parents=True, exist_ok=True)
    for url, attempt in itertools.product(urls, range(ATTEMPTS)):
        try:
            return _resume(url, part)
        except (OSError, http.client.HTTPException) as error:
            reason = f"{url}: {error}"
            say(f"  {reason}")
            # 416: the server has fewer bytes than we have.
            if isinstance(error, urllib.error.HTTPError) and error.code == 416:
                part.unlink()  # longer than the file, so it belongs to another
            # A busy mirror needs a moment; the first retry needs none.
            time.sleep(attempt)
    raise UserError(
        f"Could not download {file} ({reason}): run the same command again to resume, "
        f"or fetch {file} yourself and pass its folder with --from."
    )


def _resume(url: str, part: Path) -> None:
    """Append the rest of ``url`` to ``part``; start again if the server supports no ranges.

    Raises: OSError if the connection ends early.
    """
    from tqdm import tqdm

    start = part.stat().st_size if part.is_file() else 0
    ranges = {"Range": f"bytes={start}-"} if start else {}
    request = urllib.request.Request(url, headers={"User-Agent": USER_AGENT, **ranges})
    say(f"  {url}" + (f" (resuming at {start:,} bytes)" if start else ""))
    with urllib.request.urlopen(request, timeout=60) as answer:
        total = int(answer.headers.get("Content-Length") or 0)
        units = {"total": total or None, "unit": "B", "unit_scale": True, "disable": None}
        with (
            # 206: the server honors the range. Otherwise it sends the file from its start.
            open(part, "ab" if answer.status == 206 else "wb") as out,
            tqdm.wrapattr(out, "write", **units) as counted,
        ):
            shutil.copyfileobj(answer, counted, BLOCK)
        if missing := getattr(answer, "length", 0):  # urllib reports an early close as end of file
            raise OSError(f"the connection closed {missing:,} bytes before the end")


# ----------------------------------------------------------------------------- binarize and count


def write_binary(
    texts: Mapping[str, Path], folder: Path, dictionary: Path | None = None, workers: int = 1
) -> None:
    """Write ``dict.txt`` and the splits as fairseq-preprocess does; the folder appears whole.

    texts: split -> text with one sample per line and symbols separated by spaces. dictionary: by
    default one is built from the train split.
    """
    with atomic_folder(folder) as part:
        prefixes = {part / split: text for split, text in texts.items()}
        binarize(prefixes, part / "dict.txt", dictionary, workers)


def binarize(
    texts: Mapping[Path, Path], target: Path, dictionary: Path | None = None, workers: int = 1
) -> None:
    """Write fairseq's dictionary ``target``, and the ids of texts with the end of sentence.

    texts: path of the ids without its endings -> text. dictionary: by default one is built from the
    first text, padded to a multiple of 8.
    """
    from fairseq.binarizer import FileBinarizer, VocabularyDatasetBinarizer
    from fairseq.data import Dictionary
    from fairseq.tokenizer import tokenize_line

    words = Dictionary.load(str(dictionary)) if dictionary else Dictionary()
    if not dictionary:
        first = str(next(iter(texts.values())))
        Dictionary.add_file_to_dictionary(first, words, tokenize_line, workers)
        words.finalize()
    words.save(str(target))
    for prefix, text in texts.items():
        FileBinarizer.multiprocess_dataset(
            input_file=str(text),
            dataset_impl="mmap",
            binarizer=VocabularyDatasetBinarizer(words),
            output_prefix=str(prefix),
            vocab_size=len(words),
            num_workers=workers,
        )


def write_indexed(rows: Iterable[Sequence[int]], prefix: Path, kind: type[np.integer]) -> None:
    """Write fairseq's MMapIndexedDataset of rows of numbers, which are stored as ``kind``."""
    import torch
    from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", kind)
    for row in rows:
        builder.add_item(torch.as_tensor(row))
    builder.finalize(f"{prefix}.idx")


def row_lengths(prefix: Path) -> np.ndarray:
    """Return row lengths of an MMapIndexedDataset, int32 (N,). Raises: UserError without one."""
    with open(f"{prefix}.idx", "rb") as index:
        if index.read(9) != b"MMIDIDX\x00\x00":
            raise UserError(f"{prefix}.idx is not a fairseq index: delete it and run again.")
        _version, _dtype, rows = struct.unpack("<QBQ", index.read(17))
        return np.fromfile(index, dtype=np.int32, count=rows)


def count_binary(prefix: Path) -> dict[str, int]:
    """Count the tokens that fairseq reads from ``prefix``.bin and .idx.

    ``tokens`` includes one end of sentence per line, as do fairseq's counts and perplexities;
    ``unknown`` is the number of ``<unk>`` among them.
    """
    lengths = row_lengths(prefix)
    samples = len(lengths)
    tokens = int(lengths.sum(dtype=np.int64))
    stored = np.memmap(f"{prefix}.bin", dtype=_id_type(prefix, tokens), mode="r")
    return {"samples": samples, "tokens": tokens, "unknown": int((stored == FAIRSEQ_UNK).sum())}


def read_tokens(prefix: Path, limit: int | None = None) -> np.ndarray:
    """Return the ids in ``prefix``.bin, or its first ``limit`` ones, in order: int64 (N,)."""
    tokens = int(row_lengths(prefix).sum(dtype=np.int64))
    kind = _id_type(prefix, tokens)
    count = tokens if limit is None else min(limit, tokens)
    return np.fromfile(f"{prefix}.bin", dtype=kind, count=count).astype(np.int64)


def _id_type(prefix: Path, tokens: int) -> type[np.integer]:
    """Return the type in which ``prefix``.bin holds its ids."""
    width = os.path.getsize(f"{prefix}.bin") // max(tokens, 1)
    return {2: np.uint16, 4: np.int32}[width]


def count_types(dictionary: Path) -> dict[str, int]:
    """Count a fairseq dictionary: ``size`` is the width of the model's embedding."""
    # A symbol may contain spaces; the count after the last one does not.
    symbols = [line.rsplit(" ", 1)[0] for line in read_lines(dictionary)]
    # fairseq pads dictionaries to a multiple of 8 with words that no text has.
    filler = sum(symbol.startswith("madeupword") for symbol in symbols)
    return {"size": len(symbols) + FAIRSEQ_SPECIALS, "symbols": len(symbols) - filler}


def count_split(text: Path, prefix: Path) -> dict[str, int]:
    """Count one split: words of its text and tokens of its binary form.

    The two counts make perplexities of different tokenizations comparable: with a loss in bits
    per token, the perplexity per word is ``2 ** (loss * tokens / words_with_eos)``, and that of
    PG-19 ``2 ** (loss * tokens / words)``. ``words_with_eos`` adds one end of line per line.

    Raises: UserError if text and binary form have different numbers of lines.
    """
    sizes = [len(line.split()) for line in read_lines(text)]
    binary = count_binary(prefix)
    lines = len(sizes)
    words = sum(sizes)
    if binary.pop("samples") != lines:
        raise UserError(
            f"{prefix}.bin and {text} have different numbers of lines: delete both and run again."
        )
    counted = {"lines": lines, "words": words, "words_with_eos": words + lines}
    return {**counted, "pieces": binary["tokens"] - lines, **binary}


def count_corpus(dest: Path, texts: Mapping[str, Path]) -> dict[str, Any]:
    """Count a finished destination: each split with ``count_split``, and the dictionary."""
    splits = {split: count_split(text, dest / "bin" / split) for split, text in texts.items()}
    for split, counts in splits.items():
        counts["documents"] = sum(1 for _ in read_lines(dest / "documents" / f"{split}.tsv"))
    return {"splits": splits, "dictionary": count_types(dest / "bin" / "dict.txt")}


# -------------------------------------------------------------------------------------- manifest


class Steps:
    """The finished steps of one destination, recorded in its ``manifest.json``.

    A step is skipped if its inputs (files by sha256, settings by value) and outputs match the
    manifest. Only ``finish`` writes the results, so a manifest with ``splits`` describes a complete
    destination.
    """

    def __init__(self, dest: Path, corpus: str, level: str) -> None:
        """Read the manifest of ``dest``.

        Raises: UserError if it has data of another corpus or level. What a failed preparation of
            those left before its data is deleted instead.
        """
        self.dest = dest
        self.path = dest / "manifest.json"
        require_writable(dest, "--dest")
        self.head = {"corpus": corpus, "level": level}
        self.old = {}
        self.done = {}
        with contextlib.suppress(ValueError):  # a damaged manifest counts as none
            self.old = read_json(self.path)
        # Another corpus in the same folder would be trained on under the wrong name.
        there = {key: self.old.get(key, value) for key, value in self.head.items()}
        if there == self.head:
            return
        failed = "steps" in self.old and "splits" not in self.old
        if not failed or (dest / "bin").exists():
            raise UserError(
                f"{dest} contains {there['corpus']} at {there['level']} level, not {corpus} at "
                f"{level} level: choose another --dest, or delete it."
            )
        self._delete_steps()

    def _delete_steps(self) -> None:
        """Delete the files of the recorded steps, such as a tokenizer of another level."""
        for step in self.old.get("steps", {}).values():
            for path in step["writes"]:
                (self.dest / path).unlink(missing_ok=True)
        self.old = {}

    def require_same(self, name: str, reads: Mapping[str, Any]) -> None:
        """Raise UserError if the destination is complete and a step read something else for it."""
        known = self.old.get("steps", {}).get(name, {}).get("reads")
        # Models that were trained on these data would be evaluated on others.
        if "splits" in self.old and known not in (None, self._fingerprints(reads)):
            raise UserError(
                f"{self.dest} was made from another text: choose another --dest, or delete it."
            )

    def run(
        self, name: str, reads: Mapping[str, Any], writes: Sequence[Path], make: Callable[[], None]
    ) -> None:
        """Run ``make`` unless its inputs ``reads`` and outputs ``writes`` are unchanged."""
        inputs = self._fingerprints(reads)
        steps = self.old.get("steps", {})
        # Outputs count too: a step whose file was deleted or damaged runs again.
        if steps.get(name) == {"reads": inputs, "writes": self._outputs(writes)}:
            say(f"  {name}: already done")
        else:
            steps.pop(name, None)
            self._save({"steps": steps})  # without results: the destination is incomplete
            began = time.monotonic()
            make()
            say(f"  {name}: {time.monotonic() - began:.1f} s")
            steps[name] = {"reads": inputs, "writes": self._outputs(writes)}
            self._save({"steps": steps})
        self.done[name] = steps[name]

    def binarize(
        self, texts: Mapping[str, Path], dictionary: Path | None = None, workers: int = 1
    ) -> None:
        """Step: write ``bin/``, fairseq's dictionary and the binary form of each split."""
        bin_dir = self.dest / "bin"
        files = ["dict.txt", *binary_files(texts)]
        make = functools.partial(write_binary, texts, bin_dir, dictionary, workers)
        reads = {**texts, "dictionary": dictionary}
        self.run("binarize", reads, [bin_dir / file for file in files], make)

    def finish(self, results: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Record the results, recounted if any step ran; print and return the whole manifest."""
        # Results are counted only if a step ran; counting reads all texts.
        if "splits" not in self.old:
            self._save({**results(), "steps": self.done})
        for split, counts in self.old["splits"].items():
            say(f"  {split}: {json.dumps(counts)}")
        return self.old

    def _save(self, content: dict[str, Any]) -> None:
        self.old = {**self.head, **content}
        write_json(self.path, self.old)

    def _outputs(self, writes: Sequence[Path]) -> dict[str, str]:
        return {str(path.relative_to(self.dest)): self._fingerprint(path) for path in writes}

    def _fingerprints(self, reads: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self._fingerprint(value) for key, value in sorted(reads.items())}

    @staticmethod
    def _fingerprint(value: Any) -> Any:
        if not isinstance(value, Path):
            return value
        # An absent file is a value of its own: a step that lacks it has changed.
        return digest(value) if value.is_file() else "absent"


def binary_files(names: Iterable[str]) -> list[str]:
    """Return the two files of each name in the binary form."""
    return [f"{name}.{kind}" for name in names for kind in ("bin", "idx")]
