"""Pretrained models whose attention can be replaced: what it computes, and where its weights are.

Axes: H heads of queries, K heads of keys and values, D head width, C width.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from lrpe_fairseq.attention.projected import ProjectedAttention
from lrpe_fairseq.encodings import has_rotations, options_of_encodings
from lrpe_fairseq.encodings.rotations.scaling import RotationOptions
from lrpe_fairseq.errors import ChoiceError, did_you_mean

Options = dict[str, Any]
"""Arguments of ``MultiheadAttention`` without its sizes, and those of :data:`OF_PRETRAINED`."""
Projection = tuple[Tensor, Tensor | None]
"""Weight and bias of a linear map."""

PREFIX = "lrpe_"
"""The model type of a converted llama is ``lrpe_llama``."""
OF_PRETRAINED = ("angles", "score_factor", "norm_eps")
"""Options that ``MultiheadAttention`` has no argument for. angles: of all pairs, in radians per
token. score_factor: of the scores of features that turn. norm_eps: of the norms of q and k."""

OF_ROTATIONS = tuple(own.name for own in fields(RotationOptions))
OF_ANGLES = ("angles", "score_factor")


class Family(NamedTuple):
    """How models of one ``model_type`` of transformers are built.

    attention: name of self-attention in a layer. layers: name of the layers in the body.
    biases: configuration -> whether q, k and v, and whether the output projection have biases.
    windows: True if layers may have sliding windows. skips: True if ``no_rope_layers`` is read.
    partial: True if ``partial_rotary_factor`` is read. norms: True if q and k of each head are
    normalized. clips: name of the option that clips q, k and v.
    """

    biases: Callable[[PretrainedConfig], tuple[bool, bool]]
    attention: str = "self_attn"
    layers: str = "layers"
    windows: bool = False
    skips: bool = False
    partial: bool = False
    norms: bool = False
    clips: str = ""


def _by_option(config: PretrainedConfig) -> tuple[bool, bool]:
    return config.attention_bias, config.attention_bias


FAMILIES: Mapping[str, Family] = {
    "llama": Family(_by_option),
    "mistral": Family(lambda config: (False, False), windows=True),
    "qwen2": Family(lambda config: (True, False), windows=True),
    "qwen3": Family(_by_option, windows=True, norms=True),
    "smollm3": Family(_by_option, windows=True, skips=True),
    "olmo": Family(_by_option, clips="clip_qkv"),
    "gpt_neox": Family(_by_option, attention="attention", partial=True),
    "gpt2": Family(lambda config: (True, True), attention="attn", layers="h"),
}
"""By ``model_type``. SmolLM2 and most other small models are of type llama; Pythia is gpt_neox."""

KNOWN_REASONS = {
    "gemma2": ("a soft-cap of scores",),
    "gemma3_text": ("norms of q and k with weights 1 + w",),
    "olmo2": ("norms of q and k over all heads",),
    "olmo3": ("norms of q and k over all heads",),
    "gpt_oss": ("sinks of attention",),
}
"""What attention of other model types has that ours has not."""
MAPS = ("q_proj", "k_proj", "v_proj", "o_proj", "query_key_value", "dense", "c_attn", "c_proj")
"""Names of linear maps in attention of transformers."""
PLAIN = (nn.Linear, Conv1D)
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""Values of ``rope_type`` whose angles do not depend on the length of a text."""


def kind_of(config: PretrainedConfig) -> str:
    """Return the model type of transformers, also of a model that is converted."""
    return config.model_type.removeprefix(PREFIX)


def family_of(config: PretrainedConfig) -> Family:
    """Return the family of a model. Raises: ChoiceError for a model type that is not known."""
    if kind_of(config) not in FAMILIES:
        refuse_reasons(config, reasons(config))
    return FAMILIES[kind_of(config)]


def sizes(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return H, K and D of a model."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, width


def reasons(config: PretrainedConfig) -> list[str]:
    """Return everything in the configuration of a model that our attention cannot represent."""
    kind, found = kind_of(config), []
    if kind not in FAMILIES:
        found.append(f"the model type {kind}")
        found += KNOWN_REASONS.get(kind, ())
    if getattr(config, "attn_logit_softcapping", None):
        found.append("attn_logit_softcapping, a soft-cap of scores")
    clips = FAMILIES[kind].clips if kind in FAMILIES else ""
    if clips and getattr(config, clips, None):
        found.append(f"{clips}, limits of q, k and v")
    if getattr(config, "add_cross_attention", False):
        found.append("add_cross_attention")
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        found.append("rope_parameters that differ between kinds of layers")
    elif rope.get("rope_type", "default") not in ROPE_TYPES:
        found.append(f"rope_type {rope['rope_type']}")
    if _quantization(config):
        found.append(f"weights quantized by {_quantization(config)}")
    return list(dict.fromkeys(found))


def _quantization(config: PretrainedConfig) -> str:
    """Return the method that quantized the weights; empty if they are plain numbers, as of GGUF."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return ""
    method = given.get("quant_method") if isinstance(given, dict) else given.quant_method
    name = str(getattr(method, "value", method))
    return "" if name == "gguf" else name


def refuse_reasons(config: PretrainedConfig, found: list[str]) -> None:
    """Raise ChoiceError that names all reasons, if there are any."""
    if found:
        known = ", ".join(FAMILIES)
        raise ChoiceError(
            f"a model of type {config.model_type} cannot be converted, because lrpe_fairseq's "
            f"attention does not represent {'; '.join(found)}: choose a model of type {known} "
            "without these"
        )


def plan(config: PretrainedConfig) -> dict[int, Options]:
    """Return the options of every layer with which our attention is the pretrained function.

    Raises: ChoiceError with all :func:`reasons` at once.
    """
    refuse_reasons(config, reasons(config))
    return {layer: _of_layer(config, layer) for layer in range(config.num_hidden_layers)}


def _of_layer(config: PretrainedConfig, layer: int) -> Options:
    own = FAMILIES[kind_of(config)]
    heads, kv_heads, width = sizes(config)
    qkv_bias, out_bias = own.biases(config)
    found: Options = {"attention_type": "softmax", "seed": layer}
    found |= {"qkv_bias": qkv_bias, "out_bias": out_bias}
    if kv_heads != heads:
        found["num_kv_heads"] = kv_heads
    if heads * width != config.hidden_size:
        found["head_dim"] = width
    window = window_of(config, layer)
    if window is not None:
        found["window"] = window
    if own.norms:
        found |= {"parts": "qk-norm", "norm_eps": config.rms_norm_eps}
    if kind_of(config) == "gpt2":
        scale = _scale_of_gpt2(config, layer)
        if scale != width**-0.5:
            found["score_scale"] = scale
    return found | _encoding(config, layer)


def window_of(config: PretrainedConfig, layer: int) -> int | None:
    """Return the number of tokens that a layer attends to, itself included; None for all."""
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or kinds[layer] == "sliding_attention"
    if not FAMILIES[kind_of(config)].windows or not slides:
        return None
    return getattr(config, "sliding_window", None)


def _scale_of_gpt2(config: PretrainedConfig, layer: int) -> float:
    scale = sizes(config)[2] ** -0.5 if config.scale_attn_weights else 1.0
    return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale


def _encoding(config: PretrainedConfig, layer: int) -> Options:
    """Return the position encoding of a layer and its options."""
    own, rope = FAMILIES[kind_of(config)], getattr(config, "rope_parameters", None)
    if not rope or (own.skips and not config.no_rope_layers[layer]):
        return {"position_encoding": "none"}
    found: Options = {"position_encoding": "rope", "rotation_base": float(rope["rope_theta"])}
    fraction = turned_fraction(config)
    if fraction != 1:
        found["rotation_fraction"] = fraction
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        found |= {"context_scaling": "linear", "context_factor": float(rope["factor"])}
    elif kind != "default":
        angles, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")  # it multiplies cos and sin
        found |= {"angles": angles.tolist(), "score_factor": float(factor) ** 2}
    return found


def changed(pretrained: Options, options: Options) -> Options:
    """Return the options of a layer: ``options`` over those of the pretrained function.

    Options of rotations do not apply to an encoding without any, angles of the pretrained model
    apply to rope only, also under gates and reflections, and its scale of scores is that of softmax
    attention.
    Raises: ChoiceError for a name that is no option, if it is near that of one of attention.
    """
    _check_names(options)
    found = {**pretrained, **options}
    name, own = str(found["position_encoding"]), set(options)
    dropped: set[str] = set()
    if not has_rotations(name):
        dropped |= {*OF_ROTATIONS, *OF_ANGLES}
    if name.rpartition(":")[2] != "rope" or own & {*OF_ROTATIONS}:
        dropped |= {*OF_ANGLES}
    if found["attention_type"] == "linear":
        dropped.add("score_scale")
    return {key: value for key, value in found.items() if key in own or key not in dropped}


def _check_names(options: Options) -> None:
    """Refuse a misspelled option of attention; encodings refuse the other unknown names."""
    own = inspect.signature(ProjectedAttention).parameters
    for name in options.keys() - own.keys() - options_of_encodings().keys():
        near = did_you_mean(name, [*own, *options_of_encodings()])
        if any(repr(known) in near for known in own):
            raise ChoiceError(f"attention has no option {name!r}{near}")


def turned_fraction(config: PretrainedConfig) -> float:
    """Return how much of a head turns with the position, as a part of its features."""
    rope = getattr(config, "rope_parameters", None) or {}
    partial = FAMILIES[kind_of(config)].partial
    return float(rope.get("partial_rotary_factor", 1.0)) if partial else 1.0


# --- weights -----------------------------------------------------------------------------------


def layers_of(body: nn.Module, config: PretrainedConfig) -> nn.ModuleList:
    """Return the layers of the body of a model."""
    return getattr(body, family_of(config).layers)


def maps_of(old: nn.Module) -> list[nn.Module]:
    """Return the linear maps of attention of a layer of transformers."""
    return [getattr(old, name) for name in MAPS if hasattr(old, name)]


def require_plain(maps: Iterable[nn.Module]) -> None:
    """Refuse linear maps that may compute with more than a weight and a bias, as adapters do.

    Raises: ChoiceError.
    """
    for one in maps:
        kind = type(one)
        if kind not in PLAIN:
            raise ChoiceError(
                f"a linear map of the model is a {kind.__module__}.{kind.__name__}, whose other "
                "weights would be lost: merge the adapters first"
            )


def projections(old: nn.Module, config: PretrainedConfig) -> dict[str, Projection]:
    """Return weights and biases of q, k, v and the output, with rows of one head together.

    old: attention of a layer of transformers.
    """
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    if hasattr(old, "q_proj"):
        maps = (old.q_proj, old.k_proj, old.v_proj, old.o_proj)
        found = [(one.weight, one.bias) for one in maps]
    elif hasattr(old, "query_key_value"):
        found = [*_fused_by_head(old.query_key_value, config), (old.dense.weight, old.dense.bias)]
    else:  # GPT-2, whose Conv1D holds the transposed weights
        pairs = zip(old.c_attn.weight.T.chunk(3), old.c_attn.bias.chunk(3), strict=True)
        found = [*pairs, (old.c_proj.weight.T, old.c_proj.bias)]
    return dict(zip(names, found, strict=True))


def _fused_by_head(fused: nn.Linear, config: PretrainedConfig) -> list[Projection]:
    """Split a projection whose rows are q, k and v of the first head, of the second, and so on."""
    heads, _, width = sizes(config)

    def split(rows: Tensor) -> list[Tensor]:
        return [part.flatten(0, 1) for part in rows.unflatten(0, (heads, 3, width)).unbind(1)]

    biases = [None] * 3 if fused.bias is None else split(fused.bias)
    return [*zip(split(fused.weight), biases, strict=True)]


def interleaved(config: PretrainedConfig) -> Tensor:
    """Return the order (D,) of a head's features with which neighbours are a pair that turns.

    In transformers feature j turns with j + e / 2 of the first e features, here with j + 1. As q
    and k change alike, no score does.
    """
    width = sizes(config)[2]
    turned = int(width * turned_fraction(config))
    pairs = torch.arange(turned).view(2, -1).T.flatten()
    return torch.cat([pairs, torch.arange(turned, width)])


def reordered(rows: Tensor, order: Tensor) -> Tensor:
    """Put the features of every head of ``rows`` (N D, ...) in an order (D,)."""
    order = order.to(rows.device)
    return rows.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)
