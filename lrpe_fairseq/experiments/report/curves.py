"""Validation curves of the trainings of a table, as in Fig. 2 of the LRPE papers."""

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.records.tables import ANY
from lrpe_fairseq.experiments.report import plots
from lrpe_fairseq.experiments.report.columns import ColumnView
from lrpe_fairseq.experiments.report.results import Results
from lrpe_fairseq.experiments.report.sheets import Sheet

METRIC = "valid_ppl"
RISEN = 1.1
"""A training whose last validation is this many times its best is named."""


def name_of(sheet: Sheet) -> str:
    """Return the path of the picture, from the folder of the pages."""
    return f"figures/{sheet.name}-curves.png"


def names(results: Results, sheet: Sheet) -> list[str]:
    """Return the path of the picture of a group; empty without curves."""
    return [name_of(sheet)] if panels(results, sheet) else []


def pictures(results: Results, sheet: Sheet, folder: str) -> dict[str, Callable[[Path], None]]:
    """Return path -> function that draws the curves of a group; empty without curves."""
    found = panels(results, sheet)
    draw = functools.partial(plots.curves, panels=found)
    return {f"{folder}/{name_of(sheet)}": draw} if found else {}


def panels(results: Results, sheet: Sheet) -> list[plots.Panel]:
    """Return a panel for each headline column whose runs have a curve."""
    if not sheet.table.curves:
        return []
    found = []
    # a mean over columns has several trainings
    for view in (view for view in results.headlines(sheet) if not view.column.mean_of):
        rows = {}
        for row in view.ranked():
            line = curve(results, view, row)
            if line:
                rows[view.names[row]] = line
        if rows:
            title = f"{view.column.attention} attention"
            found.append(plots.Panel(title, "updates", rows, "validation perplexity", "perplexity"))
    return found


def curve(results: Results, view: ColumnView, row: str) -> list[plots.Point]:
    """Return the points of a row at the updates that all of its seeds validated."""
    runs: Iterable[Run] = [results.runs[name] for name in view.runs[row].values()]
    by_seed = [{p["updates"]: p[METRIC] for p in run["curve"] if METRIC in p} for run in runs]
    shared = sorted(set.intersection(*map(set, by_seed))) if by_seed else []
    return [plots.point(update, [values[update] for values in by_seed]) for update in shared]


def ends(results: Results, sheet: Sheet) -> str:
    """Name the trainings whose validation rose again; a cell has that of the best checkpoint."""
    if not sheet.table.curves:
        return ""
    found = []
    for view in (view for view in results.headlines(sheet) if not view.column.mean_of):
        for row in view.ranked():
            for seed, name in view.runs[row].items():
                points = [point for point in results.runs[name]["curve"] if METRIC in point]
                if points and (rise := _rise(points)):
                    kind = view.column.attention
                    # The name of the row has the attention of a column for any.
                    where = f"seed {seed}" if kind == ANY else f"{kind}, seed {seed}"
                    found.append(f"`{view.names[row]}` ({where}) {rise}")
    if not found:
        return ""
    more = f"{100 * (RISEN - 1):.0f} %"
    return (
        "A cell has the value of the checkpoint with the best validation. Validation perplexity "
        f"rose by more than {more} after it with {'; '.join(found)}."
    )


def _rise(points: Sequence[Run]) -> str:
    """Return the best and the last validation of a training in words; empty if it did not rise."""
    best = min(points, key=lambda point: point[METRIC])
    last = points[-1]
    if last[METRIC] <= RISEN * best[METRIC]:
        return ""
    return (
        f"from {best[METRIC]:.2f} at update {best['updates']:,} "
        f"to {last[METRIC]:.2f} at update {last['updates']:,}"
    )
