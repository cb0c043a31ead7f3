"""Prepare GLUE tasks for fine-tuning with fairseq: download, verify, tokenize, binarize.

    python data-prep/glue/prepare.py all --tokens-of data/wikitext-2-bpe \
        --dest data/glue-wikitext-2-bpe

See the README in this folder for sources, counts and subsets.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.glue import TASKS, GlueTask, named, obtain, read_examples
from lrpe_fairseq.experiments.data.pieces import Tokenizer, tokenizer_of
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import first_shard


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
    tokenizer = tokenizer_of(folder)
    dictionary = first_shard(folder) / "dict.txt"
    if not dictionary.is_file():
        raise UserError(f"{dictionary} does not exist: prepare {folder} first.")
    return Pieces(folder.name, tokenizer, dictionary)


def prepare(name: str, dest: Path, pieces: Pieces, from_dir: Path | None, workers: int = 1) -> dict:
    """Prepare ``dest/<name>`` and return its manifest."""
    task = named(name)
    folder = dest / name
    prep.say(f"GLUE {name} -> {folder}")
    steps = prep.Steps(folder, "glue", name)
    raw = obtain(name, folder / "raw", from_dir)
    parts = [*(f"input{index}" for index in range(len(task.inputs))), "label"]
    texts = {p: {split: folder / "text" / f"{split}.{p}" for split in raw} for p in parts}
    written = [texts[part][split] for split in raw for part in parts]
    encode = functools.partial(write_text, raw, texts, task, pieces)
    steps.run("encode", {**raw, **pieces.reads}, written, encode)
    for part, texts_of_part in texts.items():
        bin_dir = folder / "bin" / part
        files = ["dict.txt", *prep.binary_files(texts_of_part)]
        make = prep.write_binary
        dictionary = pieces.dictionary
        if part == "label":
            # classes are symbols of a dictionary of their own
            dictionary = folder / "text" / "classes.txt"
            prep.write_lines(dictionary, (f"{number} 1" for number in range(task.classes)))
        # a regression: fairseq reads its targets as text
        if part == "label" and not task.labels:
            files = [f"{split}.label" for split in texts_of_part]
            make = write_values
        binarize = functools.partial(make, texts_of_part, bin_dir, dictionary, workers)
        reads = {**texts_of_part, **pieces.reads}
        steps.run(f"binarize {part}", reads, [bin_dir / file for file in files], binarize)
    return steps.finish(lambda: count(raw, task, pieces))


def write_text(
    raw: Mapping[str, Path],
    texts: Mapping[str, Mapping[str, Path]],
    task: GlueTask,
    pieces: Pieces,
) -> None:
    """Write the pieces of the sentences and the labels; texts: part -> split -> file."""
    for split, path in raw.items():
        examples = list(read_examples(path, task))
        for index in range(len(task.inputs)):
            encoded = pieces.tokenizer.cut([sentences[index] for sentences, _ in examples])
            prep.write_lines(texts[f"input{index}"][split], encoded)
        # labels as numbers; those of a regression, and the missing ones of a test set, as they are
        numbers = {label: number for number, label in enumerate(task.labels)}
        prep.write_lines(
            texts["label"][split], (numbers.get(label, label) for _, label in examples)
        )


def write_values(texts: Mapping[str, Path], folder: Path, *_: object) -> None:
    """Write regression targets, which fairseq reads as text, one number per line."""
    for split, path in texts.items():
        prep.write_lines(folder / f"{split}.label", prep.read_lines(path))


def count(raw: Mapping[str, Path], task: GlueTask, pieces: Pieces) -> dict:
    """Count the examples; those of a subset are fewer than the official ones."""
    splits = {
        split: {
            "examples": sum(1 for _ in read_examples(path, task)),
            "official": task.examples[split],
        }
        for split, path in raw.items()
    }
    absent = [split for split in task.files if split not in raw]
    return {"splits": splits, "absent": absent, "tokens_of": pieces.name}


@command("data-prep/glue/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the tasks."""
    parser = prep.parser(__doc__, "folder with TASK/train.tsv")
    known = ["all", *TASKS]
    parser.add_argument(
        "tasks", nargs="+", choices=known, metavar="task", help="or all; a subfolder each"
    )
    parser.add_argument("--tokens-of", type=Path, required=True, help="the pre-training data")
    parser.add_argument("--workers", type=int, default=1, help="worker processes")
    args = parser.parse_args(argv)
    pieces = pieces_of(args.tokens_of)
    for name in TASKS if "all" in args.tasks else args.tasks:
        prepare(name, args.dest, pieces, args.from_dir, args.workers)


if __name__ == "__main__":
    sys.exit(main())
