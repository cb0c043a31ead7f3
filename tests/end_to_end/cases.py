"""Which encodings a test of a whole model is run with.

``tests/test_every_encoding.py`` proves for each encoding with each attention type that attention
itself decodes, reorders, pads and masks correctly. A model is built of that attention, so that in
``make test`` each encoding meets one of the four kinds of models, with the attention types in
turn; a causal encoding one of the two with causal attention. ``make test-all`` (the mark
``exhaustive``) runs one property of each kind with every pair, and the others with each encoding
once.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from lrpe_fairseq.attention.multihead import ATTENTION_TYPES
from lrpe_fairseq.encodings import ENCODINGS, encoding_class, is_causal_only

Pair = tuple[str, str]
KINDS = ("decoder-only", "encoder-only", "encoder", "decoder")  # the last two of translation
BIDIRECTIONAL = ("encoder-only", "encoder")


@functools.cache
def usable(kind: str = "decoder-only") -> list[Pair]:
    """(attention type, encoding): every pair that goes together in a kind of model."""
    return [
        (attention, name)
        for name in ENCODINGS
        for attention in ATTENTION_TYPES
        if serves(name, kind) and computes(attention, name)
    ]


def computes(attention: str, name: str) -> bool:
    """True if an attention type supports the encoding ``name`` without its wrappers."""
    encoding = encoding_class(name)
    return encoding.serves_linear if attention == "linear" else not encoding.no_softmax


def serves(name: str, kind: str) -> bool:
    """False for a causal encoding and a kind of model with bidirectional attention."""
    return kind not in BIDIRECTIONAL or not is_causal_only(name)


def pairs_of(name: str) -> list[Pair]:
    """The pairs of :func:`usable` with this encoding."""
    return [pair for pair in usable() if pair[1] == name]


def each_encoding_once(first: int = 0) -> list[Pair]:
    """Of :func:`usable`, one pair for each encoding, with the attention types in turn."""
    every = map(pairs_of, ENCODINGS)
    return [pairs[turn % len(pairs)] for turn, pairs in enumerate(every, start=first)]


def in_turn(kind: str) -> list[Pair]:
    """The pairs that a kind of model meets in ``make test``."""
    chosen = []
    for turn, (name, pairs) in enumerate((name, pairs_of(name)) for name in ENCODINGS):
        kinds = [other for other in KINDS if serves(name, other)]
        if kinds[turn % len(kinds)] == kind:
            chosen.append(pairs[turn // len(kinds) % len(pairs)])
    return chosen


def sampled(cases: Sequence[tuple], default: Iterable[tuple]) -> list[Any]:
    """``cases`` as parameters, marked ``exhaustive`` unless they are in ``default``."""
    chosen = set(default)
    assert chosen <= set(cases), chosen - set(cases)
    return [
        pytest.param(*case, marks=() if case in chosen else pytest.mark.exhaustive)
        for case in cases
    ]
