"""Replace the attention of a pretrained model of transformers by that of this package."""

from collections.abc import Collection, Iterable
from typing import Any

import transformers
from transformers import PreTrainedModel

from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.hf.converted import ConvertedModel, build, converted_classes, replace
from lrpe_fairseq.hf.exported import convert_exported
from lrpe_fairseq.hf.families import (
    changed,
    family_of,
    kind_of,
    layers_of,
    maps_of,
    plan,
    reasons,
    refuse_reasons,
    require_plain,
)
from lrpe_fairseq.hf.model import LRPEForCausalLM


def convert(
    model: PreTrainedModel, *, layers: Iterable[int] | None = None, **options: Any
) -> PreTrainedModel:
    """Replace the self-attention of a causal language model by ours, with its weights, in place.

    Without options the model computes what it did before. Every option is a change of it.

    >>> model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
    >>> hf.convert(model, position_encoding="gated:rope", fox_bias=8.0)

    Args:
        model: of transformers, of a type in ``families.FAMILIES``, or an exported one. Call it
            again for other layers; layers of an exported model may be converted again.
        layers: indices of the layers that are converted; None: all.
        options: of ``MultiheadAttention`` and of encodings, over those of the pretrained function.
    Returns: the model, whose class is now a converted one. ``save_pretrained`` and, after
        ``import lrpe_fairseq.hf``, ``AutoModelForCausalLM.from_pretrained`` work as before. Its
        ``config.lrpe`` has the options of every converted layer; an exported model keeps its class,
        and ``config.attention`` has them.
    Raises: ChoiceError for a model that our attention does not represent, with all reasons, for
        layers that do not exist or are converted already, for options that do not fit, and for
        adapters whose weights would be lost. The model is then unchanged.
    """
    config = model.config
    if isinstance(model, LRPEForCausalLM):
        return convert_exported(model, _chosen(config.num_hidden_layers, layers, ()), options)
    found = reasons(config)
    refuse_reasons(config, found)
    _require_causal_lm(model)
    done = {int(layer) for layer in getattr(config, "lrpe", None) or {}}
    chosen = _chosen(config.num_hidden_layers, layers, done)
    for layer in chosen:
        old = getattr(layers_of(model.base_model, config)[layer], family_of(config).attention)
        require_plain(maps_of(old))
    pretrained = plan(config)
    wanted = {layer: changed(pretrained[layer], options) for layer in chosen}
    if chosen:
        build(config, wanted[chosen[0]])  # refuse before anything changes
    replace(model, wanted, copy=True)
    _become_converted(model)
    kept = getattr(config, "lrpe", None) or {}
    config.lrpe = kept | {str(layer): own for layer, own in wanted.items()}
    return model


def _chosen(count: int, layers: Iterable[int] | None, done: Collection[int]) -> list[int]:
    """Return the layers to convert of ``count``, of which ``done`` are converted already."""
    chosen = sorted(set(range(count) if layers is None else layers))
    if again := sorted({*chosen} & {*done}):
        raise ChoiceError(
            f"layers {', '.join(map(str, again))} are converted already: load the original model, "
            "or name other layers"
        )
    if not chosen or chosen[0] < 0 or chosen[-1] >= count:
        raise ChoiceError(f"the model has layers 0 to {count - 1}: name some of them")
    return chosen


def _require_causal_lm(model: PreTrainedModel) -> None:
    """Refuse a model without a head of a language model, or with another head."""
    stock = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[
        transformers.CONFIG_MAPPING[kind_of(model.config)]
    ]
    if not isinstance(model, stock):
        raise ChoiceError(
            f"{type(model).__name__} cannot be converted: load the model as {stock.__name__}"
        )


def _become_converted(model: PreTrainedModel) -> None:
    """Give a model and its configuration the classes with which it is saved and loaded."""
    if isinstance(model, ConvertedModel):
        return
    config, kind = converted_classes(kind_of(model.config))
    model.config.__class__, model.__class__ = config, kind
    model.config.architectures = [kind.__name__]
    if getattr(model, "hf_quantizer", None) is not None:  # of GGUF, whose weights are numbers now
        model.hf_quantizer = None
        del model.config.quantization_config
        model.is_quantized = False
