"""The trainings of a table. One training can fill several columns and cells of two tables."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lrpe_fairseq.encodings import canonical_name
from lrpe_fairseq.experiments.records.layout import Column, Row, Table, file_name, short

Evaluations = tuple[tuple[str, str], ...]
"""(split, protocol) pairs."""


@dataclass(frozen=True)
class Cell:
    """One model to train: a row under an attention type, and its options.

    options: every option of the table, with the value of the row and column. changed: those that
    differ from the table's own values. dataset: set if the columns are data sets; otherwise that of
    the configuration. name: for file names, such as ``Type2-linear``, followed by the data set of a
    column with its own configuration and the options that the column changes. config: the column's
    own configuration; empty for that of the scale. rates: the column's own learning rates; empty
    for those of the table. evaluations: what the columns that the model
    fills show.
    """

    label: str
    encoding: str
    attention: str
    options: tuple[tuple[str, Any], ...]
    changed: tuple[tuple[str, Any], ...]
    dataset: str
    name: str
    config: str = ""
    rates: tuple[float, ...] = ()
    evaluations: Evaluations = ()

    @property
    def recipe(self) -> tuple[Any, ...]:
        """Return a key that two cells of different tables share if one run fills both.

        Tables with one scale may have different configurations: those are compared separately.
        """
        return canonical_name(self.encoding), self.attention, self.changed, self.dataset

    def asked(self, evaluations: Evaluations) -> "Cell":
        """Return the cell with more evaluations."""
        return dataclasses.replace(self, evaluations=_distinct(self.evaluations + evaluations))


def cells(table: Table) -> list[Cell]:
    """Return the cells of ``table`` that need separate trainings, row by row."""
    found: dict[Cell, Evaluations] = {}
    for row in table.rows:
        for column in table.columns:
            if row.has(column) and not column.mean_of:
                cell = _cell(table, row, column)
                shown = ((column.split, column.protocol),) if column.split else ()
                found[cell] = found.get(cell, ()) + shown
    return [cell.asked(evaluations) for cell, evaluations in found.items()]


def _distinct(pairs: Iterable[tuple[str, str]]) -> Evaluations:
    return tuple(dict.fromkeys(pairs))


def _cell(table: Table, row: Row, column: Column) -> Cell:
    chosen = {**table.options, **row.overrides, **column.overrides}
    options = tuple(sorted(chosen.items(), key=lambda option: short(option[0])))
    changed = tuple((k, v) for k, v in options if v != table.options[k])
    named = [column.dataset] if column.config else []
    named += [f"{short(k)}={v}" for k, v in changed if k not in row.overrides]
    name = file_name("-".join([row.label, column.attention, *named]))
    return Cell(
        row.label,
        row.encoding,
        column.attention,
        options,
        changed,
        column.dataset,
        name,
        column.config,
        tuple(column.rates),
    )
