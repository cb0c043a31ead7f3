"""How fixes replace functions and methods of fairseq: once, with the original at hand."""

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


def replace_once(module: ModuleType, name: str, replacement: Callable) -> None:
    """Set ``module.name`` to ``replacement`` with the original as its first argument, once.

    Several fixes may replace one function; each calls the one that it found.
    """
    original = getattr(module, name)
    if replacement not in _replacements(original):
        setattr(module, name, functools.partial(replacement, original))


def replace_method(cls: type, name: str, replacement: Callable) -> None:
    """As :func:`replace_once`, for a method: ``replacement`` gets the original and ``self``."""
    original = getattr(cls, name)
    if replacement in _replacements(original):
        return

    # a partial object is no descriptor: as an attribute of a class it would not receive ``self``
    @functools.wraps(original)
    def method(*arguments: Any, **keywords: Any) -> Any:
        return replacement(original, *arguments, **keywords)

    method.replacement = replacement
    setattr(cls, name, method)


def _replacements(function: Any) -> Iterator[Callable | None]:
    """Yield the replacements in a function, the outermost first; None for other wrappers."""
    while function is not None:
        if isinstance(function, functools.partial):
            yield function.func
            function = function.args[0] if function.args else None
        else:
            yield getattr(function, "replacement", None)
            function = getattr(function, "__wrapped__", None)
