"""Hours of the papers' tables on a cluster, by arithmetic: ``python -m benchmarks.estimates``.

Nothing is measured: the figures are those of ``scripts/run_table.sh TABLE --scale paper --estimate
--on v100x8`` in float32 and float16. The result is results/bench/estimates.json, which
docs/running.md shows.
"""

from typing import Any

from lrpe_fairseq.experiments.families import load_named, runs
from lrpe_fairseq.experiments.families.float16 import divides_by_almost_zero
from lrpe_fairseq.experiments.records import precision
from lrpe_fairseq.experiments.records.files import ROOT, write_json
from lrpe_fairseq.experiments.runner import estimate
from lrpe_fairseq.experiments.runner.arithmetic import GB

TARGET = ROOT / "results" / "bench" / "estimates.json"
CLUSTER, SCALE, SEEDS = "v100x8", "paper", 3
TABLES = ("table2", "table8", "table4")
PRECISIONS = (precision.FP32, "fp16")


def estimated(name: str, which: str) -> dict[str, Any]:
    """Return what the trainings of a table need in a precision, of all rows that it can train."""
    table, scale = load_named(name), SCALE
    if which != precision.FP32:
        scale = precision.in_precision(SCALE, which)
        table = table.with_scales([scale])
    chosen = runs(table.at(scale), scale, range(1, SEEDS + 1))
    if which == "fp16":
        chosen = [run for run in chosen if not divides_by_almost_zero(run)]
    lines = estimate.computed(chosen, CLUSTER)
    hours = [line.need.seconds / 3600 for line in lines]
    settings = lines[0].run.settings()
    saved = settings.checkpoint.save_interval_updates / settings.optimization.max_update
    return {
        "table": name,
        "precision": which,
        "trainings": sum(line.trainings for line in lines),
        "hours": [min(hours), max(hours)],
        "days": sum(h * line.trainings for h, line in zip(hours, lines, strict=True)) / 24,
        "peak_gb": max(line.need.memory for line in lines) / GB,
        "lost_minutes": 60 * max(hours) * saved,
        "disk_gb": max(line.need.disk for line in lines) / GB,
    }


def main() -> None:
    """Compute all tables in all precisions, and write them."""
    rows = []
    for name in TABLES:
        for which in PRECISIONS:
            rows.append(estimated(name, which))
            print(rows[-1], flush=True)
    about = {"kind": "arithmetic", "on": CLUSTER, "scale": SCALE, "seeds": SEEDS}
    write_json(TARGET, {**about, "rows": rows}, sort_keys=True)


if __name__ == "__main__":
    main()
