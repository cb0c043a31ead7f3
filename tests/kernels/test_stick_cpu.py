"""Stick-breaking attention in tiles on a CPU against its definition, in outputs and gradients."""

import pytest
import torch

from lrpe_fairseq.attention.softmax import encoded_attention
from lrpe_fairseq.attention.tokens import Tokens
from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.kernels import loader
from lrpe_fairseq.kernels.flash import stick_cpu
from tests.kernels.flash_cases import assert_near
from tests.kernels.stick_cases import exact, inputs, results

CASES = {
    "plain": {"T": 50},
    "large scores": {"T": 50, "size": 60.0, "D": 64},
    "a long reach": {"T": 50, "near": -6.0},
    "a reach of a few keys": {"T": 100, "near": 8.0},
    "after a cache": {"T": 20, "S": 75, "near": -2.0},
    "whole tiles": {"T": 32, "S": 64},
    "one query": {"T": 1, "S": 40},
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(stick_cpu, "TILE", 16)


def attention(q, k, v, *, scale, **without):
    assert not any(x is not None and x is not False for x in without.values()), without
    return stick_cpu.stick_attention(q, k, v, scale)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 3e-5)])
def test_tiles_equal_the_definition_in_outputs_and_gradients(case, dtype, bound):
    tensors, options = inputs(dtype=dtype, **CASES[case])
    assert_near(results(attention, tensors, options), exact(tensors, options), bound)


@pytest.mark.parametrize("largest", [50.0, 1e4, 1e8])
def test_a_large_score_is_not_rounded_away(largest):
    """The key with it takes all that newer keys leave: the weights sum to 1."""
    q, k = torch.ones(1, 1, 40, 1), torch.full((1, 1, 40, 1), -9.0)
    k[:, :, 30] = largest
    out = stick_cpu.stick_attention(q, k, torch.ones(1, 1, 40, 1), 1.0)
    torch.testing.assert_close(out[:, :, 31:], torch.ones(1, 1, 9, 1), rtol=1e-6, atol=0)


def test_another_default_device_changes_nothing():
    tensors, options = inputs(T=40)
    wanted = stick_cpu.stick_attention(*tensors.values(), options["scale"])
    with torch.device("meta"):
        found = stick_cpu.stick_attention(*tensors.values(), options["scale"])
    assert torch.equal(found, wanted)


def test_several_gradients_at_once_are_those_of_one_after_the_other():
    q, k, v = (torch.randn(1, 1, 20, 3, requires_grad=True) for _ in "qkv")
    out = stick_cpu.stick_attention(q, k, v, 0.5)
    several = torch.randn(2, *out.shape)
    found = torch.autograd.grad(out, q, several, retain_graph=True, is_grads_batched=True)[0]
    wanted = [torch.autograd.grad(out, q, grad, retain_graph=True)[0] for grad in several]
    torch.testing.assert_close(found, torch.stack(wanted))


def test_keys_without_a_weight_are_not_read():
    """Scores near 8 leave nothing after 14 keys; the first 48 values are NaN."""
    tensors, options = inputs(T=100, B=1, H=1, near=8.0)
    tensors["v"][:, :, :48] = torch.nan
    weights = torch.zeros(1, 1, 100, 16)
    weights[:, :, 80:] = 1
    found = results(attention, tensors, options, weights)
    assert found["out"][:, :, 80:].isfinite().all()
    assert found["q"][:, :, 80:].isfinite().all()


def test_second_derivatives_are_those_of_the_definition():
    q, k, v = (torch.randn(1, 1, 20, 3, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    assert torch.autograd.gradgradcheck(lambda *x: stick_cpu.stick_attention(*x, 0.5), (q, k, v))


def attended(mask, **options):
    """Return what serves attention in a text of 40 tokens, its output and the gradient of q."""
    q, k, v = inputs(T=40, dtype=torch.float64)[0].values()
    q.requires_grad_()
    tokens = Tokens(torch.arange(40), **mask)
    loader.SERVED.clear()
    encoding = build_encoding("stick-breaking", 16, 2, causal=True)
    torch.manual_seed(0)
    out = encoded_attention(encoding, q, k, v, tokens, tokens, causal=True, **options)
    ((served,),) = loader.SERVED.values()
    return served, out, torch.autograd.grad(out.square().sum(), q)[0]


HIDDEN = torch.arange(40).expand(2, -1) < 3
MASKS = {
    "nothing": {},
    "padding": {"padding": HIDDEN},
    "documents": {"segments": HIDDEN.long()},
    "window": {"window": 9},
}


@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_the_same_without_tiles_and_with_masks_has_none(mask, monkeypatch):
    monkeypatch.setattr(loader, "SERVED", {})
    served, *found = attended(MASKS[mask])
    assert ("tiles" in served) == (mask == "nothing")
    monkeypatch.setenv(loader.VARIABLE, "0")
    served, *wanted = attended(MASKS[mask])
    assert "tiles" not in served
    torch.testing.assert_close(found, wanted)


def test_dropout_is_not_computed_in_tiles(monkeypatch):
    monkeypatch.setattr(loader, "SERVED", {})
    assert "tiles" not in attended({}, dropout=0.5)[0]
