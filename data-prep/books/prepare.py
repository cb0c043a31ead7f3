"""Prepare books for a language model in GPT-2's pieces: your own texts, or PG-19.

    python data-prep/books/prepare.py books --from FOLDER --dest data/books
    python data-prep/books/prepare.py pg19 --dest data/pg19

See the README in this folder for sources, splits and what is comparable.
"""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.pieces import SHA256, obtain_gpt2, run_pieces
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import atomic_write

Books = dict[str, list[Path]]
"""Split -> files, in order."""
SHARE = {"valid": 0.01, "test": 0.01}
"""Share of the books in each split; the rest is ``train``."""
PUBLISHED = {"train": "train", "valid": "validation", "test": "test"}
"""Our split -> PG-19's."""
OFFICIAL = {"train": 28_602, "valid": 50, "test": 100}
"""Books of PG-19."""


@dataclass(frozen=True)
class Source:
    """Where PG-19 is published. lists, texts: addresses; ``{}`` stands for a split."""

    lists: str = "https://huggingface.co/datasets/deepmind/pg19/resolve/main/data/{}_files.txt"
    texts: str = "https://storage.googleapis.com/deepmind-gutenberg/{}/"


# ----------------------------------------------------------------------------------------- books


def split_of(name: str) -> str:
    """Return the split of a book, which depends only on its file name."""
    # by name, so that a book that is added moves no other one
    place = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32
    for split, share in SHARE.items():
        if place < share:
            return split
        place -= share
    return "train"


def find_books(folder: Path) -> Books:
    """Return the books ``*.txt`` of a folder by split.

    Raises: UserError if a split is empty, or the folder is that of PG-19, with splits of its own.
    """
    if all((folder / name).is_dir() for name in PUBLISHED.values()):
        raise UserError(
            f"{folder} has the folders train, validation and test, as PG-19 does: prepare it as "
            "pg19, or pass a folder without these splits."
        )
    books_of: Books = {split: [] for split in prep.SPLITS}
    for path in sorted(folder.rglob("*.txt")):
        books_of[split_of(path.relative_to(folder).as_posix())].append(path)
    # a split of one book in a hundred may be empty
    for split, paths in books_of.items():
        if not paths:
            books = sum(map(len, books_of.values()))
            raise UserError(
                f"{folder} has {books} books (*.txt), too few to leave one to the split {split}: "
                "add books."
            )
    return books_of


# ------------------------------------------------------------------------------------------ pg19


def obtain_pg19(
    raw: Path,
    from_dir: Path | None,
    limit: int | None = None,
    source: Source | None = None,
    official: Mapping[str, int] = OFFICIAL,
) -> Books:
    """Return the books of PG-19, read from ``from_dir`` or downloaded to ``raw``.

    limit: take only the first ``limit`` books of ``train``. Raises: UserError if a book is missing.
    """
    books: Books = {}
    for split in prep.SPLITS:
        stop = limit if split == "train" else None
        if from_dir is None:
            books[split] = _download(raw, split, stop, source or Source())
        else:
            books[split] = sorted((from_dir / PUBLISHED[split]).glob("*.txt"))[:stop]
        # complete: a perplexity of other books is not comparable
        expected = min(official[split], stop or official[split])
        if len(books[split]) != expected:
            raise UserError(
                f"PG-19 has {expected:,} books in {PUBLISHED[split]}, not {len(books[split]):,}: "
                f"fetch the missing ones of {from_dir or raw}."
            )
    return books


def _download(raw: Path, split: str, stop: int | None, source: Source) -> list[Path]:
    theirs = PUBLISHED[split]
    names = prep.obtain(f"{split}_files.txt", [source.lists.format(theirs)], "", raw)
    files = [PurePosixPath(line).name for line in prep.read_lines(names) if line]
    texts = source.texts.format(theirs)
    return [prep.obtain(file, [texts + file], "", raw / theirs) for file in sorted(files)[:stop]]


# --------------------------------------------------------------------------------------- prepare


def run_texts(steps: prep.Steps, books: Books) -> dict[str, Path]:
    """Step: write ``text/<split>.txt``, and ``documents/<split>.tsv`` (first line from 0, name)."""
    texts = {split: steps.dest / "text" / f"{split}.txt" for split in books}
    documents = {split: steps.dest / "documents" / f"{split}.tsv" for split in books}

    def make() -> None:
        for split, paths in books.items():
            join(paths, texts[split], documents[split])

    reads = {split: _fingerprint(paths) for split, paths in books.items()}
    steps.run("join", reads, [*texts.values(), *documents.values()], make)
    return texts


def join(books: Sequence[Path], text: Path, documents: Path) -> None:
    """Write the lines of all books, and an empty line after each book.

    Raises: UserError for a book that is not UTF-8.
    """
    number = 0
    with atomic_write(text) as out, atomic_write(documents) as index:
        for book in books:
            try:
                lines = list(prep.read_lines(book))
            except UnicodeDecodeError:
                raise UserError(f"{book} is not UTF-8: convert it first.") from None
            index.write(f"{number}\t{book.stem}\n")
            # the empty line is the end of a document for --sample-break-mode complete_doc
            out.writelines(f"{line}\n" for line in [*lines, ""])
            number += len(lines) + 1


def _fingerprint(books: Sequence[Path]) -> str:
    lines = "".join(f"{book.name} {prep.digest(book)}\n" for book in books)
    return hashlib.sha256(lines.encode()).hexdigest()


def prepare(
    corpus: str,
    dest: Path,
    from_dir: Path | None,
    *,
    limit: int | None = None,
    workers: int = 1,
    source: Source | None = None,
    official: Mapping[str, int] = OFFICIAL,
    sha256: Mapping[str, str] = SHA256,
) -> dict:
    """Prepare ``dest`` and return its manifest; finished steps are skipped.

    corpus: ``books`` or ``pg19``. limit: books of PG-19's train split; the data then have a name of
    their own.
    Raises: UserError for options that exclude each other, and for sources that are missing.
    """
    if corpus == "books" and from_dir is None:
        raise UserError("The corpus books has no download: pass a folder of *.txt with --from.")
    if corpus == "books" and limit is not None:
        raise UserError("--books is an option of pg19.")
    if limit is not None and limit < 1:
        raise UserError(f"--books must be at least 1, not {limit}.")
    prep.say(f"{corpus} -> {dest}")
    steps = prep.Steps(dest, f"{corpus}-first-{limit}" if limit else corpus, "gpt2")
    tokenizer = obtain_gpt2(dest, from_dir, sha256)
    if corpus == "books":
        books = find_books(from_dir)
    else:
        books = obtain_pg19(dest / "raw", from_dir, limit, source, official)
    texts = run_texts(steps, books)
    run_pieces(steps, texts, tokenizer, workers)
    return steps.finish(lambda: prep.count_corpus(dest, texts))


@command("data-prep/books/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare one corpus."""
    parser = prep.parser(__doc__, "folder with the source files")
    parser.add_argument("corpus", choices=("books", "pg19"))
    parser.add_argument("--books", dest="limit", type=int, help="only the first N of pg19's train")
    parser.add_argument("--workers", type=int, default=1, help="worker processes")
    args = parser.parse_args(argv)
    prepare(args.corpus, args.dest, args.from_dir, limit=args.limit, workers=args.workers)


if __name__ == "__main__":
    sys.exit(main())
