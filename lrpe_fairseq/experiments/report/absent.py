"""What a group of a table lacks: the rows and columns without a value.

Nothing is listed by hand: a row or column that gets its first run leaves the list.
"""

from collections.abc import Sequence

from lrpe_fairseq.experiments.report import markdown
from lrpe_fairseq.experiments.report.columns import ColumnView
from lrpe_fairseq.experiments.report.results import Results
from lrpe_fairseq.experiments.report.sheets import Sheet

MOST = 5
"""The largest number of rows of an attention type that is named."""


def text(results: Results, sheet: Sheet) -> str:
    """Return the sentences below the table of a group; empty if it lacks nothing."""
    shown = [results.view(sheet, key) for key in sheet.table.headline]
    aside = [
        results.view(sheet, column.key)
        for column in sheet.table.columns
        # A column with a training configuration has data, and so trainings, of its own.
        if column.config and column.key not in sheet.table.headline
    ]
    empty = [f"`{_title(view, shown)}`" for view in shown + aside if not view.rows]
    in_csv = [f"`{_title(view, shown)}` ({_rows_of(view)})" for view in aside if view.rows]
    sentences = {
        "Rows without a value here": "; ".join(_rows(shown)),
        "Columns without a value": markdown.listed(empty),
        "In the CSV only": markdown.listed(in_csv),
    }
    return " ".join(f"{name}: {found}." for name, found in sentences.items() if found)


def _rows_of(view: ColumnView) -> str:
    return f"{len(view.rows)} row{'s' * (len(view.rows) > 1)}"


def trained(views: Sequence[ColumnView]) -> tuple[int, int]:
    """Return how many rows of columns have a value, and how many rows could have one."""
    rows = {row.label for view in views for row in view.table.rows if row.has(view.column)}
    known = {label for view in views for label in (*view.rows, *view.broken)}
    return len(known), len(rows)


def _rows(views: Sequence[ColumnView]) -> list[str]:
    """Return the rows without a value, of each attention type with values in some column."""
    by_attention: dict[str, list[ColumnView]] = {}
    for view in (view for view in views if view.rows):
        by_attention.setdefault(view.column.attention, []).append(view)
    found = {}
    for attention, several in by_attention.items():
        known = {label for view in several for label in (*view.rows, *view.broken)}
        lacking = [
            f"`{several[0].names[row.label]}`"
            for row in several[0].table.rows
            if row.label not in known and any(row.has(view.column) for view in several)
        ]
        if lacking:
            found[attention] = lacking
    several = len(by_attention) > 1
    return [f"{kind} " * several + _named(names) for kind, names in found.items()]


def _named(names: Sequence[str]) -> str:
    """Join the first names, and say how many more there are."""
    more = [f"{len(names) - MOST} more"] if len(names) > MOST else []
    return markdown.listed([*names[:MOST], *more])


def _title(view: ColumnView, views: Sequence[ColumnView]) -> str:
    """Return the title of a column, with its attention type where columns have several."""
    several = len({v.column.attention for v in views}) > 1
    return f"{view.column.attention}, {view.column.title}" if several else view.column.title
