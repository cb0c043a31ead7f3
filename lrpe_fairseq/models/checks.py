"""Checks of fairseq's options when a model is built.

The functions named ``check_...`` refuse combinations that would fail later or be ignored. They
raise ChoiceError with one sentence.
"""

import logging
from enum import Enum
from functools import cache
from numbers import Real
from typing import Any

from omegaconf import OmegaConf
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
from lrpe_fairseq.errors import ChoiceError, refuse
from lrpe_fairseq.models.pruning import as_built, is_ours
from lrpe_fairseq.patterns import OPTIONS, canonical, over_layers, values

logger = logging.getLogger(__name__)


def check_language_model(options: Any) -> None:
    """Check the flat options of ``lrpe_lm``."""
    if options.adaptive_input and not options.adaptive_input_cutoff:
        raise ChoiceError("--adaptive-input requires --adaptive-input-cutoff")
    if options.tie_adaptive_weights:
        check_tied_adaptive(options)
    check_shared_output(options, options.decoder_input_dim, options.decoder_output_dim)
    check_xformers(options.decoder_xformers_att_config)
    widths = (options.decoder_embed_dim, options.decoder_ffn_embed_dim)
    check_quantization_blocks(options.quant_noise_pq, options.quant_noise_pq_block_size, *widths)
    dims = ("embed_dim", "input_dim", "output_dim", "ffn_embed_dim", "attention_heads")
    check_sizes(options, "decoder_layers", *(f"decoder_{name}" for name in dims))
    check_sizes(options, "max_target_positions")
    check_probabilities(options)


def check_translation(cfg: Any, task: Any) -> None:
    """Check the nested options of ``lrpe_transformer``."""
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
    """Check that ``--tree-embedding`` gets positions of nodes and is the only embedding of them."""
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
    """Refuse encodings of sequences for tokens whose positions are nodes of trees."""
    if not has_nodes(task):
        return
    for encoding in model.modules():
        if isinstance(encoding, Encoding) and not encoding.reads_nodes:
            raise ChoiceError(
                f"position encoding {encoding.name!r} would read nodes of trees as places of a "
                "sequence: choose ape-tree or none, or leave out --node-positions"
            )


STOCK = {
    "attention_type": "softmax",
    "position_encoding": "none",
    "attention_window": "0",
    "attention_parts": "none",
    "kv_heads": "0",
    "head_dim": "0",
    "out_bias": "True",
    "score_scale": "0.0",
}
"""The options of cross-attention that is fairseq's own."""


def is_stock_cross(options: Any, layer: int) -> bool:
    """True if the options of cross-attention ask for fairseq's own. None stands for defaults."""
    if options is None:
        return True
    given = {name: str(getattr(options, name, usual)) for name, usual in STOCK.items()}
    by_layer = {
        name: over_layers(given[name], layer + 1)[layer] for name in OPTIONS if name in given
    }
    return {**given, **by_layer} == STOCK


def has_stock_cross(cfg: Any) -> bool:
    """True if cross-attention is fairseq's own in every layer of ``lrpe_transformer``."""
    options = getattr(cfg, "cross", None)
    return all(is_stock_cross(options, layer) for layer in range(cfg.decoder.layers))


def check_cross_attention(cfg: Any, task: Any) -> None:
    """Refuse options of a cross-attention that does not exist, or that has no weights to train."""
    options, layers = getattr(cfg, "cross", None), cfg.decoder.layers
    if has_stock_cross(cfg):
        return
    if cfg.no_cross_attention:
        raise ChoiceError(
            "--no-cross-attention removes the layers that the --cross-... options would change: "
            "remove one or the other"
        )
    aligned = over_layers(options.attention_type, layers)[-1]
    if aligned == "linear" and getattr(task.cfg, "load_alignments", False):
        raise ChoiceError(
            "--load-alignments trains attention weights, which linear cross-attention does not "
            "have: use --cross-attention-type softmax"
        )


def check_tied_adaptive(options: Any) -> None:
    """Check ``--tie-adaptive-weights``. fairseq asserts its conditions without a message."""
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
    """Check that output weights shared with the embeddings have the same width."""
    every = getattr(options, "share_all_embeddings", False)
    shared = options.share_decoder_input_output_embed or every
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
        if size is not None:
            check_number(_flag(section, name), int(size), least=1, most=LONGEST)


PROBABILITIES = (
    *("dropout", "attention_dropout", "activation_dropout", "pooler_dropout", "drop_path"),
    *("layerdrop", "encoder_layerdrop", "decoder_layerdrop"),
)
"""Options that are probabilities of dropping something, at least 0 and less than 1."""


def check_probabilities(options: Any, section: str = "") -> None:
    """A probability of dropping something is at least 0 and less than 1."""
    for name in PROBABILITIES:
        value = float(getattr(options, name, 0) or 0)
        if not 0 <= value < 1:
            raise ChoiceError(
                f"{_flag(section, name)} must be at least 0 and less than 1, not {value:g}"
            )


def check_pruning_of_heads(options: Any) -> None:
    """Refuse AdaPrune's penalty on heads where keys and values have fewer heads than queries."""
    if getattr(options, "mha_reg_scale_factor", 0) and getattr(options, "kv_heads", 0):
        raise ChoiceError(
            "--mha-reg-scale-factor prunes attention heads with their keys and values: leave "
            "--kv-heads out"
        )


def _flag(section: str, name: str) -> str:
    return flag_of(f"{section}_{name}".removeprefix("_"))


def check_xformers(config: str | None) -> None:
    """Refuse a configuration of xFormers, which LRPE self-attention would ignore."""
    if config:
        raise ChoiceError("xFormers attention is not supported: remove xformers-att-config")


def check_quantization_blocks(probability: float, block: int, *widths: int) -> None:
    """Check that the blocks of columns of quantization noise divide the widths."""
    check_number("--quant-noise-pq", probability, Real, least=0, most=1)
    check_number("--quant-noise-pq-block-size", block, least=1, most=LONGEST)
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
    if attention.has_denominators and encoding.turns and encoding.forget_gate is None:
        _warn_once(
            f"position encoding {encoding.name!r} with attention normalizer 'rotated' can fail on "
            "texts longer than those of training: for these pass --attention-normalizer content "
            "(docs/choosing.md)"
        )


def warn_about_ignored(options: Any, cfg: Any) -> None:
    """Warn once about options that no layer's attention has."""
    types = set(values(options.attention_type))
    if types == {"linear"} and cfg.attention_dropout:
        _warn_once("--attention-dropout is ignored: linear attention has no weights to drop")
    if types == {"softmax"} and set(values(options.attention_normalizer)) != {"rotated"}:
        _warn_once("--attention-normalizer is ignored: only linear attention has a denominator")
    if getattr(options, "context_factor", 0) == 1 and str(options.context_scaling) != "none":
        _warn_once(f"--context-scaling {options.context_scaling} needs --context-factor above 1")


def warn_about_other_attention(model: Any, overrides: dict[str, Any]) -> None:
    """Warn if a checkpoint is read with another attention or encoding than it was trained with.

    model: the options of its model before the overrides.
    """
    for name, trained in _attention(model).items():
        given = overrides.get(name.replace(".", "_"), trained)
        if name.endswith(("attention_type", "position_encoding")) and str(given) != trained:
            logger.warning("the model was trained with %s=%s, not %s", name, trained, given)


def warn_about_yarn(path: str, cfg: Any, overrides: dict[str, Any] | None) -> None:
    """Warn if a checkpoint was saved with context scaling "yarn", whose meaning has changed.

    cfg: its configuration, with ``overrides`` (by flat name) applied. An option that they set says
    nothing about the checkpoint.
    """
    for name, saved in _attention(cfg.get("model") or {}).items():
        overridden = overrides is not None and name.replace(".", "_") in overrides
        if name.endswith("context_scaling") and saved == RENAMED[0] and not overridden:
            logger.warning(
                "%s has %s=yarn, which is the ramp of the authors' code now and was the formula as "
                "printed: if it was trained with the latter, load it with %s=yarn-printed",
                *(path, name, name),
            )


RENAMED = "yarn", "yarn-printed"
"""A context scaling of older checkpoints, and its present name."""


def warn_about_unread(options: Any) -> None:
    """Warn once about options of methods that no layer of a stack has."""
    for name, value in unread_options(options).items():
        _warn_once(
            f"{name}={value} is ignored: no layer has a position encoding that reads it, only "
            f"{options.position_encoding}"
        )


def unread_options(options: Any) -> dict[str, Any]:
    """Return the options of encodings that differ from their defaults and that no layer reads.

    options: those of attention in one stack. Raises: ChoiceError for an unknown encoding.
    """
    read = frozenset().union(*map(options_read_by, values(options.position_encoding)))
    known = options_of_encodings().items()
    given = {name: getattr(options, name, own.default) for name, own in known if name not in read}
    defaults = {name: own.default for name, own in known}
    return {name: value for name, value in given.items() if _plain(value) != defaults[name]}


def _plain(value: Any) -> Any:
    """Return the text of a choice, and any other value as it is."""
    return str(value) if isinstance(value, Enum) else value


_warn_once = cache(logger.warning)


OF_ATTENTION = (
    "attention", "encoding", "fidelity", "grid", "positional_embeddings", "memory_length",
    "document_boundary", "kv_heads", "head_dim", "out_bias", "score_scale",
)  # fmt: skip
"""Parts of the names of options that choose a model's attention, beside those of encodings."""


WITHOUT_WEIGHTS = ("memory_length", "document_boundary")
"""Options of attention that no weight depends on."""


def check_resumed(path: str, before: Any, now: Any) -> None:
    """Refuse to resume a training with another encoding, attention, memory, document boundary,
    size of images or number of learned positions. Options that nothing reads may differ.

    before, now: the configurations of the checkpoint and of this training.
    """
    trained, wanted = (
        attention | _image_size(cfg.get("task")) | _learned_positions(cfg)
        for attention, cfg in zip(_attentions(before, now), (before, now), strict=True)
    )
    had, has = _differences(trained, wanted)
    if had:
        refuse(
            f"{path} was trained with {had}; this training has {has}: choose another --save-dir, "
            "or if the weights fit, start from them with --finetune-from-model"
        )


def _read(found: dict[str, str]) -> dict[str, str]:
    """Return the options of :func:`_attention` that a part of the model reads."""
    own, kept = options_of_encodings(), {}
    stock = {**STOCK, **{n: found[f"cross.{n}"] for n in STOCK if f"cross.{n}" in found}} == STOCK
    for name, value in found.items():
        section, _, last = name.rpartition(".")
        names = values(found.get(f"{section}.position_encoding".removeprefix("."), "none"))
        unread = last in own and all(last not in options_read_by(name) for name in names)
        if not unread and not (stock and section == "cross" and last not in STOCK):
            kept[name] = value
    return kept


def check_started(path: str, before: Any, now: Any) -> None:
    """Refuse to start a training from weights of another encoding or attention, unless it says so.

    ``--finetune-from-model`` says so, and gets a warning. ``--restore-file`` with
    ``--reset-optimizer`` does not. Memory and document boundary may be others, because no weight
    depends on them. before, now: as in :func:`check_resumed`.
    """
    trained, wanted = (
        {name: value for name, value in found.items() if name not in WITHOUT_WEIGHTS}
        for found in _attentions(before, now)
    )
    had, has = _differences(trained, wanted)
    if not had:
        return
    said = f"{path} was trained with {had}; this training has {has}"
    if path == now["checkpoint"]["finetune_from_model"]:
        logger.warning("%s", said)
        return
    refuse(
        f"{said}: train with the options of the checkpoint, or if the weights fit, start from them "
        "with --finetune-from-model instead of --restore-file"
    )


def _attentions(before: Any, now: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options of attention of two configurations, those of the layers that were built.

    They are empty if one of the two is not of a model of this package.
    """
    models = _as_dict(before["model"] or {}), _as_dict(now["model"] or {})
    if not all(map(is_ours, models)):
        return {}, {}
    trained, wanted = (_read(_attention(model)) for model in as_built(*models))
    return trained, wanted


def _differences(trained: dict[str, str], wanted: dict[str, str]) -> tuple[str, str]:
    """Return the options that both have with different values, as text; empty if there are none."""
    other = sorted(
        name
        for name in trained.keys() & wanted.keys()
        if trained[name] != wanted[name] and (trained[name], wanted[name]) != RENAMED
    )
    had, has = (", ".join(f"{n}={x[n]}" for n in other) for x in (trained, wanted))
    return had, has


def check_unfinished(path: str, state: dict[str, Any], now: Any) -> None:
    """Refuse to go on with a training that has all its updates, and had another seed or rate.

    Nothing would be trained, and every job of a sweep in one folder would return the first model.
    state: of the checkpoint. now: the configuration of this training.
    """
    last = now["optimization"]["max_update"]
    if not 0 < last <= state["optimizer_history"][-1]["num_updates"]:
        return
    had, has = (
        {"common.seed": cfg["common"]["seed"], "optimization.lr": list(cfg["optimization"]["lr"])}
        for cfg in (state["cfg"], now)
    )
    if had != has:
        had, has = (", ".join(f"{n}={x}" for n, x in found.items()) for found in (had, has))
        refuse(
            f"{path} has all its updates with {had}, so nothing would be trained with {has}: "
            "choose another --save-dir (checkpoint.save_dir) for every training"
        )


def _image_size(task: Any) -> dict[str, str]:
    """Return the size of images; {} for a task without one."""
    size = task.get("image_size") if isinstance(task, dict) else getattr(task, "image_size", None)
    return {} if size is None else {"image_size": str(size)}


def _learned_positions(cfg: Any) -> dict[str, str]:
    """Return the longest input of an encoder with learned positions; {} for other models."""
    model, task = (_as_dict(cfg.get(part) or {}) for part in ("model", "task"))
    if not model.get("encoder_learned_pos") or model.get("no_token_positional_embeddings"):
        return {}
    given = (model, "max_positions"), (task, "max_positions"), (task, "tokens_per_sample")
    longest = next((part[name] for part, name in given if part.get(name)), None)
    return {"max_positions": str(longest)}


def _as_dict(options: Any) -> dict[str, Any]:
    """Return a section of a configuration, or flat options, as a dictionary."""
    if OmegaConf.is_config(options):
        return OmegaConf.to_container(options, resolve=True, enum_to_str=True)
    return options if isinstance(options, dict) else vars(options)


def _attention(options: Any, section: str = "") -> dict[str, str]:
    """Return the options of a model that choose its attention, by dotted name."""
    found, own = {}, options_of_encodings()
    for name, value in _as_dict(options).items():
        if isinstance(value, dict):
            found |= _attention(value, f"{section}{name}.")
        elif name in own or (any(x in name for x in OF_ATTENTION) and "dropout" not in name):
            found[section + name] = str(value)
            if name in OPTIONS:
                found[section + name] = canonical(value)
    return found
