"""The pages of results/: one per table, and a CSV file with all of its numbers.

A page has a verdict per column, one picture, one table, and what it rests on. Tables with the key
``page`` share a page.
"""

import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from lrpe_fairseq.experiments.records.files import read_json
from lrpe_fairseq.experiments.records.layout import ANY, Table
from lrpe_fairseq.experiments.report import frame, markdown, plots, speed
from lrpe_fairseq.experiments.report.frame import ColumnView, Results, Sheet, Wanted

FOLDER = "results"
FEWEST = 4
"""Smallest number of rows of a rank correlation, and of a picture against the paper."""
CELL = ["scale", "dataset", "method", "row", "attention", "column"]
"""Columns of the frame that name a cell."""


def pages(root: Path) -> dict[str, str]:
    """Return path -> text of every page and CSV file of the tables with runs."""
    results, found = frame.results(root), {}
    by_page: dict[str, list[Table]] = {}
    for table in (t for t in results.tables.values() if results.sheets_of(t.name)):
        by_page.setdefault(table.page or table.name, []).append(table)
        found[f"{FOLDER}/{table.name}.csv"] = csv_of(results, table)
    for name, tables in by_page.items():
        found[f"{FOLDER}/{name}.md"] = markdown.rendered(
            "table.md.j2",
            title=tables[0].title if len(tables) == 1 else name.capitalize(),
            sections=[_section(results, table) for table in tables],
            clamped=speed.clamped(root),
            counts=functools.partial(read_json, root / FOLDER / "ngrams.json"),
        )
    return found


def pictures(root: Path, wanted: Wanted = lambda sheet: True) -> dict[str, Callable[[Path], None]]:
    """Return path -> function that draws the picture of every group, or of the wanted ones."""
    results = frame.results(root)
    every = [(sheet, results.headlines(sheet)) for sheet in results.sheets if wanted(sheet)]
    return {
        f"{FOLDER}/{picture(sheet)}": functools.partial(_draw, views=views)
        for sheet, views in every
        if has_picture(views)
    }


def _section(results: Results, table: Table) -> dict[str, Any]:
    """Return what a page shows of a table."""
    sheets = results.sheets_of(table.name)
    runs = {name: run for sheet in sheets for name, run in sheet.runs.items()}
    machines = sorted({markdown.processors(run["hardware"]) for run in runs.values()})
    folders = sorted({name.split("/")[0] for name in runs})
    return {
        "table": table,
        "groups": [_group(x, views) for x in sheets if (views := results.headlines(x))],
        "runs": len(runs),
        "hours": math.fsum(run["wall_seconds"] for run in runs.values()) / 3600,
        "machines": markdown.listed(machines),
        "folders": markdown.listed([f"[runs/{name}](runs/{name})" for name in folders]),
    }


def _group(sheet: Sheet, views: list[ColumnView]) -> dict[str, str]:
    """Return what a page shows of a comparable group of runs."""
    return {
        "scale": sheet.scale,
        "dataset": sheet.dataset,
        "verdict": verdict(sheet.table, views),
        "picture": picture(sheet) if has_picture(views) else "",
        "caption": "Ours against the paper" if _against_paper(views) else "Values",
        "grid": grid(sheet.table, views),
    }


# --- the verdict ---------------------------------------------------------------------------------


def verdict(table: Table, views: Iterable[ColumnView]) -> str:
    """Return what the headline columns say, a sentence or two each."""
    rows = table.compare == "rows"
    several = (view for view in views if len(view.ranked()) != 1)  # the table says one
    lines = [_rows(table, view) for view in several] if rows else _changes(views)
    return "\n".join(f"- {line}" for line in lines if line)


def _rows(table: Table, view: ColumnView) -> str:
    ranked = view.ranked()
    if not ranked:
        return f"{_place(view)}: no evaluation was finite."
    if view.is_open:
        span = f"{view.named(ranked[0])} to {view.named(ranked[-1])}"
        return f"{_place(view)}, {_seeds(view)}: no order ({span}).{rank_correlation(view)}"
    best, base = view.first(), table.baseline
    text = f"{_place(view)}, {_seeds(view)}: {view.named(best)} is best{_ties(view, best)}."
    stable = [row for row in ranked if row not in view.unstable]
    if base in stable and best != base:
        better, others = len(view.better_than(base)), len(stable) - 1
        text += f" Better than the baseline {view.named(base)}: {better} of {others}."
    return text + _not_ordered(view) + rank_correlation(view)


def _seeds(view: ColumnView) -> str:
    return f"{view.seeds} seed{'s' if view.seeds != 1 else ''}"


def _ties(view: ColumnView, best: str) -> str:
    if tied := view.tied_with(best):
        return f", tied with {_some([view.named(row) for row in tied])}"
    return ", better than all others" + (" that are ordered" if view.unstable else "")


def _not_ordered(view: ColumnView) -> str:
    """Name the rows that the rule of orders leaves out; empty if there are none."""
    rows = [row for row in view.ranked() if row in view.unstable]
    base, whose = view.table.baseline, "its" if len(rows) == 1 else "their"
    names = [f"the baseline {view.named(row)}" if row == base else view.named(row) for row in rows]
    return f" Not ordered, because {whose} seeds vary too much: {_some(names)}." if rows else ""


def _some(names: list[str], most: int = 3) -> str:
    """Join the first names, and say how many more there are."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return markdown.listed(names[:most] + more)


def rank_correlation(view: ColumnView) -> str:
    """Return Spearman's correlation with the published column in words; empty with few rows."""
    rows = [row for row in view.ranked() if row in view.paper]
    if len(rows) < FEWEST or not view.column.comparable:
        return ""
    ours, theirs = [view.mean(row) for row in rows], [view.paper[row] for row in rows]
    if len(set(ours)) == 1 or len(set(theirs)) == 1:
        return ""
    value = stats.spearmanr(ours, theirs).statistic
    return f" Rank correlation with the paper: {value:.2f} over {len(rows)} rows."


def _changes(views: Iterable[ColumnView]) -> list[str]:
    """Return by how much columns differ from the first of their attention type and data."""
    groups: dict[tuple[str, str, str], list[ColumnView]] = {}
    for view in views:
        key = (view.column.attention, view.column.dataset, view.column.metric)
        groups.setdefault(key, []).append(view)
    lines = []
    for first, *others in groups.values():
        if len(first.rows) == 1:  # the table says it
            continue
        found = [text for view in others if (text := _change(first, view))]
        lines += [f"{_place(first, 'relative to ')}: {'; '.join(found)}."] if found else []
    return lines


def _change(first: ColumnView, view: ColumnView) -> str:
    rows = [row for row in view.ranked() if row in first.rows and first.mean(row)]
    if not rows:
        return ""
    changes = sorted(100 * (view.mean(row) / first.mean(row) - 1) for row in rows)
    return f"{view.column.title} {changes[0]:+.1f} to {changes[-1]:+.1f} % ({len(rows)} rows)"


def _place(view: ColumnView, before: str = "") -> str:
    kind, title = view.column.attention, before + view.column.title
    return title.capitalize() if kind == ANY else f"{kind.capitalize()} attention, {title}"


# --- the table and the CSV file ------------------------------------------------------------------


def grid(table: Table, views: list[ColumnView]) -> str:
    """Return the headline columns as a Markdown table: ours, its sign, and the paper's number."""
    names = views[0].names if views else {}
    rows = [row for row in names if any(row in (*view.rows, *view.broken) for view in views)]
    columns = [["method", *(f"`{names[row]}`" for row in rows)]]
    for view in views:
        columns.append([_heading(view, views), *(_ours(table, view, row) for row in rows)])
        if view.paper and view.column.comparable:
            columns.append(["paper", *(_theirs(view, row) for row in rows)])
    head, *lines = zip(*columns, strict=True)
    return markdown.table(head, lines, numbers=True) if lines else ""


def _heading(view: ColumnView, views: list[ColumnView]) -> str:
    several = len({v.column.attention for v in views}) > 1
    return f"{view.column.attention}, {view.column.title}" if several else view.column.title


def _ours(table: Table, view: ColumnView, row: str) -> str:
    if row in view.broken:
        return "not finite"
    if row not in view.rows:
        return ""
    base = table.baseline if table.compare == "rows" else ""
    sign = view.sign(row, base) if base in view.rows else ""
    return f"{view.text(row)} {sign}".strip()


def _theirs(view: ColumnView, row: str) -> str:
    decimals = view.column.decimals
    return markdown.fixed(view.paper[row], decimals) if row in view.paper else ""


def csv_of(results: Results, table: Table) -> str:
    """Return every number of a table: one line per scale, data set, row and column."""
    own = results.frame[results.frame.table == table.name].groupby(CELL, sort=False)
    value, paper = own["value"], own["paper"].first()
    lines = {"mean": value.mean(), "deviation": value.std(), "seeds": value.size(), "paper": paper}
    every = pd.DataFrame(lines).reset_index()
    return every.to_csv(index=False, float_format="%.6g", lineterminator="\n")


# --- the picture ---------------------------------------------------------------------------------


def picture(sheet: Sheet) -> str:
    """Return the path of the picture of a group, from the pages' folder."""
    return f"figures/{sheet.name}.png"


def has_picture(views: Iterable[ColumnView]) -> bool:
    """True if a headline column has enough rows for a picture."""
    return any(len(view.ranked()) >= FEWEST for view in views)


def _against_paper(views: Iterable[ColumnView]) -> list[ColumnView]:
    return [
        view
        for view in views
        if view.column.comparable
        and not (view.table.page and view.table.compare == "columns")  # its columns are the subject
        and sum(row in view.paper for row in view.ranked()) >= FEWEST
    ]


def _draw(path: Path, views: list[ColumnView]) -> None:
    """Draw our numbers over the published ones, or else all rows of every column."""
    if paper := _against_paper(views):
        plots.points(path, [_panel_against_paper(view) for view in paper])
    else:
        plots.dots(path, [_panel(view) for view in views if len(view.ranked()) >= FEWEST])


def _panel(view: ColumnView) -> plots.Panel:
    rows = {view.names[row]: list(view.cells[row].values()) for row in view.ranked()}
    return plots.Panel(_place(view), plots.axis(view), rows, kind=view.kind)


def _panel_against_paper(view: ColumnView) -> plots.Panel:
    ranked = [row for row in view.ranked() if row in view.paper]
    rows = {view.names[row]: (view.paper[row], view.mean(row)) for row in ranked}
    x = f"paper, {view.column.better} is better"
    return plots.Panel(_place(view), x, rows, f"ours: {plots.axis(view)}", view.kind)
