"""Options of nested configurations from the command line."""

import argparse
import inspect
from collections.abc import Callable
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass import utils as dataclass_utils
from fairseq.models.transformer import TransformerConfig

from lrpe_fairseq.compat.patching import replace_once


def flatten_nested_options() -> None:
    """Let a model registered with a subclass of ``TransformerConfig`` train from the command line.

    Break: the nested defaults of ``TransformerConfig`` are classes (``encoder: EncDecBaseConfig =
    field(default=EncDecBaseConfig)``), which ``dataclass.utils._override_attr`` writes into hydra's
    overrides as ``model.encoder=<class ...>``: OverrideParseException. With instances it would read
    ``args.embed_dim`` for both encoder and decoder. The fix reads ``model.encoder.embed_dim`` from
    ``args.encoder_embed_dim``, the name that ``--encoder-embed-dim``, the presets and
    ``TransformerConfig.from_namespace`` use.

    Trap: ``TransformerModelBase.add_args`` adds the options of ``TransformerConfig`` itself, with
    their defaults. A model with its own fields or presets overrides it with
    ``gen_parser_from_dataclass(parser, ItsConfig(), delete_default=True, with_prefix="")``. The
    file that defines a config must not postpone its annotations: fairseq needs types, not strings.
    """
    overrides = dataclass_utils._override_attr("model", TransformerConfig, argparse.Namespace())
    if any("<class" in override for override in overrides):
        replace_once(dataclass_utils, "_override_attr", _override_flat_attr)


def _override_flat_attr(
    original: Callable, sub_node: str, data_class: type, args: argparse.Namespace
) -> list[str]:
    nested = _nested_configs(data_class)
    if not nested:
        return original(sub_node, data_class, args)
    plain = {
        name: option
        for name, option in data_class.__dataclass_fields__.items()
        if name not in nested
    }
    # the original reads only the field table of the class
    fields_only = type(data_class.__name__, (FairseqDataclass,), {"__dataclass_fields__": plain})
    overrides = original(sub_node, fields_only, args)
    # --encoder-embed-dim of the parser is embed_dim of the section encoder
    for name, config in nested.items():
        overrides += original(f"{sub_node}.{name}", config, _without_prefix(args, f"{name}_"))
    return overrides


def _nested_configs(data_class: Any) -> dict[str, type]:
    """Return the classes of the nested configurations by name; {} for any other class."""
    if not (inspect.isclass(data_class) and issubclass(data_class, TransformerConfig)):
        return {}
    types = {name: option.type for name, option in data_class.__dataclass_fields__.items()}
    return {
        name: kind
        for name, kind in types.items()
        if inspect.isclass(kind) and issubclass(kind, FairseqDataclass)
    }


def _without_prefix(args: argparse.Namespace, prefix: str) -> argparse.Namespace:
    """Return the options whose names begin with ``prefix``, without it."""
    prefixed = {name: value for name, value in vars(args).items() if name.startswith(prefix)}
    return argparse.Namespace(
        **{name.removeprefix(prefix): value for name, value in prefixed.items()}
    )
