"""Cells of a table: the runs that fill a cell, and its value per seed."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from lrpe_fairseq.experiments.records.fairseq_log import DIVERGED
from lrpe_fairseq.experiments.records.keys import RATE, filled, option
from lrpe_fairseq.experiments.records.layout import Column, Row, Table
from lrpe_fairseq.experiments.records.protocols import BEYOND, HOLDS, Protocol, derived
from lrpe_fairseq.experiments.records.runs import Run, plain

LOGARITHMIC = ("ppl", "word_ppl")
COUNTS = {  # fractions: the number of tested examples beside them, and the value of all
    "accuracy": ("examples", 100.0),
    "top5": ("examples", 100.0),
    "answer_accuracy": ("samples", 1.0),
    "token_accuracy": ("samples", 1.0),  # tokens of one sample are not independent
    "exact_match": ("samples", 1.0),
}


class Runs(dict[str, Run]):
    """Runs by path relative to results/runs."""

    _of_cells: dict[tuple[str, str], dict[str, Run]] | None = None

    def of_cell(self, table: Table, row: Row, column: Column) -> dict[str, Run]:
        """Return the runs that fill a cell of ``table``; the first call looks at every run."""
        if self._of_cells is None:
            self._of_cells = {}
            for name, run in self.items():
                for cell in filled(table, run):
                    self._of_cells.setdefault(cell, {})[name] = run
        return self._of_cells.get((row.label, column.key), {})


class Scores(dict[int, float]):
    """The value of a cell per seed. lost: the seeds whose evaluation was not finite."""

    def __init__(self, values: Mapping[int, float] | None = None, lost: Iterable[int] = ()):
        super().__init__(values or {})
        self.lost = frozenset(lost)


@dataclass(frozen=True)
class Group:
    """Comparable runs: one scale and one data set (empty if columns name their data sets)."""

    scale: str
    dataset: str
    runs: Runs


def groups(table: Table, runs: Mapping[str, Run]) -> list[Group]:
    """Return the runs that fill cells of ``table`` as comparable groups, in scale order.

    Raises: ValueError if runs of a group differ in an option of ``table.same``, or in their data.
    """
    keys = {name: _group_key(table, run) for name, run in runs.items() if filled(table, run)}
    found = []
    for scale, dataset in sorted(set(keys.values()), key=lambda key: _scale_order(table, *key)):
        members = Runs({n: runs[n] for n, k in sorted(keys.items()) if k == (scale, dataset)})
        require_same_options(table, members)
        require_same_data(members)
        found.append(Group(scale, dataset, members))
    return found


def require_same_options(table: Table, runs: Mapping[str, Run]) -> None:
    """Check that runs agree in the options of ``table.same``.

    Raises: ValueError if two runs differ; for columns with their own configurations, two runs on
        one data set.
    """
    first: dict[tuple[str, str], str] = {}  # (data set, option) -> the run that is compared with
    for name, run in runs.items():
        for key in table.same:
            other = first.setdefault((run["dataset"] if table.has_configs() else "", key), name)
            one, two = option(runs[other]["config"], key), option(run["config"], key)
            if plain(one) != plain(two):
                raise ValueError(
                    f"{other} and {name} cannot be in one table because they differ in {key}: "
                    f"{one} and {two}"
                )


def require_same_data(runs: Mapping[str, Run]) -> None:
    """Check that runs on a data set of one name read the same files, as far as they say.

    Raises: ValueError naming two runs and the split (or the dictionary) in which they differ.
    """
    first: dict[tuple[str, str], str] = {}  # (data set, split) -> the run that names it first
    for name, run in runs.items():
        for split, checksum in run.get("data", {}).items():
            other = first.setdefault((run["dataset"], split), name)
            if runs[other]["data"][split] != checksum:
                raise ValueError(
                    f"{other} and {name} cannot share a table; their data differ: "
                    f"{run['dataset']} ({split}) has another checksum"
                )


def cell_runs(table: Table, row: Row, column: Column, runs: Mapping[str, Run]) -> dict[str, Run]:
    """Return the runs that belong to one cell."""
    own = runs if isinstance(runs, Runs) else Runs(runs)
    return own.of_cell(table, row, column)


def scores(table: Table, row: Row, column: Column, runs: Mapping[str, Run]) -> Scores:
    """Return the value of one cell per seed; empty without runs.

    Raises: ValueError if two runs have the same cell and seed.
    """
    if not row.has(column):
        return Scores()
    if column.mean_of:
        return _mean_scores([scores(table, row, table.column(k), runs) for k in column.mean_of])
    found = _raw_scores(table, row, column, runs)
    if not column.relative or not found:
        return found
    base = _raw_scores(table, table.row(table.baseline), column, runs)
    return _divided(found, mean(base)) if base else Scores(lost=found.lost)


def mean(values: Mapping[int, float]) -> float:
    """Return the mean over seeds, independent of their order."""
    return math.fsum(values.values()) / len(values)


def _group_key(table: Table, run: Run) -> tuple[str, str]:
    own_data = any(column.dataset for column in table.at(run["scale"]).columns)
    return run["scale"], "" if own_data else run["dataset"]


def _scale_order(table: Table, scale: str, dataset: str) -> tuple[int, str, str]:
    order = list(table.scales)
    return (order.index(scale) if scale in order else len(order), scale, dataset)


def _rates(table: Table, column: Column, run: Run) -> list[Any]:
    """Return the learning rates that the column shows at this scale; default: the run's."""
    return table.rates_at(run["scale"], column.rates) or [option(run["config"], RATE)]


def selected(table: Table, row: Row, column: Column, runs: Mapping[str, Run]) -> dict[int, str]:
    """Return seed -> the run that one cell shows: the best over ``best_over``, or the only one.

    A seed is left out until its sweep is complete (:func:`_complete`).

    Raises: ValueError if two runs have the same cell and seed.
    """
    found: dict[tuple[int, str], str] = {}
    ranked: dict[int, list[tuple[float, str]]] = {}
    for name, run in _complete(table, row, column, runs).items():
        rank = _rank(run, column)
        if rank is None:
            continue
        choice = (
            run["seed"],
            str(option(run["config"], column.best_over)) if column.best_over else "",
        )
        if choice in found:
            raise ValueError(
                f"{found[choice]} and {name} both fill seed {run['seed']} of row {row.label}, "
                f"column {column.key}"
            )
        found[choice] = name
        ranked.setdefault(run["seed"], []).append((rank, name))
    better = column.best_by["better"] if column.best_by else column.better
    best = min if better == "lower" else max
    return {seed: best(ranked[seed], key=itemgetter(0))[1] for seed in sorted(ranked)}


def _complete(table: Table, row: Row, column: Column, runs: Mapping[str, Run]) -> dict[str, Run]:
    """Return the runs of one cell without the seeds that lack a learning rate of the table.

    A diverged run counts. Only columns with ``best_over: optimization.lr`` show a sweep of
    learning rates.
    """
    own = cell_runs(table, row, column, runs)
    if column.best_over != RATE:
        return own
    found: dict[int, set[Any]] = {}  # seed -> rates
    for run in own.values():
        found.setdefault(run["seed"], set()).add(option(run["config"], RATE))
    return {
        name: run
        for name, run in own.items()
        if found[run["seed"]].issuperset(_rates(table, column, run))
    }


def _raw_scores(table: Table, row: Row, column: Column, runs: Mapping[str, Run]) -> Scores:
    chosen = {seed: runs[name] for seed, name in selected(table, row, column, runs).items()}
    values = {seed: _value(run, column) for seed, run in chosen.items()}
    known = {seed: value for seed, value in values.items() if value is not None}
    if column.metric == HOLDS and known:  # a mean of two lengths is none of them
        known = dict.fromkeys(known, min(known.values()))
    every = _complete(table, row, column, runs).values()
    lost = {run["seed"] for run in every if DIVERGED in _measured(run, column)} - set(known)
    return Scores(known, lost)


def _rank(run: Run, column: Column) -> float | None:
    """Return the number by which ``best_over`` selects; None if the run has none."""
    by = column.best_by
    if not by:
        return _value(run, column)
    return run["metrics"].get(by["split"], {}).get(by["protocol"], {}).get(by["metric"])


def _value(run: Run, column: Column) -> float | None:
    if not column.split:
        return run.get(column.metric)
    if column.metric in (HOLDS, BEYOND):
        length = Protocol.parse(column.protocol).length
        return derived(column.metric, run["metrics"].get(column.split, {}), length)
    return _measured(run, column).get(column.metric)


def _measured(run: Run, column: Column) -> Run:
    return run["metrics"].get(column.split, {}).get(column.protocol, {})


def _mean_scores(parts: list[Scores]) -> Scores:
    seeds = sorted(set.intersection(*(set(part) for part in parts)))
    sums = {seed: math.fsum(part[seed] for part in parts) for seed in seeds}
    lost = set().union(*(part.lost for part in parts))
    return _divided(Scores(sums, lost), len(parts))


def _divided(values: Scores, by: float) -> Scores:
    return Scores({seed: value / by for seed, value in values.items()}, values.lost)
