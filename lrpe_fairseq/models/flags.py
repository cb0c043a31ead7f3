"""Options of a configuration as flags of the command line."""

import re
from argparse import BooleanOptionalAction
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass


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
        config = getattr(cls, "__dataclass")  # set by fairseq's register_model
        for name, option in options_of(config):
            if option.default is True:
                flag = "--" + re.sub("[._]", "-", name)
                parser.add_argument(
                    flag, action=BooleanOptionalAction, help=option.metadata.get("help")
                )
        gen_parser_from_dataclass(parser, config(), delete_default=True, with_prefix="")


def options_of(config: type, section: str = "") -> Iterator[tuple[str, Field]]:
    """Yield the dotted name and the field of every option of a configuration and of nested ones."""
    # a nested configuration is an option, too, whose value is a section
    for option in fields(config):
        yield section + option.name, option
        if is_dataclass(option.type):
            yield from options_of(option.type, f"{section}{option.name}.")
