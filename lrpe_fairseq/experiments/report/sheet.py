"""One table at one scale and data set: our numbers and the published ones, cell by cell."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lrpe_fairseq.experiments.records.layout import Column, Row, Table
from lrpe_fairseq.experiments.report import cells, paper
from lrpe_fairseq.experiments.report.cells import Group, Scores


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

    def ours(self, row: Row, column: Column) -> Scores:
        """Return our value of a cell per seed; empty without runs."""
        key = (row.label, column.key)
        if key not in self._found:
            self._found[key] = cells.scores(self.table, row, column, self.group.runs)
        return self._found[key]

    def published(self, row: Row, column: Column) -> float | None:
        """Return the published number; a mean column averages its published columns."""
        if not column.mean_of:
            cell = self._cell(row, column)
            return paper.number(cell) if cell else None
        parts = [self.published(row, self.table.column(key)) for key in column.mean_of]
        return None if None in parts else math.fsum(parts) / len(parts)

    def run(self, column: Column) -> bool:
        """True if any cell of the column has runs."""
        return any(self.ours(row, column) for row in self.table.rows)

    @cached_property
    def headlines(self) -> list[Column]:
        """The headline columns with runs."""
        columns = [self.table.column(key) for key in self.table.headline]
        return [column for column in columns if self.run(column)]

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
