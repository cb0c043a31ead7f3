"""All measurements of all tables: one data frame, and views of their columns."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from lrpe_fairseq.experiments.records.methods import names
from lrpe_fairseq.experiments.records.runs import Run, read_runs
from lrpe_fairseq.experiments.records.tables import Column, load_tables
from lrpe_fairseq.experiments.report import measurements, orders, yardsticks
from lrpe_fairseq.experiments.report.columns import ColumnView
from lrpe_fairseq.experiments.report.kinds import COUNTS, LOGARITHMIC, kind_of
from lrpe_fairseq.experiments.report.published import published
from lrpe_fairseq.experiments.report.sheets import Sheet, measured, sheets

VALUES = ("table", "scale", "dataset", "method", "row", "attention", "column", "seed", "value",
         "paper")  # fmt: skip


class Measurements:
    """The measurements of all pages, made when the first verdict is asked for.

    views: yields every column.
    """

    def __init__(self, root: Path, views: Callable[[], Iterator[ColumnView]]) -> None:
        self.root = root
        self._views = views

    @functools.cached_property
    def every(self) -> "dict[measurements.Key, orders.Measurement]":
        """Key -> measurement, with the frozen priors and the named contrasts."""
        return measurements.gathered(self.root, self._views())


class Results:
    """The measurements of the checkout ``root``: a data frame, and views of its columns.

    runs: name -> run, by default the run files of the checkout.
    """

    def __init__(self, root: Path, runs: Mapping[str, Run] | None = None) -> None:
        self.root = root
        self.runs = runs = read_runs(root / "results" / "runs") if runs is None else runs
        seen = sorted({run["scale"] for run in runs.values()})
        tables = load_tables(root / "configs" / "tables")
        self.tables = {table.name: table.with_scales(seen) for table in tables}
        self.sheets = [s for table in self.tables.values() for s in sheets(table, runs)]
        self.yardsticks = yardsticks.Yardsticks(runs)
        self.measurements = Measurements(root, self.views)
        self._views: dict[tuple[str, str], ColumnView] = {}

    def views(self) -> Iterator[ColumnView]:
        """Yield every column of every comparable group."""
        for sheet in self.sheets:
            for column in sheet.table.columns:
                yield self.view(sheet, column.key)

    def sheets_of(self, table: str) -> list[Sheet]:
        """Return the comparable groups of a table that have runs.

        A comparison of columns needs runs of more than the shared column.
        """
        of_table = [sheet for sheet in self.sheets if sheet.table.name == table]
        return [s for s in of_table if s.table.compare == "rows" or self._compares(s)]

    def _compares(self, sheet: Sheet) -> bool:
        every = {sheet.table.column(key).title for key in sheet.table.headline}
        titles = {view.column.title for view in self.headlines(sheet)}
        return len(titles) > 1 or titles == every

    def column(self, table: str, key: str, scale: str = "") -> ColumnView:
        """Return a column of a table's first group at ``scale``. Raises: KeyError without any."""
        for sheet in self.sheets_of(table):
            if scale in ("", sheet.scale):
                return self.view(sheet, key)
        raise KeyError(f"table {table} has no runs at scale {scale or 'any'}")

    def view(self, sheet: Sheet, key: str) -> ColumnView:
        """Return a column of a sheet."""
        name = (sheet.name, key)
        # Templates ask for the same column many times.
        if name not in self._views:
            self._views[name] = self._view(sheet, sheet.table.column(key))
        return self._views[name]

    def _view(self, sheet: Sheet, column: Column) -> ColumnView:
        table = sheet.table
        scores_of = {row.label: sheet.scores(row, column) for row in table.rows}
        parts = [table.column(key) for key in column.mean_of] or [column]
        kind = kind_of({part.metric for part in parts})
        printed = {row.label: published(self.root, table, row, parts) for row in table.rows}
        return ColumnView(
            table=table,
            scale=sheet.scale,
            dataset=sheet.dataset,
            column=column,
            cells={label: dict(scores) for label, scores in scores_of.items()},
            examples=_examples(sheet, parts),
            kind=kind,
            whole=COUNTS[parts[0].metric][1] if kind == "fraction" else 1.0,
            paper={label: value for label, value in printed.items() if value is not None},
            names=names(table),
            broken=frozenset(label for label, scores in scores_of.items() if scores.lost),
            runs={label: scores.names for label, scores in scores_of.items()},
            home=self.measurements,
            yardstick=self.yardsticks.of(sheet, column),
        )

    def headlines(self, sheet: Sheet) -> list[ColumnView]:
        """Return the headline columns of a sheet that have values."""
        views = [self.view(sheet, key) for key in sheet.table.headline]
        return [view for view in views if view.rows]

    @functools.cached_property
    def values(self) -> pd.DataFrame:
        """Every value of every cell, with its table, row, column, seed and published number."""
        lines = [
            (view.table.name, view.scale, view.dataset, view.names[row], row,
             view.table.row(row).attention_in(column), column.key, seed, value, view.paper.get(row))
            for sheet in self.sheets
            for column in sheet.table.columns
            for view in [self.view(sheet, column.key)]
            for row, values in view.cells.items()
            for seed, value in values.items()
        ]  # fmt: skip
        return pd.DataFrame(lines, columns=VALUES).astype({"value": float, "paper": float})


@functools.lru_cache(maxsize=1)
def results_of(root: Path) -> Results:
    """Return the measurements of a checkout; they are read once per process."""
    return Results(root)


def _examples(sheet: Sheet, columns: Sequence[Column]) -> int:
    """Return the tests of the columns together, for any run: examples, or tokens; 0 if unknown."""
    total = 0
    for column in columns:
        if column.metric in LOGARITHMIC:
            count = "tokens"
        elif column.metric in COUNTS:
            count, _ = COUNTS[column.metric]
        else:
            continue
        # All runs of a column are evaluated on the same tests, so the first with a count will do.
        for run in (run for row in sheet.table.rows for run in sheet.runs_of(row, column).values()):
            if tests := measured(run, column.split, column.protocol).get(count):
                total += int(tests)
                break
    return total
