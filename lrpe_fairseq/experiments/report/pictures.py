"""Pictures whose bytes depend only on what they show and on the installed matplotlib."""

import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REACH = 6.0
"""Interquartile ranges beyond the quartiles within which a value belongs to the bulk."""


def blank(width: float, height: float, **options: Any) -> Any:
    """An empty figure of that many inches.

    Raises: ImportError if matplotlib, which comes with the extra [plots], is not installed.
    """
    # fairseq sets every logger to DEBUG; matplotlib would log each font that it finds.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained", **options)
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write ``figure`` as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a Software entry the file does not name the matplotlib that drew it.
    figure.savefig(path, format="png", metadata={"Software": None})


def bulk(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and largest of ``values`` without those :data:`REACH` off the quartiles."""
    if len(values) < 4:
        return min(values), max(values)
    first, _, third = statistics.quantiles(values, method="inclusive")
    reach = REACH * (third - first)
    inside = [v for v in values if first - reach <= v <= third + reach]
    return min(inside), max(inside)
