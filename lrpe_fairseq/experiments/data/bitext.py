"""Steps shared by the data-prep scripts for parallel text, after the download; see ``corpus``.

A path without a language suffix names both sides: ``text/train`` means ``text/train.en`` and
``text/train.de``. Both sides share one sentencepiece model; each has a separate dictionary, as in
Table 7 of the LRPE paper.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import pieces
from lrpe_fairseq.experiments.data.pieces import SentencePiece
from lrpe_fairseq.experiments.records.console import UserError


def arguments(
    description: str, argv: Sequence[str] | None, vocab_size: int = 4000, **flags: str
) -> dict[str, Any]:
    """Parse the options of a parallel-text script: dest, vocab_size, from_dir, workers, flags."""
    parser = prep.parser(description, "folder with the source files")
    parser.add_argument("--vocab-size", type=int, default=vocab_size, help="number of pieces")
    parser.add_argument("--workers", type=int, default=1, help="worker processes")
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return vars(parser.parse_args(argv))


def side(text: Path, language: str) -> Path:
    """Return the path of one language's file."""
    return text.with_name(f"{text.name}.{language}")


def sides(texts: Mapping[str, Path], languages: Sequence[str]) -> dict[str, Path]:
    """Return the files of all texts, by names such as ``train en``."""
    return {f"{name} {s}": side(text, s) for name, text in texts.items() for s in languages}


def binary_name(split: str, languages: Sequence[str], language: str) -> str:
    """Return fairseq's name of one language of a split, such as ``train.en-de.en``."""
    return f"{split}.{'-'.join(languages)}.{language}"


def require_pairs(texts: Mapping[str, Path], languages: Sequence[str]) -> dict[str, int]:
    """Count the pairs of each split. Raises: UserError if the two sides differ in length."""
    counted = {}
    for split, text in texts.items():
        lines = {s: sum(1 for _ in prep.read_lines(side(text, s))) for s in languages}
        # Shifted by one line, a corpus trains without an error and translates nothing.
        if len(set(lines.values())) != 1:
            counts = " and ".join(f"{n:,} lines of {language}" for language, n in lines.items())
            raise UserError(
                f"{text} has {counts}, so its lines do not pair up: take both sides of one corpus."
            )
        counted[split] = lines[languages[0]]
    return counted


def require_lines(files: Iterable[Path]) -> None:
    """Raise UserError for an empty line, which would part the pairs."""
    for path in files:
        for number, line in enumerate(prep.read_lines(path), start=1):
            # fairseq drops a sentence that is empty on one side, and the sides no longer pair up.
            if not line:
                raise UserError(f"{path}, line {number}, is empty: remove it from both sides.")


def run_pieces(
    steps: prep.Steps,
    texts: Mapping[str, Path],
    languages: Sequence[str],
    tokenizer: SentencePiece,
    workers: int = 1,
) -> None:
    """Steps: write ``pieces/`` and ``bin/`` of both sides. Raises: UserError for an empty line."""
    reads = sides(texts, languages)
    bin_dir = steps.dest / "bin"
    encoded = sides({split: steps.dest / "pieces" / split for split in texts}, languages)
    names = [binary_name(split, languages, s) for split in texts for s in languages]
    require_lines(reads.values())

    def encode_all() -> None:
        for name, path in reads.items():
            pieces.encode(tokenizer, path, encoded[name], workers)

    def binarize_all() -> None:
        with prep.atomic_folder(bin_dir) as part:
            for language in languages:
                binaries = {
                    part / binary_name(split, languages, language): encoded[f"{split} {language}"]
                    # binarize builds the dictionary from the first text: train.
                    for split in sorted(texts, key=lambda split: split != "train")
                }
                prep.binarize(binaries, part / f"dict.{language}.txt", workers=workers)

    files = {file.name: file for file in tokenizer.files}
    steps.run("encode", {**reads, **files}, list(encoded.values()), encode_all)
    binary = [*prep.binary_files(names), *(f"dict.{language}.txt" for language in languages)]
    steps.run("binarize", encoded, [bin_dir / file for file in binary], binarize_all)


def count(dest: Path, texts: Mapping[str, Path], languages: Sequence[str]) -> dict[str, Any]:
    """Count a finished destination: pairs per split, words and tokens per side."""
    splits: dict[str, Any] = {s: {"pairs": n} for s, n in require_pairs(texts, languages).items()}
    for split, language in itertools.product(texts, languages):
        prefix = dest / "bin" / binary_name(split, languages, language)
        splits[split][language] = prep.count_split(side(texts[split], language), prefix)
    return {
        "languages": list(languages),
        "texts": {split: str(text.relative_to(dest)) for split, text in texts.items()},
        "splits": splits,
        "dictionary": {s: prep.count_types(dest / "bin" / f"dict.{s}.txt") for s in languages},
    }
