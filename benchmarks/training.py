"""Training speed of every encoding relative to Base (LRPE, Table 9): ``lrpe_lm`` and RoBERTa."""

from argparse import Namespace
from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from fairseq.models.roberta.model import RobertaModel, base_architecture
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch._inductor import config as inductor
from torch.nn import functional as F

from benchmarks.timing import Timing, contest
from lrpe_fairseq.attention.linear import NORMALIZERS
from lrpe_fairseq.encodings import ENCODINGS, encoding_class
from lrpe_fairseq.models.language_model import LRPELanguageModel, LRPELanguageModelConfig
from lrpe_fairseq.models.masked_lm import LRPERobertaConfig, LRPERobertaModel

VOCABULARY = 8192
LENGTH = 512
ROBERTA_LAYERS = 4  # instead of 12, each as in the paper: same ratios in a third of the time
STOCK = "stock"
"""The name of fairseq's own model of the same size, with softmax attention."""
PADDED = 0.2
"""Share of padding in the batches of :func:`masked_step`."""
CANONICAL = "ape (canonical)"
VARIANTS = {
    CANONICAL: ("ape", {"ape_generator": "canonical"}),
    "gated:lrpe-type2": ("gated:lrpe-type2", {}),
    "selective:lrpe-type2": ("selective:lrpe-type2", {}),
    "path:lrpe-type2": ("path:lrpe-type2", {}),
    "gated:path:lrpe-type2": ("gated:path:lrpe-type2", {}),
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
MIXED = "linear,linear,linear,softmax"
STACKS = {
    "RoPE": ("rope", "softmax", DENOMINATOR),
    "FoX": ("fox", "linear", DENOMINATOR),
    "Type2": ("lrpe-type2", "linear", "content"),
    "FoX and NoPE": ("fox,fox,fox,none", MIXED, DENOMINATOR),
    "Type2 and RoPE": ("lrpe-type2,lrpe-type2,lrpe-type2,rope", MIXED, "content"),
}
"""Rows of the table hybrid-lm, the baseline first: label -> (encodings, attention, normalizer)."""
COMPILED = ("rope", "lrpe-type2", "fox")
"""Encodings whose compiled steps are timed."""
STACK_LENGTHS = (512, 2048)
ROTATIONS = ("rope", "lrpe-type2")
"""Encodings whose steps are timed with every normalizer."""


def measure(
    device: str,
    tokens: int,
    rounds: int,
    dtype: torch.dtype = torch.float32,
    chosen: Collection[str] | None = None,
) -> list[dict]:
    """Rows of {attention, encoding, seconds, spread, tokens_per_second, relative_speed,
    relative_speed_quartiles}.

    chosen: the encodings to measure; None for all.

    ``relative_speed``: against Base, the median over rounds. Those of ``BESIDE_ROPE`` also have
    ``relative_to_rope``.

    Each encoding is timed in turn with Base (and RoPE) only, because the machine's speed drifts
    within a round of sixteen. One step is forward, loss, backward and fused Adam on ``tokens``
    tokens in sequences of 512, with the model and its gradients in ``dtype``. The vocabulary is
    small, so that the encodings' share of the time is larger than with the paper's 267,744 words.
    """
    rows = []
    for attention in ("linear", "softmax"):
        base = step("lm", "none", attention, device, tokens, dtype)
        for name in filter(partial(serves, attention), chosen or names()):
            timed = ["rope", name] if name in BESIDE_ROPE else [name]
            steps = {n: step("lm", n, attention, device, tokens, dtype) for n in timed}
            timings = contest({"none": base, **steps}, rounds)
            rows.append(_row(attention, name, tokens, timings))
    return rows


def names() -> list[str]:
    """Return the names of the rows of Table 9."""
    return [*ENCODINGS, *VARIANTS]


def measure_table6(
    device: str, tokens: int, rounds: int, dtype: torch.dtype = torch.float32
) -> list[dict]:
    """Rows of TMLR LRPE, Table 6: {row, encoding, normalizer, seconds, spread, ...}.

    As :func:`measure`, of ``lrpe_roberta`` with linear attention; every row has a normalizer.
    """
    rows, base = [], step("roberta", "none", "linear", device, tokens, dtype)
    for label, (name, normalizer) in TABLE_6.items():
        own = step("roberta", name, "linear", device, tokens, dtype, normalizer)
        timings = contest({"none": base, label: own}, rounds)
        chosen = {"row": label, "encoding": name, "normalizer": normalizer}
        rows.append({**chosen, **speeds(tokens, timings[label], timings["none"])})
    return rows


def measure_stacks(
    device: str, tokens: int, rounds: int, dtype: torch.dtype = torch.float32
) -> list[dict]:
    """Rows of {row, length, encoding, attention, normalizer, seconds, spread, ...}.

    Steps of ``lrpe_lm`` with four layers of 512, relative to softmax attention with RoPE, on
    ``tokens`` tokens or one sequence.
    """
    rows = []
    for length in STACK_LENGTHS:
        counted = max(tokens, length)
        shape = {"decoder_layers": 4, "length": length}
        steps = {
            label: step("lm", encoding, attention, device, counted, dtype, normalizer, **shape)
            for label, (encoding, attention, normalizer) in STACKS.items()
        }
        timings = contest(steps, rounds)
        for label, (encoding, attention, normalizer) in STACKS.items():
            chosen = {"row": label, "length": length, "encoding": encoding}
            chosen |= {"attention": attention, "normalizer": normalizer}
            rows.append({**chosen, **speeds(counted, timings[label], timings["RoPE"])})
    return rows


def measure_normalizers(
    device: str, tokens: int, rounds: int, dtype: torch.dtype = torch.float32
) -> list[dict]:
    """Rows of {encoding, normalizer, seconds, spread, tokens_per_second, relative_speed, ...}.

    Steps of ``lrpe_lm`` with linear attention, relative to the normalizer ``rotated``.
    """
    rows = []
    for name in ROTATIONS:
        steps = {
            normalizer: step("lm", name, "linear", device, tokens, dtype, normalizer)
            for normalizer in NORMALIZERS
        }
        timings = contest(steps, rounds)
        for normalizer in NORMALIZERS[1:]:
            chosen = {"encoding": name, "normalizer": normalizer}
            rows.append({**chosen, **speeds(tokens, timings[normalizer], timings[DENOMINATOR])})
    return rows


def measure_compiled(
    device: str, tokens: int, rounds: int, dtype: torch.dtype = torch.float32
) -> list[dict]:
    """Rows of {attention, encoding, seconds, spread, tokens_per_second, relative_speed, ...}.

    Steps of ``lrpe_lm`` under torch.compile, in one graph, relative to eager execution. Both draw
    the same random numbers.
    """
    rows = []
    for attention in ("linear", "softmax"):
        for name in COMPILED:
            torch.compiler.reset()
            eager, compiled = (
                step("lm", name, attention, device, tokens, dtype, compiled=flag)
                for flag in (False, True)
            )
            with inductor.patch(fallback_random=True):
                timings = contest({"eager": eager, "compiled": compiled}, rounds, warmup=2)
            chosen = {"attention": attention, "encoding": name}
            chosen["eager_seconds"] = timings["eager"].median
            rows.append({**chosen, **speeds(tokens, timings["compiled"], timings["eager"])})
    return rows


def serves(attention: str, name: str) -> bool:
    """True if the encoding serves the attention type."""
    encoding = encoding_class(VARIANTS.get(name, (name,))[0])
    return encoding.serves_linear if attention == "linear" else not encoding.no_softmax


def step(
    model: str,
    name: str,
    attention_type: str,
    device: str,
    tokens: int,
    dtype: torch.dtype = torch.float32,
    normalizer: str = DENOMINATOR,
    compiled: bool = False,
    **shape: int,
) -> Callable[[], None]:
    """Return a training step of ``lrpe_lm`` (6 x 512) or ``lrpe_roberta`` (4 x 768).

    compiled: True to run the model under torch.compile. shape: options of the model that differ,
    and ``length``, tokens of a sequence.
    """
    build = {"lm": build_lm, "roberta": build_roberta}[model]
    trained = build(name, attention_type, normalizer, **shape).to(device, dtype)
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-4, fused=True)
    if compiled:
        trained = torch.compile(trained, fullgraph=True)
    length = shape.get("length", LENGTH)
    text = torch.randint(4, VOCABULARY, (max(1, tokens // length), length + 1), device=device)

    def run() -> None:
        optimizer.zero_grad()
        logits, _ = trained(text[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten()).backward()
        optimizer.step()

    return run


def masked_step(
    name: str, attention_type: str, device: str, tokens: int, dtype: torch.dtype, **shape: int
) -> Callable[[], None]:
    """Return a training step of ``lrpe_roberta`` (12 x 768), or fairseq's own, on masked tokens.

    The batches have :data:`PADDED` padding, the models their dropout of 0.1. shape: as of
    :func:`step`.
    """
    shape = {"encoder_layers": 12, **shape}
    trained = build_roberta(name, attention_type, **shape).to(device, dtype)
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-4, fused=True)
    length, padding = shape.get("length", LENGTH), _task().source_dictionary.pad()
    rows = max(2, tokens // length)
    text = torch.randint(4, VOCABULARY, (rows, length), device=device)
    ends = torch.linspace(1 - 2 * PADDED, 1.0, rows, device=device) * length
    text[torch.arange(length, device=device) >= ends.unsqueeze(1)] = padding
    masked = (torch.rand(text.shape, device=device) < 0.15) & (text != padding)
    wanted = text[masked]

    def run() -> None:
        optimizer.zero_grad()
        logits, _ = trained(text, masked_tokens=masked)
        F.cross_entropy(logits.float(), wanted).backward()
        optimizer.step()

    return run


def build_lm(
    name: str,
    attention_type: str,
    normalizer: str = DENOMINATOR,
    length: int = LENGTH,
    **shape: int,
) -> BaseFairseqModel:
    """Build ``lrpe_lm``, or ``transformer_lm`` for :data:`STOCK`, with a synthetic dictionary."""
    encoding, options = VARIANTS.get(name, (name, {}))
    shape |= {"tokens_per_sample": length, "max_target_positions": length}
    shape |= {"add_bos_token": False, "tpu": False}
    if name == STOCK:
        shape["decoder_normalize_before"] = True  # as ours
        config = TransformerLanguageModelConfig(**shape)
        return TransformerLanguageModel.build_model(config, _task())
    chosen = _chosen(attention_type, normalizer, encoding)
    cfg = LRPELanguageModelConfig(**chosen, **shape, **options)
    return LRPELanguageModel.build_model(cfg, _task())


def build_roberta(
    name: str,
    attention_type: str,
    normalizer: str = DENOMINATOR,
    length: int = LENGTH,
    **shape: int,
) -> BaseFairseqModel:
    """Build a shorter ``lrpe_roberta``, or fairseq's own for :data:`STOCK`; see build_lm."""
    encoding, options = VARIANTS.get(name, (name, {}))
    shape = {"encoder_layers": ROBERTA_LAYERS, "max_positions": length, **shape}
    if name == STOCK:
        config = Namespace(tokens_per_sample=length, **shape)
        base_architecture(config)
        return RobertaModel.build_model(config, _task())
    chosen = _chosen(attention_type, normalizer, encoding)
    return LRPERobertaModel.build_model(LRPERobertaConfig(**chosen, **shape, **options), _task())


def _chosen(attention_type: str, normalizer: str, encoding: str) -> dict[str, Any]:
    return {
        "attention_type": attention_type,
        "attention_normalizer": normalizer,
        "position_encoding": encoding,
    }


def _task() -> SimpleNamespace:
    torch.manual_seed(0)
    words = dictionary_of(VOCABULARY)
    return SimpleNamespace(source_dictionary=words, target_dictionary=words, dictionary=words)


def dictionary_of(size: int) -> Dictionary:
    """Return a dictionary of ``size`` symbols."""
    dictionary = Dictionary()
    for index in range(size - len(dictionary)):
        dictionary.add_symbol(str(index))
    return dictionary


def _row(attention_type: str, name: str, tokens: int, timings: dict[str, Timing]) -> dict:
    timing = timings[name]
    return {
        "attention": attention_type,
        "encoding": name,
        **speeds(tokens, timing, timings["none"]),
        **({"relative_to_rope": timings["rope"].ratio(timing)} if name in BESIDE_ROPE else {}),
    }


def speeds(tokens: int, timing: Timing, base: Timing) -> dict:
    """Return the columns of a row that are measured; see :func:`measure`."""
    return {
        "seconds": timing.median,
        "spread": timing.spread,
        "tokens_per_second": tokens / timing.median,
        "relative_speed": base.ratio(timing),
        "relative_speed_quartiles": base.quartiles(timing),
    }
