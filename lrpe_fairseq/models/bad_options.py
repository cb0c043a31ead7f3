"""Mistyped options of our classes end in one sentence."""

import argparse
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import fairseq.models
import fairseq.options
from fairseq.dataclass import utils as dataclass_utils
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from lrpe_fairseq.attention.projected import OTHER_NAMES
from lrpe_fairseq.compat.patching import replace_once
from lrpe_fairseq.errors import did_you_mean, one_sentence_errors, refuse
from lrpe_fairseq.models.flags import options_of
from lrpe_fairseq.models.options import AttentionOptions
from lrpe_fairseq.models.unread import reset_unread

KINDS = {"tasks": "task", "criterions": "criterion", "optim": "optimizer"}
"""Package of a configuration class -> what it configures; a model otherwise."""
IN_PYTHON = {argument: option for option, argument in OTHER_NAMES.items()}
"""Argument of attention in Python -> the option that it is on a command line and in a YAML."""
UNKNOWN = re.compile(r"unrecognized arguments: (\S+)")
"""The message of a parser about options that it does not have."""


def explain_bad_options() -> None:
    """Report a mistyped option of one of our models in one sentence.

    fairseq merges a YAML into the model's configuration before any code of the model runs. The
    merging function is replaced in both modules that import it by name.
    """
    for module in (dataclass_utils, fairseq.models):
        replace_once(module, "merge_with_parent", _merge_or_explain)
    replace_once(fairseq.options, "parse_args_and_arch", _parse_or_explain)


def _parse_or_explain(
    parse: Callable, parser: argparse.ArgumentParser, *arguments: Any, **keywords: Any
) -> Any:
    """Parse a command line; name the nearest option instead of all, if one is unknown."""
    report = parser.error

    def explain(message: str) -> None:
        if unknown := UNKNOWN.match(message):
            known = (word for action in parser._actions for word in action.option_strings)
            refuse(f"unknown option {unknown[1]}{_hint(unknown[1], known)}")
        report(message)

    parser.error = explain
    return parse(parser, *arguments, **keywords)


def _hint(given: str, known: Iterable[str]) -> str:
    """Return a hint at the option that is meant: by its name in Python, or the nearest one.

    given: a flag, or the key of an option.
    """
    word = given.partition("=")[0].rpartition(".")[2]
    name = word.lstrip("-").replace("-", "_")
    other = {**IN_PYTHON, "encoding": "position_encoding"}.get(name)
    if other is None:
        return did_you_mean(given.partition("=")[0], known)
    if word.startswith("-"):
        other = "--" + other.replace("_", "-")
    return f"; did you mean {other!r}?"


def _merge_or_explain(
    merge: Callable, config: Any, options: Any, from_checkpoint: bool = False, **keywords: Any
) -> Any:
    """Merge ``options`` into a configuration; those that a checkpoint does not read are reset."""
    from_checkpoint = keywords.pop("remove_missing", from_checkpoint)  # fairseq's name of it
    cls = config if isinstance(config, type) else type(config)
    ours = cls.__module__.partition(".")[0] == __package__.partition(".")[0]
    try:
        merged = merge(config, options, from_checkpoint, **keywords)
    except OmegaConfBaseException as error:
        if not ours:
            raise
        refuse(_explanation(cls, error))
    # options that are typed are refused; a checkpoint that holds them is a good model
    if ours and from_checkpoint:
        with one_sentence_errors():
            reset_unread(merged, _defaults_of_attention())
    return merged


def _defaults_of_attention() -> dict[str, Any]:
    return {option.name: option.default for option in fields(AttentionOptions)}


def _explanation(cls: type, error: OmegaConfBaseException) -> str:
    """Return one sentence about an option of ``cls`` that omegaconf does not accept."""
    kind = KINDS.get(cls.__module__.split(".")[1], "model")
    name = str(error.full_key or error.key or "")
    known = [known_name for known_name, _ in options_of(cls)]
    # a key error may also be about a value, of an option that exists
    if isinstance(error, ConfigKeyError) and name not in known:
        return f"unknown {kind} option {name!r}{_hint(name, known)}"
    reason = str(error.msg).partition("\n")[0]
    named = f" option {name!r}" if name else ""
    return f"bad value of {kind}{named}: {reason}"
