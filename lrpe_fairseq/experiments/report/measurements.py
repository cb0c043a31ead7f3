"""The measurements behind the columns of all pages, their priors, and the named contrasts.

Columns of different tables belong to one measurement if they show the same metric of the same
training and evaluation (:class:`Key`). A row is named by the runs that have its values, so the same
runs are the same row on every page.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from lrpe_fairseq.experiments.records.tables import Column, Table
from lrpe_fairseq.experiments.report import orders, priors

if TYPE_CHECKING:
    from lrpe_fairseq.experiments.report.columns import ColumnView

CONTRASTS = Path("results", "paper", "contrasts.yaml")
TRAINING = ("optimization.max_update", "task.tokens_per_sample", "model.document_boundary")
"""The options of a training that rows are not compared across, beside those of its file."""


class Key(NamedTuple):
    """What names a measurement.

    config: the file of the training configuration. training: the values of :data:`TRAINING`. fixed:
    the half that all models share, of an encoder-decoder table.
    """

    scale: str
    dataset: str
    config: str
    training: tuple[str, ...]
    fixed: str
    attention: str
    split: str
    protocol: str
    metric: str

    def text(self) -> str:
        """Return the key as one line."""
        words = [*self[:3], *self.training, *self[4:]]
        return " ".join(word or "-" for word in words)


def key_of(root: Path, table: Table, scale: str, dataset: str, column: Column) -> Key:
    """Return the key of a column."""
    path = column.config or table.scales[scale]
    # Not the row's overrides: rows of one measurement differ in them.
    chosen = {**table.options, **column.overrides}
    # Tables name only the options that they vary; the YAML has the rest.
    training = (str(chosen.get(name, _stated(root / path, name))) for name in TRAINING)
    # A mean is named by all that it averages.
    parts = [table.column(name) for name in column.mean_of] or [column]
    return Key(
        scale=scale,
        dataset=column.dataset or dataset,
        config=path.removeprefix("configs/").removesuffix(".yaml"),
        training=tuple(training),
        fixed=",".join(f"{name}={value}" for name, value in sorted(table.fixed.items())),
        attention=column.attention,
        split="+".join(dict.fromkeys(part.split for part in parts)),
        protocol="+".join(dict.fromkeys(part.protocol for part in parts)),
        metric="+".join(dict.fromkeys(f"{part.dataset} {part.metric}".strip() for part in parts))
        if column.mean_of
        else column.metric,
    )


@functools.lru_cache(maxsize=4096)
def _stated(path: Path, name: str) -> Any:
    """Return what a configuration says of an option, over its bases; None if it says nothing."""
    # A configuration that was deleted since: its runs remain.
    if not path.exists():
        return None
    return OmegaConf.select(_composed(path), name)


@functools.lru_cache(maxsize=64)
def _composed(path: Path) -> Any:
    from lrpe_fairseq.experiments.records.files import load_config

    return load_config(path)


def identity(runs: Mapping[int, str]) -> str:
    """Return the name of a row on all pages, from seed -> name of its run."""
    return " ".join(f"{seed}:{name}" for seed, name in sorted(runs.items()))


def gathered(
    root: Path, views: "Iterable[ColumnView]", frozen: Mapping[str, orders.Prior] | None = None
) -> dict[Key, orders.Measurement]:
    """Return the measurements of columns.

    frozen: priors by the text of a key; by default those of the last release.
    Raises: ValueError if columns of one measurement differ in kind or direction, or if a row has
        two values for a seed.
    """
    columns: dict[Key, list[ColumnView]] = {}
    for view in views:
        if view.rows:
            columns.setdefault(view.key, []).append(view)
    frozen = priors.load(root) if frozen is None else frozen
    named = _contrasts(root, columns)
    return {
        key: _measurement(key, members, frozen.get(key.text()), named.get(key, ()))
        for key, members in columns.items()
    }


def _measurement(
    key: Key,
    views: "list[ColumnView]",
    prior: orders.Prior | None,
    primary: Iterable[tuple[str, str]],
) -> orders.Measurement:
    """Return the measurement of columns that show the same.

    Raises: ValueError if they do not agree.
    """
    # A verdict needs one scale and one direction.
    kinds = {(view.kind, view.column.better) for view in views}
    if len(kinds) > 1:
        raise ValueError(f"columns of the measurement {key.text()} differ: {sorted(kinds)}")
    [(kind, better)] = kinds
    cells: dict[str, dict[int, float]] = {}
    for view in views:
        for label, values in view.scaled.items():
            row = view.identity(label)
            # The same runs on two pages must show the same numbers.
            if cells.setdefault(row, dict(values)) != values:
                raise ValueError(f"{row} has two values in the measurement {key.text()}")
    # Columns of a measurement have the same tests; one without runs has 0.
    examples = max(view.examples for view in views)
    return orders.Measurement(
        cells,
        kind=kind,
        better=better,
        sampling=orders.sampling(kind, examples),
        prior=prior,
        primary=list(primary),
    )


# --- contrasts -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Contrast:
    """A pair of rows of a column that was named before its runs: a against b."""

    table: str
    scale: str
    column: str
    a: str
    b: str


def contrasts(root: Path) -> list[Contrast]:
    """Return the contrasts of :data:`CONTRASTS`; none without the file."""
    path = root / CONTRASTS
    listed = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else []
    return [
        Contrast(table=of_column["table"], scale=of_column["scale"], **pair)
        for of_column in listed
        for pair in of_column["pairs"]
    ]


def _contrasts(
    root: Path, columns: "Mapping[Key, list[ColumnView]]"
) -> dict[Key, list[tuple[str, str]]]:
    """Return the pairs of named contrasts by measurement, as far as they have runs."""
    wanted: dict[tuple[str, str, str], list[Contrast]] = {}
    for one in contrasts(root):
        wanted.setdefault((one.table, one.scale, one.column), []).append(one)
    pairs: dict[Key, list[tuple[str, str]]] = {}
    for key, views in columns.items():
        for view in views:
            place = view.table.name, view.scale, view.column.key
            for one in wanted.get(place, ()):
                # Contrasts are written down before their runs.
                if {one.a, one.b} <= set(view.rows):
                    pair = view.identity(one.a), view.identity(one.b)
                    pairs.setdefault(key, []).append(pair)
    return pairs
