"""docs/choosing.md and results/README.md: answers from all tables.

A sentence of a template that states an order is preceded by ``expect``, which fails if the runs do
not support it.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lrpe_fairseq.experiments.records.layout import Table
from lrpe_fairseq.experiments.report import frame, markdown, orders, plots, speed
from lrpe_fairseq.experiments.report.frame import ColumnView, Results
from lrpe_fairseq.experiments.report.pages import rendered

PAGE, INDEX = "docs/choosing.md", "results/README.md"
LENGTHS = (128, 256, 512, 1024, 2048)
SHOWN = (128, 512, 2048)
CURVES = {
    "linear": ["NoPE", "RoPE", "RoPE-LN", "Type2-LN", "Type2, content", "Type4", "PER", "ALiBi",
               "FoX, open", "Type2, gated, open"],
    "softmax": ["NoPE", "Sinusoidal", "RoPE", "Type2", "PER", "ALiBi", "T5, T/4", "KERPLE-log",
                "FoX, open", "Type2, gated, open", "stick-breaking"],
}  # fmt: skip
BEYOND = {
    "linear": ["NoPE", "RoPE", "Type2-LN", "PER", "ALiBi", "FoX, open", "Type2, gated, open"],
    "softmax": ["RoPE", "Type2", "ALiBi", "KERPLE-log", "FoX, open", "stick-breaking"],
}
TWELVE = {  # method -> its label in: extrapolation, synthetic, table4
    "none": ("NoPE", "NoPE", ""),
    "rope": ("RoPE", "RoPE", "RoPE"),
    "permuteformer": ("PER", "PER", "PER"),
    "lrpe-type1": ("Type1", "Type1", "Type1"),
    "lrpe-type2": ("Type2", "Type2", "Type2"),
    "lrpe-type4": ("Type4", "Type4", "Type4"),
    "alibi": ("ALiBi", "ALiBi", ""),
    "fox": ("FoX, open", "FoX", ""),
    "gated:lrpe-type2": ("Type2, gated, open", "Type2, gated", ""),
    "t5": ("T5, T/4", "T5", "T5"),
    "kerple-log": ("KERPLE-log", "KERPLE-log", ""),
    "stick-breaking": ("stick-breaking", "stick-breaking", ""),
}
GROUPS = {
    "Language models": ["table2", "catalogue", "extrapolation", "budget", "books",
                        "tmlr-table2", "tmlr-table5", "table5"],
    "Masked language models and GLUE": ["table8", "table3", "budget-mlm", "tmlr-table1-pretrain",
                                        "tmlr-table1"],
    "Translation and transduction": ["table4", "ape-wmt14", "ape-sequences", "ape-trees"],
    "Classification and images": ["images", "listops", "tmlr-table4", "tmlr-table3"],
    "Synthetic tasks": ["synthetic", "grid"],
}  # fmt: skip


def pages(root: Path) -> dict[str, str]:
    """Return path -> text of the two pages."""
    results = frame.results(root)
    answers = {PAGE: choosing(results)} if _is_measured(results) else {}
    return {**answers, INDEX: index(results)}


def pictures(root: Path) -> dict[str, Callable[[Path], None]]:
    """Return path -> function that draws the picture."""
    results, folder = frame.results(root), "results/figures/"
    if not _is_measured(results):
        return {}
    return {
        f"{folder}choosing-lengths.png": partial(draw_lengths, results=results),
        f"{folder}choosing-speed.png": partial(draw_speed, results=results),
    }


def _is_measured(results: Results) -> bool:
    """True if the tables with the answers have runs."""
    return bool(results.sheets_of("extrapolation") and results.sheets_of("synthetic"))


def choosing(results: Results) -> str:
    """Return docs/choosing.md."""
    beyond = {
        kind: [row for row in rows if row in _beyond(results, kind).rows]
        for kind, rows in BEYOND.items()
    }
    gained = [_beyond(results, kind).mean(row) for kind, rows in beyond.items() for row in rows]
    config = next(iter(results.sheets_of("extrapolation")[0].group.runs.values()))["config"]
    return rendered(
        "choosing.md.j2",
        expect=expect,
        column=results.column,
        ln=lambda row, n: _length(results, "linear", n),
        sm=lambda row, n: _length(results, "softmax", n),
        length=partial(_length, results),
        recall=partial(_recall, results),
        beyond=partial(_beyond, results),
        beyond_rows=beyond,
        most_gained=max(gained),
        speed=partial(_speed, results.root),
        all_tied=partial(_all_tied, results),
        lengths=SHOWN,
        statements=statements(results),
        twelve=[_line(results, name, labels) for name, labels in TWELVE.items()],
        shape=f"{config['model.decoder_layers']} x {config['model.decoder_embed_dim']}",
        trained=config["task.tokens_per_sample"],
        updates=f"{config['optimization.max_update']:,}",
    )


def expect(supported: bool) -> str:
    """Return nothing if the runs support the text beside it. Raises: ValueError if not."""
    if not supported:
        raise ValueError(f"the runs do not support a sentence of {PAGE}: rewrite its template")
    return ""


def _length(results: Results, attention: str, tokens: int) -> ColumnView:
    return results.column("extrapolation", f"{attention}-paired-{tokens}")


def _beyond(results: Results, attention: str) -> ColumnView:
    return results.column("extrapolation", f"{attention}-beyond")


def _recall(results: Results, attention: str, times: int) -> ColumnView:
    return results.column("synthetic", f"{attention}-mqar-tokens-{times}x")


def _all_tied(results: Results, pairs: list[tuple[str, str, str, str]], tokens: int) -> bool:
    return all(
        _length(results, kind, tokens).mark(one, other) == orders.TIED
        for kind, _, one, other in pairs
    )


def _speed(root: Path, attention: str, encoding: str) -> str:
    """Return the training speed on a GPU relative to Base; empty if it was not measured."""
    for row in speed.measured("table9", "cuda", root):
        if (row["attention"], row["encoding"]) == (attention, encoding):
            return f"{row['relative_speed']:.2f}"
    return ""


def answer(root: Path) -> str:
    """Return README's table: the best method of each attention type, and how many tie with it."""
    results = frame.results(root)
    if not _is_measured(results):
        return f"{markdown.NOT_MEASURED.capitalize()}."
    columns = {
        "context 128, as in training": partial(_length, results, tokens=128),
        "context 2048": partial(_length, results, tokens=2048),
        "recall at 16 times the training length": partial(_recall, results, times=16),
    }
    rows = [
        [title, *(_best(view(kind)).partition(" ")[2] for kind in ("linear", "softmax"))]
        for title, view in columns.items()
    ]
    return markdown.table(["", "best with linear attention", "with softmax attention"], rows)


# --- statements and the table of twelve methods --------------------------------------------------


def statements(results: Results) -> list[dict[str, str]]:
    """Return every statement of results/paper/statements.yaml with our verdict."""
    path = results.root / "results" / "paper" / "statements.yaml"
    return [_stated(results, given) for given in yaml.safe_load(path.read_text(encoding="utf-8"))]


def _stated(results: Results, given: Mapping[str, Any]) -> dict[str, str]:
    view = results.column(given["table"], given["column"], given["scale"])
    rows = [given["first"], *given["others"]]
    printed = [f"{view.paper[row]:.2f}" for row in rows if row in view.paper]
    ours = ", ".join(view.short(row) if row in view.rows else "not run" for row in rows)
    found = {
        "paper": ", ".join(printed) if len(printed) == len(rows) else "",
        "ours": ours,
        "verdict": verdict(view, given["first"], given["others"]),
    }
    return {**given, **found}


def verdict(view: ColumnView, first: str, others: list[str]) -> str:
    """Return holds (better than all), contradicted (worse than one) or open."""
    marks = {view.mark(first, other) for other in others}
    if marks == {orders.BETTER}:
        return "holds"
    return "contradicted" if orders.WORSE in marks else "open"


def _line(results: Results, name: str, labels: tuple[str, str, str]) -> list[str]:
    views = [
        (labels[0], partial(_length, results, tokens=128)),
        (labels[0], partial(_length, results, tokens=2048)),
        (labels[1], partial(_recall, results, times=16)),
        (labels[2], lambda attention: results.column("table4", f"{attention}-test")),
    ]
    cells = [_both(view, label) for label, view in views]
    speeds = [_speed(results.root, kind, name) or "–" for kind in ("linear", "softmax")]
    return [f"`{name}`", *cells, " / ".join(speeds)]


def _both(view: Callable[[str], ColumnView], label: str) -> str:
    found = [view(kind) for kind in ("linear", "softmax")]
    shown = [v.short(label) if label in v.rows else "–" for v in found]
    return " / ".join(shown) if set(shown) != {"–"} else ""


# --- the index -----------------------------------------------------------------------------------


def index(results: Results) -> str:
    """Return results/README.md."""
    settings = [table for table in results.tables.values() if table.page]
    known = {name for names in GROUPS.values() for name in names}
    others = [t.name for t in results.tables.values() if t.name not in known and not t.page]
    groups = [
        (title, [line for name in own for line in _entries(results, results.tables[name])])
        for title, names in {**GROUPS, "Others": others}.items()
        if (own := [name for name in names if name in results.tables])
    ]
    return rendered("results.md.j2", groups=groups, settings=settings, not_run=_not_run(results))


def _entries(results: Results, table: Table) -> list[dict[str, str]]:
    link = f"[{table.title}]({table.name}.md)"
    sheet = next(iter(results.sheets_of(table.name)), None)
    if sheet is None:
        return [{"link": link, "best": "not run"}]
    first = {column.attention: column for column in reversed(sheet.headlines)}
    best = "; ".join(_best(results.view(sheet, column)) for column in reversed(first.values()))
    scale = sheet.group.scale
    return [{"link": link, "best": best if scale == "small" else f"`{scale}`: {best}"}]


def _best(view: ColumnView) -> str:
    ranked, place = view.ranked(), view.column.attention
    if not ranked:
        return f"{place} not finite"
    if view.is_open:
        return f"{place} {view.named(ranked[0])} ?"
    best = view.first()
    tied = view.tied_with(best)
    return f"{place} {view.named(best)}" + (f" ≈ {len(tied)} more" if tied else " ✓")


def _not_run(results: Results) -> str:
    missing: dict[str, list[str]] = {}
    for table in results.tables.values():
        seen = {sheet.group.scale for sheet in results.sheets_of(table.name)}
        for scale in table.scales.keys() - seen:
            missing.setdefault(scale, []).append(table.name)
    parts = [f"scale `{k}` of {markdown.listed(names)}" for k, names in sorted(missing.items())]
    return "; ".join(parts) or "nothing"


# --- pictures ------------------------------------------------------------------------------------


def draw_lengths(path: Path, results: Results) -> None:
    """Draw perplexity of the same tokens by context, a panel per attention type."""
    panels = {}
    for attention, rows in CURVES.items():
        views = [(tokens, _length(results, attention, tokens)) for tokens in LENGTHS]
        names = views[0][1].names
        curves = {names[row]: plots.curve(views, row) for row in rows if row in names}
        panels[f"{attention} attention"] = {name: line for name, line in curves.items() if line}
    plots.lines(path, panels, "context, tokens", "test perplexity, lower is better", 128)


def draw_speed(path: Path, results: Results) -> None:
    """Draw validation perplexity over training speed on a GPU, a panel per attention type."""
    panels = {}
    for attention in ("linear", "softmax"):
        view = results.column("catalogue", f"{attention}-valid")
        best = min(view.mean(row) for row in view.ranked())
        points = {
            view.names[row]: (float(fast), view.mean(row))
            for row in view.ranked()
            if (fast := _speed(results.root, attention, view.names[row].partition(",")[0]))
            and view.mean(row) < 2 * best
        }
        panels[f"{attention} attention"] = {k: v for k, v in points.items() if math.isfinite(v[0])}
    x = "training speed on a GPU relative to Base, higher is better"
    plots.plane(path, panels, x, "validation perplexity, lower is better")
