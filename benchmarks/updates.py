"""Updates of a configuration of fairseq on generated data, measured in a process of their own."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lrpe_fairseq.experiments.data.corpus import write_indexed
from lrpe_fairseq.experiments.records import fairseq_log
from lrpe_fairseq.experiments.records.files import CONFIGS, read_json
from lrpe_fairseq.experiments.runner.devices import BIN, Devices, hydra_override
from lrpe_fairseq.experiments.runner.estimate import run_with_peak

SPECIAL = 4
"""Symbols that fairseq adds to a dictionary."""
SETTINGS = {
    "optimization.max_update": "1",
    "optimization.update_freq": "[1]",
    "dataset.required_batch_size_multiple": "1",
    "dataset.num_workers": "0",
    "dataset.disable_validation": "true",
    "checkpoint.no_save": "true",
    "common.tensorboard_logdir": "null",
    "common.log_interval": "1",
    "distributed_training.distributed_world_size": "1",
}
"""A short training of one process, without validation and checkpoints."""
PLUGIN = """
import json, time
import lrpe_fairseq.models
from fairseq.trainer import Trainer
step = Trainer.train_step
def timed(trainer, *given, **named):
    optimizer = trainer.optimizer
    if trainer.get_num_updates() == 0:
        for weight in optimizer.params:
            weight.grad = weight.new_zeros(weight.shape)
        optimizer.step()
        optimizer.zero_grad()
    begun = time.process_time()
    log = step(trainer, *given, **named)
    seconds = time.process_time() - begun
    found = {{
        "seconds": seconds,
        "loss": float(log["loss"]),
        "updates": trainer.get_num_updates(),
        "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
    }}
    with open({path!r}, "w") as file:
        json.dump(found, file)
    return log
Trainer.train_step = timed
"""
"""A plugin that gives Adam its moments first, as they are in all updates but the first."""


def prepare_process() -> None:
    """Let measured processes have one thread, and be the first that Linux ends without memory."""
    os.environ["OMP_NUM_THREADS"] = "1"
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


def write_dictionary(path: Path, words: int) -> None:
    """Write a dictionary that has that many entries with fairseq's symbols."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = (f"w{n} 1\n" for n in range(words - SPECIAL))
    path.write_text("".join(known), encoding="utf-8")


def write_rows(prefix: Path, rows: int, length: int, words: int) -> None:
    """Write rows of random words, as fairseq reads them."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    text = (rng.integers(SPECIAL, words, length).tolist() for _ in range(rows))
    write_indexed(text, prefix, np.int32)


def measured(folder: str, name: str, data: Path, chosen: Mapping[str, str]) -> dict[str, float]:
    """Train with configs/<folder>/<name>.yaml on generated data, on one CPU thread.

    chosen: overrides, beside :data:`SETTINGS`.
    Returns: peak (bytes of the process), and of the last update seconds (of the processor) and
        loss; the number of updates and of parameters.
    Raises: ValueError, with the last line of the log, if the training failed.
    """
    with tempfile.TemporaryDirectory() as home:
        base = Path(home)
        step, log, plugin = base / "step.json", base / "log", base / "measuring"
        plugin.mkdir()
        (plugin / "__init__.py").write_text(PLUGIN.format(path=str(step)), encoding="utf-8")
        own = {
            "task.data": str(data),
            "common.user_dir": str(plugin),
            "checkpoint.save_dir": str(base / "checkpoints"),
        }
        command = [str(BIN / "fairseq-hydra-train"), "--config-dir", str(CONFIGS / folder)]
        command += ["--config-name", name, f"hydra.run.dir={base / 'hydra'}"]
        command += [hydra_override(*pair) for pair in {**SETTINGS, **own, **chosen}.items()]
        failed, peak = run_with_peak(command, Devices(), log)
        if failed:
            raise ValueError(f"{folder}/{name} failed: {fairseq_log.last_line(log)}")
        return {"peak": peak, **read_json(step)}
