"""Plots of validation curves, like Fig. 2 of the paper."""

import math
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records.layout import Column, Row, Table
from lrpe_fairseq.experiments.records.runs import Run, curve_metric
from lrpe_fairseq.experiments.report import pictures
from lrpe_fairseq.experiments.report.cells import Group, cell_runs

Curve = list[tuple[float, float]]  # (updates, metric of the validation), updates ascending
PANELS_ACROSS = 3
ENTRY = 0.22
"""Height of a row's entry in the legend, in inches."""
PERPLEXITY = "validation perplexity, best so far"


def mean_curve(runs: Iterable[Run]) -> Curve:
    """Return the mean over runs at every update at which all runs were validated.

    It is that of the best checkpoints so far, so that it ends at those which tables evaluate.
    """
    curves = [_best_so_far(run) for run in runs]
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    return [(update, sum(curve[update] for curve in curves) / len(curves)) for update in shared]


def _best_so_far(run: Run) -> dict[float, float]:
    metric = curve_metric(run)
    values = accumulate((p[metric] for p in run["curve"]), min if metric.endswith("ppl") else max)
    return dict(zip((p["updates"] for p in run["curve"]), values, strict=True))


def axis_label(runs: Iterable[Run]) -> str:
    """Return the axis label of the runs' curve metric: :data:`PERPLEXITY` for ``valid_ppl``.

    Raises: ValueError if the runs have curves of different metrics.
    """
    metrics = {curve_metric(run) for run in runs} - {""}
    if len(metrics) > 1:
        raise ValueError(f"one picture cannot show curves of {' and '.join(sorted(metrics))}")
    name = next(iter(metrics), "valid_ppl").removeprefix("valid_")
    return f"validation {name.replace('_', ' ').replace('ppl', 'perplexity')}, best so far"


def panels(table: Table, group: Group) -> dict[str, dict[str, Curve]]:
    """Return title -> row label -> curve, for the rows in ``table.curves``.

    There is one panel per data set, attention type and set of overrides, because other ones mean
    other trainings.
    """
    found: dict[str, dict[str, Curve]] = {}
    trained: dict[tuple[str, str], dict[str, list[Column]]] = {}
    for column in (column for column in table.columns if not column.mean_of):
        alike = trained.setdefault((column.dataset, column.attention), {})
        alike.setdefault(str(column.overrides), []).append(column)
    for (dataset, attention), alike in trained.items():
        for columns in alike.values():
            own = columns[0].title if len(alike) > 1 else ""
            title = ", ".join(filter(None, [dataset, f"{attention} attention", own]))
            for label in table.curves:
                runs = _runs_with_curve(table, table.row(label), columns, group)
                if curve := mean_curve(runs):
                    found.setdefault(title, {})[label] = curve
    return found


def validation_curves(
    path: Path, curves: dict[str, dict[str, Curve]], label: str = PERPLEXITY
) -> None:
    """Draw one panel per title of ``curves`` and write the picture to ``path`` as PNG.

    label: the vertical axis; see :func:`axis_label`.

    Raises: ImportError if matplotlib, which comes with the extra [plots], is not installed.
    """
    across = min(len(curves), PANELS_ACROSS)
    down = math.ceil(len(curves) / across)
    labels = list(dict.fromkeys(label for lines in curves.values() for label in lines))
    height = max(4 * down, ENTRY * (len(labels) + 1))
    figure = pictures.blank(5.5 * across + 1, height)  # one inch for the legend
    all_axes = list(figure.subplots(down, across, squeeze=False).flat)
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
