"""What the most frequent class, as the answer to every example, scores on GLUE's development sets.

    python -m benchmarks.constant_answers FOLDER

FOLDER has ``<task>/dev.tsv``. A correlation (CoLA, STS-B) of a constant is 0. The result is
results/bench/constant-answers.json; ``make docs`` renders results/table3.md from it. Development
sets that are not whole are left out.
"""

import argparse
import collections
from pathlib import Path

from lrpe_fairseq.experiments.data.glue import TASKS, GlueTask, read_examples
from lrpe_fairseq.experiments.records.files import ROOT, write_json

TARGET = ROOT / "results" / "bench" / "constant-answers.json"


def main(arguments: list[str] | None = None) -> None:
    """Count, print and write the scores in percent."""
    parser = argparse.ArgumentParser(prog="constant_answers", description="Score constants.")
    parser.add_argument("folder", type=Path, help="with a folder for each task of GLUE")
    folder = parser.parse_args(arguments).folder
    found = {}
    for name, task in TASKS.items():
        path = folder / name / "dev.tsv"
        if path.is_file():
            labels = [label for _, label in read_examples(path, task)]
            if len(labels) == task.examples["valid"]:
                found[name] = score(task, labels)
    print(found)
    write_json(TARGET, found)


def score(task: GlueTask, labels: list[str]) -> float:
    """Return the score of the most frequent label as every answer, in the task's first metric.

    >>> score(TASKS["RTE"], ["entailment", "entailment", "not_entailment", "entailment"])
    75.0
    >>> score(TASKS["CoLA"], ["1", "1", "0", "1"])
    0.0
    """
    if task.metrics[0] != "accuracy":
        return 0.0
    [(_, count)] = collections.Counter(labels).most_common(1)
    return 100 * count / len(labels)


if __name__ == "__main__":
    main()
