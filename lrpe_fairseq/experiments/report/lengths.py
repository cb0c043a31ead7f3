"""Plots of evaluations beyond the training length, one picture per attention type.

The left panel shows the paired protocols: the same tokens with growing context. The right panel
shows the loss by position in the longest blocks.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records.layout import ATTENTION, Column, Row
from lrpe_fairseq.experiments.records.protocols import PAIRED, POSITIONS, bounds
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.report import cells, pictures
from lrpe_fairseq.experiments.report.sheet import Sheet

BOUNDS = {"delta_low": min, "delta_high": max}  # over seeds
COLORS = 10
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # their number and COLORS are coprime
LINES = ("-", "--", ":", "-.")
FEWEST = 3
"""Smallest number of paired lengths of a figure."""
MANY = 14
"""Number of rows that fit into the legend beside the panels in the usual size of letters."""
LINEAR = 0.1
"""Nats up to which the axis of differences is linear; it is logarithmic beyond."""
LEAST = (-0.05, 0.1)
"""Range in nats that the axis of differences always shows."""
CAPTION = (
    "Left: loss of the same tokens with a longer context, minus that with the training length; the "
    f"axis is linear up to {LINEAR:g} nats and logarithmic beyond. Bands: the 95 % bootstrap "
    "intervals over the blocks of the test set, from the lowest to the highest of all seeds. "
    "Right: mean loss by position in the longest blocks; a point stands at the upper bound of its "
    "range of positions{counts}, and a row that leaves the axes is named with its largest value. "
    "Lines: means over seeds; a row has one color, marker and dash in all of these pictures."
)
Curve = list[tuple[float, float]]  # (tokens, nats), tokens ascending


@dataclass(frozen=True)
class Panel:
    """The curves of one attention type, by row: paired differences, and loss by position.

    trained: the training length in tokens. rows: the rows in ``curves`` of the table, measured or
    not. low, high: the bounds of the intervals of the paired differences over all seeds. fewest:
    the smallest number of tokens of a point by position; 0 if the runs do not say it.
    """

    attention: str
    trained: int
    rows: tuple[str, ...]
    paired: dict[str, Curve] = field(default_factory=dict)
    positions: dict[str, Curve] = field(default_factory=dict)
    low: dict[str, Curve] = field(default_factory=dict)
    high: dict[str, Curve] = field(default_factory=dict)
    fewest: int = 0


def panels(sheet: Sheet) -> list[Panel]:
    """Return a panel per attention type with paired columns and runs of rows in ``curves``."""
    found = []
    for attention in ATTENTION:
        columns = [c for c in sheet.table.columns if c.attention == attention]
        paired = [c for c in columns if _kind(c) == PAIRED and c.metric == "ppl"]
        if len(paired) >= FEWEST:
            positions = [c for c in columns if _kind(c) == POSITIONS][:1]
            panel = Panel(
                attention,
                sheet.option("task.tokens_per_sample"),
                tuple(sheet.table.curves),
                _curves(sheet, paired, _paired),
                _curves(sheet, positions, _by_position),
                *(
                    _curves(sheet, paired, functools.partial(_bound, name), outermost)
                    for name, outermost in BOUNDS.items()
                ),
                _fewest(sheet, positions),
            )
            found += [panel] if panel.paired else []
    return found


def caption(shown: Iterable[Panel]) -> str:
    """Return the caption of some pictures, with the smallest number of tokens of a point."""
    counts = [panel.fewest for panel in shown if panel.fewest]
    text = f", which has at least {min(counts):,} tokens" if counts else ""
    return CAPTION.format(counts=text)


def draw(path: Path, panel: Panel) -> None:
    """Draw one panel and write the picture to ``path`` as PNG.

    Raises: ImportError if matplotlib, which comes with the extra [plots], is not installed.
    """
    pictures.save(figure(panel), path)


def figure(panel: Panel) -> Any:
    """Draw one panel: differences of the loss on the left, loss by position on the right.

    Raises: ImportError if matplotlib is not installed.
    """
    drawn = pictures.blank(12, 4.4)
    left, right = drawn.subplots(1, 2)
    _lines(left, panel.paired, panel)
    _bands(left, panel)
    _lines(right, panel.positions, panel)
    _differences(left)
    _cut(right, panel.positions)
    left.set(xlabel="context, tokens", title=f"{panel.attention} attention, the same tokens")
    right.set(xlabel="position (upper bound of each range)", ylabel="loss, nats")
    right.set_title(f"{panel.attention} attention, by position")
    handles = {line.get_label(): line for axes in (left, right) for line in axes.get_lines()}
    shown = [label for label in panel.rows if label in handles]
    letters = "medium" if len(shown) <= MANY else "small"
    options = {"loc": "outside right upper", "fontsize": letters, "handlelength": 3.2}
    drawn.legend([handles[label] for label in shown], shown, **options)
    return drawn


def style(label: str, rows: Sequence[str]) -> dict[str, str]:
    """Return color, marker and dash of a row; no two of up to 280 rows share all three.

    rows: all rows of the table's pictures, so that a row looks the same in each of them.
    """
    place = rows.index(label)
    return {
        "color": f"C{place % COLORS}",
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": LINES[place // COLORS % len(LINES)],
    }


def _kind(column: Column) -> str:
    return column.protocol.split("-")[0]


def _length(column: Column) -> int:
    return int(column.protocol.split("-")[1])


def _curves(
    sheet: Sheet,
    columns: list[Column],
    curve_of: Callable[[Run, list[Column]], Curve],
    over_seeds: Callable[[list[float]], float] = statistics.fmean,
) -> dict[str, Curve]:
    """Return one curve, ``over_seeds``, of every row in ``curves`` that has one."""
    found = {}
    for label in sheet.table.curves:
        own = [curve_of(run, columns) for run in _runs(sheet, sheet.table.row(label), columns)]
        if curve := _combined(own, over_seeds):
            found[label] = curve
    return found


def _runs(sheet: Sheet, row: Row, columns: list[Column]) -> list[Run]:
    runs: cells.Runs = {}
    for column in columns:
        runs |= cells.cell_runs(sheet.table, row, column, sheet.group.runs)
    return [runs[name] for name in sorted(runs)]


def _combined(curves: Iterable[Curve], over_seeds: Callable[[list[float]], float]) -> Curve:
    """Return one value at every length that all curves have."""
    known = [dict(curve) for curve in curves if curve]
    shared = sorted(set.intersection(*map(set, known))) if known else []
    return [(x, over_seeds([curve[x] for curve in known])) for x in shared]


def _paired(run: Run, columns: list[Column]) -> Curve:
    """Return the loss of a run at every paired length, minus that at the shortest.

    Empty if the run diverged at the shortest length.
    """
    found, shortest = {}, min(map(_length, columns))
    for column in columns:
        loss = run["metrics"].get(column.split, {}).get(column.protocol, {}).get("loss")
        if loss is not None:
            found[_length(column)] = loss * math.log(2)
    if shortest not in found:
        return []
    return [(length, loss - found[shortest]) for length, loss in sorted(found.items())]


def _bound(name: str, run: Run, columns: list[Column]) -> Curve:
    """Return a bound of the interval of the paired difference at every length that has one."""
    measured = ((c, run["metrics"].get(c.split, {}).get(c.protocol, {})) for c in columns)
    found = sorted((_length(c), own[name]) for c, own in measured if name in own)
    return found if _paired(run, columns) else []


def _by_position(run: Run, columns: list[Column]) -> Curve:
    """Return the loss of a run by position, at the upper bounds of the bins."""
    if not columns:
        return []
    measured = run["metrics"].get(columns[0].split, {}).get(columns[0].protocol, {})
    known = [b for b in bounds(_length(columns[0])) if f"loss-{b}" in measured]
    return [(bound, measured[f"loss-{bound}"] * math.log(2)) for bound in known]


def _fewest(sheet: Sheet, columns: list[Column]) -> int:
    """Return the smallest number of tokens in a range of positions, over the rows in ``curves``."""
    measured = [
        run["metrics"].get(column.split, {}).get(column.protocol, {})
        for column in columns
        for label in sheet.table.curves
        for run in _runs(sheet, sheet.table.row(label), columns)
    ]
    return min((n for m in measured for k, n in m.items() if k.startswith("tokens-")), default=0)


def _lines(axes: Any, curves: dict[str, Curve], panel: Panel) -> None:
    """Draw curves over a logarithmic axis of tokens, with the training length marked."""
    for label, curve in curves.items():
        shape = {"linewidth": 1.2, "markersize": 4, **style(label, panel.rows)}
        axes.plot(*zip(*curve, strict=True), label=label, **shape)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.axvline(panel.trained, color="black", linewidth=0.8, zorder=1)
    place = {"xytext": (3, -4), "textcoords": "offset points", "rotation": 90, "va": "top"}
    at = (panel.trained, 1.0)
    axes.annotate("training length", at, xycoords=axes.get_xaxis_transform(), size=8, **place)


def _bands(axes: Any, panel: Panel) -> None:
    for label, low in panel.low.items():
        lengths, bottom = zip(*low, strict=True)
        top = [value for _, value in panel.high[label]]
        color = style(label, panel.rows)["color"]
        axes.fill_between(lengths, bottom, top, color=color, alpha=0.2, linewidth=0)


def _differences(axes: Any) -> None:
    """Scale the axis of differences so that small and large ones are told apart."""
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.set_ylabel(f"difference of the loss, nats (logarithmic beyond ±{LINEAR:g})")
    low, high = axes.get_ylim()
    low, high = min(low, LEAST[0]), max(high, LEAST[1])
    axes.set_ylim(low, high)
    axes.set_yticks(ticks(low, high))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.axhline(0, color="black", linewidth=0.8, zorder=1)


def ticks(low: float, high: float) -> list[float]:
    """Return the round numbers from ``low`` to ``high`` that the axis of differences shows.

    >>> ticks(-0.06, 3)
    [-0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0]
    """
    decades = range(math.ceil(math.log10(max(-low, high) / LINEAR)) + 1)
    sizes = [round(LINEAR * step * 10**decade, 9) for decade in decades for step in (1, 2, 5)]
    sizes = [LINEAR / 2, *sizes]
    return [tick for tick in (*(-s for s in reversed(sizes)), 0.0, *sizes) if low <= tick <= high]


def _cut(axes: Any, curves: dict[str, Curve]) -> None:
    """Limit the axis to the bulk of the curves; those that leave it are named."""
    if not curves:
        return
    largest = {label: max(value for _, value in curve) for label, curve in curves.items()}
    high = pictures.bulk(list(largest.values()))[1]
    low = min(value for curve in curves.values() for _, value in curve)
    margin = 0.1 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    beyond = [f"{label} reaches {top:.2f}" for label, top in largest.items() if top > high]
    axes.text(0.02, 0.98, "\n".join(beyond), transform=axes.transAxes, va="top", size=8)
