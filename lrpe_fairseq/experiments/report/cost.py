"""What the paper's tables cost: docs/cost.md, from the configurations and from measured speeds.

``python -m lrpe_fairseq.experiments.report.cost`` rewrites its tables.
"""

import statistics
from typing import Any

from omegaconf import OmegaConf

from lrpe_fairseq.experiments.commands import run_table
from lrpe_fairseq.experiments.data import glue
from lrpe_fairseq.experiments.records.layout import Table, load_tables
from lrpe_fairseq.experiments.records.runs import Run, read_runs
from lrpe_fairseq.experiments.records.sweeps import Sweep, read_sweeps
from lrpe_fairseq.experiments.report.readme import replace_between
from lrpe_fairseq.experiments.runner.training import ROOT, clock

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
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _paper_row(table: Table, runs: dict[str, Run]) -> str:
    trainings = len(run_table.runs(table, "paper", [1]))
    settings = OmegaConf.load(ROOT / table.scales["paper"])
    if table.pretrained:
        return _finetuning_row(table, trainings, settings)
    updates, tokens = budget(settings)
    speeds = [
        run["tokens_per_second"]
        for run in runs.values()
        if run["experiment"] in table.experiments and run["scale"] == "paper"
    ]
    in_all = trainings * updates * tokens
    speed = f"{statistics.median(speeds):,.0f}" if speeds else NOT_MEASURED
    hours = f"{in_all / statistics.median(speeds) / 3600:,.0f}" if speeds else NOT_MEASURED
    one = f"{updates:,} x {tokens:,}"
    return f"| {table.name} | {trainings} | {one} | {in_all / 1e9:,.1f} G | {speed} | {hours} |"


def budget(settings: Any) -> tuple[int, int]:
    """Updates of a training, and tokens of an update."""
    tokens = settings.dataset.max_tokens * settings.optimization.update_freq[0]
    return settings.optimization.max_update, tokens


def _finetuning_row(table: Table, trainings: int, settings: Any) -> str:
    """Sentences instead of tokens: their length is not in the configuration."""
    epochs = settings.optimization.max_epoch
    examples = sum(task.examples["train"] for task in glue.TASKS.values())
    in_all = trainings // len(glue.TASKS) * epochs * examples
    one = f"{epochs} epochs of a task"
    in_millions = f"{in_all / 1e6:,.0f} M sentences"
    return (
        f"| {table.name} | {trainings} | {one} | {in_millions} | {NOT_MEASURED} | {NOT_MEASURED} |"
    )


if __name__ == "__main__":
    main()
