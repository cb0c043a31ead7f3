"""What the paper's tables cost: ``docs/cost.md``, from configurations and measured speeds."""

import statistics
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lrpe_fairseq.experiments.data import glue
from lrpe_fairseq.experiments.records.layout import Column, Row, Table, load_tables
from lrpe_fairseq.experiments.records.runs import Run, read_runs
from lrpe_fairseq.experiments.records.sweeps import Sweep, read_sweeps
from lrpe_fairseq.experiments.report import markdown
from lrpe_fairseq.experiments.report.markdown import NOT_MEASURED, ROOT
from lrpe_fairseq.experiments.runner.training import clock

PAGE = "docs/cost.md"


def pages(root: Path) -> dict[str, str]:
    """The page with both tables rendered anew."""
    text = (root / PAGE).read_text(encoding="utf-8")
    text = markdown.between(text, "paper", paper_table(read_runs(root / "results" / "runs"), root))
    sweeps = read_sweeps(root / "results" / "sweeps")
    return {PAGE: markdown.between(text, "small", measured_table(sweeps))}


def paper_table(runs: dict[str, Run], root: Path = ROOT) -> str:
    """A row for every table with a scale ``paper``: the budget, and the hours where it was run."""
    head = ["table", "trainings a seed", "updates x tokens of one", "tokens a seed"]
    tables = [t for t in load_tables(root / "configs" / "tables") if "paper" in t.scales]
    rows = [_paper_row(root, table, runs) for table in tables]
    return markdown.table([*head, "tokens/s", "GPU-hours a seed"], rows, numbers=True)


def measured_table(sweeps: list[Sweep]) -> str:
    """A row for every table that one call made from nothing: its time, and where."""
    head = ["table", "scale", "trainings", "at a time", "h:mm:ss in all", "on", "commit"]
    return markdown.table(head, map(_sweep_row, sweeps))


def trainings(table: Table, scale: str) -> int:
    """The trainings of one seed: cells that differ in what is trained, times learning rates."""
    table = table.at(scale)
    cells = {
        (row.encoding, column.attention, column.dataset, _changed(table, row, column))
        for row in table.rows
        for column in table.columns
        if column.attention in row.attention and not column.mean_of
    }
    return len(cells) * (len(table.rates.get(scale, [])) or 1)


def budget(settings: Any) -> tuple[int, int]:
    """Updates of a training, and tokens of an update."""
    tokens = settings.dataset.max_tokens * settings.optimization.update_freq[0]
    return settings.optimization.max_update, tokens


def _changed(table: Table, row: Row, column: Column) -> str:
    options = {**table.options, **row.overrides, **column.overrides}
    if table.rates:
        options.pop("lr", None)  # columns that tell rates apart share trainings
    return repr(sorted((k, v) for k, v in options.items() if v != table.options[k]))


def _sweep_row(sweep: Sweep) -> list[Any]:
    hardware = sweep["hardware"]
    where = ", ".join([f"{hardware['cores']} cores, {hardware['cpu']}", *hardware["gpus"]])
    cells = [sweep["table"], sweep["scale"], sweep["trainings"], sweep["jobs"]]
    return [*cells, clock(sweep["wall_seconds"]), where, f"`{markdown.short(sweep['commit'])}`"]


def _paper_row(root: Path, table: Table, runs: dict[str, Run]) -> list[str]:
    count = trainings(table, "paper")
    settings = OmegaConf.load(root / table.scales["paper"])
    if table.pretrained:
        return _finetuning_row(table, count, settings)
    updates, tokens = budget(settings)
    speeds = [
        run["tokens_per_second"]
        for run in runs.values()
        if run["experiment"] in table.experiments and run["scale"] == "paper"
    ]
    in_all = count * updates * tokens
    speed = f"{statistics.median(speeds):,.0f}" if speeds else NOT_MEASURED
    hours = f"{in_all / statistics.median(speeds) / 3600:,.0f}" if speeds else NOT_MEASURED
    one = f"{updates:,} x {tokens:,}"
    return [table.name, str(count), one, f"{in_all / 1e9:,.1f} G", speed, hours]


def _finetuning_row(table: Table, count: int, settings: Any) -> list[str]:
    """Sentences instead of tokens: their length is not in the configuration."""
    epochs = settings.optimization.max_epoch
    examples = sum(task.examples["train"] for task in glue.TASKS.values())
    in_all = count // len(glue.TASKS) * epochs * examples
    one = f"{epochs} epochs of a task"
    in_millions = f"{in_all / 1e6:,.0f} M sentences"
    return [table.name, str(count), one, in_millions, NOT_MEASURED, NOT_MEASURED]
