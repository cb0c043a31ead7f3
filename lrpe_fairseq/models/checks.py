"""Checks of fairseq's options when a model is built.

The functions named ``check_...`` refuse combinations that would fail later or be ignored. They
raise ChoiceError with one sentence.
"""

import logging
from dataclasses import fields
from enum import Enum
from functools import cache
from numbers import Real
from typing import Any

from torch import nn

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import (
    LONGEST,
    Encoding,
    check_number,
    options_of_encodings,
    options_read_by,
)
from lrpe_fairseq.encodings.core.options import flag_of
from lrpe_fairseq.encodings.rotations.angles import AngleOptions
from lrpe_fairseq.encodings.rotations.scaling import BY_TEXT, RotationOptions
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.patterns import OPTIONS, over_layers, values
from lrpe_fairseq.stock import STOCK

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)  # every layer is checked, and all say the same


def check_language_model(options: Any) -> None:
    """Check the flat options of ``lrpe_lm``.

    Raises: ChoiceError, which names the option and what it needs.
    """
    if options.adaptive_input and not options.adaptive_input_cutoff:
        raise ChoiceError("--adaptive-input requires --adaptive-input-cutoff")
    if options.tie_adaptive_weights:
        check_tied_adaptive(options)
    check_shared_output(options, options.decoder_input_dim, options.decoder_output_dim)
    check_xformers(options.decoder_xformers_att_config)
    widths = (options.decoder_embed_dim, options.decoder_ffn_embed_dim)
    check_quantization_blocks(options.quant_noise_pq, options.quant_noise_pq_block_size, *widths)
    check_sizes(
        options,
        "decoder_layers",
        "decoder_embed_dim",
        "decoder_input_dim",
        "decoder_output_dim",
        "decoder_ffn_embed_dim",
        "decoder_attention_heads",
        "max_target_positions",
    )
    check_probabilities(options)
    check_scaled_heads(options)


def check_translation(cfg: Any, task: Any) -> None:
    """Check the nested options of ``lrpe_transformer``.

    Raises: ChoiceError, which names the option and what it needs.
    """
    if cfg.cross_self_attention:
        raise ChoiceError(
            "--cross-self-attention is not supported: LRPE self-attention cannot attend to the "
            "encoder's output"
        )
    check_cross_attention(cfg, task)
    check_tree_embedding(cfg, task)
    check_shared_output(cfg, cfg.decoder.embed_dim, cfg.decoder.output_dim)
    check_sizes(cfg, "max_source_positions", "max_target_positions")
    check_probabilities(cfg)
    for name, side in (("encoder", cfg.encoder), ("decoder", cfg.decoder)):
        sizes = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")
        check_sizes(side, *sizes, section=name)
        check_probabilities(side, section=name)
        check_xformers(side.xformers_att_config)
        widths = (side.embed_dim, side.ffn_embed_dim)
        check_quantization_blocks(cfg.quant_noise.pq, cfg.quant_noise.pq_block_size, *widths)


def check_tree_embedding(cfg: Any, task: Any) -> None:
    """Check that ``--tree-embedding`` gets positions of nodes and is the only embedding of them.

    Raises: ChoiceError for a task without such positions, and with absolute positions.
    """
    if not getattr(cfg, "tree_embedding", False):
        return
    if not cfg.no_token_positional_embeddings:
        raise ChoiceError(
            "--tree-embedding replaces absolute positions: pass --no-token-positional-embeddings"
        )
    if not has_nodes(task):
        raise ChoiceError(
            "--tree-embedding needs the positions of nodes: pass --task lrpe_transduction "
            "--node-positions"
        )


def has_nodes(task: Any) -> bool:
    """True for a task with ``--node-positions``."""
    return getattr(getattr(task, "cfg", None), "node_positions", False)


def check_node_positions(model: nn.Module, task: Any) -> None:
    """Refuse encodings of sequences for tokens whose positions are nodes of trees.

    Raises: ChoiceError, which names the encoding.
    """
    if not has_nodes(task):
        return
    # after the model is built, so that wrappers around an encoding are seen as well
    for encoding in model.modules():
        if isinstance(encoding, Encoding) and not encoding.reads_nodes:
            raise ChoiceError(
                f"position encoding {encoding.name!r} would read nodes of trees as places of a "
                "sequence: choose ape-tree or none, or leave out --node-positions"
            )


def is_stock_cross(options: Any, layer: int) -> bool:
    """True if the options of cross-attention ask for fairseq's own. None stands for defaults."""
    if options is None:
        return True
    chosen = {name: str(getattr(options, name, usual)) for name, usual in STOCK.items()}
    patterns = [name for name in OPTIONS if name in chosen]
    of_layer = {name: over_layers(chosen[name], layer + 1)[layer] for name in patterns}
    return {**chosen, **of_layer} == STOCK


def has_stock_cross(cfg: Any) -> bool:
    """True if cross-attention is fairseq's own in every layer of ``lrpe_transformer``."""
    options = getattr(cfg, "cross", None)
    return all(is_stock_cross(options, layer) for layer in range(cfg.decoder.layers))


def check_cross_attention(cfg: Any, task: Any) -> None:
    """Refuse options of a cross-attention that does not exist, or that has no weights to train.

    Raises: ChoiceError, which names the options that exclude each other.
    """
    if has_stock_cross(cfg):
        return
    if cfg.no_cross_attention:
        raise ChoiceError(
            "--no-cross-attention removes the layers that the --cross-... options would change: "
            "remove one or the other"
        )
    aligned = over_layers(cfg.cross.attention_type, cfg.decoder.layers)[-1]  # as fairseq chooses
    if aligned == "linear" and getattr(task.cfg, "load_alignments", False):
        raise ChoiceError(
            "--load-alignments trains attention weights, which linear cross-attention does not "
            "have: use --cross-attention-type softmax"
        )


def check_tied_adaptive(options: Any) -> None:
    """Check ``--tie-adaptive-weights``. fairseq asserts its conditions without a message.

    Raises: ChoiceError, which names the conditions that do not hold.
    """
    conditions = {
        "--adaptive-input": options.adaptive_input,
        "equal cutoffs of adaptive input and softmax": options.adaptive_input_cutoff
        == options.adaptive_softmax_cutoff,
        "equal factors of adaptive input and softmax": options.adaptive_input_factor
        == options.adaptive_softmax_factor,
        "equal --decoder-input-dim and --decoder-output-dim": options.decoder_input_dim
        == options.decoder_output_dim,
    }
    missing = [condition for condition, holds in conditions.items() if not holds]
    if missing:
        raise ChoiceError(f"--tie-adaptive-weights requires {' and '.join(missing)}")


def check_shared_output(options: Any, input_dim: int, output_dim: int) -> None:
    """Check that output weights shared with the embeddings have the same width.

    Raises: ChoiceError, which has both widths.
    """
    shares_all = getattr(options, "share_all_embeddings", False)
    shared = options.share_decoder_input_output_embed or shares_all
    # an adaptive softmax has output weights of its own widths
    if shared and not options.adaptive_softmax_cutoff and int(output_dim) != int(input_dim):
        raise ChoiceError(
            f"shared input and output embeddings require equal widths, not {input_dim} and "
            f"{output_dim}: pass --no-share-decoder-input-output-embed or equal dimensions"
        )


def check_sizes(options: Any, *names: str, section: str = "") -> None:
    """Check that sizes are at least 1 and at most LONGEST; one that is not set is not checked.

    section: the part of the model, for the names of the options.
    """
    for name in names:
        size = getattr(options, name, None)
        # optional sizes have defaults that fairseq computes later
        if size is not None:
            check_number(_flag(section, name), int(size), least=1, most=LONGEST)


PROBABILITIES = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "pooler_dropout",
    "drop_path",
    "layerdrop",
    "encoder_layerdrop",
    "decoder_layerdrop",
)
"""Options that are probabilities of dropping something, at least 0 and less than 1."""


def check_probabilities(options: Any, section: str = "") -> None:
    """A probability of dropping something is at least 0 and less than 1.

    Raises: ChoiceError for a number outside [0, 1).
    """
    for name in PROBABILITIES:
        value = float(getattr(options, name, 0) or 0)  # models have some of them
        if not 0 <= value < 1:
            raise ChoiceError(
                f"{_flag(section, name)} must be at least 0 and less than 1, not {value:g}"
            )


def check_pruning_of_heads(options: Any) -> None:
    """Refuse AdaPrune's penalty on heads where keys and values have fewer heads than queries.

    Raises: ChoiceError, which names both options.
    """
    if getattr(options, "mha_reg_scale_factor", 0) and getattr(options, "kv_heads", 0):
        raise ChoiceError(
            "--mha-reg-scale-factor prunes attention heads with their keys and values: leave "
            "--kv-heads out"
        )


def check_scaled_heads(options: Any) -> None:
    """Refuse ``--scale-heads`` where the output of attention is not as wide as its heads together.

    Raises: ChoiceError, which names both options and the width that they need.
    """
    head_dim = int(getattr(options, "head_dim", 0) or 0)  # older checkpoints lack it
    if not (getattr(options, "scale_heads", False) and head_dim):
        return
    width, heads = int(options.decoder_embed_dim), int(options.decoder_attention_heads)
    if head_dim * heads != width:
        raise ChoiceError(
            f"--scale-heads scales {heads} equal pieces of the width {width}, which are no heads "
            f"of --head-dim {head_dim}: leave one of the two out"
        )


def _flag(section: str, name: str) -> str:
    return flag_of(f"{section}_{name}".removeprefix("_"))


def check_xformers(config: str | None) -> None:
    """Refuse a configuration of xFormers, which LRPE self-attention would ignore.

    Raises: ChoiceError if there is one.
    """
    if config:
        raise ChoiceError("xFormers attention is not supported: remove xformers-att-config")


def check_quantization_blocks(probability: float, block: int, *widths: int) -> None:
    """Check that the blocks of columns of quantization noise divide the widths.

    Raises: ChoiceError, which has the block and the widths.
    """
    check_number("--quant-noise-pq", probability, Real, least=0, most=1)
    check_number("--quant-noise-pq-block-size", block, least=1, most=LONGEST)
    # a linear layer is cut into blocks of columns
    if probability and any(width % block for width in widths):
        raise ChoiceError(
            f"--quant-noise-pq-block-size {block} must divide the widths of the layers, "
            + " and ".join(map(str, widths))
        )


def warn_about_absolute_positions(encoding: Encoding, cfg: Any) -> None:
    """Warn once if a model adds absolute positions to a method that is defined without them."""
    if encoding.without_absolute and not cfg.no_token_positional_embeddings:
        _warn_once(
            f"position encoding {encoding.name!r} is defined for models without absolute "
            "positions: pass --no-token-positional-embeddings"
        )


def warn_about_longer_texts(attention: MultiheadAttention) -> None:
    """Warn once if linear attention divides by the sum of rotated scores, which can vanish.

    A gate forgets distant tokens, so gated encodings are not affected.
    """
    encoding = attention.encoding
    # a rotated sum of positive scores has terms of both signs
    if attention.has_denominators and encoding.turns and encoding.forget_gate is None:
        _warn_once(
            f"position encoding {encoding.name!r} with attention normalizer 'rotated' can fail on "
            "texts longer than those of training: for these pass --attention-normalizer bounded "
            "(docs/choosing.md)"
        )


def warn_about_ignored(options: Any, cfg: Any) -> None:
    """Warn once about options that no layer's attention has."""
    types = set(values(options.attention_type))
    # in a mixed stack some layer reads each of these options
    if types == {"linear"} and cfg.attention_dropout:
        _warn_once("--attention-dropout is ignored: linear attention has no weights to drop")
    if types == {"softmax"} and set(values(options.attention_normalizer)) != {"rotated"}:
        _warn_once("--attention-normalizer is ignored: only linear attention has a denominator")
    inert = str(getattr(options, "context_scaling", "none")) not in ("none", *BY_TEXT)
    if getattr(options, "context_factor", 0) == 1 and inert:
        _warn_once(f"--context-scaling {options.context_scaling} needs --context-factor above 1")


def warn_about_unread(options: Any) -> None:
    """Warn once about options of methods that no layer of a stack has.

    Those of rotations and of angles are refused where the layers are built.
    """
    refused = {field.name for kind in (RotationOptions, AngleOptions) for field in fields(kind)}
    for name, value in unread_options(options).items():
        if name in refused:
            continue
        _warn_once(
            f"{name}={value} is ignored: no layer has a position encoding that reads it, only "
            f"{options.position_encoding}"
        )


def unread_options(options: Any) -> dict[str, Any]:
    """Return the options of encodings that differ from their defaults and that no layer reads.

    options: those of attention in one stack. Raises: ChoiceError for an unknown encoding.
    """
    # one encoding of the pattern that reads an option is enough
    read = frozenset().union(*map(options_read_by, values(options.position_encoding)))
    defaults = {name: option.default for name, option in options_of_encodings().items()}
    unread = {
        name: getattr(options, name, default)
        for name, default in defaults.items()
        if name not in read
    }
    return {name: value for name, value in unread.items() if _plain(value) != defaults[name]}


def _plain(value: Any) -> Any:
    """Return the text of a choice, and any other value as it is."""
    return str(value) if isinstance(value, Enum) else value
