"""Train one row of a table, here and now: ``scripts/train_lm.sh`` and its like.

Without ``key=value`` this is the very run of ``scripts/run_table.sh <table>`` and that script will
evaluate it; with them it works in a folder of its own under ``runs/by-hand``.
"""

import argparse
import shlex
import subprocess
import sys
from dataclasses import replace

from lrpe_fairseq.experiments.commands import run_table
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.runner.processes import Busy, locked
from lrpe_fairseq.experiments.runner.training import (
    ROOT,
    Devices,
    RunFailed,
    TrainingRun,
    require_data,
)

NEXT = {  # family of configurations -> what to do with a trained model
    "lm": "evaluate with: scripts/eval_lm.sh {best} {data}",
    "roberta": "fine-tune with: scripts/finetune_glue.sh {best} all",
    "translation": "evaluate with: scripts/eval_mt.sh {best} {data}",
}
TEE = 'set -o pipefail; "$@" 2>&1 | tee -a "$0"'


def main(arguments: list[str] | None = None) -> int:
    """Print and run the training command; returns its exit status."""
    options = _parse(arguments)
    try:
        run = _run(options)
        require_data(run.data)
        with locked(run.folder):
            status = train(run)
    except (ValueError, OSError, RunFailed, Busy) as error:
        print(f"train_row: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if status == 0:
        best = (run.checkpoints / checkpoints.BEST).relative_to(ROOT)
        print(NEXT[run.family].format(best=best, data=run.data.relative_to(ROOT)))
    return status


def train(run: TrainingRun) -> int:
    """Train ``run`` on the screen and into its log, from where it stopped if it did."""
    seen = run.ready_to_resume(print)
    if seen >= run.max_update():
        print(f"{run.name} has its {seen} updates already")
        return 0
    command = run.command(Devices().processes)
    print(shlex.join(command), flush=True)
    return subprocess.run(["bash", "-c", TEE, str(run.log), *command], cwd=ROOT).returncode


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train_row", description=__doc__.split("\n")[0])
    parser.add_argument("table", help="a file of configs/tables, without .yaml")
    parser.add_argument("row", help="a label of that table")
    parser.add_argument("attention", choices=("linear", "softmax"))
    parser.add_argument("changes", nargs="*", metavar="key=value", help="such as model.dropout=0.2")
    parser.add_argument("--scale", default="paper", help="paper (the default) or small")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_intermixed_args(arguments)


def _run(options: argparse.Namespace) -> TrainingRun:
    table = run_table.load_named(options.table)
    row = table.row(options.row)
    if options.attention not in row.attention:
        raise ValueError(f"{row.label} serves {' and '.join(row.attention)} attention only")
    wanted = replace(table, rows=[row])
    found = run_table.runs(wanted, options.scale, [options.seed])
    run = next(run for run in found if run.attention_type == options.attention)
    if not options.changes:
        return run
    folder = ROOT / "runs" / "by-hand" / "-".join([run.folder.name, *options.changes])
    return replace(run, overrides=(*run.overrides, *options.changes), folder=folder)


if __name__ == "__main__":
    sys.exit(main())
