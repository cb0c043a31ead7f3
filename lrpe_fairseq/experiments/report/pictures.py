"""Pictures whose bytes depend on what they show and on the installed matplotlib alone."""

import logging
from pathlib import Path
from typing import Any


def blank(width: float, height: float, **options: Any) -> Any:
    """An empty figure of that many inches.

    Raises: ImportError if matplotlib, which comes with the extra [plots], is not installed.
    """
    # fairseq turns every logger up to DEBUG; matplotlib then tells about each font it meets.
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
