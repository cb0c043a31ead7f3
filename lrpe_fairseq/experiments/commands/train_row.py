"""Train one row of a table on this machine: ``scripts/train_lm.sh`` and similar scripts.

Without ``key=value`` arguments this is the run of ``scripts/run_table.sh <table>``, which also
evaluates it; with such arguments it has a separate folder under ``runs/by-hand``.
"""

import argparse
import shlex
import subprocess
import sys
from dataclasses import replace

from lrpe_fairseq.experiments import families
from lrpe_fairseq.experiments.data import folders
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import ROOT, relative
from lrpe_fairseq.experiments.records.methods import row_named
from lrpe_fairseq.experiments.records.runs import BY_HAND
from lrpe_fairseq.experiments.records.tables import Row, Table, unambiguous
from lrpe_fairseq.experiments.runner import identity
from lrpe_fairseq.experiments.runner.devices import Devices, parse_overrides
from lrpe_fairseq.experiments.runner.processes import locked
from lrpe_fairseq.experiments.runner.training import TrainingRun

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
    # run_table must not train the same run at the same time.
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
    # All GPUs of the machine, as fairseq would take them.
    devices = run.usable(Devices(), print)
    limit = [f"{name}={value}" for name, value in devices.visible.items()]
    words = [*(["env", *limit] if limit else []), *run.command(devices.processes)]
    print(shlex.join(words), flush=True)
    # Through tee, so that the log is written as it is for a table and the screen shows it too.
    return subprocess.run(["bash", "-c", TEE, str(run.log), *words], cwd=ROOT).returncode


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line. Raises: ValueError for a seed below 1."""
    words = sys.argv[1:] if arguments is None else arguments
    # The scripts pass their table, which their users should not see in the help.
    script = SCRIPTS.get(words[0]) if words else None
    parser = argparse.ArgumentParser(
        prog=f"scripts/{script or 'train_classifier'}.sh",
        description="Train one row of a table on this machine; an interrupted training is resumed.",
    )
    table = argparse.SUPPRESS if script else "a file of configs/tables, without .yaml"
    add = parser.add_argument
    add("table", help=table)
    add("row", help="a row, such as RoPE or rope")
    add("attention", help="a type, or the pattern of the row")
    add("changes", nargs="*", default=[], metavar="key=value", help="such as model.dropout=0.2")
    add("--scale", help="default: paper, or the first one of the table")
    add("--seed", type=int, default=1)
    add("--dataset", metavar="DATA", help="data set of a table with several (default: the first)")
    options = parser.parse_intermixed_args(words)
    if options.seed < 1:
        raise ValueError("--seed must be at least 1")
    return options


def _run(options: argparse.Namespace) -> TrainingRun:
    """Return the run of the row, with the changes of the command line.

    Raises: ValueError for an unknown row, attention or setting.
    """
    table = families.load_named(options.table)
    row = row_named(table, options.row)
    if options.attention not in row.attention:
        raise ValueError(f"{row.label} supports only {' and '.join(row.attention)} attention")
    # The scripts are those of the paper's tables; run_table is the command for small scales.
    usual = "paper" if "paper" in table.scales else next(iter(table.scales))
    options.scale = options.scale or usual
    wanted = replace(table, rows=[row])
    planned = families.runs(wanted, options.scale, [options.seed])
    datasets = [options.dataset] if options.dataset else None
    planned = families.with_data(planned, table, options.scale, datasets)
    # A row with several rates has several runs; the first one is trained.
    run = next((run for run in planned if run.attention_type == options.attention), None)
    if run is None:
        scales = [s for s in table.scales if _is_trained(table.at(s), row, options.attention)]
        raise ValueError(
            f"{row.label} with {options.attention} attention is not in table {table.name} at scale "
            f"{options.scale}: choose --scale {' or '.join(scales)}"
        )
    # Unchanged, it is the run of the table: run_table then has only to evaluate it.
    if not options.changes:
        return run
    # With changes it is another model, which must not fill a cell of the table.
    changes = parse_overrides(tuple(options.changes))
    for key in ELSEWHERE.keys() & changes.keys():
        raise ValueError(f"{key} cannot be changed here: {ELSEWHERE[key]}")
    identity.require_known(run.settings(), changes)
    name = unambiguous("-".join([run.folder.name, *options.changes]))
    folder = ROOT / "runs" / BY_HAND / table.name / name
    return replace(run, overrides=(*run.overrides, *options.changes), folder=folder)


def _is_trained(table: Table, row: Row, attention: str) -> bool:
    """True if a column of ``table`` has the row with this attention type."""
    columns = [column for column in table.columns if row.has(column) and not column.mean_of]
    return row in table.rows and attention in map(row.attention_in, columns)
