"""A checkpoint of fairseq as a configuration and weights of an exported model."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lrpe_fairseq.encodings import options_of_encodings, options_read_by
from lrpe_fairseq.encodings.layers import encoding_options, sizes_of_heads
from lrpe_fairseq.hf.config import OF_TRAINING, LRPEConfig
from lrpe_fairseq.patterns import at_layer
from lrpe_fairseq.safe_loading import load_sound, require_finite
from lrpe_fairseq.stock import NORMFORMER

Options = Mapping[str, Any]
FAMILIES = ("lrpe_lm", "lrpe_roberta")
"""Archs that are exported, with their presets."""
NOT_REPRESENTED = {
    "adaptive_softmax_cutoff": "an adaptive softmax",
    "adaptive_input": "an adaptive input",
    "character_embeddings": "character embeddings",
    "memory_length": "a memory of earlier segments",
    "base_layers": "BASE layers",
    "quant_noise_pq": "quantization noise",
    "quant_noise_scalar": "scalar quantization",
    "decoder_layers_to_keep": "pruned layers",
    "encoder_layers_to_keep": "pruned layers",
}
"""Options of fairseq that change the function of a model and are not exported."""
STACKS = {"lrpe_lm": "decoder.", "lrpe_roberta": "encoder.sentence_encoder."}
HEADS = {
    "decoder.output_projection.": "lm_head.",
    "encoder.lm_head.": "lm_head.",
}
RENAMED = {**HEADS, **dict.fromkeys(STACKS.values(), "model.")}
"""Beginnings of fairseq's names of parameters -> those of exported models; heads come first."""
DROPPED = (".version", ".embed_positions._float_tensor", ".embed_positions.weights")
"""Entries of a checkpoint that are no weights."""


class Checkpoint:
    """What a checkpoint of fairseq-train says of its model.

    Raises: ValueError, one sentence, if it is damaged or diverged, of another arch, or of a model
        that transformers cannot represent.
    """

    def __init__(self, path: Path) -> None:
        state = load_sound(path)
        self.path = path
        self.sections: dict[str, Options] = {
            name: vars(own) if isinstance(own, Namespace) else own
            for name, own in state["cfg"].items()
            if isinstance(own, dict | Namespace)
        }
        self.model, self.task = self.sections["model"], self.sections.get("task", {})
        self.state: dict[str, Tensor] = state["model"]
        self.updates: int = state["optimizer_history"][-1]["num_updates"]
        self.arch = _arch(path, str(self.model.get("_name")))
        self._check()
        require_finite(path, self.state)

    @property
    def causal(self) -> bool:
        """True for a language model, False for a masked language model."""
        return self.arch == "lrpe_lm"

    @property
    def begins_with_bos(self) -> bool:
        """True if texts begin with <s>, as in RoBERTa and with ``--add-bos-token``; else </s>."""
        return not self.causal or bool(self.task.get("add_bos_token"))

    def _check(self) -> None:
        reasons = [
            text for name, text in NOT_REPRESENTED.items() if self.model.get(name) not in OFF
        ]
        if any(name.startswith("classification_heads.") for name in self.state):
            reasons.append("classification heads")
        if reasons:
            raise ValueError(
                f"{self.path} cannot be exported, because models of Hugging Face have no place for "
                f"{' and '.join(dict.fromkeys(reasons))}: train without"
            )

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by the names of exported models, float32."""
        found = {}
        for name, tensor in self.state.items():
            if name.endswith(DROPPED):
                continue
            old = next(start for start in RENAMED if name.startswith(start))
            wide = tensor.float() if tensor.is_floating_point() else tensor
            found[RENAMED[old] + name.removeprefix(old)] = wide
        return found

    def config(self, boundary: int | None = None) -> LRPEConfig:
        """Return the configuration. boundary: index of the symbol of ``--document-boundary``."""
        own, side = self.model, "decoder" if self.causal else "encoder"
        layers = int(own[f"{side}_layers"])
        options = Namespace(**own)
        return LRPEConfig(
            vocab_size=len(self.state[STACKS[self.arch] + "embed_tokens.weight"]),
            hidden_size=own[f"{side}_embed_dim"],
            num_hidden_layers=layers,
            num_attention_heads=own[f"{side}_attention_heads"],
            intermediate_size=own[f"{side}_ffn_embed_dim"],
            hidden_act=_plain(own["activation_fn"]).replace("gelu_fast", "gelu_accurate"),
            attention=[attention_of(options, layer) for layer in range(layers)],
            encoding_seed=own.get("encoding_seed", 0),
            causal=self.causal,
            absolute_positions=_positions(own, side),
            max_position_embeddings=self._max_positions(),
            document_boundary=boundary,
            embedding_norm=bool(own.get("layernorm_embedding")),
            normalize_before=bool(own[f"{side}_normalize_before"]),
            dropout=own["dropout"],
            attention_dropout=own["attention_dropout"],
            activation_dropout=own["activation_dropout"] or own.get("relu_dropout", 0.0),
            bos_token_id=0 if self.begins_with_bos else 2,
            **(self._of_language_model() if self.causal else self._of_masked_language_model()),
        )

    def _of_language_model(self) -> dict[str, Any]:
        """Return the arguments that only ``lrpe_lm`` has options for."""
        own, width = self.model, self.model["decoder_embed_dim"]
        sizes = {
            "embedding_size": own["decoder_input_dim"],
            "output_size": own["decoder_output_dim"],
        }
        return {
            **{name: size for name, size in sizes.items() if size != width},
            # the weights decide: older versions of lrpe_lm ignored the options
            **{option: self._has(part) for option, part in NORMFORMER.items()},
            "scale_embedding": not own.get("no_scale_embedding"),
            "final_norm": not own.get("no_decoder_final_norm"),
            "tie_word_embeddings": bool(own["share_decoder_input_output_embed"]),
        }

    def _has(self, part: str) -> bool:
        """True if the first layer has a part of that name."""
        first = f"{STACKS[self.arch]}layers.0.{part}"
        return any(name == first or name.startswith(f"{first}.") for name in self.state)

    def _of_masked_language_model(self) -> dict[str, Any]:
        """Return the arguments that ``lrpe_roberta`` fixes, or has options of its own for."""
        return {
            "scale_embedding": False,
            "tie_word_embeddings": not self.model.get("untie_weights_roberta"),
        }

    def _max_positions(self) -> int:
        """Return the number of learned positions, or the longest text of training."""
        learned = self.state.get(f"{STACKS[self.arch]}embed_positions.weight")
        if learned is not None:
            return len(learned) - FIRST_POSITION
        names = "max_target_positions", "max_positions", "tokens_per_sample"
        given = (part.get(name) for name in names for part in (self.model, self.task))
        return int(next(size for size in given if size))


FIRST_POSITION = 2
"""The row of the first learned position, after those of <s> and <pad>."""
OFF: tuple[Any, ...] = (None, False, 0, "", "0")
"""Values of options that are not used."""


def _arch(path: Path, name: str) -> str:
    """Return the arch of a model or of its preset. Raises: ValueError for one not exported."""
    for arch in FAMILIES:
        if name == arch or name.startswith(f"{arch}_"):
            return arch
    raise ValueError(
        f"{path} is a checkpoint of {name}, which is not exported: choose one of "
        f"{' or '.join(FAMILIES)}"
    )


def _positions(own: Options, side: str) -> str:
    if own.get("no_token_positional_embeddings"):
        return "none"
    return "learned" if own.get(f"{side}_learned_pos") else "sinusoidal"


def _plain(value: Any) -> str:
    """Return a choice as text; fairseq has enumerations of some."""
    return str(getattr(value, "value", value))


def attention_of(options: Namespace, layer: int) -> dict[str, Any]:
    """Return what the attention of a layer has beside the defaults; see ``LRPEConfig``."""
    found: dict[str, Any] = {
        "attention_type": at_layer(options, "attention_type", layer),
        "position_encoding": at_layer(options, "position_encoding", layer),
    }
    normalizer = at_layer(options, "attention_normalizer", layer)
    if found["attention_type"] == "linear" and normalizer != "rotated":
        found["normalizer"] = normalizer
    if window := int(at_layer(options, "attention_window", layer)):
        found["window"] = window
    if (parts := getattr(options, "attention_parts", "none")) != "none":
        found["parts"] = parts
    usual = {"num_kv_heads": None, "head_dim": None, "out_bias": True, "score_scale": None}
    found |= {n: value for n, value in sizes_of_heads(options).items() if value != usual[n]}
    own = encoding_options(options, layer)
    if own.fidelity:
        found["fidelity"] = sorted(own.fidelity)
    grid = {
        "grid_width": own.grid_width,
        "grid_height": own.grid_height,
        "position_grid": own.position_grid,
    }
    found |= {name: value for name, value in grid.items() if value not in (0, "flat")}
    read = options_read_by(found["position_encoding"]) - OF_TRAINING
    usual = {name: field.default for name, field in options_of_encodings().items()}
    return {**found, **{n: v for n, v in own.values.items() if n in read and v != usual[n]}}
