"""PermuteFormer against permutation matrices and the dense decayed sum."""

import math

import pytest
import torch
from torch.nn import functional as F

from lrpe_fairseq.attention.linear import linear_attention, linear_attention_naive
from lrpe_fairseq.encodings import EncodingOptions, build_encoding


def build(head_dim=8, heads=3, causal=True, departures=(), seed=0):
    options = EncodingOptions(fidelity=frozenset(departures))
    return build_encoding(
        "permuteformer", head_dim, heads, causal=causal, seed=seed, options=options
    )


def example(length, width=8, heads=3, batch=2):
    generator = torch.Generator().manual_seed(length)
    shape = (3, batch, heads, length, width)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def permutation_matrix(pi, power):
    """The (D, D) float64 matrix that takes x to x[pi^power]."""
    eye = torch.eye(len(pi), dtype=torch.float64)
    return torch.linalg.matrix_power(eye[pi], power)


def dense_scores(encoding, q, k):
    """q_s^T Pi_h^(t-s) k_t r_h^(s-t) for t <= s: (B, H, T, T), one matrix for every pair."""
    batch, heads, length, _ = q.shape
    scores = torch.zeros(batch, heads, length, length, dtype=torch.float64)
    for h in range(heads):
        ratio = 1 / (1 + math.exp(-(2 + 3 * h / heads)))
        for lag in range(length):
            matrix = permutation_matrix(encoding.permutation[h], lag)
            s = torch.arange(lag, length)
            turned = q[:, h, s] @ matrix.T  # x_s[pi^lag], against the unturned key
            scores[:, h, s, s - lag] = ratio**lag * (turned * k[:, h, s - lag]).sum(-1)
    return scores


def test_each_head_has_a_permutation_of_its_own():
    pi = build(head_dim=64, heads=8).permutation
    assert pi.dtype == torch.int64
    assert torch.equal(pi.sort(-1).values, torch.arange(64).expand(8, 64))
    assert len({tuple(row.tolist()) for row in pi}) == 8


def test_features_are_the_powers_of_the_permutation_at_any_position():
    encoding = build()
    x = example(4)[0]
    for first in (0, 5, 1000):
        positions = torch.arange(first, first + 4)
        y, _ = encoding(x, x, positions, positions)
        for row, s in enumerate(positions.tolist()):
            for h in range(3):
                expected = x[:, h, row] @ permutation_matrix(encoding.permutation[h], s).T
                assert torch.equal(y[:, h, row], expected)


def test_the_ratio_is_the_published_one_and_only_causal_models_have_it():
    heads = 4
    expected = [math.log(1 / (1 + math.exp(-(2 + 3 * h / heads)))) for h in range(heads)]
    log_decay = build(heads=heads).log_decay()
    torch.testing.assert_close(log_decay, torch.tensor(expected), rtol=1e-5, atol=1e-9)
    assert log_decay.dtype == torch.float32
    assert build(heads=heads, causal=False).log_decay() is None


@pytest.mark.parametrize("form", [linear_attention_naive, linear_attention])
@pytest.mark.parametrize("normalizer", ["rotated", "none"])
def test_linear_attention_is_the_dense_toeplitz_form_with_decay(form, normalizer):
    encoding = build()
    q, k, v = example(40)
    q, k = 1 + F.elu(q), 1 + F.elu(k)
    scores = dense_scores(encoding, q, k)
    expected = scores @ v
    if normalizer == "rotated":
        expected = expected / scores.sum(-1, keepdim=True)
    positions = torch.arange(11, 51)  # Toeplitz: the start does not matter
    q2, k2 = encoding(q, k, positions, positions)
    out = form(q2, k2, v, causal=True, normalizer=normalizer, log_decay=encoding.log_decay())
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)  # log_decay is float32


def test_the_shared_permutation_departure_has_one_for_all_heads_and_seeds():
    one = build(seed=1, departures=["permuteformer-shared-permutation"]).permutation
    other = build(seed=2, departures=["permuteformer-shared-permutation"]).permutation
    assert torch.equal(one, other)
    assert torch.equal(one, one[:1].expand_as(one))


def test_the_bidirectional_ratio_departure_multiplies_scores_by_growing_powers():
    plain = build(causal=False)
    grown = build(causal=False, departures=["permuteformer-bidirectional-ratio"])
    q, k, _ = example(12)
    positions = torch.arange(12)
    q1, k1 = plain(q, k, positions, positions)
    q2, k2 = grown(q, k, positions, positions)
    lag = (positions[:, None] - positions).double()
    ratio = torch.tensor([1 / (1 + math.exp(-(2 + h))) for h in range(3)]).double()
    expected = (q1 @ k1.transpose(-1, -2)) * ratio[:, None, None] ** lag
    torch.testing.assert_close(q2 @ k2.transpose(-1, -2), expected, rtol=1e-5, atol=1e-6)
    assert (ratio[:, None, None] ** lag).max() > 1  # a key after the query is favored


def test_the_bidirectional_ratio_departure_changes_nothing_in_a_causal_model():
    plain, departed = build(), build(departures=["permuteformer-bidirectional-ratio"])
    x, positions = example(6)[0], torch.arange(6)
    ours, theirs = (encoding(x, x, positions, positions) for encoding in (plain, departed))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(plain.log_decay(), departed.log_decay())
