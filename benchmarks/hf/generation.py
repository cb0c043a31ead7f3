"""``python -m benchmarks.hf.generation``: tokens per second of ``generate`` after a conversion.

SmolLM2-135M continues a text of 512 and of 8,192 tokens with the attention of transformers, with
this package's, and with linear attention in every fourth layer. All of them run in turn, so that
ratios hold on a busy machine. Time does not depend on what was read, so a cache holds random
states. The result is results/bench/hf-generation.json.
"""

import argparse
import copy
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from benchmarks.hf import common
from benchmarks.timing import Timing, contest
from lrpe_fairseq import hf
from lrpe_fairseq.attention.multihead import AttentionState, MultiheadAttention
from lrpe_fairseq.experiments.records.files import write_json
from lrpe_fairseq.hf.cache import CACHE_NAME, StateLayer
from lrpe_fairseq.hf.converted import ConvertedAttention

PROGRAM = "benchmarks.hf.generation"
TARGET = common.RESULTS / "hf-generation.json"
LENGTHS = (512, 8192)
STOCK = "transformers"
LINEAR = {"attention_type": "linear", "normalizer": "content"}


def models(original: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """Return the contestants by name."""
    count = original.config.num_hidden_layers
    fourth = list(range(3, count, 4))
    hybrid = hf.convert(copy.deepcopy(original), layers=fourth, **LINEAR)
    rest = [layer for layer in range(count) if layer not in fourth]
    return {
        STOCK: original,
        "softmax": hf.convert(copy.deepcopy(original)),
        "hybrid": hf.convert(hybrid, layers=rest),
    }


class Continuation:
    """A text that ``generate`` continues by a few tokens at every call."""

    def __init__(self, model: PreTrainedModel, length: int, window: int) -> None:
        """Fill a cache for ``length`` tokens. window: tokens of a call."""
        self.model, self.window = model, window
        self.cache = filled(model, length)
        self.tokens = torch.randint(3, model.config.vocab_size, (1, length + 1))

    def __call__(self) -> None:
        """Generate; the cache and the text grow."""
        own = {"max_new_tokens": self.window, "min_new_tokens": self.window, "do_sample": False}
        self.tokens = self.model.generate(self.tokens, **own, **{CACHE_NAME: self.cache})


def filled(model: PreTrainedModel, length: int) -> DynamicCache:
    """Return a cache of ``length`` random tokens for a model, converted or not."""
    config, cache = model.config, DynamicCache()
    own = [m.attention for m in model.modules() if isinstance(m, ConvertedAttention)]
    if not own:
        width = config.hidden_size // config.num_attention_heads
        for layer in range(config.num_hidden_layers):
            shape = (1, config.num_key_value_heads, length, width)
            cache.update(torch.randn(shape), torch.randn(shape), layer)
        return cache
    hidden = torch.randn(1, length, config.hidden_size)
    known: dict[str, AttentionState] = {}
    for attention in own:
        cache.layers.append(StateLayer())
        kind = attention.attention_type
        if kind not in known:
            known[kind] = state_of(attention, hidden)
        cache.layers[-1].keep(copy.deepcopy(known[kind]), length)
    return cache


@torch.no_grad()
def state_of(attention: MultiheadAttention, hidden: torch.Tensor) -> AttentionState:
    """Return the state of a layer after the tokens ``hidden`` (B, T, C)."""
    state = attention.attend(hidden, keep_state=True)[1]
    return state._replace(owner=None)  # any layer may continue it


def row_of(
    name: str, length: int, timings: dict[tuple[str, int], Timing], window: int
) -> dict[str, Any]:
    """Return the row of a model. ratio: its speed over that of transformers, with quartiles."""
    own, stock = timings[name, length], timings[STOCK, length]
    return {
        "attention": name,
        "length": length,
        "tokens_per_second": window / own.median,
        "ratio": stock.ratio(own),
        "quartiles": list(stock.quartiles(own)),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}")
    parser.add_argument("--rounds", type=int, default=7, help="default: 7")
    parser.add_argument("--window", type=int, default=8, help="tokens of a call (default: 8)")
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    original, _ = common.smollm2(PROGRAM)
    built = models(original)
    contestants = {
        (name, length): Continuation(model, length, options.window)
        for length in LENGTHS
        for name, model in built.items()
    }
    timings = contest(contestants, options.rounds)
    rows = [row_of(*key, timings, options.window) for key in contestants]
    settings = {"model": common.SMOLLM2, "rounds": options.rounds, "window": options.window}
    write_json(TARGET, {**common.stated(), "settings": settings, "rows": rows})
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
