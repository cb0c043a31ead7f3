"""The cost of the paper's tables: ``docs/cost.md``, from configurations and measured speeds."""

import math
import statistics
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.families import plan
from lrpe_fairseq.experiments.records.console import clock
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.layout import Table, load_tables
from lrpe_fairseq.experiments.records.runs import Run, read_runs
from lrpe_fairseq.experiments.records.sweeps import Sweep, read_sweeps
from lrpe_fairseq.experiments.report import markdown
from lrpe_fairseq.experiments.report.markdown import NOT_MEASURED

PAGE = "docs/cost.md"


def pages(root: Path) -> dict[str, str]:
    """Return the page with its tables regenerated."""
    text, runs = (root / PAGE).read_text(encoding="utf-8"), read_runs(root / "results" / "runs")
    text = markdown.between(text, "paper", paper_table(runs, root))
    text = markdown.between(text, "runs", spent_table(runs))
    sweeps = read_sweeps(root / "results" / "sweeps")
    return {PAGE: markdown.between(text, "small", measured_table(sweeps))}


def paper_table(runs: dict[str, Run], root: Path = ROOT) -> str:
    """Return a row per table with a scale ``paper``: its budget, and hours if measured."""
    head = ["table", "trainings per seed", "updates x size of one", "amount per seed"]
    tables = [t for t in load_tables(root / "configs" / "tables") if "paper" in t.scales]
    rows = [_paper_row(table, runs) for table in tables]
    return markdown.table([*head, "tokens/s", "GPU-hours per seed"], rows, numbers=True)


def spent_table(runs: dict[str, Run]) -> str:
    """Return a row per table and scale with the time that its committed runs took."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs.values():
        groups.setdefault((run["experiment"], run["scale"]), []).append(run)
    head = ["table", "scale", "trainings", "minutes of one: median", "quartiles", "hours in total"]
    rows = [[*key, *_spent(own)] for key, own in sorted(groups.items())]
    return markdown.table(head, rows, numbers=True)


def _spent(runs: list[Run]) -> list[Any]:
    minutes = [run["wall_seconds"] / 60 for run in runs]
    low, middle, high = statistics.quantiles(minutes, n=4) if len(runs) > 1 else 3 * minutes
    span = f"{low:.1f}–{high:.1f}"
    return [len(runs), f"{middle:.1f}", span, f"{math.fsum(minutes) / 60:.1f}"]


def measured_table(sweeps: list[Sweep]) -> str:
    """Return a row per table that one command ran completely: its time and hardware."""
    head = ["table", "scale", "trainings", "concurrent", "total h:mm:ss", "hardware", "commit"]
    return markdown.table(head, map(_sweep_row, sweeps))


def _sweep_row(sweep: Sweep) -> list[Any]:
    hardware = sweep["hardware"]
    where = ", ".join([f"{hardware['cores']} cores, {hardware['cpu']}", *hardware["gpus"]])
    cells = [sweep["table"], sweep["scale"], sweep["trainings"], sweep["jobs"]]
    return [*cells, clock(sweep["wall_seconds"]), where, f"`{markdown.short(sweep['commit'])}`"]


def _paper_row(table: Table, runs: dict[str, Run]) -> list[Any]:
    """Return the budget of one seed of a table, with hours if its speed was measured."""
    budgets = [run.budget() for run in plan.runs(table, "paper", [1])]
    in_all, unit = sum(budget.amount for budget in budgets), budgets[0].unit
    texts = {budget.text for budget in budgets}
    cells = [table.name, len(budgets), texts.pop() if len(texts) == 1 else "differ by data"]
    if unit != "tokens":  # the configuration does not determine their length
        return [*cells, f"{in_all / 1e6:,.0f} M {unit}", NOT_MEASURED, NOT_MEASURED]
    speeds = [
        run["tokens_per_second"]
        for run in runs.values()
        if run["experiment"] in table.experiments
        and run["scale"] == "paper"
        and "tokens_per_second" in run
    ]
    speed = f"{statistics.median(speeds):,.0f}" if speeds else NOT_MEASURED
    hours = f"{in_all / statistics.median(speeds) / 3600:,.0f}" if speeds else NOT_MEASURED
    return [*cells, f"{in_all / 1e9:,.1f} G tokens", speed, hours]
