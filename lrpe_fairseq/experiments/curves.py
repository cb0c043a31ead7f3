"""Validation curves as a picture, in the manner of the paper's Fig. 2."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments import pictures
from lrpe_fairseq.experiments.cells import Group, cell_runs
from lrpe_fairseq.experiments.layout import Row, Table
from lrpe_fairseq.experiments.runs import Run

Curve = list[tuple[float, float]]  # (updates, validation perplexity), updates ascending


def mean_curve(runs: Iterable[Run]) -> Curve:
    """The mean over runs at every update where all of them were validated."""
    curves = [{p["updates"]: p["valid_ppl"] for p in run["curve"]} for run in runs]
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    return [(update, sum(curve[update] for curve in curves) / len(curves)) for update in shared]


def panels(table: Table, group: Group) -> dict[str, dict[str, Curve]]:
    """attention type -> row label -> curve, for the rows that ``table.curves`` asks for."""
    found: dict[str, dict[str, Curve]] = {}
    for attention in dict.fromkeys(column.attention for column in table.columns):
        for label in table.curves:
            runs = _runs_with_curve(table, table.row(label), attention, group)
            if curve := mean_curve(runs):
                found.setdefault(attention, {})[label] = curve
    return found


def validation_curves(path: Path, curves: dict[str, dict[str, Curve]]) -> None:
    """Draw one panel for each attention type and write it to ``path`` as PNG.

    Raises: ImportError if matplotlib, which comes with the extra [plots], is not installed.
    """
    figure = pictures.blank(5.5 * len(curves), 4)
    all_axes = figure.subplots(1, len(curves), squeeze=False)[0]
    labels = list(dict.fromkeys(label for lines in curves.values() for label in lines))
    for axes, (attention, lines) in zip(all_axes, curves.items(), strict=True):
        _draw(axes, attention, lines, labels)
    pictures.save(figure, path)


def _runs_with_curve(table: Table, row: Row, attention: str, group: Group) -> list[Run]:
    runs: dict[str, Run] = {}
    for column in table.columns:
        if column.attention == attention and not column.mean_of:
            runs |= cell_runs(table, row, column, group.runs)
    return [runs[name] for name in sorted(runs) if runs[name].get("curve")]


def _draw(axes: Any, attention: str, lines: dict[str, Curve], labels: list[str]) -> None:
    for label, curve in lines.items():
        index = labels.index(label)  # a row has one colour in all panels
        style = {"color": f"C{index % 10}", "linestyle": "-" if index < 10 else "--"}
        axes.plot(*zip(*curve, strict=True), label=label, linewidth=1.2, **style)
    # The first validations are far above the rest and would hide what separates the rows.
    last = [curve[-1][1] for curve in lines.values()]
    axes.set_ylim(min(last) * 0.95, max(last) * 1.6)
    axes.set(xlabel="updates", ylabel="validation perplexity", title=f"{attention} attention")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
