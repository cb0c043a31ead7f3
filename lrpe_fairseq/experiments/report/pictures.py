"""Reproducible pictures: the bytes depend only on the content and the matplotlib version."""

import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REACH = 6.0
"""Distance from the quartiles, in interquartile ranges, up to which a value is in the bulk."""


def blank(width: float, height: float, **options: Any) -> Any:
    """Create an empty figure; sizes in inches.

    Raises: ImportError if matplotlib, which comes with the extra [plots], is not installed.
    """
    # fairseq sets every logger to DEBUG, so matplotlib would log each font it finds.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained", **options)
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write ``figure`` as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Software=None keeps the matplotlib version out of the file.
    figure.savefig(path, format="png", metadata={"Software": None})


def bulk(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of ``values`` without those beyond :data:`REACH` off the quartiles."""
    if len(values) < 4:
        return min(values), max(values)
    first, _, third = statistics.quantiles(values, method="inclusive")
    reach = REACH * (third - first)
    inside = [v for v in values if first - reach <= v <= third + reach]
    return min(inside), max(inside)
