"""Fine-tune a checkpoint on GLUE on this machine: ``scripts/finetune_glue.sh``."""

import argparse
import math
import os
import sys
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
from lrpe_fairseq.experiments.records.tables import digest_of_text
from lrpe_fairseq.experiments.runner import schedule, slurm
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.training import TrainingRun

SEEDS = 5


@command("finetune_glue")
def main(arguments: Sequence[str] | None = None) -> int:
    """Fine-tune with every learning rate and seed; skip finished runs."""
    options = _parse(arguments)
    if options.seeds < 1 or options.jobs < 1:
        raise ValueError("--seeds and --jobs must be at least 1")
    if not all(0 < lr < math.inf for lr in options.lr or ()):
        raise ValueError(f"--lr must be positive, not {' '.join(map(str, options.lr))}")
    runs = _finetunings(options)
    if options.slurm:
        return _submit(runs, options, sys.argv[1:] if arguments is None else arguments)
    if options.array_task is not None:
        runs = [slurm.element(runs, options.array_task)]
    # Runs of a task share its data.
    for run in {run.data: run for run in runs}.values():
        run.prepare_data(options.source)
    for run in runs:
        run.require_inputs()
    events = schedule.Events(ROOT / "runs" / "table3" / "events.log")
    if options.array_task is not None:
        return _run_element(runs[0], events)
    one = 1 if torch.cuda.is_available() else None  # GPU; the tasks are too small for several
    devices = schedule.shares(min(options.jobs, len(runs)), one)
    new: list[Path] = []
    ended = {"finished": lambda run: new.append(run.result)}
    failed = schedule.Schedule(runs, devices, events, **ended).run()
    for run in runs:
        if run.finished():
            print(f"{run.folder.name}: {run.outcome()}")
    return FAILED if report.render("table3", new) or failed else 0


def _run_element(run: TrainingRun, events: schedule.Events) -> int:
    """Run one element of a Slurm array on its CPU cores and one GPU; a later job renders."""
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    gpus = (0,) if torch.cuda.is_available() else None
    devices = Devices(threads=cores, gpus=gpus)
    return FAILED if schedule.Schedule([run], [devices], events).run() else 0


def _submit(runs: Sequence[TrainingRun], options: argparse.Namespace, given: Sequence[str]) -> int:
    """Submit the unfinished runs as one array, or print what would be submitted."""
    left = slurm.unfinished(runs)
    if not left:
        print("all runs are already finished")
        return 0
    site = slurm.load_site(ROOT / "configs" / "slurm.yaml", {"nodes": 1})
    site = replace(site, gpus_per_node=min(1, site.gpus_per_node))  # for one task one is enough
    paths = [path for path in (options.checkpoint, options.data) if path]
    chosen = {str(path): str(path.absolute()) for path in paths}
    own = [chosen.get(word, word) for word in given if word not in ("--slurm", "--dry-run")]
    plan = slurm.planned(ROOT, "table3", own, left, site, "finetune_glue")
    if options.dry_run:
        print(plan)
        print(*(f"{index}  {name}" for index, name in left.items()), sep="\n")
        print(f"{len(left)} of {len(runs)} runs; nothing was submitted")
        return 0
    slurm.require_sbatch()
    for run in {run.data: run for run in runs}.values():
        run.prepare_data(options.source)
    print(f"job array {slurm.submit(plan)}: {len(left)} of {len(runs)} runs")
    return 0


def _finetunings(options: argparse.Namespace) -> list[TrainingRun]:
    table = families.load_named("table3")
    tasks = list(glue.TASKS) if options.task == "all" else [options.task]
    glue.named(tasks[0])  # raises
    config = families.config_of(table, options.scale)
    rates = options.lr or table.rates_at(options.scale, ())
    source = source_of(options.checkpoint)
    seeds = range(1, options.seeds + 1)
    home = options.data.absolute() if options.data else None
    made = finetuning_runs(source, config, options.scale, tasks, rates, seeds, home=home)
    # Only the checkpoints that the table names, on its data, fill its cells.
    first = f"runs/{table.pretrained}/{options.scale}-*-seed1/checkpoints/{checkpoints.BEST}"
    if home is None and options.checkpoint.absolute().match(str(ROOT / first)):
        return made  # of the table; other checkpoints are fine-tuned by hand
    # Many checkpoints lie in folders of one name, or beside each other.
    which = digest_of_text(str(options.checkpoint.resolve()))
    homes = [ROOT / "runs" / BY_HAND / table.name / f"{r.folder.name}-{which}" for r in made]
    return [replace(r, folder=f, result=f / "run.json") for r, f in zip(made, homes, strict=True)]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/finetune_glue.sh",
        description="Fine-tune a checkpoint on GLUE tasks on this machine.",
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="of pre-training")
    add("task", help=f"one of {', '.join(glue.TASKS)}, or all")
    add(
        "--lr",
        type=float,
        nargs="+",
        metavar="LR",
        help="peak learning rates; default: the table's",
    )
    add("--seeds", type=int, default=SEEDS, metavar="N", help="seeds 1 to N")
    add("--scale", default="paper", help="paper (the default) or small")
    add("--jobs", type=int, default=1, metavar="J", help="concurrent runs")
    add("--data", type=Path, metavar="DIR", help="with a folder per task; default: the scale's")
    add("--from", dest="source", type=Path, metavar="DIR", help="folder with the source data")
    add("--slurm", action="store_true", help="submit the runs as one job array; configs/slurm.yaml")
    add("--dry-run", action="store_true", help="with --slurm: print the jobs only")
    add("--array-task", metavar="RUN", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.dry_run and not options.slurm:
        raise ValueError("--dry-run needs --slurm")
    if options.slurm and options.jobs > 1:
        raise ValueError("--jobs is for this machine: with --slurm, use running in slurm.yaml")
    return options
