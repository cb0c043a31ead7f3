"""The pages of results/: one per table, and a CSV file with all of its numbers.

A page has a verdict per column, one picture, one table, and what it rests on. Tables with the key
``page`` share a page.
"""

import functools
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from lrpe_fairseq.experiments.records import precision
from lrpe_fairseq.experiments.records.runs import Run, machines_of
from lrpe_fairseq.experiments.records.tables import ANY, Table
from lrpe_fairseq.experiments.report import (
    absent,
    columns,
    constants,
    contrasts,
    curves,
    drift,
    maps,
    markdown,
    orders,
    pairs,
    plots,
    selection,
    speed,
    yardsticks,
)
from lrpe_fairseq.experiments.report.columns import ColumnView
from lrpe_fairseq.experiments.report.results import Results, results_of
from lrpe_fairseq.experiments.report.sheets import Sheet, Wanted

FOLDER = "results"
FEWEST = 4
"""Smallest number of rows of a picture."""
LINES = 3
"""Columns without a verdict from which one line names them all."""
ORDERED = 0.2
"""A column orders its rows if at least this share of their pairs has an order."""
CELL = ["scale", "dataset", "method", "row", "attention", "column"]
"""Columns of the frame that name a cell."""
NUMBER = re.compile(r"\d+(,\d{3})*")
"""Title of a column that is a number: of updates, or of tokens of context."""
BUDGET = "optimization.max_update"
"""The option that a table lists if its columns have trainings of different lengths."""
VERDICT = ["verdict", "difference", "low", "high"]
"""Columns of a CSV file on a cell against the baseline, in %, points or BLEU."""


def pages(root: Path) -> dict[str, str]:
    """Return path -> text of every page and CSV file of the tables with runs."""
    results = results_of(root)
    texts = {}
    by_page: dict[str, list[Table]] = {}
    for table in (t for t in results.tables.values() if results.sheets_of(t.name)):
        # Before anything is shown: a row with another rate than its selection found is no fair
        # row.
        selection.require(results, table)
        # Small tables of settings share a page.
        by_page.setdefault(table.page or table.name, []).append(table)
        texts[f"{FOLDER}/{table.name}.csv"] = csv_of(results, table)
    for name, tables in by_page.items():
        views = [
            view for t in tables for s in results.sheets_of(t.name) for view in results.headlines(s)
        ]
        main = results.tables.get(name)
        # The table of the page comes before those that share it.
        tables.sort(key=lambda table: table.name != name)
        texts[f"{FOLDER}/{name}.md"] = markdown.rendered(
            "table.md.j2",
            title=main.title if main else name.capitalize(),
            sections=[_section(results, table) for table in tables],
            clamped=speed.clamped(root),
            pairs=pairs.section(root),
            drift=drift.PICTURE if drift.measured(root) else "",
            signs=any(table.compare == "rows" for table in tables),
            ngrams=any(view.yardstick for view in views),
            provisional=any(view.table.compare == "rows" and view.provisional for view in views),
        )
    return texts


def pictures(root: Path, wanted: Wanted = lambda sheet: True) -> dict[str, Callable[[Path], None]]:
    """Return path -> function that draws the picture of every group, or of the wanted ones."""
    results = results_of(root)
    every = [(sheet, results.headlines(sheet)) for sheet in results.sheets if wanted(sheet)]
    drawn = {
        f"{FOLDER}/{picture(sheet)}": functools.partial(_draw, views=views)
        for sheet, views in every
        # A picture of two rows says less than the table.
        if has_picture(views) and not _without_verdicts(sheet.table, views)
    }
    for sheet, _ in every:
        drawn |= maps.pictures(results, sheet, FOLDER) | curves.pictures(results, sheet, FOLDER)
    return drawn


def _section(results: Results, table: Table) -> dict[str, Any]:
    """Return what a page shows of a table."""
    sheets = results.sheets_of(table.name)
    runs = {name: run for sheet in sheets for name, run in sheet.runs.items()}
    folders = sorted({name.split("/")[0] for name in runs})
    views = [view for sheet in sheets for view in results.headlines(sheet)]
    brief = _without_verdicts(table, views)
    groups = [] if brief else sheets
    return {
        "table": table,
        "brief": brief,
        "groups": [_group(results, x, views) for x in groups if (views := results.headlines(x))],
        "runs": len(runs),
        "changed": sum(run["commit"].endswith("-dirty") for run in runs.values()),
        "rates": selection.other_rates(results, table),
        "used": _used(sheets),
        "folders": markdown.listed([f"[runs/{name}](runs/{name})" for name in folders]),
        "commands": markdown.listed([f"`{x}`" for x in _commands(table, sheets)]),
    }


def _without_verdicts(table: Table, views: Iterable[ColumnView]) -> bool:
    """True for a table on the page of another one whose rows have no verdict: it gets a line."""
    return bool(table.page) and table.compare == "rows" and all(view.is_open for view in views)


def _used(sheets: list[Sheet]) -> str:
    """Return the hours of the runs of a section, and the machines of each scale."""
    by_scale: dict[str, dict[str, Run]] = {}
    for sheet in sheets:
        by_scale.setdefault(sheet.scale, {}).update(sheet.runs)
    every = {name: run for runs in by_scale.values() for name, run in runs.items()}
    hours = f"{math.fsum(run['wall_seconds'] for run in every.values()) / 3600:.1f} h"
    if len(by_scale) == 1:
        return f"({hours}) on {_machines(every.values())}"
    parts = [f"`{s}`: {len(runs)} on {_machines(runs.values())}" for s, runs in by_scale.items()]
    return f"({'; '.join([hours, *parts])})"


def _machines(runs: Iterable[Run]) -> str:
    """Return the processors that trained and evaluated runs."""
    every = (machine for run in runs for machine in machines_of(run))
    return markdown.listed(sorted({markdown.processors(one["hardware"]) for one in every}))


def _commands(table: Table, sheets: list[Sheet]) -> list[str]:
    """Return the command of each scale that a page shows; one scale is that of the command."""
    usual = "small" if "small" in table.scales else next(iter(table.scales))
    commands = []
    for scale in dict.fromkeys(sheet.scale for sheet in sheets):
        base, numbers = precision.parted(scale)
        words = ["scripts/run_table.sh", table.name]
        words += [] if base == usual else ["--scale", base]
        commands.append(" ".join([*words, *(["--precision", numbers] if numbers else [])]))
    return commands


def _group(results: Results, sheet: Sheet, views: list[ColumnView]) -> dict[str, Any]:
    """Return what a page shows of a comparable group of runs."""
    return {
        "scale": sheet.scale,
        "dataset": sheet.dataset,
        "verdict": verdict(sheet.table, views),
        "picture": picture(sheet) if has_picture(views) else "",
        "caption": _caption(views),
        "note": _note(sheet, views),
        "grid": grid(sheet.table, views),
        "contrasts": contrasts.section(results, sheet),
        "maps": maps.names(results, sheet),
        "curves": curves.names(results, sheet),
        "ends": curves.ends(results, sheet),
        "absent": absent.text(results, sheet),
        "tests": maps.tests(results, sheet),
        "constants": constants.section(results, sheet),
    }


# --- the verdict ---------------------------------------------------------------------------------


def verdict(table: Table, views: Iterable[ColumnView]) -> str:
    """Return what the headline columns say, a sentence or two each."""
    views = list(views)
    if table.compare != "rows":
        lines = _changes(views)
    else:
        several = [view for view in views if len(view.ranked()) != 1]  # the table says one
        without = [view for view in several if _says_nothing(view)]
        without = without if len(without) >= LINES else []
        lines = [_rows(table, view) for view in several if view not in without]
        if without:
            seeds = markdown.listed(list(dict.fromkeys(view.seed_span for view in without)))
            lines.append(f"{seeds}, no verdicts: {_columns(without, views)}.")
    return "\n".join(f"- {line}" for line in [*lines, *_of_ngrams(views)] if line)


def _says_nothing(view: ColumnView) -> bool:
    """True if a column has values and no verdict, and no rank correlation with a paper."""
    open_ = view.is_open and view.kind != "plain"
    return bool(open_ and view.ranked() and not rank_correlation(view))


def _rows(table: Table, view: ColumnView) -> str:
    ranked = view.ranked()
    if not ranked:
        return f"{_place(view)}: no evaluation was finite."
    if view.kind == "plain":
        return ""
    # With one seed there is a span, and no order.
    if view.is_open:
        span = f"{view.named(ranked[0])} to {view.named(ranked[-1])}"
        return f"{_place(view)}, {view.seed_span}: no verdicts ({span}).{rank_correlation(view)}"
    # Not "the best": seeds do not tell these apart.
    level = [view.counted(row) for row in view.unbeaten if row not in view.unordered]
    sure = ", provisional" if view.provisional else ""
    text = f"{_place(view)}, {view.seed_span}{sure}. Unbeaten: {_some(level)}"
    # A row that failed for some seeds would read as one of the best.
    lost = _some([view.counted(row) for row in view.unordered])
    best = view.names[view.unbeaten[0]]
    text += f"; seeds differ too much or are too few to order `{best}` and {lost}." if lost else "."
    return text + _against_baseline(view, table.baseline) + _ordered(view) + rank_correlation(view)


def _against_baseline(view: ColumnView, base: str) -> str:
    """Count the verdicts against the baseline; say what the unresolved ones could have shown."""
    if base not in view.ranked() or len(view.ranked()) < 2:
        return ""
    verdicts = view.against(base)
    # In the order of VERDICTS.
    counts = [f"{len(rows)} {name}" for name, rows in verdicts.items() if rows]
    # What would have shown matters as much as what has: it says how much the page knows.
    unresolved = (view.verdict(row, base) for row in verdicts[orders.UNRESOLVED])
    visible = [
        verdict.visible
        for verdict in unresolved
        if verdict.known and verdict.visible < columns.WIDE
    ]
    text = f" Against the baseline {view.named(base)}: {markdown.listed(counts)}."
    which = "one" if len(verdicts[orders.UNRESOLVED]) == 1 else "ones"
    return text + (f" {_unresolved(visible, view, which)}" if visible else "")


def _ordered(view: ColumnView) -> str:
    """Say how many pairs of rows have an order: of the paper's, or of all where few have one.

    A correlation with the paper means little where hardly a pair has an order. The baseline is left
    out.
    """
    rows = [row for row in view.ranked() if row != view.table.baseline]
    printed = [row for row in rows if row in view.paper and view.column.comparable]
    of_paper = len(printed) >= FEWEST
    chosen = printed if of_paper else rows
    pairs_ = list(itertools.combinations(chosen, 2))
    known = sum(view.mark(a, b) in (orders.BETTER, orders.WORSE) for a, b in pairs_)
    few = known < ORDERED * len(pairs_)
    if len(chosen) < FEWEST or not (of_paper or few):
        return ""
    whose = "the paper's other rows" if of_paper else "other rows"
    verb = "has" if known < 2 else "have"
    text = f" Of the {len(pairs_)} pairs of {whose}, {known or 'none'} {verb} an order."
    return text + (" The column orders hardly any of them." if few else "")


def _unresolved(visible: list[float], view: ColumnView, which: str) -> str:
    unit = orders.UNITS[view.kind].name
    low, high = (columns.size(value, view.kind) for value in (min(visible), max(visible)))
    span = low if low == high else f"{low} to {high}"
    return f"For the unresolved {which}, {span}{' ' * bool(unit)}{unit} would have shown."


def _some(names: list[str], most: int = 3) -> str:
    """Join the first names, and say how many more there are."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return markdown.listed(names[:most] + more)


def rank_correlation(view: ColumnView) -> str:
    """Return Spearman's correlation with the published column in words; empty with few rows."""
    if not view.column.comparable:
        return ""
    rows = [row for row in view.ranked() if row in view.paper]
    correlation = orders.correlation([view.mean(r) for r in rows], [view.paper[r] for r in rows])
    if correlation is None:
        return ""
    return (
        f" Rank correlation with the paper: {correlation.value:.2f} "
        f"[{correlation.low:.2f}, {correlation.high:.2f}] over {correlation.rows} rows."
    )


def _of_ngrams(views: Iterable[ColumnView]) -> list[str]:
    """Say which columns have no row, or not all rows, better than n-grams of the same tokens.

    Models that are better in another column, such as at the training length, have learned more
    than n-grams and fail in this one; nothing is said about why.
    """
    known = [view for view in views if view.yardstick and view.ranked()]
    # Failing beyond training is no sign that n-grams are all that was learned.
    learned = {_models(view) for view in known if view.beats_ngrams}
    groups: dict[tuple[float, bool], list[ColumnView]] = {}
    for view in known:
        if not view.beats_ngrams:
            # Columns of equal n-grams share a sentence.
            key = view.yardstick["ppl"], _models(view) in learned
            groups.setdefault(key, []).append(view)
    lines = _partly_learned(known)
    for (value, fails), members in groups.items():
        where = "" if len(members) == len(known) else f" in {_columns(members, known)}"
        order = members[0].yardstick["order"]
        ngrams = f"{order}-grams of the tokens that the models have read ({value:.2f})"
        shown = "its order shows" if len(members) == 1 else "the orders show"
        rest = "." if fails else f": {shown} how fast models learn n-grams."
        lines.append(f"**N-grams.** No row{where} is better than {ngrams}{rest}")
    return lines


def _partly_learned(views: list[ColumnView]) -> list[str]:
    """Count the rows that are better than n-grams, in the first column of each kind of models."""
    first: dict[tuple[str, tuple[str, ...]], ColumnView] = {}
    for view in views:
        first.setdefault(_models(view), view)
    lines = []
    for view in first.values():
        rows, value = view.ranked(), view.yardstick["ppl"]
        better = sum(view.mean(row) < value for row in rows)
        if 0 < better < len(rows):
            lines.append(
                f"**N-grams.** `{_heading(view, views)}`: {better} of {len(rows)} rows are better "
                f"than {view.yardstick['order']}-grams of the tokens that the models have read "
                f"({value:.2f})."
            )
    return lines


def _models(view: ColumnView) -> tuple[str, tuple[str, ...]]:
    """Return what the models of a column have in common: attention and training."""
    return view.column.attention, view.key.training


def _columns(some: list[ColumnView], every: list[ColumnView]) -> str:
    return markdown.listed([f"`{_heading(view, every)}`" for view in some])


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
        changes = [text for view in others if (text := _change(first, view))]
        place = f"{_place(first, 'relative to ')}, {_usual([first, *others])}"
        lines += [f"{place}: {'; '.join(changes)}."] if changes else []
    return lines


def _usual(views: list[ColumnView]) -> str:
    """Return the number of seeds of most cells as text, such as "2 seeds"."""
    seeds = _usual_seeds(views)
    return f"{seeds} seed{'s' * (seeds > 1)}"


def _usual_seeds(views: Iterable[ColumnView]) -> int:
    return statistics.mode(len(view.cells[row]) for view in views for row in view.rows)


def _change(first: ColumnView, view: ColumnView) -> str:
    changes = sorted(
        change for row in view.ranked() if (change := _of_seeds(first, view, row)) is not None
    )
    if not changes:
        return ""
    if len(changes) == 1:
        return f"{view.column.title} {changes[0]:+.1f} % (1 row)"
    span = f"{changes[0]:+.1f} to {changes[-1]:+.1f} %"
    return f"{view.column.title} {span} ({len(changes)} rows)"


def _of_seeds(first: ColumnView, view: ColumnView, row: str) -> float | None:
    """Return the change of a row's mean over the seeds that both columns have, in percent."""
    if row not in first.rows:
        return None
    seeds = first.cells[row].keys() & view.cells[row].keys()
    before = math.fsum(first.cells[row][seed] for seed in seeds)
    after = math.fsum(view.cells[row][seed] for seed in seeds)
    return 100 * (after / before - 1) if before else None


def _place(view: ColumnView, before: str = "") -> str:
    kind = view.column.attention
    title = before + view.column.title
    return title.capitalize() if kind == ANY else f"{kind.capitalize()} attention, {title}"


# --- the table and the CSV file ------------------------------------------------------------------


def grid(table: Table, views: list[ColumnView]) -> str:
    """Return the headline columns as a Markdown table: ours, its sign, and the paper's number.

    The last two lines are n-grams, where some column has them.
    """
    names = views[0].names if views else {}
    rows = [row for row in names if any(row in (*view.rows, *view.broken) for view in views)]
    beside = _ngram_names(views)
    columns = [["method", *(f"`{names[row]}`" for row in rows), *beside.values()]]
    # Where columns are compared, one number of seeds is stated for all of them.
    usual = _usual_seeds(views) if table.compare == "columns" and rows else None
    for view in views:
        ours = [_ours(table, view, row, usual) for row in rows]
        ngrams = [_of_yardstick(view, metric) for metric in beside]
        columns.append([_heading(view, views), *ours, *ngrams])
        if view.paper and view.column.comparable:
            theirs = [_theirs(view, row) for row in rows]
            columns.append(["paper", *theirs, *("" for _ in beside)])
    head, *lines = zip(*columns, strict=True)
    return markdown.table(head, lines, numbers=True) if lines else ""


def _ngram_names(views: Iterable[ColumnView]) -> dict[str, str]:
    """Return metric -> name of the lines of n-grams; empty without them."""
    orders_ = sorted({view.yardstick["order"] for view in views if view.yardstick})
    if not orders_:
        return {}
    order = " or ".join(map(str, orders_))
    return {"ppl": yardsticks.NAME.format(order=order), "cache-ppl": yardsticks.CACHED}


def _of_yardstick(view: ColumnView, metric: str) -> str:
    value = view.yardstick.get(metric)
    return "" if value is None else markdown.fixed(value, view.column.decimals)


def _heading(view: ColumnView, views: list[ColumnView]) -> str:
    several = len({v.column.attention for v in views}) > 1
    return f"{view.column.attention}, {view.column.title}" if several else view.column.title


def _ours(table: Table, view: ColumnView, row: str, usual: int | None) -> str:
    if row in view.broken:
        return "not finite"
    if row not in view.rows:
        return ""
    # Where columns are compared, rows have no verdict.
    base = table.baseline if table.compare == "rows" else ""
    sign = view.sign(row, base) if base in view.rows else ""
    return f"{view.text(row, usual)} {sign}".strip()


def _theirs(view: ColumnView, row: str) -> str:
    decimals = view.column.decimals
    return markdown.fixed(view.paper[row], decimals) if row in view.paper else ""


def csv_of(results: Results, table: Table) -> str:
    """Return every number of a table: one line per scale, data set, row and column."""
    cells = results.values[results.values.table == table.name].groupby(CELL, sort=False)
    value = cells["value"]
    paper = cells["paper"].first()
    lines = {"mean": value.mean(), "deviation": value.std(), "seeds": value.size(), "paper": paper}
    every = pd.DataFrame(lines).reset_index()
    every = every.join(_verdicts(results, table, every))
    return every.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def _verdicts(results: Results, table: Table, cells: pd.DataFrame) -> pd.DataFrame:
    """Return the verdict on every cell against the baseline, and the interval of its difference."""
    lines = []
    for cell in cells.itertuples():
        [view] = (
            results.view(sheet, cell.column)
            for sheet in results.sheets
            if (sheet.table.name, sheet.scale, sheet.dataset)
            == (table.name, cell.scale, cell.dataset)
        )
        base = table.baseline
        # The CSV has a line per cell, also without a verdict.
        if cell.row == base or base not in view.rows or view.kind == "plain":
            lines.append(("", None, None, None))
            continue
        verdict = view.verdict(cell.row, base)
        if verdict.known:
            lines.append((verdict.name, verdict.size, verdict.low, verdict.high))
        else:
            lines.append((verdict.name, None, None, None))
    return pd.DataFrame(lines, columns=VERDICT)


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


def _by_updates(views: Iterable[ColumnView]) -> list[plots.Panel]:
    """Return curves over the updates of training, a panel per attention; empty for other columns.

    The columns have the numbers of updates as titles; at least two of one attention are full.
    """
    by_attention: dict[str, list[ColumnView]] = {}
    for view in views:
        if not _is_budget(view):
            return []
        if len(view.ranked()) >= FEWEST:
            by_attention.setdefault(view.column.attention, []).append(view)
    if max(map(len, by_attention.values()), default=0) < 2:
        return []
    return [
        plots.Panel(
            f"{attention} attention",
            "updates of training",
            _curves(several),
            plots.axis(several[0]),
        )
        for attention, several in by_attention.items()
    ]


def _curves(views: list[ColumnView]) -> dict[str, list[plots.Point]]:
    """Return the curves of rows and n-grams over the updates, which are the columns' titles."""
    at = [(float(view.column.title.replace(",", "")), view) for view in views]
    names = views[0].names
    curves = {
        names[row]: [
            plots.point(x, list(view.cells[row].values())) for x, view in at if row in view.ranked()
        ]
        for row in views[0].ranked()
    }
    for name, metric in ((plots.NGRAMS, "ppl"), (plots.CACHED, "cache-ppl")):
        known = [plots.point(x, [view.yardstick[metric]]) for x, view in at if view.yardstick]
        curves |= {name: known} if known else {}
    return curves


def _caption(views: list[ColumnView]) -> str:
    """Return what a picture shows, for those who do not see it."""
    if _by_updates(views):
        return f"{_metric(views[0])} by updates of training"
    if paper := _against_paper(views):
        return f"{_metric(paper[0])}: ours against the paper's"
    drawn = [view for view in views if len(view.ranked()) >= FEWEST]
    return f"{_metric(drawn[0])} of the rows of the table" if drawn else ""


def _metric(view: ColumnView) -> str:
    """Return the name of a column's metric at the beginning of a sentence."""
    name = plots.axis(view).rpartition(",")[0]
    return name[:1].upper() + name[1:]


def _note(sheet: Sheet, views: list[ColumnView]) -> str:
    """Return the sentences below a picture: what it shows, and what it does not."""
    if budgets := _by_updates(views):
        return f"Every point is a training of its own.{_of_curves(budgets)}"
    if not _against_paper(views):
        return _of_dots(views)
    said = (
        f"Each point is a method: the paper's value and ours at scale `{sheet.scale}`. Models, "
        "data and trainings differ from the paper's, so only orders can be compared."
    )
    one_seed = all(view.is_open for view in views if view.ranked())
    return said + (" Ours have one seed, so these orders may be chance." if one_seed else "")


def _of_curves(panels: Iterable[plots.Panel]) -> str:
    """Return the sentences on the n-grams of curves over updates; empty without them."""
    known = [panel.rows[plots.NGRAMS] for panel in panels if plots.NGRAMS in panel.rows]
    if not known:
        return ""
    text = " Grey: n-grams of the tokens that the models have read"
    level = any(a[1] == b[1] for curve in known for a, b in itertools.pairwise(curve))
    return text + (", or of the whole training text once models read it again." if level else ".")


def _of_dots(every: list[ColumnView]) -> str:
    """Return the sentences below dots, which columns of few rows do not have."""
    views = [view for view in every if len(view.ranked()) >= FEWEST]
    one_seed = {len(view.cells[row]) for view in views for row in view.ranked()} == {1}
    said = "Points are means over seeds; lines go from the lowest to the highest seed."
    text = "Every point is one seed, so an order may be chance." if one_seed else said
    panels = [_panel(view) for view in views]
    text += " A number with an arrow is beyond the axis." if plots.leaves(panels) else ""
    few = [view for view in every if view not in views]
    return text + (f" Too few rows for a panel: {_columns(few, every)}." if few else "")


def _draw(path: Path, views: list[ColumnView]) -> None:
    """Draw our numbers over the published ones, or else all rows of every column."""
    if budgets := _by_updates(views):
        means = [mean for x in budgets for curve in x.rows.values() for _, mean, *_ in curve]
        plots.lines(path, budgets, most=plots.LONG * statistics.median(means))
    # Where a paper has numbers, the question is whether ours follow them.
    elif paper := _against_paper(views):
        plots.points(path, [_panel_against_paper(view) for view in paper])
    else:
        plots.dots(path, [_panel(view) for view in views if len(view.ranked()) >= FEWEST])


def _panel(view: ColumnView) -> plots.Panel:
    rows = {view.names[row]: list(view.cells[row].values()) for row in view.ranked()}
    base = view.names.get(view.table.baseline, "") if view.table.compare == "rows" else ""
    return plots.Panel(
        _title(view),
        plots.axis(view),
        rows,
        kind=view.kind,
        marks=_marks(view),
        baseline=base,
    )


def _title(view: ColumnView) -> str:
    """Return the title of a panel; a column that is named by its updates says so."""
    return _place(view) + (" updates" if _is_budget(view) else "")


def _is_budget(view: ColumnView) -> bool:
    """True if the title of a column is its number of updates; 512 may also be a context."""
    return bool(NUMBER.fullmatch(view.column.title)) and BUDGET in view.table.options


def _marks(view: ColumnView) -> dict[str, float]:
    """Return the lines of n-grams in the picture of a column."""
    if not view.yardstick:
        return {}
    return {plots.NGRAMS: view.yardstick["ppl"], plots.CACHED: view.yardstick["cache-ppl"]}


def _panel_against_paper(view: ColumnView) -> plots.Panel:
    ranked = [row for row in view.ranked() if row in view.paper]
    rows = {view.names[row]: (view.paper[row], view.mean(row)) for row in ranked}
    x = f"paper, {view.column.better} is better"
    y = f"ours: {plots.axis(view)}"
    return plots.Panel(_title(view), x, rows, y, view.kind, _marks(view))
