"""The published numbers: ``results/paper/*.csv``, cell by cell as printed."""

import csv
from pathlib import Path

Cell = dict[str, str]


def read_table(path: Path) -> tuple[Cell, ...]:
    """The cells of one published table, in the order of the file; every value is a string."""
    with open(path, newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def find_cell(path: Path, selectors: dict[str, str]) -> Cell:
    """The one cell of ``path`` whose columns have the values of ``selectors``.

    Raises: ValueError if the file has no such column, no such cell, or several.
    """
    cells = read_table(path)
    unknown = set(selectors) - set(cells[0])
    if unknown:
        raise ValueError(f"{path.name} has no column {', '.join(sorted(unknown))}")
    found = [c for c in cells if all(c[name] == value for name, value in selectors.items())]
    if len(found) != 1:
        raise ValueError(f"{path.name} has {len(found)} cells with {selectors}, not one")
    return found[0]


def number(cell: Cell) -> float | None:
    """The value of ``cell``; None where the paper prints a dash."""
    return float(cell["value"]) if cell["value"] else None
