"""Options that another table selects, such as a rate per row, on a seed that is not reported."""

import math
from collections.abc import Mapping
from typing import Any

from lrpe_fairseq.encodings import canonical_name
from lrpe_fairseq.experiments.records.keys import RATE, comparable
from lrpe_fairseq.experiments.records.tables import Row, Table
from lrpe_fairseq.experiments.report import markdown
from lrpe_fairseq.experiments.report.columns import ColumnView
from lrpe_fairseq.experiments.report.results import Results

SAME = 0.01
"""The difference, relative to the best mean, up to which a value is as good as the best one: that
of one seed is noise."""


def require(results: Results, table: Table) -> None:
    """Check that trained rows of ``table`` have options as good as the best of its selection.

    Raises: ValueError, which names the row and the option, if not, or if a row was trained before
        its selection was complete.
    """
    if not table.selected_by:
        return
    for sheet in results.sheets_of(table.name):
        views = [results.view(sheet, column.key) for column in sheet.table.columns]
        for row in sheet.table.rows:
            for attention in row.attention:
                if any(row.label in v.rows for v in views if v.column.attention == attention):
                    _require_row(results, table, row, attention)


def _require_row(results: Results, table: Table, row: Row, attention: str) -> None:
    """Check one row; see :func:`require`. Raises: ValueError."""
    tried = candidates(results, table, row, attention)
    of_row = chosen(table, {**table.options, **row.overrides})
    where = f"row {row.label} of table {table.name} ({attention} attention)"
    # A rate that was not tried might be the best one.
    if not tried or None in tried.values():
        raise ValueError(
            f"{where} was trained before its selection: run scripts/run_table.sh "
            f"{table.selected_by} first"
        )
    if all(map(math.isinf, tried.values())):
        raise ValueError(f"{where}: every value of {table.selected_by} diverged; try others")
    pick = min if results.tables[table.selected_by].better == "lower" else max
    best = pick(tried, key=tried.__getitem__)
    if of_row in tried and _as_good(tried[of_row], tried[best]):
        return
    for name, ours, selected in zip(table.selects, of_row, best, strict=True):
        if ours != selected:
            raise ValueError(
                f"{where} has {name} {ours}, but {table.selected_by} finds {selected}: write it "
                "into the row's overrides and train the row again"
            )


def _as_good(mean: float, best: float) -> bool:
    """Return whether a mean of the selection is the best one, or too near it to tell."""
    return abs(mean - best) <= SAME * abs(best)


def candidates(
    results: Results, table: Table, row: Row, attention: str
) -> dict[tuple[Any, ...], float | None]:
    """Return the values of the selected options that were tried for a row -> mean; None: not yet.

    A row of the selection is tried for ``row`` if encoding and all other options agree.
    """
    other = results.tables[table.selected_by]
    sheets = [sheet for sheet in results.sheets if sheet.table.name == other.name]
    tried: dict[tuple[Any, ...], float | None] = {}
    for rival in other.rows:
        if attention in rival.attention and _fits(table, row, other, rival):
            for column in (each for each in other.columns if each.attention == attention):
                options = {**other.options, **rival.overrides, **column.overrides}
                view = results.view(sheets[0], column.key) if sheets else None
                tried[chosen(table, options)] = _mean(view, rival.label) if view else None
    return tried


def _mean(view: ColumnView, row: str) -> float | None:
    """Return the mean of a row, the worst possible if a seed was lost, None without a run."""
    if row in view.broken:
        # A rate that diverged on any seed must lose.
        return math.inf if view.column.better == "lower" else -math.inf
    return view.mean(row) if row in view.rows else None


def chosen(table: Table, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of the options that a table has selected."""
    return tuple(comparable(name, options[name]) for name in table.selects)


def _fits(table: Table, row: Row, other: Table, rival: Row) -> bool:
    if canonical_name(row.encoding) != canonical_name(rival.encoding):
        return False
    ours, theirs = {**table.options, **row.overrides}, {**other.options, **rival.overrides}
    # A selection may train for fewer updates.
    shared = (ours.keys() & theirs.keys()) - {*table.selects, "optimization.max_update"}
    return all(comparable(name, ours[name]) == comparable(name, theirs[name]) for name in shared)


def other_rates(results: Results, table: Table) -> str:
    """Name the rows with another rate than that of most; empty if no rate was selected."""
    if RATE not in table.selects:
        return ""
    [sheet, *_] = results.sheets_of(table.name)
    names = results.view(sheet, table.columns[0].key).names
    found = [
        f"`{names[row.label]}` {row.overrides[RATE]}"
        for row in table.rows
        if row.overrides.get(RATE, table.options[RATE]) != table.options[RATE]
    ]
    if not found:
        return ""
    return f"Rows with another rate than {table.options[RATE]}: {markdown.listed(found)}."
