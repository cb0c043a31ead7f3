"""DeBERTa against loops over pairs, and against the gathers of its code."""

import math

import pytest
import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from tests.encodings.lags import assert_same_with_gradients, queries_and_keys

HEADS, WIDTH = 2, 4


def build(causal=True, distance=3, departures=(), seed=0, **knobs):
    options = EncodingOptions(frozenset(departures), deberta_distance=distance, **knobs)
    encoding = build_encoding("deberta", WIDTH, HEADS, causal=causal, seed=seed, options=options)
    generator = torch.Generator().manual_seed(4)
    for parameter in encoding.double().parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).double()
    return encoding


def scores_of(encoding, q, k, q_positions, k_positions):
    q = q * encoding.content_scale * WIDTH**-0.5
    return encoding(q @ k.mT, q, k, q_positions, k_positions)


def row_of(difference, distance):
    """The paper's d: 0 from -K down, 2K - 1 from K on, and difference + K between."""
    if difference <= -distance:
        return 0
    return 2 * distance - 1 if difference >= distance else difference + distance


def by_pairs(encoding, q, k, q_positions, k_positions):
    """(q_s.k_t + q_s.Kr[d(s, t)] + k_t.Qr[d(t, s)]) / sqrt(3 D), in a loop over pairs."""
    keys, queries = (
        (encoding.table @ p.weight.T + p.bias).view(-1, HEADS, WIDTH)
        for p in (encoding.key_proj, encoding.query_proj)
    )

    def score(i, j):
        lag = int(q_positions[i] - k_positions[j])
        key = keys[row_of(lag, encoding.distance)]
        query = queries[row_of(-lag, encoding.distance)]
        terms = q[:, :, i] * (k[:, :, j] + key) + k[:, :, j] * query
        return terms.sum(-1) / math.sqrt(3 * WIDTH)

    rows, columns = range(q.shape[-2]), range(k.shape[-2])
    return torch.stack([torch.stack([score(i, j) for j in columns], -1) for i in rows], -2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("distance", [1, 3, 20])
@pytest.mark.parametrize(("rows", "columns"), [(5, 9), (1, 9), (5, 5)])
def test_scores_and_gradients_are_the_definition_written_out_for_every_pair(
    causal, distance, rows, columns
):
    encoding, (q, k) = build(causal, distance), queries_and_keys(rows, columns)
    keys = torch.arange(100, 100 + columns)
    positions = keys[columns - rows :].clone(), keys
    visible = (positions[0][:, None] >= keys) | (not causal)
    found, wanted = (form(encoding, q, k, *positions) for form in (scores_of, by_pairs))
    assert_same_with_gradients(found, wanted, [q, k, *encoding.parameters()], visible)
    with torch.no_grad():  # from the rows that are kept
        kept = scores_of(encoding, q, k, *positions)
    torch.testing.assert_close(kept, found.detach(), rtol=1e-12, atol=1e-12)


def test_a_module_scales_the_content_of_the_score_too():
    """With P = 0 the module is that of no encoding with its scores divided by sqrt 3."""

    def module_of(name):
        torch.manual_seed(0)
        options = {"attention_type": "softmax", "position_encoding": name, "causal": True}
        return MultiheadAttention(8, HEADS, **options).double()

    module, plain, x = module_of("deberta"), module_of("none"), torch.randn(2, 9, 8).double()
    torch.nn.init.zeros_(module.encoding.table)
    plain.q_proj.weight.data *= 3**-0.5
    torch.testing.assert_close(module.attend(x)[0], plain.attend(x)[0])


def test_the_key_term_has_the_scale_of_the_query_under_the_scale_of_the_published_code():
    encoding = build(departures=["embed-dim-scale"])
    assert encoding.softmax_scale == pytest.approx((3 * HEADS * WIDTH) ** -0.5)


def test_the_parameters_start_as_documented():
    encoding = build_encoding("deberta", 64, 4, causal=True).half()
    assert encoding.table.dtype == torch.float32
    assert encoding.table.shape == (1024, 256)
    assert 0.0195 < encoding.table.std() < 0.0205
    bound = math.sqrt(0.5) * math.sqrt(6 / 512)
    for projection in (encoding.key_proj, encoding.query_proj):
        assert 0.99 * bound < projection.weight.abs().max() <= bound
        assert not projection.bias.any()
    assert not torch.equal(encoding.key_proj.weight, encoding.query_proj.weight)
