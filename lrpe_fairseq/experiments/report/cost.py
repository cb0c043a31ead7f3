"""What the paper's tables cost: docs/cost.md, from the configurations and from measured speeds.

``python -m lrpe_fairseq.experiments.report.cost`` rewrites its tables.
"""

import statistics
from collections.abc import Sequence

from lrpe_fairseq.experiments.families import plan
from lrpe_fairseq.experiments.records.console import clock
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.layout import Table, load_tables
from lrpe_fairseq.experiments.records.runs import Run, read_runs
from lrpe_fairseq.experiments.records.sweeps import Sweep, read_sweeps
from lrpe_fairseq.experiments.report.readme import replace_between

PAGE = ROOT / "docs" / "cost.md"
NOT_MEASURED = "not measured"


def main() -> None:
    """Rewrite the tables of the page."""
    replace_between(PAGE, "paper", paper_table(read_runs(ROOT / "results" / "runs")))
    replace_between(PAGE, "small", measured_table(read_sweeps(ROOT / "results" / "sweeps")))


def paper_table(runs: dict[str, Run]) -> str:
    """A row for every table with a scale ``paper``: the budget, and the hours where it was run."""
    lines = [
        "| table | trainings a seed | updates x tokens of one | tokens a seed | tokens/s | "
        "GPU-hours a seed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for table in load_tables(ROOT / "configs" / "tables"):
        if "paper" in table.scales:
            lines.append(_paper_row(table, runs))
    return "\n".join(lines)


def measured_table(sweeps: list[Sweep]) -> str:
    """A row for every table that one call made from nothing: its time, and where."""
    lines = [
        "| table | scale | trainings | at a time | h:mm:ss in all | on | commit |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for sweep in sweeps:
        hardware = sweep["hardware"]
        where = ", ".join([f"{hardware['cores']} cores, {hardware['cpu']}", *hardware["gpus"]])
        cells = [sweep["table"], sweep["scale"], sweep["trainings"], sweep["jobs"]]
        cells += [clock(sweep["wall_seconds"]), where, f"`{sweep['commit'][:8]}`"]
        lines.append(_line(cells))
    return "\n".join(lines)


def _paper_row(table: Table, runs: dict[str, Run]) -> str:
    """The budget of one seed of a table; hours are known where its speed was measured."""
    budgets = [run.budget() for run in plan.runs(table, "paper", [1])]
    in_all, unit = sum(budget.amount for budget in budgets), budgets[0].unit
    cells = [table.name, len(budgets), budgets[0].text]
    if unit != "tokens":  # their length is not in the configuration
        cells += [f"{in_all / 1e6:,.0f} M {unit}", NOT_MEASURED, NOT_MEASURED]
        return _line(cells)
    speeds = [
        run["tokens_per_second"]
        for run in runs.values()
        if run["experiment"] in table.experiments and run["scale"] == "paper"
    ]
    speed = f"{statistics.median(speeds):,.0f}" if speeds else NOT_MEASURED
    hours = f"{in_all / statistics.median(speeds) / 3600:,.0f}" if speeds else NOT_MEASURED
    return _line([*cells, f"{in_all / 1e9:,.1f} G", speed, hours])


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
