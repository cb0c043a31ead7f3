"""One file per family of experiments, the list of families, and the runs of a table.

The cells of ``configs/tables/<table>.yaml`` become runs with the run files
``results/runs/<experiment>/<scale>-<row>-<attention>[-<difference>]-seed<n>.json``; their working
folders are under ``runs/``.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.data import folders
from lrpe_fairseq.experiments.families.classification import ClassificationRun
from lrpe_fairseq.experiments.families.finetuning import FinetuningRun
from lrpe_fairseq.experiments.families.lm import LMRun, PretrainingRun
from lrpe_fairseq.experiments.families.synthetic import SyntheticRun
from lrpe_fairseq.experiments.families.transduction import TransductionRun
from lrpe_fairseq.experiments.families.translation import TranslationRun
from lrpe_fairseq.experiments.records.files import (
    CONFIGS,
    ROOT,
    load_config,
    relative,
    require_checkout,
)
from lrpe_fairseq.experiments.records.keys import Cell, cells
from lrpe_fairseq.experiments.records.tables import Table, load_table
from lrpe_fairseq.experiments.runner.training import TrainingRun

FAMILIES: dict[str, type[TrainingRun]] = {
    "lm": LMRun,
    "pretraining": PretrainingRun,
    "finetuning": FinetuningRun,
    "translation": TranslationRun,
    "transduction": TransductionRun,
    "classification": ClassificationRun,
    "synthetic": SyntheticRun,
}


def family_of(config: Path) -> type[TrainingRun]:
    """Return the family that trains with ``config``. Raises: ValueError if none does."""
    if not config.exists():
        raise ValueError(f"{relative(config)} does not exist")
    task = load_config(config).task._name
    for family in FAMILIES.values():
        # Two families share a folder of configurations; their tasks differ.
        if config.parent == CONFIGS / family.configs and family.task in ("", task):
            return family
    raise ValueError(
        f"{relative(config)} has task {task}, which no family trains ({', '.join(FAMILIES)})"
    )


def preparation_of(data: Path) -> list[str]:
    """Return the script that prepares ``data``, with its arguments; empty if no family has one."""
    scripts = (family.preparation_of(data) for family in FAMILIES.values())
    return next(filter(None, scripts), [])


# --- the runs of a table -------------------------------------------------------------------------


def load_named(name: str) -> Table:
    """Load configs/tables/<name>.yaml. Raises: ValueError, which names the nearest table or all."""
    require_checkout()
    folder = CONFIGS / "tables"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        # The stem, because a user may pass the file's path.
        close = get_close_matches(Path(name).stem, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        raise ValueError(f"there is no table {name}; {hint}")
    return load_table(folder / f"{name}.yaml")


def config_of(table: Table, scale: str) -> Path:
    """Return the configuration of a scale. Raises: ValueError if the table lacks the scale."""
    if scale not in table.scales:
        known = ", ".join(table.scales)
        raise ValueError(f"table {table.name} has no scale {scale!r}; it has {known}")
    return ROOT / table.scales[scale]


def runs(table: Table, scale: str, seeds: Sequence[int]) -> list[TrainingRun]:
    """Return every run of ``table`` at ``scale``, seed by seed.

    A cell that also occurs in another table of ``table.experiments`` with the same configuration
    uses that table's run, with the evaluations that this table shows too.

    Raises: ValueError if the table lacks the scale, no family trains it, the data of a column's
        configuration are not its data set, or two cells with different settings have one name.
    """
    config_of(table, scale)
    others = (load_named(name).with_scales([scale]) for name in table.experiments[1:])
    tables = (table, *others)
    homes = _homes([other.at(scale) for other in tables if scale in other.scales], scale)
    made = (_runs_of(owner, cell, scale, seed) for seed in seeds for owner, cell in homes)
    named: dict[str, TrainingRun] = {}
    for run in itertools.chain.from_iterable(made):
        other = named.setdefault(run.name, run)
        if dataclasses.replace(run, evaluations=other.evaluations) != other:
            raise ValueError(
                f"two cells of table {table.name} with different settings would share the run "
                f"{run.name}: give their rows labels that differ in letters or digits"
            )
        named[run.name] = run
    return list(named.values())  # columns that separate learning rates share their runs


def in_columns(table: Table, scale: str, seeds: Sequence[int], titles: Sequence[str]) -> set[str]:
    """Return the names of the runs that fill columns with these titles. Raises: ValueError."""
    _require(table, scale, "column", titles, [column.title for column in table.columns])
    keys = set(itertools.chain(*(c.mean_of or [c.key] for c in table.columns if c.title in titles)))
    # A mean stands for the columns that it averages.
    columns = [column for column in table.columns if column.key in keys]
    return {run.name for run in runs(dataclasses.replace(table, columns=columns), scale, seeds)}


def with_data(
    planned: Sequence[TrainingRun], table: Table, scale: str, names: Sequence[str] | None
) -> list[TrainingRun]:
    """Return the runs on the data sets ``names``, or all. Raises: ValueError for another name."""
    _require(table, scale, "data set", names or (), [run.data.name for run in planned])
    return [run for run in planned if not names or run.data.name in names]


def _require(
    table: Table, scale: str, kind: str, names: Sequence[str], known: Sequence[str]
) -> None:
    """Raise ValueError for a name that is not known."""
    for name in names:
        if name not in known:
            has = "; ".join(dict.fromkeys(known))
            raise ValueError(
                f"table {table.name} has no {kind} {name!r} at scale {scale}; it has {has}"
            )


def _homes(tables: Sequence[Table], scale: str) -> list[tuple[Table, Cell]]:
    """Return the cells of the first table, each with the table that its runs belong to.

    The run of several equal cells belongs to the first of them, and to the last table that has it.
    """
    first, *others = tables
    homes: dict[Any, tuple[Table, Cell]] = {}

    def place(table: Table, cell: Cell) -> Any:
        return cell.key, cell.config or table.scales[scale]

    for cell in cells(first):
        _, home = homes.setdefault(place(first, cell), (first, cell))
        homes[place(first, cell)] = first, home.asked(cell.evaluations)
    # Later tables take the runs over, so that equal cells are trained once.
    for other in others:
        cells_of_other = {place(other, cell): cell for cell in reversed(cells(other))}
        for key in homes.keys() & cells_of_other.keys():
            homes[key] = other, cells_of_other[key].asked(homes[key][1].evaluations)
    return list(homes.values())


def _runs_of(table: Table, cell: Cell, scale: str, seed: int) -> list[TrainingRun]:
    """Return the runs of a cell for one seed.

    Raises: ValueError if its data are not those of its column.
    """
    config = ROOT / cell.config if cell.config else config_of(table, scale)
    planned = family_of(config).of_cell(table, cell, scale, config, seed)
    for run in planned:
        known = folders.dataset_name(run.data) if folders.is_prepared(run.data) else cell.dataset
        # Two sources that say which data a column has must agree.
        if cell.config and known != cell.dataset:
            raise ValueError(
                f"{cell.config} trains on {known}, but its column has the data set {cell.dataset}: "
                "make them equal"
            )
    return planned
