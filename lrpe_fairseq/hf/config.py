"""The configuration of an exported model."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from lrpe_fairseq.encodings import EncodingOptions
from lrpe_fairseq.errors import ChoiceError

ACTIVATIONS = ("relu", "gelu", "gelu_accurate", "tanh", "linear")
"""Activations of the feed-forward network, by fairseq's names."""
POSITIONS = ("sinusoidal", "learned", "none")
"""Absolute positions that are added to the embeddings."""
OF_ATTENTION = (
    "attention_type",
    "position_encoding",
    "normalizer",
    "window",
    "parts",
    "seed",
    "qkv_bias",
    "out_bias",
    "num_kv_heads",
    "head_dim",
    "score_scale",
)
"""Options of a layer that are arguments of ``MultiheadAttention``; the rest is its encoding's."""
LAYER = {"attention_type": "linear", "position_encoding": "lrpe-type2"}
"""Attention of a layer whose options are not given."""


class LRPEConfig(PretrainedConfig):
    """The options of ``lrpe_lm``, or of ``lrpe_roberta`` with ``causal=False``.

    Defaults are those of ``lrpe_lm`` (LRPE, Table 7).

    >>> config = LRPEConfig(
    ...     vocab_size=1000,
    ...     num_hidden_layers=2,
    ...     attention=[
    ...         {"attention_type": "linear", "position_encoding": "fox", "fox_bias": 3.0},
    ...         {"attention_type": "softmax", "position_encoding": "rope", "window": 64},
    ...     ],
    ... )

    Args:
        vocab_size: number of symbols of the dictionary.
        hidden_size: C. num_hidden_layers: number of layers. num_attention_heads: H.
        intermediate_size: width of the feed-forward network.
        hidden_act: one of :data:`ACTIVATIONS`.
        attention: options of the attention of every layer that differ from the defaults, by the
            names of ``MultiheadAttention`` and of the encodings; ``fidelity`` is a list.
        encoding_seed: s; the encoding of layer i has the seed 1000 s + i.
        causal: False for a bidirectional encoder.
        absolute_positions: one of :data:`POSITIONS`.
        max_position_embeddings: tokens of a text in training, and the number of learned positions.
        document_boundary: index of the symbol that begins a document; a token attends to its own
            document only. None for one document.
        embedding_size, output_size: widths of embeddings and of the input of the output layer, if
            they differ from ``hidden_size``.
        scale_embedding: True to multiply embeddings by the square root of C.
        embedding_norm: True for a LayerNorm after the embeddings.
        normalize_before: True for a LayerNorm before each block, False for one after it.
        final_norm: True for a LayerNorm after the last layer.
        scale_attn, scale_fc, scale_heads, scale_resids: parts of NormFormer.
        dropout, attention_dropout, activation_dropout: probabilities, in training only.
        tie_word_embeddings: True if the output layer has the weights of the embeddings.
    Raises: ChoiceError for an unknown choice, the options of another number of layers, or
        ``angle_lr_scale``. Other options of attention are checked when the model is built.
    """

    model_type = "lrpe"

    vocab_size: int = 10000
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    hidden_act: str = "relu"
    attention: list[dict[str, Any]] | None = None
    encoding_seed: int = 0
    causal: bool = True
    absolute_positions: str = "sinusoidal"
    max_position_embeddings: int = 512
    document_boundary: int | None = None
    embedding_size: int | None = None
    output_size: int | None = None
    scale_embedding: bool = True
    embedding_norm: bool = False
    normalize_before: bool = True
    final_norm: bool = True
    scale_attn: bool = False
    scale_fc: bool = False
    scale_heads: bool = False
    scale_resids: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    pad_token_id: int | None = 1
    bos_token_id: int | None = 2
    eos_token_id: int | None = 2
    tie_word_embeddings: bool = True

    def __init__(self, **given: Any) -> None:
        own = LRPEConfig.__annotations__
        for name in own:
            setattr(self, name, given.pop(name, getattr(LRPEConfig, name)))
        if self.attention is None:
            self.attention = [dict(LAYER) for _ in range(self.num_hidden_layers)]
        _check(self)
        special = ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
        super().__init__(**{name: getattr(self, name) for name in special}, **given)


OF_TRAINING = frozenset({"angle_lr_scale"})
"""Options of encodings that change no function, only how fairseq's optimizers train it."""


def refuse_of_training(options: Mapping[str, Any]) -> None:
    """Raise ChoiceError for options of fairseq's trainings, whose parameters have other names."""
    if options.get("angle_lr_scale", 1) != 1:
        raise ChoiceError(
            "angle_lr_scale is for fairseq's optimizers: leave it out, and give the angles a group "
            "of parameters with a learning rate of its own"
        )


def _check(config: LRPEConfig) -> None:
    choices = ("hidden_act", ACTIVATIONS), ("absolute_positions", POSITIONS)
    for name, known in choices:
        if getattr(config, name) not in known:
            raise ChoiceError(
                f"unknown {name} {getattr(config, name)!r}; choose one of {', '.join(known)}"
            )
    if len(config.attention) != config.num_hidden_layers:
        raise ChoiceError(
            f"attention has the options of {len(config.attention)} layers, but "
            f"num_hidden_layers is {config.num_hidden_layers}: give one entry for every layer"
        )
    for own in config.attention:
        refuse_of_training(own)
        _check_scaled_heads(config, own.get("head_dim"))


def _check_scaled_heads(config: LRPEConfig, head_dim: int | None) -> None:
    """Refuse ``scale_heads`` where the output of attention is not as wide as its heads together."""
    heads, width = config.num_attention_heads, config.hidden_size
    if config.scale_heads and head_dim and head_dim * heads != width:
        raise ChoiceError(
            f"scale_heads scales {heads} equal pieces of the width {width}, which are no heads of "
            f"head_dim {head_dim}: leave one of the two out"
        )


def attention_arguments(config: LRPEConfig, layer: int) -> dict[str, Any]:
    """Return the arguments of the ``MultiheadAttention`` of a layer, without its sizes."""
    given = {**LAYER, **config.attention[layer]}
    found = {name: given.pop(name) for name in OF_ATTENTION if name in given}
    found.setdefault("seed", config.encoding_seed * 1000 + layer)
    fidelity = frozenset(given.pop("fidelity", ()))
    return {
        **found,
        "causal": config.causal,
        "dropout": config.attention_dropout,
        "options": EncodingOptions(fidelity=fidelity, **given),
    }
