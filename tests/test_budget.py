"""Annealed schedules and the tables of growing budgets: shared runs, and what differs."""

from __future__ import annotations

from pathlib import Path

from lrpe_fairseq.experiments.commands.run_table import usual_scale
from lrpe_fairseq.experiments.families import load_named
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.keys import filled as filled_by
from tests.test_results import make_run


def model(updates: int, **changes: object) -> dict[str, object]:
    """Return the options of a run of the table ``budget`` with this many updates."""
    interval = updates // 4
    return {
        "optimization.max_update": updates,
        "lr_scheduler.lr_period_updates": updates - 200,
        "optimization.lr": [0.004],
        "lr_scheduler._name": "cosine",
        "dataset.validate_interval_updates": interval,
        "checkpoint.save_interval_updates": interval,
        **changes,
    }


def test_a_run_fills_only_the_budget_that_it_was_trained_with() -> None:
    table = load_named("budget")
    base, columns = table.row("Base"), [c for c in table.columns if c.attention == "linear"]

    def filled(**changes: object) -> list[str]:
        run = make_run(experiment="table2", scale="annealed", **changes)
        found = filled_by(table, run)
        return [c.title for c in columns if (base.label, c.key) in found]

    assert filled(config=model(1800)) == ["1,800"]
    assert filled(config=model(5400)) == ["5,400"]
    assert filled(config=model(5400, **{"lr_scheduler.lr_period_updates": 1600})) == []
    usual = {
        "optimization.max_update": 1800,
        "optimization.lr": [0.003],
        "lr_scheduler._name": "inverse_sqrt",
    }
    assert filled(config=usual) == []  # Table 2 at scale small
    small = make_run(experiment="table2", config=model(1800))
    assert not filled_by(table, small)  # a scale that the table lacks


def test_a_table_without_scale_small_runs_its_first_scale() -> None:
    assert usual_scale(load_named("table2")) == "small"
    assert usual_scale(load_named("budget")) == "annealed"
    assert Path(ROOT / load_named("budget").scales["annealed"]).exists()
