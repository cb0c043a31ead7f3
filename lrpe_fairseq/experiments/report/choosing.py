"""docs/choosing.md and results/README.md: answers from all tables.

A sentence of a template that states an order is preceded by ``expect``, which fails if the runs do
not support it.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lrpe_fairseq.experiments.records.files import read_json
from lrpe_fairseq.experiments.records.tables import ANY, Table
from lrpe_fairseq.experiments.report import (
    absent,
    constants,
    documents,
    evidence,
    markdown,
    orders,
    plots,
    speed,
)
from lrpe_fairseq.experiments.report import pages as tables
from lrpe_fairseq.experiments.report.columns import ColumnView
from lrpe_fairseq.experiments.report.results import Results, results_of
from lrpe_fairseq.experiments.report.sheets import Sheet, Wanted

PAGE, INDEX = "docs/choosing.md", "results/README.md"
LENGTHS = {"extrapolation": (128, 256, 512, 1024, 2048), "books": (512, 1024, 2048, 4096, 8192)}
SHOWN = "extrapolation"
"""The table with the perplexities in the picture of the speed."""
HIGHEST = 200.0
"""The highest perplexity in the picture."""
CURVES = {
    "linear": ["NoPE", "RoPE", "Type2", "RoPE-LN", "Type2-LN", "Type2, content", "Type4", "PER",
               "ALiBi", "FoX, open", "Type2, gated, open"],
    "softmax": ["NoPE", "Sinusoidal", "RoPE", "Type2", "PER", "ALiBi", "T5, T/4", "XL",
                "KERPLE-log", "FoX, open", "Type2, gated, open", "stick-breaking"],
}  # fmt: skip
GROUPS = {
    "Language models": ["quickstart", "table2", "catalogue", "extrapolation", "angles", "bounded",
                        "contrast", "budget", "medium", "books", "tmlr-table2", "tmlr-table5",
                        "table5", "hybrid-lm", "hybrid-books", "packed", "context-scaling", "parts",
                        "dependent"],
    "Masked language models and GLUE": ["table8", "table3", "tmlr-table1-pretrain", "tmlr-table1"],
    "Translation and transduction": ["table4", "ape-wmt14", "ape-sequences", "ape-trees"],
    "Classification and images": ["images", "listops", "ape-cifar10", "tmlr-table4", "tmlr-table3"],
    "Synthetic tasks": ["synthetic", "long-context", "hybrid-mqar", "tracking"],
}  # fmt: skip


def pages(root: Path) -> dict[str, str]:
    """Return path -> text of the two pages."""
    results = results_of(root)
    # A checkout with own runs only has no answers to print.
    answers = {PAGE: choosing(results)} if _is_measured(results) else {}
    return {**answers, INDEX: index(results)}


def pictures(root: Path, wanted: Wanted = lambda sheet: True) -> dict[str, Callable[[Path], None]]:
    """Return path -> function that draws the picture, of all or of those with wanted groups."""
    results = results_of(root)
    folder = "results/figures/"
    if not _is_measured(results):
        return {}
    drawn = {}
    if any(map(wanted, results.sheets_of(SHOWN))):
        drawn[f"{folder}choosing-speed.png"] = partial(draw_speed, results=results)
    for table in LENGTHS:
        if any(map(wanted, results.sheets_of(table))):
            draw = partial(draw_lengths, results=results, table=table)
            drawn[f"{folder}{table}-lengths.png"] = draw
    return drawn


def _is_measured(results: Results) -> bool:
    """True if the tables with the answers have runs."""
    return bool(results.sheets_of("extrapolation") and results.sheets_of("synthetic"))


def choosing(results: Results) -> str:
    """Return docs/choosing.md."""
    config = next(iter(results.sheets_of("extrapolation")[0].runs.values()))["config"]
    return markdown.rendered(
        "choosing.md.j2",
        **_values(results),
        statements=statements(results),
        config=config,
        lrpe_against_rope=evidence.lrpe_against_rope(results),
        larger=evidence.at_larger_scales(results),
        untested=evidence.untested(results),
        coverage=evidence.coverage(results),
        largest_model=evidence.largest_model(results),
        ladders=evidence.ladder(results),
        agreement=evidence.agreement(results),
    )


def answer(root: Path) -> str:
    """Return what README answers: tables, four questions and their commands."""
    results = results_of(root)
    if not _is_measured(results):
        return ""
    lacking = evidence.untested(results, evidence.ANSWERS)
    return markdown.rendered("answer.md.j2", **_values(results), untested=lacking)


def quickstart(root: Path) -> str:
    """Return what README says of the quickstart: its table and a text that its best model wrote."""
    results = results_of(root)
    sheets = results.sheets_of("quickstart")
    if not sheets:
        return ""
    written = read_json(root / "results" / "bench" / "quickstart-sample.json")
    views = results.headlines(sheets[0])
    return markdown.rendered(
        "quickstart.md.j2",
        expect=expect,
        views=views,
        grid=tables.grid(sheets[0].table, views),
        sample=written,
        method=views[0].names[written["row"]],
        characters=_tokens_read(sheets[0]),
    )


def _tokens_read(sheet: Sheet) -> int:
    """Return the tokens that each training of a sheet has read."""
    config = next(iter(sheet.runs.values()))["config"]
    return int(config["optimization.max_update"]) * int(config["dataset.max_tokens"])


def _values(results: Results) -> dict[str, Callable]:
    """Return what both templates call."""
    return {
        "expect": expect,
        "column": results.column,
        "has": partial(has, results),
        "of_ngrams": evidence.of_ngrams,
        "most_gained": partial(evidence.most_gained, results),
        "length": lambda kind, n: results.column("extrapolation", f"{kind}-paired-{n}"),
        "recall": lambda kind, n: results.column("synthetic", f"{kind}-mqar-tokens-{n}x"),
        "gpu": bool(speed.measured("steps", "cuda", results.root)),
        "speed": partial(speed.speed, results.root, "cuda"),
        "cpu_speed": partial(speed.speed, results.root, "cpu"),
        "stack_speed": partial(speed.value, results.root, "stacks", "cpu", "relative_speed"),
        "normalizer_speed": partial(
            speed.value, results.root, "normalizers", "cpu", "relative_speed"
        ),
    }


def has(results: Results, table: str, key: str, scale: str, rows: list[str]) -> bool:
    """True if a column of a table has values of these rows at a scale."""
    sheets = (sheet for sheet in results.sheets_of(table) if sheet.scale == scale)
    return any(set(rows) <= set(results.view(sheet, key).ranked()) for sheet in sheets)


def expect(supported: bool) -> str:
    """Return nothing if the runs support the text beside it. Raises: ValueError if not."""
    if not supported:
        raise ValueError(
            f"the runs do not support a sentence of README or {PAGE}: rewrite its template"
        )
    return ""


# --- statements ----------------------------------------------------------------------------------


def statements(results: Results) -> list[dict[str, str]]:
    """Return every statement of results/paper/statements.yaml with our verdict."""
    path = results.root / "results" / "paper" / "statements.yaml"
    return [
        _stated(results, statement)
        for statement in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]


def _stated(results: Results, statement: Mapping[str, Any]) -> dict[str, str]:
    view = results.column(statement["table"], statement["column"], statement["scale"])
    rows = [statement["first"], *statement["others"]]
    ours = [view.named(row) if row in view.rows else f"{row} not run" for row in rows]
    printed = [f"{view.paper[row]:.2f}" for row in rows if row in view.paper]
    return {
        **statement,
        "paper": ", ".join(printed) if len(printed) == len(rows) else "",
        "ours": f"{view.column.split}: {', '.join(ours)}",
        "verdict": verdict(view, statement["first"], statement["others"]),
    }


HOLDS, CONTRADICTED, OPEN = "holds", "not reproduced at this scale", "unresolved"
"""Verdicts on statements of papers."""


def verdict(view: ColumnView, first: str, others: list[str]) -> str:
    """Return whether ``first`` is better than all ``others``, as a paper says.

    It holds if it is better than every one. It is not reproduced if it is worse than one, or equal.
    """
    marks = {view.mark(first, other) for other in others}
    if marks == {orders.BETTER}:
        return HOLDS
    return CONTRADICTED if marks & {orders.WORSE, orders.EQUAL} else OPEN


# --- the index -----------------------------------------------------------------------------------


def index(results: Results) -> str:
    """Return results/README.md."""
    settings = [table for table in results.tables.values() if table.page == "settings"]
    known = {name for names in GROUPS.values() for name in names}
    others = [t.name for t in results.tables.values() if t.name not in known and not t.page]
    groups = {}
    for title, names in {**GROUPS, "Others": others}.items():
        listed = [results.tables[name] for name in names if results.sheets_of(name)]
        if listed:
            groups[title] = [(table, *_first(results, table)) for table in listed]
    values = {"groups": groups, "settings": settings, "not_run": _not_run(results)}
    values["documents"] = documents.table_of_tables(results)
    path = results.root / "results" / "false-orders.json"
    values["false_orders"] = read_json(path) or None
    fits = [one for one in results.measurements.every.values() if one.prior.strength]
    values |= {"fitted": len(fits), "newer": sum(not one.frozen for one in fits)}
    values["hours"] = _hours(results)
    return markdown.rendered("results.md.j2", **values)


def _first(results: Results, table: Table) -> tuple[str, str, str]:
    """Return metric, better direction and unbeaten rows of a table's first headline columns."""
    if table.compare == "columns":
        return "", "", "–"
    # One seed at the first scale says less than verdicts at another one.
    every = [_firsts(results, sheet) for sheet in results.sheets_of(table.name)]
    first = next((views for views in every if _has_verdicts(views.values())), every[0])
    kinds = {kind: "" if kind == ANY else f"{kind} " for kind in first}
    best = "; ".join(f"{kinds[kind]}{_best(view)}" for kind, view in first.items())
    scale = next(iter(first.values())).scale
    column = next(iter(first.values())).column
    text = best if scale == "small" else f"`{scale}`: {best}"
    constant = constants.mean(results.root, table, column)
    text += "" if constant is None else f"; constant answers {constant:.2f}"
    metric = {"": "average", "ppl": "perplexity", "bleu": "BLEU"}.get(column.metric, column.metric)
    return metric.replace("_", " "), column.better, text


def _firsts(results: Results, sheet: Sheet) -> dict[str, ColumnView]:
    """Return the first headline of each attention type; further ones are on the page."""
    first: dict[str, ColumnView] = {}
    for view in results.headlines(sheet):
        first.setdefault(view.column.attention, view)
    return first


def _has_verdicts(views: Iterable[ColumnView]) -> bool:
    return any(not view.is_open and view.kind != "plain" for view in views)


def _best(view: ColumnView) -> str:
    """Return the unbeaten rows of a column, and how many of the table's rows were trained."""
    trained, every = absent.trained([view])
    return _unbeaten(view) + (f", {trained} of {every} rows" if trained < every else "")


def _unbeaten(view: ColumnView) -> str:
    if not view.ranked():
        return "not finite"
    # One seed has no order: its lowest number is shown with a question mark.
    if view.is_open or view.kind == "plain":
        return f"{view.named(view.ranked()[0])} ?"
    best, *others = (row for row in view.unbeaten if row not in view.unordered)
    return view.counted(best) + (f" and {len(others)} more" if others else "")


def _hours(results: Results) -> str:
    """Return the runs, and the hours that they took on CPUs and on GPUs."""
    on_gpu = [bool(run["hardware"].get("gpus")) for run in results.runs.values()]
    seconds = [run.get("wall_seconds", 0.0) for run in results.runs.values()]
    hours = {
        kind: sum(s for s, gpu in zip(seconds, on_gpu, strict=True) if gpu == wanted) / 3600
        for kind, wanted in (("CPUs", False), ("GPUs", True))
    }
    parts = [f"{value:.1f} h on {kind}" for kind, value in hours.items() if value]
    return f"{len(seconds)} runs, {markdown.listed(parts)}" if parts else ""


def _not_run(results: Results) -> str:
    # Scales that no table has run are listed once, the others by table.
    missing: dict[str, list[str]] = {}
    run = set()
    for table in results.tables.values():
        seen = {sheet.scale for sheet in results.sheets_of(table.name)}
        run |= seen
        for scale in table.scales.keys() - seen:
            missing.setdefault(scale, []).append(table.name)
    every = sorted(missing.keys() - run)
    parts = [f"scales {markdown.listed([f'`{scale}`' for scale in every])}"] if every else []
    parts += [f"`{k}` of {markdown.listed(names)}" for k, names in missing.items() if k in run]
    return "; ".join(parts) or "nothing"


# --- pictures ------------------------------------------------------------------------------------


def draw_lengths(path: Path, results: Results, table: str) -> None:
    """Draw perplexity of the same tokens by context, a panel per attention type."""
    panels = []
    lengths = LENGTHS[table]
    for attention, rows in CURVES.items():
        # paired: every context predicts the same tokens, so a curve shows the context alone.
        views = [(n, results.column(table, f"{attention}-paired-{n}")) for n in lengths]
        names = views[0][1].names
        curves = {names[row]: curve for row in rows if (curve := _curve(views, row))}
        curves |= _of_ngrams(views)
        y = "test perplexity, lower is better"
        panels.append(plots.Panel(f"{attention} attention", "context, tokens", curves, y))
    plots.lines(path, panels, mark=lengths[0], most=HIGHEST)


def _curve(views: list[tuple[int, ColumnView]], row: str) -> list[plots.Point]:
    """Return the curve of one row; columns where it is missing or not finite are left out."""
    return [
        plots.point(tokens, list(view.cells[row].values()))
        for tokens, view in views
        if row in view.rows and row not in view.broken
    ]


def _of_ngrams(views: list[tuple[int, ColumnView]]) -> dict[str, list[plots.Point]]:
    """Return the curves of n-grams, alone and with a cache of the context."""
    known = [(tokens, view.yardstick) for tokens, view in views if view.yardstick]
    names = {"ppl": plots.NGRAMS, "cache-ppl": plots.CACHED}
    return {
        name: [plots.point(tokens, [yardstick[metric]]) for tokens, yardstick in known]
        for metric, name in names.items()
        if known
    }


def draw_speed(path: Path, results: Results) -> None:
    """Draw test perplexity over training speed on a CPU, a panel per attention type.

    Only methods with their default options are shown, for which the speed was measured.
    """
    x = "training speed on a CPU, relative to no encoding"
    y = "test perplexity at 128 tokens, lower is better"
    panels = []
    for attention in ("linear", "softmax"):
        view = results.column(SHOWN, f"{attention}-paired-128")
        most = 2 * view.mean(view.ranked()[0])
        points = {}
        for row in (row for row in view.ranked() if view.mean(row) < most):
            name = view.names[row]
            method = name.removesuffix(", no positions")
            fast = speed.speed(results.root, "cpu", attention, method)
            if "," not in method and fast != "–":
                points[name] = (float(fast), view.mean(row))
        panels.append(plots.Panel(f"{attention} attention", x, points, y))
    plots.points(path, panels)
