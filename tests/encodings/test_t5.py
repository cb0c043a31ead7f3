"""T5's buckets against a table written by hand, and its bias."""

import math

import pytest
import torch

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.encodings.scores.t5 import bucket_starts

# 32 buckets, largest distance 128. Causal: 16 exact, then bucket 16 + k starts at the first
# whole number from 16 * 8^(k/16) on: 16 * 1.1388^k = 18.2, 20.7, 23.6, 26.9, 30.6, 34.9, ...
CAUSAL_STARTS = [*range(1, 17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
# Bidirectional: 8 exact, then bucket 8 + k starts at 8 * 16^(k/8) = 8 * sqrt(2)^k.
ONE_WAY_STARTS = [*range(1, 9), 12, 16, 23, 32, 46, 64, 91]


def build(causal=True, heads=3, departures=(), seed=0, **knobs):
    options = EncodingOptions(fidelity=frozenset(departures), **knobs)
    return build_encoding("t5", 4, heads, causal=causal, seed=seed, options=options)


def bucket_by_hand(distance, starts):
    return sum(distance >= start for start in starts)


def test_causal_buckets_are_those_of_the_table():
    encoding = build(causal=True)
    assert encoding.bucket(torch.tensor([-5, 127, 128, 10**6])).tolist() == [0, 31, 31, 31]
    expected = [bucket_by_hand(n, CAUSAL_STARTS) for n in range(200)]
    assert encoding.bucket(torch.arange(200)).tolist() == expected


def test_bidirectional_buckets_are_those_of_the_table():
    encoding = build(causal=False)
    expected = [bucket_by_hand(n, ONE_WAY_STARTS) for n in range(200)]
    assert encoding.bucket(torch.arange(200)).tolist() == expected
    future = encoding.bucket(-torch.arange(1, 200))  # a key after the query: the upper half
    assert future.tolist() == [16 + bucket for bucket in expected[1:]]


@pytest.mark.parametrize(("buckets", "largest"), [(16, 128), (32, 128), (8, 20), (5, 50)])
def test_the_starts_solve_the_logarithm_of_the_paper(buckets, largest):
    exact = buckets // 2
    starts = bucket_starts(buckets, largest)
    for n in range(exact, largest + 1):
        ratio = math.log(n / exact) / math.log(largest / exact) * (buckets - exact)
        if abs(ratio - round(ratio)) > 1e-9:  # at a boundary the logarithm itself rounds
            assert bucket_by_hand(n, starts) == min(exact + int(ratio), buckets - 1), n


@pytest.mark.parametrize("causal", [True, False])
def test_the_bias_is_the_table_at_the_bucket_of_every_pair_per_head(causal):
    encoding = build(causal)
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 9, 4)
    q_positions, k_positions = torch.arange(100, 105), torch.arange(9) * 30
    bias = encoding.bias(q, k, q_positions, k_positions)
    assert bias.shape == (3, 5, 9)
    for s in range(5):
        for t in range(9):
            bucket = encoding.bucket(q_positions[s] - k_positions[t])
            assert torch.equal(bias[:, s, t], encoding.table[:, bucket])
    assert not torch.equal(bias[0], bias[1])
    scores = q @ k.transpose(-1, -2)
    shifted = encoding(scores, q, k, q_positions + 7, k_positions + 7)
    assert torch.equal(shifted, scores + bias)


def test_the_table_starts_small():
    encoding = build(heads=64)  # H D = 256: standard deviation 1/16
    assert 0.055 < encoding.table.std() < 0.07


def test_the_departures_share_the_bias_among_heads_and_start_it_from_unit_normals():
    shared = build(departures=["t5-shared-bias"])
    x, positions = torch.randn(1, 3, 4, 4), torch.arange(4)
    assert shared.bias(x, x, positions, positions).shape == (1, 4, 4)
    assert shared.table.shape == (1, 32)
    assert 0.9 < build(heads=64, departures=["t5-unit-init"]).table.std() < 1.1
