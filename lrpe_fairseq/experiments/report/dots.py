"""The quickstart's test perplexities as a picture: a dot for every seed, a line at the mean.

Both attention types share the horizontal axis, so that their rows can be compared too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.report import pictures
from lrpe_fairseq.experiments.report.quickstart import Row, base_of, change

HALF_HEIGHT = 0.28
"""Half the length of the line at a mean; two rows are 1 apart."""


def draw(path: Path, found: Sequence[Row]) -> None:
    """Draw a panel for each attention type and write the picture to ``path`` as PNG.

    Raises: ImportError if matplotlib, which comes with the extra [plots], is not installed.
    """
    attentions = list(dict.fromkeys(row.attention for row in found))
    figure = pictures.blank(10.0, 2.6)
    all_axes = figure.subplots(1, len(attentions), sharex=True, sharey=True, squeeze=False).flat
    for axes, attention in zip(all_axes, attentions, strict=True):
        own = [row for row in found if row.attention == attention]
        _panel(axes, own, f"{attention} attention")
    figure.supxlabel("test perplexity per character (lower is better); a dot is a seed", size=10)
    pictures.save(figure, path)


def _panel(axes: Any, own: Sequence[Row], title: str) -> None:
    """The rows of one attention type from the top; a dotted line marks the mean of Base."""
    base = base_of(own[0], own)
    axes.axvline(base.mean, color="grey", linewidth=0.8, linestyle=":", zorder=1)
    for place, row in enumerate(own):
        _row(axes, place, row)
        text = f"{row.mean:.2f}" if row is base else f"{row.mean:.2f}  ({change(row, base)})"
        _beside(axes, place, row, text, left=row is base)
    axes.set_yticks(range(len(own)), [row.name for row in own])
    axes.set_ylim(len(own) - 0.4, -0.6)
    axes.set_title(title, size=11)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _row(axes: Any, place: int, row: Row) -> None:
    """The dots of one row and the line at its mean."""
    color, values = f"C{place}", list(row.ppl.values())
    ends = [place - HALF_HEIGHT, place + HALF_HEIGHT]
    axes.plot([row.mean] * 2, ends, color=color, linewidth=2, solid_capstyle="butt", zorder=2)
    axes.plot(values, [place] * len(values), "o", color=color, markersize=6, alpha=0.7, zorder=3)


def _beside(axes: Any, place: int, row: Row, text: str, left: bool) -> None:
    """Write ``text`` beside the dots of a row; Base has the highest values, so it goes left."""
    end = min(row.ppl.values()) if left else max(row.ppl.values())
    axes.annotate(
        text, (end, place), size=9, xytext=(-9 if left else 9, 0), textcoords="offset points",
        ha="right" if left else "left", va="center",
    )  # fmt: skip
