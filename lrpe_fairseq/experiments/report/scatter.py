"""Scatter plots of our numbers against the published ones: one point per row, one panel per column.

No line is drawn, because neither equality nor a trend is expected. :data:`CAPTION` says what the
markers mean.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.report import cells, pictures
from lrpe_fairseq.experiments.report.sheet import Sheet

Box = tuple[float, float, float, float]
"""Left, lower, right and upper edge in pixels."""

FEWEST = 3  # minimum number of points of a panel
CAPTION = (
    "Bars: standard deviation over seeds. Pale markers: one seed. Hollow markers: outside the "
    "axes, labeled ({x}, {y})."
)
STYLES = {"linear": ("C0", "o"), "softmax": ("C3", "s")}  # color and marker
ANGLES = (0, 6, 1, 11, 5, 7, 3, 9, 2, 4, 8, 10)  # in units of 30 degrees, the best first
OFFSETS = [  # of a label from its point, in points; the first free one is used
    (r * math.cos(a * math.pi / 6), r * math.sin(a * math.pi / 6))
    for r in (9, 16, 26, 38, 52)
    for a in ANGLES
]
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
            found.append(Panel(title, column.attention, sheet.table.better, points))
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
    """Place labels, the top ones first, where they cover the least of points, bars and labels."""
    to_pixels = axes.transData.transform
    x_range, y_range = axes.get_xlim(), axes.get_ylim()
    shown = [(_clamped(p.paper, x_range), _clamped(p.ours, y_range)) for p in panel.points]
    pixels = [tuple(to_pixels(place)) for place in shown]
    taken = [_box(x, y, 9, 9) for x, y in pixels]
    for point, (x, y) in zip(panel.points, pixels, strict=True):
        bar = abs(to_pixels((0, point.deviation or 0.0))[1] - to_pixels((0, 0))[1])
        taken.append(_box(x, y, 3, 2 * bar))
    for point, place, pixel in sorted(zip(panel.points, shown, pixels, strict=True), key=_key):
        off = place != (point.paper, point.ours)
        text = f"{point.label} ({point.paper:g}, {point.ours:.4g})" if off else point.label
        _label(axes, text, place, pixel, taken)


def _key(entry: tuple[Point, Any, tuple[float, float]]) -> tuple[float, float, str]:
    point, _, (x, y) = entry
    return (-y, x, point.label)


def _label(axes: Any, text: str, place: Any, pixel: tuple[float, float], taken: list[Box]) -> None:
    """Draw ``text`` at the offset with the least overlap; distant labels get a thin line."""
    scale = axes.figure.dpi / 72
    width, height = (5.2 * len(text) + 4) * scale, 11 * scale
    frame = axes.get_window_extent()
    choices = []
    for index, (dx, dy) in enumerate(OFFSETS):
        x = pixel[0] + dx * scale + math.copysign(width / 2, round(dx, 6)) * (abs(dx) > 1)
        box = _box(x, pixel[1] + dy * scale, width, height)
        choices.append([box, *(_line(pixel, box) if index >= len(ANGLES) else [])])
    costs = [_covered(boxes, taken) + _outside(boxes[0], frame) for boxes in choices]
    best = costs.index(min(costs))
    taken += choices[best]
    center = _center(choices[best][0])
    offset = ((center[0] - pixel[0]) / scale, (center[1] - pixel[1]) / scale)
    arrow = {"arrowstyle": "-", "linewidth": 0.5, "color": "grey", "shrinkA": 0, "shrinkB": 3}
    axes.annotate(
        text, place, xytext=offset, textcoords="offset points", fontsize=8, ha="center",
        va="center", arrowprops=arrow if best >= len(ANGLES) else None,
    )  # fmt: skip


def _box(x: float, y: float, width: float, height: float) -> Box:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _center(box: Box) -> tuple[float, float]:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def _line(start: tuple[float, float], label: Box) -> list[Box]:
    """Return small boxes along the line from a point to the edge of its label."""
    (x, y), (to_x, to_y) = start, _center(label)
    steps = [n / 16 for n in range(2, 16)]
    boxes = [_box(x + t * (to_x - x), y + t * (to_y - y), 4, 4) for t in steps]
    return [box for box in boxes if not _overlap(box, label)]


def _covered(boxes: list[Box], taken: list[Box]) -> float:
    """Return the area of ``taken`` that ``boxes`` cover, in square pixels."""
    return sum(_overlap(box, other) for box in boxes for other in taken)


def _overlap(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0


def _outside(box: Box, frame: Any) -> float:
    beyond = [frame.x0 - box[0], frame.y0 - box[1], box[2] - frame.x1, box[3] - frame.y1]
    return 1e4 * sum(max(0.0, pixels) for pixels in beyond)
