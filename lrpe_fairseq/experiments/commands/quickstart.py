"""Compare LRPE with its baselines on real text, in minutes on two CPU cores: ``make quickstart``.

Prepares the English text contained in CPython, trains a small language model for every row of
:data:`METHODS` with fairseq, evaluates each on held-out documents, and prints one table.
Checkpoints, logs, run files and TensorBoard logs are in ``results/quickstart/work/``; a second
call reuses them. ``--seeds 3 --publish`` replaces the committed run files of
``results/quickstart/``.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.experiments.families.lm import LMRun
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import ROOT, require_checkout
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
    print(
        f"Done in {minutes} min {seconds} s. `tensorboard --logdir {_relative(WORK)}` shows more."
    )
    return 0


def methods(seeds: int) -> list[LMRun]:
    """Return one run per row and seed, ordered by seed."""
    return [_method(*row, seed) for seed in range(1, seeds + 1) for row in METHODS]


def measure(wanted: Sequence[LMRun]) -> None:
    """Prepare the corpus, then train and evaluate unfinished runs. Raises: RunFailed."""
    devices = shares(min(PARALLEL, _cores()))
    compilation = threading.Thread(target=compile_kernels)
    compilation.start()
    prepare_corpus()
    compilation.join()
    schedule = Schedule(wanted, devices, Events(WORK / "events.log"))
    if schedule.run():
        raise RunFailed(f"some runs failed; their logs are in {_relative(WORK)}")


def prepare_corpus() -> None:
    """Prepare data/pydoc unless it is complete. Raises: RunFailed."""
    words = [sys.executable, "data-prep/pydoc/prepare.py", "--dest", str(DATA)]
    status = subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if status.returncode:
        raise RunFailed("the preparation of the corpus failed")


def compile_kernels() -> None:
    """Train one layer for one update, which compiles the C++ kernels.

    Compilation takes about ten seconds of one core while another core prepares the corpus. Without
    this step, two concurrent trainings would both compile the kernels.
    """
    choices = {"attention_type": "linear", "position_encoding": "lrpe-type2"}
    layer = MultiheadAttention(64, 2, causal=True, normalizer="layernorm", **choices)
    layer(torch.rand(32, 2, 64))[0].sum().backward()


def show(finished: Sequence[LMRun]) -> None:
    """Print the table and its agreement with the published order; draw the curves."""
    runs = [read_run(run.result) for run in finished]
    found = report.rows(runs)
    print("\n" + report.table(found))
    if published := report.rows(report.published(RUNS)):
        print("\n".join(report.comparison(found, published)) + "\n")
    picture = WORK / "validation.png"
    try:
        report.draw(picture, runs)
    except ImportError:
        print(f"no {picture.name}: matplotlib is not installed (pip install matplotlib)")


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


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _cores() -> int:
    return len(os.sched_getaffinity(0))
