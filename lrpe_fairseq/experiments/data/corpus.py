"""Steps shared by the data-prep scripts: download, tokenize, binarize, count, record.

A script under ``data-prep/`` declares its sources and splits; this module does the rest. Files are
written atomically. Invalid input raises ``UserError`` with one sentence that says what to do. A
finished step runs again only if one of its inputs or outputs has changed.

Words are the ``str.split()`` words of a line, as in fairseq and in the published token counts. This
module does not import fairseq: fairseq-preprocess runs as a separate process.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import http.client
import io
import itertools
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from lrpe_fairseq.experiments.data.pieces import SPM, SentencePiece, Tokenizer
from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.files import require_writable, write_json, written_whole

SPLITS = ("train", "valid", "test")
UNKNOWN_WORD = "<unk>"  # replaces rare words in WikiText; also fairseq's unknown symbol
FAIRSEQ_SPECIALS = 4  # <s>, <pad>, </s>, <unk>: in every fairseq dictionary, in no dict.txt
FAIRSEQ_EOS, FAIRSEQ_UNK = 2, 3
FAIRSEQ_UINT16 = 65500  # dictionaries smaller than this are stored with two bytes per token
FAIRSEQ_CODES = {np.int64: 5, np.uint16: 8, np.uint32: 9}  # of MMapIndexedDataset
DICTIONARY_MULTIPLE = 8  # fairseq-preprocess pads the dictionaries it builds to this multiple
BLOCK = 1 << 20
UNREADABLE = (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile)
Opener = Callable[[], AbstractContextManager[IO[bytes]]]
USER_AGENT = "lrpe-fairseq data-prep"  # some mirrors refuse Python's own


def say(message: str) -> None:
    """Print one line of progress and flush, so that it also appears through a pipe."""
    print(message, flush=True)


# ---------------------------------------------------------------------------------------- files


def read_lines(path: Path) -> Iterator[str]:
    r"""Yield the lines of a text with whitespace collapsed and stripped.

    Lines end at "\n" only: U+0085, U+2028 and "\r" within a line are whitespace, not line ends.
    """
    with open(path, encoding="utf-8", newline="\n") as text:
        for line in text:
            yield " ".join(line.split())


def _hasher(checksum: str) -> Any:
    return hashlib.new({32: "md5", 40: "sha1", 64: "sha256"}[len(checksum)])


def digest(path: Path, like: str = "0" * 64) -> str:
    """Return the checksum of a file; the length of ``like`` selects md5, sha1 or sha256."""
    hasher = _hasher(like)
    with open(path, "rb") as stream:
        while block := stream.read(BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


def has_checksum(path: Path, checksum: str) -> bool:
    """True if ``path`` is a file with this md5, sha1 or sha256."""
    return path.is_file() and digest(path, checksum) == checksum


# --------------------------------------------------------------------------------------- obtain


def obtain(
    file: str,
    urls: Sequence[str],
    sha256: str,
    into: Path,
    from_dir: Path | None = None,
    *,
    attempts: int = 3,
    packed: bool = False,
) -> Path:
    """Return ``into / file`` with a verified checksum: reused, copied from a folder, or downloaded.

    With ``from_dir`` the file is read from there (plain, ``.gz`` or ``.zip``) without network
    access. Otherwise the URLs are tried in turn, each ``attempts`` times; an interrupted download
    is kept as ``file.part`` and resumed by the next attempt or the next call.

    Args:
        sha256: checksum of the plain file; an md5 or sha1 is accepted if no sha256 is known.
        packed: the URLs serve the file compressed with gzip.

    Raises:
        UserError: the file is missing, truncated or another version; no file is left under its
            name.
    """
    target = into / file
    if not has_checksum(target, sha256):
        if from_dir is not None:
            _take(file, from_dir, sha256, target)
        elif packed:
            part = target.with_name(f"{file}.gz")
            part.parent.mkdir(parents=True, exist_ok=True)
            _try_urls(file, urls, part, attempts)
            _take(file, into, sha256, target)
            part.unlink()
        else:
            _download(file, urls, sha256, target, attempts)
    return target


def extract(archive: Path, file: str, sha256: str, into: Path) -> Path:
    """Return ``into / file``, extracted from any folder of a zip archive and verified."""
    target = into / file
    if not has_checksum(target, sha256):
        _unpack(lambda: zip_member(archive, file), sha256, target, archive)
    return target


def download(
    file: str,
    urls: Sequence[str],
    into: Path,
    sound: Callable[[Path], bool] = lambda path: True,
    attempts: int = 3,
) -> Path:
    """Return ``into / file`` from a source that publishes no checksum; the write is atomic.

    Raises:
        UserError: the download failed, or ``sound`` rejected the file, which is then deleted.
    """
    target = into / file
    if not target.is_file():
        part = target.with_name(f"{file}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        _try_urls(file, urls, part, attempts)
        if not sound(part):
            part.unlink()
            raise UserError(
                f"The downloaded {file} is invalid and was deleted: run the same "
                f"command again, or fetch {file} yourself and pass its folder with --from."
            )
        os.replace(part, target)
    return target


def copy_whole(opener: Opener, target: Path) -> Path:
    """Copy the stream of ``opener`` to ``target`` unless it exists; the write is atomic.

    Raises:
        UserError: the source is truncated or does not contain the file, or ``target`` exists with
            other content, because it came from another source.
    """
    try:
        if target.is_file():
            _require_same(opener, target)
        else:
            with opener() as stream, written_whole(target, "wb") as out:
                shutil.copyfileobj(stream, out, BLOCK)
    except (ValueError, *UNREADABLE) as why:
        raise UserError(f"{target.name} cannot be unpacked ({why}): fetch it again.") from None
    return target


def _require_same(opener: Opener, target: Path) -> None:
    with opener() as stream, open(target, "rb") as there:
        ours, theirs = iter(lambda: there.read(BLOCK), b""), iter(lambda: stream.read(BLOCK), b"")
        same = all(one == other for one, other in itertools.zip_longest(ours, theirs))
    if not same:
        raise UserError(
            f"{target} was made from another source, with other content: delete "
            f"{target.parent.parent} to prepare it anew, or choose another --dest."
        )


@contextlib.contextmanager
def zip_member(archive: Path, file: str) -> Iterator[IO[bytes]]:
    """Open the archive member with this file name, in any folder of the archive."""
    with zipfile.ZipFile(archive) as zipped:
        members = [name for name in zipped.namelist() if PurePosixPath(name).name == file]
        if len(members) != 1:
            raise ValueError(f"it has {len(members)} members of that name")
        kind = stat.S_IFMT(zipped.getinfo(members[0]).external_attr >> 16)
        if kind not in (0, stat.S_IFREG):
            raise ValueError("it is a link or a device in the archive")
        with zipped.open(members[0]) as stream:
            yield stream


def _take(file: str, from_dir: Path, checksum: str, target: Path) -> None:
    plain, packed, zipped = (from_dir / f"{file}{suffix}" for suffix in ("", ".gz", ".zip"))
    if plain.is_file():
        _unpack(lambda: plain.open("rb"), checksum, target, plain)
    elif packed.is_file():
        _unpack(functools.partial(gzip.open, packed), checksum, target, packed)
    elif zipped.is_file():
        _unpack(lambda: zip_member(zipped, file), checksum, target, zipped)
    else:
        raise UserError(
            f"{from_dir} contains no {file}, {file}.gz or {file}.zip: put the file there, "
            f"or omit --from to download it."
        )


def _unpack(
    opener: Opener,
    checksum: str,
    target: Path,
    source: Path,
) -> None:
    hasher = _hasher(checksum)
    try:
        with opener() as stream, written_whole(target, "wb") as out:
            while block := stream.read(BLOCK):
                hasher.update(block)
                out.write(block)
            if hasher.hexdigest() != checksum:
                raise ValueError(f"its {hasher.name} is {hasher.hexdigest()}, not {checksum}")
    except (ValueError, *UNREADABLE) as why:
        raise UserError(
            f"{source} is truncated or not the expected version of {target.name} ({why}): "
            f"fetch it again and run the same command."
        ) from None


def _download(file: str, urls: Sequence[str], checksum: str, target: Path, attempts: int) -> None:
    part = target.with_name(f"{file}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    if not has_checksum(part, checksum):
        _try_urls(file, urls, part, attempts)
    if not has_checksum(part, checksum):
        part.unlink()
        raise UserError(
            f"The downloaded {file} has the wrong checksum and was deleted: run the same command "
            f"again, or fetch {file} yourself and pass its folder with --from."
        )
    os.replace(part, target)


def _try_urls(file: str, urls: Sequence[str], part: Path, attempts: int) -> None:
    reason = "no URL is known"
    for url in urls:
        for attempt in range(attempts):
            try:
                return _fetch(url, part)
            except (OSError, http.client.HTTPException) as error:
                reason = f"{url}: {error}"
                say(f"  {reason}")
                if isinstance(error, urllib.error.HTTPError) and error.code != 416:
                    break  # a definite answer of the server: retrying is useless
                time.sleep(min(attempt, 5))
    raise UserError(
        f"Could not download {file} ({reason}): run the same command again to resume, "
        f"or fetch {file} yourself and pass its folder with --from."
    )


def _fetch(url: str, part: Path) -> None:
    """Resume ``part`` from ``url``, or restart if the server does not support ranges."""
    start = part.stat().st_size if part.is_file() else 0
    ranges = {"Range": f"bytes={start}-"} if start else {}
    request = urllib.request.Request(url, headers={"User-Agent": USER_AGENT, **ranges})
    say(f"  {url}" + (f" (resuming at {start:,} bytes)" if start else ""))
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            resumed = answer.status == 206
            with open(part, "ab" if resumed else "wb") as out:
                _copy(answer, out, answer.headers.get("Content-Length"))
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the part is longer than the file, so it belongs to another
            part.unlink(missing_ok=True)
        raise


def _copy(answer: IO[bytes], out: IO[bytes], length: str | None) -> None:
    received, total, tenth = 0, int(length or 0), 1
    while block := answer.read(BLOCK):
        out.write(block)
        received += len(block)
        if total > 10 * BLOCK and received * 10 >= total * tenth:
            say(f"  {received:,} of {total:,} bytes")
            tenth = received * 10 // total + 1
    if received < total:  # urllib reports an early close as end of file
        raise OSError(f"the connection closed after {received:,} of {total:,} bytes")


# --------------------------------------------------------------------------------- sentencepiece


def train_sentencepiece(
    lines: Iterable[str], model: Path, vocab_size: int, kind: str = "bpe", **options: Any
) -> None:
    """Train a sentencepiece model in one thread, so that the result is deterministic.

    There is no Unicode normalization, every character has a piece, and the ``<unk>`` of the corpus
    is one piece, so that pieces and words encode the same text.

    Args:
        vocab_size: the number of pieces; at most that many with ``kind="char"``.
        kind: "bpe", or "char" for one piece per character, with ``▁`` for a space.
        options: further options of sentencepiece's trainer; they replace those here.
    """
    import sentencepiece

    trained = io.BytesIO()
    characters = kind == "char"
    chosen = {
        "model_type": kind,
        "vocab_size": vocab_size,
        "hard_vocab_limit": not characters,
        "add_dummy_prefix": not characters,  # a space before the first word of a line
        "character_coverage": 1.0,
        "normalization_rule_name": "identity",
        "max_sentence_length": 1 << 20,  # the default drops lines above 4,192 bytes
        "num_threads": 1,
        "bos_id": -1,
        "eos_id": -1,
        "user_defined_symbols": [] if characters else [f"▁{UNKNOWN_WORD}"],
        "minloglevel": 2,
        **options,
    }
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for line in lines if line), model_writer=trained, **chosen
        )
    except RuntimeError as error:
        raise UserError(
            f"sentencepiece cannot make {vocab_size} pieces of this text ({error}): "
            f"choose another --vocab-size."
        ) from None
    with written_whole(model, "wb") as out:
        out.write(trained.getvalue())


def encode(tokenizer: Tokenizer, source: Path, target: Path, threads: int = 1) -> None:
    """Encode ``source`` line by line as pieces; empty lines are kept."""
    lines = read_lines(source)
    with written_whole(target) as out:
        while batch := list(itertools.islice(lines, 20_000)):
            out.writelines(f"{pieces}\n" for pieces in tokenizer.cut(batch, threads))


def write_dictionary(tokenizer: Tokenizer, train_pieces: Path, target: Path) -> None:
    """Write a fairseq dictionary of all pieces of a tokenizer, most frequent first.

    fairseq-preprocess would list only the pieces in the encoded train split. A piece that BPE
    always merges there, but not in another split, would become ``<unk>``.
    """
    counts: Counter[str] = Counter()
    for line in read_lines(train_pieces):
        counts.update(line.split())
    pieces = sorted(tokenizer.vocabulary(), key=lambda piece: (-counts[piece], piece))
    filler = -(len(pieces) + FAIRSEQ_SPECIALS) % DICTIONARY_MULTIPLE
    pieces += [f"madeupword{i:04d}" for i in range(filler)]  # fairseq's names
    with written_whole(target) as out:
        out.writelines(f"{piece} {counts[piece]}\n" for piece in pieces)


# ----------------------------------------------------------------------------- binarize and count


def binarize(
    texts: Mapping[str, Path],
    bin_dir: Path,
    dictionary: Path | None = None,
    workers: int = 1,
    languages: Sequence[str] = (),
) -> None:
    """Run ``fairseq-preprocess`` on the splits; ``bin_dir`` is written atomically.

    Args:
        texts: split name -> text with one sample per line and symbols separated by spaces. The
            splits ``test``, ``test1``, ... become fairseq's test sets in this order.
        dictionary: the ``dict.txt`` to use; by default one is built from the train split.
        languages: source and target of parallel text; the files are then ``<text>.<language>``,
            and each language has a separate dictionary.

    Raises:
        UserError: fairseq-preprocess failed; its last line of output is quoted.
    """
    command = [sys.executable, "-m", "fairseq_cli.preprocess"]
    command += ["-s", languages[0], "-t", languages[1]] if languages else ["--only-source"]
    for kind in SPLITS:
        same_kind = [str(text.resolve()) for split, text in texts.items() if split.startswith(kind)]
        command += [f"--{kind}pref", ",".join(same_kind)] if same_kind else []
    command += ["--workers", str(workers)]
    command += ["--srcdict", str(dictionary.resolve())] if dictionary else []
    with folder_written_whole(bin_dir) as part:
        _run([*command, "--destdir", str(part.resolve())])
        (part / "preprocess.log").unlink()  # it contains the temporary folder's name


@contextlib.contextmanager
def folder_written_whole(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces ``folder`` at the end; after an error it is deleted."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        yield part
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def binarize_text(
    texts: Mapping[str, Path], bin_dir: Path, dictionary: Path | None, workers: int
) -> None:
    """Write the files of :func:`binarize` for one language in the faster of two ways."""
    if dictionary and workers == 1:
        binarize_pieces(texts, bin_dir, dictionary)
    else:
        binarize(texts, bin_dir, dictionary, workers)


def binarize_pieces(texts: Mapping[str, Path], bin_dir: Path, dictionary: Path) -> None:
    """Write the same files as :func:`binarize` for one language and a dictionary, without fairseq.

    Importing fairseq takes longer than writing a small corpus.
    """
    with folder_written_whole(bin_dir) as part:
        shutil.copyfile(dictionary, part / "dict.txt")
        for split, text in texts.items():
            write_tokens(text, part / split, dictionary)


def write_tokens(text: Path, prefix: Path, dictionary: Path) -> None:
    """Write the symbols of a text as fairseq's ids, with the end of sentence after each line."""
    symbols = [line.rsplit(" ", 1)[0] for line in read_lines(dictionary)]
    numbers = {symbol: n for n, symbol in enumerate(symbols, start=FAIRSEQ_SPECIALS)}
    small = len(numbers) + FAIRSEQ_SPECIALS < FAIRSEQ_UINT16
    rows = (
        [*(numbers.get(symbol, FAIRSEQ_UNK) for symbol in line.split()), FAIRSEQ_EOS]
        for line in read_lines(text)
    )
    write_indexed(rows, prefix, np.uint16 if small else np.uint32)


def write_indexed(rows: Iterable[Sequence[int]], prefix: Path, kind: type[np.integer]) -> None:
    """Write fairseq's MMapIndexedDataset: the numbers, and the length and offset of each row."""
    lengths = []
    with open(f"{prefix}.bin", "wb") as out:
        for row in rows:
            out.write(np.array(row, dtype=kind).tobytes())
            lengths.append(len(row))
    places = np.cumsum([0, *lengths[:-1]], dtype=np.int64) * kind().itemsize
    with open(f"{prefix}.idx", "wb") as out:
        code = FAIRSEQ_CODES[kind]
        out.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, code, len(lengths)))
        out.write(np.array(lengths, dtype=np.int32).tobytes() + places.tobytes())


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UserError(
            f"fairseq-preprocess failed ({' '.join(last)}): fix that and run the same command "
            f"again; the failed command was: {' '.join(command)}"
        )


def count_words(text: Path) -> dict[str, int]:
    """Count lines and words of a text; ``words_with_eos`` adds one end of line per line."""
    lines = words = 0
    for line in read_lines(text):
        lines += 1
        words += line.count(" ") + 1 if line else 0
    return {"lines": lines, "words": words, "words_with_eos": words + lines}


def row_lengths(prefix: Path) -> np.ndarray:
    """Return the lengths of the rows of an MMapIndexedDataset, int32 (N,).

    Raises: UserError if ``prefix``.idx is another kind of file.
    """
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
    samples, tokens = len(lengths), int(lengths.sum(dtype=np.int64))
    width = os.path.getsize(f"{prefix}.bin") // max(tokens, 1)
    stored = np.memmap(f"{prefix}.bin", dtype={2: np.uint16, 4: np.int32}[width], mode="r")
    return {"samples": samples, "tokens": tokens, "unknown": int((stored == FAIRSEQ_UNK).sum())}


def count_types(dictionary: Path) -> dict[str, int]:
    """Count a fairseq dictionary: ``size`` is the width of the model's embedding."""
    symbols = [line.rsplit(" ", 1)[0] for line in read_lines(dictionary)]
    filler = sum(symbol.startswith("madeupword") for symbol in symbols)
    return {"size": len(symbols) + FAIRSEQ_SPECIALS, "symbols": len(symbols) - filler}


def count_split(text: Path, prefix: Path) -> dict[str, int]:
    """Count one split: words of its text and tokens of its binary form.

    The two counts make perplexities of different tokenizations comparable: with a loss in bits
    per token, the perplexity per word is ``2 ** (loss * tokens / words_with_eos)``, and that of
    PG-19 ``2 ** (loss * tokens / words)``.
    """
    words, binary = count_words(text), count_binary(prefix)
    if binary.pop("samples") != words["lines"]:
        raise UserError(
            f"{prefix}.bin and {text} have different numbers of lines: delete both and run again."
        )
    return {**words, "pieces": binary["tokens"] - words["lines"], **binary}


# -------------------------------------------------------------------------------------- manifest


class Steps:
    """The finished steps of one destination, recorded in its ``manifest.json``.

    A step is skipped if its inputs (files by sha256, settings by value) and outputs match the
    manifest. Only ``finish`` writes the results, so a manifest with ``splits`` describes a complete
    destination.
    """

    def __init__(self, dest: Path, corpus: str, level: str) -> None:
        """Read the manifest of ``dest``. Raises: UserError if it is of another corpus or level."""
        self.dest, self.path = dest, dest / "manifest.json"
        require_writable(dest, "--dest")
        self.head = {"corpus": corpus, "level": level}
        self.old, self.done = self._load(), {}
        found = {key: self.old.get(key, value) for key, value in self.head.items()}
        if found != self.head:
            raise UserError(
                f"{dest} contains {found['corpus']} at {found['level']} level: "
                f"choose another --dest, or delete it."
            )

    def run(
        self, name: str, reads: Mapping[str, Any], writes: Sequence[Path], make: Callable[[], None]
    ) -> None:
        """Run ``make`` unless its inputs ``reads`` and outputs ``writes`` are unchanged."""
        inputs = {key: self._fingerprint(value) for key, value in sorted(reads.items())}
        steps = self.old.get("steps", {})
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

    def finish(self, results: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Record the results, recounted if any step ran, and return the whole manifest."""
        if "splits" not in self.old:
            self._save({**results(), "steps": self.done})
        return self.old

    def _save(self, content: dict[str, Any]) -> None:
        self.old = {**self.head, **content}
        write_json(self.path, self.old)

    def _load(self) -> dict[str, Any]:
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}

    def _outputs(self, writes: Sequence[Path]) -> dict[str, str]:
        return {str(path.relative_to(self.dest)): self._fingerprint(path) for path in writes}

    @staticmethod
    def _fingerprint(value: Any) -> Any:
        if not isinstance(value, Path):
            return value
        return digest(value) if value.is_file() else "absent"


# ------------------------------------------------------------------------- steps of every script


def run_binarize(
    steps: Steps, texts: Mapping[str, Path], dictionary: Path | None = None, workers: int = 1
) -> None:
    """Step: write ``bin/``, fairseq's dictionary and the binary form of each split."""
    bin_dir = steps.dest / "bin"
    files = ["dict.txt", *(f"{split}.{kind}" for split in texts for kind in ("bin", "idx"))]
    reads = {**texts, "dictionary": dictionary}
    writes = [bin_dir / file for file in files]

    make = functools.partial(binarize_text, texts, bin_dir, dictionary, workers)
    steps.run("binarize", reads, writes, make)


def run_sentencepiece(
    steps: Steps, texts: Mapping[str, Path], vocab_size: int, kind: str = "bpe"
) -> SentencePiece:
    """Step: train ``spm/`` on the concatenation of these texts."""
    model = steps.dest / SPM

    def make() -> None:
        lines = itertools.chain.from_iterable(map(read_lines, texts.values()))
        train_sentencepiece(lines, model, vocab_size, kind)

    reads = {**texts, "vocab_size": vocab_size, **({} if kind == "bpe" else {"kind": kind})}
    steps.run("train sentencepiece", reads, [model], make)
    return SentencePiece(model)


def run_pieces(
    steps: Steps, texts: Mapping[str, Path], tokenizer: Tokenizer, workers: int = 1
) -> dict[str, Path]:
    """Steps: write ``pieces/`` with the tokenizer's dictionary, then ``bin/``."""
    dictionary = steps.dest / "pieces" / "dict.txt"
    pieces = {split: steps.dest / "pieces" / f"{split}.txt" for split in texts}

    def encode_all() -> None:
        for split, text in texts.items():
            encode(tokenizer, text, pieces[split], workers)
        write_dictionary(tokenizer, pieces["train"], dictionary)

    reads = {**texts, **{file.name: file for file in tokenizer.files}}
    steps.run("encode", reads, [*pieces.values(), dictionary], encode_all)
    run_binarize(steps, pieces, dictionary, workers)
    return pieces


def count_corpus(dest: Path, texts: Mapping[str, Path]) -> dict[str, Any]:
    """Count a finished destination: each split with ``count_split``, and the dictionary."""
    splits = {split: count_split(text, dest / "bin" / split) for split, text in texts.items()}
    for split, counts in splits.items():
        counts["documents"] = sum(1 for _ in read_lines(dest / "documents" / f"{split}.tsv"))
    return {"splits": splits, "dictionary": count_types(dest / "bin" / "dict.txt")}


def report(manifest: dict[str, Any]) -> dict[str, Any]:
    """Print the counts of a finished destination and return its manifest."""
    say(f"  {'':6}{'documents':>12}{'words+eos':>13}{'tokens':>13}{'<unk>':>9}")
    for split, counts in manifest["splits"].items():
        say(
            f"  {split:6}{counts['documents']:12,}{counts['words_with_eos']:13,}"
            f"{counts['tokens']:13,}{counts['unknown']:9,}"
        )
    say(f"  dictionary of {manifest['dictionary']['size']:,} types; ready for fairseq-train")
    return manifest
