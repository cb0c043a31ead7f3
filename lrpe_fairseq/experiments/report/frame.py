"""All measurements of all tables as one data frame, and its columns as templates read them.

A line of the frame is the value of one cell for one seed. Templates take a :class:`ColumnView` from
:meth:`Results.column`; every number and order on a page is an expression on such a view.
"""

import csv
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lrpe_fairseq import patterns
from lrpe_fairseq.encodings import ENCODINGS, WRAPPERS, canonical_name
from lrpe_fairseq.experiments.records.fairseq_log import DIVERGED
from lrpe_fairseq.experiments.records.keys import RATE, filled, option
from lrpe_fairseq.experiments.records.layout import ANY, Column, Row, Table, load_tables, short
from lrpe_fairseq.experiments.records.protocols import BEYOND, HOLDS, Protocol, derived
from lrpe_fairseq.experiments.records.runs import Run, plain, read_runs
from lrpe_fairseq.experiments.report import orders
from lrpe_fairseq.experiments.report.markdown import fixed

UNNAMED = {
    "model.attention_normalizer", "model.encoder.attention_normalizer",
    "model.decoder.attention_normalizer", "model.no_token_positional_embeddings",
    "optimization.clip_norm", "optimization.lr", "model.cross.position_encoding",
    "task.node_positions", "task._name",
}  # fmt: skip
"""Options that :func:`method` names in its own way, or that follow from the method."""
MARKS = {orders.BETTER: "✓", orders.WORSE: "✗", orders.TIED: "≈", orders.UNSTABLE: "~"}
"""The sign of a mark; "?" stands for open."""
LOGARITHMIC = {"ppl", "word_ppl"}
COUNTS = {  # fraction -> metric with the number of tested examples, and value of 100 %
    "accuracy": ("examples", 100.0),
    "top5": ("examples", 100.0),
    "answer_accuracy": ("samples", 1.0),
    "token_accuracy": ("samples", 1.0),  # tokens of one sample are not independent
    "exact_match": ("samples", 1.0),
}
FRAME = ("table", "scale", "dataset", "method", "row", "attention", "column", "seed", "value",
         "paper")  # fmt: skip


def public_name(encoding: str) -> str:
    """Return the first public name of an encoding with several.

    >>> public_name("lrpe:identity:rotation"), public_name("lrpe-tmlr-type2")
    ('rope', 'lrpe-type2')
    """
    canonical = canonical_name(encoding)
    prefix, _, rest = canonical.partition(":")
    if rest and prefix in WRAPPERS:
        return f"{prefix}:{public_name(rest)}"
    return next((name for name in ENCODINGS if canonical_name(name) == canonical), canonical)


def method(encoding: str, options: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return the name of a row: its encoding on the command line, and the options it sets.

    options: of the row. usual: those of the table.

    >>> method("none", {"model.no_token_positional_embeddings": True}, {})
    'none, no positions'
    """
    parts = [patterns.canonical(encoding, public_name)]
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
    kind: scale of comparison (``orders.compared``). whole: value of 100 % of a fraction. paper:
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
    def _scaled(self) -> orders.Cells:
        return {
            label: {seed: orders.compared(v / self.whole, self.kind) for seed, v in values.items()}
            for label, values in self.cells.items()
            if values and label not in self.broken
        }

    @functools.cached_property
    def _marks(self) -> dict[tuple[str, str], str]:
        return orders.orders(self._scaled, self.column.better, self.examples)

    @functools.cached_property
    def unstable(self) -> set[str]:
        """The rows that evaluated for every seed, but whose seeds vary too much to be ordered."""
        return orders.unstable(self._scaled, self.examples)

    def mark(self, row: str, other: str) -> str:
        """Return how ``row`` compares with ``other``: better, worse, tied, unstable or open."""
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
            if row not in self.unstable:
                return row
        raise KeyError(f"{self.table.name}, {self.column.key} has no stable row")

    def tied_with(self, row: str) -> list[str]:
        """Return the other rows that are not ordered with ``row``, the best mean first."""
        return [o for o in self.ranked() if o != row and self.mark(o, row) in (orders.TIED, "open")]

    def better_than(self, row: str) -> list[str]:
        """Return the rows better than ``row``, the best mean first."""
        return [o for o in self.ranked() if o != row and self.mark(o, row) == orders.BETTER]


# --- the runs of a cell --------------------------------------------------------------------------


class Scores(dict[int, float]):
    """The value of a cell per seed. lost: the seeds whose evaluation was not finite."""

    def __init__(self, values: Mapping[int, float] = {}, lost: Iterable[int] = ()):
        super().__init__(values)
        self.lost = frozenset(lost)


@dataclass(frozen=True)
class Sheet:
    """Comparable runs of a table: one scale, and one data set unless columns name theirs.

    table: at the scale. runs: by path relative to results/runs.
    """

    table: Table
    scale: str
    dataset: str
    runs: Mapping[str, Run]

    @property
    def name(self) -> str:
        """``table-dataset-scale``, as in the names of pictures."""
        return "-".join(filter(None, (self.table.name, self.dataset, self.scale))).lower()

    @functools.cached_property
    def _of_cells(self) -> dict[tuple[str, str], dict[str, Run]]:
        found: dict[tuple[str, str], dict[str, Run]] = {}
        for name, run in self.runs.items():
            for cell in filled(self.table, run):
                found.setdefault(cell, {})[name] = run
        return found

    def runs_of(self, row: Row, column: Column) -> dict[str, Run]:
        """Return the runs that fill a cell, without the seeds that lack a rate of the table.

        Only a column with ``best_over: optimization.lr`` shows a sweep of learning rates. A
        diverged run counts.
        """
        own = self._of_cells.get((row.label, column.key), {})
        rates = set(self.table.rates_at(self.scale, column.rates))
        if column.best_over != RATE or not rates:
            return own
        found: dict[int, set[Any]] = {}
        for run in own.values():
            found.setdefault(run["seed"], set()).add(option(run["config"], RATE))
        return {name: run for name, run in own.items() if found[run["seed"]] >= rates}

    def scores(self, row: Row, column: Column) -> Scores:
        """Return the value of a cell per seed. Raises: ValueError if two runs have one seed."""
        if not row.has(column):
            return Scores()
        if column.mean_of:
            parts = [self.scores(row, self.table.column(key)) for key in column.mean_of]
            seeds = sorted(set.intersection(*map(set, parts)))
            means = {seed: statistics.fmean(part[seed] for part in parts) for seed in seeds}
            return Scores(means, set().union(*(part.lost for part in parts)))
        chosen = {seed: _value(run, column) for seed, run in self._selected(row, column).items()}
        known = {seed: value for seed, value in chosen.items() if value is not None}
        if column.metric == HOLDS and known:  # a mean of two lengths is none of them
            known = dict.fromkeys(known, min(known.values()))
        lost = {
            run["seed"]
            for run in self.runs_of(row, column).values()
            if DIVERGED in _at(run, column.split, column.protocol)
        }
        return Scores(known, lost - set(known))

    def _selected(self, row: Row, column: Column) -> dict[int, Run]:
        """Return seed -> the run that a cell shows: the only one, or the best of ``best_over``."""
        found: dict[int, dict[str, tuple[float, str]]] = {}  # seed -> option -> rank and name
        judge = dataclasses.replace(column, **column.best_by)
        for name, run in self.runs_of(row, column).items():
            rank = _value(run, judge)
            if rank is None:
                continue
            choice = str(option(run["config"], column.best_over)) if column.best_over else ""
            own = found.setdefault(run["seed"], {})
            if choice in own:
                raise ValueError(
                    f"{own[choice][1]} and {name} both fill seed {run['seed']} of row {row.label}, "
                    f"column {column.key}"
                )
            own[choice] = rank, name
        best = min if judge.better == "lower" else max
        ranked = {
            seed: best(own.values(), key=lambda r: r[0]) for seed, own in sorted(found.items())
        }
        return {seed: self.runs[name] for seed, (_, name) in ranked.items()}


Wanted = Callable[[Sheet], bool]
"""True for the groups of runs whose pictures are drawn."""


def _value(run: Run, column: Column) -> float | None:
    if not column.split:
        return run.get(column.metric)
    if column.metric in (HOLDS, BEYOND):
        length = Protocol.parse(column.protocol).length
        return derived(column.metric, run["metrics"].get(column.split, {}), length)
    return _at(run, column.split, column.protocol).get(column.metric)


def _at(run: Run, split: str, protocol: str) -> Run:
    """Return what a run measured on a split under a protocol."""
    return run["metrics"].get(split, {}).get(protocol, {})


def sheets(table: Table, runs: Mapping[str, Run]) -> list[Sheet]:
    """Return the comparable groups of the runs that fill cells of ``table``, in scale order.

    Raises: ValueError if runs of a group differ in an option of ``table.same``, or in their data.
    """
    found: dict[tuple[str, str], dict[str, Run]] = {}
    for name, run in sorted(runs.items()):
        if filled(table, run):
            own_data = any(column.dataset for column in table.at(run["scale"]).columns)
            key = run["scale"], "" if own_data else run["dataset"]
            found.setdefault(key, {})[name] = run
    for members in found.values():
        require_same(table, members)
    order = list(table.scales)
    return [
        Sheet(table.at(scale), scale, dataset, found[scale, dataset])
        for scale, dataset in sorted(found, key=lambda key: (order.index(key[0]), key[1]))
    ]


def require_same(table: Table, runs: Mapping[str, Run]) -> None:
    """Check that runs agree in the options of ``table.same`` and, as far as they say, in the data.

    Raises: ValueError if two runs differ in an option (with columns that have configurations: two
        runs on one data set), or in the checksum of a split or dictionary of one data set.
    """
    first: dict[tuple[str, str], tuple[str, Any]] = {}
    by_data = any(column.config for column in table.columns)
    for name, run in runs.items():
        data = run["dataset"]
        where = data if by_data else ""
        facts = {(where, key): option(run["config"], key) for key in table.same}
        checksums = run.get("data", {}).items()
        facts |= {(data, f"the data {data} ({part})"): value for part, value in checksums}
        for fact, value in facts.items():
            other, known = first.setdefault(fact, (name, value))
            if plain(known) != plain(value):
                raise ValueError(
                    f"{other} and {name} cannot be in one table because they differ in {fact[1]}: "
                    f"{known} and {value}"
                )


# --- all results ---------------------------------------------------------------------------------


class Results:
    """The measurements of the checkout ``root``: the frame, and views of its columns.

    runs: name -> run, in place of the run files of the checkout.
    """

    def __init__(self, root: Path, runs: Mapping[str, Run] | None = None) -> None:
        self.root = root
        runs = read_runs(root / "results" / "runs") if runs is None else runs
        seen = sorted({run["scale"] for run in runs.values()})
        tables = load_tables(root / "configs" / "tables")
        self.tables = {table.name: table.with_scales(seen) for table in tables}
        self.sheets = [s for table in self.tables.values() for s in sheets(table, runs)]
        self._views: dict[tuple[str, str], ColumnView] = {}

    def sheets_of(self, table: str) -> list[Sheet]:
        """Return the comparable groups of a table that have runs.

        A comparison of columns needs runs of more than the shared column.
        """
        own = [sheet for sheet in self.sheets if sheet.table.name == table]
        return [sheet for sheet in own if sheet.table.compare == "rows" or self._compares(sheet)]

    def _compares(self, sheet: Sheet) -> bool:
        every = {sheet.table.column(key).title for key in sheet.table.headline}
        found = {view.column.title for view in self.headlines(sheet)}
        return len(found) > 1 or found == every

    def column(self, table: str, key: str, scale: str = "") -> ColumnView:
        """Return a column of a table's first group at ``scale``. Raises: KeyError without any."""
        for sheet in self.sheets_of(table):
            if scale in ("", sheet.scale):
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
            (view.table.name, view.scale, view.dataset, view.names[row], row,
             view.table.row(row).attention_in(column), column.key, seed, value, view.paper.get(row))
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
    table = sheet.table
    found = {row.label: sheet.scores(row, column) for row in table.rows}
    parts = [table.column(key) for key in column.mean_of] or [column]
    metrics = {part.metric for part in parts}
    fraction = metrics <= COUNTS.keys()
    published = {row.label: _published(root, table, row, parts) for row in table.rows}
    return ColumnView(
        table=table,
        scale=sheet.scale,
        dataset=sheet.dataset,
        column=column,
        cells={label: dict(scores) for label, scores in found.items()},
        examples=_examples(sheet, parts) if fraction else 0,
        kind="perplexity" if metrics <= LOGARITHMIC else "fraction" if fraction else "",
        whole=COUNTS[parts[0].metric][1] if fraction else 1.0,
        paper={label: value for label, value in published.items() if value is not None},
        names=names(table),
        broken=frozenset(label for label, scores in found.items() if scores.lost),
    )


def _examples(sheet: Sheet, columns: Sequence[Column]) -> int:
    """Return the tested examples of the columns together, for any run."""
    total = 0
    for column in columns:
        own = (run for row in sheet.table.rows for run in sheet.runs_of(row, column).values())
        measured = (_at(run, column.split, column.protocol) for run in own)
        counts = (found.get(COUNTS[column.metric][0]) for found in measured)
        total += int(next(filter(None, counts), 0))
    return total


def names(table: Table) -> dict[str, str]:
    """Return the method of every row of a table, and its attention if that is its own."""
    own = any(column.attention == ANY for column in table.columns)
    return {
        row.label: method(row.encoding, {**table.options, **row.overrides}, table.options)
        + (f" ({row.attention[0]})" if own else "")
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

    Raises: ValueError if not exactly one cell matches.
    """
    found = [cell for cell in read_paper(path) if selectors.items() <= cell.items()]
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
