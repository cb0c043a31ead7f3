"""The table of all tables: each table and figure of the source documents, and what answers it here.

``results/paper/documents.yaml`` names them. Scale, rows, seeds and agreement come from the runs.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from lrpe_fairseq.experiments.records.tables import Column, Row
from lrpe_fairseq.experiments.report import markdown, orders
from lrpe_fairseq.experiments.report.columns import ColumnView
from lrpe_fairseq.experiments.report.published import read_paper
from lrpe_fairseq.experiments.report.results import Results
from lrpe_fairseq.experiments.report.sheets import Sheet

FILE = "results/paper/documents.yaml"
HEAD = ("document", "scale", "rows", "seeds", "agreement", "note")
PAPER = "paper"
"""The scale of the published settings, in every table that has one."""


def documents(root: Path) -> list[dict[str, Any]]:
    """Return the documents with their tables and figures; none in a checkout without the file."""
    path = root / FILE
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else []


def table_of_tables(results: Results) -> str:
    """Return a Markdown table with a line per table or figure and scale."""
    lines: list[Sequence[str]] = []
    for document in documents(results.root):
        lines.append([f"**{document['document']}**", *[""] * (len(HEAD) - 1)])
        for item in document["items"]:
            lines += lines_of(results, item)
    return markdown.table(HEAD, lines)


def lines_of(results: Results, item: dict[str, Any]) -> list[Sequence[str]]:
    """Return the lines of one table or figure."""
    name = f"{item['name']}: {item['shows']}"
    if "page" in item:
        return [[f"[{name}]({_link(item['page'])})", "", "", "", "", item["answer"]]]
    found = list(_groups(results, item))
    if not found:
        return [[name, "not run", "", "", "", item["missing"]]]
    lines = []
    for sheet, views in found:
        scale = f"`{sheet.scale}`"
        title = f"[{name}]({item['table']}.md)"
        known = _rows(views), _seeds(views), agreement(views)
        lines.append([title, scale, *known, missing(results, views, item)])
    return lines


def _link(page: str) -> str:
    """Return the link to a page of docs/ from results/."""
    return f"../{page}"


def _groups(results: Results, item: dict[str, Any]) -> Iterator[tuple[Sheet, list[ColumnView]]]:
    """Yield the scales of a table that have values in the columns of an item."""
    for sheet in results.sheets_of(item["table"]):
        known = {column.key for column in sheet.table.columns}
        keys = [key for key in item.get("columns", sheet.table.headlines()) if key in known]
        views = [view for key in keys if (view := results.view(sheet, key)).ranked()]
        if views:
            yield sheet, views


def _rows(views: Sequence[ColumnView]) -> str:
    return str(len(dict.fromkeys(row for view in views for row in view.rows)))


def _seeds(views: Sequence[ColumnView]) -> str:
    counts = [len(view.cells[row]) for view in views for row in view.ranked()]
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def agreement(views: Sequence[ColumnView]) -> str:
    """Return the rank correlations with the published columns, with their intervals."""
    texts = []
    for view in (view for view in views if view.paper and view.column.comparable):
        rows = [row for row in view.ranked() if row in view.paper]
        ours, theirs = [view.mean(row) for row in rows], [view.paper[row] for row in rows]
        found = orders.correlation(ours, theirs)
        text = f"{len(rows)} row{'s' * (len(rows) != 1)}, too few"
        if found is not None:
            text = f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"
        elif len(rows) >= orders.FEWEST_RANKED:
            text = "rows tie"
        texts.append(f"{_column(view, views)}{text}")
    return "; ".join(texts)


def _column(view: ColumnView, views: Sequence[ColumnView]) -> str:
    """Return what tells a column from the others of its line."""
    names = [f"{v.column.attention} {v.column.title}" for v in views]
    if len(names) == 1:
        return ""
    kinds = [v.column.attention for v in views]
    return f"{view.column.attention if len(set(kinds)) == len(kinds) else view.column.title} "


def missing(results: Results, views: Sequence[ColumnView], item: dict[str, Any]) -> str:
    """Return the published rows without a value here, and what the document's entry says."""
    lacking: dict[str, list[str]] = {}
    for view in views:
        if methods := published_only(results.root, view):
            lacking.setdefault(markdown.listed(methods), []).append(_column(view, views).strip())
    columns = {text: "" if len(names) == len(views) else f"{markdown.listed(names)}: "
               for text, names in lacking.items()}  # fmt: skip
    rows = [f"{before}{text}" for text, before in columns.items()]
    rows += _columns_not_run(results, item)
    at_paper = {view.scale for view in views} == {PAPER}
    return "; ".join([*rows, *([] if at_paper else [item["missing"]])])


def _columns_not_run(results: Results, item: dict[str, Any]) -> list[str]:
    """Return the titles of the columns of an item without a value at any scale, as one text."""
    shown = {view.column.key for _, views in _groups(results, item) for view in views}
    table = results.tables[item["table"]]
    columns = [table.column(key) for key in item.get("columns", []) if key not in shown]
    # Scales may have a column each for the same data.
    known = {table.column(key).title for key in shown}
    titles = dict.fromkeys(f"`{c.title}`" for c in columns if c.title not in known)
    return [markdown.listed(list(titles))] if titles else []


def published_only(root: Path, view: ColumnView) -> list[str]:
    """Return the methods of the document that have no value in a column here."""
    selectors = dict(view.column.paper)
    # Without published numbers, the rows that are named as in the document.
    if not selectors:
        lacking = [r for r in view.table.rows if r.has(view.column) and r.label not in view.rows]
        return [name for row in lacking if (name := _method(row, view.column))]
    path = root / "results" / "paper" / selectors.pop("file")
    ours = {_method(view.table.row(label), view.column) for label in view.rows}
    cells = (cell for cell in read_paper(path) if selectors.items() <= cell.items())
    return list(dict.fromkeys(c["method"] for c in cells if c["value"] and c["method"] not in ours))


def _method(row: Row, column: Column) -> str | None:
    """Return what the document calls a row in a column."""
    return row.method.get(column.key) if isinstance(row.method, dict) else row.method
