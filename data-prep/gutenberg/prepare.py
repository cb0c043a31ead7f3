"""Prepare English books of Project Gutenberg for a language model, in pieces, split by book.

    python data-prep/gutenberg/prepare.py --from FOLDER --dest data/gutenberg
    python data-prep/gutenberg/prepare.py --from FOLDER --shards 1 --dest data/gutenberg-first-1
    python data-prep/gutenberg/prepare.py --from FOLDER --shards 1 --vocab-size 4096 \
        --held-out-books 6 14 --dest data/books4096

See the README in this folder for the source, the cleaning and the counts.
"""

import itertools
import lzma
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import pieces
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import atomic_write

SHA256 = {  # of the compressed files
    "train-00": "6ab1361e22a7f04d0c73ddc39d5569f1666e3168d008c1bb9fc033ba8f837252",
    "train-01": "39af7da81a5d9b05ca0aa90a5c4599e821a8012b60c9f7487e0aa091dee22301",
    "train-02": "9693ceca2b8d15110348dda97ef01dc7706f46165a08ef3f8a015f3014acbe33",
    "valid": "1fe174570897b4bdf7c380d9dca1f9d49cb45ec5520c82f7a65cc0387547d8e3",
    "test": "26b7d930f60bb67cc151bf8944235e0295a99542599aa7cce84a9bac6c61045c",
}
BOOK = "<|book|>"
"""Begins the line that opens a book; the title follows. The prepared text keeps the mark alone."""
PIECES = 16_000
SAMPLE = 6
"""The pieces are trained on every sixth paragraph of the first shard."""


def obtain(names: Sequence[str], from_dir: Path, sha256: Mapping[str, str]) -> list[Path]:
    """Return the compressed files. Raises: UserError if one is missing or another version."""
    paths = [from_dir / f"{name}.txt.xz" for name in names]
    for name, path in zip(names, paths, strict=True):
        if not prep.has_checksum(path, sha256[name]):
            raise UserError(
                f"{path} is missing or not the version with the sha256 {sha256[name]}: "
                "see data-prep/gutenberg/README.md."
            )
    return paths


def name_of(path: Path) -> str:
    """Return the name of a source, such as ``train-00``."""
    return path.name.removesuffix(".txt.xz")


def lines_of(sources: Sequence[Path]) -> Iterator[str]:
    """Yield the lines of compressed texts with whitespace collapsed, without empty ones."""
    for source in sources:
        with lzma.open(source, "rt", encoding="utf-8", newline="\n") as text:
            for line in text:
                if collapsed := " ".join(line.split()):
                    yield collapsed


def first_books(lines: Iterable[str], books: int | None) -> Iterator[str]:
    """Yield the lines of the first ``books`` books, or of all of them."""
    seen = 0
    for line in lines:
        seen += line.startswith(BOOK)  # every book begins with this line
        if books is not None and seen > books:
            return
        yield line


def join(sources: Sequence[Path], text: Path, documents: Path, books: int | None = None) -> None:
    """Write the books as one text, and the first line (from 0) and title of each book.

    books: only the first ones.
    """
    with atomic_write(text) as out, atomic_write(documents) as index:
        for number, line in enumerate(first_books(lines_of(sources), books)):
            if line.startswith(BOOK):
                index.write(f"{number}\t{line.removeprefix(BOOK).strip()}\n")
                line = BOOK
            out.write(f"{line}\n")


def run_texts(
    steps: prep.Steps,
    sources: Mapping[str, list[Path]],
    sha256: Mapping[str, str],
    books: Mapping[str, int] = {},
) -> dict[str, Path]:
    """Step: write ``text/<split>.txt`` and ``documents/<split>.tsv``.

    books: split -> number of its first books, if not all.
    """
    texts = {split: steps.dest / "text" / f"{split}.txt" for split in sources}
    documents = {split: steps.dest / "documents" / f"{split}.tsv" for split in sources}

    def make() -> None:
        for split, paths in sources.items():
            join(paths, texts[split], documents[split], books.get(split))

    reads = {path.name: sha256[name_of(path)] for paths in sources.values() for path in paths}
    # a step is done again if one of these changes
    reads |= {f"books of {split}": count for split, count in books.items()}
    steps.run("join", reads, [*texts.values(), *documents.values()], make)
    return texts


def run_model(
    steps: prep.Steps, first: Path, sha256: Mapping[str, str], vocab_size: int
) -> pieces.SentencePiece:
    """Step: train ``spm/`` on a sample of the first shard, whatever the number of shards.

    Characters without a piece become bytes, so no text has an ``<unk>``.
    """
    model = steps.dest / pieces.SPM

    def make() -> None:
        # the first shard only, so that data of fewer shards have the same pieces
        paragraphs = (line for line in lines_of([first]) if not line.startswith(BOOK))
        pieces.train_sentencepiece(
            itertools.islice(paragraphs, 0, None, SAMPLE),
            model,
            vocab_size,
            byte_fallback=True,
            character_coverage=0.9999,
            user_defined_symbols=[f"▁{BOOK}"],
        )

    reads = {first.name: sha256[name_of(first)], "vocab_size": vocab_size, "sample": SAMPLE}
    steps.run("train sentencepiece", reads, [model], make)
    return pieces.SentencePiece(model)


def count(dest: Path, texts: Mapping[str, Path]) -> dict:
    """Count the corpus; the mark of a book is a token but no word."""
    counted = prep.count_corpus(dest, texts)
    for split in counted["splits"].values():
        split["words"] -= split["documents"]
        split["words_with_eos"] -= split["documents"]
    return counted


def prepare(
    dest: Path,
    from_dir: Path,
    shards: int = 3,
    *,
    vocab_size: int = PIECES,
    held_out: tuple[int, int] | None = None,
    workers: int = 1,
    sha256: Mapping[str, str] = SHA256,
) -> dict:
    """Prepare ``dest`` and return its manifest; finished steps are skipped.

    shards: of train. held_out: numbers of the first books of valid and test. With fewer shards or
    books than all, or another number of pieces than usual, the data have a name of their own.
    Raises: UserError for a number of shards or books that there is not, or a missing source.
    """
    train = sorted(name for name in sha256 if name.startswith("train-"))
    if not 1 <= shards <= len(train):
        raise UserError(f"--shards is from 1 to {len(train)}, not {shards}.")
    if held_out is not None and min(held_out) < 1:
        raise UserError("--held-out-books needs at least one book for each split.")
    books = dict(zip(("valid", "test"), held_out, strict=True)) if held_out else {}
    # what is not the usual data has a name of its own, so that runs do not mix them
    part = f"-first-{shards}" if shards < len(train) else ""
    level = "bpe" if vocab_size == PIECES else f"bpe{vocab_size}"
    level += "".join(f"-{split}{count}" for split, count in books.items())
    prep.say(f"gutenberg{part} {level} -> {dest}")
    steps = prep.Steps(dest, f"gutenberg{part}", level)
    names = {"train": train[:shards], "valid": ["valid"], "test": ["test"]}
    sources = {split: obtain(files, from_dir, sha256) for split, files in names.items()}
    texts = run_texts(steps, sources, sha256, books)
    tokenizer = run_model(steps, sources["train"][0], sha256, vocab_size)
    pieces.run_pieces(steps, texts, tokenizer, workers)
    return steps.finish(lambda: count(dest, texts))


@command("data-prep/gutenberg/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the books."""
    parser = prep.parser(__doc__)
    parser.add_argument(
        "--from", dest="from_dir", type=Path, required=True, help="folder with the source files"
    )
    parser.add_argument("--shards", type=int, default=3, help="number of shards, at most 3")
    parser.add_argument("--vocab-size", type=int, default=PIECES, help="number of pieces")
    parser.add_argument(
        "--held-out-books",
        type=int,
        nargs=2,
        metavar=("VALID", "TEST"),
        help="numbers of the first books of valid and of test (default: all)",
    )
    parser.add_argument("--workers", type=int, default=1, help="worker processes")
    args = parser.parse_args(argv)
    held_out = tuple(args.held_out_books) if args.held_out_books else None
    prepare(
        args.dest,
        args.from_dir,
        args.shards,
        vocab_size=args.vocab_size,
        held_out=held_out,
        workers=args.workers,
    )


if __name__ == "__main__":
    sys.exit(main())
