"""Columns of a table that are written once for many values.

``for`` of a column maps names to their values, either a list or a mapping of values to titles. The
column is repeated for every combination; the last name changes fastest. In its texts, ``{name}``
stands for the value and ``{name title}`` for its title::

    - for: {attention: [linear, softmax], task: {copy: copy, mqar: MQAR}, length: [1, 2]}
      key: "{attention}-{task}-{length}x"
      title: "{task title} {length}x"
      attention: "{attention}"
"""

import itertools
from typing import Any


def spelled_out(columns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``columns`` with each one that has ``for`` repeated.

    Raises: ValueError for values that are no list or mapping, and for a name that ``for`` lacks.
    """
    return [single for column in columns for single in _repeat(dict(column))]


def _repeat(column: dict[str, Any]) -> list[dict[str, Any]]:
    if "for" not in column:
        return [column]
    choices = [_choices(name, values) for name, values in column.pop("for").items()]
    return [
        _filled(column, {name: text for choice in combination for name, text in choice.items()})
        for combination in itertools.product(*choices)
    ]


def _choices(name: str, values: list[Any] | dict[Any, str]) -> list[dict[str, Any]]:
    if not isinstance(values, list | dict):
        raise ValueError(f"{name} under `for` needs a list of values, not {values!r}")
    titles = values if isinstance(values, dict) else {value: value for value in values}
    return [{name: value, f"{name} title": title} for value, title in titles.items()]


def _filled(content: Any, texts: dict[str, Any]) -> Any:
    """Return ``content`` with the names in its strings replaced."""
    if isinstance(content, dict):
        return {key: _filled(value, texts) for key, value in content.items()}
    if isinstance(content, list):
        return [_filled(item, texts) for item in content]
    if not isinstance(content, str):
        return content
    try:
        return content.format_map(texts)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{content!r} has a name that `for` lacks: {error}") from None
