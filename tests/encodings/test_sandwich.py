"""Sandwich against a double loop and against sinusoidal embeddings."""

import math

import pytest
import torch

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from tests.encodings.lags import bias_of, loop_bias


def build(causal=True, heads=3, **options):
    options = EncodingOptions(**options)
    return build_encoding("sandwich", 4, heads, causal=causal, options=options)


def by_equation(heads, h, n, width=128):
    total = sum(math.cos(n / 10000 ** (2 * i / width)) for i in range(1, width // 2 + 1))
    return torch.tensor(heads / (8 * (h + 1)) * (total - width / 2), dtype=torch.float64)


@pytest.mark.parametrize("causal", [True, False])
def test_the_bias_is_that_of_the_equation(causal):
    q_positions, k_positions = torch.arange(100_050, 100_053), 99_991 + torch.arange(0, 90, 11)
    lag = (lambda n: max(n, 0)) if causal else abs
    expected = loop_bias(lambda h, s, t: by_equation(3, h, lag(s - t)), q_positions, k_positions, 3)
    found = bias_of(build(causal), q_positions, k_positions)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
