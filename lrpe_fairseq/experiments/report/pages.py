"""The pages of results/: one per table, and a CSV file with all of its numbers.

A page has a verdict per column, one picture, one table, and what it rests on. Tables with the key
``page`` share a page.
"""

import csv
import functools
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from scipy import stats

from lrpe_fairseq.experiments.records.layout import Table
from lrpe_fairseq.experiments.report import frame, markdown, plots
from lrpe_fairseq.experiments.report.frame import ColumnView, Results
from lrpe_fairseq.experiments.report.sheet import Sheet

FOLDER = "results"
TITLES = {"settings": "Settings: normalizers, decoders, precision and starts"}
FEWEST = 4
"""Smallest number of rows of a rank correlation, and of a picture against the paper."""
LEGEND = (
    "Values: mean±standard deviation; a number of seeds that differs is in brackets. Signs, "
    "against the baseline: ✓ better, ✗ worse, ≈ tied, ~ unstable, ? open "
    "([the rule](README.md#the-rule-of-orders))."
)


@functools.cache
def environment() -> Environment:
    """Return jinja's environment, in which an undefined name is an error."""
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    return Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True)


def rendered(template: str, **values: Any) -> str:
    """Return a page: the template with ``values``, wrapped, without runs of empty lines."""
    text = environment().get_template(template).render(**values)
    lines: list[str] = []
    for line in text.splitlines():
        if line.strip() or (lines and lines[-1]):
            lines.append(line.rstrip())
    return markdown.wrapped("\n".join(lines).strip()) + "\n"


@dataclass(frozen=True)
class GroupView:
    """What a page shows of a comparable group of runs."""

    scale: str
    dataset: str
    verdict: str
    picture: str
    caption: str
    grid: str


@dataclass(frozen=True)
class Section:
    """A table on a page."""

    title: str
    table: Table
    groups: list[GroupView]
    rests_on: str


def pages(root: Path) -> dict[str, str]:
    """Return path -> text of every page and CSV file of the tables."""
    results, found = frame.results(root), {}
    for name, tables in _by_page(results).items():
        sections = [_section(results, table) for table in tables]
        title = TITLES.get(name, tables[0].title)
        found[f"{FOLDER}/{name}.md"] = rendered(
            "table.md.j2", title=title, sections=sections, legend=LEGEND
        )
        found |= {f"{FOLDER}/{table.name}.csv": csv_of(results, table) for table in tables}
    return found


def pictures(root: Path) -> dict[str, Callable[[Path], None]]:
    """Return path -> function that draws the picture of every group."""
    results = frame.results(root)
    return {
        f"{FOLDER}/{picture(sheet)}": functools.partial(_draw, views=_headlines(results, sheet))
        for sheet in results.sheets
        if has_picture(results, sheet)
    }


def _by_page(results: Results) -> Mapping[str, list[Table]]:
    found: dict[str, list[Table]] = {}
    for table in results.tables.values():
        found.setdefault(table.page or table.name, []).append(table)
    return found


def _section(results: Results, table: Table) -> Section:
    own = results.sheets_of(table.name)
    return Section(table.title, table, [_group(results, s) for s in own], rests_on(results, table))


def _group(results: Results, sheet: Sheet) -> GroupView:
    views = _headlines(results, sheet)
    shown = has_picture(results, sheet)
    return GroupView(
        sheet.group.scale,
        sheet.group.dataset,
        verdict(sheet.table, views),
        picture(sheet) if shown else "",
        "Ours against the paper" if _against_paper(views) else "All rows",
        grid(sheet.table, views),
    )


def _headlines(results: Results, sheet: Sheet) -> list[ColumnView]:
    return [results.view(sheet, column) for column in sheet.headlines]


# --- the verdict ---------------------------------------------------------------------------------


def verdict(table: Table, views: Iterable[ColumnView]) -> str:
    """Return what the headline columns say, a sentence or two each."""
    views = list(views)
    if table.compare == "columns":
        lines = _changes(views)
    else:
        lines = [_rows(table, view) for view in views]
    return "\n".join(f"- {line}" for line in lines if line)


def _rows(table: Table, view: ColumnView) -> str:
    ranked = view.ranked()
    if not ranked:
        return f"{_place(view)}: no evaluation was finite."
    if view.is_open:
        return f"{_place(view)}, {_seeds(view)}: no order ({view.named(ranked[0])} to " + (
            f"{view.named(ranked[-1])})." + _correlated(view)
        )
    best, base = view.first(), table.baseline
    text = f"{_place(view)}, {_seeds(view)}: {view.named(best)} is best{_ties(view, best)}."
    if base in ranked and best != base:
        better, others = len(view.better_than(base)), len(ranked) - 1
        text += f" {better} of {others} are better than the baseline {view.named(base)}."
    return text + _correlated(view)


def _seeds(view: ColumnView) -> str:
    return f"{view.seeds} seed{'s' if view.seeds != 1 else ''}"


def _correlated(view: ColumnView) -> str:
    correlation = rank_correlation(view)
    return f" {correlation}" if correlation else ""


def _ties(view: ColumnView, best: str, most: int = 3) -> str:
    tied = view.tied_with(best)
    if not tied:
        return ", better than all others"
    names = [view.named(row) for row in tied[:most]]
    names += [f"{len(tied) - most} more"] if len(tied) > most else []
    return f", tied with {markdown.listed(names)}"


def rank_correlation(view: ColumnView) -> str:
    """Return Spearman's correlation with the published column in words; empty with few rows."""
    rows = [row for row in view.ranked() if row in view.paper]
    if len(rows) < FEWEST or not view.column.comparable:
        return ""
    ours, theirs = [view.mean(row) for row in rows], [view.paper[row] for row in rows]
    if len(set(ours)) == 1 or len(set(theirs)) == 1:
        return ""
    value = stats.spearmanr(ours, theirs).statistic
    return f"Rank correlation with the paper: {value:.2f} over {len(rows)} rows."


def _changes(views: list[ColumnView]) -> list[str]:
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
        lines += [f"{_place(first)}, against it: {'; '.join(found)}."] if found else []
    return lines


def _change(first: ColumnView, view: ColumnView) -> str:
    rows = [row for row in view.ranked() if row in first.rows and first.mean(row)]
    if not rows:
        return ""
    changes = sorted(100 * (view.mean(row) / first.mean(row) - 1) for row in rows)
    if len(rows) == 1:
        return f"{view.column.title} {changes[0]:+.1f} %"
    return f"{view.column.title} {changes[0]:+.1f} to {changes[-1]:+.1f} % ({len(rows)} rows)"


def _place(view: ColumnView) -> str:
    return f"{view.column.attention.capitalize()} attention, {view.column.title}"


# --- the table and the CSV file ------------------------------------------------------------------


def grid(table: Table, views: list[ColumnView]) -> str:
    """Return the headline columns as a Markdown table: ours, its sign, and the paper's number."""
    head, columns = ["method"], []
    for view in views:
        head.append(_heading(view, views))
        columns.append(functools.partial(_ours, table, view))
        if view.paper and view.column.comparable:
            head.append("paper")
            columns.append(functools.partial(_theirs, view))
    names = views[0].names if views else {}
    rows = [row for row in names if any(row in (*view.rows, *view.broken) for view in views)]
    lines = [[f"`{names[row]}`", *(column(row) for column in columns)] for row in rows]
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
    every, text = results.frame, io.StringIO()
    own = every[every.table == table.name] if len(every) else every
    writer = csv.writer(text, lineterminator="\n")
    head = ["scale", "dataset", "method", "row", "attention", "column"]
    writer.writerow([*head, "mean", "deviation", "seeds", "paper"])
    for key, part in own.groupby(head, sort=False) if len(own) else ():
        deviation = "" if len(part) < 2 else f"{part.value.std():.6g}"
        paper = part.paper.iloc[0]
        shown = "" if paper is None or paper != paper else f"{paper:g}"
        writer.writerow([*key, f"{part.value.mean():.6g}", deviation, len(part), shown])
    return text.getvalue()


# --- what it rests on ----------------------------------------------------------------------------


def rests_on(results: Results, table: Table) -> str:
    """Return scale, data, budget, machines and files of a table's runs in two sentences."""
    command = f"Command: `scripts/run_table.sh {table.name}`."
    own = results.sheets_of(table.name)
    if not own:
        return command
    runs = {name: run for sheet in own for name, run in sheet.group.runs.items()}
    machines = sorted({markdown.processors(run["hardware"]) for run in runs.values()})
    folders = markdown.listed([f"[runs/{name}](runs/{name})" for name in _folders(runs)])
    return (
        f"{len(runs)} runs on {markdown.listed(machines)}: {folders}; "
        f"[all numbers]({table.name}.csv). {command}"
    )


def _folders(runs: Mapping[str, Any]) -> list[str]:
    return sorted({name.split("/")[0] for name in runs})


# --- the picture ---------------------------------------------------------------------------------


def picture(sheet: Sheet) -> str:
    """Return the path of the picture of a group, from the pages' folder."""
    return f"figures/{sheet.name}.png"


def has_picture(results: Results, sheet: Sheet) -> bool:
    """True if a headline column has enough rows for a picture."""
    return any(len(view.ranked()) >= FEWEST for view in _headlines(results, sheet))


def _against_paper(views: Iterable[ColumnView]) -> list[ColumnView]:
    return [
        view
        for view in views
        if view.column.comparable and sum(row in view.paper for row in view.ranked()) >= FEWEST
    ]


def _draw(path: Path, views: list[ColumnView]) -> None:
    paper = _against_paper(views)
    if paper:
        plots.against_paper(path, paper)
    else:
        plots.dots(path, [view for view in views if len(view.ranked()) >= FEWEST])
