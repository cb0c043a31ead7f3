"""Fused softmax attention against its definition."""

import itertools

import pytest
import torch

from lrpe_fairseq.attention import softmax
from lrpe_fairseq.attention.softmax import (
    SoftmaxState,
    encoded_attention,
    extend_state,
    reorder_state,
    softmax_attention,
    softmax_attention_naive,
)
from lrpe_fairseq.attention.tokens import Tokens, visible_pairs
from lrpe_fairseq.encodings import build_encoding

BATCH, HEADS, D = 3, 2, 6


def example(rows, columns, values=D):
    generator = torch.Generator().manual_seed(rows + columns)
    return [
        torch.randn(BATCH, HEADS, *n, generator=generator, dtype=torch.float64).requires_grad_()
        for n in ((rows, D), (columns, D), (columns, values))
    ]


def options_for(rows, columns, causal, padded, biased):
    mask = None
    if padded:
        mask = torch.zeros(BATCH, columns, dtype=torch.bool)
        mask[1, : columns // 2], mask[2, 1 + columns // 2 :] = True, True
    bias = torch.randn(1, HEADS, rows, columns, dtype=torch.float64) if biased else None
    return {"visible": seen(rows, columns, causal, mask), "scale": 0.3, "bias": bias}


def seen(rows, columns, causal, mask=None):
    queries, keys = Tokens(torch.arange(rows)), Tokens(torch.arange(columns), padding=mask)
    return visible_pairs(queries, keys, causal)


@pytest.mark.parametrize(
    ("rows", "columns", "values"), [(1, 1, D), (2, 2, 4), (65, 65, D), (1, 9, D), (4, 9, 4)]
)
@pytest.mark.parametrize(
    ("causal", "padded", "biased"), list(itertools.product([False, True], repeat=3))
)
def test_fused_equals_naive_in_outputs_and_gradients(rows, columns, values, causal, padded, biased):
    options = options_for(rows, columns, causal, padded, biased)
    inputs, results = example(rows, columns, values), []
    for function in (softmax_attention, softmax_attention_naive):
        out = function(*inputs, **options)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append([out, *torch.autograd.grad(out, inputs, weights)])
    torch.testing.assert_close(*results, rtol=1e-7, atol=1e-7)


def test_a_query_that_sees_only_padding_gets_zeros_and_finite_gradients():
    inputs = example(4, 4)
    mask = torch.zeros(BATCH, 4, dtype=torch.bool)
    mask[0, :2] = True  # left padding: queries 0 and 1 see no key
    out = softmax_attention(*inputs, scale=1.0, visible=seen(4, 4, True, mask))
    assert torch.count_nonzero(out[0, :, :2]) == 0
    grads = torch.autograd.grad(out.sum(), inputs)
    assert all(g.isfinite().all() for g in grads)
    assert all(torch.count_nonzero(g[0, :, :2]) == 0 for g in grads)


def test_what_stands_at_padding_leaks_nowhere():
    q, k, v = (x.detach() for x in example(5, 5))
    mask = torch.zeros(BATCH, 5, dtype=torch.bool)
    mask[0, 3:] = True
    visible = seen(5, 5, False, mask)
    clean = softmax_attention(q, k, v, scale=1.0, visible=visible)
    dead = mask[:, None, :, None]
    k, v = k.masked_fill(dead, 1e9), v.masked_fill(dead, 1e9)
    spoilt = softmax_attention(q, k, v, scale=1.0, visible=visible)
    assert torch.equal(clean, spoilt)


def test_a_rescoring_function_acts_before_masking_and_softmax():
    q, k, v = (x.detach() for x in example(5, 5))
    visible = {"visible": seen(5, 5, True)}
    halved = softmax_attention_naive(
        q, k, v, scale=1.0, rescore=lambda scores, visible: scores * 0.5, **visible
    )
    torch.testing.assert_close(halved, softmax_attention(q, k, v, scale=0.5, **visible))


def state_of(tokens, seed=0, gates=2):
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 3, 2, tokens, 4, generator=generator)
    padding = torch.rand(3, tokens, generator=generator) < 0.3
    sums = torch.randn(3, gates, tokens, generator=generator, dtype=torch.float64)
    return SoftmaxState(keys, values, torch.arange(tokens).expand(3, tokens), padding, sums)


def joined(states):
    parts = zip(*(state.parts for state in states), strict=True)
    return list(map(torch.cat, parts, (2, 2, 1, 1, 2)))


def test_a_state_of_inference_mode_goes_on_outside_it():
    start, later = state_of(2), [state_of(1, seed) for seed in (1, 2)]
    with torch.inference_mode():
        state = extend_state(start, later[0])
    with torch.no_grad():
        state = extend_state(state, later[1])
    torch.testing.assert_close(list(state.parts), joined([start, *later]), rtol=0, atol=0)


@torch.no_grad()
def test_a_state_continued_twice_gives_two_states():
    start, a, b = extend_state(state_of(2), state_of(1, 1)), state_of(1, 2), state_of(1, 3)
    kept = [part.clone() for part in start.parts]
    first, second = extend_state(start, a), extend_state(start, b)
    torch.testing.assert_close(list(first.parts), joined([start, a]), rtol=0, atol=0)
    torch.testing.assert_close(list(second.parts), joined([start, b]), rtol=0, atol=0)
    torch.testing.assert_close(list(start.parts), kept, rtol=0, atol=0)


@torch.no_grad()
def test_a_reordered_state_goes_on_without_touching_the_original():
    start, order = extend_state(state_of(2), state_of(1, 1)), torch.tensor([2, 2, 0, 1])
    expected = [part[order] for part in start.parts]
    swapped = reorder_state(start, order)
    torch.testing.assert_close(list(swapped.parts), expected, rtol=0, atol=0)
    more = SoftmaxState(*(part[order] for part in state_of(1, 2).parts))
    after = extend_state(swapped, more)
    torch.testing.assert_close(list(after.parts), joined([swapped, more]), rtol=0, atol=0)
    other = extend_state(start, state_of(1, 3))
    torch.testing.assert_close(list(other.parts), joined([start, state_of(1, 3)]), rtol=0, atol=0)


@torch.no_grad()
def test_tokens_are_written_into_room_that_is_kept():
    state = extend_state(state_of(4), state_of(1))
    addresses = set()
    for _ in range(100):
        state = extend_state(state, state_of(1))
        addresses.add(state.keys.data_ptr())
    assert len(addresses) <= 5  # 10, 22, 46, 94, 190 tokens


@pytest.mark.parametrize(("batch", "queries"), [(1, 128), (8, 128), (64, 32)])
def test_blocks_of_causal_attention_on_a_cpu_have_few_queries_but_not_too_few(batch, queries):
    q, k = torch.empty(batch, 4, 2048, 1), torch.empty(batch, 4, 2048, 1)
    block_of = softmax.blocks.block_of
    assert block_of(q, k, causal=True, window=None) == queries * batch * 4 * 2048
    assert block_of(q, k, causal=True, window=128) == max(2**20, 128 * batch * 4 * 256)
    every = 2**24
    assert block_of(q, k, causal=False, window=None) == every
    assert block_of(q.to("meta"), k.to("meta"), causal=True, window=None) == every


@pytest.mark.parametrize("name", ["t5", "permuteformer"])
def test_dropout_acts_on_the_weights_of_every_block(name, monkeypatch):
    length = 40
    monkeypatch.setattr(softmax.blocks, "BLOCK", 7 * 2 * length)
    encoding = build_encoding(name, 4, 2, causal=True)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, length, 4, generator=generator, dtype=torch.float64)
    tokens, v = Tokens(torch.arange(length)), torch.eye(length).double().expand(1, 2, -1, -1)
    whole, dropped = (
        encoded_attention(encoding, q, k, v, tokens, tokens, causal=True, dropout=p)
        for p in (0.0, 0.3)
    )
    seen = torch.ones(length, length).tril().bool().expand_as(whole)
    gone = dropped[seen] == 0
    assert 0.25 < gone.double().mean() < 0.35
    torch.testing.assert_close(dropped[seen][~gone], whole[seen][~gone] / 0.7)


@pytest.mark.parametrize(
    "name", ["none", "t5", "fox", "cape-kerple", "stick-breaking", "cosformer"]
)
def test_segments_and_a_window_are_the_documents_and_tokens_alone(name):
    """Query s sees keys t of its own document with s - window < t <= s."""
    encoding, length = build_encoding(name, 4, 2, causal=True), 11
    q, k, v = torch.randn(3, 1, 2, length, 4, generator=torch.Generator().manual_seed(0))
    q, k = encoding(q, k, *2 * [torch.arange(length)]) if encoding.decomposable else (q, k)
    documents, sums = torch.tensor([[0] * 4 + [1] * 6 + [2]]), torch.rand(1, 2, length).cumsum(-1)
    sums = -sums.double() if name == "fox" else None
    tokens = Tokens(torch.arange(length), segments=documents, window=3, sums=sums)
    found = encoded_attention(encoding, q, k, v, tokens, tokens, causal=True)
    for s in range(length):
        first = max(s - 2, [0, 4, 10][documents[0, s]])
        keys = Tokens(torch.arange(length), sums=sums).of(slice(first, s + 1))
        own = keys.of(slice(s - first, s - first + 1))
        part = q[:, :, s : s + 1], k[:, :, first : s + 1], v[:, :, first : s + 1]
        alone = encoded_attention(encoding, *part, own, keys, causal=True)
        torch.testing.assert_close(found[:, :, s : s + 1], alone)
