"""Scatter plots of our numbers against the published ones: one point per row, one panel per column.

No line is drawn, because neither equality nor a trend is expected. :data:`CAPTION` says what the
markers mean.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.report import cells, labels, pictures
from lrpe_fairseq.experiments.report.sheet import Sheet

FEWEST = 3  # minimum number of points of a panel
CAPTION = (
    "Bars: standard deviation over seeds. Pale markers: one seed. Hollow markers: outside the "
    "axes, labeled ({x}, {y})."
)
STYLES = {"linear": ("C0", "o"), "softmax": ("C3", "s")}  # color and marker
POINT, NEAR, BAR = 10.0, 0.5, 2.0  # costs of a pixel that a label covers
SIZE = 8  # of the letters of labels, in points
FULL = 14
"""Number of points that fit into a small panel; fuller ones are larger, one below the other."""


@dataclass(frozen=True)
class Point:
    """One row: the published number (or another x), our mean and deviation (None with one seed)."""

    label: str
    paper: float
    ours: float
    deviation: float | None


@dataclass(frozen=True)
class Panel:
    """One headline column. better: ``lower`` or ``higher``. x, y: labels of the axes; default:
    paper and ours, with ``better``."""

    title: str
    attention: str
    better: str
    points: tuple[Point, ...]
    x: str = ""
    y: str = ""


def panels(sheet: Sheet) -> list[Panel]:
    """Return the headline columns with at least :data:`FEWEST` rows that have both numbers."""
    found = []
    for column in sheet.headlines:
        points = tuple(
            Point(row.label, theirs, cells.mean(ours), cells.deviation(ours))
            for row, ours, theirs in sheet.pairs(column)
        )
        if len(points) >= FEWEST:
            title = f"{column.attention} attention, {column.title}"
            found.append(Panel(title, column.attention, column.better, points))
    return found


def draw(path: Path, found: list[Panel]) -> None:
    """Draw the panels and write the picture to ``path`` as PNG.

    Raises: ImportError if matplotlib, which comes with the extra [plots], is not installed.
    """
    if max(len(panel.points) for panel in found) > FULL:
        figure, rows = pictures.blank(9.0, 6.4 * len(found)), len(found)
    else:
        figure, rows = pictures.blank(5.4 * len(found), 4.6), 1
    all_axes = list(figure.subplots(rows, len(found) // rows, squeeze=False).flat)
    for axes, panel in zip(all_axes, found, strict=True):
        _points(axes, panel)
    figure.canvas.draw()  # fixes the positions of the points before labels are placed
    figure.set_layout_engine("none")
    for axes, panel in zip(all_axes, found, strict=True):
        _labels(axes, panel)
    pictures.save(figure, path)


def limits(values: list[float], deviations: list[float]) -> tuple[float, float]:
    """Return the range of an axis: the bulk of ``values`` with bars, plus a margin."""
    low, high = pictures.bulk(values)
    bars = [(v - d, v + d) for v, d in zip(values, deviations, strict=True) if low <= v <= high]
    low, high = min(bar[0] for bar in bars), max(bar[1] for bar in bars)
    margin = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def _points(axes: Any, panel: Panel) -> None:
    color, marker = STYLES[panel.attention]
    x_range = limits([p.paper for p in panel.points], [0.0] * len(panel.points))
    y_range = limits([p.ours for p in panel.points], [p.deviation or 0.0 for p in panel.points])
    for point in panel.points:
        x, y = _clamped(point.paper, x_range), _clamped(point.ours, y_range)
        off = (x, y) != (point.paper, point.ours)
        style = {"color": color, "fillstyle": "none" if off else "full", "zorder": 3}
        axes.plot(x, y, marker=marker, alpha=0.4 if point.deviation is None else 1.0, **style)
        if point.deviation and not off:
            axes.errorbar(x, y, yerr=point.deviation, color=color, linewidth=0.8, zorder=2)
    words = f"{panel.better} is better"
    axes.set(xlim=x_range, ylim=y_range, title=panel.title)
    axes.set(xlabel=panel.x or f"paper ({words})", ylabel=panel.y or f"ours ({words})")
    axes.grid(alpha=0.3)


def _clamped(value: float, limits: tuple[float, float]) -> float:
    inset = 0.03 * (limits[1] - limits[0])
    return min(max(value, limits[0] + inset), limits[1] - inset)


def _labels(axes: Any, panel: Panel) -> None:
    """Place labels where they and their lines cover the least of points, bars and each other."""
    x_range, y_range = axes.get_xlim(), axes.get_ylim()
    shown = [(_clamped(p.paper, x_range), _clamped(p.ours, y_range)) for p in panel.points]
    pixels = [tuple(axes.transData.transform(place)) for place in shown]
    entries = sorted(zip(panel.points, shown, pixels, strict=True), key=_key)
    texts = [_text(point, place) for point, place, _ in entries]
    scale = axes.figure.dpi / 72
    choices = [
        labels.places(_width(axes, text) + 4 * scale, 11 * scale, pixel, scale)
        for text, (*_, pixel) in zip(texts, entries, strict=True)
    ]
    frame = tuple(axes.get_window_extent().extents)
    found = labels.arrange(choices, _obstacles(axes, panel, pixels), frame)
    for text, (_, place, pixel), chosen in zip(texts, entries, found, strict=True):
        _label(axes, text, place, pixel, chosen)


def _obstacles(axes: Any, panel: Panel, pixels: list[tuple[float, float]]) -> list[labels.Obstacle]:
    """Return points, their surroundings and their bars."""
    found = []
    for point, (x, y) in zip(panel.points, pixels, strict=True):
        ends = axes.transData.transform([(0, 0), (0, point.deviation or 0.0)])
        bar = labels.around(x, y, 3, 2 * (ends[1][1] - ends[0][1]))
        found += [labels.Obstacle(labels.around(x, y, 9, 9), POINT), labels.Obstacle(bar, BAR)]
        found.append(labels.Obstacle(labels.around(x, y, 26, 26), NEAR))
    return found


def _key(entry: tuple[Point, Any, tuple[float, float]]) -> tuple[float, float, str]:
    point, _, (x, y) = entry
    return (-y, x, point.label)


def _text(point: Point, place: tuple[float, float]) -> str:
    if place == (point.paper, point.ours):
        return point.label
    return f"{point.label} ({point.paper:g}, {point.ours:.4g})"


def _width(axes: Any, text: str) -> float:
    """Return the width of a label in pixels."""
    found = axes.text(0, 0, text, fontsize=SIZE, transform=axes.transAxes)
    width = found.get_window_extent().width
    found.remove()
    return width


def _label(
    axes: Any,
    text: str,
    place: tuple[float, float],
    pixel: tuple[float, float],
    chosen: labels.Place,
) -> None:
    scale, center = axes.figure.dpi / 72, chosen.line[2:]
    offset = ((center[0] - pixel[0]) / scale, (center[1] - pixel[1]) / scale)
    arrow = {"arrowstyle": "-", "linewidth": 0.5, "color": "grey", "shrinkA": 0, "shrinkB": 3}
    axes.annotate(
        text, place, xytext=offset, textcoords="offset points", fontsize=SIZE, ha="center",
        va="center", arrowprops=arrow if chosen.distant else None,
    )  # fmt: skip
