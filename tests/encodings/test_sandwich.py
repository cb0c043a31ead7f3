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


def test_it_is_the_inner_product_of_sinusoids_less_that_at_lag_zero():
    width, at = 16, torch.arange(40)
    angle = at.double()[:, None] / 10000 ** (2 * torch.arange(1, width // 2 + 1).double() / width)
    sinusoid = torch.cat([angle.sin(), angle.cos()], -1)
    product = sinusoid @ sinusoid.T
    found = bias_of(build(False, heads=8, sandwich_width=width), at, at)
    torch.testing.assert_close(found[0], product - product[0, 0], rtol=0, atol=1e-11)
    torch.testing.assert_close(found[3], found[0] / 4)


def test_the_values_are_those_of_the_specification_and_the_trend_falls():
    lags = torch.tensor([0, 1, 16, 256, 4096, 16384])
    found = 8 * bias_of(build(heads=1), torch.tensor([16384]), 16384 - lags)[0, 0]
    rounded = torch.tensor([0, -1.5, -22.3, -42.4, -67.3, -72.3]).double()
    torch.testing.assert_close(found, rounded, rtol=0, atol=0.06)
    powers = 2 ** torch.arange(13)  # beyond 4096 it oscillates
    trend = bias_of(build(heads=1), torch.tensor([4096]), 4096 - powers)[0, 0]
    assert (trend.diff() < 0).all()


def test_it_has_no_parameters_and_a_width_that_is_even():
    assert build().state_dict() == {}
    for width in (0, 7, -2):
        with pytest.raises(ValueError, match="sandwich_width must be even and positive"):
            build(sandwich_width=width)
