"""The losses of the first 50 updates of a cell of the table `books`, in float32 on a CPU or a GPU.

The updates are smaller than those of the table, so that a CPU core computes one in seconds. fairseq
prints a loss with three decimals, in bits.
"""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from lrpe_fairseq.experiments import families
from lrpe_fairseq.experiments.records.fairseq_log import read_training_log
from lrpe_fairseq.experiments.records.files import ROOT

UPDATES, TOKENS = 50, 1024
SMALLER = (
    f"optimization.max_update={UPDATES} optimization.update_freq=[1] dataset.max_tokens={TOKENS} "
    "dataset.num_workers=0 dataset.disable_validation=true lr_scheduler.warmup_updates=10 "
    "lr_scheduler.lr_period_updates=40 checkpoint.no_save=true common.bf16=false "
    "common.log_interval=1"
).split()
TOLERANCE = 0.002
"""Largest difference of two losses in bits, each of which is rounded to 0.001."""


def losses(label: str, attention: str, device: str, log: Path, data: Path | None = None) -> list:
    """Train on ``device`` (cpu or cuda) with dropout 0 and without TF32; return the losses.

    log: of the training. data: a data folder; default: that of the table.
    Raises: CalledProcessError.
    """
    runs = families.runs(families.load_named("books"), "books", [1])
    (run,) = (run for run in runs if (run.label, run.attention_type) == (label, attention))
    chosen = (*run.overrides, *SMALLER, f"common.cpu={str(device == 'cpu').lower()}")
    run = replace(run, overrides=chosen, data=data or run.data, folder=log.parent / "run")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NVIDIA_TF32_OVERRIDE": "0"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        given = {"stdout": output, "stderr": subprocess.STDOUT, "check": True}
        subprocess.run(run.command(), cwd=ROOT, env=environment, **given)
    logged = read_training_log(log).inner
    return [float(logged[update]["loss"]) for update in range(1, UPDATES + 1)]


def difference(ours: list, theirs: list) -> float:
    """Return the largest difference of two lists of losses."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
