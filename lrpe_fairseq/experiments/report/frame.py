"""All measurements of all tables as one data frame, and its columns as templates read them.

A line of the frame is the value of one cell for one seed. Templates take a :class:`ColumnView` from
:meth:`Results.column`; every number and order on a page is an expression on such a view.
"""

import csv
import functools
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lrpe_fairseq.encodings import ENCODINGS, canonical_name
from lrpe_fairseq.experiments.records.layout import Column, Row, Table, load_tables, short
from lrpe_fairseq.experiments.records.runs import read_runs
from lrpe_fairseq.experiments.report import cells, orders
from lrpe_fairseq.experiments.report.markdown import fixed

UNNAMED = {
    "model.attention_normalizer", "model.encoder.attention_normalizer",
    "model.decoder.attention_normalizer", "model.no_token_positional_embeddings",
    "optimization.clip_norm", "model.cross.position_encoding", "task.node_positions",
    "task._name", "model.memory_length",
}  # fmt: skip
"""Options that :func:`method` names in its own way, or that follow from the method."""
MARKS = {orders.BETTER: "✓", orders.WORSE: "✗", orders.TIED: "≈", orders.UNSTABLE: "~"}
"""The sign of a mark; "?" stands for open."""
FRAME = ("table", "scale", "dataset", "method", "row", "attention", "column", "seed", "value",
         "paper")  # fmt: skip


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
    kind: scale of comparison (``orders.compared``). whole: the value of all, of a fraction. paper:
    label -> published number. names: label -> :func:`method`. broken: labels with a seed whose
    evaluation was not finite.
    """

    table: Table
    scale: str
    dataset: str
    column: Column
    cells: Mapping[str, Mapping[int, float]]
    examples: int
    kind: str
    whole: float
    paper: Mapping[str, float]
    names: Mapping[str, str]
    broken: frozenset[str]

    @property
    def rows(self) -> list[str]:
        """Labels of the rows with a value, in the table's order."""
        return [label for label, values in self.cells.items() if values]

    @functools.cached_property
    def _marks(self) -> dict[tuple[str, str], str]:
        scaled = {
            label: {seed: orders.compared(v / self.whole, self.kind) for seed, v in values.items()}
            for label, values in self.cells.items()
            if values and label not in self.broken
        }
        return orders.orders(scaled, self.column.better, self.examples)

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


@dataclass(frozen=True)
class Sheet:
    """A table at the scale of ``group``, with the runs of ``group``: one scale and data set."""

    table: Table
    group: cells.Group

    @property
    def name(self) -> str:
        """``table-dataset-scale``, as in the names of pictures."""
        parts = (self.table.name, self.group.dataset, self.group.scale)
        return "-".join(filter(None, parts)).lower()


class Results:
    """The measurements of the checkout ``root``: the frame, and views of its columns."""

    def __init__(self, root: Path) -> None:
        self.root, runs = root, read_runs(root / "results" / "runs")
        self.tables = {table.name: table for table in load_tables(root / "configs" / "tables")}
        self.sheets = [
            Sheet(table.at(group.scale), group)
            for table in self.tables.values()
            for group in cells.groups(table, runs)
        ]
        self._views: dict[tuple[str, str], ColumnView] = {}

    def sheets_of(self, table: str) -> list[Sheet]:
        """Return the comparable groups of a table that have runs."""
        return [sheet for sheet in self.sheets if sheet.table.name == table]

    def column(self, table: str, key: str, scale: str = "") -> ColumnView:
        """Return a column of a table's first group at ``scale``. Raises: KeyError without any."""
        for sheet in self.sheets_of(table):
            if scale in ("", sheet.group.scale):
                return self.view(sheet, key)
        raise KeyError(f"table {table} has no runs at scale {scale or 'any'}")

    def view(self, sheet: Sheet, key: str) -> ColumnView:
        """Return a column of a sheet."""
        name = (sheet.name, key)
        if name not in self._views:
            self._views[name] = _view(self.root, sheet, sheet.table.column(key))
        return self._views[name]

    def headlines(self, sheet: Sheet) -> list[ColumnView]:
        """Return the headline columns of a sheet that have values."""
        views = [self.view(sheet, key) for key in sheet.table.headline]
        return [view for view in views if view.rows]

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """Every value of every cell, with its table, row, column, seed and published number."""
        lines = [
            (view.table.name, view.scale, view.dataset, view.names[row], row, column.attention,
             column.key, seed, value, view.paper.get(row))
            for sheet in self.sheets
            for column in sheet.table.columns
            for view in [self.view(sheet, column.key)]
            for row, values in view.cells.items()
            for seed, value in values.items()
        ]  # fmt: skip
        return pd.DataFrame(lines, columns=FRAME).astype({"value": float, "paper": float})


@functools.lru_cache(maxsize=1)
def results(root: Path) -> Results:
    """Return the measurements of a checkout; they are read once per process."""
    return Results(root)


def _view(root: Path, sheet: Sheet, column: Column) -> ColumnView:
    table, group = sheet.table, sheet.group
    found = {row.label: cells.scores(table, row, column, group.runs) for row in table.rows}
    parts = [table.column(key) for key in column.mean_of] or [column]
    metrics = {part.metric for part in parts}
    fraction = metrics <= cells.COUNTS.keys()
    published = {row.label: _published(root, table, row, parts) for row in table.rows}
    perplexity = metrics <= set(cells.LOGARITHMIC)
    return ColumnView(
        table=table,
        scale=group.scale,
        dataset=group.dataset,
        column=column,
        cells={label: dict(scores) for label, scores in found.items()},
        examples=_examples(sheet, parts) if fraction else 0,
        kind="perplexity" if perplexity else "fraction" if fraction else "",
        whole=cells.COUNTS[parts[0].metric][1] if fraction else 1.0,
        paper={label: value for label, value in published.items() if value is not None},
        names=names(table),
        broken=frozenset(label for label, scores in found.items() if scores.lost),
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


# --- the published numbers -------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def read_paper(path: Path) -> tuple[dict[str, str], ...]:
    """Return the cells of a file of ``results/paper``, as printed, in file order."""
    with open(path, newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def find_cell(path: Path, selectors: Mapping[str, str]) -> dict[str, str]:
    """Return the cell of ``path`` whose columns have the values of ``selectors``.

    Raises: ValueError if a column is unknown, or if not exactly one cell matches.
    """
    every = read_paper(path)
    if unknown := sorted(set(selectors) - set(every[0])):
        raise ValueError(f"{path.name} has no column {', '.join(unknown)}")
    found = [cell for cell in every if selectors.items() <= cell.items()]
    if len(found) != 1:
        raise ValueError(f"{path.name} has {len(found)} cells with {selectors} instead of one")
    return found[0]


def _published(root: Path, table: Table, row: Row, columns: list[Column]) -> float | None:
    """Return the mean of the published numbers of a row in ``columns``; None if one is missing."""
    found = []
    for column in columns:
        method = row.method.get(column.key, "") if isinstance(row.method, dict) else row.method
        if not column.paper or not method or not row.has(column):
            return None
        selectors = {**column.paper, **row.paper, "method": method}
        path = root / "results" / "paper" / selectors.pop("file")
        found.append(find_cell(path, selectors)["value"])
    return math.fsum(map(float, found)) / len(found) if all(found) else None
