"""A column of a table as pages read it: its values, verdicts and texts.

Templates take a :class:`ColumnView` from ``Results.column``; every number and order on a
page is an expression on such a view.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lrpe_fairseq.experiments.records.tables import ANY, Column, Table
from lrpe_fairseq.experiments.report import measurements, orders
from lrpe_fairseq.experiments.report.markdown import fixed

SIGNS = {
    orders.BETTER: "✓",
    orders.WORSE: "✗",
    orders.EQUAL: "=",
    orders.UNRESOLVED: "?",
    orders.UNSTABLE: "~",
}
"""The sign of a verdict."""
WIDE, HUGE = 100.0, 1000.0
"""A visible difference from which a sign has no number, and a bound that is not printed."""


class Home(Protocol):
    """The measurements of all pages, to which a column belongs."""

    root: Path
    every: "Mapping[measurements.Key, orders.Measurement]"
    """The measurement of every key, with the rows of all columns that have it."""


@dataclass(frozen=True)
class ColumnView:
    """One column of one comparable group of runs.

    cells: label of a row -> seed -> value. examples: number of tests: examples of an accuracy,
    tokens of a perplexity, else 0. kind: of ``orders.UNITS``. whole: value of 100 % of a fraction.
    paper: label -> published number. names: label -> :func:`method`. broken: labels with a seed
    whose evaluation was not finite. runs: label -> seed -> name of the run that has the value.
    home: the measurements of all pages. yardstick: the metrics of n-grams on the same tokens, empty
    where there are none.
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
    runs: Mapping[str, Mapping[int, str]]
    home: Home
    yardstick: Mapping[str, float]

    @property
    def rows(self) -> list[str]:
        """Labels of the rows with a value, in the table's order."""
        return [label for label, values in self.cells.items() if values]

    @functools.cached_property
    def scaled(self) -> orders.Cells:
        """The values of the sound rows on the scale of comparisons."""
        return {
            label: {seed: orders.compared(v / self.whole, self.kind) for seed, v in values.items()}
            for label, values in self.cells.items()
            if values and label not in self.broken
        }

    @functools.cached_property
    def key(self) -> "measurements.Key":
        """What names the measurement of this column."""
        return measurements.key_of(
            self.home.root, self.table, self.scale, self.dataset, self.column
        )

    @functools.cached_property
    def measurement(self) -> orders.Measurement:
        """The measurement of this column, with the rows of all pages."""
        return self.home.every[self.key]

    def _measurement_of(self, row: str, other: str) -> orders.Measurement:
        """Return the measurement that two rows share.

        In a column of any attention, rows of one attention type have the measurement of a column of
        that type, if a table has both there: one pair has one verdict.
        """
        kinds = {self.table.row(label).attention_in(self.column) for label in (row, other)}
        if self.column.attention == ANY and len(kinds) == 1:
            own = self.home.every.get(self.key._replace(attention=kinds.pop()))
            if own and {self.identity(row), self.identity(other)} <= own.cells.keys():
                return own
        return self.measurement

    def identity(self, row: str) -> str:
        """Return what names a row on all pages: the runs that have its values."""
        return measurements.identity(self.runs[row])

    def verdict(self, row: str, other: str) -> orders.Verdict:
        """Return the verdict on ``row`` against ``other``; unstable if either has a lost seed."""
        unit = orders.UNITS[self.kind].name
        # A mean over the seeds that survived would hide that one was lost.
        if {row, other} & self.broken:
            return orders.Verdict(orders.UNSTABLE, math.nan, -math.inf, math.inf, unit)
        if row not in self.rows or other not in self.rows:
            return orders.Verdict(orders.UNRESOLVED, math.nan, -math.inf, math.inf, unit)
        shared = self._measurement_of(row, other)
        return shared.verdict(self.identity(row), self.identity(other))

    def mark(self, row: str, other: str) -> str:
        """Return the name of :meth:`verdict`."""
        return self.verdict(row, other).name

    def sign(self, row: str, other: str) -> str:
        """Return the sign of :meth:`verdict`; unresolved with what would have shown.

        Empty for a row against itself, and in a column of numbers that are not compared.
        """
        if row == other or self.kind == "plain":
            return ""
        verdict = self.verdict(row, other)
        shown = verdict.name == orders.UNRESOLVED and verdict.known and verdict.visible < WIDE
        return SIGNS[verdict.name] + (f" {size(verdict.visible, self.kind)}" if shown else "")

    def versus(self, row: str, other: str) -> str:
        """Return the verdict and the difference, such as "better, -3.5 % [-7.6, -0.2]".

        Both means and no difference if its interval is missing, or too wide to say anything.
        """
        if row not in self.rows or other not in self.rows:
            return "not measured"
        verdict = self.verdict(row, other)
        if verdict.known and not (verdict.name == orders.UNSTABLE and verdict.high >= HUGE):
            later = " (provisional)" if self.provisional else ""
            return f"{verdict.name}{later}, {self.difference(row, other)}"
        both = f"{self.short(row)} against {self.short(other)}"
        # Without an interval a pair is unresolved for one seed, and unstable if one was lost.
        return f"{both}, {'one seed' if verdict.name == orders.UNRESOLVED else verdict.name}"

    def difference(self, row: str, other: str) -> str:
        """Return the difference of two rows with its interval, such as "-3.5 % [-7.6, 0.9]"."""
        return difference(self.verdict(row, other), self.kind)

    def mean(self, row: str) -> float:
        """Return the mean over seeds. Raises: KeyError without a value."""
        return statistics.fmean(self._values(row))

    def _values(self, row: str) -> Iterable[float]:
        """Return the values of a row over its seeds. Raises: KeyError without a value."""
        if not self.cells.get(row):
            raise KeyError(f"{self.table.name}, {self.column.key}: {row} has no value")
        return self.cells[row].values()

    def text(self, row: str, usual: int | None = None) -> str:
        """Return "mean±deviation", and the number of seeds if it is not the usual one.

        A number that has no verdict and is the same for every seed, such as that of parameters, is
        shown alone. usual: the number of seeds that the page states; that of most rows if absent.
        """
        values = list(self._values(row))
        if self.kind == "plain" and len(set(values)) == 1:
            return self.short(row)
        spread = fixed(statistics.stdev(values), self.column.decimals) if len(values) > 1 else ""
        text = self.short(row) + (f"±{spread}" if spread else "")
        # Only where it differs: the page says the usual number.
        return text if len(values) == (usual or self.seeds) else f"{text} ({len(values)})"

    @property
    def seeds(self) -> int:
        """The number of seeds of most rows; 0 without rows."""
        counts = [len(self.cells[row]) for row in self.rows]
        return statistics.mode(counts) if counts else 0

    @property
    def seed_span(self) -> str:
        """The number of seeds of all rows, as :meth:`seeds_of` has it."""
        return self.seeds_of(*self.ranked())

    def seeds_of(self, *rows: str) -> str:
        """Return the number of seeds as text, such as "1 seed"; fewest to most if rows differ."""
        counts = {len(self.cells[row]) for row in rows}
        low, high = min(counts), max(counts)
        span = str(low) if low == high else f"{low} to {high}"
        return f"{span} seed{'s' if high != 1 else ''}"

    def short(self, row: str) -> str:
        """Return the mean as text."""
        return fixed(self.mean(row), self.column.decimals)

    def named(self, row: str) -> str:
        """Return "`method` mean"."""
        return f"`{self.names[row]}` {self.short(row)}"

    def counted(self, row: str) -> str:
        """Return :meth:`named`, with the number of seeds if it is not that of most rows."""
        seeds = len(self.cells[row])
        more = f" ({seeds} seed{'s' * (seeds > 1)})" if seeds != self.seeds else ""
        return self.named(row) + more

    def ranked(self) -> list[str]:
        """Return the rows that evaluated for every seed, the best mean first."""
        sign = 1 if self.column.better == "lower" else -1
        sound = [row for row in self.rows if row not in self.broken]
        return sorted(sound, key=lambda row: sign * self.mean(row))

    @functools.cached_property
    def is_open(self) -> bool:
        """True if no pair of rows has an interval: nothing can be said about any order."""
        rows = self.ranked()
        return not any(self.verdict(a, b).known for a, b in itertools.combinations(rows, 2))

    @functools.cached_property
    def provisional(self) -> bool:
        """True if the column has verdicts that may move when rows are added: see `priors`."""
        return self.kind != "plain" and not self.is_open and not self.measurement.frozen

    @functools.cached_property
    def unbeaten(self) -> list[str]:
        """The rows that no row of this column is better than, the best mean first."""
        rows = self.ranked()
        return [
            a for a in rows if not any(self.mark(b, a) == orders.BETTER for b in rows if b != a)
        ]

    @functools.cached_property
    def unordered(self) -> list[str]:
        """The unbeaten rows of which seeds say too little: they differ too much or are too few."""
        best, *others = self.unbeaten or [""]
        return [row for row in others if not self._could_show(row, best)]

    def _could_show(self, row: str, other: str) -> bool:
        """True if the pair has an order, or lacks one that a large difference would have had."""
        verdict = self.verdict(row, other)
        if verdict.name == orders.UNRESOLVED:
            return verdict.known and verdict.visible < WIDE
        return verdict.name != orders.UNSTABLE

    def against(self, row: str) -> dict[str, list[str]]:
        """Return verdict -> the other rows that have it against ``row``, the best mean first."""
        rows_of: dict[str, list[str]] = {name: [] for name in orders.VERDICTS}
        for other in self.ranked():
            if other != row:
                rows_of[self.mark(other, row)].append(other)
        return rows_of

    @property
    def beats_ngrams(self) -> bool | None:
        """True if the best mean is better than n-grams of the same tokens; None without them."""
        ours = self.ranked()
        if not self.yardstick or not ours:
            return None
        return self.mean(ours[0]) < self.yardstick["ppl"]


def size(value: float, kind: str) -> str:
    """Return the size of a difference as text, without its unit.

    >>> size(12.34, "perplexity"), size(0.512, "bleu")
    ('12', '0.5')
    """
    if kind == "loss":
        return f"{value:.3f}"
    # From 9.95 on one decimal would print three digits.
    return f"{value:.0f}" if abs(value) >= 9.95 else f"{value + 0.0:.1f}"


def difference(verdict: orders.Verdict, kind: str) -> str:
    """Return a difference with its interval and unit; "–" without an interval.

    >>> difference(orders.Verdict("better", -3.51, -7.6, -0.2, "%"), "perplexity")
    '-3.5 % [-7.6, -0.2]'
    """
    if not verdict.known:
        return "–"
    middle = _signed(verdict.size, kind)
    low = _signed(verdict.low, kind)
    high = _signed(verdict.high, kind)
    # A bound of a million percent says no more than "over".
    if verdict.high >= HUGE:
        high = f"over +{HUGE:.0f}"
    space = " " if verdict.unit else ""
    return f"{middle}{space}{verdict.unit} [{low}, {high}]"


def _signed(value: float, kind: str) -> str:
    text = size(value, kind)
    # "-0.0" and "+0.0" are both 0.0.
    if not float(text):
        return text.lstrip("-")
    return text if value < 0 else f"+{text}"
