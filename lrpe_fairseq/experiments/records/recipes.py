"""The trainings of a table. One training can fill several columns and cells of two tables."""

from dataclasses import dataclass
from typing import Any

from lrpe_fairseq.experiments.records.layout import Column, Row, Table, file_name


@dataclass(frozen=True)
class Cell:
    """One model to train: a row under an attention type, with the options that differ.

    dataset: set if the columns are data sets; otherwise that of the configuration. name: for file
    names, such as ``Type2-linear``, followed by the options that the column changes.
    """

    label: str
    encoding: str
    attention: str
    changed: tuple[tuple[str, Any], ...]
    dataset: str
    name: str

    @property
    def recipe(self) -> tuple[Any, ...]:
        """Return a key that two cells of different tables share if one run fills both."""
        return self.encoding, self.attention, self.changed, self.dataset


def cells(table: Table) -> list[Cell]:
    """Return the cells of ``table`` that need separate trainings, row by row."""
    found: dict[Cell, None] = {}
    for row in table.rows:
        for column in table.columns:
            if row.has(column) and not column.mean_of:
                found[_cell(table, row, column)] = None
    return list(found)


def evaluations(table: Table) -> tuple[tuple[str, str], ...]:
    """Return the (split, protocol) pairs that the columns of ``table`` show."""
    pairs = ((column.split, column.protocol) for column in table.columns if column.split)
    return tuple(dict.fromkeys(pairs))


def _cell(table: Table, row: Row, column: Column) -> Cell:
    options = {**table.options, **row.overrides, **column.overrides}
    changed = tuple(sorted((k, v) for k, v in options.items() if v != table.options[k]))
    named = [f"{k}={v}" for k, v in changed if k not in row.overrides]
    name = file_name("-".join([row.label, column.attention, *named]))
    return Cell(row.label, row.encoding, column.attention, changed, column.dataset, name)
