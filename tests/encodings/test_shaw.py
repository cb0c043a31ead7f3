"""Shaw's relative position representations against loops over pairs, and the canonical form."""

import math

import pytest
import torch

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from tests.encodings.lags import assert_same_with_gradients, queries_and_keys
from tests.references import score_matrix

HEADS, WIDTH = 2, 4


def build(causal=True, distance=3, seed=0):
    options = EncodingOptions(shaw_distance=distance)
    encoding = build_encoding("shaw", WIDTH, HEADS, causal=causal, seed=seed, options=options)
    return encoding.double()


def by_pairs(encoding, q, k, q_positions, k_positions):
    """(q_s.k_t + q_s.w) / sqrt D, in a loop over pairs; for masked pairs w is taken as zero."""

    def score(i, j):
        ahead = int(k_positions[j] - q_positions[i])
        key, reach = k[:, :, j], encoding.distance
        if ahead <= 0 or not encoding.spec.causal:
            key = key + encoding.table[max(-reach, min(reach, ahead)) + reach]
        return (q[:, :, i] * key).sum(-1) / math.sqrt(WIDTH)

    rows, columns = range(q.shape[-2]), range(k.shape[-2])
    return torch.stack([torch.stack([score(i, j) for j in columns], -1) for i in rows], -2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("distance", [0, 3, 20])
def test_scores_and_gradients_are_the_definition_written_out_for_every_pair(causal, distance):
    encoding, (q, k) = build(causal, distance), queries_and_keys(5, 9)
    positions = torch.arange(104, 109), torch.arange(100, 109)
    visible = (positions[0][:, None] >= positions[1]) | (not causal)
    found = score_matrix(encoding, q * WIDTH**-0.5, k, *positions)
    wanted = by_pairs(encoding, q, k, *positions)
    assert_same_with_gradients(found, wanted, [q, k, encoding.table], visible)


def test_the_table_starts_uniform_by_xavier_and_stays_float32():
    table = build_encoding("shaw", 64, HEADS, causal=False).half().table
    bound = math.sqrt(6 / (33 + 64))
    assert table.dtype == torch.float32
    assert 0.95 * bound < table.abs().max() <= bound
