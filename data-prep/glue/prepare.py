"""Prepare GLUE tasks for fine-tuning with fairseq: download, verify, tokenize, binarize.

    python data-prep/glue/prepare.py all --tokens-of data/wikitext-2-bpe \
        --dest data/glue-wikitext-2-bpe

See the README in this folder for sources, counts and subsets.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.glue import TASKS, GlueTask, named
from lrpe_fairseq.experiments.data.glue_files import (
    Example,
    obtain,
    read_examples,
    require_official,
)
from lrpe_fairseq.experiments.data.pieces import Tokenizer, tokenizer_of
from lrpe_fairseq.experiments.records import shards
from lrpe_fairseq.experiments.records.console import UserError, command


@dataclass(frozen=True)
class Pieces:
    """The tokenizer and the dictionary of the pre-training data."""

    name: str
    tokenizer: Tokenizer
    dictionary: Path

    @property
    def reads(self) -> dict[str, Path]:
        """The files, as inputs of a step."""
        return {file.name: file for file in (*self.tokenizer.files, self.dictionary)}


def pieces_of(folder: Path) -> Pieces:
    """Read the pieces of a prepared corpus. Raises: UserError if it is not prepared."""
    tokenizer, dictionary = tokenizer_of(folder), shards.first(folder) / "dict.txt"
    if not dictionary.is_file():
        raise UserError(f"{dictionary} does not exist: prepare {folder} first.")
    return Pieces(folder.name, tokenizer, dictionary)


def prepare(name: str, dest: Path, pieces: Pieces, from_dir: Path | None, workers: int = 1) -> dict:
    """Prepare ``dest/<name>`` and return its manifest."""
    task, folder = named(name), dest / name
    prep.say(f"GLUE {name} -> {folder}")
    steps = prep.Steps(folder, "glue", name)
    raw = obtain(name, folder / "raw", from_dir)
    counts = {}
    for split, path in raw.items():
        counts[split] = sum(1 for _ in read_examples(path, task))
        require_official(name, task.files[split], path, counts[split], task.examples[split])
    _run_text(steps, raw, task, pieces)
    _run_binarize(steps, raw, task, pieces, workers)
    return _report(steps.finish(lambda: _results(task, counts, pieces)))


def _run_text(steps: prep.Steps, raw: Mapping[str, Path], task: GlueTask, pieces: Pieces) -> None:
    parts = _parts(task)
    writes = [steps.dest / "text" / f"{split}.{part}" for split in raw for part in parts]

    def make() -> None:
        for split, path in raw.items():
            examples = list(read_examples(path, task))
            _write_split(steps.dest / "text", split, examples, task, pieces)

    reads = {**raw, **pieces.reads}
    steps.run("encode", reads, writes, make)


def _write_split(
    text: Path, split: str, examples: Sequence[Example], task: GlueTask, pieces: Pieces
) -> None:
    for index in range(len(task.inputs)):
        encoded = pieces.tokenizer.cut([sentences[index] for sentences, _ in examples])
        _write_lines(text / f"{split}.input{index}", encoded)
    labels = (_label(label, task) for _, label in examples)
    _write_lines(text / f"{split}.label", labels)


def _label(label: str, task: GlueTask) -> str:
    return str(task.labels.index(label)) if task.labels else label


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    with prep.written_whole(path) as out:
        out.writelines(f"{line}\n" for line in lines)


def _parts(task: GlueTask) -> list[str]:
    return [*(f"input{index}" for index in range(len(task.inputs))), "label"]


def _run_binarize(
    steps: prep.Steps, raw: Mapping[str, Path], task: GlueTask, pieces: Pieces, workers: int
) -> None:
    text, bin_dir = steps.dest / "text", steps.dest / "bin"
    for part in _parts(task):
        texts = {split: text / f"{split}.{part}" for split in raw}
        writes, make = _binary(
            texts, bin_dir / part, _dictionary(task, part, pieces, text), workers
        )
        if part == "label" and not task.labels:
            writes, make = _values(texts, bin_dir / part)
        steps.run(f"binarize {part}", {**texts, **pieces.reads}, writes, make)


def _binary(
    texts: Mapping[str, Path], bin_dir: Path, dictionary: Path, workers: int
) -> tuple[list[Path], Callable[[], None]]:
    files = ["dict.txt", *(f"{split}.{kind}" for split in texts for kind in ("bin", "idx"))]
    make = functools.partial(prep.binarize_text, texts, bin_dir, dictionary, workers)
    return [bin_dir / file for file in files], make


def _values(texts: Mapping[str, Path], folder: Path) -> tuple[list[Path], Callable[[], None]]:
    """Return a step for regression targets, which fairseq reads as text, one number per line."""

    def make() -> None:
        for split, path in texts.items():
            _write_lines(folder / f"{split}.label", prep.read_lines(path))

    return [folder / f"{split}.label" for split in texts], make


def _dictionary(task: GlueTask, part: str, pieces: Pieces, text: Path) -> Path:
    """Return the dictionary of a part: that of the pieces, or the classes in their order."""
    if part != "label":
        return pieces.dictionary
    path = text / "classes.txt"
    _write_lines(path, (f"{number} 1" for number in range(task.classes)))
    return path


def _results(task: GlueTask, counts: Mapping[str, int], pieces: Pieces) -> dict:
    splits = {
        split: {"examples": found, "official": task.examples[split]}
        for split, found in counts.items()
    }
    absent = [split for split in task.files if split not in counts]
    return {"splits": splits, "absent": absent, "tokens_of": pieces.name}


def _report(manifest: dict) -> dict:
    for split, count in manifest["splits"].items():
        found, official = count["examples"], count["official"]
        subset = "" if found == official else f", a SUBSET of the official {official:,}"
        prep.say(f"  {split}: {found:,} examples{subset}")
    for split in manifest["absent"]:
        prep.say(f"  {split}: missing")
    return manifest


@command("data-prep/glue/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the tasks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tasks", nargs="+", choices=["all", *TASKS], metavar="task", help="or all")
    parser.add_argument(
        "--dest", type=Path, required=True, help="output folder, with one subfolder per task"
    )
    parser.add_argument("--tokens-of", type=Path, required=True, help="the pre-training data")
    parser.add_argument("--from", dest="from_dir", type=Path, help="folder with TASK/train.tsv")
    parser.add_argument("--workers", type=int, default=1, help="worker processes")
    args = parser.parse_args(argv)
    pieces = pieces_of(args.tokens_of)
    for name in TASKS if "all" in args.tasks else args.tasks:
        prepare(name, args.dest, pieces, args.from_dir, args.workers)


if __name__ == "__main__":
    sys.exit(main())
