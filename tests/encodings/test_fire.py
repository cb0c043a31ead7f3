"""FIRE against a double loop, its two forms against each other, and against KERPLE."""

from unittest import mock

import pytest
import torch

from lrpe_fairseq.encodings import EncodingOptions, EncodingSpec
from lrpe_fairseq.encodings.core.positions import counted
from lrpe_fairseq.encodings.scores import fire
from tests.encodings.lags import assert_same_with_gradients, bias_of, loop_bias


def build(heads=3, seed=0, layers=1, **options):
    spec = EncodingSpec(4, heads, causal=True, seed=seed, options=EncodingOptions(**options))
    return fire.FIRE(spec, layers=layers).double()


def by_equation(encoding, h, s, t):
    """The paper's equation, with the 1e-6 that its code adds to the denominator."""
    c, length = (
        encoding.c.abs()[0],
        encoding.threshold_factor.abs()[0] * encoding.options.fire_length,
    )
    x = torch.log(c * max(s - t, 0) + 1) / (torch.log(c * length.clamp_min(s) + 1) + 1e-6)
    return encoding.f(x.view(1, 1))[0, h]


@pytest.mark.parametrize(
    ("length", "layers", "start"), [(512, 1, 50), (20, 1, 50), (52, 2, 50), (52, 0, 100_000)]
)
def test_the_bias_and_its_gradients_are_those_of_the_equation(length, layers, start):
    encoding = build(fire_length=length, layers=layers)
    with torch.no_grad():  # any sign is allowed, and L is no whole number
        encoding.c.fill_(-0.3), encoding.threshold_factor.fill_(-1.01)
    q_positions, k_positions = torch.arange(start, start + 5), start - 50 + torch.arange(0, 77, 11)
    expected = loop_bias(
        lambda h, s, t: by_equation(encoding, h, s, t), q_positions, k_positions, 3
    )
    found = bias_of(encoding, q_positions, k_positions)
    assert_same_with_gradients(found, expected, encoding.parameters())


@pytest.mark.parametrize(
    ("first", "length", "near"), [(0, 41, 41), (0, 60, 41), (39, 60, 2), (41, 60, 0)]
)
def test_the_form_by_lag_equals_the_form_by_pair(first, length, near):
    encoding, cpu = build(fire_length=40), torch.device("cpu")
    at, keys = counted(length, cpu, first), counted(length, cpu)
    with torch.no_grad():  # L = 40.4: at s = L the gradient of the maximum is not unique
        encoding.threshold_factor.fill_(1.01)
    assert encoding._near(at) == near
    assert (encoding.form((1 - length, length - 1), at).table is not None) == (near == len(at))
    fast = bias_of(encoding, at, keys)
    assert encoding._near(at.clone()) == (near if near == len(at) else 0)  # they are read
    with mock.patch.object(fire.FIRE, "_near", return_value=0):
        slow = bias_of(encoding, at, keys)
    assert_same_with_gradients(fast, slow, encoding.parameters())


def test_it_starts_like_the_published_code():
    encoding = build(heads=500).float()
    assert (encoding.c, encoding.threshold) == (torch.tensor([0.1]), torch.tensor([512.0]))
    first, last = encoding.f[0], encoding.f[2]
    assert (first.weight.abs().max() <= 1, first.weight.abs().max() > 0.8) == (True, True)
    assert 0.99 * 32**-0.5 < last.weight.abs().max() <= 32**-0.5
