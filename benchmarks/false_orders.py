"""How often the rule of orders has a wrong verdict against the baseline, by simulation.

    python -m benchmarks.false_orders

The layouts are those of the measurements behind the pages: their rows, the seeds of each, and the
number of tests. Values are drawn on the scale of comparisons: a true mean of the row, an effect of
the seed, an error of row and seed, and an error of the row that is due to the choice of tests and
shared by its seeds. They may leave the range of a fraction: cutting them off would move the true
means. True means are equal, or as measured; errors are of equal size, or as measured
(two seeds exaggerate how much sizes differ). The prior is fitted to every draw.

A column counts if any row has a wrong verdict against the baseline: better or worse although it is
not, or equal although the true difference exceeds the margin. The result is
results/false-orders.json.
"""

import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lrpe_fairseq.experiments.records.files import ROOT, write_json
from lrpe_fairseq.experiments.report import orders
from lrpe_fairseq.experiments.report.results import Results

DRAWS = 20  # of every column
TARGET = ROOT / "results" / "false-orders.json"
MEANS, ERRORS = ("equal", "as measured"), ("equal", "as measured")


@dataclass(frozen=True)
class Layout:
    """The rows of a measurement.

    seeds: by row. means, deviations: by row, on the scale of comparisons. sampling: see
    ``orders.sampling``. base: the row that others are compared with.
    """

    name: str
    kind: str
    better: str
    seeds: dict[str, list[int]]
    means: dict[str, float]
    deviations: dict[str, float]
    sampling: float
    base: str


def layouts(results: Results) -> list[Layout]:
    """Return the layouts of all measurements that have verdicts against a baseline."""
    bases: dict = {}
    for view in results.views():
        if view.table.baseline in view.scaled:
            bases.setdefault(view.key, view.identity(view.table.baseline))
    every = results.measurements.every
    found = (layout(key.text(), one, bases[key]) for key, one in every.items() if key in bases)
    return [one for one in found if one]


def layout(name: str, measured: orders.Measurement, base: str) -> Layout | None:
    """Return the layout of a measurement; None without repeated rows beside the baseline."""
    cells = measured.cells
    spread = {row: statistics.stdev(v.values()) for row, v in cells.items() if len(v) > 1}
    if len(cells) < 2 or not spread or measured.kind == "plain":
        return None
    typical = max(statistics.median(spread.values()), orders.LEAST)
    return Layout(
        name=name,
        kind=measured.kind,
        better=measured.better,
        seeds={row: sorted(values) for row, values in cells.items()},
        means={row: statistics.fmean(values.values()) for row, values in cells.items()},
        deviations={row: spread.get(row, typical) for row in cells},
        sampling=measured.sampling,
        base=base,
    )


def truth(one: Layout, means: str) -> dict[str, float]:
    """Return the true means of the rows: all that of the baseline, or as measured."""
    return one.means if means == "as measured" else dict.fromkeys(one.means, one.means[one.base])


def drawn(
    one: Layout, true: dict[str, float], errors: str, generator: np.random.Generator
) -> orders.Cells:
    """Return values of a column with these true means."""
    typical = statistics.median(one.deviations.values())
    shift = {seed: typical * generator.normal() for seeds in one.seeds.values() for seed in seeds}
    cells = {}
    for row, seeds in one.seeds.items():
        size = one.deviations[row] if errors == "as measured" else typical
        tests = np.sqrt(one.sampling / 2) * generator.normal()
        cells[row] = {s: true[row] + tests + shift[s] + size * generator.normal() for s in seeds}
    return cells


def wrong(one: Layout, true: dict[str, float], cells: orders.Cells) -> bool:
    """True if any row has a wrong verdict against the baseline."""
    measured = orders.Measurement(cells, one.kind, one.better, one.sampling)
    sign = 1 if one.better == "higher" else -1
    for row in (row for row in cells if row != one.base):
        gap = true[row] - true[one.base]
        found = measured.verdict(row, one.base).name
        if found == orders.BETTER and gap * sign <= 0:
            return True
        if found == orders.WORSE and gap * sign >= 0:
            return True
        middle = (true[row] + true[one.base]) / 2
        real = abs(orders.effect(one.kind, middle, gap))
        if found == orders.EQUAL and real > orders.UNITS[one.kind].margin:
            return True
    return False


def shares(columns: list[Layout], draws: int = DRAWS) -> Iterator[tuple[str, list[float]]]:
    """Yield the name of a simulation and, by column, the share of its draws that are wrong."""
    for means, errors in itertools.product(MEANS, ERRORS):
        generator, found = np.random.default_rng(0), []
        for one in columns:
            true = truth(one, means)
            false = sum(wrong(one, true, drawn(one, true, errors, generator)) for _ in range(draws))
            found.append(false / draws)
        yield f"means {means}, deviations {errors}", found


def main() -> None:
    """Simulate, print and write the shares."""
    columns = layouts(Results(ROOT))
    found = {name: float(np.mean(own)) for name, own in shares(columns)}
    written = {
        "draws": DRAWS,
        "columns": len(columns),
        "shares": found,
        "worst": max(found.values()),
    }
    print(json.dumps(written, indent=1))
    write_json(TARGET, written)


if __name__ == "__main__":
    main()
