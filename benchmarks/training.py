"""End-to-end training speed of every encoding relative to Base (LRPE, Table 9): `lrpe_lm`."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from torch.nn import functional as F

from benchmarks.timing import Timing, contest
from lrpe_fairseq.encodings import ENCODINGS, build_encoding
from lrpe_fairseq.models.language_model import LRPELanguageModel, LRPELanguageModelConfig

VOCABULARY = 8192
LENGTH = 512


def measure(attention_type: str, device: str, tokens: int, rounds: int) -> list[dict]:
    """Rows of {attention, encoding, seconds, spread, tokens_per_second, relative_speed}.

    One step is forward, loss, backward and Adam on ``tokens`` tokens in sequences of 512. The
    vocabulary is small, so that the encodings weigh more than in the paper's 267,744 words.
    """
    names = [n for n in ENCODINGS if attention_type == "softmax" or serves_linear(n)]
    timings = contest({n: step(n, attention_type, device, tokens) for n in names}, rounds)
    return [_row(attention_type, name, tokens, timings) for name in names]


def serves_linear(name: str) -> bool:
    """Whether linear attention can use the encoding."""
    return build_encoding(name, head_dim=64, num_heads=8).serves_linear


def step(name: str, attention_type: str, device: str, tokens: int) -> Callable[[], None]:
    """One training step of ``lrpe_lm`` (6 x 512) on random text."""
    model = build_model(name, attention_type).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    text = torch.randint(4, VOCABULARY, (tokens // LENGTH, LENGTH + 1), device=device)

    def run() -> None:
        optimizer.zero_grad()
        logits, _ = model(text[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()

    return run


def build_model(name: str, attention_type: str) -> LRPELanguageModel:
    """``lrpe_lm`` with the given attention on a made-up dictionary."""
    dictionary = dictionary_of(VOCABULARY)
    cfg = LRPELanguageModelConfig(
        attention_type=attention_type,
        position_encoding=name,
        tokens_per_sample=LENGTH,
        max_target_positions=LENGTH,
        add_bos_token=False,
        tpu=False,
    )
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    torch.manual_seed(0)
    return LRPELanguageModel.build_model(cfg, task)


def dictionary_of(size: int) -> Dictionary:
    """A dictionary of ``size`` symbols."""
    dictionary = Dictionary()
    for index in range(size - len(dictionary)):
        dictionary.add_symbol(str(index))
    return dictionary


def _row(attention_type: str, name: str, tokens: int, timings: dict[str, Timing]) -> dict:
    timing = timings[name]
    return {
        "attention": attention_type,
        "encoding": name,
        "seconds": timing.median,
        "spread": timing.spread,
        "tokens_per_second": tokens / timing.median,
        "relative_speed": timings["none"].ratio(timing),
    }
