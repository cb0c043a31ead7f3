"""T5's buckets against a table written by hand, and its bias."""

import math

import pytest
import torch

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.encodings.sharing import share_across_layers
from lrpe_fairseq.encodings.t5 import bucket_starts

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
    distances = [-5, 0, 1, 2, 15, 16, 18, 19, 20, 21, 23, 24, 30, 31, 63, 64, 66, 67, 112, 113]
    table = [0, 0, 1, 2, 15, 16, 16, 17, 17, 18, 18, 19, 20, 21, 26, 26, 26, 27, 30, 31]
    encoding = build(causal=True)
    assert encoding.bucket(torch.tensor(distances)).tolist() == table
    assert encoding.bucket(torch.tensor([127, 128, 129, 10**6])).tolist() == [31] * 4
    every = torch.arange(200)
    expected = [bucket_by_hand(n, CAUSAL_STARTS) for n in range(200)]
    assert encoding.bucket(every).tolist() == expected


def test_bidirectional_buckets_are_those_of_the_table():
    encoding = build(causal=False)
    past = [0, 1, 7, 8, 11, 12, 15, 16, 22, 23, 31, 32, 45, 46, 63, 64, 90, 91, 127, 128, 999]
    table = [0, 1, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 15, 15]
    assert encoding.bucket(torch.tensor(past)).tolist() == table
    future = encoding.bucket(-torch.tensor(past[1:]))  # a key after the query: the upper half
    assert future.tolist() == [16 + b for b in table[1:]]
    every = torch.arange(200)
    expected = [bucket_by_hand(n, ONE_WAY_STARTS) for n in range(200)]
    assert encoding.bucket(every).tolist() == expected


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


def test_cached_buckets_follow_the_positions_when_they_change_in_place():
    encoding, x = build(), torch.randn(1, 3, 4, 4)
    q_positions, k_positions = torch.arange(4) + 10, torch.arange(4)
    encoding.bias(x, x, q_positions, k_positions)
    for positions in (q_positions, k_positions):
        positions += 3
        expected = encoding.bias(x, x, q_positions.clone(), k_positions.clone())
        assert torch.equal(encoding.bias(x, x, q_positions, k_positions), expected)


def test_every_bucket_that_occurs_receives_its_gradient():
    encoding = build()
    x, positions = torch.randn(1, 3, 40, 4), torch.arange(40)
    encoding.bias(x, x, positions, positions).sum().backward()
    buckets = encoding.bucket(positions[:, None] - positions)
    counts = torch.bincount(buckets.flatten(), minlength=32).float()
    assert torch.equal(encoding.table.grad, counts.expand(3, 32))


def test_the_table_starts_small_and_stays_float32_under_half():
    encoding = build(heads=64)  # H D = 256: standard deviation 1/16
    assert 0.055 < encoding.table.std() < 0.07
    encoding = encoding.half()
    x, positions = torch.randn(1, 64, 4, 4).half(), torch.arange(4)
    assert encoding.table.dtype == torch.float32
    assert encoding.bias(x, x, positions, positions).dtype == torch.float16


def test_impossible_numbers_of_buckets_are_refused():
    with pytest.raises(ValueError, match="at least 2 buckets"):
        build(t5_buckets=1)
    with pytest.raises(ValueError, match="largest distance"):
        build(causal=False, t5_buckets=32, t5_max_distance=8)


def test_shared_tables_are_one_parameter_and_unshared_ones_are_not():
    shared = torch.nn.ModuleList([build(t5_shared=True, seed=s) for s in range(3)])
    own = torch.nn.ModuleList([build(seed=s) for s in range(3)])
    share_across_layers(shared)
    share_across_layers(own)
    assert len(list(shared.parameters())) == 1
    assert len(list(own.parameters())) == 3


def test_the_departures_share_the_bias_among_heads_and_start_it_from_unit_normals():
    shared = build(departures=["t5-shared-bias"])
    x, positions = torch.randn(1, 3, 4, 4), torch.arange(4)
    assert shared.bias(x, x, positions, positions).shape == (1, 4, 4)
    assert shared.table.shape == (1, 32)
    assert 0.9 < build(heads=64, departures=["t5-unit-init"]).table.std() < 1.1
