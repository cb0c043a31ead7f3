"""Annealed schedules and the tables of growing budgets: shared runs, and what differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lrpe_fairseq.experiments.commands.run_table import usual_scale
from lrpe_fairseq.experiments.families.plan import load_named, runs
from lrpe_fairseq.experiments.records.files import ROOT, load_config
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


def flat(path: str) -> dict[str, object]:
    content = OmegaConf.to_container(load_config(ROOT / path))
    return {
        f"{part}.{key}": value
        for part, own in content.items()
        if isinstance(own, dict)
        for key, value in own.items()
    }


@pytest.mark.parametrize(
    ("small", "annealed", "more"),
    [
        ("lm/wikitext2", "lm/wikitext2-annealed", {"optimization.lr"}),
        ("translation/multi30k", "translation/multi30k-annealed",
         {"checkpoint.save_interval_updates"}),
    ],
)  # fmt: skip
def test_scale_annealed_differs_from_small_in_its_schedule_only(
    small: str, annealed: str, more: set[str]
) -> None:
    one, other = (flat(f"configs/{name}.yaml") for name in (small, annealed))
    changed = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
    named = {"common.tensorboard_logdir", "checkpoint.save_dir"}
    schedule = {f"lr_scheduler.{key}" for key in ("_name", "lr_period_updates", "min_lr")}
    assert changed == named | schedule | more
    assert other["lr_scheduler.min_lr"] == 0
    length = other["lr_scheduler.lr_period_updates"] + other["lr_scheduler.warmup_updates"]
    assert length == other["optimization.max_update"]


def test_the_shortest_budget_has_the_runs_of_the_paper_table_and_no_others() -> None:
    for name, scale, home in (("budget", "annealed", "table2"), ("budget-mlm", "small", "table8")):
        found = [(run.max_update(), run) for run in runs(load_named(name), scale, [1])]
        lengths = sorted({updates for updates, _ in found})
        assert lengths == [lengths[0] * n for n in (1, 3, 9)]
        for updates, run in found:
            assert run.experiment == (home if updates == lengths[0] else name)
        theirs = {run.result for run in runs(load_named(home), scale, [1])}
        assert {run.result for _, run in found if run.experiment == home} <= theirs


def test_the_rate_of_every_budget_ends_at_zero() -> None:
    for name, scale in (("budget", "annealed"), ("budget-mlm", "small")):
        for run in runs(load_named(name), scale, [1])[:6]:
            settings = run.settings()
            rate, last = settings.lr_scheduler, settings.optimization.max_update
            if name == "budget":
                assert rate.lr_period_updates + rate.warmup_updates == last
            else:
                assert float(rate.total_num_update) == last


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
