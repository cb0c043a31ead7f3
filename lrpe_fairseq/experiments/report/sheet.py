"""One table at one scale and data set: our numbers and the published ones, cell by cell."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lrpe_fairseq.experiments.records import updates
from lrpe_fairseq.experiments.records.layout import Column, Row, Table
from lrpe_fairseq.experiments.records.protocols import BREAK
from lrpe_fairseq.experiments.records.runs import Run, plain
from lrpe_fairseq.experiments.report import cells, paper
from lrpe_fairseq.experiments.report.cells import Group, Scores
from lrpe_fairseq.experiments.report.markdown import NO_CELL


@dataclass
class Sheet:
    """``table`` restricted to the scale of ``group``, with the runs of ``group``."""

    root: Path
    table: Table
    group: Group
    _found: dict[tuple[str, str], Scores] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.table = self.table.at(self.group.scale)

    @property
    def name(self) -> str:
        """``table-dataset-scale``, as in the names of pictures."""
        parts = (self.table.name, self.group.dataset, self.group.scale)
        return "-".join(filter(None, parts)).lower()

    @property
    def place(self) -> str:
        """Scale and data set, for headings."""
        data = f" ({self.group.dataset})" if self.group.dataset else ""
        return f"Scale {self.group.scale}{data}"

    def ours(self, row: Row, column: Column) -> Scores:
        """Return our value of a cell per seed; empty without runs."""
        key = (row.label, column.key)
        if key not in self._found:
            self._found[key] = cells.scores(self.table, row, column, self.group.runs)
        return self._found[key]

    def diverged(self, row: Row, column: Column) -> list[int]:
        """The seeds of a cell whose evaluation was not finite."""
        return cells.diverged(self.table, row, column, self.group.runs)

    def printed(self, row: Row, column: Column) -> str:
        """Return the published cell as printed; a mean as computed, with any other printed."""
        cell = self._cell(row, column)
        text = cell["printed"] if cell and cell["value"] else NO_CELL
        value = self.published(row, column) if column.mean_of else None
        if value is None:
            return text
        last = Decimal(1).scaleb(-column.decimals)
        computed = str(Decimal(f"{value:.6f}").quantize(last, ROUND_HALF_UP))  # as in the papers
        return computed if text in (computed, NO_CELL) else f"{computed} (printed: {text})"

    def published(self, row: Row, column: Column) -> float | None:
        """Return the published number; a mean column averages its published columns."""
        if not column.mean_of:
            cell = self._cell(row, column)
            return paper.number(cell) if cell else None
        parts = [self.published(row, self.table.column(key)) for key in column.mean_of]
        return None if None in parts else math.fsum(parts) / len(parts)

    def has_paper(self, column: Column) -> bool:
        """True if the column, or every column that it averages, has published values."""
        parts = [self.table.column(key) for key in column.mean_of]
        return bool(column.paper) or (bool(parts) and all(part.paper for part in parts))

    def comparable(self, column: Column) -> bool:
        """True if the published numbers of the column are of the same measure as ours."""
        parts = [self.table.column(key) for key in column.mean_of]
        return column.comparable and all(part.comparable for part in parts)

    def is_papers(self, column: Column) -> bool:
        """True if measure, data and scale are the paper's, so that differences are meaningful.

        ``paper_dataset`` names a corpus at any level of pieces.
        """
        if not self.comparable(column):
            return False
        corpus, dataset = self.table.paper_dataset, column.dataset or self.group.dataset
        same = not (corpus and dataset) or f"{dataset}-".startswith(f"{corpus}-")
        return self.group.scale == "paper" and same

    def run(self, column: Column) -> bool:
        """True if any cell of the column has runs."""
        return any(self.ours(row, column) for row in self.table.rows)

    def pairs(self, column: Column) -> list[tuple[Row, Scores, float]]:
        """Return (row, ours, published) for the rows that have both, of one measure."""
        if not (self.has_paper(column) and self.comparable(column)):
            return []
        found = [(r, self.ours(r, column), self.published(r, column)) for r in self.table.rows]
        return [(row, ours, theirs) for row, ours, theirs in found if ours and theirs is not None]

    @cached_property
    def headlines(self) -> list[Column]:
        """The headline columns with runs."""
        columns = [self.table.column(key) for key in self.table.headline]
        return [column for column in columns if self.run(column)]

    def runs_of(self, row: Row, columns: Iterable[Column]) -> list[Run]:
        """Return the runs of some cells of a row, sorted by name."""
        found: cells.Runs = {}
        for column in columns:
            if not column.mean_of:
                found |= cells.cell_runs(self.table, row, column, self.group.runs)
        return [run for _, run in sorted(found.items())]

    def option(self, name: str, scale: str = "", column: str = "") -> Any:
        """Return an option shared by all runs, or that of another scale's configuration.

        column: the key of a column whose value of an option of the table is returned instead.

        Raises: ValueError if runs differ in it, or if it is not set.
        """
        if column:
            chosen = {**self.table.options, **self.table.column(column).overrides}
            if name not in chosen:
                raise ValueError(f"table {self.table.name} has no option {name}")
            return chosen[name]
        if name == "break":
            return BREAK
        if scale:
            return _configured(self.root / self.table.scales[scale], name)
        values = {str(plain(v)): v for v in self._values(name)}
        if len(values) != 1 or None in values.values():
            raise ValueError(f"the runs of {self.name} do not share one value of {name}")
        return next(iter(values.values()))

    def _values(self, name: str) -> list[Any]:
        return [cells.option(run, name) for run in self.group.runs.values()]

    def _cell(self, row: Row, column: Column) -> paper.Cell | None:
        method = row.method.get(column.key, "") if isinstance(row.method, dict) else row.method
        if not column.paper or not method or not row.has(column):
            return None
        selectors = {**column.paper, **row.paper, "method": method}
        path = self.root / "results" / "paper" / selectors.pop("file")
        return paper.find_cell(path, selectors)


def sheets(root: Path, table: Table, runs: cells.Runs) -> list[Sheet]:
    """Return a sheet per comparable group of runs; none without runs."""
    return [Sheet(root, table, group) for group in cells.groups(table, runs)]


def _configured(path: Path, name: str) -> Any:
    """Return an option of a configuration; limits of a batch are those of an update."""
    value = _stated(path, name)
    return value * _stated(path, updates.FREQUENCY) if name in updates.LIMITS else value


def _stated(path: Path, name: str) -> Any:
    value = OmegaConf.select(OmegaConf.load(path), name)
    if value is None:
        raise ValueError(f"{path.name} does not set {name}")
    return value[0] if OmegaConf.is_list(value) and len(value) == 1 else value
