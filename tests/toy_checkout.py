"""A checkout with a toy family, a table of it, and programs in the place of fairseq's."""

import shutil
import sys
from pathlib import Path

from lrpe_fairseq.experiments.records.files import ROOT

PREPARE = """
import json, sys
from pathlib import Path
data = Path(sys.argv[sys.argv.index("--dest") + 1])
(data / "bin").mkdir(parents=True)
(data / "bin" / "dict.txt").write_text("word 1")
(data / "manifest.json").write_text(json.dumps({"splits": {"train": {}, "test": {}}}))
"""
CONFIG = """
task: {_name: toy, data: data/letters/bin}
model: {_name: toy, attention_type: linear, position_encoding: none, pooling: mean}
criterion: {_name: toy}
optimizer: {_name: adam}
lr_scheduler: {_name: fixed}
optimization: {max_update: 4, update_freq: [2]}
dataset: {batch_size: 8}
"""
TABLE = """
title: Letters
text: Small models.
experiments: [letters]
scales: {paper: configs/letters/letters.yaml}
baseline: Base
better: higher
options: {model.pooling: mean}
columns:
  - {key: linear, title: test, attention: linear, split: test, protocol: whole, metric: accuracy}
rows:
  - {label: Base, encoding: none, attention: [linear]}
  - {label: First, encoding: none, attention: [linear], overrides: {model.pooling: first}}
"""
TRAIN = """#!{python}
import json, sys
from pathlib import Path
import torch
from omegaconf import OmegaConf
words = sys.argv[1:]
config = OmegaConf.load(Path(words[1]) / (words[3] + ".yaml"))
chosen = [word.lstrip("+") for word in words[4:]]
config = OmegaConf.to_container(OmegaConf.merge(config, OmegaConf.from_dotlist(chosen)))
folder = Path(config["checkpoint"]["save_dir"])
folder.mkdir(parents=True, exist_ok=True)
for update in (2, 4):
    print("train_inner | " + json.dumps({{"wps": "100", "wpb": "16", "num_updates": str(update)}}))
    valid = {{"valid_accuracy": str(60 + update / 2), "valid_num_updates": str(update)}}
    print("valid | " + json.dumps(valid))
state = {{
    "cfg": config,
    "model": {{"weight": torch.zeros(1)}},
    "optimizer_history": [{{"num_updates": 4}}],
    "extra_state": {{"previous_training_time": 1.5}},
}}
for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
    torch.save(state, folder / name)
"""
VALIDATE = """#!/bin/sh
echo '... | INFO | test | {"epoch": 1, "test_loss": "0.5", "test_accuracy": "62.5"}'
"""


def add_entry(path: Path, start: str, entry: str, imported: str) -> None:
    """Add a line below ``start`` of a module, and an import before it."""
    before, found, after = path.read_text().partition(start)
    assert found
    path.write_text(f"{before}{imported}\n\n{start}    {entry}\n{after}")


def checkout(folder: Path, code: str, entry: str) -> Path:
    """A copy of the package with the family ``code`` under its ``entry`` of FAMILIES."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lrpe_fairseq", folder / "lrpe_fairseq", ignore=ignored)
    families = folder / "lrpe_fairseq" / "experiments" / "families"
    (families / "letters.py").write_text(code)
    name = entry.split(": ")[1].rstrip(",")
    imported = f"from lrpe_fairseq.experiments.families.letters import {name}"
    start = "FAMILIES: dict[str, type[TrainingRun]] = {\n"
    add_entry(families / "__init__.py", start, entry, imported)
    for path, content in {
        "configs/letters/letters.yaml": CONFIG,
        "configs/tables/letters.yaml": TABLE,
        "data-prep/letters/prepare.py": PREPARE,
        "results/paper/none.csv": "",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    (folder / "scripts").mkdir()
    _environment(folder / ".venv")
    return folder


def _environment(venv: Path) -> None:
    """The running environment, with stubs for two of fairseq's commands."""
    real = Path(sys.prefix)
    (venv / "bin").mkdir(parents=True)
    shutil.copy(real / "pyvenv.cfg", venv / "pyvenv.cfg")
    (venv / "lib").symlink_to(real / "lib")
    python = venv / "bin" / "python"
    python.symlink_to(Path(sys.executable).resolve())
    stubs = {"fairseq-hydra-train": TRAIN.format(python=python), "fairseq-validate": VALIDATE}
    for name, text in stubs.items():
        (venv / "bin" / name).write_text(text)
        (venv / "bin" / name).chmod(0o755)
