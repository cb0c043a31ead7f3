"""Transformer-XL: gathers by distance against the naive pairwise form, and memory."""

import math

import pytest
import torch

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.encodings.core.positions import counted
from lrpe_fairseq.encodings.scores.transformer_xl import sinusoid
from tests.encodings.lags import assert_same_with_gradients

HEADS, WIDTH = 2, 4


def build(causal=True, heads=HEADS, width=WIDTH, seed=0, departures=()):
    options = EncodingOptions(frozenset(departures))
    given = {"causal": causal, "seed": seed, "options": options}
    encoding = build_encoding("transformer-xl", width, heads, **given).double()
    torch.nn.init.normal_(encoding.u, generator=encoding.spec.generator(90))
    torch.nn.init.normal_(encoding.v, generator=encoding.spec.generator(91))
    return encoding


def example(memory, length, heads=HEADS, width=WIDTH, batch=2):
    generator = torch.Generator().manual_seed(memory * 100 + length)
    q = torch.randn(batch, heads, length, width, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, heads, memory + length, width, generator=generator).double()
    return q.requires_grad_(), k.requires_grad_()


def positions_of(memory, length, first=0):
    """Of queries and keys, as attention counts them."""
    last, device = first + memory + length, torch.device("cpu")
    return counted(last, device, first + memory), counted(last, device, first)


def naive(encoding, q, k, q_positions, k_positions):
    """The bias from W R of every pair, in O(T S (H D)^2)."""
    q, of_keys = encoding._content(q, k)
    distance = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)
    keys = encoding.position_keys(sinusoid(distance, encoding.r_proj.in_features), q.dtype)
    of_position = (q.unsqueeze(-2) * keys).sum(-1)  # B H T S
    after = (distance < 0).unsqueeze(-3) & encoding.spec.causal
    return of_keys + of_position.masked_fill(after, 0.0)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("memory", [0, 5, 64])
def test_the_gathers_are_the_naive_form_in_outputs_and_gradients(memory, length, causal, counted):
    encoding = build(causal)
    q, k = example(memory, length)
    positions = positions_of(memory, length, first=3)
    if not counted:  # a batch whose second text begins with padding
        pads = torch.tensor([[0], [min(3, length - 1)]])
        positions = [(p - 3 - pads).clamp_min(0) for p in positions]
    fast, slow = encoding.bias(q, k, *positions), naive(encoding, q, k, *positions)
    assert_same_with_gradients(fast, slow, [q, k, *encoding.parameters()])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("departures", "wide"), [((), 1), (("embed-dim-scale",), 2)])
def test_scores_are_the_four_terms_written_out_for_every_pair(departures, wide, causal):
    heads, width, memory, length = 2, 6, 3, 4
    encoding = build(causal, heads, width, departures=departures)
    query, k = example(memory, length, heads, width, batch=1)
    q_positions, k_positions = positions_of(memory, length)
    q = query * (wide * width) ** -0.5
    scores = encoding(q @ k.transpose(-1, -2), q, k, q_positions, k_positions)
    w = encoding.r_proj.weight.view(heads, width, heads * width)
    for h in range(heads):
        for i in range(length):
            for j in range(memory + (i + 1 if causal else length)):
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


def test_irregular_and_far_positions_are_served_without_a_table_between_them():
    encoding = build(causal=False, heads=1, width=5)  # an odd width of the model
    q, k = example(2, 3, heads=1, width=5)
    positions = torch.tensor([7, 2**31, 0]), torch.tensor([5, 0, 3, 2**31, 40])
    fast, slow = encoding.bias(q, k, *positions), naive(encoding, q, k, *positions)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)


def test_sinusoids_are_exact_at_distance_100_000_and_survive_half_precision():
    encoding = build_encoding("transformer-xl", 4, 2, causal=True)
    assert abs(sinusoid(torch.tensor([100_000]), 8)[0, 0] - math.sin(100_000)) < 1e-12
    q, k = (x.detach().half() for x in example(0, 5))
    k = torch.cat([k[:, :, :1], k], dim=2)
    positions = torch.arange(100_000, 100_005), torch.tensor([0, *range(100_000, 100_005)])
    expected = naive(encoding.double(), q.double(), k.double(), *positions)
    bias = encoding.float().half().bias(q, k, *positions)
    assert bias.dtype == torch.float16
    assert encoding.u.dtype == torch.float32
    torch.testing.assert_close(bias.double(), expected, rtol=5e-3, atol=5e-3)
