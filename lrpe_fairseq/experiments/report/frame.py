"""All measurements of all tables as one data frame, and its columns as templates read them.

A line of the frame is the value of one cell for one seed. Templates take a :class:`ColumnView` from
:meth:`Results.column`; every number and order on a page is an expression on such a view.
"""

import functools
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lrpe_fairseq.encodings import ENCODINGS, canonical_name
from lrpe_fairseq.experiments.records.layout import Column, Table, load_tables, short
from lrpe_fairseq.experiments.records.runs import Run, read_runs
from lrpe_fairseq.experiments.report import cells, orders
from lrpe_fairseq.experiments.report.markdown import fixed
from lrpe_fairseq.experiments.report.sheet import Sheet, sheets

UNNAMED = {
    "model.attention_normalizer", "model.encoder.attention_normalizer",
    "model.decoder.attention_normalizer", "model.no_token_positional_embeddings",
    "optimization.clip_norm", "model.cross.position_encoding", "task.node_positions",
    "task._name", "model.memory_length",
}  # fmt: skip
"""Options that :func:`method` names in its own way, or that follow from the method."""
MARKS = {orders.BETTER: "✓", orders.WORSE: "✗", orders.TIED: "≈", orders.UNSTABLE: "~"}
"""The sign of a mark; "?" stands for open."""


def public_name(encoding: str) -> str:
    """Return the first public name of an encoding with several.

    >>> public_name("lrpe:identity:rotation"), public_name("lrpe-tmlr-type2")
    ('rope', 'lrpe-type2')
    """
    canonical = canonical_name(encoding)
    if canonical.startswith("gated:"):
        return f"gated:{public_name(canonical.removeprefix('gated:'))}"
    return next((name for name in ENCODINGS if canonical_name(name) == canonical), canonical)


def method(encoding: str, options: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return the name of a row: its encoding on the command line, and the options it sets.

    options: of the row. usual: those of the table.

    >>> method("none", {"model.no_token_positional_embeddings": True}, {})
    'none, no positions'
    """
    parts = [public_name(encoding)]
    if encoding == "none":
        bare = options.get("model.no_token_positional_embeddings", False)
        parts.append("no positions" if bare else "sinusoidal")
    for part in ("", "encoder.", "decoder."):
        normalizer = options.get(f"model.{part}attention_normalizer", "rotated")
        parts += [normalizer] if normalizer != "rotated" else []
    cross = "model.cross.position_encoding"
    parts += ["with cross-attention"] if options.get(cross) != usual.get(cross) else []
    changed = {k: v for k, v in options.items() if k not in UNNAMED and v != usual.get(k)}
    parts += [short(k) if v is True else f"{short(k)} {v}" for k, v in changed.items()]
    return ", ".join(parts)


@dataclass(frozen=True)
class ColumnView:
    """One column of one comparable group of runs.

    cells: label of a row -> seed -> value. examples: size of the test set of an accuracy, else 0.
    kind: scale of comparison (``orders.compared``). paper: label -> published number. names: label
    -> :func:`method`. broken: labels with a seed whose evaluation was not finite.
    """

    table: Table
    scale: str
    dataset: str
    column: Column
    cells: Mapping[str, Mapping[int, float]]
    examples: int
    kind: str
    paper: Mapping[str, float]
    names: Mapping[str, str]
    broken: frozenset[str]

    @property
    def rows(self) -> list[str]:
        """Labels of the rows with a value, in the table's order."""
        return [label for label, values in self.cells.items() if values]

    @functools.cached_property
    def _marks(self) -> dict[tuple[str, str], str]:
        whole = 100.0 if self.kind == "fraction" and self._percent else 1.0
        scaled = {
            label: {seed: orders.compared(v / whole, self.kind) for seed, v in values.items()}
            for label, values in self.cells.items()
            if values and label not in self.broken
        }
        return orders.orders(scaled, self.column.better, self.examples)

    @property
    def _percent(self) -> bool:
        return cells.COUNTS.get(self._metric, ("", 1.0))[1] == 100.0

    @property
    def _metric(self) -> str:
        parts = self.column.mean_of
        return self.table.column(parts[0]).metric if parts else self.column.metric

    def mark(self, row: str, other: str) -> str:
        """Return how ``row`` stands to ``other``: better, worse, tied, unstable or open."""
        broken = {row, other} & self.broken
        return orders.UNSTABLE if broken else self._marks.get((row, other), orders.OPEN)

    def sign(self, row: str, other: str) -> str:
        """Return the sign of :meth:`mark`, empty for a row against itself."""
        return "" if row == other else MARKS.get(self.mark(row, other), "?")

    def mean(self, row: str) -> float:
        """Return the mean over seeds. Raises: KeyError without a value."""
        return statistics.fmean(self._values(row))

    def _values(self, row: str) -> Iterable[float]:
        if not self.cells.get(row):
            raise KeyError(f"{self.table.name}, {self.column.key}: {row} has no value")
        return self.cells[row].values()

    def text(self, row: str) -> str:
        """Return "mean±deviation", and the number of seeds if it is not that of most rows."""
        values = list(self._values(row))
        spread = fixed(statistics.stdev(values), self.column.decimals) if len(values) > 1 else ""
        text = self.short(row) + (f"±{spread}" if spread else "")
        return text if len(values) == self.seeds else f"{text} ({len(values)})"

    @property
    def seeds(self) -> int:
        """The number of seeds of most rows; 0 without rows."""
        counts = [len(self.cells[row]) for row in self.rows]
        return statistics.mode(counts) if counts else 0

    def short(self, row: str) -> str:
        """Return the mean as text."""
        return fixed(self.mean(row), self.column.decimals)

    def named(self, row: str) -> str:
        """Return "`method` mean"."""
        return f"`{self.names[row]}` {self.short(row)}"

    def ranked(self) -> list[str]:
        """Return the rows that evaluated for every seed, the best mean first."""
        sign = 1 if self.column.better == "lower" else -1
        sound = [row for row in self.rows if row not in self.broken]
        return sorted(sound, key=lambda row: sign * self.mean(row))

    @property
    def is_open(self) -> bool:
        """True if no pair of rows can be ordered or called tied."""
        decided = {orders.BETTER, orders.WORSE, orders.TIED}
        return not decided & set(self._marks.values())

    def first(self) -> str:
        """Return the stable row with the best mean. Raises: KeyError without one."""
        for row in self.ranked():
            others = [other for other in self.ranked() if other != row]
            if not others or any(self.mark(row, o) != orders.UNSTABLE for o in others):
                return row
        raise KeyError(f"{self.table.name}, {self.column.key} has no stable row")

    def tied_with(self, row: str) -> list[str]:
        """Return the other rows that are not ordered with ``row``, the best mean first."""
        return [o for o in self.ranked() if o != row and self.mark(o, row) in (orders.TIED, "open")]

    def better_than(self, row: str) -> list[str]:
        """Return the rows better than ``row``, the best mean first."""
        return [o for o in self.ranked() if o != row and self.mark(o, row) == orders.BETTER]


class Results:
    """The measurements under a root: the frame, and views of its columns."""

    def __init__(self, root: Path, tables: list[Table], runs: Mapping[str, Run]) -> None:
        self.root, self.runs = root, dict(runs)
        self.sheets = [sheet for table in tables for sheet in sheets(root, table, self.runs)]
        self.tables = {table.name: table for table in tables}
        self._views: dict[tuple[str, ...], ColumnView] = {}

    @classmethod
    def load(cls, root: Path) -> "Results":
        """Read all tables and run files of a checkout."""
        tables = load_tables(root / "configs" / "tables")
        return cls(root, tables, read_runs(root / "results" / "runs"))

    def sheets_of(self, table: str) -> list[Sheet]:
        """Return the comparable groups of a table that have runs."""
        return [sheet for sheet in self.sheets if sheet.table.name == table]

    def column(self, table: str, key: str, scale: str = "", dataset: str = "") -> ColumnView:
        """Return one column; without ``scale`` or ``dataset``, of the table's first group.

        Raises: KeyError if there is none.
        """
        for sheet in self.sheets_of(table):
            if scale in ("", sheet.group.scale) and dataset in ("", sheet.group.dataset):
                return self.view(sheet, sheet.table.column(key))
        raise KeyError(f"table {table} has no runs at scale {scale or 'any'}")

    def view(self, sheet: Sheet, column: Column) -> ColumnView:
        """Return a column of a sheet."""
        key = (sheet.name, column.key)
        if key not in self._views:
            self._views[key] = _view(sheet, column)
        return self._views[key]

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """Every value of every cell, with its table, row, column, seed and published number."""
        lines = [
            {
                "table": view.table.name, "scale": view.scale, "dataset": view.dataset,
                "column": column.key, "row": row, "method": view.names[row],
                "attention": column.attention, "seed": seed, "value": value,
                "paper": view.paper.get(row),
            }
            for sheet in self.sheets
            for column in sheet.table.columns
            for view in [self.view(sheet, column)]
            for row, values in view.cells.items()
            for seed, value in values.items()
        ]  # fmt: skip
        return pd.DataFrame(lines)


@functools.lru_cache(maxsize=1)
def results(root: Path) -> Results:
    """Return the measurements of a checkout; they are read once per process."""
    return Results.load(root)


def _view(sheet: Sheet, column: Column) -> ColumnView:
    rows = {row.label: row for row in sheet.table.rows}
    found = {label: sheet.ours(row, column) for label, row in rows.items()}
    parts = [sheet.table.column(key) for key in column.mean_of] or [column]
    metrics = {part.metric for part in parts}
    fraction = metrics <= cells.COUNTS.keys()
    published = {label: sheet.published(row, column) for label, row in rows.items()}
    return ColumnView(
        sheet.table,
        sheet.group.scale,
        sheet.group.dataset,
        column,
        {label: dict(scores) for label, scores in found.items()},
        _examples(sheet, parts) if fraction else 0,
        "perplexity" if metrics <= set(cells.LOGARITHMIC) else "fraction" if fraction else "",
        {label: value for label, value in published.items() if value is not None},
        names(sheet.table),
        frozenset(label for label, scores in found.items() if scores.lost),
    )


def _examples(sheet: Sheet, columns: list[Column]) -> int:
    """Return the tested examples of the columns together, for any run."""
    total = 0
    for column in columns:
        count = cells.COUNTS[column.metric][0]
        tested = (
            run["metrics"].get(column.split, {}).get(column.protocol, {}).get(count, 0)
            for row in sheet.table.rows
            for run in cells.cell_runs(sheet.table, row, column, sheet.group.runs).values()
        )
        total += int(next((n for n in tested if n), 0))
    return total


def names(table: Table) -> dict[str, str]:
    """Return the method of every row of a table, by its label."""
    return {
        row.label: method(row.encoding, {**table.options, **row.overrides}, table.options)
        for row in table.rows
    }
