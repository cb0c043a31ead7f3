"""KERPLE's two biases against a double loop, against ALiBi, and their constraints."""

import pytest
import torch

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from tests.encodings.lags import assert_same_with_gradients, bias_of, loop_bias

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
    assert_same_with_gradients(found, expected, encoding.parameters())


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
