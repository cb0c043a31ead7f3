"""KERPLE's two biases against a double loop, against ALiBi, and their constraints."""

import pytest
import torch

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.encodings.sharing import share_across_layers
from lrpe_fairseq.encodings.slopes import alibi_slopes
from tests.encodings.lags import bias_of, loop_bias
from tests.references import score_matrix

FORMS = ["kerple-log", "kerple-power"]
LAGS = torch.tensor([0, 1, 2, 3, 10, 100, 4096, 16384])


def build(name, causal=True, heads=3, seed=0, **options):
    options = EncodingOptions(**options)
    return build_encoding(name, 4, heads, causal=causal, seed=seed, options=options).double()


def by_equation(encoding, h, n):
    """The paper's equation at the lag n >= 0 for head h."""
    if encoding.name == "kerple-log":
        return -encoding.r1[h] * torch.log(1 + encoding.r2[h] * n)
    return -encoding.r1[h] * torch.tensor(n).double() ** encoding.r2[h]


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


@pytest.mark.parametrize("causal", [True, False])
def test_power_with_exponent_one_is_alibi(causal):
    encoding = build("kerple-power", causal, heads=6)
    with torch.no_grad():
        slopes = torch.tensor(alibi_slopes(6)).double()
        encoding.r1.copy_(slopes), encoding.r2.fill_(1)
    kept = slopes > 0.01  # the clamp
    assert kept.sum() == 5
    found = bias_of(encoding, torch.tensor([16384]), 16384 - LAGS)[:, 0]
    torch.testing.assert_close(found[kept], alibi(6, LAGS)[kept], rtol=1e-12, atol=0)
    other = build_encoding("alibi", 4, 6, causal=causal).double()
    q, k = torch.randn(2, 2, 6, 5, 4, dtype=torch.float64)
    at = torch.arange(100_000, 100_005)
    pair = (score_matrix(e, q, k, at, at)[:, kept] for e in (encoding, other))
    torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FORMS)
def test_the_bias_is_exactly_zero_at_lag_zero_and_falls(name):
    found = bias_of(build(name), torch.tensor([16384]), 16384 - LAGS)[:, 0]
    assert (found[:, 0] == 0).all()
    assert (found.diff() < 0).all() or (found == -3e4).any()
    assert (found.diff() <= 0).all()


@pytest.mark.parametrize("size", [100.0, -100.0])
@pytest.mark.parametrize("name", FORMS)
def test_the_forward_pass_clamps_parameters_after_a_step_of_any_size(name, size):
    encoding = build(name).float()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(size)
    found = bias_of(encoding, torch.tensor([2**31]), 2**31 - LAGS, torch.float32)
    found.sum().backward()
    assert all(p.grad.isfinite().all() for p in encoding.parameters())
    assert found.isfinite().all()
    assert (found <= 0).all()
    if size < 0:
        assert {x.item() for p in encoding.parameters() for x in p} == {torch.tensor(0.01).item()}
    else:
        assert (encoding.r1 > 100).all()
        assert torch.equal(encoding.r2.clamp_max(2) == 2, torch.ones(3, dtype=torch.bool))
        assert (encoding.r2.max() > 100) == (name == "kerple-log")


def test_adam_moves_the_parameters_as_far_as_in_the_authors_code():
    """Its steps have the size of the rate in r itself, and r is not decayed."""
    encoding = build("kerple-log").float()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.fill_(0.02)
    optimizer = torch.optim.Adam(encoding.parameters(), lr=1e-3)
    lag, target = torch.arange(1, 129), -torch.log1p(0.5 * torch.arange(1, 129.0))[:, None]
    for _ in range(1000):
        optimizer.zero_grad()
        (encoding.of_lag(lag) - target).square().mean().backward()
        optimizer.step()
    assert encoding.r1.min() > 0.5
    assert encoding.r2.min() > 0.4


@pytest.mark.parametrize("name", FORMS)
def test_a_large_bias_is_finite_in_float16(name):
    encoding = build(name)
    with torch.no_grad():
        encoding.r1.fill_(1e5), encoding.r2.fill_(50.0)
    found = bias_of(encoding, torch.tensor([10**6]), torch.tensor([0, 10**6]), torch.float16)
    assert found.dtype == torch.float16
    assert found[:, 0, 0].tolist() == [-3e4] * 3
    assert (found[:, 0, 1] == 0).all()


@pytest.mark.parametrize(("name", "largest"), [("kerple-log", (2, 1)), ("kerple-power", (1, 2))])
def test_parameters_start_from_the_uniform_distributions_of_the_authors_code(name, largest):
    encoding = build(name, heads=4000)
    for values, end in zip((encoding.r1, encoding.r2), largest, strict=True):
        assert values.min() >= 0
        assert 0.99 * end < values.max() <= end
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
