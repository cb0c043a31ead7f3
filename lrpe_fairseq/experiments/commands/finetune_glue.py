"""Fine-tune a checkpoint on GLUE on this machine: ``scripts/finetune_glue.sh``."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lrpe_fairseq.experiments import families, report
from lrpe_fairseq.experiments.data import glue
from lrpe_fairseq.experiments.families.finetuning import finetuning_runs, source_of
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import FAILED, command
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.runs import BY_HAND
from lrpe_fairseq.experiments.runner import schedule
from lrpe_fairseq.experiments.runner.training import TrainingRun

RATES = (1e-5, 3e-5, 6e-5, 1e-4)
SEEDS = 5


@command("finetune_glue")
def main(arguments: Sequence[str] | None = None) -> int:
    """Fine-tune with every learning rate and seed; skip finished runs."""
    options = _parse(arguments)
    if options.seeds < 1 or options.jobs < 1:
        raise ValueError("--seeds and --jobs must be at least 1")
    if not all(0 < lr < math.inf for lr in options.lr):
        raise ValueError(f"--lr must be positive, not {' '.join(map(str, options.lr))}")
    runs = _finetunings(options)
    # Runs of a task share its data.
    for run in {run.data: run for run in runs}.values():
        run.prepare_data(options.source)
    for run in runs:
        run.require_inputs()
    events = schedule.Events(ROOT / "runs" / "table3" / "events.log")
    one = 1 if torch.cuda.is_available() else None  # GPU; the tasks are too small for several
    devices = schedule.shares(min(options.jobs, len(runs)), one)
    new: list[Path] = []
    ended = {"finished": lambda run: new.append(run.result)}
    failed = schedule.Schedule(runs, devices, events, **ended).run()
    for run in runs:
        if run.finished():
            print(f"{run.folder.name}: {run.outcome()}")
    return FAILED if report.render("table3", new) or failed else 0


def _finetunings(options: argparse.Namespace) -> list[TrainingRun]:
    table = families.load_named("table3")
    tasks = list(glue.TASKS) if options.task == "all" else [options.task]
    glue.named(tasks[0])  # raises
    config = families.config_of(table, options.scale)
    source = source_of(options.checkpoint)
    seeds = range(1, options.seeds + 1)
    made = finetuning_runs(source, config, options.scale, tasks, options.lr, seeds)
    # Only the checkpoints that the table names fill its cells.
    first = f"runs/{table.pretrained}/{options.scale}-*-seed1/checkpoints/{checkpoints.BEST}"
    if options.checkpoint.absolute().match(str(ROOT / first)):
        return made  # of the table; other checkpoints are fine-tuned by hand
    homes = [ROOT / "runs" / BY_HAND / table.name / run.folder.name for run in made]
    return [replace(r, folder=f, result=f / "run.json") for r, f in zip(made, homes, strict=True)]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/finetune_glue.sh",
        description="Fine-tune a checkpoint on GLUE tasks on this machine.",
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="of pre-training")
    add("task", help=f"one of {', '.join(glue.TASKS)}, or all")
    add("--lr", type=float, nargs="+", default=RATES, metavar="LR", help="peak learning rates")
    add("--seeds", type=int, default=SEEDS, metavar="N", help="seeds 1 to N")
    add("--scale", default="paper", help="paper (the default) or small")
    add("--jobs", type=int, default=1, metavar="J", help="concurrent runs")
    add("--from", dest="source", type=Path, metavar="DIR", help="folder with the source data")
    return parser.parse_args(arguments)
