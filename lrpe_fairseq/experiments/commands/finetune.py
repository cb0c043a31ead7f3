"""Fine-tune a checkpoint on GLUE tasks on this machine: ``scripts/finetune_glue.sh``."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from lrpe_fairseq.experiments import report
from lrpe_fairseq.experiments.data import glue
from lrpe_fairseq.experiments.families.finetuning import finetuning_runs, source_of
from lrpe_fairseq.experiments.families.plan import config_of, load_named
from lrpe_fairseq.experiments.records.console import FAILED, command
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.runner import schedule
from lrpe_fairseq.experiments.runner.training import TrainingRun

RATES = (1e-5, 3e-5, 6e-5, 1e-4)
SEEDS = 5


@command("finetune_glue")
def main(arguments: Sequence[str] | None = None) -> int:
    """Fine-tune with every learning rate and seed; skip finished runs."""
    options = _parse(arguments)
    _require_possible(options)
    runs = _runs(options)
    for run in {run.data: run for run in runs}.values():
        run.prepare_data(options.source)
    for run in runs:
        run.require_inputs()
    return _work(runs, options.jobs)


def _require_possible(options: argparse.Namespace) -> None:
    """Raise ValueError for numbers that leave nothing to do."""
    if options.seeds < 1 or options.jobs < 1:
        raise ValueError("--seeds and --jobs must be at least 1")
    if not all(0 < lr < math.inf for lr in options.lr):
        raise ValueError(f"--lr must be positive, not {' '.join(map(str, options.lr))}")


def _work(runs: Sequence[TrainingRun], jobs: int) -> int:
    events = schedule.Events(ROOT / "runs" / "table3" / "events.log")
    one = 1 if torch.cuda.is_available() else None  # GPU; the tasks are too small for several
    devices = schedule.shares(min(jobs, len(runs)), one)
    failed = schedule.Schedule(runs, devices, events).run()
    _print_best(runs)
    return FAILED if report.render() or failed else 0


def _print_best(runs: Sequence[TrainingRun]) -> None:
    for run in runs:
        if run.finished():
            print(f"{run.folder.name}: {run.outcome()}")


def _runs(options: argparse.Namespace) -> list[TrainingRun]:
    table = load_named("table3")
    tasks = (
        list(glue.TASKS) if options.task == "all" else [glue.named(options.task) and options.task]
    )
    config = config_of(table, options.scale)
    source = source_of(options.checkpoint)
    seeds = range(1, options.seeds + 1)
    return finetuning_runs(source, config, options.scale, tasks, options.lr, seeds)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/finetune_glue.sh", description=__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="of pre-training")
    add("task", help=f"one of {', '.join(glue.TASKS)}, or all")
    add(
        "--lr",
        type=float,
        nargs="+",
        default=list(RATES),
        metavar="LR",
        help="peak learning rates to try",
    )
    add("--seeds", type=int, default=SEEDS, metavar="N", help="seeds 1 to N")
    add("--scale", default="paper", help="paper (the default) or small")
    add("--jobs", type=int, default=1, metavar="J", help="concurrent runs")
    add("--from", dest="source", type=Path, metavar="DIR", help="folder with the source data")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
