"""The picture of how angles move in training, from results/bench/drift."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records.files import read_json
from lrpe_fairseq.experiments.report import plots

FOLDER = "results/bench/drift"
PICTURE = "figures/angles-drift.png"
"""Path of the picture, from results/."""


def measured(root: Path) -> list[Mapping[str, Any]]:
    """Return what ``experiments drift`` has written, in the order of the labels."""
    files = sorted((root / FOLDER).glob("*.json"))
    return sorted((read_json(path) for path in files), key=lambda model: model["label"])


def pages(root: Path) -> dict[str, str]:
    """Return no page: the picture stands on that of the table ``angles``."""
    return {}


def pictures(root: Path) -> dict[str, Callable[[Path], None]]:
    """Return path -> function that draws the picture, if there is something to draw."""
    models = measured(root)
    return {f"results/{PICTURE}": functools.partial(_draw, models=models)} if models else {}


def _draw(path: Path, models: list[Mapping[str, Any]]) -> None:
    panels = [
        plots.Panel(
            title=f"{model['label']}, T = {model['trained']}",
            x="updates",
            y="turns in T tokens",
            rows=_quantiles(model),
        )
        for model in models
    ]
    plots.quantiles(path, panels)


def _quantiles(model: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return name of a quantile -> its curve (updates, turns); equal neighbours are one curve."""
    names = {0.0: "slowest", 0.5: "median", 1.0: "fastest"}
    found: list[tuple[list[str], list[tuple[float, float]]]] = []
    for i, at in enumerate(model["quantiles"]):
        name = names.get(at, f"{100 * at:g} %")
        curve = [(row["updates"], row["turns"][i]) for row in model["rows"]]
        if found and found[-1][1] == curve:
            found[-1][0].append(name)
        else:
            found.append(([name], curve))
    return {" to ".join(dict.fromkeys((own[0], own[-1]))): curve for own, curve in found}
