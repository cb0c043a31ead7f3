"""The runs of a table.

The cells of ``configs/tables/<table>.yaml`` become runs with the run files
``results/runs/<experiment>/<scale>-<row>-<attention>[-<difference>]-seed<n>.json``; their working
folders are under ``runs/``.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

from lrpe_fairseq.experiments.families import family_of
from lrpe_fairseq.experiments.records.checkout import require_checkout
from lrpe_fairseq.experiments.records.files import CONFIGS, ROOT
from lrpe_fairseq.experiments.records.layout import Table, load_table
from lrpe_fairseq.experiments.records.recipes import cells
from lrpe_fairseq.experiments.runner.training import TrainingRun


def load_named(name: str) -> Table:
    """Load ``configs/tables/<name>.yaml``. Raises: ValueError, which lists the existing tables."""
    require_checkout()
    folder = CONFIGS / "tables"
    if not (folder / f"{name}.yaml").exists():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        raise ValueError(f"there is no table {name}; there are {known}")
    return load_table(folder / f"{name}.yaml")


def config_of(table: Table, scale: str) -> Path:
    """Return the configuration of a scale. Raises: ValueError if the table lacks the scale."""
    if scale not in table.scales:
        raise ValueError(f"table {table.name} has no scale {scale}; it has {list(table.scales)}")
    return ROOT / table.scales[scale]


def runs(table: Table, scale: str, seeds: Sequence[int]) -> list[TrainingRun]:
    """Return every run of ``table`` at ``scale``, seed by seed.

    A cell that also occurs in another table of ``table.experiments`` at this scale uses the run of
    that table, or of the last such table.

    Raises: ValueError if the table lacks the scale, or no family trains it.
    """
    others = [t.at(scale) for t in map(load_named, table.experiments[1:]) if scale in t.scales]
    table = table.at(scale)
    homes = {cell.recipe: (table, cell) for cell in cells(table)}
    for other in others:
        homes |= {cell.recipe: (other, cell) for cell in cells(other) if cell.recipe in homes}
    config = config_of(table, scale)
    family = family_of(config)
    made = (family.of_cell(*home, scale, config, seed) for seed in seeds for home in homes.values())
    named = {run.name: run for run in itertools.chain.from_iterable(made)}
    return list(named.values())  # columns that separate learning rates share their runs
