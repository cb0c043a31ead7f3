"""Which encodings a test of a whole model is run with.

``tests/test_every_encoding.py`` proves for each encoding with each attention type that attention
itself decodes, reorders, pads and masks correctly. A model is built of that attention, so that in
``make test`` each family meets each encoding once, with the attention types in turn. The full
product is marked ``exhaustive`` and runs in ``make test-all``.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from lrpe_fairseq.attention.multihead import ATTENTION_TYPES
from lrpe_fairseq.encodings import ENCODINGS, build_encoding


def usable() -> list[tuple[str, str]]:
    """(attention type, encoding): every pair that goes together."""
    return [
        (attention, name)
        for name in ENCODINGS
        for attention in ATTENTION_TYPES
        if attention == "softmax" or build_encoding(name, head_dim=8, num_heads=4).serves_linear
    ]


def each_encoding_once(first: int = 0) -> list[tuple[str, str]]:
    """Of :func:`usable`, one pair for each encoding, with the attention types in turn."""
    chosen = {}
    for turn, name in enumerate(ENCODINGS, start=first):
        pairs = [pair for pair in usable() if pair[1] == name]
        chosen[name] = pairs[turn % len(pairs)]
    return list(chosen.values())


def sampled(cases: Sequence[tuple], default: Iterable[tuple]) -> list[Any]:
    """``cases`` as parameters, marked ``exhaustive`` unless they are in ``default``."""
    chosen = set(default)
    assert chosen <= set(cases), chosen - set(cases)
    return [
        pytest.param(*case, marks=() if case in chosen else pytest.mark.exhaustive)
        for case in cases
    ]
