"""The published numbers in ``results/paper/*.csv``, as printed."""

import csv
from pathlib import Path

Cell = dict[str, str]


def read_table(path: Path) -> tuple[Cell, ...]:
    """Return the cells of a published table in file order; all values are strings."""
    with open(path, newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def find_cell(path: Path, selectors: dict[str, str]) -> Cell:
    """Return the cell of ``path`` whose columns have the values of ``selectors``.

    Raises: ValueError if a column is unknown, or if not exactly one cell matches.
    """
    cells = read_table(path)
    unknown = set(selectors) - set(cells[0])
    if unknown:
        raise ValueError(f"{path.name} has no column {', '.join(sorted(unknown))}")
    found = [c for c in cells if all(c[name] == value for name, value in selectors.items())]
    if len(found) != 1:
        raise ValueError(f"{path.name} has {len(found)} cells with {selectors} instead of one")
    return found[0]


def number(cell: Cell) -> float | None:
    """Return the value of ``cell``; None if the paper prints a dash."""
    return float(cell["value"]) if cell["value"] else None
