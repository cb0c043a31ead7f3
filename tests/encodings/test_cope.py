"""CoPE against loops over pairs, and its special cases."""

import math

import pytest
import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from tests.encodings.lags import assert_same_with_gradients, queries_and_keys

HEADS, WIDTH = 2, 4


def build(positions=4, departures=()):
    options = EncodingOptions(fidelity=frozenset(departures), cope_positions=positions)
    encoding = build_encoding("cope", WIDTH, HEADS, causal=True, options=options).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        encoding.table.copy_(torch.randn(encoding.table.shape, generator=generator))
    return encoding


def scores_of(encoding, q, k, visible=None):
    q = q * WIDTH**-0.5
    positions = torch.zeros(q.shape[-2]).long(), torch.zeros(k.shape[-2]).long()
    return encoding(q @ k.mT, q, k, *positions, visible)


def by_pairs(encoding, q, k, hidden, unscaled=False):
    """The definition for keys up to s, in a loop over pairs; ``hidden`` keys are not counted."""
    table, last = encoding.table, encoding.table.shape[0] - 1
    own = [k.shape[-2] - q.shape[-2] + i for i in range(q.shape[-2])]
    found = torch.zeros(*q.shape[:-1], k.shape[-2]).double()
    for b, h, i, t in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        if t > own[i] or t in hidden[b]:
            continue
        query, p = q[b, h, i], 0.0
        for u in range(t, own[i] + 1):
            if u not in hidden[b]:
                p = p + torch.sigmoid(query @ k[b, h, u] / math.sqrt(WIDTH))
        p = min(p, torch.tensor(float(last), dtype=torch.float64))
        low, high = math.floor(p.item()), math.ceil(p.item())
        e = (p - low) * table[high] + (1 - (p - low)) * table[low]
        scale = 1.0 if unscaled else math.sqrt(WIDTH)
        found[b, h, i, t] = query @ k[b, h, t] / math.sqrt(WIDTH) + query @ e / scale
    return found


@pytest.mark.parametrize("positions", [2, 3, 64])
@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (3, 6), (1, 6)])
def test_scores_and_gradients_are_the_definition_written_out_for_every_pair(
    rows, columns, positions
):
    encoding, (q, k) = build(positions), queries_and_keys(rows, columns)
    hidden = [set(), {0, 2}]
    visible = torch.ones(2, 1, rows, columns, dtype=torch.bool).tril(columns - rows)
    visible[1, ..., [0, 2]] = False
    wanted = by_pairs(encoding, q, k, hidden)
    found = scores_of(encoding, q, k, visible) * visible
    assert_same_with_gradients(found, wanted, [q, k, encoding.table])


def test_the_departure_does_not_scale_the_term_of_positions():
    encoding, (q, k) = build(departures=["cope-unscaled-position"]), queries_and_keys(6, 6)
    nothing = [set(), set()]
    found, plain = (scores_of(e, q, k).tril() for e in (encoding, build()))
    torch.testing.assert_close(found, by_pairs(encoding, q, k, nothing, unscaled=True))
    content = (q @ k.mT * WIDTH**-0.5).tril()
    torch.testing.assert_close(found - content, 2 * (plain - content))  # sqrt 4


def test_the_departure_is_unscaled_under_the_scale_of_the_published_code_too():
    fidelity = frozenset(["cope-unscaled-position", "embed-dim-scale"])
    module = MultiheadAttention(
        8,
        HEADS,
        attention_type="softmax",
        position_encoding="cope",
        causal=True,
        options=EncodingOptions(fidelity=fidelity),
    )
    assert module.scale * module.encoding.scale == pytest.approx(1)


def test_a_table_of_zeros_is_no_encoding_and_how_it_starts():
    encoding, (q, k) = build_encoding("cope", WIDTH, HEADS, causal=True), queries_and_keys(6, 6)
    assert not encoding.table.any()
    assert torch.equal(scores_of(encoding, q, k), q * WIDTH**-0.5 @ k.mT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_counts_in_half_types_do_not_lose_keys(dtype):
    """2048 open gates count to 2048, where bfloat16 sums stop at 256."""
    encoding = build(positions=4096)
    scores = torch.full((1, HEADS, 1, 2048), 60.0, dtype=dtype)
    counts = encoding.counts(scores, None)
    assert counts.dtype == torch.float32
    assert torch.equal(counts[0, 0, 0], torch.arange(2048, 0, -1.0))
