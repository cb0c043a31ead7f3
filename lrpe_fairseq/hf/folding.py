"""The weights of a converted model in the attention of transformers again."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.hf.converted import ConvertedModel, release
from lrpe_fairseq.hf.families import (
    FAMILIES,
    Options,
    interleaved,
    kind_of,
    layers_of,
    plan,
    reordered,
    require_plain,
    sizes,
)

OF_CONVERTED = ("lrpe", "auto_map")
"""What the configuration of a converted model has beside that of the original."""


def fold_back(model: PreTrainedModel) -> PreTrainedModel:
    """Give a converted model the attention of transformers again, with its weights, in place.

    So a model that was trained after a conversion to the same encoding is saved in its original
    format, which needs no ``lrpe_fairseq`` to load.

    >>> model = hf.fold_back(hf.convert(model))
    >>> model.save_pretrained("stock")

    Returns: the model, of the class of transformers that was converted.
    Raises: ChoiceError for a model that was not converted, and for layers with other attention
        than the pretrained one or with adapters. The model is then unchanged.
    """
    if not isinstance(model, ConvertedModel):
        raise ChoiceError(f"{type(model).__name__} is no converted model: convert it first")
    config = model.config
    kind = kind_of(config)
    done = {int(layer): own for layer, own in config.lrpe.items()}
    _require_pretrained(done, plan(config))
    layers, name = layers_of(model.base_model, config), FAMILIES[kind].attention
    for index in done:
        require_plain(_maps(getattr(layers[index], name).attention))
    stock = transformers.CONFIG_MAPPING[kind]
    config.__class__, model.__class__ = stock, transformers.MODEL_FOR_CAUSAL_LM_MAPPING[stock]
    for index in done:
        converted = getattr(layers[index], name)
        setattr(layers[index], name, _stock(layers[index], index, converted, config))
    release(model.base_model)
    for own in OF_CONVERTED:
        if hasattr(config, own):
            delattr(config, own)
    config.architectures = [type(model).__name__]
    return model


def _require_pretrained(done: dict[int, Options], pretrained: dict[int, Options]) -> None:
    """Refuse layers whose options differ from those of the pretrained function."""
    other = {layer for layer, own in done.items() if own != pretrained[layer]}
    if other:
        raise ChoiceError(
            f"layers {', '.join(map(str, sorted(other)))} have another attention than the "
            "pretrained model, which transformers cannot compute: save the model as it is"
        )


def _stock(
    layer: nn.Module, index: int, converted: nn.Module, config: PretrainedConfig
) -> nn.Module:
    """Return attention of transformers with the weights of a converted layer."""
    name, attention = FAMILIES[kind_of(config)].attention, converted.attention
    weight = attention.out_proj.weight
    made = getattr(type(layer)(config, index), name).to(weight.device, weight.dtype)
    put_back(made, attention, config)
    return made.train(converted.training)


def _maps(attention: MultiheadAttention) -> tuple[nn.Module, ...]:
    return attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj


@torch.no_grad()
def put_back(stock: nn.Module, attention: MultiheadAttention, config: PretrainedConfig) -> None:
    """Copy the weights of our attention to that of transformers; see ``converted.copy_weights``."""
    back = interleaved(config).argsort()
    maps = _maps(attention)
    for kind in ("weight", "bias"):
        q, k, v, out = (getattr(one, kind) for one in maps)
        if q is not None:
            q, k = reordered(q, back), reordered(k, back)
        _fill(stock, kind, (q, k, v, out), config)
    if hasattr(stock, "q_norm"):
        stock.q_norm.weight.copy_(attention.q_norm.weight[back])
        stock.k_norm.weight.copy_(attention.k_norm.weight[back])


def _fill(
    stock: nn.Module, kind: str, given: tuple[Tensor | None, ...], config: PretrainedConfig
) -> None:
    """Write weights or biases of q, k, v and the output to attention of transformers."""
    *qkv, out = given
    if hasattr(stock, "q_proj"):
        places = [stock.q_proj, stock.k_proj, stock.v_proj, stock.o_proj]
        pairs: list[tuple[nn.Module, Any]] = list(zip(places, given, strict=True))
    elif hasattr(stock, "query_key_value"):
        fused = None if qkv[0] is None else by_head(qkv, sizes(config)[0])
        pairs = [(stock.query_key_value, fused), (stock.dense, out)]
    else:  # GPT-2, whose Conv1D holds the transposed weights
        pairs = [(stock.c_attn, torch.cat(qkv).T), (stock.c_proj, out.T)]
    for place, value in pairs:
        if value is not None:
            getattr(place, kind).copy_(value)


def by_head(qkv: list[Tensor], heads: int) -> Tensor:
    """Return the rows of q, k and v with those of one head together, as in GPT-NeoX."""
    return torch.stack([rows.unflatten(0, (heads, -1)) for rows in qkv], 1).flatten(0, 2)
