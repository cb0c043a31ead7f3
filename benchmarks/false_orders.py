"""How often the rule of orders finds an order between rows that do not differ.

    python -m benchmarks.false_orders

The layouts are those of the measured columns (results/*.csv): their rows and the number of seeds of
each. Values are drawn without any difference between rows: seeds have effects of the size of the
errors. Errors are normal and equal; normal with the deviations that the rows of the column have
("unequal"); or those of accuracies near 1 of 1,000 examples ("saturated"). A column counts if the
rule orders any two of its rows. The result is results/false-orders.json.
"""

import csv
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from lrpe_fairseq.experiments.records.files import ROOT, write_json
from lrpe_fairseq.experiments.report import orders

DRAWS = 10  # of every column
EXAMPLES, TRUE_ACCURACY, SEED_DEVIATION = 1000, 0.99, 0.3  # of the saturated accuracies; in logits
TARGET = ROOT / "results" / "false-orders.json"
Layout = dict[str, tuple[int, float]]
"""row -> number of seeds, and its relative deviation (0 if it has one seed)."""


BEYOND = "extrapolation", "linear"
"""Table and attention whose broken rows scatter far more than the others."""


def layouts(folder: Path) -> dict[bool, list[Layout]]:
    """Return the measured columns with several rows and a repeated one; True: those of BEYOND."""
    found: dict[tuple, Layout] = defaultdict(dict)
    for path in sorted(folder.glob("*.csv")):
        with open(path, encoding="utf-8", newline="") as file:
            for cell in csv.DictReader(file):
                if cell["mean"] and cell["seeds"]:
                    own = (path.stem, cell["attention"]) == BEYOND
                    key = own, path.stem, cell["scale"], cell["dataset"], cell["column"]
                    size = abs(float(cell["mean"])) or 1.0
                    deviation = float(cell["deviation"] or 0) / size
                    found[key][cell["row"]] = int(cell["seeds"]), deviation
    kept = {k: x for k, x in found.items() if len(x) > 1 and max(n for n, _ in x.values()) > 1}
    return {beyond: [x for k, x in kept.items() if k[0] == beyond] for beyond in (False, True)}


def drawn(layout: Layout, errors: str, generator: np.random.Generator) -> orders.Cells:
    """Return values of a column without differences between its rows."""
    most = max(seeds for seeds, _ in layout.values())
    common = generator.normal(size=most)
    known = [deviation for _, deviation in layout.values() if deviation > 0] or [1.0]
    typical = float(np.median(known))
    cells = {}
    for row, (seeds, deviation) in layout.items():
        size = (deviation or typical) / typical if errors == "unequal" else 1.0
        values = common[:seeds] + size * generator.normal(size=seeds)
        if errors == "saturated":
            logits = np.log(TRUE_ACCURACY / (1 - TRUE_ACCURACY)) + SEED_DEVIATION * values
            right = generator.binomial(EXAMPLES, 1 / (1 + np.exp(-logits))) / EXAMPLES
            values = np.array([orders.compared(x, "fraction") for x in right])
        cells[row] = dict(enumerate(map(float, values), 1))
    return cells


def share(columns: list[Layout], errors: str) -> float:
    """Return the share of draws in which the rule orders any two rows."""
    generator, false = np.random.default_rng(0), 0
    examples = EXAMPLES if errors == "saturated" else 0
    for layout in columns:
        for _ in range(DRAWS):
            marks = orders.orders(drawn(layout, errors, generator), examples=examples)
            false += orders.BETTER in marks.values()
    return false / (DRAWS * len(columns))


def main() -> None:
    """Simulate, print and write the shares."""
    known = layouts(ROOT / "results")
    columns = known[False]
    kinds = {
        "equal numbers of seeds": [x for x in columns if len({n for n, _ in x.values()}) == 1],
        "unequal numbers of seeds": [x for x in columns if len({n for n, _ in x.values()}) > 1],
        "with rows of one seed": [x for x in columns if min(n for n, _ in x.values()) == 1],
        "extrapolation of linear attention": known[True],
    }
    found = {
        name: {"columns": len(own)} | {e: share(own, e) for e in ("equal", "unequal", "saturated")}
        for name, own in kinds.items()
        if own
    }
    print(json.dumps(found, indent=1))
    write_json(TARGET, {"draws": DRAWS, "false_orders": found})


if __name__ == "__main__":
    main()
