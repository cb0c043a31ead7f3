"""Stick-breaking attention against a stick that is broken piece by piece."""

import pytest
import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import build_encoding
from tests.encodings.lags import assert_same_with_gradients


def build():
    return build_encoding("stick-breaking", 4, 2, causal=True)


def example(rows=6, columns=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows * columns)
    return 2 * torch.randn(2, 2, rows, columns, generator=generator, dtype=torch.float64).to(dtype)


def weigh(scores, visible=None):
    return build().weigh(scores, visible, scores.dtype)


def broken_by_hand(row, own, hidden=()):
    """The weights of one query: from the newest key to the oldest, each takes its share."""
    weights, left = [torch.zeros((), dtype=row.dtype) for _ in row], 1.0
    for t in reversed(range(own)):
        if t not in hidden:
            share = torch.sigmoid(row[t])
            weights[t], left = share * left, left * (1 - share)
    return torch.stack(weights)


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (3, 6), (1, 6), (1, 1)])
def test_weights_and_gradients_are_those_of_a_stick_broken_by_hand(rows, columns):
    scores = example(rows, columns).requires_grad_()
    visible = torch.ones(2, 1, rows, columns, dtype=torch.bool)
    visible[1, ..., : columns // 2] = False  # padding of the second text
    found = weigh(scores, visible)
    by_hand = [
        broken_by_hand(row, columns - rows + i, range(columns // 2) if b else ())
        for b, text in enumerate(scores)
        for head in text
        for i, row in enumerate(head)
    ]
    wanted = torch.stack(by_hand).view_as(scores)
    if columns == 1:  # no weight depends on the scores
        assert torch.equal(found, wanted)
    else:
        assert_same_with_gradients(found, wanted, [scores])


def test_without_a_mask_the_query_sees_the_keys_before_its_own():
    scores = example(3, 6)
    visible = torch.ones(3, 6, dtype=torch.bool).tril(3)[None, None]
    assert torch.equal(weigh(scores), weigh(scores, visible))


def test_the_first_token_attends_to_nothing_and_has_a_finite_gradient():
    options = {"attention_type": "softmax", "position_encoding": "stick-breaking"}
    module = MultiheadAttention(8, 2, causal=True, **options)
    x = torch.randn(1, 1, 8, requires_grad=True)
    out, _ = module.attend(x)
    torch.testing.assert_close(out[0, 0], module.out_proj.bias)
    out.sum().backward()
    assert not x.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_in_other_types_are_right_within_their_rounding(dtype):
    scores = (10 * example(64, 2048)).to(dtype)
    wanted, found = weigh(scores.double()), weigh(scores)
    assert found.dtype == dtype
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    torch.testing.assert_close(found.double(), wanted, rtol=max(8 * eps, 1e-5), atol=tiny)


def test_scores_of_any_size_give_finite_weights_and_gradients():
    for value in (-6e4, -88.0, 88.0, 6e4):
        scores = torch.full((1, 1, 5, 5), value, dtype=torch.float16, requires_grad=True)
        weights = weigh(scores)
        weights.sum().backward()
        assert weights.isfinite().all()
        assert scores.grad.isfinite().all()
