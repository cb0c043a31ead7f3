"""Attention of this package in the layers of a pretrained model, and the model classes for it.

Axes: B batch, T time, C width.
"""

import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.parts import HeadNorm
from lrpe_fairseq.encodings import SPE
from lrpe_fairseq.encodings.core.sharing import share_across_layers
from lrpe_fairseq.encodings.rotations.cores import after_loading
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.hf.auto import CODE, register_causal_lm
from lrpe_fairseq.hf.cache import state_layer
from lrpe_fairseq.hf.calls import Call, attended, is_one_sided, padding_of
from lrpe_fairseq.hf.config import refuse_of_training
from lrpe_fairseq.hf.families import (
    FAMILIES,
    OF_PRETRAINED,
    PREFIX,
    Options,
    interleaved,
    kind_of,
    layers_of,
    projections,
    reordered,
    window_of,
)
from lrpe_fairseq.hf.generation import refuse_generation
from lrpe_fairseq.hf.once import hold_once

REMOTE_CODE = '''"""The model, for trust_remote_code=True. It needs lrpe_fairseq with [hf]."""

from lrpe_fairseq.hf.converted import converted_classes

Config, Model = converted_classes("{model_type}")


class LRPEConfig(Config):
    """The configuration."""


class LRPEForCausalLM(Model):
    """The model."""

    config_class = LRPEConfig
'''
NAMES_OF_CACHE = ("cache", "past_key_values", "layer_past")
"""Names of the cache in versions and families of transformers."""


class ConvertedAttention(nn.Module):
    """Stands in for the attention of a layer of transformers.

    attention: ours. layer: its index, and that of its states in a cache. dropout: of the output.
    """

    def __init__(self, attention: MultiheadAttention, layer: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention, self.layer = attention, layer
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, hidden_states: Tensor, *, lrpe_call: Call | None = None, **keywords: Any
    ) -> tuple[Tensor, None]:
        """Compute attention of ``hidden_states`` (B, T, C) after the tokens of a cache.

        lrpe_call: what :func:`_with_call` found. Other arguments are those of transformers, whose
        masks and angles are not used.
        Raises: RuntimeError if the layer is called without its model.
        """
        if lrpe_call is None:
            raise RuntimeError("call the model: its layers alone do not know padding and documents")
        caches = [value for value in keywords.values() if isinstance(value, Cache)]
        past = state_layer(caches[0], self.layer) if caches else None
        return self.dropout(attended(self.attention, hidden_states, lrpe_call, past)), None


# --- the tokens of a call ----------------------------------------------------------------------


@functools.cache
def _signature(kind: type[nn.Module]) -> inspect.Signature:
    return inspect.signature(kind.forward)


def _with_call(
    body: nn.Module, given: tuple, keywords: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Add ``lrpe_call`` to the arguments of a body, which passes it on to its layers.

    A recomputation under gradient checkpointing has it, too. Raises: ValueError for what converted
    layers cannot read.
    """
    bound = _signature(type(body)).bind_partial(body, *given, **keywords).arguments
    bound |= bound.pop("kwargs", {})
    if bound.get("output_attentions"):
        raise ValueError("converted layers have no matrix of weights: leave out output_attentions")
    tokens = bound.get("input_ids")
    tokens = bound.get("inputs_embeds") if tokens is None else tokens
    if body.training:
        for part in body.modules():
            if isinstance(part, SPE):
                part.code.drawn = None  # noise is drawn anew in every pass
    return given, {**keywords, "lrpe_call": _call(body, tokens, bound)}


def _call(body: nn.Module, tokens: Tensor, bound: Mapping[str, Any]) -> Call:
    """Return padding and documents of the tokens (B, T, ...)."""
    mask, positions = bound.get("attention_mask"), bound.get("position_ids")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        raise ValueError(
            "converted layers read attention_mask of shape (B, S) only, 1 at tokens and 0 at "
            "padding: pass no mask of pairs"
        )
    padding, starts = padding_of(mask, tokens.shape[1]), None
    if mask is not None and not torch.compiler.is_compiling():
        _refuse_holes(body.config, mask == 0, positions, tokens.shape[1])
    if positions is not None:
        caches = [bound.get(name) for name in NAMES_OF_CACHE]
        use = bound.get("use_cache")
        use = body.config.use_cache if use is None else use
        packed = mask is None and not use and all(cache is None for cache in caches)
        starts = _starts(positions.expand(len(tokens), -1), padding, packed)
    return Call(padding, is_one_sided(padding), starts)


def _refuse_holes(
    config: PretrainedConfig, padding: Tensor, positions: Tensor | None, length: int
) -> None:
    """Refuse padding between tokens where transformers counts it as tokens, and ours does not.

    padding: bool (B, S), of the ``length`` last tokens and of those before them. positions: of the
    last tokens, or None. Models without angles, as GPT-2, add their positions outside attention.
    Raises: ValueError.
    """
    if not getattr(config, "rope_parameters", None) or is_one_sided(padding):
        return
    if any(window_of(config, layer) is not None for layer in range(config.num_hidden_layers)):
        raise ValueError(
            "with padding between tokens, the sliding windows of transformers hold padding, too: "
            "put the padding on one side"
        )
    real = ~padding[:, -length:]
    counts = ((~padding).long().cumsum(1) - 1)[:, -length:]
    if positions is None or not torch.equal(positions.expand_as(counts)[real], counts[real]):
        raise ValueError(
            "with padding between tokens, transformers counts padding, too: pass position_ids that "
            "count the tokens, attention_mask.cumsum(1) - 1"
        )


def _starts(positions: Tensor, padding: Tensor | None, packed: bool) -> Tensor | None:
    """Return where documents begin, (B, T), or None if the positions (B, T) count one text.

    packed: True if transformers, too, begins a document at every jump of the positions.
    """
    jumps = torch.zeros_like(positions, dtype=torch.bool)
    jumps[:, 1:] = positions[:, 1:] - positions[:, :-1] != 1
    if padding is not None:  # only neighbours that are both tokens are compared
        jumps[:, 1:] &= ~padding[:, 1:] & ~padding[:, :-1]
    if not jumps.any():
        return None
    if packed:
        return jumps
    raise ValueError(
        "position_ids must count the tokens of a text: to pack documents, pass neither "
        "attention_mask nor a cache, and use_cache=False"
    )


# --- construction ------------------------------------------------------------------------------


@contextmanager
def _exactly() -> Iterator[torch.dtype]:
    """Build modules in float32 on the CPU; yield the default dtype from before.

    transformers sets it to the dtype of a model, and builds on the meta device. Fixed angles are
    not among the weights, and phases in half precision would be wrong.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield dtype
    finally:
        torch.set_default_dtype(dtype)


def build(config: PretrainedConfig, options: Options) -> MultiheadAttention:
    """Return the attention of one layer with new weights.

    Raises: ChoiceError for options that do not fit the model, and for ``tape``, whose states need
        the layers of ``lrpe_fairseq.models``.
    """
    refuse_of_training(options)
    given = {name: value for name, value in options.items() if name not in OF_PRETRAINED}
    dropout = getattr(config, "attention_dropout", None) or getattr(config, "attn_pdrop", 0.0)
    attention = MultiheadAttention(
        config.hidden_size, config.num_attention_heads, causal=True, dropout=dropout, **given
    )
    if attention.encoding.has_states:
        raise ChoiceError(
            f"layers of transformers do not update the states of {attention.encoding.name!r}: "
            "choose another position encoding"
        )
    if "angles" in options:
        attention.encoding.use_angles(options["angles"], options["score_factor"])
    if "norm_eps" in options and attention.q_norm is not None:
        attention.q_norm = HeadNorm(attention.encoding.spec, options["norm_eps"], heads=1)
        attention.k_norm = HeadNorm(attention.encoding.spec, options["norm_eps"], heads=1)
    return attention


def replace(model: PreTrainedModel, plan: Mapping[int, Options], copy: bool) -> None:
    """Replace the attention of the layers in ``plan``, and copy its weights if asked to."""
    config, body = model.config, model.base_model
    name, layers = FAMILIES[kind_of(config)].attention, layers_of(body, config)
    for index, options in plan.items():
        old = getattr(layers[index], name)
        with _exactly() as dtype:
            attention = build(config, options)
        if copy:
            weight, _ = projections(old, config)["out_proj"]
            copy_weights(attention, old, config)
            attention.to(weight.device, weight.dtype)
        else:
            attention.to(dtype)
        dropout = config.resid_pdrop if kind_of(config) == "gpt2" else 0.0
        setattr(layers[index], name, ConvertedAttention(attention, index, dropout))
        getattr(layers[index], name).train(old.training)  # dropout
    share_across_layers(body)
    hold_once(body)
    if not any(hook is _with_call for hook in body._forward_pre_hooks.values()):
        body.register_forward_pre_hook(_with_call, with_kwargs=True)


def release(body: nn.Module) -> None:
    """Remove from a body what :func:`replace` added to it beside attention."""
    for key, hook in list(body._forward_pre_hooks.items()):
        if hook is _with_call:
            del body._forward_pre_hooks[key], body._forward_pre_hooks_with_kwargs[key]


@torch.no_grad()
def copy_weights(attention: MultiheadAttention, old: nn.Module, config: PretrainedConfig) -> None:
    """Copy the weights of attention of transformers, with pairs that turn next to each other."""
    order = interleaved(config)
    for name, (weight, bias) in projections(old, config).items():
        own = getattr(attention, name)
        for mine, theirs in ((own.weight, weight), (own.bias, bias)):
            if theirs is not None and mine is not None:
                turned = name in ("q_proj", "k_proj")
                mine.copy_(reordered(theirs, order) if turned else theirs)
                mine.requires_grad_(theirs.requires_grad)
    if hasattr(old, "q_norm") and attention.q_norm is not None:
        for mine, theirs in ((attention.q_norm, old.q_norm), (attention.k_norm, old.k_norm)):
            mine.weight.copy_(theirs.weight[order])
            mine.weight.requires_grad_(theirs.weight.requires_grad)


# --- models ------------------------------------------------------------------------------------


class ConvertedModel(PreTrainedModel):
    """What a converted model has beside the model of transformers: loading, saving, refusals."""

    auto_class = "AutoModelForCausalLM"

    def __init__(self, config: PretrainedConfig, *given: Any, **keywords: Any) -> None:
        super().__init__(config, *given, **keywords)
        replace(self, {int(layer): own for layer, own in config.lrpe.items()}, copy=False)

    def tie_weights(self, *given: Any, **keywords: Any) -> None:
        """Tie what transformers ties, and encodings that share parameters; see ``hf.model``."""
        super().tie_weights(*given, **keywords)
        share_across_layers(self.base_model)
        after_loading(self.base_model)

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, **keywords: Any
    ) -> None:
        """Write configuration and weights, and the module that ``trust_remote_code`` loads."""
        self.config.auto_map = {
            "AutoConfig": f"{CODE}.LRPEConfig",
            self.auto_class: f"{CODE}.LRPEForCausalLM",
        }
        super().save_pretrained(save_directory, is_main_process=is_main_process, **keywords)
        if is_main_process:
            code = REMOTE_CODE.format(model_type=kind_of(self.config))
            Path(save_directory, f"{CODE}.py").write_text(code, encoding="utf-8")

    def generate(
        self, inputs: Tensor | None = None, generation_config: Any = None, **keywords: Any
    ) -> Any:
        """Continue texts; see ``GenerationMixin.generate``.

        Raises: ValueError, one sentence, for what needs a cache that forgets its last tokens.
        """
        own = self.generation_config if generation_config is None else generation_config
        refuse_generation(own, keywords)
        return super().generate(inputs, generation_config, **keywords)


@functools.cache
def converted_classes(kind: str) -> tuple[type[PretrainedConfig], type[PreTrainedModel]]:
    """Return the classes of configurations and of models for a converted model type ``kind``."""
    stock = transformers.CONFIG_MAPPING[kind]
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[stock]
    own = {"model_type": PREFIX + kind, "lrpe": None, "__annotations__": {"lrpe": dict | None}}
    name = model.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    config = type(f"Converted{name}Config", (stock,), {**own, "__module__": __name__})
    made = {"config_class": config, "__module__": __name__}
    converted = type(f"Converted{name}ForCausalLM", (ConvertedModel, model), made)
    for one in (config, converted):
        globals()[one.__name__] = one  # where pickle looks for them
    return config, converted


def register() -> None:
    """Let ``AutoConfig`` and ``AutoModelForCausalLM`` load converted models."""
    for kind in FAMILIES:
        register_causal_lm(*converted_classes(kind))
