"""``python -m benchmarks.hf.own DATA FOLDER``: a model of our own under another encoding.

A small RoPE model of configs/lm/extrapolation.yaml is exported and converted, and trains for 5 % of
its updates. The loss of the same tokens is measured with contexts of 1 to 16 times the length of
training, beside that of the model itself, with yarn, and of a model that was trained with gates
from the start. FOLDER/rope-seed1 and FOLDER/gated-rope-seed1 are trained before:

    .venv/bin/fairseq-hydra-train --config-dir configs/lm --config-name extrapolation \\
        model.attention_type=softmax model.position_encoding=rope common.seed=1 \\
        checkpoint.save_dir=FOLDER/rope-seed1
    .venv/bin/fairseq-hydra-train --config-dir configs/lm --config-name extrapolation \\
        model.attention_type=softmax model.position_encoding=gated:rope common.seed=1 \\
        checkpoint.save_dir=FOLDER/gated-rope-seed1

Every cell is written when it is finished to results/bench/hf-own.json; the same command continues.
"""

import argparse
import copy
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.data import data_utils
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from benchmarks.hf import common
from lrpe_fairseq import hf
from lrpe_fairseq.experiments.records.files import write_json

PROGRAM = "benchmarks.hf.own"
TARGET = common.RESULTS / "hf-own.json"
LENGTH, LONGEST, UPDATES = 128, 16, 1800
"""Tokens of a block in training, the longest context in such blocks, updates of the training."""
CONTEXTS = (1, 2, 4, 8, LONGEST)
SHARE = 0.05
YARN = {"context_scaling": "yarn", "context_factor": float(LONGEST), "context_length": LENGTH}


class Recipe(NamedTuple):
    """A cell. trained: True if 5 % of the updates follow. layers: None for all of ``start``."""

    options: dict[str, Any]
    trained: bool = True
    layers: list[int] | None = None
    start: str = "rope"


RECIPES = {
    "rope, itself": Recipe({}, trained=False),
    "rope": Recipe({}),
    "yarn, not trained": Recipe(YARN, trained=False),
    "yarn": Recipe(YARN),
    "none": Recipe({"position_encoding": "none"}),
    "gated:rope, bias 8": Recipe({"position_encoding": "gated:rope", "fox_bias": 8.0}),
    "gated:rope, bias 4": Recipe({"position_encoding": "gated:rope", "fox_bias": 4.0}),
    "gated:path:rope, biases 8 and -8": Recipe(
        {"position_encoding": "gated:path:rope", "fox_bias": 8.0, "path_bias": -8.0}
    ),
    "gated:path:rope, biases 4 and -4": Recipe(
        {"position_encoding": "gated:path:rope", "fox_bias": 4.0, "path_bias": -4.0}
    ),
    "linear in the second of three layers": Recipe(
        {"attention_type": "linear", "normalizer": "content"}, layers=[1]
    ),
    "gated:rope from the start": Recipe({}, trained=False, start="gated-rope"),
}


def exported(folder: Path, name: str, seed: int) -> PreTrainedModel:
    """Return the model of a training. Raises: SystemExit without its checkpoint."""
    checkpoint = folder / f"{name}-seed{seed}" / "checkpoint_last.pt"
    if not checkpoint.exists():
        raise SystemExit(f"{PROGRAM}: {checkpoint} is missing: train it first, see --help")
    with tempfile.TemporaryDirectory(prefix="lrpe-own-") as target:
        hf.export(checkpoint, target, tokenizer="none")
        model = AutoModelForCausalLM.from_pretrained(target)
        return copy.deepcopy(model)  # the file is mapped into memory


def stream(data: Path, split: str) -> Tensor:
    """Return all tokens of a split that fairseq-preprocess wrote, int64."""
    lines = data_utils.load_indexed_dataset(str(data / "bin" / split), None, "mmap")
    return torch.cat([lines[index] for index in range(len(lines))]).long()


@torch.no_grad()
def loss_after(model: PreTrainedModel, blocks: Tensor, context: int) -> float:
    """Return the mean loss of the last tokens of blocks (N, T), read from windows of a length.

    context: length of the windows in lengths of training. The last :data:`LENGTH` - 1 tokens are
    scored, the same for every context.
    """
    model.eval()
    total = 0.0
    for block in blocks:
        window = block[-context * LENGTH :]
        hidden = model.base_model(window[None]).last_hidden_state[0, -LENGTH:-1]
        logits = model.get_output_embeddings()(hidden)
        total += float(F.cross_entropy(logits, window[-LENGTH + 1 :]))
    return total / len(blocks)


def cell(
    folder: Path, name: str, seed: int, data: tuple[Tensor, Tensor], options: argparse.Namespace
) -> dict[str, Any]:
    """Convert, train and measure. data: tokens of training; blocks of the test (N, T)."""
    recipe, (tokens, test) = RECIPES[name], data
    torch.manual_seed(seed)
    model = hf.convert(exported(folder, recipe.start, seed), layers=recipe.layers, **recipe.options)
    found: dict[str, Any] = {"recipe": name, "seed": seed}
    found["start"] = loss_after(model, test, 1)
    if recipe.trained:
        rows, updates = options.rows, round(SHARE * UPDATES)
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(tokens) // LENGTH, generator=generator)[: rows * updates]
        blocks = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)[chosen]
        found["seconds"] = common.train(model, blocks, rows, options.lr, seed)
    values = {str(n * LENGTH): math.exp(loss_after(model, test, n)) for n in CONTEXTS}
    return {**found, "perplexity": values}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", type=Path, help="data/wikitext-2-bpe")
    parser.add_argument("folder", type=Path, help="of the trainings")
    parser.add_argument("--blocks", type=int, default=60, help="of the test (default: 60)")
    parser.add_argument("--rows", type=int, default=8, help="blocks of an update (default: 8)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 1e-3)")
    parser.add_argument("--seeds", type=int, default=2, help="default: 2")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure all cells that the file lacks."""
    options = parse(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    training, test = (stream(options.data, split) for split in ("train", "test"))
    whole = LONGEST * LENGTH
    test = test[: len(test) // whole * whole].view(-1, whole)
    chosen = torch.linspace(0, len(test) - 1, options.blocks).long()
    settings = {
        "data": options.data.name,
        "length": LENGTH,
        "updates": round(SHARE * UPDATES),
        "updates_before": UPDATES,
        "blocks": options.blocks,
        "rows": options.rows,
        "learning_rate": options.lr,
    }
    cells = common.cells_of(TARGET, settings)
    done = {(each["recipe"], each["seed"]) for each in cells}
    for seed in range(1, options.seeds + 1):
        for name in RECIPES:
            if (name, seed) in done:
                continue
            data = training, test[chosen]
            cells.append(cell(options.folder, name, seed, data, options))
            write_json(TARGET, {**common.stated(), "settings": settings, "cells": cells})
            print(cells[-1], flush=True)


if __name__ == "__main__":
    main()
