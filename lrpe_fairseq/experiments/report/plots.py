"""Every picture of the pages: one style, and one color and marker per method everywhere.

A picture is a function of a path. The bytes depend only on the content and the versions of the
libraries.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrpe_fairseq.encodings import (
    ENCODINGS,
    Encoding,
    EncodingOptions,
    QueryKeyEncoding,
    ScoreEncoding,
    build_encoding,
    encoding_class,
)
from lrpe_fairseq.experiments.report.frame import ColumnView, public_name

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
TICKS = {
    2.5: (1, 1.2, 1.4, 1.7, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
    5: (1, 1.5, 2, 3, 4, 6, 8),
    100: (1, 2, 5),
    math.inf: (1,),
}
"""Ratio of the largest to the least value of a logarithmic axis, at most -> its labels."""
Point = tuple[float, float, float, float]
"""x, and the mean, the lowest and the highest value over the seeds."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes. rows: method -> what is drawn. kind: of the values (``ColumnView``)."""

    title: str
    x: str
    rows: Mapping[str, Any]
    y: str = ""
    kind: str = ""


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
    encoding, *variant = method.split(", ")
    name = public_name(encoding.removeprefix("gated:"))
    names = [*PROMINENT, *(other for other in ENCODINGS if other not in PROMINENT)]
    place = names.index(name) if name in names else len(names)
    marker = MARKERS[place // len(PROMINENT) % len(MARKERS)]
    dash = next((DASHES[word] for word in variant if word in DASHES), "-")
    hollow = {"markerfacecolor": "white"} if encoding.startswith("gated:") else {}
    return {"color": f"C{place % len(PROMINENT)}", "marker": marker, "linestyle": dash, **hollow}


def _axes(panels: Sequence[Panel], width: float, height: float) -> tuple[Any, list[Any]]:
    """Return a figure of labeled panels, two in a row, and their axes; sizes in inches."""
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = blank(width * columns, height * rows)
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in every[len(panels) :]:
        unused.remove()
    for axes, panel in zip(every, panels, strict=False):
        axes.set(xlabel=panel.x, ylabel=panel.y)
        axes.set_title(panel.title, fontsize=10)
        axes.grid(alpha=0.3)
    return figure, every[: len(panels)]


def dots(path: Path, panels: Sequence[Panel]) -> None:
    """Draw a row per method: its mean, and a line from its lowest to its highest value.

    rows: method -> values of the seeds.
    """
    tallest = max(len(panel.rows) for panel in panels)
    figure, every = _axes(panels, 5.2, 1.2 + 0.2 * tallest)
    for axes, panel in zip(every, panels, strict=True):
        points = [point(0, values) for values in panel.rows.values()]
        for place, (method, (_, mean, low, high)) in enumerate(
            zip(panel.rows, points, strict=True)
        ):
            spread = [[mean - low], [high - mean]]
            axes.errorbar([mean], [place], xerr=spread, markersize=5, linewidth=1, **style(method))
        axes.set_yticks(range(len(points)), list(panel.rows), fontsize=8)
        axes.set_ylim(len(points) - 0.5, -0.5)
        _scale(axes, [mean for _, mean, *_ in points], panel.kind, "x")
    save(figure, path)


def points(path: Path, panels: Sequence[Panel]) -> None:
    """Draw a labeled point per method. rows: method -> (x, y)."""
    figure, every = _axes(panels, 5.6, 5.0)
    for axes, panel in zip(every, panels, strict=True):
        for method, (x, y) in panel.rows.items():
            axes.plot([x], [y], markersize=6, **style(method))
        for which, values in zip("xy", zip(*panel.rows.values(), strict=True), strict=True):
            _scale(axes, values, panel.kind, which)
        _labels(axes, panel.rows)
    save(figure, path)


def lines(path: Path, panels: Sequence[Panel], mark: float = 0, base: float = 2) -> None:
    """Draw a curve per method with a band over the seeds. rows: method -> its points.

    mark: a vertical line at this place, labeled as the training length; 0: none. base: of the
    logarithmic axis of x; 0: a linear axis.
    """
    figure, every = _axes(panels, 5.6 + 1.8 / len(panels), 4.4)
    handles: dict[str, Any] = {}
    for axes, panel in zip(every, panels, strict=True):
        for method, curve in panel.rows.items():
            handles.setdefault(method, _line(axes, method, curve))
        if base:
            axes.set_xscale("log", base=base)
        axes.xaxis.set_major_formatter("{x:g}")
        _logarithmic(axes, "y", [mean for curve in panel.rows.values() for _, mean, *_ in curve])
        if mark:
            axes.axvline(mark, color="black", linewidth=0.8)
            axes.text(mark, axes.get_ylim()[1], " training length", fontsize=8, va="top")
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8)
    save(figure, path)


def point(x: float, values: Sequence[float]) -> Point:
    """Return the point of a curve at x."""
    return x, math.fsum(values) / len(values), min(values), max(values)


def axis(view: ColumnView) -> str:
    """Return the label of the axis of a column's values."""
    metric = {"perplexity": "perplexity", "fraction": "accuracy"}.get(view.kind)
    name = metric or view.column.metric.replace("bleu", "BLEU")
    return f"{name}, {view.column.better} is better"


def _line(axes: Any, method: str, curve: Sequence[Point]) -> Any:
    xs, means, low, high = zip(*curve, strict=True)
    shown = style(method)
    axes.fill_between(xs, low, high, color=shown["color"], alpha=0.2, linewidth=0)
    return axes.plot(xs, means, markersize=5, linewidth=1.3, **shown)[0]


def _scale(axes: Any, values: Sequence[float], kind: str, which: str) -> None:
    """Make an axis of perplexities logarithmic if they differ much."""
    if kind == "perplexity" and max(values) > LONG * min(values):
        _logarithmic(axes, which, values)


def _logarithmic(axes: Any, which: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic, with labels that fit."""
    from matplotlib.ticker import LogLocator, NullLocator

    ratio = max(values) / min(values)
    axes.set(**{f"{which}scale": "log"})
    own = getattr(axes, f"{which}axis")
    own.set_major_locator(LogLocator(subs=next(t for most, t in TICKS.items() if ratio < most)))
    own.set_minor_locator(NullLocator())
    own.set_major_formatter("{x:g}")


def _labels(axes: Any, rows: Mapping[str, tuple[float, float]]) -> None:
    """Place a label beside every point so that they do not overlap."""
    import numpy as np
    from adjustText import adjust_text

    np.random.seed(0)
    axes.margins(0.08)
    texts = [axes.text(x, y, word, fontsize=8) for word, (x, y) in rows.items()]
    arrows = {"arrowstyle": "-", "color": "grey", "linewidth": 0.5}
    markers = list(axes.lines)
    shape = {"expand": (1.1, 1.3), "arrowprops": arrows}
    adjust_text(texts, ax=axes, objects=markers, iter_lim=300, **shape)  # no limit of time


# --- one encoding --------------------------------------------------------------------------------

CONTENTS = 64  # random contents over which a curve is averaged
NODES = 31  # of a map of scores where positions are not on a line
HEADS_SHOWN = 4  # curves per picture; maps show the first and the last of these heads


@torch.no_grad()
def portrait(
    name: str,
    path: Path | str,
    head_dim: int = 32,
    num_heads: int = 4,
    length: int = 256,
    grid_width: int = 16,
) -> None:
    """Draw the encoding ``name`` and write a PNG to ``path``.

    Args:
        head_dim: D. num_heads: H; at most four are shown. length: the largest distance, and four
            times the tokens of a map. grid_width: W of the grid of a method with two axes.
    A decomposable encoding is drawn as the score of a token and a copy of it n tokens earlier,
    divided by their score without encoding, averaged over random contents; an additive one as its
    bias; a contextual one as attention weights over random tokens; one with two axes as the score
    of a cell with all cells of the grid; one of a tree as the scores of all pairs of nodes.
    Raises: ChoiceError for an unknown name. ImportError without matplotlib (extra [experiments]).
    """
    own = encoding_class(name)
    options = dict(own.card.drawn_with if own.card else {})
    if own.reads_grid:
        options["grid_width"] = grid_width
    options = EncodingOptions(**options)
    encoding = build_encoding(name, head_dim, num_heads, causal=True, options=options).eval()
    figure = blank(4.6, 2.3)
    if encoding.reads_grid:
        label = f"score of the cell in the center, {grid_width} x {grid_width} cells"
        cells, center = torch.arange(grid_width**2), grid_width // 2 * (grid_width + 1)
        shown = scores(encoding, torch.tensor([center]), cells)
        _maps(figure, shown.unflatten(-1, (grid_width, grid_width)).squeeze(1), label)
    elif encoding.properties.contextual or not (own.serves_linear or encoding.additive):
        label = "square roots of attention weights: query down, key across"
        _maps(figure, weights(encoding, length // 4).sqrt(), label)
    elif encoding.properties.relative_by:
        label = f"score / plain score of the positions 0 to {NODES - 1}: query down, key across"
        _maps(figure, scores(encoding, torch.arange(NODES), torch.arange(NODES)), label)
    else:
        _curves(figure, encoding, curve(encoding, length))
    save(figure, Path(path))


def scores(encoding: QueryKeyEncoding, q_at: Tensor, k_at: Tensor) -> Tensor:
    """Return the score of copies of a token at positions (T,) and (S,), (H, T, S).

    It is divided by the score without encoding, and averaged over random contents.
    """
    x = _contents(encoding, 1)
    q, k = x.expand(-1, -1, len(q_at), -1), x.expand(-1, -1, len(k_at), -1)
    q, k = encoding(q, k, q_at, k_at)
    return ((q @ k.mT) / x.square().sum(-1, keepdim=True)).mean(0)


def curve(encoding: Encoding, length: int) -> Tensor:
    """Return the score or the bias at the distances 0 .. length - 1, (H, length)."""
    q_at, k_at = torch.tensor([length - 1]), torch.arange(length).flip(0)
    if isinstance(encoding, ScoreEncoding):
        x = _contents(encoding, 1)
        q = x * encoding.spec.head_dim**-0.5 * encoding.content_scale
        bias = encoding.bias(q, x.expand(-1, -1, length, -1), q_at, k_at)
        return bias.expand(len(x), encoding.spec.num_heads, 1, length).mean(0)[:, 0]
    log_decay = encoding.log_decay()
    decay = 1.0 if log_decay is None else torch.exp(log_decay[:, None] * torch.arange(length))
    return scores(encoding, q_at, k_at)[:, 0] * decay


def weights(encoding: Encoding, length: int) -> Tensor:
    """Return causal attention weights over random tokens, (H, length, length)."""
    q, k = _contents(encoding, length)[:1], _contents(encoding, length, seed=1)[:1]
    at = torch.arange(length)
    seen = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    q = q * encoding.spec.head_dim**-0.5
    if isinstance(encoding, ScoreEncoding):
        q = q * encoding.content_scale
        scores = encoding(q @ k.mT, q, k, at, at, seen)
        return encoding.weigh(scores, seen, torch.float32)[0]
    q, k = encoding(q, k, at, at)
    width = encoding.spec.head_dim * encoding.spec.num_heads
    x = torch.randn(1, length, width, generator=torch.Generator().manual_seed(2))
    total = encoding.log_gates(x).cumsum(-1)
    scores = q @ k.mT + total.unsqueeze(-1) - total.unsqueeze(-2)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)[0]


def _contents(encoding: Encoding, length: int, seed: int = 0) -> Tensor:
    """Return random contents, (CONTENTS, H, length, D)."""
    shape = CONTENTS, encoding.spec.num_heads, length, encoding.spec.head_dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _curves(figure: Any, encoding: Encoding, values: Tensor) -> None:
    """Draw a line for each head, or one line if all heads are equal."""
    axes = figure.subplots()
    same = torch.allclose(values, values[:1].expand_as(values), atol=1e-6)
    shared = same or _averages_equal(encoding)
    shown = values.mean(0, keepdim=True) if shared else values[:HEADS_SHOWN]
    for head, line in enumerate(shown):
        axes.plot(line.tolist(), linewidth=1.2, label=None if shared else f"head {head}")
    axes.axhline(0, color="grey", linewidth=0.6)
    bias = isinstance(encoding, ScoreEncoding)
    axes.set_ylabel("added to the score" if bias else "score / plain score", size=8)
    axes.set_xlabel("n = s - t", size=8)
    if not shared:
        axes.legend(fontsize=6, frameon=False, loc="upper right")
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _averages_equal(encoding: Encoding) -> bool:
    """True if heads differ by their random contents only: no parameters and no decay per head."""
    heads = encoding.spec.num_heads
    own = [t for _, t in encoding.named_tensors() if heads in t.shape]
    return isinstance(encoding, QueryKeyEncoding) and not own and encoding.log_decay() is None


def _maps(figure: Any, values: Tensor, label: str) -> None:
    """Draw the maps (H, ., .) of the first and of the last shown head side by side."""
    heads = sorted({0, min(len(values), HEADS_SHOWN) - 1})
    for axes, head in zip(figure.subplots(1, len(heads), squeeze=False).flat, heads, strict=True):
        axes.imshow(values[head], cmap="viridis", interpolation="nearest", aspect="equal")
        axes.set_title(f"head {head}", size=8)
        axes.tick_params(labelsize=6)
    figure.supxlabel(label, size=8)
