"""The numbers of the explorer: every cell of every table, with mean, deviation, seeds and paper."""

import json
import math
import re
from collections import Counter
from collections.abc import Collection
from typing import Any

import pandas as pd

from lrpe_fairseq.experiments.records.tables import Column, Table
from lrpe_fairseq.experiments.report.results import Results

CELL = ["table", "scale", "dataset", "method", "row", "attention", "column"]
"""Columns of ``Results.values`` that name a cell."""
FIELDS = (
    "table", "scale", "dataset", "attention", "method", "measure", "column", "mean", "deviation",
    "seeds", "paper", "context",
)  # fmt: skip
"""What a line has, in this order."""
METRICS = {
    "accuracy": "accuracy in %",
    "beyond-window": "nats per token",
    "bleu": "BLEU",
    "delta": "nats per token",
    "gain": "nats per token",
    "ppl": "perplexity",
}
"""What a number is, where the title of its column need not say it."""
PAIRED = re.compile(r"paired-(\d+)")
"""The protocol of curves by context: the same tokens for every context."""


def data(results: Results, pages: Collection[str] = ()) -> dict[str, Any]:
    """Return the tables, columns and lines that the explorer shows.

    pages: names of the site's pages; a table without one has an empty ``page``. Raises: ValueError
    for a mean that is not finite.
    """
    cells = aggregated(results.values)
    shown = sorted(set(cells["table"]), key=list(results.tables).index)
    return {
        "fields": list(FIELDS),
        "tables": {name: _of_table(results.tables[name], pages) for name in shown},
        "columns": {
            f"{table}/{key}": _of_column(results.tables[table].column(key))
            for table, key in dict.fromkeys(zip(cells["table"], cells["column"], strict=True))
        },
        "lines": [_line(results, cell) for cell in cells.itertuples(index=False)],
    }


def aggregated(values: pd.DataFrame) -> pd.DataFrame:
    """Return one line per cell: mean and deviation over its seeds, their number, and the paper's.

    The deviation of one seed and a missing published number are NaN.
    """
    groups = values.groupby(CELL, sort=False)
    value = groups["value"]
    parts = {"mean": value.mean(), "deviation": value.std(), "seeds": value.size()}
    return pd.DataFrame({**parts, "paper": groups["paper"].first()}).reset_index()


def _of_table(table: Table, pages: Collection[str]) -> dict[str, str]:
    page = f"results/{table.page or table.name}"
    return {"title": table.title, "page": page if page in pages else ""}


def _of_column(column: Column) -> dict[str, Any]:
    return {"better": column.better, "decimals": column.decimals}


def _line(results: Results, cell: Any) -> list[Any]:
    """Return the values of :data:`FIELDS`, None where there is none."""
    table = results.tables[cell.table]
    column = table.column(cell.column)
    if not math.isfinite(cell.mean):
        raise ValueError(f"{cell.table}, {cell.column}: the mean of {cell.row} is not finite")
    paper = _number(cell.paper) if column.comparable else None
    return [
        cell.table, cell.scale, cell.dataset or column.dataset, cell.attention, cell.method,
        measure(table, column), cell.column, _number(cell.mean), _number(cell.deviation),
        int(cell.seeds), paper, context(column),
    ]  # fmt: skip


def measure(table: Table, column: Column) -> str:
    """Return what a column measures, in words that no other column of its attention has."""
    length, word = context(column), METRICS.get(column.metric, "")
    named = f"perplexity at {length}" if length else column.title
    named += "" if word in named else f", {word}"
    titles = Counter((other.attention, other.title) for other in table.columns)
    return named if titles[column.attention, column.title] == 1 else f"{named} ({column.key})"


def context(column: Column) -> int | None:
    """Return the context of a column of a curve; None if the column belongs to no curve."""
    found = PAIRED.fullmatch(column.protocol)
    return int(found[1]) if found and column.metric == "ppl" else None


def _number(value: float) -> float | None:
    """Return a number with six significant digits, None for NaN."""
    return None if math.isnan(value) else float(f"{value:.6g}")


def script(content: dict[str, Any]) -> str:
    """Return JavaScript that sets ``RESULTS``; a script is also read from a local file."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"window.RESULTS = {text};\n"
