"""``python -m benchmarks.hf.lengths TEXT``: SmolLM2-135M's perplexity by position, also converted.

The model reads the beginning of a text as one window, with the attention of transformers and with
this package's after a conversion to the same encoding. The result is
results/bench/hf-lengths.json; minutes for a window of 10,240 tokens.
"""

import argparse
import copy
import itertools
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from benchmarks.hf import common
from lrpe_fairseq import hf
from lrpe_fairseq.experiments.records.files import write_json

PROGRAM = "benchmarks.hf.lengths"
TARGET = common.RESULTS / "hf-lengths.json"
ENDS = (256, 512, 1024, 2048, 4096, 8192, 10240)


def perplexities(found: Tensor, ends: tuple[int, ...]) -> list[float]:
    """Return the perplexity of the tokens between every two ends. found: losses of tokens 2 on."""
    begins = (0, *ends[:-1])
    parts = (found[max(0, begin - 1) : end - 1] for begin, end in zip(begins, ends, strict=True))
    return [math.exp(part.mean()) for part in parts]


def rows_of(before: Tensor, after: Tensor) -> list[dict[str, Any]]:
    """Return a row per range of positions. before, after: losses (T - 1,) of the two models."""
    length = len(before) + 1
    ends = tuple(itertools.takewhile(lambda end: end <= length, ENDS))
    values = zip(ends, perplexities(before, ends), perplexities(after, ends), strict=True)
    return [{"to": end, "original": one, "converted": two} for end, one, two in values]


def main(arguments: list[str] | None = None) -> None:
    """Measure both models and write the file."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}")
    parser.add_argument("text", type=Path, help="a long text")
    parser.add_argument("--tokens", type=int, default=ENDS[-1], help=f"default: {ENDS[-1]}")
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    text, facts = common.text_of(options.text)
    original, tokenizer = common.smollm2(PROGRAM)
    [window] = common.blocks_of(tokenizer, text, options.tokens, 1)
    found, seconds = [], []
    for model in (original, hf.convert(copy.deepcopy(original))):
        begin = time.perf_counter()
        found.append(common.losses(model, window).double())
        seconds.append(time.perf_counter() - begin)
        print(f"{type(model).__name__}: {seconds[-1]:.0f} seconds", flush=True)
    settings = {"model": common.SMOLLM2, "text": facts, "tokens": options.tokens}
    difference = float((found[0] - found[1]).abs().max())
    result = {"settings": settings, "rows": rows_of(*found), "largest_difference": difference}
    write_json(TARGET, {**common.stated(), **result, "seconds": seconds})


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
