"""Compare LRPE with its baselines on real text, in minutes on two CPU cores: ``make quickstart``.

Prepares the English text contained in CPython, trains a small language model for every row of
:data:`METHODS` with fairseq, evaluates each on held-out documents, and prints one table.
Checkpoints, logs, run files and TensorBoard logs are in ``results/quickstart/work/``; a second
call reuses them. ``--seeds 3 --publish`` replaces the committed run files of
``results/quickstart/``.
"""

import argparse
import os
import time
from collections.abc import Sequence

from lrpe_fairseq.experiments.families.lm import LMRun
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import ROOT, relative, require_checkout
from lrpe_fairseq.experiments.records.protocols import BLOCKS
from lrpe_fairseq.experiments.records.runs import read_run, write_run
from lrpe_fairseq.experiments.report import docs
from lrpe_fairseq.experiments.report import quickstart as report
from lrpe_fairseq.experiments.runner.processes import RunFailed
from lrpe_fairseq.experiments.runner.schedule import Events, Schedule, shares

DATA = ROOT / "data" / "pydoc"
RESULTS = ROOT / "results" / "quickstart"
RUNS, WORK = ROOT / report.RUNS, RESULTS / "work"
METHODS = [(attention, e) for attention in ("linear", "softmax") for e in report.ENCODINGS]
PARALLEL = 2


@command("quickstart")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run all unfinished steps; return the exit status."""
    begun = time.monotonic()
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    require_checkout()
    measure(methods(options.seeds))
    show(methods(options.seeds))
    if options.publish:
        publish(methods(options.seeds))
    minutes, seconds = divmod(round(time.monotonic() - begun), 60)
    print(f"Done in {minutes} min {seconds} s. `tensorboard --logdir {relative(WORK)}` shows more.")
    return 0


def methods(seeds: int) -> list[LMRun]:
    """Return one run per row and seed, ordered by seed."""
    return [_method(*row, seed) for seed in range(1, seeds + 1) for row in METHODS]


def measure(wanted: Sequence[LMRun]) -> None:
    """Prepare the corpus, then train and evaluate unfinished runs. Raises: UserError."""
    wanted[0].prepare_data()
    devices = shares(min(PARALLEL, len(os.sched_getaffinity(0))))
    if Schedule(wanted, devices, Events(WORK / "events.log")).run():
        raise RunFailed(f"some runs failed; their logs are in {relative(WORK)}")


def show(finished: Sequence[LMRun]) -> None:
    """Print the table and the published order; draw the curves."""
    runs = [read_run(run.result) for run in finished]
    found = report.rows(runs)
    print("\n" + report.table(found))
    if published := report.rows(report.published(RUNS)):
        print(f"Published, {len(published[0].ppl)} seeds, lower is better:")
        print("\n".join(f"  {line}" for line in report.order(published)) + "\n")
    report.draw(WORK / "validation.png", runs)


def publish(finished: Sequence[LMRun]) -> None:
    """Replace the committed run files by those of ``finished``; render their page and picture."""
    for old in RUNS.glob("*.json"):
        old.unlink()
    for run in finished:
        write_run(RUNS / f"{run.folder.name}.json", read_run(run.result))
    docs.write(ROOT, ["quickstart", "marked"])


def _method(attention: str, encoding: str, seed: int) -> LMRun:
    folder = WORK / f"{attention}-{encoding}-seed{seed}"
    return LMRun(
        experiment="quickstart",
        label=encoding,
        config="quickstart",
        data=DATA,
        attention_type=attention,
        position_encoding=encoding,
        seed=seed,
        scale="quickstart",
        folder=folder,
        result=folder / "run.json",
        evaluations=(("test", BLOCKS),),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make quickstart", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds per row (default 1)")
    parser.add_argument(
        "--publish", action="store_true", help="replace the committed results with these"
    )
    return parser
