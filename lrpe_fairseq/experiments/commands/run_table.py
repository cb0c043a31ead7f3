"""Train and evaluate every cell of a table: ``scripts/run_table.sh``."""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import re
import shlex
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from lrpe_fairseq.experiments import report
from lrpe_fairseq.experiments.families import (
    config_of,
    in_columns,
    load_named,
    runs,
    with_data,
)
from lrpe_fairseq.experiments.families.float16 import divides_by_almost_zero
from lrpe_fairseq.experiments.records import precision
from lrpe_fairseq.experiments.records.console import FAILED, command, format_duration
from lrpe_fairseq.experiments.records.files import (
    ROOT,
    atomic_write,
    load_config,
    relative,
    require_writable,
)
from lrpe_fairseq.experiments.records.methods import rows_named
from lrpe_fairseq.experiments.records.runs import read_run
from lrpe_fairseq.experiments.records.tables import Table
from lrpe_fairseq.experiments.runner import estimate, schedule, slurm
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import grace
from lrpe_fairseq.experiments.runner.training import TrainingRun

SEEDS = 2
SCALE = "small"
CLOSING_SECONDS = 5.0  # to write the last files after all processes have ended
SITE_OPTIONS = {"partition": str, "time": str, "gpus_per_node": int, "nodes": int}


@command("run_table")
def main(arguments: list[str] | None = None) -> int:
    """Run a table, submit it, or print its commands or progress; return the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _parse(words)
    begun = time.monotonic()
    table = load_named(options.table)
    options.scale = options.scale or usual_scale(table)
    if options.precision:
        table, options.scale = _in_precision(table, options.scale, options.precision)
    chosen = _select(table, options)
    if options.slurm and options.dry_run:
        return _show_jobs(chosen, options, words)
    if options.status or options.dry_run:
        return _show(chosen, options)
    if options.on:
        return estimate.by_arithmetic(chosen, options.on)
    # A job of a Slurm array: its element is one run, and it does not submit again.
    if options.array_task is not None:
        return _run_task(chosen, options)
    if options.slurm:
        slurm.require_sbatch()
    else:
        _require_devices(chosen, options)  # before data are prepared
    # Before the runs start in parallel: two of them would prepare the same folder.
    for run in {run.data: run for run in chosen}.values():
        run.prepare_data(options.source)
    if options.estimate:
        (devices, *_) = schedule.shares(min(options.jobs, len(chosen)), options.gpus)
        return estimate.by_measurement(chosen, devices, print)
    return _submit(chosen, options, words) if options.slurm else _run_here(chosen, options, begun)


def _run_here(chosen: Sequence[TrainingRun], options: argparse.Namespace, begun: float) -> int:
    """Run ``chosen`` on this machine, then render the tables or pack the run files."""
    events = schedule.Events(ROOT / "runs" / options.table / "events.log")
    devices = schedule.shares(min(options.jobs, len(chosen)), options.gpus)
    # Also of earlier calls: this one writes their pack again.
    earlier = [run.result for run in chosen if run.finished()] if options.pack else []
    minutes = math.inf if options.minutes is None else options.minutes
    # What is left for work: stopping, saving and packing take their part of the minutes.
    seconds = begun + 60 * minutes - grace() - CLOSING_SECONDS - time.monotonic()
    results: list[Path] = []

    def finished(run: TrainingRun) -> None:
        results.append(run.result)
        if options.pack:
            with contextlib.suppress(OSError):  # the last call says so
                _pack(options.pack, [*earlier, *results])

    work = schedule.Schedule(chosen, devices, events, seconds=seconds, finished=finished)
    try:
        failed = work.run()
    finally:
        if options.pack:
            known = {*earlier, *results}
            # Another process may have finished some.
            done = [run.result for run in chosen if run.result in known or run.finished()]
            logs = [path for run in chosen for path in sorted(run.folder.glob("*.log"))]
            _pack(options.pack, done, logs)
    if not options.pack:  # pages need libraries that a lent machine may lack
        failed = report.render(options.table, results) or failed
    events.say(f"{options.table}: {format_duration(time.monotonic() - begun)} in total")
    return FAILED if failed else 0


def _pack(target: Path, results: Sequence[Path], logs: Sequence[Path] = ()) -> None:
    """Write run files, with their whole configurations, and logs to a tar, whole.

    Where it is unpacked the bases of the run files may be others.
    """
    with atomic_write(target, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        for path in results:
            content = json.dumps(read_run(path), sort_keys=True).encode()
            entry = tar.gettarinfo(path, relative(path))
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for path in logs:
            tar.add(path, relative(path))


def _run_task(chosen: Sequence[TrainingRun], options: argparse.Namespace) -> int:
    """Run one element of a Slurm array with all its resources; a later job renders."""
    run = slurm.element(chosen, options.array_task)
    run.prepare_data()
    events = schedule.Events(run.folder / "events.log")
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))  # some clusters do not set the affinity
    devices = Devices(threads=cores, nodes=options.nodes or 1)
    return FAILED if schedule.Schedule([run], [devices], events).run() else 0


def _submit(chosen: Sequence[TrainingRun], options: argparse.Namespace, words: list[str]) -> int:
    """Submit the unfinished runs; the array counts all of ``chosen``."""
    # Numbers count all of the selection, so that a later call with more finished runs agrees.
    left = slurm.unfinished(chosen)
    if not left:
        print("all runs are already finished")
        return report.render(options.table)
    job = slurm.submit(_planned(left, _site(options), options.table, words))
    print(f"job array {job}: {len(left)} of {len(chosen)} runs; see their progress with --status")
    return 0


def _site(options: argparse.Namespace) -> slurm.Site:
    """Return the settings of the cluster, with those of the command line."""
    settings = {name: getattr(options, name) for name in SITE_OPTIONS}
    return slurm.load_site(ROOT / "configs" / "slurm.yaml", settings)


def _planned(
    runs: Mapping[int, str], site: slurm.Site, table: str, given: Sequence[str]
) -> slurm.Plan:
    """Return the jobs of the elements ``runs``; given: the words of the command line."""
    own = [word for word in given if word not in ("--slurm", "--dry-run")]
    return slurm.planned(ROOT, table, [*own, "--nodes", str(site.nodes)], runs, site)


def _show_jobs(
    chosen: Sequence[TrainingRun], options: argparse.Namespace, given: Sequence[str]
) -> int:
    """Print the jobs that ``--slurm`` would submit, and how each run divides an update."""
    left = slurm.unfinished(chosen)
    if not left:
        print("all runs are already finished")
        return 0
    site = _site(options)
    processes = max(1, site.gpus_per_node) * site.nodes
    print(_planned(left, site, options.table, given))
    print(f"element  run  processes (--nodes {site.nodes} x {max(1, site.gpus_per_node)})  update")
    for index, name in left.items():
        print(f"{index}  {name}  {chosen[index].divided(processes)}")
    print(f"{len(left)} of {len(chosen)} runs; nothing was submitted")
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/run_table.sh", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("table", help="a file of configs/tables, without .yaml")
    add("--rows", nargs="+", metavar="ROW", help="names of rows or of encodings (default: all)")
    add("--columns", nargs="+", metavar="TITLE", help="titles of columns (default: all)")
    add("--attention", nargs="+", metavar="TYPE", choices=("linear", "softmax"))
    add("--datasets", nargs="+", metavar="DATA", help="data sets of a table with several of them")
    add(
        "--seeds",
        type=int,
        default=SEEDS,
        metavar="N",
        help="seeds 1 to N, unless the table has seeds",
    )
    add("--scale", help="a scale of the table (default: small, or its first without one)")
    add(
        "--precision",
        choices=tuple(precision.FLAGS),
        help="of the trainings (default: that of the scale); another one is a scale of its own",
    )
    add("--jobs", type=int, default=1, metavar="J", help="concurrent runs")
    add("--gpus", type=int, metavar="G", help="GPUs per run (default: all with --jobs 1, else 1)")
    add("--from", dest="source", type=Path, metavar="DIR", help="folder with the source data")
    add("--minutes", type=float, metavar="M", help="end after M minutes; the most important first")
    add("--pack", type=Path, metavar="FILE.tar", help="put the finished run files there; no pages")
    add("--dry-run", action="store_true", help="print the training commands, or the jobs")
    add("--status", action="store_true", help="print the progress of every run, and the time left")
    add(
        "--estimate",
        action="store_true",
        help=f"train {estimate.UPDATES} updates of every cell; print hours, memory and disk",
    )
    add("--on", metavar="CARDxN", help="with --estimate: by arithmetic, on devices like v100x8")
    cluster = parser.add_argument_group("Slurm", "settings of your cluster: configs/slurm.yaml")
    cluster.add_argument("--slurm", action="store_true", help="submit the runs as one job array")
    for name, kind in SITE_OPTIONS.items():
        cluster.add_argument(f"--{name.replace('_', '-')}", type=kind)
    cluster.add_argument("--array-task", metavar="RUN", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def usual_scale(table: Table) -> str:
    """Return the scale that is run by default: ``small``, or the first of a table without it."""
    return SCALE if SCALE in table.scales else next(iter(table.scales))


def _in_precision(table: Table, scale: str, wanted: str) -> tuple[Table, str]:
    """Return the table and the name of one of its scales in another precision.

    Raises: ValueError for a table that compares precisions itself.
    """
    if set(table.options) & set(precision.FLAGS[wanted]):
        raise ValueError(
            f"the columns of table {table.name} differ in precision: leave out --precision"
        )
    if precision.of_config(load_config(config_of(table, scale))) == wanted:
        return table, scale
    name = precision.in_precision(scale, wanted)
    return table.with_scales([name]), name


def _require_devices(chosen: Sequence[TrainingRun], options: argparse.Namespace) -> None:
    """Raise ValueError if this machine cannot train in parallel, or in the precision, as asked."""
    schedule.shares(min(options.jobs, len(chosen)), options.gpus)
    if options.precision == "fp16" and not torch.cuda.is_available():
        raise ValueError("--precision fp16 needs a GPU: use bf16 or fp32 on a CPU")


def _require_float16(chosen: Sequence[TrainingRun]) -> None:
    """Refuse what float16 cannot train: runs whose denominator is often close to zero.

    Raises: ValueError, which names their rows.
    """
    lost = {run.label for run in chosen if divides_by_almost_zero(run)}
    if lost:
        raise ValueError(
            f"linear attention of {', '.join(sorted(lost))} divides by a denominator that is often "
            "near zero, so float16 gradients overflow: train these rows with --precision bf16 or "
            "fp32, and the others with --rows"
        )


def _select(table: Table, options: argparse.Namespace) -> list[TrainingRun]:
    """Return the runs of the cells that the options name, in the order in which they run.

    Raises: ValueError if there is none.
    """
    table = table.at(options.scale)
    _check_options(options)
    named = [row for name in options.rows or () for row in rows_named(table, name)]
    rows = {row.label: row for row in named or table.rows}
    part = dataclasses.replace(table, rows=list(rows.values()))
    # Tables that only select options have a seed that no page reports.
    seeds = table.seeds or range(1, options.seeds + 1)
    selected = runs(part, options.scale, seeds)
    if options.columns:
        names = in_columns(part, options.scale, seeds, options.columns)
        selected = [run for run in selected if run.name in names]
    selected = with_data(selected, table, options.scale, options.datasets)
    if options.attention:  # in this order
        # A lent machine may be taken away: what is asked for first runs first.
        kinds = {kind: place for place, kind in enumerate(options.attention)}
        selected = [run for run in selected if run.attention_type in kinds]
        selected.sort(key=lambda run: (run.seed, kinds[run.attention_type]))
    if options.precision == "fp16":
        _require_float16(selected)
    if not selected:
        raise ValueError(
            f"no cell of table {table.name} has these --rows, --columns, --attention and "
            "--datasets together"
        )
    return selected


def _check_options(options: argparse.Namespace) -> None:
    """Raise ValueError or UserError for impossible numbers and options that would be ignored."""
    least = grace() + CLOSING_SECONDS
    minutes = options.minutes
    if min(options.seeds, options.jobs, 1 if options.gpus is None else options.gpus) < 1:
        raise ValueError("--seeds, --jobs and --gpus must be at least 1")
    if minutes is not None and not 60 * minutes > least:
        raise ValueError(f"--minutes must be more than {least / 60:.2g}, to stop and save in time")
    of_cluster = any(getattr(options, name) is not None for name in SITE_OPTIONS)
    if of_cluster and not options.slurm and options.array_task is None:
        raise ValueError("--partition, --time, --gpus-per-node and --nodes need --slurm")
    if options.slurm and (options.gpus or options.jobs > 1 or minutes or options.pack):
        raise ValueError(
            "--gpus, --jobs, --minutes and --pack are for this machine: with --slurm, use "
            "--gpus-per-node, --time, and running in configs/slurm.yaml"
        )
    if options.on and not options.estimate:
        raise ValueError("--on needs --estimate")
    if options.estimate and options.slurm:
        raise ValueError(
            "--estimate measures this machine: run it in a job on one node, or add --on v100x8"
        )
    if options.pack:
        require_writable(options.pack.absolute().parent, "--pack", options.pack)


def _show(chosen: Sequence[TrainingRun], options: argparse.Namespace) -> int:
    """Print the command of every run, or the state of every run and a count of the states."""
    if options.dry_run:
        print(*(shlex.join(run.command()) for run in chosen), sep="\n")
        return 0
    states = {run.name: schedule.state(run) for run in chosen}
    for name, told in states.items():
        print(f"{name}: {told}")
    # The kind of a state is its words before numbers and reasons.
    counts = Counter(re.match(r"[a-z ]*[a-z]", told)[0] for told in states.values())
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if left := estimate.time_left(chosen):
        print(left)
    return 0
