"""A user's own text as data for language models: pieces of SentencePiece, no unknown tokens.

The model of the pieces is trained on the training text. Characters without a piece become bytes,
so no text has an ``<unk>``.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import pieces
from lrpe_fairseq.experiments.records.console import UserError

HELD_OUT = 0.05
"""Share of one file's characters in valid, and again in test; both are cut off its end."""
SMALLEST = 64
"""Pieces of the smallest vocabulary, beyond the 256 bytes."""
BYTES = 256


def prepare(
    files: Sequence[Path], dest: Path, vocabulary: int = 8000, workers: int = 1
) -> dict[str, Any]:
    """Prepare ``dest`` from text files and return its manifest; finished steps are skipped.

    Args:
        files: one text, which is split, or three: train, valid and test. UTF-8.
        vocabulary: the number of pieces, those of the 256 bytes among them.
        workers: processes that cut and binarize.

    Raises: UserError if a file is missing, empty or not UTF-8, if the text is too short for the
        splits or for the vocabulary, or if ``dest`` has the data of another text.
    """
    if len(files) not in (1, 3):
        raise UserError(
            f"give one text file, or three in the order train, valid, test, not {len(files)}: "
            "join several texts with cat."
        )
    # With byte fallback every text can be written, but 256 pieces are taken.
    if vocabulary < BYTES + SMALLEST:
        raise UserError(
            f"--vocabulary {vocabulary} is too small: {BYTES} pieces are bytes, so choose at "
            f"least {BYTES + SMALLEST}."
        )
    for path in files:
        require_text(path)
    steps = prep.Steps(dest, dest.resolve().name, f"bpe{vocabulary}")
    texts = run_split(steps, files)
    tokenizer = run_model(steps, texts["train"], vocabulary)
    pieces.run_pieces(steps, texts, tokenizer, workers)
    return steps.finish(lambda: prep.count_corpus(dest, texts))


def require_text(path: Path) -> None:
    """Raise UserError unless ``path`` is a file of UTF-8 text with at least one word."""
    if not path.is_file():
        raise UserError(f"{path} is not a file: give the path of a text.")
    try:
        if not any(prep.read_lines(path)):
            raise UserError(f"{path} has no words: give a text.")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}): convert it, for example "
            f"with iconv -f latin1 -t utf-8."
        ) from None


def run_split(steps: prep.Steps, files: Sequence[Path]) -> dict[str, Path]:
    """Step: write ``text/<split>.txt``, and ``documents/<split>.tsv`` with one document each."""
    texts = {split: steps.dest / "text" / f"{split}.txt" for split in prep.SPLITS}
    documents = {split: steps.dest / "documents" / f"{split}.tsv" for split in prep.SPLITS}
    reads = dict(zip(prep.SPLITS, files, strict=False))

    def make() -> None:
        if len(files) == 1:
            splits = cut(list(prep.read_lines(files[0])), files[0])
        else:
            splits = {split: prep.read_lines(path) for split, path in reads.items()}
        for split, lines in splits.items():
            prep.write_lines(texts[split], lines)
            # One document per split: evaluations by document have a start to read from.
            prep.write_lines(documents[split], [f"0\t{split}"])

    reads = reads if len(files) == 3 else {"text": files[0], "held out": HELD_OUT}
    steps.require_same("split", reads)
    steps.run("split", reads, [*texts.values(), *documents.values()], make)
    return texts


def cut(lines: Sequence[str], source: Path) -> dict[str, Sequence[str]]:
    """Return lines of train, valid and test: the end of the text is held out, at line ends.

    Raises: UserError if a split would have no words.
    """
    # From the end: with random lines, training would read the neighbors of the test lines.
    ends = list(itertools.accumulate(len(line) + 1 for line in lines))
    limits = [ends[-1] * (1 - 2 * HELD_OUT), ends[-1] * (1 - HELD_OUT)]
    first, second = (sum(end <= limit for end in ends) for limit in limits)
    splits = {"train": lines[:first], "valid": lines[first:second], "test": lines[second:]}
    for split, part in splits.items():
        if not any(part):
            raise UserError(
                f"{source} is too short to be split at line ends: its {split} split has no words. "
                "Give a longer text, one with shorter lines, or three files."
            )
    return splits


def run_model(steps: prep.Steps, train: Path, vocabulary: int) -> pieces.SentencePiece:
    """Step: train ``spm/spm.model`` with byte fallback on the training text."""
    model = steps.dest / pieces.SPM

    def make() -> None:
        pieces.train_sentencepiece(
            prep.read_lines(train),
            model,
            vocabulary,
            option="--vocabulary",
            byte_fallback=True,
            character_coverage=0.9999,
            user_defined_symbols=[],
        )

    steps.run("train sentencepiece", {"train": train, "vocabulary": vocabulary}, [model], make)
    return pieces.SentencePiece(model)
