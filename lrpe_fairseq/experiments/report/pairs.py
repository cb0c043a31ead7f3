"""The section of a page on what pairs of features add to denominators, from results/bench/pairs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records.files import read_json
from lrpe_fairseq.experiments.report import markdown

FOLDER = "results/bench/pairs"


def section(root: Path) -> str:
    """Return the section, or an empty text without measurements."""
    files = sorted((root / FOLDER).glob("*.json"))
    measured = [read_json(path) for path in files]
    if not measured:
        return ""
    return markdown.rendered("pairs.md.j2", grid=grid(measured), trained=measured[0]["trained"])


def grid(measured: list[Mapping[str, Any]]) -> str:
    """Return the measurements as a Markdown table: a line for every model and class of pairs."""
    bins = [(row["from"], row["to"]) for row in measured[0]["rows"] if "turns" in row]
    bins = list(dict.fromkeys(bins))
    head = [
        "model",
        "turns in training",
        "without positions",
        *(f"distance {a} to {b}" for a, b in bins),
    ]
    lines = []
    for model in measured:
        rows = [row for row in model["rows"] if "turns" in row]
        for turns in dict.fromkeys(row["turns"] for row in rows):
            own = {(row["from"], row["to"]): row for row in rows if row["turns"] == turns}
            mass = sum(row["plain"] for row in own.values())
            parts = [f"{own[place]['part']:.3f}" for place in bins]
            lines.append([f"`{model['label']}`", turns, f"{mass:.3f}", *parts])
        whole = [sum(r["part"] for r in rows if (r["from"], r["to"]) == place) for place in bins]
        clamped = next(row["clamped"] for row in model["rows"] if "clamped" in row)
        lines.append(
            [f"`{model['label']}`", f"all; {100 * clamped:.1f} % clamped", "1.000"]
            + [f"{value:.3f}" for value in whole]
        )
    return markdown.table(head, lines, numbers=True)
