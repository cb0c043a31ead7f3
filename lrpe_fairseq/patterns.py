"""Patterns over the layers of a stack: one value, or several, separated by commas and repeated.

This module needs neither torch nor fairseq.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lrpe_fairseq.errors import ChoiceError

OPTIONS = ("attention_type", "position_encoding", "attention_normalizer", "attention_window")
"""Options of a stack that may have a value per layer."""


def values(pattern: Any) -> list[str]:
    """Return the values of a pattern, in order. Raises: ChoiceError if one is empty.

    >>> values("linear, linear, softmax")
    ['linear', 'linear', 'softmax']
    """
    parts = [value.strip() for value in str(pattern).split(",")]
    if not all(parts):
        raise ChoiceError(f"the pattern {pattern!r} has an empty value: write one between commas")
    return parts


def over_layers(pattern: Any, layers: int) -> list[str]:
    """Return the value of every layer of a stack.

    >>> over_layers("fox,fox,none", 4)
    ['fox', 'fox', 'none', 'fox']
    """
    parts = values(pattern)
    return [parts[layer % len(parts)] for layer in range(layers)]


def check_length(option: str, pattern: Any, layers: int) -> None:
    """Check that a stack has a layer for every value of a pattern. option: its name.

    Raises: ChoiceError for more values than layers, of which some would be ignored.
    """
    count = len(values(pattern))
    if count > layers:
        raise ChoiceError(
            f"--{option.replace('_', '-')} {pattern} has {count} values for a stack of {layers} "
            f"layer{'s' * (layers != 1)}: leave out the values that no layer has"
        )


def at_layer(options: Any, name: str, layer: int) -> str:
    """Return an option of :data:`OPTIONS` in a layer; an older checkpoint has no window."""
    return over_layers(getattr(options, name, "0"), layer + 1)[layer]


def canonical(pattern: Any, name: Callable[[str], str] = str) -> str:
    """Return the shortest pattern with the same values, each replaced by ``name`` of it.

    >>> canonical("linear,softmax,linear,softmax"), canonical("rope")
    ('linear,softmax', 'rope')
    """
    names = list(map(name, values(pattern)))
    lengths = (n for n in range(1, len(names) + 1) if len(names) % n == 0)
    shortest = next(n for n in lengths if names == names[:n] * (len(names) // n))
    return ",".join(names[:shortest])


def kept(listed: Sequence[int] | str, layers: int) -> list[int]:
    """Return the layers of ``--decoder-layers-to-keep``, in ascending order, as fairseq keeps them.

    listed: indices below ``layers``, as a sequence or separated by commas.
    Raises: ChoiceError for one that is no layer, or that is listed twice.

    >>> kept("2,0", 4)
    [0, 2]
    """
    said = listed if isinstance(listed, str) else ",".join(map(str, listed))
    texts = [text.strip() for text in said.split(",")]
    indices = sorted(int(text) for text in texts if text.isdecimal())
    if len(indices) < len(texts) or indices[-1] >= layers or len(set(indices)) < len(indices):
        raise ChoiceError(
            f"the layers to keep are numbers from 0 to {layers - 1}, each at most once and "
            f"separated by commas, not {said!r}"
        )
    return indices
