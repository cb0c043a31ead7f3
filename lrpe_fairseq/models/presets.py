"""Presets of a model: configuration classes with other defaults."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any


def defaults(**changes: Any) -> Callable[[type], type]:
    """Class decorator that changes defaults of inherited dataclass fields and keeps their help.

    Presets are configuration classes, because hydra silently ignores the preset *functions* of
    fairseq.
    """

    def redefine(cls: type) -> type:
        inherited = {option.name: option for option in fields(cls)}
        for name, value in changes.items():
            setattr(cls, name, field(default=value, metadata=inherited[name].metadata))
            cls.__annotations__[name] = inherited[name].type
        # the class was a dataclass already: decorators are applied from the bottom up
        if "__init__" in vars(cls):
            del cls.__init__  # dataclass() would keep it with the old defaults
        return dataclass(cls)

    return redefine
