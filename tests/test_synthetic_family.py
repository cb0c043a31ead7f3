"""The family of the synthetic suite: its runs, its counts, and the choice of the learning rate."""

import ast
import json
from dataclasses import replace

import pytest

from lrpe_fairseq.experiments.data.synthetic import MULTIPLES, TASKS
from lrpe_fairseq.experiments.families import load_named, runs
from lrpe_fairseq.experiments.families.synthetic import SyntheticRun, read_accuracy, scaling_of
from lrpe_fairseq.experiments.records.fairseq_log import DIVERGED
from lrpe_fairseq.experiments.records.files import ROOT, write_json
from lrpe_fairseq.experiments.records.keys import RATE
from lrpe_fairseq.experiments.records.tables import Column, Row, Table
from lrpe_fairseq.experiments.report.sheets import Sheet
from lrpe_fairseq.experiments.runner.processes import RunFailed

SUITE = [name for name, task in TASKS.items() if name != "grid" and not task.depths]
BEST = {"split": "valid", "protocol": "whole", "metric": "loss", "better": "lower"}


def test_a_cell_has_one_run_per_learning_rate_on_the_data_of_its_column():
    table = load_named("synthetic")
    found = runs(replace(table, rows=[table.row("RoPE")]), "small", [1])
    assert len(found) == 2 * len(SUITE) * 3
    run = next(r for r in found if "copy-small-lr0.01" in r.name)
    assert isinstance(run, SyntheticRun)
    assert run.folder.name == "small-RoPE-linear-synthetic-copy-small-lr0.01-seed1"
    assert run.result.parent == ROOT / "results" / "runs" / "synthetic"
    assert run.preparation_of(run.data)[:3] == ["data-prep/synthetic/prepare.py", "--task", "copy"]
    assert run.settings().optimization.lr == [0.01]
    assert run.settings().task.data == "data/synthetic-copy-small/bin"
    splits = [split for split, _ in run.evaluations]
    assert splits == ["valid", *(f"test{multiple}" for multiple in MULTIPLES)]
    flip = next(r for r in found if r.data.name == "synthetic-flip-flop-small")
    assert {"sparse", "dense"} <= {split for split, _ in flip.evaluations}


def test_every_sample_and_answer_is_counted_or_the_run_fails(tmp_path):
    log, counts = tmp_path / "log", {"samples": 4, "answers": 8}
    write_json(tmp_path / "manifest.json", {"splits": {"test16": counts}})

    def read(split="test16", **changes):
        numbers = {"exact_loss": "0.25", "answer_accuracy": "0.5", "token_accuracy": "0.75"}
        values = {f"test16_{key}": value for key, value in (numbers | counts | changes).items()}
        log.write_text(f"x | INFO | test16 | {json.dumps(values)}")
        return read_accuracy(log, tmp_path, split)

    measured = {"answer_accuracy": 0.5, "token_accuracy": 0.75, "loss": 0.25}
    assert read() == {**measured, **counts}
    assert read(exact_loss="nan") == {DIVERGED: 1, **counts}
    for short in ({"samples": "3"}, {"answers": "7"}):
        with pytest.raises(RunFailed, match=r"of test16 were evaluated"):
            read(**short)
    with pytest.raises(ValueError, match="printed no numbers for test1"):
        read("test1")


def test_rotations_are_scaled_for_an_evaluation_only_by_the_training_length(tmp_path):
    table = load_named("long-context")
    [run] = runs(replace(table, rows=[table.row("RoPE")]), "small", [1])[:1]
    counts = {"samples": 4, "answers": 8}
    splits = {"valid": counts, "test4-depth0": counts}
    write_json(tmp_path / "data" / "manifest.json", {"length": 64, "splits": splits})
    pairs = [("valid", "whole"), ("test4-depth0", "whole"), ("test4-depth0", "whole+yarn-4")]
    run = replace(run, data=tmp_path / "data", folder=tmp_path, evaluations=tuple(pairs))
    commands = {}

    def shell(command, log):
        commands[log.name] = command
        names = command[command.index("--valid-subset") + 1].split(",")
        value = "1.0" if "--model-overrides" in command else "0.5"
        numbers = {"exact_loss": "1", "answer_accuracy": value, "token_accuracy": "1"} | counts
        lines = (json.dumps({f"{n}_{k}": str(v) for k, v in numbers.items()}) for n in names)
        text = "\n".join(f"x | INFO | {n} | {line}" for n, line in zip(names, lines, strict=True))
        log.write_text(text)

    found = run.measure(shell)
    plain, scaled = commands["eval-whole.log"], commands["eval-whole+yarn-4.log"]
    assert "--model-overrides" not in plain
    assert plain[plain.index("--valid-subset") + 1] == "valid,test4-depth0"
    assert scaled[scaled.index("--valid-subset") + 1] == "test4-depth0"
    overrides = ast.literal_eval(scaled[scaled.index("--model-overrides") + 1])
    assert overrides == {"context_scaling": "yarn", "context_factor": 4.0, "context_length": 64}
    accuracies = {n: m["answer_accuracy"] for n, m in found["metrics"]["test4-depth0"].items()}
    assert accuracies == {"whole": 0.5, "whole+yarn-4": 1.0}
    assert found["protocol"]["whole+yarn-4"].endswith("by 4.")
    with pytest.raises(ValueError, match="there is no protocol 'half'"):
        scaling_of("half")
    # a model of softmax attention would ignore it
    with pytest.raises(ValueError, match=r"there is no protocol 'whole\+bounded'"):
        scaling_of("whole+bounded")


SETTING = {
    "experiment": "t",
    "position_encoding": "rope",
    "attention_type": "softmax",
    "dataset": "d",
    "scale": "small",
    "seed": 1,
}


def scores(best_by, *measured):
    """The only cell of a table with runs of these (loss, accuracy), each at its own rate."""
    column = Column(
        "test", "test", "softmax", "answer_accuracy", "test4", "whole", best_over=RATE,
        best_by=best_by, better="higher",
    )  # fmt: skip
    row, found = Row("RoPE", "rope", ["softmax"]), {}
    for lr, (loss, accuracy) in enumerate(measured, 1):
        tested = {DIVERGED: 1} if accuracy is None else {"answer_accuracy": accuracy}
        metrics = {"valid": {"whole": {"loss": loss}}, "test4": {"whole": tested}}
        found[f"{lr}"] = {**SETTING, "config": {RATE: [lr]}, "metrics": metrics}
    table = Table("t", "T", "", ["t"], {"small": ""}, "RoPE", "higher", [column], [row])
    return Sheet(table, "small", "", found).scores(row, column)


def test_the_rate_is_selected_by_validation_loss_and_not_by_the_test_split():
    for best_by, value in ((BEST, 0.6), ({}, 0.9)):
        assert scores(best_by, (0.2, 0.9), (0.1, 0.6), (0.3, 0.8)) == {1: value}


def test_a_selected_run_that_diverges_on_a_split_is_shown_as_diverged():
    best_lost = scores(BEST, (0.2, 0.9), (0.1, None))
    assert (best_lost, best_lost.lost) == ({}, {1})
    other_lost = scores(BEST, (0.2, 0.9), (0.4, None))
    assert (other_lost, other_lost.lost) == ({1: 0.9}, set())
