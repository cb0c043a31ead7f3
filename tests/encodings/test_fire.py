"""FIRE against a double loop, its two forms against each other, and against KERPLE."""

import copy
from unittest import mock

import pytest
import torch

from lrpe_fairseq.encodings import EncodingOptions, EncodingSpec
from lrpe_fairseq.encodings.core.positions import counted
from lrpe_fairseq.encodings.scores import fire
from lrpe_fairseq.kernels import conditions
from tests.encodings.lags import assert_same_with_gradients, bias_of, loop_bias
from tests.references import assert_near


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


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Reading a tensor is not free."""
    monkeypatch.setattr(conditions, "_is_on_cpu", lambda x: False)


def by_network(encoding, q_positions, k_positions):
    """The bias (H, T, S): the network f at every pair, as in the published code."""
    s, t = q_positions.unsqueeze(-1), k_positions.unsqueeze(-2)
    c = encoding.c.double().abs()
    lag, longest = (s - t).clamp_min(0).double(), torch.maximum(encoding.threshold, s.double())
    x = torch.log1p(c * lag) / (torch.log1p(c * longest) + fire.EPS)
    x = x.to(encoding.f[-1].weight.dtype)
    return encoding.f(x.unsqueeze(-1)).movedim(-1, -3)


UNITS = {
    "as drawn": lambda u, c: None,
    "of weight zero": lambda u, c: (u[::3].zero_(), u[1::3].neg_()),
    "of equal kinks": lambda u, c: (u.fill_(-0.5), u[::2].fill_(0.5), c.fill_(-0.2)),
    "with kinks outside": lambda u, c: c.add_(3.0),
    "that are all off": lambda u, c: c.sub_(9.0),
}


@pytest.mark.parametrize("length", [1, 12, 40])
@pytest.mark.parametrize("units", UNITS)
def test_line_segments_are_the_network_in_values_and_gradients(units, length, as_on_a_gpu):
    encoding, at = build(heads=4, fire_length=length), counted(33, torch.device("cpu"))
    with torch.no_grad():
        encoding.threshold_factor.fill_(1.01)  # at s = L the gradient of the maximum is not unique
        UNITS[units](encoding.f[0].weight, encoding.f[0].bias)
    assert encoding.form((-32, 32), at).table is None
    both = bias_of(encoding, at, at), by_network(encoding, at, at)
    assert_near(*([x] for x in both), scale=1e-12)
    weight = torch.randn(both[0].shape, dtype=torch.float64)
    learned = list(encoding.parameters())
    grads = [torch.autograd.grad((x * weight).sum(), learned) for x in both]
    assert_near(*grads, scale=1e-12)


def test_line_segments_have_the_gradients_of_the_network_in_float32(as_on_a_gpu):
    encoding, at = build(heads=4, fire_length=20).float(), torch.arange(700)
    weight = torch.rand(4, 700, 700)  # of one sign: their sums are long
    found = bias_of(encoding, at, at, torch.float32)
    exact = copy.deepcopy(encoding).double()
    wanted = by_network(exact, at, at)
    assert_near([found], [wanted], scale=1e-6)
    grads = [
        torch.autograd.grad((x * weight.to(x)).sum(), module.f.parameters())
        for x, module in ((found, encoding), (wanted, exact))
    ]
    assert_near(*grads, scale=2e-6)


def test_positions_of_a_batch_take_the_segments_of_their_own(as_on_a_gpu):
    encoding = build(fire_length=4)
    at = torch.randint(0, 30, (2, 9))
    q = torch.zeros(2, 3, 9, 4, dtype=torch.float64)
    wanted = torch.stack([by_network(encoding, row, row) for row in at])
    torch.testing.assert_close(encoding.bias(q, q, at, at), wanted, rtol=1e-12, atol=1e-12)


def test_it_starts_like_the_published_code():
    encoding = build(heads=500).float()
    assert (encoding.c, encoding.threshold) == (torch.tensor([0.1]), torch.tensor([512.0]))
    first, last = encoding.f[0], encoding.f[2]
    assert (first.weight.abs().max() <= 1, first.weight.abs().max() > 0.8) == (True, True)
    assert 0.99 * 32**-0.5 < last.weight.abs().max() <= 32**-0.5
