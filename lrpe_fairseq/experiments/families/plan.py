"""The runs of a table.

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
from lrpe_fairseq.experiments.families import family_of
from lrpe_fairseq.experiments.records.checkout import require_checkout
from lrpe_fairseq.experiments.records.files import CONFIGS, ROOT
from lrpe_fairseq.experiments.records.layout import Table, load_table
from lrpe_fairseq.experiments.records.recipes import Cell, cells
from lrpe_fairseq.experiments.runner.training import TrainingRun


def load_named(name: str) -> Table:
    """Load ``configs/tables/<name>.yaml``.

    Raises: ValueError, which names the table with the nearest name, or all tables.
    """
    require_checkout()
    folder = CONFIGS / "tables"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
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

    Raises: ValueError if the table lacks the scale, no family trains it, or the data of a column's
        configuration are not its data set.
    """
    config_of(table, scale)
    tables = (table, *(load_named(name) for name in table.experiments[1:]))
    homes = _homes([other.at(scale) for other in tables if scale in other.scales], scale)
    made = (_runs_of(*home, scale, seed) for seed in seeds for home in homes)
    named = {run.name: run for run in itertools.chain.from_iterable(made)}
    return list(named.values())  # columns that separate learning rates share their runs


def with_columns(
    found: Sequence[TrainingRun],
    table: Table,
    scale: str,
    seeds: Sequence[int],
    titles: Sequence[str],
) -> list[TrainingRun]:
    """Return the runs of ``found`` that fill a column with one of these titles.

    Each keeps its evaluations for the other columns.

    Raises: ValueError for a title that no column has.
    """
    known = list(dict.fromkeys(column.title for column in table.columns))
    for title in titles:
        if title not in known:
            raise ValueError(
                f"table {table.name} has no column {title!r} at scale {scale}; it has "
                f"{'; '.join(known)}"
            )
    keys = set(itertools.chain(*(c.mean_of or [c.key] for c in table.columns if c.title in titles)))
    columns = [column for column in table.columns if column.key in keys]
    names = {run.name for run in runs(dataclasses.replace(table, columns=columns), scale, seeds)}
    return [run for run in found if run.name in names]


def with_data(
    found: Sequence[TrainingRun], table: Table, scale: str, names: Sequence[str] | None
) -> list[TrainingRun]:
    """Return the runs on the data sets ``names``, or all without names.

    Raises: ValueError for a data set that no run has.
    """
    known = list(dict.fromkeys(run.data.name for run in found))
    for name in names or []:
        if name not in known:
            raise ValueError(
                f"table {table.name} has no data set {name!r} at scale {scale}; it has "
                f"{', '.join(known)}"
            )
    return [run for run in found if run.data.name in (names or known)]


def _homes(tables: Sequence[Table], scale: str) -> list[tuple[Table, Cell]]:
    """Return the cells of the first table, each with the table that its runs belong to.

    The run of several equal cells belongs to the first of them, and to the last table that has it.
    """
    first, *others = tables
    homes: dict[Any, tuple[Table, Cell]] = {}
    for cell in cells(first):
        _, home = homes.setdefault(_key(first, cell, scale), (first, cell))
        homes[_key(first, cell, scale)] = first, home.asked(cell.evaluations)
    for other in others:
        own = {_key(other, cell, scale): cell for cell in reversed(cells(other))}
        for key in homes.keys() & own.keys():
            homes[key] = other, own[key].asked(homes[key][1].evaluations)
    return list(homes.values())


def _key(table: Table, cell: Cell, scale: str) -> Any:
    return cell.recipe, cell.config or table.scales[scale]


def _runs_of(table: Table, cell: Cell, scale: str, seed: int) -> list[TrainingRun]:
    config = ROOT / cell.config if cell.config else config_of(table, scale)
    found = family_of(config).of_cell(table, cell, scale, config, seed)
    for run in found:
        if cell.config and folders.is_prepared(run.data):
            _require_dataset(run, cell)
    return found


def _require_dataset(run: TrainingRun, cell: Cell) -> None:
    dataset = folders.dataset_name(run.data)
    if dataset != cell.dataset:
        raise ValueError(
            f"{cell.config} trains on {dataset}, but its column has the data set {cell.dataset}: "
            "make them equal"
        )
