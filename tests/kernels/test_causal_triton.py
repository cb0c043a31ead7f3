"""The Triton kernels against the naive form in float64, in outputs and gradients.

``test_sweep_triton`` tests those for half precision.

Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1, set in tests/conftest.py).
"""

import importlib
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from lrpe_fairseq.attention import linear
from lrpe_fairseq.attention.linear import EPS, linear_attention, linear_attention_naive
from lrpe_fairseq.kernels import loader, triton_calls
from lrpe_fairseq.kernels.linear import causal

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

from lrpe_fairseq.kernels.linear import causal_triton
from tests import triton_probe
from tests.pairwise import pairwise
from tests.references import assert_near

pytestmark = pytest.mark.skipif(bool(triton_probe.why_not()), reason=triton_probe.why_not())

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = 2


def example(length, keys=20, values=24, dtype=torch.float32, batch=1):
    generator = torch.Generator().manual_seed(length)
    widths = (keys, keys, values)
    drawn = (torch.rand(batch, HEADS, length, w, generator=generator) for w in widths)
    return [x.to(DEVICE, dtype).requires_grad_() for x in drawn]


def naive(inputs, normalizer, decay):
    exact = [x.detach().double().requires_grad_() for x in inputs]
    rate = None if decay is None else decay.double()
    out = linear_attention_naive(*exact, causal=True, normalizer=normalizer, log_decay=rate)
    return out, exact


def with_gradients(found, inputs):
    """The results that are not None, and the gradients of a weighted sum of their elements."""
    found = causal.present(*found)
    weights = [torch.arange(x.numel(), device=DEVICE).cos().view_as(x) for x in found]
    loss = sum((x * w.to(x)).sum() for x, w in zip(found, weights, strict=True))
    return [*found, *torch.autograd.grad(loss, inputs)]


def decay_of(kind):
    return None if kind == "plain" else torch.tensor([-0.3, -0.01], device=DEVICE)


@pytest.mark.parametrize(
    ("length", "normalizer", "kind"),
    pairwise([1, 63, 64, 65, 150], ["rotated", "none"], ["plain", "decay"]),
)
def test_the_kernels_equal_the_naive_form_in_outputs_and_gradients(length, normalizer, kind):
    inputs, decay = example(length, batch=2 if length < 100 else 1), decay_of(kind)
    wanted = "normalized" if normalizer == "rotated" else "numerator"
    out, _ = causal_triton.causal_sums(*inputs, wanted, decay, EPS)
    expected, exact = naive(inputs, normalizer, decay)
    assert_near([out], [expected], 2e-6)
    weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out)
    wanted = torch.autograd.grad(expected, exact, weights.double())
    assert_near(torch.autograd.grad(out, inputs, weights), wanted, 1e-5)


@pytest.mark.parametrize(
    ("length", "keys", "wanted", "batch"),
    [
        (1, 20, "normalized", 2),
        (64, 70, "sums", 1),
        (65, 20, "normalized", 2),
        (130, 20, "numerator", 1),
        (130, 20, "sums", 1),
    ],
)
def test_a_decay_per_token_equals_the_definition_in_outputs_and_gradients(
    length, keys, wanted, batch
):
    """Gates down to e^-50, and shut ones."""
    gates = -50 * torch.rand(batch, HEADS, length).pow(4)
    gates[:, :, ::17] = linear.LOWEST_DECAY
    inputs = [*example(length, keys, batch=batch), gates.to(DEVICE).requires_grad_()]
    results = []
    for form, dtype in ((causal_triton.causal_sums, None), (causal.definition, torch.float64)):
        *given, log_decay = own = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
        results.append(with_gradients(form(*given, wanted, log_decay, EPS), own))
    assert_near(*results, 1e-5)


def test_a_constant_decay_that_needs_a_gradient_gets_one():
    inputs = [*example(70), decay_of("decay").requires_grad_()]
    forms = (causal_triton.causal_sums, causal.definition)
    sums = [form(*inputs[:3], "normalized", inputs[3], EPS)[0].square().sum() for form in forms]
    assert_near(*(torch.autograd.grad(x, inputs) for x in sums), 2e-5)


@pytest.mark.parametrize(
    ("keys", "values", "programs"),
    [(32, 32, 256), (64, 64, 256), (64, 64, 1), (128, 64, 1), (200, 96, 1), (5, 3, 256)],
)
def test_every_width_is_served_complex_features_too(keys, values, programs, monkeypatch):
    """With the blocks of many sequences (1), and with the smaller ones of few (256)."""
    monkeypatch.setattr(causal_triton, "PROGRAMS", programs)
    inputs = [x[:, :1] for x in example(70, keys, values)]
    out, denominator = causal_triton.causal_sums(*inputs, "sums", None, EPS)
    numerator, exact = naive(inputs, "none", None)
    scores = (exact[0] @ exact[1].mT).tril().sum(-1)
    assert_near([out, denominator], [numerator, scores], 2e-6)
    found, expected = with_gradients([out, denominator], inputs), [numerator, scores]
    assert_near(found, with_gradients(expected, exact), 1e-5)


def test_a_clamped_denominator_has_no_gradient():
    q, k, v = example(80)
    with torch.no_grad():
        k.sub_(0.5)  # denominators of either sign
    out, _ = causal_triton.causal_sums(q, k, v, "normalized", None, EPS)
    reference = linear_attention(q, k, v, causal=True)
    den = (q @ k.mT).tril().sum(-1)
    # between the two float32 noise decides the quotient
    for part in (den > 0.5, den < -0.5):
        assert_near(*([x * part.unsqueeze(-1)] for x in (out, reference)), 1e-5)
    assert (den < EPS).any()
    assert (den > EPS).any()
    weights = torch.where(den > 0.5, 1.0, 0.0).unsqueeze(-1).expand_as(out)
    ours = torch.autograd.grad(out, (q, k, v), weights)
    theirs = torch.autograd.grad(reference, (q, k, v), weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_half_precision_inputs_are_summed_in_float32(dtype):
    inputs = [x[:, :1] for x in example(66, 130, 40, dtype)]
    out, _ = causal_triton.causal_sums(*inputs, "normalized", None, EPS)
    expected, exact = naive(inputs, "rotated", None)
    assert out.dtype == torch.float32
    assert_near([out], [expected], 2e-6 if DEVICE == "cpu" else 2e-3)
    grads = torch.autograd.grad(out.sum(), inputs)
    assert all(grad.dtype == dtype for grad in grads)
    assert_near(grads, torch.autograd.grad(expected.sum(), exact), 2e-2)


@pytest.mark.parametrize(
    ("normalizer", "dtype", "is_causal"),
    pairwise(linear.NORMALIZERS, [torch.float32, torch.bfloat16], [True, False]),
)
def test_linear_attention_gives_the_same_with_and_without_the_kernels(
    normalizer, dtype, is_causal, monkeypatch
):
    q, k, v = example(100, 16, 16, dtype, batch=2)
    mask = torch.zeros(2, 100, dtype=torch.bool, device=DEVICE)
    mask[0, :30] = True
    options = {"causal": is_causal, "normalizer": normalizer, "key_padding_mask": mask}
    options["content"] = (q, k)
    expected = linear_attention(q, k, v, **options)
    calls = []
    monkeypatch.setattr(causal_triton, "serves", lambda *_: calls.append(1) or True)
    monkeypatch.setattr(loader, "triton_kernels", importlib.import_module)
    found = linear_attention(q, k, v, **options)
    assert calls
    assert found.dtype == expected.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_causal", [True, False])
def test_sums_before_a_norm_are_float32_from_states_in_registers(is_causal, monkeypatch):
    """They overflow float16, and rows in float32 would need the slower chunked form."""
    q, k, v = (x.detach() for x in example(100, 16, 16, torch.float16))
    given = [x.requires_grad_() for x in (q, k, 40_000 * (v - 0.5))]
    monkeypatch.setattr(causal_triton, "on_device", lambda x: True)
    monkeypatch.setattr(loader, "triton_kernels", importlib.import_module)
    options, results = {"causal": is_causal, "normalizer": "layernorm"}, []
    with mock.patch.object(causal_triton, "chunked_sums", side_effect=AssertionError):
        out = linear_attention(*given, **options, dtype=torch.float32)
    assert out.dtype == torch.float32
    assert out.abs().max() > torch.finfo(torch.float16).max
    exact = [x.detach().double().requires_grad_() for x in given]
    for rows, sums in ((given, out), (exact, linear_attention_naive(*exact, **options))):
        normalized = F.layer_norm(sums, sums.shape[-1:])
        weights = torch.arange(sums.numel(), device=DEVICE).cos().view_as(sums)
        grads = torch.autograd.grad((normalized * weights).sum(), rows)
        assert all(grad.dtype == x.dtype for grad, x in zip(grads, rows, strict=True))
        results.append([normalized, *grads])
    assert_near(*results, 2e-3)


def test_without_a_gpu_the_kernels_are_not_asked():
    if DEVICE == "cpu":
        assert loader.triton_kernels(triton_calls.CAUSAL) is None
        q = torch.rand(1, 1, 4, 16)
        assert not causal_triton.serves(q, q)
