"""The published numbers of ``results/paper``."""

import csv
import functools
import math
from collections.abc import Mapping
from pathlib import Path

from lrpe_fairseq.experiments.records.tables import Column, Row, Table


@functools.lru_cache(maxsize=64)
def read_paper(path: Path) -> tuple[dict[str, str], ...]:
    """Return the cells of a file of ``results/paper``, as printed, in file order."""
    with open(path, newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def find_cell(path: Path, selectors: Mapping[str, str]) -> dict[str, str]:
    """Return the cell of ``path`` whose columns have the values of ``selectors``.

    Raises: ValueError if not exactly one cell matches.
    """
    cells = [cell for cell in read_paper(path) if selectors.items() <= cell.items()]
    # Two matches would be a coin toss between two published numbers.
    if len(cells) != 1:
        raise ValueError(f"{path.name} has {len(cells)} cells with {selectors} instead of one")
    return cells[0]


def published(root: Path, table: Table, row: Row, columns: list[Column]) -> float | None:
    """Return the mean of the published numbers of a row in ``columns``; None if one is missing."""
    values = []
    for column in columns:
        method = row.method.get(column.key, "") if isinstance(row.method, dict) else row.method
        # A mean over columns needs all of them.
        if not column.paper or not method or not row.has(column):
            return None
        selectors = {**column.paper, **row.paper, "method": method}
        path = root / "results" / "paper" / selectors.pop("file")
        values.append(find_cell(path, selectors)["value"])
    return math.fsum(map(float, values)) / len(values) if all(values) else None
