"""Updates of the papers' configurations with whole batches: ``python -m benchmarks.paper_configs``.

Each configuration of the language models, RoBERTa and translation at the papers' size trains two
updates of one of its batches on generated data with a dictionary of the real size, in a process of
its own. The result is results/bench/paper-configs.json, which docs/running.md shows. Minutes of one
core for each; name some to measure them only, such as ``wmt14-en-de``.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.updates import measured, prepare_process, write_dictionary, write_rows
from lrpe_fairseq.experiments.records.files import CONFIGS, ROOT, load_config, read_json, write_json
from lrpe_fairseq.experiments.records.machine import environment
from lrpe_fairseq.experiments.runner import arithmetic, identity

TARGET = ROOT / "results" / "bench" / "paper-configs.json"
UPDATES = 2
SENTENCE = 30
"""Tokens of a sentence of a translation."""
LINE = 7
"""Tokens of a line of a text. 73 lines and the symbol at the start fill RoBERTa's block of 512."""
PAIR = 128
"""Tokens of a pair of GLUE; most have fewer. The configurations permit 512."""
TWO = {"optimization.max_update": str(UPDATES)}


class Paper(NamedTuple):
    """A configuration at a paper's size: its folder and name, and the data with its words."""

    folder: str
    name: str
    data: str

    @property
    def words(self) -> int:
        """Entries of the dictionary."""
        return arithmetic.WORDS[self.data]


GPT2 = "wikitext-103-gpt2"
"""Data with GPT-2's pieces, as those of other texts."""
PAPERS = {
    paper.name: paper
    for paper in (
        Paper("translation", "wmt14-en-de", "wmt14-en-de"),
        Paper("roberta", "finetune", GPT2),
        Paper("roberta", "finetune-wikibook", GPT2),
        Paper("lm", "books", GPT2),
        Paper("lm", "pg19", GPT2),
        Paper("lm", "wikitext103", "wikitext-103-word"),
        Paper("roberta", "pretrain", GPT2),
        Paper("roberta", "pretrain-wikibook", GPT2),
    )
}


def write_text(data: Path, words: int, tokens: int) -> None:
    """Write the text of a language model, causal or masked."""
    write_dictionary(data / "dict.txt", words)
    write_rows(data / "train", UPDATES * tokens // LINE + 1, LINE, words)
    write_rows(data / "valid", 1, 2, words)


def write_translation(data: Path, words: int, tokens: int) -> None:
    """Write sentences in two languages."""
    for language in ("en", "de"):
        write_dictionary(data / f"dict.{language}.txt", words)
        for split, size in (("train", UPDATES * tokens // SENTENCE), ("valid", 2)):
            write_rows(data / f"{split}.en-de.{language}", size, SENTENCE, words)


def write_pairs(data: Path, words: int, tokens: int) -> None:
    """Write pairs of sentences with a class."""
    write_dictionary(data / "label" / "dict.txt", 2 + 4)
    for side in ("input0", "input1"):
        write_dictionary(data / side / "dict.txt", words)
    for split, size in (("train", UPDATES * tokens // PAIR), ("valid", 2)):
        write_rows(data / "label" / split, size, 1, 2 + 4)
        for side in ("input0", "input1"):
            write_rows(data / side / split, size, PAIR // 2 - 2, words)


WRITERS: dict[str, Callable[[Path, int, int], None]] = {
    "translation": write_translation,
    "sentence_prediction": write_pairs,
}
"""Task -> the function that writes its data; the others read a text."""


def options_of(paper: Paper) -> dict[str, object]:
    """Return the resolved options of one batch of a configuration, by dotted keys."""
    path = CONFIGS / paper.folder / f"{paper.name}.yaml"
    options = identity.options(identity.resolved(load_config(path)))
    options["optimization.update_freq"] = [1]
    if options["task._name"] == "sentence_prediction":
        options["task.tokens_per_sample"] = PAIR
    return options


def two_updates(paper: Paper) -> dict[str, float]:
    """Train two updates of one batch; see :func:`benchmarks.updates.measured`.

    Adds ``tokens`` of a batch and ``arithmetic``, the peak that ``--estimate --on`` computes.
    Raises: ValueError if the training failed.
    """
    options = options_of(paper)
    shape = arithmetic.shape_of(options, paper.words)
    chosen = dict(TWO)
    if options["task._name"] == "sentence_prediction":
        chosen["checkpoint.finetune_from_model"] = "null"
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        WRITERS.get(str(options["task._name"]), write_text)(data, paper.words, shape.batch)
        found = measured(paper.folder, paper.name, data, chosen)
    expected = arithmetic.memory(options, shape, "fp32", 1)
    return {"tokens": shape.batch, "words": paper.words, "arithmetic": expected, **found}


def main() -> None:
    """Measure the configurations that are named, or all, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=list(PAPERS), metavar="NAME")
    options = parser.parse_args()
    prepare_process()
    stated = environment()
    del stated["kernels"]  # those of this process, which computes nothing
    rows = {row["name"]: row for row in read_json(TARGET).get("rows", [])}
    for name in options.names:
        paper = PAPERS[name]
        rows[name] = {"folder": paper.folder, "name": name, **two_updates(paper), **stated}
        print(rows[name], flush=True)
        ordered = [rows[known] for known in PAPERS if known in rows]
        write_json(TARGET, {"dtype": "float32", "threads": 1, "rows": ordered}, sort_keys=True)


if __name__ == "__main__":
    main()
