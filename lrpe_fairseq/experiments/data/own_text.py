"""A user's own text as data: for language models, or in two languages for translation.

Texts are cut into pieces of SentencePiece, by a model that is trained on the training text, or by
one that the user has. In the trained one, characters without a piece become bytes, so that texts
for language models have no ``<unk>``.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.data import bitext, pieces
from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.files import atomic_write

HELD_OUT = 0.05
"""Share of one file's characters in valid, and again in test; both are cut off its end."""
SMALLEST = 64
"""Pieces of the smallest vocabulary, beyond the 256 bytes."""
BYTES = 256


def prepare(
    files: Sequence[Path], dest: Path, model: int | Path = 8000, workers: int = 1
) -> dict[str, Any]:
    """Prepare ``dest`` from text files and return its manifest; finished steps are skipped.

    Args:
        files: one text, which is split, or three: train, valid and test. UTF-8.
        model: of the pieces: the size of the vocabulary to train, the 256 bytes included, or a
            trained model of SentencePiece.
        workers: processes that cut and binarize.

    Raises: UserError if a file is missing, empty or not UTF-8, if the text is too short for the
        splits or for the vocabulary, if ``model`` is no model of SentencePiece, or if ``dest`` has
        the data of another text.
    """
    if len(files) not in (1, 3):
        raise UserError(
            f"give one text file, or three in the order train, valid, test, not {len(files)}: "
            "join several texts with cat."
        )
    # With byte fallback every text can be written, but 256 pieces are taken.
    if isinstance(model, int) and model < BYTES + SMALLEST:
        raise UserError(
            f"--vocabulary {model} is too small: {BYTES} pieces are bytes, so choose at "
            f"least {BYTES + SMALLEST}."
        )
    level = level_of(model)
    for path in files:
        require_text(path)
    steps = prep.Steps(dest, dest.resolve().name, level)
    texts = run_split(steps, files)
    fallback = {"byte_fallback": True, "character_coverage": 0.9999}
    tokenizer = run_model(steps, {"train": texts["train"]}, model, **fallback)
    pieces.run_pieces(steps, texts, tokenizer, workers)
    return steps.finish(lambda: prep.count_corpus(dest, texts))


def prepare_pairs(
    prefixes: Sequence[Path],
    languages: Sequence[str],
    dest: Path,
    model: int | Path = 8000,
    workers: int = 1,
) -> dict[str, Any]:
    """Prepare ``dest`` for translation and return its manifest; finished steps are skipped.

    Both languages share the pieces, without bytes; each has a dictionary of its own.

    Args:
        prefixes: paths without the language of train, valid and test: ``data/train`` stands for
            ``data/train.en`` and ``data/train.de``, whose lines are pairs. UTF-8.
        languages: of the source and of the target, as in the names of the files.
        model, workers: as in ``prepare``.

    Raises: UserError as ``prepare`` does, if lines do not pair up or are empty, and for a model
        with pieces of bytes, which fairseq does not join to characters.
    """
    if len(prefixes) != len(prep.SPLITS):
        raise UserError(
            f"--languages needs three texts in the order train, valid, test, not {len(prefixes)}: "
            "give their paths without the language."
        )
    if len(set(languages)) != 2:
        raise UserError(f"--languages {' '.join(languages)}: give a source and another target.")
    level = level_of(model)
    if isinstance(model, Path) and "<0x00>" in pieces.SentencePiece(model).vocabulary():
        raise UserError(
            f"--tokenizer {model} has pieces of bytes, which fairseq does not join when it "
            "translates: give a model trained without byte_fallback."
        )
    given = dict(zip(prep.SPLITS, prefixes, strict=True))
    files = bitext.sides(given, languages).values()
    for path in files:
        require_text(path)
    bitext.require_pairs(given, languages)
    bitext.require_lines(files)
    steps = prep.Steps(dest, dest.resolve().name, level)
    texts = run_copy(steps, given, languages)
    tokenizer = run_model(steps, bitext.sides({"train": texts["train"]}, languages), model)
    bitext.run_pieces(steps, texts, languages, tokenizer, workers)
    return steps.finish(lambda: bitext.count(dest, texts, languages))


def level_of(model: int | Path) -> str:
    """Return the level of a model of pieces for the manifest.

    Raises: UserError if its file is no model.
    """
    if isinstance(model, int):
        return f"bpe{model}"
    try:
        pieces.SentencePiece(model)
    except (OSError, RuntimeError):
        raise UserError(
            f"--tokenizer {model} is no model of SentencePiece: give its file, such as spm.model."
        ) from None
    return f"pieces of {prep.digest(model)[:8]}"


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


def run_copy(
    steps: prep.Steps, given: Mapping[str, Path], languages: Sequence[str]
) -> dict[str, Path]:
    """Step: copy parallel texts to ``text/<split>.<language>``; return them without language."""
    texts = {split: steps.dest / "text" / split for split in given}
    reads, writes = bitext.sides(given, languages), bitext.sides(texts, languages)

    def make() -> None:
        for name, path in reads.items():
            prep.write_lines(writes[name], prep.read_lines(path))

    steps.require_same("copy", reads)
    steps.run("copy", reads, list(writes.values()), make)
    return texts


def run_model(
    steps: prep.Steps, train: Mapping[str, Path], model: int | Path, **options: Any
) -> pieces.SentencePiece:
    """Step: train ``spm/spm.model`` on the training texts, or copy ``model``.

    options: of the training, as of ``pieces.train_sentencepiece``.
    """
    target = steps.dest / pieces.SPM
    if isinstance(model, Path):

        def copy() -> None:
            with atomic_write(target, "wb") as file:
                file.write(model.read_bytes())

        steps.run("copy sentencepiece", {"model": model}, [target], copy)
        return pieces.SentencePiece(target)

    def make() -> None:
        pieces.train_sentencepiece(
            itertools.chain.from_iterable(map(prep.read_lines, train.values())),
            target,
            model,
            option="--vocabulary",
            user_defined_symbols=[],
            **options,
        )

    steps.run("train sentencepiece", {**train, "vocabulary": model}, [target], make)
    return pieces.SentencePiece(target)
