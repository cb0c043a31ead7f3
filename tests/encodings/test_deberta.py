"""DeBERTa against loops over pairs, and against the gathers of its code."""

import copy
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
    plain.scale *= 3**-0.5
    torch.testing.assert_close(module.attend(x)[0], plain.attend(x)[0])


def test_the_departure_is_the_gather_of_the_published_code():
    """p2c: the index clamp(-(i - j) + K, 0, 2K - 1) of row i and column j, before a transposition.

    Row i is the key and column j the query there.
    """
    encoding = build(False, departures=["deberta-p2c-index"])
    (q, k), at = queries_and_keys(5, 5), torch.arange(5)
    with torch.no_grad():
        encoding.key_proj.weight.zero_(), encoding.key_proj.bias.zero_()
    queries = encoding.query_proj(encoding.table).view(-1, HEADS, WIDTH).transpose(0, 1)
    index = (-(at[:, None] - at) + 3).clamp(0, 5).expand(2, HEADS, 5, 5)
    wanted = (k @ queries.mT).gather(-1, index).mT / math.sqrt(3 * WIDTH)
    torch.testing.assert_close(encoding.bias(q, k, at, at), wanted)


def test_the_key_term_has_the_scale_of_the_query_under_the_scale_of_the_published_code():
    encoding = build(departures=["embed-dim-scale"])
    assert encoding.key_scale == pytest.approx((3 * HEADS * WIDTH) ** -0.5)


def edits(encoding):
    """Changes of the weights, of which only some are known to autograd."""
    yield lambda: encoding.table.data.mul_(1.5)
    yield lambda: encoding.key_proj.bias.data.add_(1)
    yield lambda: setattr(encoding.query_proj.weight, "data", encoding.query_proj.weight * 2)
    yield lambda: encoding.float()
    yield lambda: encoding.share_with(build(seed=1))


@pytest.mark.parametrize("inference", [False, True])
def test_kept_rows_follow_every_change_of_the_weights(inference):
    encoding, (q, k), at = build(), [x.detach() for x in queries_and_keys(5, 5)], torch.arange(5)
    for edit in edits(encoding):
        with torch.inference_mode(inference):
            before = encoding.bias(q, k, at, at)
        with torch.no_grad():
            edit()
        with torch.inference_mode(inference):
            after = encoding.bias(q, k, at, at)
        wanted = encoding.bias(q, k, at, at).detach()  # with gradients nothing is kept
        torch.testing.assert_close(after, wanted)
        assert not torch.equal(after, before)


def test_kept_rows_are_not_part_of_a_copy_or_of_the_state():
    encoding, (q, k), at = build(), queries_and_keys(5, 5), torch.arange(5)
    with torch.no_grad():
        encoding.bias(q, k, at, at)
    assert copy.deepcopy(encoding)._key_rows._entry is None
    assert len(encoding.state_dict()) == 5


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
