"""``python -m benchmarks.hf.recipes TEXT``: SmolLM2-135M under another encoding, after a training.

Every recipe of docs/huggingface.md changes the pretrained model, which then trains on a few blocks
of a text. The control is the unchanged model with the same training. The loss of other blocks of
the text is measured before the change, after it and after the training. Every cell is written when
it is finished to results/bench/hf-recipes.json; the same command continues an interrupted run.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from benchmarks.hf import common
from lrpe_fairseq import hf
from lrpe_fairseq.experiments.records.files import write_json

PROGRAM = "benchmarks.hf.recipes"
TARGET = common.RESULTS / "hf-recipes.json"
CONTROL = "unchanged (control)"
EVERY_FOURTH = slice(3, None, 4)
ALL = slice(None)
RECIPES: dict[str, tuple[slice, dict[str, Any]]] = {
    CONTROL: (slice(0, 0), {}),
    "gated:rope": (ALL, {"position_encoding": "gated:rope", "fox_bias": 8.0}),
    "gated:path:rope": (
        ALL,
        {"position_encoding": "gated:path:rope", "fox_bias": 8.0, "path_bias": -8.0},
    ),
    "linear in every fourth layer": (
        EVERY_FOURTH,
        {"attention_type": "linear", "normalizer": "content"},
    ),
    "none": (ALL, {"position_encoding": "none"}),
}
"""By name: the layers that change, and the options of their attention."""


def changed(model: PreTrainedModel, recipe: str) -> PreTrainedModel:
    """Return a copy of a pretrained model under a recipe."""
    layers, options = RECIPES[recipe]
    model = copy.deepcopy(model)
    chosen = list(range(model.config.num_hidden_layers))[layers]
    return hf.convert(model, layers=chosen, **options) if chosen else model


def cell(
    original: PreTrainedModel,
    recipe: str,
    seed: int,
    blocks: tuple[torch.Tensor, torch.Tensor],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Change, measure, train and measure again. blocks: of all seeds for training; of validation.

    A seed trains on blocks of its own.
    """
    training, validation = blocks
    torch.manual_seed(seed)
    model = changed(original, recipe)
    found = {"recipe": recipe, "seed": seed, "start": common.loss(model, validation)}
    own = training.chunk(settings["seeds"])[seed - 1]
    seconds = common.train(model, own, settings["rows"], settings["learning_rate"], seed)
    return {**found, "end": common.loss(model, validation), "hours": seconds / 3600}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}")
    add = parser.add_argument
    add("text", type=Path, help="a long text")
    add("--updates", type=int, default=30, help="of a cell (default: 30)")
    add("--rows", type=int, default=2, help="blocks of an update (default: 2)")
    add("--tokens", type=int, default=256, help="of a block (default: 256)")
    add("--validation", type=int, default=16, help="blocks of validation (default: 16)")
    add("--lr", type=float, default=1e-4, help="learning rate (default: 1e-4)")
    add("--seeds", type=int, default=2, help="default: 2")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure all cells that the file lacks."""
    options = parse(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    text, facts = common.text_of(options.text)
    settings = {
        "model": common.SMOLLM2,
        "text": facts,
        "updates": options.updates,
        "rows": options.rows,
        "tokens": options.tokens,
        "validation_blocks": options.validation,
        "learning_rate": options.lr,
        "seeds": options.seeds,
    }
    cells = common.cells_of(TARGET, settings)
    model, tokenizer = common.smollm2(PROGRAM)
    needed = options.validation + options.seeds * options.updates * options.rows
    blocks = common.blocks_of(tokenizer, text, options.tokens, needed)
    validation, training = blocks[: options.validation], blocks[options.validation :]
    done = {(each["recipe"], each["seed"]) for each in cells}
    for seed in range(1, options.seeds + 1):
        for recipe in RECIPES:
            if (recipe, seed) in done:
                continue
            cells.append(cell(model, recipe, seed, (training, validation), settings))
            write_json(TARGET, {**common.stated(), "settings": settings, "cells": cells})
            print(cells[-1], flush=True)


if __name__ == "__main__":
    main()
