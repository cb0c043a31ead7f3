"""Options that all model families share, and the attention built from them."""

import logging
import os
import re
from argparse import BooleanOptionalAction
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

import fairseq.models
import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass import utils as dataclass_utils
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.modules.quant_noise import quant_noise
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from lrpe_fairseq import patterns
from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.linear import NORMALIZERS
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.parts import PARTS
from lrpe_fairseq.compat import replace_once
from lrpe_fairseq.encodings import DEFAULT, ENCODINGS, FAMILIES, options_of_encodings
from lrpe_fairseq.encodings.core.options import POSITION_GRIDS, option
from lrpe_fairseq.encodings.fidelity import DEPARTURES
from lrpe_fairseq.encodings.layers import encoding_options, sizes_of_heads
from lrpe_fairseq.errors import ChoiceError, did_you_mean, refuse
from lrpe_fairseq.models.checks import (
    warn_about_absolute_positions,
    warn_about_ignored,
    warn_about_longer_texts,
    warn_about_unread,
)
from lrpe_fairseq.models.unread import reset_unread
from lrpe_fairseq.patterns import at_layer

IN_TURN = "; several, separated by commas, are those of the layers in turn"

logger = logging.getLogger(__name__)


def with_encoding_options(cls: type) -> type:
    """Class decorator that adds the options of all encodings; apply it before ``dataclass``."""
    for name, own in options_of_encodings().items():
        choices = own.metadata["choices"]  # fairseq's parser needs an enumeration
        cls.__annotations__[name] = ChoiceEnum(list(choices)) if choices else own.type
        setattr(cls, name, option(own.default, own.metadata["help"]))
    return cls


@dataclass
@with_encoding_options
class AttentionOptions(FairseqDataclass):
    """Options of attention and of all encodings, part of every model's configuration."""

    attention_type: str = option("linear", f"attention: linear (1+elu kernel) or softmax{IN_TURN}")
    position_encoding: str = option(
        DEFAULT,
        f"relative position encoding: {', '.join(ENCODINGS)}, or a free form: "
        + ", ".join(family.form for family in FAMILIES.values())
        + IN_TURN,
    )
    attention_normalizer: str = option(
        "rotated",
        f"denominator of linear attention: {', '.join(NORMALIZERS)} (rotated is Eq. 39 of LRPE)"
        + IN_TURN,
    )
    attention_window: str = option(
        "0",
        "number of last tokens that a token attends to, itself included; needs causal attention; "
        "0: all" + IN_TURN,
    )
    attention_parts: str = option(
        "none",
        f"parts of each layer's attention beside its encoding (FoX Pro): none, {', '.join(PARTS)}",
    )
    kv_heads: int = option(
        0,
        "heads of keys and values, each of which serves equally many attention heads (grouped "
        "queries); 0: as many as attention heads",
    )
    head_dim: int = option(0, "width of a head; 0: embedding dimension / attention heads")
    out_bias: bool = option(True, "bias of the output projection of attention")
    score_scale: float = option(
        0.0, "factor of all scores; 0: head width to the power of -0.5 in softmax attention, else 1"
    )
    grid_width: int = option(
        0,
        "columns W of a grid whose cells are numbered row by row: position s is row s // W, column "
        "s mod W; 0: a sequence",
    )
    grid_height: int = option(
        0,
        "rows of the grid, for encodings whose coordinates are fractions of it; 0: as many as "
        "columns",
    )
    position_grid: ChoiceEnum(list(POSITION_GRIDS)) = option(
        "flat",
        "how an encoding of sequences reads a grid: flat (the number of the cell), axial (one half "
        "of each head's features by row, the other half by column) or sum (row + column, as the "
        "image code of TMLR LRPE does)",
    )
    encoding_seed: int = option(
        0, "seed of the encoding's fixed random parts (vectors, permutations)"
    )
    fidelity: str = option(
        "correct",
        "departures of the authors' code to switch on: correct (none) or a comma-separated list of "
        "published (all that concern one method or attention), " + ", ".join(DEPARTURES),
    )


def build_attention(
    options: Any, cfg: Any, embed_dim: int, num_heads: int, *, causal: bool, layer: int
) -> MultiheadAttention:
    """Build the self-attention of one layer.

    options: an ``AttentionOptions``. cfg: the TransformerConfig of the whole model. Each layer
    draws its own fixed random parts, as in the authors' code: the seed of the encoding is
    1000 ``encoding_seed`` + ``layer``.
    """
    bias = getattr(options, "qkv_bias", True)  # an option of classifiers
    settings = {"causal": causal, "qkv_bias": bias, **_settings(options, cfg, layer)}
    attention = MultiheadAttention(embed_dim, num_heads, **settings)
    warn_about_absolute_positions(attention.encoding, cfg)
    warn_about_longer_texts(attention)
    warn_about_ignored(options, cfg)
    return attention


def build_cross_attention(options: Any, cfg: Any, layer: int) -> CrossAttention:
    """Build the cross-attention of one decoder layer; see :func:`build_attention`."""
    width, heads = cfg.decoder.embed_dim, cfg.decoder.attention_heads
    attention = CrossAttention(
        width, heads, memory_dim=cfg.encoder.embed_dim, **_settings(options, cfg, layer)
    )
    warn_about_absolute_positions(attention.encoding, cfg)
    return attention


def _settings(options: Any, cfg: Any, layer: int) -> dict[str, Any]:
    """Return the arguments that self- and cross-attention of one layer take from the options."""
    p, block = cfg.quant_noise.pq, cfg.quant_noise.pq_block_size
    return {
        "attention_type": at_layer(options, "attention_type", layer),
        "position_encoding": at_layer(options, "position_encoding", layer),
        "dropout": cfg.attention_dropout,
        "normalizer": at_layer(options, "attention_normalizer", layer),
        "window": _window(at_layer(options, "attention_window", layer)),
        "parts": getattr(options, "attention_parts", "none"),  # older checkpoints lack it
        **sizes_of_heads(options),
        "seed": options.encoding_seed * 1000 + layer,
        "options": encoding_options(options, layer),
        "wrap_linear": lambda linear: quant_noise(linear, p, block),
    }


def _window(given: str) -> int | None:
    if not given.isdecimal():
        raise ChoiceError(f"--attention-window is a number of tokens, or 0 for all, not {given!r}")
    return int(given) or None


def check_stack(options: Any, layers: int, section: str = "") -> None:
    """Check the options of attention of a stack, and warn of those that no layer reads.

    The log says which layers have which values, if a pattern does not divide the stack.
    section: "encoder", "decoder" or "cross", of ``lrpe_transformer``.
    Raises: ChoiceError for a pattern with more values than layers.
    """
    for name in patterns.OPTIONS:
        pattern = str(getattr(options, name, "0"))
        patterns.check_length(f"{section}_{name}".removeprefix("_"), pattern, layers)
        if layers % len(patterns.values(pattern)):
            option, found = name.replace("_", "-"), patterns.over_layers(pattern, layers)
            logger.info("%s %s of %d layers: %s", option, pattern, layers, ", ".join(found))
    warn_about_unread(options)


class BooleanFlags:
    """Mixin for models with boolean options that are True by default.

    fairseq gives such an option the action ``store_false``, so ``--decoder-normalize-before``
    silently switches it *off*. Here --flag switches it on and --no-flag switches it off.
    """

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the options of the configuration. fairseq skips options that already exist.

        ``super()`` is not called, because fairseq's RoBERTa and Transformer would add options.
        """
        config = getattr(cls, "__dataclass")
        for name, own in options_of(config):
            if own.default is True:
                flag, text = "--" + re.sub("[._]", "-", name), own.metadata.get("help")
                parser.add_argument(flag, action=BooleanOptionalAction, help=text)
        gen_parser_from_dataclass(parser, config(), delete_default=True, with_prefix="")


def options_of(config: type, section: str = "") -> Iterator[tuple[str, Field]]:
    """Yield the dotted name and the field of every option of a configuration and of nested ones."""
    for own in fields(config):
        yield section + own.name, own
        if is_dataclass(own.type):
            yield from options_of(own.type, f"{section}{own.name}.")


@contextmanager
def one_sentence_errors() -> Iterator[None]:
    """Turn an error about an option into one sentence on standard error and exit status 2."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, ChoiceError) or str(error).startswith("--"):  # fairseq's own sentences
            refuse(str(error))
        raise


def explain_bad_options() -> None:
    """Report a mistyped option of one of our models in one sentence.

    fairseq merges a YAML into the model's configuration before any code of the model runs. The
    merging function is replaced in both modules that import it by name.
    """
    for module in (dataclass_utils, fairseq.models):
        replace_once(module, "merge_with_parent", _merge_or_explain)


def _merge_or_explain(
    merge: Callable, config: Any, given: Any, from_checkpoint: bool = False, **keywords: Any
) -> Any:
    from_checkpoint = keywords.pop("remove_missing", from_checkpoint)  # fairseq's name of it
    cls = config if isinstance(config, type) else type(config)
    ours = cls.__module__.partition(".")[0] == __package__.partition(".")[0]
    try:
        merged = merge(config, given, from_checkpoint, **keywords)
    except OmegaConfBaseException as error:
        if not ours:
            raise
        refuse(_explanation(cls, error))
    if ours and from_checkpoint:
        with one_sentence_errors():
            reset_unread(merged, {own.name: own.default for own in fields(AttentionOptions)})
    return merged


def _explanation(cls: type, error: OmegaConfBaseException) -> str:
    rooms = {"tasks": "task", "criterions": "criterion", "optim": "optimizer"}
    kind = rooms.get(cls.__module__.split(".")[1], "model")
    given = str(error.full_key or error.key or "")
    names = [name for name, _ in options_of(cls)]
    if given in names or not isinstance(error, ConfigKeyError):
        reason = str(error.msg).partition("\n")[0]
        named = f" option {given!r}" if given else ""
        return f"bad value of {kind}{named}: {reason}"
    return f"unknown {kind} option {given!r}{did_you_mean(given, names)}"


def refuse_unrelated_processes() -> None:
    """Stop if a launcher started several processes without a process group.

    ``torchrun fairseq-train`` starts *independent* trainings, which overwrite each other's
    checkpoints.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    if started > 1 and "RANK" in os.environ and not joined:
        refuse(
            f"{started} processes were started without a process group, so they "
            "would train unrelated models in one folder; start them with scripts/train.sh"
        )


def defaults(**changes: Any) -> Callable[[type], type]:
    """Class decorator that changes defaults of inherited dataclass fields and keeps their help.

    Presets are configuration classes, because hydra silently ignores the preset *functions* of
    fairseq.
    """

    def redefine(cls: type) -> type:
        known = {own.name: own for own in fields(cls)}
        for name, value in changes.items():
            setattr(cls, name, field(default=value, metadata=known[name].metadata))
            cls.__annotations__[name] = known[name].type
        if "__init__" in vars(cls):
            del cls.__init__  # dataclass() would keep it with the old defaults
        return dataclass(cls)

    return redefine
