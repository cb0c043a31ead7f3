"""Training speed of every encoding relative to Base (LRPE, Table 9): ``lrpe_lm`` and RoBERTa."""

from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from torch.nn import functional as F

from benchmarks.timing import Timing, contest
from lrpe_fairseq.encodings import ENCODINGS, encoding_class, is_causal_only
from lrpe_fairseq.models.language_model import LRPELanguageModel, LRPELanguageModelConfig
from lrpe_fairseq.models.masked_lm import LRPERobertaConfig, LRPERobertaModel

VOCABULARY = 8192
LENGTH = 512
MODELS = ("lm", "roberta")
ROBERTA_LAYERS = 4  # instead of 12, each as in the paper: same ratios in a third of the time
CANONICAL = "ape (canonical)"
VARIANTS = {
    CANONICAL: ("ape", {"ape_generator": "canonical"}),
    "gated:lrpe-type2": ("gated:lrpe-type2", {}),
}
"""Rows beside those of ``ENCODINGS``: name -> (encoding, options)."""
BESIDE_ROPE = ("ape", "ape-tree", CANONICAL)
"""Names that are also compared with RoPE."""
DENOMINATOR, LAYERNORM = "rotated", "layernorm"
TABLE_6 = {
    "Base": ("none", DENOMINATOR),
    "RoPE": ("rope", DENOMINATOR),
    "SPE": ("spe", DENOMINATOR),
    "PER": ("permuteformer", DENOMINATOR),
    "Type1": ("lrpe-tmlr-type1", LAYERNORM),
    "Type2": ("lrpe-tmlr-type2", LAYERNORM),
    "Type3": ("lrpe-tmlr-type3", LAYERNORM),
    "Base-LN": ("none", LAYERNORM),
    "RoPE-LN": ("rope", LAYERNORM),
    "PER-LN": ("permuteformer", LAYERNORM),
}
"""Rows of TMLR LRPE, Table 6, and those that it lacks: label -> (encoding, normalizer)."""


def measure(
    device: str,
    tokens: int,
    rounds: int,
    model: str,
    chosen: Collection[str] = (),
    dtype: torch.dtype = torch.float32,
) -> list[dict]:
    """Rows of {model, attention, encoding, seconds, spread, tokens_per_second, relative_speed,
    relative_speed_quartiles}.

    ``relative_speed``: against Base, the median over rounds. Those of ``BESIDE_ROPE`` also have
    ``relative_to_rope``.

    model: a name of :data:`MODELS`. chosen: the encodings to time; all without any. Each encoding
    is timed in turn with Base (and RoPE) only, because the machine's speed drifts within a round
    of sixteen. One step is forward, loss, backward and fused Adam on ``tokens`` tokens in sequences
    of 512, with the model and its gradients in ``dtype``. The vocabulary is small, so that the
    encodings' share of the time is larger than with the paper's 267,744 words.
    """
    rows = []
    for attention in ("linear", "softmax"):
        base = step(model, "none", attention, device, tokens, dtype)
        for name in filter(partial(serves, model, attention), chosen or names()):
            timed = ["rope", name] if name in BESIDE_ROPE else [name]
            steps = {n: step(model, n, attention, device, tokens, dtype) for n in timed}
            rows.append(
                _row(model, attention, name, tokens, contest({"none": base, **steps}, rounds))
            )
    return rows


def names() -> list[str]:
    """Return the names of the rows of Table 9."""
    return [*ENCODINGS, *VARIANTS]


def measure_table6(
    device: str, tokens: int, rounds: int, dtype: torch.dtype = torch.float32
) -> list[dict]:
    """Rows of TMLR LRPE, Table 6: {row, encoding, normalizer, seconds, spread, ...}.

    As :func:`measure` of ``roberta`` with linear attention, but every row has its own normalizer.
    """
    rows, base = [], step("roberta", "none", "linear", device, tokens, dtype)
    for label, (name, normalizer) in TABLE_6.items():
        own = step("roberta", name, "linear", device, tokens, dtype, normalizer)
        timings = contest({"none": base, label: own}, rounds)
        chosen = {"row": label, "encoding": name, "normalizer": normalizer}
        rows.append({**chosen, **_speeds(tokens, timings[label], timings["none"])})
    return rows


def serves(model: str, attention: str, name: str) -> bool:
    """True if the encoding serves the attention type, causal in ``lm`` and full in ``roberta``."""
    name = VARIANTS.get(name, (name,))[0]
    kind = encoding_class(name)
    return (attention == "softmax" or kind.serves_linear) and not (
        model == "roberta" and is_causal_only(name)
    )


def step(
    model: str,
    name: str,
    attention_type: str,
    device: str,
    tokens: int,
    dtype: torch.dtype = torch.float32,
    normalizer: str = DENOMINATOR,
) -> Callable[[], None]:
    """Return a training step of ``lrpe_lm`` (6 x 512) or ``lrpe_roberta`` (4 x 768)."""
    build = {"lm": build_lm, "roberta": build_roberta}[model]
    trained = build(name, attention_type, normalizer).to(device, dtype)
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-4, fused=True)
    text = torch.randint(4, VOCABULARY, (tokens // LENGTH, LENGTH + 1), device=device)

    def run() -> None:
        optimizer.zero_grad()
        logits, _ = trained(text[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten()).backward()
        optimizer.step()

    return run


def build_lm(name: str, attention_type: str, normalizer: str = DENOMINATOR) -> LRPELanguageModel:
    """Build ``lrpe_lm`` with the given attention and a synthetic dictionary."""
    encoding, options = VARIANTS.get(name, (name, {}))
    cfg = LRPELanguageModelConfig(
        attention_type=attention_type,
        attention_normalizer=normalizer,
        position_encoding=encoding,
        tokens_per_sample=LENGTH,
        max_target_positions=LENGTH,
        add_bos_token=False,
        tpu=False,
        **options,
    )
    return LRPELanguageModel.build_model(cfg, _task())


def build_roberta(
    name: str, attention_type: str, normalizer: str = DENOMINATOR
) -> LRPERobertaModel:
    """Build a shorter ``lrpe_roberta`` with the given attention and a synthetic dictionary."""
    encoding, options = VARIANTS.get(name, (name, {}))
    cfg = LRPERobertaConfig(
        attention_type=attention_type,
        attention_normalizer=normalizer,
        position_encoding=encoding,
        encoder_layers=ROBERTA_LAYERS,
        max_positions=LENGTH,
        **options,
    )
    return LRPERobertaModel.build_model(cfg, _task())


def _task() -> SimpleNamespace:
    torch.manual_seed(0)
    dictionary = dictionary_of(VOCABULARY)
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)


def dictionary_of(size: int) -> Dictionary:
    """Return a dictionary of ``size`` symbols."""
    dictionary = Dictionary()
    for index in range(size - len(dictionary)):
        dictionary.add_symbol(str(index))
    return dictionary


def _row(
    model: str, attention_type: str, name: str, tokens: int, timings: dict[str, Timing]
) -> dict:
    timing = timings[name]
    return {
        "model": model,
        "attention": attention_type,
        "encoding": name,
        **_speeds(tokens, timing, timings["none"]),
        **({"relative_to_rope": timings["rope"].ratio(timing)} if name in BESIDE_ROPE else {}),
    }


def _speeds(tokens: int, timing: Timing, base: Timing) -> dict:
    return {
        "seconds": timing.median,
        "spread": timing.spread,
        "tokens_per_second": tokens / timing.median,
        "relative_speed": base.ratio(timing),
        "relative_speed_quartiles": base.quartiles(timing),
    }
