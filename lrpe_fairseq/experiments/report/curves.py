"""Plots of validation curves, like Fig. 2 of the paper."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records.layout import Column, Row, Table
from lrpe_fairseq.experiments.records.runs import Run, curve_metric
from lrpe_fairseq.experiments.report import pictures
from lrpe_fairseq.experiments.report.cells import Group, cell_runs

Curve = list[tuple[float, float]]  # (updates, metric of the validation), updates ascending
PANELS_ACROSS = 3
PERPLEXITY = "validation perplexity"


def mean_curve(runs: Iterable[Run]) -> Curve:
    """Return the mean over runs at every update at which all runs were validated."""
    curves = [{p["updates"]: p[curve_metric(run)] for p in run["curve"]} for run in runs]
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    return [(update, sum(curve[update] for curve in curves) / len(curves)) for update in shared]


def axis_label(runs: Iterable[Run]) -> str:
    """Return the axis label of the runs' curve metric: ``validation perplexity`` for ``valid_ppl``.

    Raises: ValueError if the runs have curves of different metrics.
    """
    metrics = {curve_metric(run) for run in runs} - {""}
    if len(metrics) > 1:
        raise ValueError(f"one picture cannot show curves of {' and '.join(sorted(metrics))}")
    name = next(iter(metrics), "valid_ppl")
    return PERPLEXITY if name == "valid_ppl" else f"validation {name.removeprefix('valid_')}"


def panels(table: Table, group: Group) -> dict[str, dict[str, Curve]]:
    """Return title -> row label -> curve, for the rows in ``table.curves``.

    There is one panel per data set, attention type and set of overrides, because other ones mean
    other trainings.
    """
    found: dict[str, dict[str, Curve]] = {}
    columns = [column for column in table.columns if not column.mean_of]
    for title in dict.fromkeys(map(_panel, columns)):
        trained = [column for column in columns if _panel(column) == title]
        for label in table.curves:
            runs = _runs_with_curve(table, table.row(label), trained, group)
            if curve := mean_curve(runs):
                found.setdefault(title, {})[label] = curve
    return found


def _panel(column: Column) -> str:
    parts = [column.dataset, f"{column.attention} attention", *map(str, column.overrides.values())]
    return ", ".join(filter(None, parts))


def validation_curves(
    path: Path, curves: dict[str, dict[str, Curve]], label: str = PERPLEXITY
) -> None:
    """Draw one panel per title of ``curves`` and write the picture to ``path`` as PNG.

    label: the vertical axis; see :func:`axis_label`.

    Raises: ImportError if matplotlib, which comes with the extra [plots], is not installed.
    """
    across = min(len(curves), PANELS_ACROSS)
    down = math.ceil(len(curves) / across)
    figure = pictures.blank(5.5 * across + 1, 4 * down)  # one inch for the legend
    all_axes = list(figure.subplots(down, across, squeeze=False).flat)
    labels = list(dict.fromkeys(label for lines in curves.values() for label in lines))
    for axes, (title, lines) in zip(all_axes, curves.items(), strict=False):
        _draw(axes, title, lines, labels)
        axes.set_ylabel(label)
    for axes in all_axes[len(curves) :]:
        axes.remove()
    drawn = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend([drawn[label] for label in labels], labels, loc="outside right upper")
    pictures.save(figure, path)


def _runs_with_curve(table: Table, row: Row, columns: list[Column], group: Group) -> list[Run]:
    runs: dict[str, Run] = {}
    for column in columns:
        runs |= cell_runs(table, row, column, group.runs)
    return [runs[name] for name in sorted(runs) if runs[name].get("curve")]


def _draw(axes: Any, title: str, lines: dict[str, Curve], labels: list[str]) -> None:
    for label, curve in lines.items():
        index = labels.index(label)  # a row has the same color in all panels
        style = {"color": f"C{index % 10}", "linestyle": "-" if index < 10 else "--"}
        axes.plot(*zip(*curve, strict=True), label=label, linewidth=1.2, **style)
    lowest, highest = _range(lines)
    axes.set_ylim(lowest, highest)
    axes.set_xlim(left=min(_entry(curve, highest) for curve in lines.values()))
    axes.set(xlabel="updates", title=title)
    axes.grid(alpha=0.3)
    above = [f"{n} ends at {c[-1][1]:.4g}" for n, c in lines.items() if c[-1][1] > highest]
    axes.text(0.98, 0.97, "\n".join(above), transform=axes.transAxes, ha="right", va="top")


def _range(lines: dict[str, Curve]) -> tuple[float, float]:
    """Return the range of the final values; early validations would hide their differences."""
    low, high = pictures.bulk([curve[-1][1] for curve in lines.values()])
    return low * 0.95, high * 1.6


def _entry(curve: Curve, height: float) -> float:
    """Return the last update at which ``curve`` is above ``height``, or its first."""
    return max([update for update, value in curve if value > height], default=curve[0][0])
