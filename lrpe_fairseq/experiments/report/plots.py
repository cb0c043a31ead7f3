"""Every picture of the pages: one style, and one color and marker per method everywhere.

A picture is a function of a path. The bytes depend only on the content and the versions of the
libraries.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.encodings import ENCODINGS
from lrpe_fairseq.experiments.report.frame import ColumnView, public_name

Draw = Callable[[Path], None]
PROMINENT = (
    "none", "rope", "lrpe-type2", "permuteformer", "alibi", "fox", "stick-breaking", "t5",
    "kerple-log", "lrpe-type4",
)  # fmt: skip
"""Methods that have a color of their own; the others share these."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = {"layernorm": "--", "content": ":", "none": "-.", "no positions": "--"}
"""Line of a variant of a method."""
LONG = 2.0
"""A panel of perplexities whose largest is this many times the smallest is logarithmic."""


def blank(width: float, height: float) -> Any:
    """Return an empty figure; sizes in inches. Raises: ImportError without matplotlib."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq sets all to DEBUG
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write ``figure`` as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})


def style(method: str) -> dict[str, Any]:
    """Return color, marker and dash of a method; hollow markers have gates."""
    import seaborn

    encoding, *variant = method.split(", ")
    name = public_name(encoding.removeprefix("gated:"))
    names = [*PROMINENT, *(other for other in ENCODINGS if other not in PROMINENT)]
    place = names.index(name) if name in names else len(names)
    color = seaborn.color_palette("tab10")[place % len(PROMINENT)]
    shown = {"color": color, "marker": MARKERS[place // len(PROMINENT) % len(MARKERS)]}
    dash = next((DASHES[word] for word in variant if word in DASHES), "-")
    hollow = {"markerfacecolor": "white"} if encoding.startswith("gated:") else {}
    return {**shown, "linestyle": dash, **hollow}


def panels_of(count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """Return a figure of ``count`` panels, two in a row, and their axes; sizes in inches."""
    columns = min(2, count)
    rows = math.ceil(count / columns)
    figure = blank(width * columns, height * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def dots(path: Path, views: Sequence[ColumnView]) -> None:
    """Draw one panel per column: a row per method, best first, from the best to the worst seed."""
    tallest = max(len(view.ranked()) for view in views)
    figure, panels = panels_of(len(views), 5.2, 1.2 + 0.2 * tallest)
    for axes, view in zip(panels, views, strict=True):
        _dots(axes, view)
    save(figure, path)


def _dots(axes: Any, view: ColumnView) -> None:
    rows = view.ranked()
    for place, row in enumerate(rows):
        values, shown = list(view.cells[row].values()), style(view.names[row])
        spread = [[view.mean(row) - min(values)], [max(values) - view.mean(row)]]
        axes.errorbar([view.mean(row)], [place], xerr=spread, markersize=5, linewidth=1, **shown)
    axes.set_yticks(range(len(rows)), [view.names[row] for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _scale(axes, [view.mean(row) for row in rows], view.kind, "x")
    axes.set_xlabel(axis(view))
    axes.set_title(f"{view.column.attention} attention, {view.column.title}", fontsize=10)
    axes.grid(alpha=0.3)


def seeds(path: Path, panels: Mapping[str, Mapping[str, Sequence[float]]], x: str) -> None:
    """Draw one panel per title: a line per method with a dot per seed and a bar at their mean."""
    figure, all_axes = panels_of(len(panels), 4.6, 1.0 + 0.4 * max(map(len, panels.values())))
    for axes, (title, rows) in zip(all_axes, panels.items(), strict=True):
        for place, (method, values) in enumerate(rows.items()):
            shown = {**style(method), "linestyle": ""}
            axes.plot(values, [place] * len(values), markersize=5, **shown)
            axes.plot([math.fsum(values) / len(values)], [place], "|", color="black", markersize=14)
        axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set(xlabel=x, title=title)
        axes.grid(alpha=0.3)
    save(figure, path)


def _scale(axes: Any, values: Sequence[float], kind: str, which: str) -> None:
    """Make an axis of perplexities logarithmic if they differ much."""
    if kind == "perplexity" and max(values) > LONG * min(values):
        _logarithmic(axes, which, max(values) / min(values))


def _logarithmic(axes: Any, which: str, ratio: float) -> None:
    """Make an axis logarithmic, with labels that fit. ratio: of its largest to its least value."""
    from matplotlib.ticker import LogLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log")
    tiers = {
        2.5: (1, 1.2, 1.4, 1.7, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
        5: (1, 1.5, 2, 3, 4, 6, 8),
        100: (1, 2, 5),
        math.inf: (1,),
    }
    places = next(places for most, places in tiers.items() if ratio < most)
    own = getattr(axes, f"{which}axis")
    own.set_major_locator(LogLocator(subs=places))
    own.set_minor_locator(NullLocator())
    own.set_major_formatter("{x:g}")


def axis(view: ColumnView) -> str:
    """Return the label of the axis of a column's values."""
    metric = {"perplexity": "perplexity", "fraction": "accuracy"}.get(view.kind)
    name = metric or view.column.metric.replace("bleu", "BLEU")
    return f"{name}, {view.column.better} is better"


def against_paper(path: Path, views: Sequence[ColumnView]) -> None:
    """Draw one panel per column: our numbers over the published ones, a point per method."""
    figure, panels = panels_of(len(views), 5.4, 4.4)
    for axes, view in zip(panels, views, strict=True):
        rows = [row for row in view.ranked() if row in view.paper]
        points = [(view.paper[row], view.mean(row)) for row in rows]
        for row, (x, y) in zip(rows, points, strict=True):
            axes.plot([x], [y], markersize=6, **style(view.names[row]))
        _scale(axes, [x for x, _ in points], view.kind, "x")
        _scale(axes, [y for _, y in points], view.kind, "y")
        axes.set(xlabel=f"paper, {view.column.better} is better", ylabel=f"ours: {axis(view)}")
        axes.set_title(f"{view.column.attention} attention, {view.column.title}", fontsize=10)
        axes.grid(alpha=0.3)
        _labels(axes, points, [view.names[row] for row in rows])
    save(figure, path)


def _labels(axes: Any, points: Sequence[tuple[float, float]], words: Sequence[str]) -> None:
    """Place a label beside every point so that they do not overlap."""
    import numpy as np
    from adjustText import adjust_text

    np.random.seed(0)
    axes.margins(0.08)
    texts = [axes.text(x, y, word, fontsize=8) for (x, y), word in zip(points, words, strict=True)]
    arrows = {"arrowstyle": "-", "color": "grey", "linewidth": 0.5}
    markers = list(axes.lines)
    shape = {"expand": (1.1, 1.3), "arrowprops": arrows}
    adjust_text(texts, ax=axes, objects=markers, iter_lim=300, **shape)  # no limit of time


Curves = Mapping[str, Sequence[tuple[float, float, float, float]]]
"""method -> (x, mean, lowest, highest over seeds), x ascending."""


def lines(
    path: Path, panels: Mapping[str, Curves], x: str, y: str, mark: float = 0, base: float = 2
) -> None:
    """Draw one panel of curves per title, with bands over the seeds.

    mark: a vertical line at this place, labeled as the training length; 0: none. base: of the
    logarithmic axis of x; 0: a linear axis.
    """
    figure = blank(5.6 * len(panels) + 1.8, 4.4)
    handles = {}
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, curves) in zip(all_axes, panels.items(), strict=True):
        for method, curve in curves.items():
            handles.setdefault(method, _line(axes, method, curve))
        if base:
            axes.set_xscale("log", base=base)
        axes.xaxis.set_major_formatter("{x:g}")
        least, *_, most = sorted(point[1] for curve in curves.values() for point in curve)
        _logarithmic(axes, "y", most / least)
        axes.set(xlabel=x, ylabel=y, title=title)
        axes.grid(alpha=0.3)
        if mark:
            axes.axvline(mark, color="black", linewidth=0.8)
            axes.text(mark, axes.get_ylim()[1], " training length", fontsize=8, va="top")
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8)
    save(figure, path)


def _line(axes: Any, method: str, curve: Sequence[tuple[float, float, float, float]]) -> Any:
    xs, means, low, high = zip(*curve, strict=True)
    shown = style(method)
    axes.fill_between(xs, low, high, color=shown["color"], alpha=0.2, linewidth=0)
    return axes.plot(xs, means, markersize=5, linewidth=1.3, **shown)[0]


def plane(
    path: Path, panels: Mapping[str, Mapping[str, tuple[float, float]]], x: str, y: str
) -> None:
    """Draw one panel of labeled points (x, y) per title, a point per method."""
    figure, all_axes = panels_of(len(panels), 5.6, 5.0)
    for axes, (title, points) in zip(all_axes, panels.items(), strict=True):
        for method, (across, up) in points.items():
            axes.plot([across], [up], markersize=6, **style(method))
        axes.set(xlabel=x, ylabel=y, title=title)
        axes.grid(alpha=0.3)
        _labels(axes, list(points.values()), list(points))
    save(figure, path)


def curve(views: Sequence[tuple[float, ColumnView]], row: str) -> list[tuple[float, ...]]:
    """Return the curve of one row over columns at places x; columns without it are left out."""
    found = []
    for x, view in views:
        if row in view.rows and row not in view.broken:
            values = list(view.cells[row].values())
            found.append((x, math.fsum(values) / len(values), min(values), max(values)))
    return found
