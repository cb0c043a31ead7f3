"""The slopes of ALiBi."""

import math

import pytest

from lrpe_fairseq.encodings.slopes import alibi_slopes


def _recursion(heads):
    """The authors' ``get_slopes``, written from its definition."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**h for h in range(heads)]
    power = 2 ** math.floor(math.log2(heads))
    return _recursion(power) + _recursion(2 * power)[0::2][: heads - power]


@pytest.mark.parametrize("heads", range(1, 17))
def test_the_closed_form_equals_the_recursion(heads):
    assert alibi_slopes(heads) == pytest.approx(_recursion(heads), rel=1e-14)


def test_four_heads_have_the_published_slopes():
    assert alibi_slopes(4) == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
