"""Compare two rows of a table: ``python -m lrpe_fairseq.experiments compare TABLE ROW ROW``.

The differences and verdicts are those of the pages, from the run files of this checkout.
"""

import argparse
from collections.abc import Iterator, Sequence

from lrpe_fairseq.experiments.families import config_of, load_named
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.methods import row_named
from lrpe_fairseq.experiments.report.columns import ColumnView
from lrpe_fairseq.experiments.report.results import results_of
from lrpe_fairseq.experiments.report.sheets import Sheet

HEADER = ("column", "first", "second", "the first against the second")
INTERVALS = (
    "Brackets hold 99.9 % intervals, and 99.5 % intervals for contrasts that were written down "
    "before their runs. results/README.md has the rule."
)


@command("compare")
def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each column in which both rows have values."""
    options = _parse(arguments)
    table = load_named(options.table)
    if options.scale:
        config_of(table, options.scale)
    one, other = (row_named(table, name).label for name in options.rows)
    if one == other:
        raise UserError(f"both names mean the row {one}: give two rows")
    results = results_of(ROOT)
    found = False
    for sheet in results.sheets_of(table.name):
        views = [results.view(sheet, column.key) for column in sheet.table.columns]
        shared = [view for view in views if {one, other} <= set(view.rows)]
        if shared and options.scale in ("", sheet.scale):
            found = True
            print("\n".join(_lines(sheet, shared, one, other)))
    if not found:
        raise UserError(f"no column of {table.name} has values of both rows, {one} and {other}")
    print(INTERVALS)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare", description=__doc__.split("\n")[0])
    parser.add_argument("table", help="a file of configs/tables, without .yaml")
    parser.add_argument(
        "rows", nargs=2, metavar="ROW", help="a label, a method as pages show it, or an encoding"
    )
    parser.add_argument("--scale", default="", help="a scale of the table (default: all)")
    return parser.parse_args(arguments)


def _lines(sheet: Sheet, views: Sequence[ColumnView], one: str, other: str) -> Iterator[str]:
    """Yield the heading and the aligned lines of a comparable group."""
    place = ", ".join(part for part in (sheet.table.name, sheet.scale, sheet.dataset) if part)
    names = views[0].names
    yield f"{place}: {names[one]} (first) against {names[other]} (second)"
    cells = [HEADER, *(_cells(view, one, other) for view in views)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  " + "  ".join(map(str.ljust, line, widths)).rstrip()
    yield ""


def _cells(view: ColumnView, one: str, other: str) -> tuple[str, ...]:
    """Return the column, both means with deviations, and the verdict."""
    verdict = "not compared" if view.kind == "plain" else view.versus(one, other)
    return view.column.key, view.text(one), view.text(other), verdict
