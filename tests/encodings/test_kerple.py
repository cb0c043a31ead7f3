"""KERPLE's two biases against a double loop, against ALiBi, and their constraints."""

import pytest
import torch
from torch.nn import functional as F

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.encodings.kerple import inverse_softplus
from lrpe_fairseq.encodings.sharing import share_across_layers
from lrpe_fairseq.encodings.slopes import alibi_slopes
from tests.encodings.lags import bias_of, loop_bias

FORMS = ["kerple-log", "kerple-power"]
LAGS = torch.tensor([0, 1, 2, 3, 10, 100, 4096, 16384])


def build(name, causal=True, heads=3, seed=0, **options):
    options = EncodingOptions(**options)
    return build_encoding(name, 4, heads, causal=causal, seed=seed, options=options).double()


def by_equation(encoding, h, n):
    """The paper's equation at the lag n >= 0 for head h."""
    r1 = F.softplus(encoding.rho1[h])
    if encoding.name == "kerple-log":
        return -r1 * torch.log(1 + F.softplus(encoding.rho2[h]) * n)
    return -r1 * torch.tensor(n).double() ** (2 * torch.sigmoid(encoding.rho2[h]))


def alibi(heads, n):
    return -torch.tensor(alibi_slopes(heads)).double()[:, None] * n


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_the_bias_and_its_gradients_are_those_of_the_equation(name, causal):
    encoding = build(name, causal)
    q_positions, k_positions = torch.arange(50, 55), torch.arange(0, 90, 11)
    lag = (lambda n: max(n, 0)) if causal else abs
    expected = loop_bias(
        lambda h, s, t: by_equation(encoding, h, lag(s - t)), q_positions, k_positions, 3
    )
    found = bias_of(encoding, q_positions, k_positions)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weight = torch.rand_like(expected)
    grads = [
        torch.autograd.grad((x * weight).sum(), encoding.parameters()) for x in (found, expected)
    ]
    for one, other in zip(*grads, strict=True):
        assert one.abs().min() > 0
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_power_with_exponent_one_is_alibi():
    encoding = build("kerple-power", heads=6)
    with torch.no_grad():
        encoding.rho1.copy_(inverse_softplus(torch.tensor(alibi_slopes(6)).double()))
        encoding.rho2.zero_()
    found = bias_of(encoding, torch.tensor([16384]), 16384 - LAGS)[:, 0]
    torch.testing.assert_close(found, alibi(6, LAGS), rtol=1e-12, atol=0)


def test_log_approaches_alibi_as_r2_approaches_zero():
    encoding, slopes = build("kerple-log", heads=4), torch.tensor(alibi_slopes(4)).double()
    differences = []
    for r2 in (1e-3, 1e-6, 1e-9):
        with torch.no_grad():
            encoding.rho2.fill_(inverse_softplus(torch.tensor(r2).double()))
            encoding.rho1.copy_(inverse_softplus(slopes / r2))
        found = bias_of(encoding, torch.tensor([100]), 100 - LAGS[:6])[:, 0]
        differences.append((found - alibi(4, LAGS[:6])).abs().max())
    assert differences[0] > 100 * differences[1] > 10_000 * differences[2]
    assert differences[2] < 2e-6


@pytest.mark.parametrize("name", FORMS)
def test_the_bias_is_exactly_zero_at_lag_zero_and_falls(name):
    found = bias_of(build(name), torch.tensor([16384]), 16384 - LAGS)[:, 0]
    assert (found[:, 0] == 0).all()
    assert (found.diff() < 0).all() or (found == -3e4).any()
    assert (found.diff() <= 0).all()


@pytest.mark.parametrize("size", [100.0, -100.0])
@pytest.mark.parametrize("name", FORMS)
def test_the_constraints_hold_after_an_optimizer_step_of_any_size(name, size):
    encoding = build(name).float()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(size)
    found = bias_of(encoding, torch.tensor([2**31]), 2**31 - LAGS, torch.float32)
    found.sum().backward()
    assert all(p.grad.isfinite().all() for p in encoding.parameters())
    assert found.isfinite().all()
    assert (found <= 0).all()
    assert (encoding.r1 >= 0).all()
    if name == "kerple-power":
        assert (2 * torch.sigmoid(encoding.rho2) <= 2).all()


@pytest.mark.parametrize("name", FORMS)
def test_a_large_bias_is_finite_in_float16(name):
    encoding = build(name)
    with torch.no_grad():
        encoding.rho1.fill_(1e5), encoding.rho2.fill_(50.0)
    found = bias_of(encoding, torch.tensor([10**6]), torch.tensor([0, 10**6]), torch.float16)
    assert found.dtype == torch.float16
    assert found[:, 0, 0].tolist() == [-3e4] * 3
    assert (found[:, 0, 1] == 0).all()


@pytest.mark.parametrize(("name", "largest"), [("kerple-log", (2, 1)), ("kerple-power", (1, 2))])
def test_parameters_start_from_the_uniform_distributions_of_the_authors_code(name, largest):
    encoding = build(name, heads=4000)
    r2 = F.softplus(encoding.rho2)
    r2 = 2 * torch.sigmoid(encoding.rho2) if name == "kerple-power" else r2
    for values, end in zip((encoding.r1, r2), largest, strict=True):
        assert 0.0099 < values.min() < 0.0101
        assert values.max() <= end
        assert abs(values.mean() - end / 2) < 0.03 * end


@pytest.mark.parametrize("name", FORMS)
def test_all_layers_share_one_set_by_default(name):
    shared = torch.nn.ModuleList([build(name, seed=s) for s in range(3)])
    own = torch.nn.ModuleList([build(name, kerple_shared=False, seed=s) for s in range(3)])
    share_across_layers(shared), share_across_layers(own)
    assert sum(p.numel() for p in shared.parameters()) == 2 * 3
    assert sum(p.numel() for p in own.parameters()) == 3 * 2 * 3
    at = torch.arange(5)
    assert torch.equal(bias_of(shared[0], at, at), bias_of(shared[2], at, at))
