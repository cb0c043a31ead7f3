"""Self- and cross-attention of one layer, from the options of a model."""

import logging
from typing import Any

from fairseq.modules.quant_noise import quant_noise

from lrpe_fairseq import patterns
from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings.layers import encoding_options, sizes_of_heads
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.models.checks import (
    warn_about_absolute_positions,
    warn_about_ignored,
    warn_about_longer_texts,
    warn_about_unread,
)
from lrpe_fairseq.patterns import at_layer

logger = logging.getLogger(__name__)


def build_attention(
    options: Any, cfg: Any, embed_dim: int, num_heads: int, *, causal: bool, layer: int
) -> MultiheadAttention:
    """Build the self-attention of one layer.

    options: an ``AttentionOptions``. cfg: the TransformerConfig of the whole model. Each layer
    draws its own fixed random parts, as in the authors' code: the seed of the encoding is
    1000 ``encoding_seed`` + ``layer``.
    Raises: ChoiceError for options that attention or encoding refuse.
    """
    attention = MultiheadAttention(
        embed_dim,
        num_heads,
        causal=causal,
        qkv_bias=getattr(options, "qkv_bias", True),  # an option of classifiers
        **_settings(options, cfg, layer),
    )
    warn_about_absolute_positions(attention.encoding, cfg)
    warn_about_longer_texts(attention)
    warn_about_ignored(options, cfg)
    return attention


def build_cross_attention(options: Any, cfg: Any, layer: int) -> CrossAttention:
    """Build the cross-attention of one decoder layer; see :func:`build_attention`.

    Raises: ChoiceError for options that attention or encoding refuse.
    """
    attention = CrossAttention(
        cfg.decoder.embed_dim,
        cfg.decoder.attention_heads,
        memory_dim=cfg.encoder.embed_dim,
        **_settings(options, cfg, layer),
    )
    warn_about_absolute_positions(attention.encoding, cfg)
    return attention


def _settings(options: Any, cfg: Any, layer: int) -> dict[str, Any]:
    """Return the arguments that self- and cross-attention of one layer take from the options."""
    noise = cfg.quant_noise.pq
    block = cfg.quant_noise.pq_block_size
    return {
        "attention_type": at_layer(options, "attention_type", layer),
        "position_encoding": at_layer(options, "position_encoding", layer),
        "dropout": cfg.attention_dropout,
        "normalizer": at_layer(options, "attention_normalizer", layer),
        "window": _window(at_layer(options, "attention_window", layer)),
        "parts": getattr(options, "attention_parts", "none"),  # older checkpoints lack it
        **sizes_of_heads(options),
        "seed": options.encoding_seed * 1000 + layer,  # layers below 1,000 share no seed
        "options": encoding_options(options, layer),
        "wrap_linear": lambda linear: quant_noise(linear, noise, block),
    }


def _window(text: str) -> int | None:
    """Return the number of tokens of ``--attention-window``, or None for all."""
    if not text.isdecimal():
        raise ChoiceError(f"--attention-window is a number of tokens, or 0 for all, not {text!r}")
    return int(text) or None


def check_stack(options: Any, layers: int, section: str = "") -> None:
    """Check the options of attention of a stack, and warn of those that no layer reads.

    The log says which layers have which values, if a pattern does not divide the stack.
    section: "encoder", "decoder" or "cross", of ``lrpe_transformer``.
    Raises: ChoiceError for a pattern with more values than layers.
    """
    for name in patterns.OPTIONS:
        pattern = str(getattr(options, name, "0"))  # older checkpoints lack some
        patterns.check_length(f"{section}_{name}".removeprefix("_"), pattern, layers)
        if layers % len(patterns.values(pattern)):
            option = name.replace("_", "-")
            of_layers = ", ".join(patterns.over_layers(pattern, layers))
            logger.info("%s %s of %d layers: %s", option, pattern, layers, of_layers)
    warn_about_unread(options)
