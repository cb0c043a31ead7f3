"""Every picture of the pages: one style, and one color and marker per method everywhere.

A picture is a function of a path. The bytes depend only on the content and the versions of the
libraries.
"""

import itertools
import logging
import math
import re
import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lrpe_fairseq.encodings import unwrapped
from lrpe_fairseq.experiments.records.methods import public_name
from lrpe_fairseq.experiments.report.columns import ColumnView

LOOKS = {
    "o": "none rope lrpe-type2 permuteformer alibi fox stick-breaking t5 kerple-log lrpe-type4",
    "s": "spe transformer-xl lrpe-type1 lrpe-type3 lrpe-type5 lrpe-type6 lrpe-type7 lrpe-type8 "
    "lrpe-tmlr-type1",
    "^": "- path cosformer rope-2d rope-2d-mixed liere comrope-ap comrope-ld fope ape",
    "D": "ape-tree kerple-power sandwich fire cape-alibi cape-kerple cape-fire shaw deberta cope",
    "v": "tape",
}
"""Marker -> the methods that have it, in the order of COLORS; "-" is free.

A method keeps its place for ever, so that its pictures do not change. One that is not here has a
place of SPARE, by its name: it needs no entry, and may get one.
"""
COLORS = [f"C{n}" if n != 7 else "black" for n in range(10)]
"""Matplotlib's colors, with black for its grey: grey are the yardsticks only."""
PLACES = {
    name: (color, marker)
    for marker, names in LOOKS.items()
    for color, name in zip(COLORS, names.split(), strict=False)
}
SPARE = [(color, marker) for marker in "PX<>ph*d" for color in COLORS]
DASHES = {"layernorm": "--", "content": ":", "none": "-.", "no positions": "--"}
"""Line of a variant of a method."""
NGRAMS, CACHED = "n-grams", "n-grams and cache"
"""Names of the yardsticks in a picture."""
GREY = {
    NGRAMS: {"color": "grey", "marker": "", "linestyle": "--"},
    CACHED: {"color": "grey", "marker": "", "linestyle": ":"},
}
"""Styles of the yardsticks: no method is grey."""
LONG = 2.0
"""A panel of perplexities whose largest is this many times the smallest is logarithmic.

A perplexity that is this many times the third quartile is written at the edge of the panel.
"""
LINE = 0.038
"""Height of a name beside a curve, as a part of the panel's."""
TICKS = {
    2.5: (1, 1.2, 1.4, 1.7, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
    5: (1, 1.5, 2, 3, 4, 6, 8),
    100: (1, 2, 5),
    math.inf: (1,),
}
"""Ratio of the largest to the least value of a logarithmic axis, at most -> its labels."""
NEAR = 28
"""Distance in points of a label's middle from its marker, above which a line joins them."""
OFFSETS = [
    (round(1.6 * far * math.cos(turn * math.tau / 24)), round(far * math.sin(turn * math.tau / 24)))
    for far in range(7, 130, 4)
    for turn in range(24)
]
"""Where the middle of a label may stand, from its marker, in points: the nearest first."""
LABEL = {
    "xytext": (0, 0),
    "textcoords": "offset points",
    "ha": "center",
    "va": "center",
    "fontsize": 8,
}
LINE_TO = {"arrowprops": {"arrowstyle": "-", "color": "grey", "linewidth": 0.5, "shrinkA": 0}}
"""Style of a label, and of the line from one that is far from its point."""
Point = tuple[float, float, float, float]
"""x, and the mean, the lowest and the highest value over the seeds."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    rows: method -> what is drawn. kind: of the values (``ColumnView``). marks: name -> value of a
    line over the whole panel. baseline: the method that is named as such.
    """

    title: str
    x: str
    rows: Mapping[str, Any]
    y: str = ""
    kind: str = ""
    marks: Mapping[str, float] = field(default_factory=dict)
    baseline: str = ""


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
    # Without the library's version, so that equal pictures have equal bytes.
    figure.savefig(path, format="png", metadata={"Software": None})


def styles(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return color, marker and dash of every method of a picture, by its name.

    Different encodings have another color or marker. One has the same in every picture; if two that
    are not in LOOKS meet at one place of SPARE, the second takes the next place. Hollow: gates,
    half: path and selective. The yardsticks have the styles of GREY.
    """
    shown = dict.fromkeys(methods)
    encodings = {method: _base(method) for method in shown if method not in GREY}
    places = dict(PLACES)
    for name in sorted(set(encodings.values()) - PLACES.keys()):
        first = zlib.crc32(name.encode()) % len(SPARE)
        # The same place in every picture, unless another method of this one has it.
        in_turn = (*SPARE[first:], *SPARE[:first])
        free = (place for place in in_turn if place not in places.values())
        places[name] = next(free, SPARE[first])
    of_encodings = {}
    for method, name in encodings.items():
        color, marker = places[name]
        of_encodings[method] = _style(method, color, marker)
    return {method: of_encodings.get(method) or dict(GREY[method]) for method in shown}


def _base(method: str) -> str:
    """Return the name of a method's encoding, without its wrappers."""
    _, inner = unwrapped(_parts(method)[0])
    return public_name(inner)


def _parts(method: str) -> list[str]:
    """Return the encoding of a method and its variants."""
    return method.rstrip("*").partition(" (")[0].split(", ")


def _style(method: str, color: str, marker: str) -> dict[str, Any]:
    encoding, *variant = _parts(method)
    style: dict[str, Any] = {"color": color, "marker": marker}
    style["linestyle"] = next((DASHES[word] for word in variant if word in DASHES), "-")
    wrappers, _ = unwrapped(encoding)
    if "gated" in wrappers:
        style["markerfacecolor"] = "white"
    if "path" in wrappers:
        style["fillstyle"] = "left"
    if "selective" in wrappers:
        style["fillstyle"] = "bottom"
    return style


def _styles_of(panels: Sequence[Panel]) -> dict[str, dict[str, Any]]:
    """Return the styles of the methods of all panels."""
    return styles(method for panel in panels for method in panel.rows)


def _axes(panels: Sequence[Panel], width: float, height: float) -> tuple[Any, list[Any]]:
    """Return a figure of labeled panels, two in a row, and their axes; sizes in inches."""
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = blank(width * columns, height * rows)
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    # An odd number of panels leaves an empty one.
    for unused in every[len(panels) :]:
        unused.remove()
    for axes, panel in zip(every, panels, strict=False):
        axes.set(xlabel=panel.x, ylabel=panel.y)
        axes.set_title(panel.title, fontsize=10)
        axes.grid(alpha=0.3)
    return figure, every[: len(panels)]


def dots(path: Path, panels: Sequence[Panel]) -> None:
    """Draw a row per method: mean, and a line over the seeds. rows: method -> their values.

    Panels that differ in the attention type only have one range: that of the rows, not of the
    marks. A value far beyond the others, and a mark beyond the rows, stand as numbers at the edge.
    """
    labels = [[_label(panel, name) for name in panel.rows] for panel in panels]
    # Labels with a second line need twice the height.
    tallest = max(len("\n".join(names).splitlines()) for names in labels)
    figure, every = _axes(panels, 5.2, 1.2 + 0.2 * tallest)
    shown = _styles_of(panels)
    for axes, panel, names in zip(every, panels, labels, strict=True):
        most = _most(_of_pair(panels, panel), panel.kind)
        points = [point(0, values) for values in panel.rows.values()]
        for place, (method, (_, mean, low, high)) in enumerate(
            zip(panel.rows, points, strict=True)
        ):
            # A mean of equal numbers may differ from them by rounding.
            spread = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
            style = shown[method]
            if mean > most:
                _leaving(axes, place, mean, style["color"])
            else:
                axes.errorbar([mean], [place], xerr=spread, markersize=5, linewidth=1, **style)
        axes.set_yticks(range(len(points)), names, fontsize=8)
        # The first row on top, as in the table.
        axes.set_ylim(len(points) - 0.5, -0.5)
        _share(axes, _of_pair(panels, panel), panel.kind, most)
        _mark(axes, panel.marks, "x")
        if panel.kind == "plain" and points[0][1] > 10_000:
            axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g} M")
    save(figure, path)


def leaves(panels: Sequence[Panel]) -> bool:
    """True if :func:`dots` writes a value or a mark of ``panels`` as a number at the edge."""
    for panel in panels:
        values = _of_pair(panels, panel)
        most = _most(values, panel.kind)
        inside = [value for value in values if value <= most]
        beyond = any(point(0, seeds)[1] > most for seeds in panel.rows.values())
        if beyond or any(not min(inside) <= x <= max(inside) for x in panel.marks.values()):
            return True
    return False


def _label(panel: Panel, method: str) -> str:
    """Return the name of a row of dots."""
    name = f"baseline: {method}" if method == panel.baseline else method
    return name.replace(" (", "\n(")


def _of_pair(panels: Sequence[Panel], panel: Panel) -> list[float]:
    """Return the values of a panel and of those that differ in attention only."""
    pair = [x for x in panels if (_subject(x), x.kind) == (_subject(panel), panel.kind)]
    return [value for x in pair for values in x.rows.values() for value in values]


def _subject(panel: Panel) -> str:
    return re.sub(r"^(linear|softmax) attention(, )?", "", panel.title, flags=re.IGNORECASE)


def _most(values: Sequence[float], kind: str) -> float:
    """Return the highest value that an axis shows: few perplexities do not press the others."""
    third_quartile = sorted(values)[len(values) * 3 // 4]
    return LONG * third_quartile if kind == "perplexity" else math.inf


def _leaving(axes: Any, place: float, value: float, color: str) -> None:
    """Write a value that the axis does not reach at its right end."""
    across = axes.get_yaxis_transform()
    text = {"fontsize": 8, "color": color, "ha": "right", "va": "center"}
    axes.text(0.99, place, f"{value:,.0f} \u2192", transform=across, **text)


def _share(axes: Any, values: Sequence[float], kind: str, most: float) -> None:
    """Give the axis of values the range of ``values`` up to ``most``, logarithmic if it is wide."""
    inside = [value for value in values if value <= most]
    _scale(axes, inside, kind, "x")
    low, high = min(inside), max(inside)
    if axes.get_xscale() == "log":
        margin = (high / low) ** 0.05
        axes.set_xlim(low / margin, high * margin)
    elif low < high:
        margin = 0.05 * (high - low)
        axes.set_xlim(low - margin, high + margin)


def points(path: Path, panels: Sequence[Panel]) -> None:
    """Draw a labeled point per method. rows: method -> (x, y).

    A value far beyond the others stands at the upper edge, with its number.
    """
    figure, every = _axes(panels, 5.6, 5.0)
    shown = _styles_of(panels)
    for axes, panel in zip(every, panels, strict=True):
        marks = [*panel.marks.values()]
        most = _most([y for _, y in panel.rows.values()], panel.kind)
        inside = {method: at for method, at in panel.rows.items() if at[1] <= most}
        top = max([*(y for _, y in inside.values()), *marks]) * 1.08
        placed = dict(inside)
        for method, (x, y) in panel.rows.items():
            beyond = method not in inside
            name = f"{method}: {y:,.0f} \u2191" if beyond else method
            placed.pop(method, None)
            placed[name] = (x, top if beyond else y)
            axes.plot([x], [placed[name][1]], markersize=6, **shown[method])
        for which, values in zip("xy", zip(*placed.values(), strict=True), strict=True):
            _scale(axes, [*values, *(marks if which == "y" else ())], panel.kind, which)
        _mark(axes, panel.marks, "y")
        _labels(axes, placed)
    save(figure, path)


@dataclass(frozen=True)
class Heat:
    """One panel of a map: ``values[y][x]`` in [0, 1], None where nothing was measured."""

    title: str
    values: Sequence[Sequence[float | None]]


def maps(path: Path, panels: Sequence[Heat], x: Sequence[str], y: Sequence[str]) -> None:
    """Draw a panel of colored cells per method, with their values; all have the axes x and y.

    The first entries of x and y are their axes' names.
    """
    columns = min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = blank(3.0 * columns, 2.9 * rows)
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in every[len(panels) :]:
        unused.remove()
    for axes, panel in zip(every, panels, strict=False):
        values = [[math.nan if v is None else v for v in line] for line in panel.values]
        axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for row, column in itertools.product(range(len(values)), range(len(values[0]))):
            value = values[row][column]
            if not math.isnan(value):
                ink = "black" if value > 0.5 else "white"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink)
        axes.set_xticks(range(len(x) - 1), x[1:])
        axes.set_yticks(range(len(y) - 1), y[1:])
        axes.set(xlabel=x[0], ylabel=y[0])
        axes.set_title(textwrap.fill(panel.title, 28), fontsize=9)
    save(figure, path)


def lines(
    path: Path, panels: Sequence[Panel], mark: float | None = None, most: float = math.inf
) -> None:
    """Draw a curve per method with a band over the seeds. rows: method -> its points.

    Every curve has its name at its end, after a sample of its line. All panels have one range.
    mark: a vertical line at this place, labeled as the training length. most: the highest value
    that is shown; a curve that ends above it has its last value beside its name.
    """
    figure, every = _axes(panels, 6.6, 4.8)
    shown = _styles_of(panels)
    means = [mean for panel in panels for curve in panel.rows.values() for _, mean, *_ in curve]
    inside = [mean for mean in means if mean < most]
    for axes, panel in zip(every, panels, strict=True):
        for method, curve in panel.rows.items():
            _line(axes, shown[method], curve, most)
        xs = sorted({x for curve in panel.rows.values() for x, *_ in curve})
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [f"{x:,g}" for x in xs])
        axes.minorticks_off()
        # Curves that leave the picture do not choose its ticks.
        _logarithmic(axes, "y", inside)
        axes.set_ylim(min(means) / 1.03, min(1.05 * max(means), most))
        if mark is not None:
            axes.axvline(mark, color="black", linewidth=0.8)
            axes.text(mark, axes.get_ylim()[0] * 1.01, " training length", fontsize=8)
        _names_at_ends(axes, panel.rows, shown)
    save(figure, path)


def _names_at_ends(axes: Any, rows: Mapping[str, Any], shown: Mapping[str, Any]) -> None:
    """Write the name of every curve beside its end, after a sample of its line, without overlap."""
    low, high = map(math.log, axes.get_ylim())
    ends = {}
    for method, curve in rows.items():
        _, mean, *_ = curve[-1]
        beyond = math.log(mean) > high
        name = f"{method}: {mean:,.0f} \u2191" if beyond else method
        ends[method] = (name, 1.0 if beyond else (math.log(mean) - low) / (high - low))
    ranked = sorted(ends, key=lambda method: ends[method][1])
    places = spread([ends[method][1] for method in ranked], LINE)
    for method, place in zip(ranked, places, strict=True):
        name, end = ends[method]
        color = shown[method]["color"]
        across = {"transform": axes.transAxes, "clip_on": False}
        axes.plot([1.0, 1.03], [end, place], color=color, linewidth=0.7, **across)
        # Methods may share a color: their markers and dashes differ.
        sample = {"markersize": 4, "linewidth": 1.3, "markevery": [1], **shown[method]}
        axes.plot([1.035, 1.06, 1.085], [place] * 3, **sample, **across)
        axes.text(1.095, place, name, fontsize=8, color=color, va="center", **across)


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Return places that are at least ``gap`` apart and as near to ``wanted`` as possible.

    wanted: in ascending order. The squared distances are least (isotonic regression).

    >>> spread([0.0, 1.0, 1.0], 0.2)
    [0.0, 0.9, 1.1]
    """
    pools: list[list[float]] = []
    for number, place in enumerate(wanted):
        pools.append([place - number * gap])
        while len(pools) > 1 and math.fsum(pools[-2]) * len(pools[-1]) > math.fsum(pools[-1]) * len(
            pools[-2]
        ):
            last = pools.pop()
            pools[-1] += last
    means = [math.fsum(pool) / len(pool) for pool in pools for _ in pool]
    return [round(mean + number * gap, 9) for number, mean in enumerate(means)]


def quantiles(path: Path, panels: Sequence[Panel]) -> None:
    """Draw curves of quantiles of turns, labeled at their ends. rows: name -> its points (x, y).

    Below a hundredth of a turn the axis is linear, so that angles of 0 have a place.
    """
    figure, every = _axes(panels, 5.2, 3.8)
    top = max(y for panel in panels for curve in panel.rows.values() for _, y in curve)
    for axes, panel in zip(every, panels, strict=True):
        for place, (name, curve) in enumerate(panel.rows.items()):
            xs, ys = zip(*curve, strict=True)
            axes.plot(xs, ys, color=f"C{place}", linewidth=1.3)
            axes.text(xs[-1], ys[-1], f" {name}", fontsize=8, va="center", color=f"C{place}")
        axes.set_yscale("symlog", linthresh=0.01)
        axes.set_ylim(-0.002, 1.5 * top)
        axes.yaxis.set_major_formatter("{x:g}")
        last = max(x for curve in panel.rows.values() for x, _ in curve)
        axes.set_xlim(-0.03 * last, 1.35 * last)  # room for the names
        axes.axhline(1, color="black", linewidth=0.8)
        axes.text(0, 1, " one turn", fontsize=8, va="bottom")
    save(figure, path)


def curves(path: Path, panels: Sequence[Panel]) -> None:
    """Draw a curve per method over the updates of a training. rows: method -> its points.

    Every curve has its name at its end, and all panels have one range.
    """
    figure, every = _axes(panels, 6.6, 4.8)
    shown = _styles_of(panels)
    means = [mean for panel in panels for curve in panel.rows.values() for _, mean, *_ in curve]
    for axes, panel in zip(every, panels, strict=True):
        for method, curve in panel.rows.items():
            _line(axes, shown[method], curve)
        _logarithmic(axes, "y", means)
        axes.set_ylim(min(means) / 1.03, 1.05 * max(means))
        axes.set_xlim(right=max(x for curve in panel.rows.values() for x, *_ in curve))
        axes.xaxis.set_major_formatter("{x:,g}")
        _names_at_ends(axes, panel.rows, shown)
    save(figure, path)


def point(x: float, values: Sequence[float]) -> Point:
    """Return the point of a curve at x."""
    return x, math.fsum(values) / len(values), min(values), max(values)


def axis(view: ColumnView) -> str:
    """Return the label of the axis of a column's values."""
    metric = {"perplexity": "perplexity", "fraction": "accuracy"}.get(view.kind)
    # A mean of several columns has a title and no metric.
    name = metric or view.column.metric.replace("bleu", "BLEU") or view.column.title
    return f"{name}, {view.column.better} is better"


def _line(
    axes: Any, shown: Mapping[str, Any], curve: Sequence[Point], most: float = math.inf
) -> None:
    """Draw a curve and its band; no band between two means above ``most``, which are not seen."""
    pairs = itertools.pairwise(curve)
    for seen, group in itertools.groupby(pairs, lambda pair: min(pair[0][1], pair[1][1]) <= most):
        if seen:
            first, *others = group
            xs, _, low, high = zip(*first, *(end for _, end in others), strict=True)
            axes.fill_between(xs, low, high, color=shown["color"], alpha=0.2, linewidth=0)
    xs, means, *_ = zip(*curve, strict=True)
    axes.plot(xs, means, markersize=5, linewidth=1.3, **shown)


def _scale(axes: Any, values: Sequence[float], kind: str, which: str) -> None:
    """Make an axis of perplexities logarithmic if they differ much."""
    # One row that fails would press all others into a corner.
    if kind == "perplexity" and max(values) > LONG * min(values):
        _logarithmic(axes, which, values)


def _logarithmic(axes: Any, which: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic, with labels that fit."""
    from matplotlib.ticker import LogLocator, NullLocator

    ratio = max(values) / min(values)
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=next(t for most, t in TICKS.items() if ratio < most)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def _mark(axes: Any, marks: Mapping[str, float], which: str) -> None:
    """Draw a labeled line at every value of ``marks``, across the axis ``which``.

    One that a horizontal axis does not reach is written at its end.
    """
    text = {"fontsize": 7, "color": "grey", "textcoords": "offset points"}
    for place, (name, value) in enumerate(marks.items()):
        # Behind the points.
        line = {"color": "grey", "linewidth": 0.8, "zorder": 0}
        line["linestyle"] = GREY[name]["linestyle"]
        if which == "y":
            axes.axhline(value, **line)
            at = {"xy": (0, value), "xycoords": axes.get_yaxis_transform(), "xytext": (3, 2)}
            axes.annotate(name, **at, **text)
            continue
        low, high = axes.get_xlim()
        if low <= value <= high:
            axes.axvline(value, **line)
            at = {"xy": (value, 0), "xycoords": axes.get_xaxis_transform(), "xytext": (2, 3)}
            axes.annotate(name, rotation=90, ha="left", va="bottom", **at, **text)
        elif value < low:
            # The best row is on top, so the lower left and the upper right are free.
            at = {"xy": (0, 0), "xycoords": "axes fraction", "xytext": (3, 4 + 10 * place)}
            axes.annotate(f"\u2190 {name}: {value:,.0f}", **at, **text)
        else:
            at = {"xy": (1, 1), "xycoords": "axes fraction", "xytext": (-3, -10 - 10 * place)}
            axes.annotate(f"{name}: {value:,.0f} \u2192", ha="right", **at, **text)


def _labels(axes: Any, rows: Mapping[str, tuple[float, float]]) -> None:
    """Write a label beside every point, on no marker and no other label; far ones have a line."""
    # Room for labels at the edge.
    axes.margins(0.08)
    axes.figure.canvas.draw()  # the layout, which places depend on
    scale = axes.figure.dpi / 72
    frame = axes.get_window_extent()
    markers = [line for line in axes.lines if line.get_marker() != "None"]
    taken = [line.get_window_extent().extents for line in markers]
    centers = axes.transData.transform(list(rows.values()))
    # Those with the most markers around have the fewest places.
    crowd = [sum(math.dist(a, b) < 60 for b in centers) for a in centers]
    names = list(rows)
    for n in sorted(range(len(names)), key=lambda n: -crowd[n]):
        name, at, center = names[n], rows[names[n]], centers[n]
        color = markers[n].get_color()
        text = axes.annotate(name, at, **LABEL)
        own = text.get_window_extent()
        half = own.width / 2, own.height / 2
        for offset in OFFSETS:
            x, y = (c + scale * o for c, o in zip(center, offset, strict=True))
            box = (x - half[0], y - half[1], x + half[0], y + half[1])
            inside = frame.x0 < box[0] and box[2] < frame.x1 and frame.y0 < box[1] < frame.y1
            if inside and not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        text.remove()
        # A line also where another marker is as near.
        nearest = min(
            (math.dist((x, y), c) for m, c in enumerate(centers) if m != n), default=math.inf
        )
        joined = math.hypot(*offset) > NEAR or nearest < 1.5 * math.dist((x, y), center)
        own_style = {**LABEL, "xytext": offset, "color": color, **(LINE_TO if joined else {})}
        axes.annotate(name, at, **own_style)


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    """True if two boxes (left, bottom, right, top) overlap."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
