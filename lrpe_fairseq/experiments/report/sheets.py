"""Comparable runs of a table, and the values of its cells."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lrpe_fairseq.experiments.records.fairseq_log import DIVERGED
from lrpe_fairseq.experiments.records.keys import RATE, filled, option, plain
from lrpe_fairseq.experiments.records.protocols import BEYOND, HOLDS, Protocol, derived
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.records.tables import Column, Row, Table


class Scores(dict[int, float]):
    """The value of a cell per seed.

    lost: the seeds whose evaluation was not finite. names: seed -> the run with the value.
    """

    def __init__(
        self,
        values: Mapping[int, float] = {},
        lost: Iterable[int] = (),
        names: Mapping[int, str] = {},
    ):
        super().__init__(values)
        self.lost = frozenset(lost)
        self.names = dict(names)


@dataclass(frozen=True)
class Sheet:
    """Comparable runs of a table: one scale, and one data set unless columns name theirs.

    table: at the scale. runs: by path relative to results/runs.
    """

    table: Table
    scale: str
    dataset: str
    runs: Mapping[str, Run]

    @property
    def name(self) -> str:
        """``table-dataset-scale``, as in the names of pictures."""
        return "-".join(filter(None, (self.table.name, self.dataset, self.scale))).lower()

    @functools.cached_property
    def _of_cells(self) -> dict[tuple[str, str], dict[str, Run]]:
        runs_of_cell: dict[tuple[str, str], dict[str, Run]] = {}
        for name, run in self.runs.items():
            for cell in filled(self.table, run):
                runs_of_cell.setdefault(cell, {})[name] = run
        return runs_of_cell

    def runs_of(self, row: Row, column: Column) -> dict[str, Run]:
        """Return the runs that fill a cell, without the seeds that lack a rate of the table.

        Only a column with ``best_over: optimization.lr`` shows a sweep of learning rates. A
        diverged run counts.
        """
        runs = self._of_cells.get((row.label, column.key), {})
        rates = set(self.table.rates_at(self.scale, column.rates))
        # A column that shows one rate needs no others.
        if column.best_over != RATE or not rates:
            return runs
        rates_of_seed: dict[int, set[Any]] = {}
        for run in runs.values():
            rates_of_seed.setdefault(run["seed"], set()).add(option(run["config"], RATE))
        return {name: run for name, run in runs.items() if rates_of_seed[run["seed"]] >= rates}

    def scores(self, row: Row, column: Column) -> Scores:
        """Return the value of a cell per seed. Raises: ValueError if two runs have one seed."""
        if not row.has(column):
            return Scores()
        if column.mean_of:
            parts = [self.scores(row, self.table.column(key)) for key in column.mean_of]
            # A mean over some of its columns would be another measure.
            seeds = sorted(set.intersection(*map(set, parts)))
            means = {seed: statistics.fmean(part[seed] for part in parts) for seed in seeds}
            names = {seed: "+".join(part.names[seed] for part in parts) for seed in seeds}
            return Scores(means, set().union(*(part.lost for part in parts)), names)
        selected = self._selected(row, column)
        chosen = {seed: _value(self.runs[name], column) for seed, name in selected.items()}
        known = {seed: value for seed, value in chosen.items() if value is not None}
        if column.metric == HOLDS and known:  # a mean of two lengths is none of them
            known = dict.fromkeys(known, min(known.values()))
        # A seed that diverged counts as lost unless another rate of it is shown.
        lost = {
            run["seed"]
            for run in self.runs_of(row, column).values()
            if DIVERGED in measured(run, column.split, column.protocol)
        }
        return Scores(known, lost - set(known), {seed: selected[seed] for seed in known})

    def _selected(self, row: Row, column: Column) -> dict[int, str]:
        """Return seed -> name of the run of a cell: the only one, or the best of ``best_over``.

        Raises: ValueError if two runs have one seed and one choice.
        """
        ranks: dict[int, dict[str, tuple[float, str]]] = {}  # seed -> option -> rank and name
        # Chosen on another split than shown: valid selects, test reports.
        judge = dataclasses.replace(column, **column.best_by)
        for name, run in self.runs_of(row, column).items():
            rank = _value(run, judge)
            # A run that lacks this evaluation fills other columns.
            if rank is None:
                continue
            choice = str(option(run["config"], column.best_over)) if column.best_over else ""
            of_seed = ranks.setdefault(run["seed"], {})
            if choice in of_seed:
                _, other = of_seed[choice]
                raise ValueError(
                    f"{other} and {name} both fill seed {run['seed']} of row {row.label}, "
                    f"column {column.key}"
                )
            of_seed[choice] = rank, name
        best = min if judge.better == "lower" else max
        ranked = {
            seed: best(of_seed.values(), key=lambda r: r[0])
            for seed, of_seed in sorted(ranks.items())
        }
        return {seed: name for seed, (_, name) in ranked.items()}


Wanted = Callable[[Sheet], bool]
"""True for the groups of runs whose pictures are drawn."""


def _value(run: Run, column: Column) -> float | None:
    if not column.split:
        return run.get(column.metric)
    if column.metric in (HOLDS, BEYOND):
        length = Protocol.parse(column.protocol).length
        return derived(column.metric, run["metrics"].get(column.split, {}), length)
    return measured(run, column.split, column.protocol).get(column.metric)


def measured(run: Run, split: str, protocol: str) -> Run:
    """Return what a run measured on a split under a protocol."""
    return run["metrics"].get(split, {}).get(protocol, {})


def sheets(table: Table, runs: Mapping[str, Run]) -> list[Sheet]:
    """Return the comparable groups of the runs that fill cells of ``table``, in scale order.

    Raises: ValueError if runs of a group differ in an option of ``table.same``, or in their data.
    """
    groups: dict[tuple[str, str], dict[str, Run]] = {}
    # By name, so that a page does not depend on the order of the files.
    for name, run in sorted(runs.items()):
        if filled(table, run):
            # Columns that name their data stand beside each other in one group.
            own_data = any(column.dataset for column in table.at(run["scale"]).columns)
            key = run["scale"], "" if own_data else run["dataset"]
            groups.setdefault(key, {})[name] = run
    for members in groups.values():
        require_same(table, members)
    order = list(table.scales)
    return [
        Sheet(table.at(scale), scale, dataset, groups[scale, dataset])
        for scale, dataset in sorted(groups, key=lambda key: (order.index(key[0]), key[1]))
    ]


def require_same(table: Table, runs: Mapping[str, Run]) -> None:
    """Check that runs agree in the options of ``table.same`` and, as far as they say, in the data.

    Raises: ValueError if two runs differ in an option (with columns that have configurations: two
        runs on one data set), or in the checksum of a split or dictionary of one data set.
    """
    first: dict[tuple[str, str], tuple[str, Any]] = {}
    by_data = any(column.config for column in table.columns)
    for name, run in runs.items():
        data = run["dataset"]
        where = data if by_data else ""
        facts = {(where, key): option(run["config"], key) for key in table.same}
        # Numbers of different tests must not stand in one column.
        checksums = run.get("data", {}).items()
        facts |= {(data, f"the data {data} ({part})"): value for part, value in checksums}
        for fact, value in facts.items():
            other, known = first.setdefault(fact, (name, value))
            if plain(known) != plain(value):
                raise ValueError(
                    f"{other} and {name} cannot be in one table because they differ in {fact[1]}: "
                    f"{known} and {value}"
                )
