"""Steps shared by the data-prep scripts for parallel text, after the download; see ``corpus``.

A path without a language suffix names both sides: ``text/train`` means ``text/train.en`` and
``text/train.de``. Both sides share one sentencepiece model; each has a separate dictionary, as in
Table 7 of the LRPE paper.
"""

import argparse
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.records.console import UserError


def arguments(
    description: str, argv: Sequence[str] | None, vocab_size: int = 4000
) -> argparse.Namespace:
    """Parse the options of a parallel-text script: dest, vocab_size, from_dir, workers."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--dest", type=Path, required=True, help="output folder")
    parser.add_argument(
        "--vocab-size", type=int, default=vocab_size, help="number of sentencepiece pieces"
    )
    parser.add_argument("--from", dest="from_dir", type=Path, help="folder with the source files")
    parser.add_argument("--workers", type=int, default=1, help="worker processes")
    return parser.parse_args(argv)


def side(text: Path, language: str) -> Path:
    """Return the path of one language's file."""
    return text.with_name(f"{text.name}.{language}")


def require_pairs(texts: Mapping[str, Path], languages: Sequence[str]) -> dict[str, int]:
    """Count the pairs of each split. Raises: UserError if the two sides differ in length."""
    counted = {}
    for split, text in texts.items():
        lines = {language: _count(side(text, language)) for language in languages}
        if len(set(lines.values())) != 1:
            said = " and ".join(f"{n:,} lines of {language}" for language, n in lines.items())
            raise UserError(
                f"{text} has {said}, so its lines do not pair up: fetch both sides again."
            )
        counted[split] = lines[languages[0]]
    return counted


def run_sentencepiece(
    steps: prep.Steps, train: Path, languages: Sequence[str], vocab_size: int
) -> prep.SentencePiece:
    """Step: train ``spm/`` on both sides of the train split."""
    sides = {f"train {language}": side(train, language) for language in languages}
    return prep.run_sentencepiece(steps, sides, vocab_size)


def run_pieces(
    steps: prep.Steps,
    texts: Mapping[str, Path],
    languages: Sequence[str],
    tokenizer: prep.Tokenizer,
    workers: int = 1,
) -> dict[str, Path]:
    """Steps: write ``pieces/`` for all splits and both languages, then ``bin/``."""
    pieces = {split: steps.dest / "pieces" / split for split in texts}
    every = list(itertools.product(texts, languages))
    for split, language in every:
        _require_no_empty_line(side(texts[split], language))

    def encode_all() -> None:
        for split, language in every:
            source, target = side(texts[split], language), side(pieces[split], language)
            prep.encode(tokenizer, source, target, workers)

    reads = {f"{split} {language}": side(texts[split], language) for split, language in every}
    reads |= {file.name: file for file in tokenizer.files}
    encoded = [side(pieces[split], language) for split, language in every]
    steps.run("encode", reads, encoded, encode_all)
    _run_binarize(steps, pieces, languages, workers)
    return pieces


def clean(
    source: Path,
    target: Path,
    languages: Sequence[str],
    tokenizer: prep.Tokenizer,
    *,
    longest: int = 250,
    ratio: float = 1.5,
    threads: int = 1,
) -> None:
    """Copy the pairs that pass the length filter: neither side is empty, longer than ``longest``
    pieces, or more than ``ratio`` times as long as the other."""
    with contextlib.ExitStack() as stack:
        lines = [prep.read_lines(side(source, name)) for name in languages]
        outs = [stack.enter_context(prep.written_whole(side(target, n))) for n in languages]
        while batch := list(itertools.islice(zip(*lines, strict=True), 20_000)):
            columns = [list(column) for column in zip(*batch, strict=True)]
            lengths = [_lengths(tokenizer, column, threads) for column in columns]
            for pair, sizes in zip(batch, zip(*lengths, strict=True), strict=True):
                if min(sizes) > 0 and max(sizes) <= min(longest, ratio * min(sizes)):
                    for out, text in zip(outs, pair, strict=True):
                        out.write(f"{text}\n")


def _lengths(tokenizer: prep.Tokenizer, lines: Sequence[str], threads: int) -> list[int]:
    return [len(pieces.split()) for pieces in tokenizer.cut(lines, threads)]


def _run_binarize(
    steps: prep.Steps, pieces: Mapping[str, Path], languages: Sequence[str], workers: int
) -> None:
    pair, bin_dir = "-".join(languages), steps.dest / "bin"
    every = list(itertools.product(pieces, languages))
    reads = {f"{split} {language}": side(pieces[split], language) for split, language in every}
    names = [f"{split}.{pair}.{language}" for split, language in every]
    files = [f"{name}.{kind}" for name in names for kind in ("bin", "idx")]
    writes = [bin_dir / file for file in (*files, *(f"dict.{name}.txt" for name in languages))]

    def make() -> None:
        prep.binarize(pieces, bin_dir, workers=workers, languages=languages)

    steps.run("binarize", reads, writes, make)


def count(dest: Path, texts: Mapping[str, Path], languages: Sequence[str]) -> dict[str, Any]:
    """Count a finished destination: pairs per split, words and tokens per side."""
    pairs, pair = require_pairs(texts, languages), "-".join(languages)
    splits: dict[str, Any] = {}
    for split, text in texts.items():
        splits[split] = {"pairs": pairs[split]}
        for language in languages:
            prefix = dest / "bin" / f"{split}.{pair}.{language}"
            splits[split][language] = prep.count_split(side(text, language), prefix)
    sizes = {name: prep.count_types(dest / "bin" / f"dict.{name}.txt") for name in languages}
    where = {split: str(text.relative_to(dest)) for split, text in texts.items()}
    return {
        "languages": list(languages),
        "texts": where,
        "splits": splits,
        "dictionary": sizes,
    }


def report(manifest: dict[str, Any]) -> dict[str, Any]:
    """Print the counts of a finished destination and return its manifest."""
    for split, counts in manifest["splits"].items():
        sides = ", ".join(
            f"{counts[name]['tokens']:,} tokens of {name} ({counts[name]['unknown']:,} <unk>)"
            for name in manifest["languages"]
        )
        prep.say(f"  {split}: {counts['pairs']:,} pairs, {sides}")
    sizes = " and ".join(f"{size['size']:,}" for size in manifest["dictionary"].values())
    prep.say(f"  dictionaries: {sizes} types; ready for fairseq-train")
    return manifest


def _require_no_empty_line(path: Path) -> None:
    for number, line in enumerate(_lines(path), start=1):
        if not line:
            raise UserError(f"{path}, line {number}, is empty: remove this line from both sides.")


def _count(path: Path) -> int:
    return sum(1 for _ in _lines(path))


def _lines(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise UserError(f"{path} does not exist: parallel text needs both sides.")
    return prep.read_lines(path)
