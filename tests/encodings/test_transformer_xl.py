"""Transformer-XL: the left shift against the naive pairwise form, and memory."""

import math

import pytest
import torch

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.encodings.transformer_xl import end_together, left_shift, sinusoid

MEMORIES = (0, 5, 64)
LENGTHS = (1, 7, 64)
HEADS, WIDTH = 2, 4


def build(causal=True, heads=HEADS, width=WIDTH, seed=0, departures=()):
    options = EncodingOptions(frozenset(departures))
    encoding = build_encoding(
        "transformer-xl", width, heads, causal=causal, seed=seed, options=options
    ).double()
    torch.nn.init.normal_(encoding.u, generator=encoding.spec.generator(90))
    torch.nn.init.normal_(encoding.v, generator=encoding.spec.generator(91))
    return encoding


def example(memory, length, heads=HEADS, width=WIDTH, batch=2):
    generator = torch.Generator().manual_seed(memory * 100 + length)
    q = torch.randn(batch, heads, length, width, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, heads, memory + length, width, generator=generator).double()
    return q.requires_grad_(), k.requires_grad_()


def positions_of(memory, length, first=0):
    keys = torch.arange(first, first + memory + length)
    return keys[memory:].clone(), keys


def outputs_and_gradients(encoding, bias, q, k, visible):
    """The bias where ``visible``, and the gradients of a generic function of it there."""
    weight = torch.randn(bias.shape, generator=torch.Generator().manual_seed(3)).double()
    inputs = [q, k, *encoding.parameters()]
    grads = torch.autograd.grad((bias.sin() * weight * visible).sum(), inputs)
    return [bias * visible, *grads]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_the_shift_form_is_the_naive_form_in_outputs_and_gradients(memory, length, causal):
    encoding = build(causal)
    q, k = example(memory, length)
    positions = positions_of(memory, length, first=3)
    assert end_together(*positions)
    everywhere = torch.ones(length, memory + length)
    fast = outputs_and_gradients(encoding, encoding.bias(q, k, *positions), q, k, everywhere)
    slow = encoding.bias_naive(q, k, *positions)
    slow = outputs_and_gradients(encoding, slow, q, k, everywhere)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_gathering_by_distance_is_the_naive_form_in_outputs_and_gradients(memory, length, causal):
    encoding = build(causal)
    q, k = example(memory, length)
    q_positions, k_positions = positions_of(memory, length)
    pads = torch.tensor([[0], [min(3, length - 1)]])
    positions = (q_positions - pads).clamp_min(0), (k_positions - pads).clamp_min(0)
    everywhere = torch.ones(length, memory + length)
    fast = outputs_and_gradients(encoding, encoding.bias(q, k, *positions), q, k, everywhere)
    slow = encoding.bias_naive(q, k, *positions)
    slow = outputs_and_gradients(encoding, slow, q, k, everywhere)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("departures", "wide"), [((), 1), (("embed-dim-scale",), 2)])
def test_scores_are_the_four_terms_written_out_for_every_pair(departures, wide):
    heads, width, memory, length = 2, 6, 3, 4
    encoding = build(True, heads, width, departures=departures)
    query, k = example(memory, length, heads, width, batch=1)
    q_positions, k_positions = positions_of(memory, length)
    q = query * (wide * width) ** -0.5
    scores = encoding(q @ k.transpose(-1, -2), q, k, q_positions, k_positions)
    w = encoding.r_proj.weight.view(heads, width, heads * width)
    for h in range(heads):
        for i in range(length):
            for j in range(memory + i + 1):
                r = hand_made_sinusoid(memory + i - j, heads * width)
                a = query[0, h, i] @ k[0, h, j]
                b = query[0, h, i] @ (w[h] @ r)
                c = encoding.u[h] @ k[0, h, j]
                d = encoding.v[h] @ (w[h] @ r)
                expected = (a + b + c + d) / math.sqrt(wide * width)
                torch.testing.assert_close(scores[0, h, i, j], expected, rtol=1e-10, atol=1e-12)


def hand_made_sinusoid(distance, width):
    angles = [distance / 10000 ** (2 * i / width) for i in range(width // 2)]
    values = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("length", [7, 64])
@pytest.mark.parametrize("memory", [5, 64])
def test_segments_with_memory_are_one_long_segment_over_the_same_window(memory, length):
    encoding = build(causal=True)
    x, k = example(0, memory + length)
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(1)).double()
    window = torch.arange(memory + length)
    whole = attend(encoding, x, k, v, window, window)[:, :, memory:]
    segment = attend(encoding, x[:, :, memory:], k, v, window[memory:], window)
    torch.testing.assert_close(segment, whole, rtol=1e-10, atol=1e-12)
    later = window + 1000  # and it does not matter when the window was read
    segment = attend(encoding, x[:, :, memory:], k, v, later[memory:], later)
    torch.testing.assert_close(segment, whole, rtol=1e-10, atol=1e-12)


def attend(encoding, q, k, v, q_positions, k_positions):
    q = q * WIDTH**-0.5
    scores = encoding(q @ k.transpose(-1, -2), q, k, q_positions, k_positions)
    after = k_positions > q_positions.unsqueeze(-1)
    return scores.masked_fill(after, -math.inf).softmax(-1) @ v


def test_the_left_shift_moves_row_i_by_the_rows_below_it():
    x = torch.arange(12.0).view(3, 4)
    expected = torch.tensor([[2.0, 3.0, 0.0, 0.0], [5.0, 6.0, 7.0, 0.0], [8.0, 9.0, 10.0, 11.0]])
    assert torch.equal(left_shift(x, 4), expected)


def test_terms_of_position_are_zero_for_keys_after_a_causal_query_in_every_form():
    encoding = build(causal=True)
    q, k = example(2, 5)
    k = torch.zeros_like(k)  # leaves terms (b) and (d)
    positions = positions_of(2, 5)
    after = positions[1] > positions[0].unsqueeze(-1)
    as_batch = [p.expand(2, -1) for p in positions]
    for bias in (encoding.bias(q, k, *positions), encoding.bias(q, k, *as_batch)):
        assert not bias[..., after].any()
        assert bias[..., ~after].all()


def test_distances_behind_and_ahead_differ_in_a_bidirectional_model():
    encoding = build(causal=False)
    q, k = example(0, 6)
    positions = torch.arange(6)
    flipped = encoding.bias(q.flip(2), k.flip(2), positions, positions).flip(2, 3)
    straight = encoding.bias(q, k, positions, positions)
    off_diagonal = ~torch.eye(6, dtype=torch.bool)
    assert (flipped - straight).abs()[..., off_diagonal].min() > 1e-6
    torch.testing.assert_close(flipped[..., ~off_diagonal], straight[..., ~off_diagonal])


@pytest.mark.parametrize(
    ("queries", "keys", "aligned"),
    [
        ([3, 4], [0, 1, 2, 3, 4], True),
        ([0], [0], True),
        ([2, 3], [0, 1, 2, 3, 4], False),  # ends before the keys do
        ([3, 4], [0, 1, 1, 3, 4], False),  # a gap in the keys
        ([3, 4, 5], [4, 5], False),
        ([[0, 1]], [[0, 1]], False),
    ],
)
def test_the_shift_is_used_only_where_queries_end_contiguous_keys(queries, keys, aligned):
    assert end_together(torch.tensor(queries), torch.tensor(keys)) is aligned


def test_what_is_remembered_of_the_positions_follows_both_tensors():
    encoding = build(causal=True)
    q, k = example(0, 3)
    queries = torch.arange(3, 6)
    for keys in (torch.arange(3, 6), torch.tensor([0, 1, 4]), torch.arange(3, 6)):
        expected = encoding.bias_naive(q, k, queries, keys)
        torch.testing.assert_close(encoding.bias(q, k, queries, keys), expected)
    queries += 1  # in place: the same object no longer ends with the keys
    expected = encoding.bias_naive(q, k, queries, keys)
    torch.testing.assert_close(encoding.bias(q, k, queries, keys), expected)


def test_irregular_and_far_positions_are_served_without_a_table_between_them():
    encoding = build(causal=False)
    q, k = example(2, 3)
    positions = torch.tensor([7, 2**31, 0]), torch.tensor([5, 0, 3, 2**31, 40])
    fast, slow = encoding.bias(q, k, *positions), encoding.bias_naive(q, k, *positions)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)


def test_sinusoids_are_exact_at_distance_100_000_and_survive_half_precision():
    encoding = build_encoding("transformer-xl", 4, 2, causal=True)
    assert abs(sinusoid(torch.tensor([100_000]), 8)[0, 0] - math.sin(100_000)) < 1e-12
    q, k = (x.detach().half() for x in example(0, 5))
    k = torch.cat([k[:, :, :1], k], dim=2)
    positions = torch.arange(100_000, 100_005), torch.tensor([0, *range(100_000, 100_005)])
    expected = encoding.double().bias_naive(q.double(), k.double(), *positions)
    bias = encoding.float().half().bias(q, k, *positions)
    assert bias.dtype == torch.float16
    assert encoding.u.dtype == torch.float32
    torch.testing.assert_close(bias.double(), expected, rtol=5e-3, atol=5e-3)


def test_an_odd_model_width_is_served():
    encoding = build(True, heads=1, width=5)
    q, k = example(2, 3, heads=1, width=5)
    positions = positions_of(2, 3)
    fast, slow = encoding.bias(q, k, *positions), encoding.bias_naive(q, k, *positions)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)
