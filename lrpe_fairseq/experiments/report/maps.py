"""Maps: a panel per row of a table, with its columns over two axes, such as length and depth."""

import functools
from collections.abc import Callable
from pathlib import Path

from lrpe_fairseq.experiments.records.tables import Map
from lrpe_fairseq.experiments.report import plots
from lrpe_fairseq.experiments.report.results import Results
from lrpe_fairseq.experiments.report.sheets import Sheet

AXES = ("multiple of the training length", "depth of the fact, %")


def name_of(sheet: Sheet, shown: Map) -> str:
    """Return the path of a map, from the folder of the pages."""
    return f"figures/{sheet.name}-{shown.name}.png"


def names(results: Results, sheet: Sheet) -> list[str]:
    """Return the paths of the maps of a group that have a panel."""
    return [name_of(sheet, each) for each in sheet.table.maps if panels(results, sheet, each)]


def pictures(results: Results, sheet: Sheet, folder: str) -> dict[str, Callable[[Path], None]]:
    """Return path -> function that draws it, for every map of a group that has a panel."""
    drawn = {}
    for each in sheet.table.maps:
        if found := panels(results, sheet, each):
            x, y = [AXES[0], *map(str, each.x)], [AXES[1], *map(str, each.y)]
            draw = functools.partial(plots.maps, panels=found, x=x, y=y)
            drawn[f"{folder}/{name_of(sheet, each)}"] = draw
    return drawn


def panels(results: Results, sheet: Sheet, shown: Map) -> list[plots.Heat]:
    """Return the panels of a map: each row with a value, in the order of the table."""
    found = []
    for row in sheet.table.rows:
        for suffix, cell in shown.cells.items():
            values = [
                [_mean(results, sheet, cell.format(x=x, y=y), row.label) for x in shown.x]
                for y in shown.y
            ]
            if any(value is not None for line in values for value in line):
                found.append(plots.Heat(_title(results, sheet, row.label, suffix), values))
    return found


def tests(results: Results, sheet: Sheet) -> str:
    """Say how many tests a cell of the maps has in each seed; empty if the runs do not say it."""
    every = {column.key for column in sheet.table.columns}
    places = (each.keys() for each in sheet.table.maps)
    keys = set().union(*places) & every
    views = [results.view(sheet, key) for key in sorted(keys)]
    counts = sorted({view.examples for view in views if view.rows and view.examples})
    if not counts:
        return ""
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"A cell of a map has {span} samples in each seed."


def _mean(results: Results, sheet: Sheet, key: str, row: str) -> float | None:
    """Return the mean over seeds of a row in a column; None without a value or such a column."""
    # Scaled rotations have no column at the training length.
    if key not in {column.key for column in sheet.table.columns}:
        return None
    view = results.view(sheet, key)
    return view.mean(row) if row in view.rows else None


def _title(results: Results, sheet: Sheet, row: str, suffix: str) -> str:
    name = results.view(sheet, sheet.table.columns[0].key).names[row]
    return f"{name}, {suffix}" if suffix else name
