"""A checkout with one small table, to be run, disturbed and compared."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from lrpe_fairseq.experiments.records.files import ROOT, load_config
from lrpe_fairseq.experiments.records.runs import Run, read_runs
from tests.end_to_end.commands import Corpus

UPDATES = 160
SAVED = 40  # and every multiple of it
BEYOND = SAVED + 20  # when a checkpoint can be resumed, and the training is far from its end
TABLE = """
title: "A table for a test"
text: "Small models."
experiments: [tiny]
scales: {tiny: configs/lm/tiny.yaml}
baseline: Base
better: lower
columns:
  - {key: linear, title: valid, attention: linear, split: valid, protocol: blocks, metric: ppl}
  - {key: softmax, title: valid, attention: softmax, split: valid, protocol: blocks, metric: ppl}
rows:
  - {label: Base, encoding: none, attention: [linear, softmax]}
"""


def repository(folder: Path, corpus: Corpus) -> Path:
    """A checkout with one table of two runs, some ten seconds each."""
    for name in ("lrpe_fairseq", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("configs/tables", "configs/lm", "results/runs", "results/paper"):
        (folder / name).mkdir(parents=True)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "configs" / "tables" / "tiny.yaml").write_text(TABLE)
    config = OmegaConf.to_container(load_config(ROOT / "configs" / "lm" / "wikitext2.yaml"))
    config["task"] |= {"data": "data/tiny/bin", "tokens_per_sample": 32}
    width = {f"decoder_{part}_dim": 32 for part in ("embed", "input", "output", "ffn_embed")}
    config["model"] |= width
    config["optimization"]["max_update"] = UPDATES
    config["lr_scheduler"]["warmup_updates"] = SAVED
    config["dataset"] |= {"max_tokens": 128, "validate_interval_updates": SAVED}
    config["checkpoint"]["save_interval_updates"] = SAVED
    (folder / "configs" / "lm" / "tiny.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "configs" / "slurm.yaml").write_text("{gpus_per_node: 0, cpus_per_process: 1}")
    shutil.copytree(corpus.data, folder / "data" / "tiny" / "bin")
    return folder


def command(folder: Path, *arguments: str) -> list[str]:
    script = str(folder / "scripts" / "run_table.sh")
    return ["bash", script, "tiny", "--scale", "tiny", "--seeds", "1", *arguments]


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder), **more}


def run_table(folder: Path, *arguments: str, **more: str) -> str:
    given = {"env": environment(folder, **more), "capture_output": True, "text": True}
    done = subprocess.run(command(folder, *arguments), **given)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_until(true: Callable[[], Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


def processes(*words: str) -> list[int]:
    """Those whose command line has all the words, oldest first."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if all(word in command.read_text() for word in words):
                found.append(int(command.parent.name))
    return sorted(found)


def reached(folder: Path, name: str, update: int) -> bool:
    log = folder / "runs" / "tiny" / name / "train.log"
    return log.exists() and f'"num_updates": "{update}"' in log.read_text()


def curve(run: Run) -> list[tuple[float, float]]:
    """Without its tokens, which count logged averages: a resumed log begins one anew."""
    return [(point["updates"], point["valid_ppl"]) for point in run["curve"]]


def finished(folder: Path, name: str) -> bool:
    return (folder / "results" / "runs" / "tiny" / f"{name}.json").exists()


def log_of(folder: Path, name: str) -> str:
    return (folder / "runs" / "tiny" / name / "train.log").read_text()


def assert_same_results(ours: Path, theirs: Path) -> None:
    """The same two runs, number for number."""
    found, expected = (read_runs(folder / "results" / "runs") for folder in (ours, theirs))
    assert found.keys() == expected.keys()
    assert len(found) == 2
    for name, run in found.items():
        assert run["metrics"] == expected[name]["metrics"]
        assert curve(run) == curve(expected[name])
        attention = f"{run['attention_type']} attention"
        assert any(what.startswith(attention) for what in run["kernels"]["served"])
