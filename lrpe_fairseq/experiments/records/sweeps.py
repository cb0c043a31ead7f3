"""The time of one call for a whole table: ``results/sweeps/<table>-<scale>.json``.

Written by ``run_table`` if it trained every run of the table itself; read by ``cost``.
"""

import json
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records import runs

Sweep = dict[str, Any]
FIELDS = {
    "table": str,
    "scale": str,
    "seeds": int,
    "trainings": int,
    "jobs": int,  # in parallel
    "wall_seconds": float,  # for data, trainings, evaluation and rendering
    "commit": str,
    "versions": dict,
    "hardware": dict,
}


def write_sweep(folder: Path, **measured: Any) -> None:
    """Write the fields of :data:`FIELDS`; this function adds those of the environment."""
    sweep = {**measured, **runs.environment()}
    _check(sweep)
    runs.write_whole(folder / f"{sweep['table']}-{sweep['scale']}.json", sweep)


def read_sweeps(folder: Path) -> list[Sweep]:
    """Read all files of ``folder``, by name. Raises: ValueError, which names an invalid file."""
    sweeps = []
    for path in sorted(folder.glob("[!.]*.json")):
        try:
            sweeps.append(json.loads(path.read_text(encoding="utf-8")))
            _check(sweeps[-1])
        except ValueError as error:
            raise ValueError(f"{path} does not tell a table's time: {error}") from error
    return sweeps


def _check(sweep: Sweep) -> None:
    for name, kind in FIELDS.items():
        if not isinstance(sweep.get(name), kind):
            raise ValueError(f"its field '{name}' must be of type {kind.__name__}")
