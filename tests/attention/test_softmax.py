"""Fused softmax attention against its definition."""

import itertools

import pytest
import torch

from lrpe_fairseq.attention.softmax import softmax_attention, softmax_attention_naive

BATCH, HEADS, D = 3, 2, 6


def example(rows, columns):
    generator = torch.Generator().manual_seed(rows + columns)
    return [
        torch.randn(BATCH, HEADS, n, D, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (rows, columns, columns)
    ]


def options_for(rows, columns, causal, padded, biased):
    mask = None
    if padded:
        mask = torch.zeros(BATCH, columns, dtype=torch.bool)
        mask[1, : columns // 2], mask[2, 1 + columns // 2 :] = True, True
    bias = torch.randn(1, HEADS, rows, columns, dtype=torch.float64) if biased else None
    return {"causal": causal, "scale": 0.3, "key_padding_mask": mask, "bias": bias}


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 2), (65, 65), (1, 9), (4, 9)])
@pytest.mark.parametrize(
    ("causal", "padded", "biased"), list(itertools.product([False, True], repeat=3))
)
def test_fused_equals_naive_in_outputs_and_gradients(rows, columns, causal, padded, biased):
    options = options_for(rows, columns, causal, padded, biased)
    inputs = example(rows, columns)
    results = []
    for function in (softmax_attention, softmax_attention_naive):
        out = function(*inputs, **options)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append([out, *torch.autograd.grad(out, inputs, weights)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


def test_a_query_that_sees_only_padding_gets_zeros_and_finite_gradients():
    inputs = example(4, 4)
    mask = torch.zeros(BATCH, 4, dtype=torch.bool)
    mask[0, :2] = True  # left padding: queries 0 and 1 see no key
    out = softmax_attention(*inputs, causal=True, scale=1.0, key_padding_mask=mask)
    assert torch.count_nonzero(out[0, :, :2]) == 0
    grads = torch.autograd.grad(out.sum(), inputs)
    assert all(g.isfinite().all() for g in grads)
    assert all(torch.count_nonzero(g[0, :, :2]) == 0 for g in grads)


def test_what_stands_at_padding_leaks_nowhere():
    q, k, v = (x.detach() for x in example(5, 5))
    mask = torch.zeros(BATCH, 5, dtype=torch.bool)
    mask[0, 3:] = True
    clean = softmax_attention(q, k, v, causal=False, scale=1.0, key_padding_mask=mask)
    dead = mask[:, None, :, None]
    k, v = k.masked_fill(dead, 1e9), v.masked_fill(dead, 1e9)
    spoilt = softmax_attention(q, k, v, causal=False, scale=1.0, key_padding_mask=mask)
    assert torch.equal(clean, spoilt)


def test_a_rescoring_function_acts_before_masking_and_softmax():
    q, k, v = (x.detach() for x in example(5, 5))
    halved = softmax_attention_naive(
        q, k, v, causal=True, scale=1.0, rescore=lambda scores: scores * 0.5
    )
    torch.testing.assert_close(halved, softmax_attention(q, k, v, causal=True, scale=0.5))
