"""The scores of a constant answer beside a mean of tasks: results/bench/constant-answers.json."""

import statistics
from pathlib import Path

from lrpe_fairseq.experiments.records.files import read_json
from lrpe_fairseq.experiments.records.tables import Column, Table
from lrpe_fairseq.experiments.report import markdown
from lrpe_fairseq.experiments.report.results import Results
from lrpe_fairseq.experiments.report.sheets import Sheet

FILE = Path("results", "bench", "constant-answers.json")
"""Task -> score of the most frequent class as every answer, in percent."""
PREFIX = "glue-"


def mean(root: Path, table: Table, column: Column) -> float | None:
    """Return what a constant answer has in a mean of tasks; None unless all of them are known."""
    known = read_json(root / FILE)
    tasks = [table.column(key).dataset.removeprefix(PREFIX) for key in column.mean_of]
    scores = [known[task] for task in tasks if task in known]
    return statistics.fmean(scores) if tasks and len(scores) == len(tasks) else None


def section(results: Results, sheet: Sheet) -> str:
    """Return a table of constant answers and of the rows, by task; empty without such a mean."""
    known = read_json(results.root / FILE)
    lines = []
    head: list[str] = []
    for view in results.headlines(sheet):
        constant = mean(results.root, sheet.table, view.column)
        if constant is None:
            continue
        parts = [results.view(sheet, key) for key in view.column.mean_of]
        tasks = [part.column.dataset.removeprefix(PREFIX) for part in parts]
        if not head:
            head = ["", view.column.title, *tasks]
            scores = [constant, *(known[task] for task in tasks)]
            lines.append(["most frequent class", *(f"{score:.1f}" for score in scores)])
        spans = []
        for part in (view, *parts):
            values = [part.mean(row) for row in part.ranked()]
            spans.append(f"{min(values):.1f} to {max(values):.1f}")
        lines.append([f"rows, {view.column.attention}", *spans])
    if not lines:
        return ""
    said = (
        "**Constant answers.** The first line has the most frequent class of each development set "
        "as every answer; its correlation is 0. The others have the lowest and the highest row."
    )
    return f"{said}\n\n{markdown.table(head, lines, numbers=True)}"
