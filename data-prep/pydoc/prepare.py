"""Prepare the embedded corpus: the English text contained in every CPython.

    python data-prep/pydoc/prepare.py --dest data/pydoc

Reads pydoc's topics and the docstrings of the standard library from the running interpreter,
without network access. See the README in this folder for the filters and the split.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.pieces import run_pieces, run_sentencepiece
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import atomic_write

# Test suites and third-party packages; the rest is the same on every platform.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled"}
# Tables in Python: a tenth of the library's source with almost no text. The topics of pydoc_data
# are imported instead.
TABLES = {"encodings", "pydoc_data"}
SHARE = {"test": 0.05, "valid": 0.05}  # fractions of the documents; the rest is train
SALT = "969"  # chosen on the text alone: see "The split" in the README
RULE = re.compile(r"[\W_]+")  # a line without letters and digits: an underline, a table border
MIN_WORDS = 3  # excludes "Examples:", "See also:", single names
MOST_CHARACTERS = 8000  # more than in any CPython, so that all are kept
MIN_LETTERS = 0.65  # of the non-space characters; below that, it is code or a table

Documents = dict[str, list[str]]  # name -> paragraphs


# -------------------------------------------------------------------------------------- gathering


def stdlib_sources(stdlib: Path) -> list[Path]:
    """Return the modules of the standard library in a fixed order."""
    modules = (path.relative_to(stdlib) for path in stdlib.rglob("*.py"))
    left_out = SKIPPED | TABLES
    return [stdlib / path for path in sorted(modules) if not left_out & set(path.parts)]


def docstrings(source: bytes) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, in source order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old modules have invalid escapes
        tree = ast.parse(source)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    # ast.walk goes breadth first, which is another order
    for node in (tree, *statements(tree)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node in source order, without their expressions."""
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        for child in getattr(node, field, ()):
            yield child
            yield from statements(child)


def gather(stdlib: Path, topics: Mapping[str, str]) -> dict[str, list[str]]:
    """Return document name -> texts, with one document per topic and per module."""
    gathered = {f"topic:{name}": [text] for name, text in topics.items()}
    for path in stdlib_sources(stdlib):
        module = ".".join(path.relative_to(stdlib).with_suffix("").parts)
        if texts := list(docstrings(path.read_bytes())):
            gathered[f"module:{module}"] = texts
    return dict(sorted(gathered.items()))


# --------------------------------------------------------------------------------------- cleaning


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text, one per line, without underlines, code and grammar."""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = (line.strip() for line in block.split("\n"))
        paragraph = " ".join(" ".join(line for line in lines if not RULE.fullmatch(line)).split())
        if is_prose(paragraph):
            yield paragraph


def is_prose(paragraph: str) -> bool:
    """True for English prose; False for doctests, grammar rules, tables and short headings."""
    words = paragraph.split()
    letters = sum(map(str.isalpha, paragraph))
    return (
        len(words) >= MIN_WORDS
        and letters >= MIN_LETTERS * sum(map(len, words))
        and not any(mark in paragraph for mark in (">>>", "::="))
    )


def deduplicate(documents: Mapping[str, Sequence[str]]) -> Documents:
    """Keep each paragraph only in the first document that has it, so that splits are disjoint.

    Paragraphs that differ only in case, whitespace and punctuation count as the same.
    """
    seen: set[str] = set()
    kept: Documents = {}
    for name, texts in documents.items():
        for paragraph in (p for text in texts for p in paragraphs(text)):
            key = re.sub(r"[\W_]+", "", paragraph).casefold()  # letters and digits only
            if key not in seen:
                seen.add(key)
                kept.setdefault(name, []).append(paragraph)
    return kept


# -------------------------------------------------------------------------------------- splitting


def split_of(name: str) -> str:
    """Return the split of a document, which depends only on its name, not on the CPython version.

    Twins such as ``io`` and ``_pyio``, or ``decimal`` and ``_pydecimal``, have almost the same
    text and are put into the same split.
    """
    # leading underscores, and "py" after them: module:_pyio -> module:io
    twin = re.sub(r"(?<=[:.])_+(py)?", "", name)
    place = int(hashlib.sha256(f"{SALT}:{twin}".encode()).hexdigest()[:8], 16) / 2**32
    for split, share in SHARE.items():
        if place < share:
            return split
        place -= share
    return "train"


def write_texts(documents: Documents, dest: Path) -> None:
    """Write ``text/<split>.txt`` and ``documents/<split>.tsv`` (first line from 0, name).

    One paragraph per line, and an empty line after each document, which is the end of a document
    for fairseq's ``--sample-break-mode complete_doc``.
    """
    for split in prep.SPLITS:
        line = 0
        with (
            atomic_write(dest / "text" / f"{split}.txt") as text,
            atomic_write(dest / "documents" / f"{split}.tsv") as index,
        ):
            for name, kept in documents.items():
                if split_of(name) == split:
                    index.write(f"{line}\t{name}\n")
                    text.write("\n".join([*kept, "", ""]))  # ends with an empty line
                    line += len(kept) + 1


# ---------------------------------------------------------------------------------------- prepare


def run_texts(steps: prep.Steps, stdlib: Path, topics: Mapping[str, str]) -> dict[str, Path]:
    """Step: write the text of every split; its inputs are this interpreter and this script."""
    texts = {split: steps.dest / "text" / f"{split}.txt" for split in prep.SPLITS}
    documents = [steps.dest / "documents" / f"{split}.tsv" for split in prep.SPLITS]
    # another release of CPython has other docstrings
    hasher = hashlib.sha256(repr(sorted(topics.items())).encode())
    for path in stdlib_sources(stdlib):
        hasher.update(f"{path.relative_to(stdlib)}\n".encode() + path.read_bytes())
    reads = {"library": hasher.hexdigest(), "script": Path(__file__)}

    def make() -> None:
        write_texts(deduplicate(gather(stdlib, topics)), steps.dest)

    steps.run("extract text", reads, [*texts.values(), *documents], make)
    return texts


def prepare(
    dest: Path,
    vocab_size: int | None = None,
    stdlib: Path | None = None,
    topics: Mapping[str, str] | None = None,
) -> dict:
    """Prepare ``dest`` and return its manifest; finished steps are skipped.

    ``vocab_size``: number of BPE pieces; None for characters.
    """
    from pydoc_data.topics import topics as own_topics

    prep.say(f"pydoc: the English text of CPython {platform.python_version()} -> {dest}")
    kind = "bpe" if vocab_size else "char"
    steps = prep.Steps(dest, "pydoc", kind)
    stdlib = stdlib or Path(sysconfig.get_path("stdlib"))
    texts = run_texts(steps, stdlib, own_topics if topics is None else topics)
    train = {"train": texts["train"]}
    tokenizer = run_sentencepiece(steps, train, vocab_size or MOST_CHARACTERS, kind)
    run_pieces(steps, texts, tokenizer)

    def results() -> dict:
        return {"python": platform.python_version(), **prep.count_corpus(dest, texts)}

    return steps.finish(results)


@command("data-prep/pydoc/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the corpus."""
    parser = prep.parser(__doc__)
    parser.add_argument(
        "--vocab-size", type=int, help="number of sentencepiece BPE pieces (default: characters)"
    )
    args = parser.parse_args(argv)
    prepare(args.dest, args.vocab_size)


if __name__ == "__main__":
    sys.exit(main())
