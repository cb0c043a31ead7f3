"""CAPE against a loop over pairs, against its base encodings, and its locality."""

import pytest
import torch

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from tests.encodings.lags import assert_same_with_gradients, bias_of
from tests.references import score_matrix

NAMES = ["cape-alibi", "cape-kerple", "cape-fire"]


def build(name, heads=3, seed=0, causal=True, **options):
    options = EncodingOptions(**options)
    encoding = build_encoding(name, 4, heads, causal=causal, seed=seed, options=options)
    return encoding.double()


def example(heads=3, queries=5, keys=7, batch=2):
    generator = torch.Generator().manual_seed(queries)
    q = torch.randn(batch, heads, queries, 4, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, heads, keys, 4, generator=generator, dtype=torch.float64)
    return q, k, torch.arange(keys - queries, keys), torch.arange(keys)


def encoded(encoding, q, k, *positions):
    return encoding(q @ k.mT, q, k, *positions)


def by_equation(encoding, scores, bias):
    """The equation at every pair on its own, for scores (B, H, T, S) and the bias (H, T, S)."""
    result = torch.empty_like(scores)
    for n, _, s, t in torch.ones_like(scores[:, :1]).nonzero().tolist():
        z, b = scores[n, :, s, t], bias[:, s, t]
        w1, w2 = encoding.inner.weight, encoding.outer.weight
        hidden = w1 @ torch.cat([z, b]) + encoding.inner.bias
        hidden = torch.where(hidden > 0, hidden, 0.01 * hidden)
        result[n, :, s, t] = z + b + w2 @ hidden + encoding.outer.bias
    return result


@pytest.mark.parametrize("name", NAMES)
def test_scores_and_gradients_are_those_of_the_equation(name):
    encoding, (q, k, *at) = build(name), example()
    scores = (q @ k.mT).requires_grad_()
    expected = by_equation(encoding, scores, bias_of(encoding.base, *at))
    found = encoding(scores, q, k, *at)
    assert_same_with_gradients(found, expected, [scores, *encoding.parameters()])


@pytest.mark.parametrize(("name", "base"), zip(NAMES, ("alibi", "kerple-log", "fire"), strict=True))
def test_without_the_network_it_is_the_base_encoding(name, base):
    q, k, *at = example(heads=6)
    encoding = build(name, heads=6)
    torch.nn.init.zeros_(encoding.outer.weight), torch.nn.init.zeros_(encoding.outer.bias)
    expected = score_matrix(build(base, heads=6), q, k, *at)
    torch.testing.assert_close(encoded(encoding, q, k, *at), expected, rtol=1e-13, atol=1e-13)


def test_the_bias_of_alibi_is_even_in_a_bidirectional_model():
    encoding, at = build("cape-alibi", heads=2, causal=False), torch.arange(9)
    bias = bias_of(encoding.base, at, at)
    assert torch.equal(bias, bias.mT)
    assert torch.equal(bias[:, 0, 8], torch.tensor([-0.5, -8 / 256]).double())


def test_scores_that_float16_cannot_hold_saturate():
    encoding = build("cape-alibi").float()
    with torch.no_grad():
        encoding.outer.bias.copy_(torch.tensor([1e6, -1e6, 0.0]))
    q, k, *at = example()
    scores = encoded(encoding, q.half(), k.half(), *at)
    assert scores.dtype == torch.float16
    assert scores.isfinite().all()
    assert (scores[:, 0] == 65504).all()
    assert (scores[:, 1] == -65504).all()
