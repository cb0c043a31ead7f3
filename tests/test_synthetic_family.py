"""The family of the synthetic suite: its runs, its counts, and the choice of the learning rate."""

import functools
import json
from dataclasses import replace

import pytest

from lrpe_fairseq.experiments.data.synthetic import MULTIPLES, TASKS
from lrpe_fairseq.experiments.families import load_named, runs
from lrpe_fairseq.experiments.families.generated import SyntheticRun, read_accuracy
from lrpe_fairseq.experiments.records.fairseq_log import DIVERGED
from lrpe_fairseq.experiments.records.files import ROOT, write_json
from lrpe_fairseq.experiments.records.keys import RATE
from lrpe_fairseq.experiments.records.layout import Column, Row, Table
from lrpe_fairseq.experiments.report.frame import Sheet
from lrpe_fairseq.experiments.runner.processes import RunFailed
from tests.trial import a_record

SUITE = [task for task in TASKS if task != "grid"]
BEST = {"split": "valid", "protocol": "whole", "metric": "loss", "better": "lower"}


@functools.cache
def rope_runs():
    table = load_named("synthetic")
    return runs(replace(table, rows=[table.row("RoPE")]), "small", [1])


def test_a_cell_has_one_run_per_learning_rate_on_the_data_of_its_column():
    found = rope_runs()
    assert len(found) == 2 * len(SUITE) * 3
    run = next(r for r in found if "copy-small-lr0.01" in r.name)
    assert run.folder.name == "small-RoPE-linear-synthetic-copy-small-lr0.01-seed1"
    assert run.result.parent == ROOT / "results" / "runs" / "synthetic"
    assert run.preparation_of(run.data)[:3] == ["data-prep/synthetic/prepare.py", "--task", "copy"]
    assert run.settings().optimization.lr == [0.01]
    assert run.settings().task.data == "data/synthetic-copy-small/bin"
    splits = [split for split, _ in run.evaluations]
    assert splits == ["valid", *(f"test{multiple}" for multiple in MULTIPLES)]
    flip = next(r for r in found if r.data.name == "synthetic-flip-flop-small")
    assert {"sparse", "dense"} <= {split for split, _ in flip.evaluations}
    assert isinstance(run, SyntheticRun)


def said(**changes):
    numbers = {"exact_loss": "0.25", "answer_accuracy": "0.5", "token_accuracy": "0.75"}
    values = {**numbers, "samples": "4", "answers": "8", **changes}
    return f"x | INFO | test16 | {json.dumps({f'test16_{k}': v for k, v in values.items()})}"


def test_every_sample_and_answer_is_counted_or_the_run_fails(tmp_path):
    counts = {"samples": 4, "answers": 8}
    write_json(tmp_path / "manifest.json", {"splits": {"test16": counts}})
    log = tmp_path / "log"
    log.write_text(said())
    found = {"answer_accuracy": 0.5, "token_accuracy": 0.75, "loss": 0.25}
    assert read_accuracy(log, tmp_path, "test16") == {**found, **counts}
    log.write_text(said(exact_loss="nan"))
    assert read_accuracy(log, tmp_path, "test16") == {DIVERGED: 1, **counts}
    for short in ({"samples": "3"}, {"answers": "7"}):
        log.write_text(said(**short))
        with pytest.raises(RunFailed, match=r"of test16 were evaluated"):
            read_accuracy(log, tmp_path, "test16")
    with pytest.raises(ValueError, match="printed no numbers for test1"):
        read_accuracy(log, tmp_path, "test1")


def a_table(best_by):
    column = Column(
        "test", "test", "softmax", "answer_accuracy", "test4", "whole", best_over=RATE,
        best_by=best_by, better="higher",
    )  # fmt: skip
    rows = [Row("RoPE", "rope", ["softmax"])]
    return Table("t", "T", "", ["t"], {"small": ""}, "RoPE", "higher", [column], rows)


def a_run(lr, loss, accuracy):
    tested = {DIVERGED: 1} if accuracy is None else {"answer_accuracy": accuracy}
    metrics = {"valid": {"whole": {"loss": loss}}, "test4": {"whole": tested}}
    kind = {"experiment": "t", "position_encoding": "rope", "attention_type": "softmax"}
    return a_record(**kind, config={RATE: [lr]}, metrics=metrics)


def scores(best_by, runs):
    """The only cell of a table with these runs."""
    table = a_table(best_by)
    return Sheet(table, "small", "", runs).scores(table.rows[0], table.columns[0])


def test_the_rate_is_selected_by_validation_loss_and_not_by_the_test_split():
    found = {"a": a_run(1e-3, 0.2, 0.9), "b": a_run(3e-3, 0.1, 0.6), "c": a_run(1e-2, 0.3, 0.8)}
    for best_by, value in ((BEST, 0.6), ({}, 0.9)):
        assert scores(best_by, found) == {1: value}


def test_a_selected_run_that_diverges_on_a_split_is_shown_as_diverged():
    best_lost = {"a": a_run(1e-3, 0.2, 0.9), "b": a_run(3e-3, 0.1, None)}
    assert scores(BEST, best_lost) == {}
    assert scores(BEST, best_lost).lost == {1}
    other_lost = {"a": a_run(1e-3, 0.2, 0.9), "b": a_run(3e-3, 0.4, None)}
    assert scores(BEST, other_lost) == {1: 0.9}
    assert not scores(BEST, other_lost).lost
