"""Train on this machine: one row of a table, or one checkpoint on GLUE.

``scripts/train_lm.sh`` and similar scripts train a row. Without ``key=value`` arguments this is the
run of ``scripts/run_table.sh <table>``, which also evaluates it; with such arguments it has a
separate folder under ``runs/by-hand``. ``scripts/finetune_glue.sh`` fine-tunes a checkpoint.
"""

import argparse
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lrpe_fairseq.experiments import families, report
from lrpe_fairseq.experiments.data import folders, glue
from lrpe_fairseq.experiments.families.finetuning import finetuning_runs, source_of
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import FAILED, command
from lrpe_fairseq.experiments.records.files import ROOT, relative
from lrpe_fairseq.experiments.records.layout import file_name
from lrpe_fairseq.experiments.records.runs import BY_HAND
from lrpe_fairseq.experiments.runner import identity, schedule, slurm
from lrpe_fairseq.experiments.runner.devices import Devices, parse_overrides
from lrpe_fairseq.experiments.runner.processes import locked
from lrpe_fairseq.experiments.runner.training import TrainingRun

RATES = (1e-5, 3e-5, 6e-5, 1e-4)
SEEDS = 5
SCRIPTS = {"table2": "train_lm", "table4": "train_mt", "table8": "pretrain_roberta"}
"""Tables with a script of their own, which passes the table."""

ELSEWHERE = {
    "task.data": "choose the data with --dataset",
    "common.seed": "choose the seed with --seed",
    "checkpoint.save_dir": "the row and its changes name the folder",
}
"""Settings that other parts of the run follow, and what decides them."""

TEE = 'set -o pipefail; "$@" 2>&1 | tee -a "$0"'


@command("train_row")
def main(arguments: list[str] | None = None) -> int:
    """Print and run the training command; returns its exit status."""
    options = _parse(arguments)
    run = _run(options)
    folders.require(run.data, run.preparation_of(run.data))
    with locked(run.folder):
        status = train(run)
    if status == 0:
        paths = run.checkpoints / checkpoints.BEST, run.data
        best, data = (shlex.quote(relative(path)) for path in paths)
        where = {"table": options.table, "scale": options.scale}
        print(run.next_step.format(best=best, data=data, **where))
    return status


def train(run: TrainingRun) -> int:
    """Train or resume ``run``; output goes to the screen and to its log."""
    seen = run.begin(print)
    if seen >= run.max_update():
        print(f"{run.name} already has its {seen} updates")
        return 0
    devices = run.usable(Devices(), print)
    limit = [f"{name}={value}" for name, value in devices.visible.items()]
    words = [*(["env", *limit] if limit else []), *run.command(devices.processes)]
    print(shlex.join(words), flush=True)
    return subprocess.run(["bash", "-c", TEE, str(run.log), *words], cwd=ROOT).returncode


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    given = sys.argv[1:] if arguments is None else arguments
    script = SCRIPTS.get(given[0]) if given else None
    parser = argparse.ArgumentParser(
        prog=f"scripts/{script or 'train_classifier'}.sh",
        description="Train one row of a table on this machine; an interrupted training is resumed.",
    )
    table = argparse.SUPPRESS if script else "a file of configs/tables, without .yaml"
    add = parser.add_argument
    add("table", help=table)
    add("row", help="a label of the table, such as Base")
    add("attention", help="a type, or the pattern of the row")
    add("changes", nargs="*", default=[], metavar="key=value", help="such as model.dropout=0.2")
    add("--scale", help="default: paper, or the first one of the table")
    add("--seed", type=int, default=1)
    add("--dataset", metavar="DATA", help="data set of a table with several (default: the first)")
    options = parser.parse_intermixed_args(given)
    if options.seed < 1:
        raise ValueError("--seed must be at least 1")
    return options


def _run(options: argparse.Namespace) -> TrainingRun:
    table = families.load_named(options.table)
    row = table.row(options.row)
    if options.attention not in row.attention:
        raise ValueError(f"{row.label} supports only {' and '.join(row.attention)} attention")
    usual = "paper" if "paper" in table.scales else next(iter(table.scales))
    options.scale = options.scale or usual
    wanted = replace(table, rows=[row])
    found = families.runs(wanted, options.scale, [options.seed])
    found = families.with_data(found, table, options.scale, options.dataset and [options.dataset])
    run = next(run for run in found if run.attention_type == options.attention)
    if not options.changes:
        return run
    changes = parse_overrides(tuple(options.changes))
    for key in ELSEWHERE.keys() & changes.keys():
        raise ValueError(f"{key} cannot be changed here: {ELSEWHERE[key]}")
    identity.require_known(run.settings(), changes)
    name = file_name("-".join([run.folder.name, *options.changes]))
    folder = ROOT / "runs" / BY_HAND / table.name / name
    return replace(run, overrides=(*run.overrides, *options.changes), folder=folder)


@command("finetune_glue")
def finetune(arguments: Sequence[str] | None = None) -> int:
    """Fine-tune with every learning rate and seed; skip finished runs."""
    options = _parse_finetuning(arguments)
    if options.seeds < 1 or options.jobs < 1:
        raise ValueError("--seeds and --jobs must be at least 1")
    if not all(0 < lr < math.inf for lr in options.lr):
        raise ValueError(f"--lr must be positive, not {' '.join(map(str, options.lr))}")
    runs = _finetunings(options)
    if options.slurm:
        return _submit(runs, options, sys.argv[1:] if arguments is None else arguments)
    if options.array_task is not None:
        runs = [runs[options.array_task]]
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
    tasks = [index for index, run in enumerate(runs) if not run.finished()]
    if not tasks:
        print("all runs are already finished")
        return 0
    site = slurm.load_site(ROOT / "configs" / "slurm.yaml", {"nodes": 1})
    site = replace(site, gpus_per_node=min(1, site.gpus_per_node))  # for one task one is enough
    chosen = {str(options.checkpoint): str(options.checkpoint.absolute())}
    own = [chosen.get(word, word) for word in given if word not in ("--slurm", "--dry-run")]
    plan = slurm.planned(ROOT, "table3", own, tasks, site, "finetune_glue")
    if options.dry_run:
        print(plan)
        print(*(f"{index}  {runs[index].name}" for index in tasks), sep="\n")
        print(f"{len(tasks)} of {len(runs)} runs; nothing was submitted")
        return 0
    slurm.require_sbatch()
    for run in {run.data: run for run in runs}.values():
        run.prepare_data(options.source)
    print(f"job array {slurm.submit(plan)}: {len(tasks)} of {len(runs)} runs")
    return 0


def _finetunings(options: argparse.Namespace) -> list[TrainingRun]:
    table = families.load_named("table3")
    tasks = list(glue.TASKS) if options.task == "all" else [options.task]
    glue.named(tasks[0])  # raises
    config = families.config_of(table, options.scale)
    source, seeds = source_of(options.checkpoint), range(1, options.seeds + 1)
    made = finetuning_runs(source, config, options.scale, tasks, options.lr, seeds)
    first = f"runs/{table.pretrained}/{options.scale}-*-seed1/checkpoints/{checkpoints.BEST}"
    if options.checkpoint.absolute().match(str(ROOT / first)):
        return made  # of the table; other checkpoints are fine-tuned by hand
    homes = [ROOT / "runs" / BY_HAND / table.name / run.folder.name for run in made]
    return [replace(r, folder=f, result=f / "run.json") for r, f in zip(made, homes, strict=True)]


def _parse_finetuning(arguments: Sequence[str] | None) -> argparse.Namespace:
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
    add("--slurm", action="store_true", help="submit the runs as one job array; configs/slurm.yaml")
    add("--dry-run", action="store_true", help="with --slurm: print the jobs only")
    add("--array-task", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.dry_run and not options.slurm:
        raise ValueError("--dry-run needs --slurm")
    if options.slurm and options.jobs > 1:
        raise ValueError("--jobs is for this machine: with --slurm, use running in slurm.yaml")
    return options
