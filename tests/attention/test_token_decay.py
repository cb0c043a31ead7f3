"""Linear attention with a decay per token: every form against the definition."""

import pytest
import torch

from lrpe_fairseq.attention.linear import linear_attention, linear_attention_naive
from lrpe_fairseq.kernels.linear import causal_cpu

B, H, D, E = 2, 3, 4, 5


def example(length, seed=0):
    """q, k, v, log_decay in float64; some gates are nearly shut."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.rand(2, B, H, length, D, generator=generator, dtype=torch.float64)
    v = torch.randn(B, H, length, E, generator=generator, dtype=torch.float64)
    gates = torch.randn(B, H, length, generator=generator, dtype=torch.float64)
    gates = torch.nn.functional.logsigmoid(2 + 3 * gates)
    return [x.requires_grad_() for x in (q, k, v, gates)]


def dense(q, k, v, gates, normalizer, eps=1e-6):
    """The sum of each pair written out."""
    length = q.shape[-2]
    total = torch.cat([gates.new_zeros(B, H, 1), gates.cumsum(-1)], -1)
    out = torch.zeros_like(v)
    for s in range(length):
        factor = torch.exp(total[..., s + 1, None] - total[..., 1 : s + 2])
        scores = (q[:, :, s, None] * k[:, :, : s + 1]).sum(-1) * factor
        row = (scores.unsqueeze(-1) * v[:, :, : s + 1]).sum(-2)
        if normalizer == "rotated":
            row = row / scores.sum(-1, keepdim=True).clamp_min(eps)
        out = out.index_put((torch.arange(B)[:, None], torch.arange(H), torch.tensor(s)), row)
    return out


def in_pytorch(monkeypatch):
    """Disable the C++ kernel."""
    monkeypatch.setattr(causal_cpu, "serves", lambda *_: False)


@pytest.mark.parametrize("normalizer", ["rotated", "none"])
@pytest.mark.parametrize("name", ["naive", "PyTorch", "C++"])
@pytest.mark.parametrize("length", [1, 5, 64, 131])
def test_outputs_and_gradients_are_those_of_the_definition(name, length, normalizer, monkeypatch):
    form = linear_attention_naive if name == "naive" else linear_attention
    if name == "PyTorch":
        in_pytorch(monkeypatch)
    inputs = example(length)
    q, k, v, gates = inputs
    found = form(q, k, v, causal=True, normalizer=normalizer, log_decay=gates)
    wanted = dense(*inputs, normalizer)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    weights = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
    pairs = [torch.autograd.grad(out, inputs, weights) for out in (found, wanted)]
    torch.testing.assert_close(*pairs, rtol=1e-8, atol=1e-8)


def test_a_strong_decay_over_a_long_text_stays_finite():
    q, k, v, _ = (x.detach().float() for x in example(500))
    gates = torch.full((B, H, 500), -50.0).requires_grad_()
    out = linear_attention(q, k, v, causal=True, log_decay=gates)
    out.sum().backward()
    assert out.isfinite().all()
    assert gates.grad.isfinite().all()
    torch.testing.assert_close(out, v, rtol=1e-5, atol=1e-5)  # only the token itself is left


@pytest.mark.parametrize("name", ["naive", "PyTorch", "C++"])
def test_a_gate_of_minus_infinity_cuts_the_text(name, monkeypatch):
    form = linear_attention_naive if name == "naive" else linear_attention
    if name == "PyTorch":
        in_pytorch(monkeypatch)
    q, k, v, gates = example(100)
    shut = torch.zeros(100, dtype=torch.bool)
    shut[[0, 40, 41, 70]] = True
    log_decay = gates.masked_fill(shut, -torch.inf)
    found = form(q, k, v, causal=True, log_decay=log_decay)
    cuts = [slice(a, b) for a, b in ((0, 40), (40, 41), (41, 70), (70, 100))]
    rows = [[x[:, :, cut] for x in (q, k, v, gates)] for cut in cuts]
    parts = [form(*x[:3], causal=True, log_decay=x[3]) for x in rows]
    torch.testing.assert_close(found, torch.cat(parts, 2), rtol=1e-9, atol=1e-9)
    grad, wanted = (
        torch.autograd.grad(x.square().sum(), gates)[0] for x in (found, torch.cat(parts, 2))
    )
    torch.testing.assert_close(grad, wanted, rtol=1e-8, atol=1e-8)
    assert torch.equal(grad[..., shut], torch.zeros(B, H, 4, dtype=torch.float64))


def test_the_gradient_of_the_first_gate_is_exactly_zero():
    q, k, v, gates = (x.detach().float().requires_grad_() for x in example(700))
    linear_attention(q, k, v, causal=True, log_decay=gates).square().sum().backward()
    assert torch.count_nonzero(gates.grad[..., 0]) == 0
    assert torch.count_nonzero(gates.grad[..., 1:]) > 0


def test_float32_stays_accurate_over_16384_tokens_in_outputs_and_gradients():
    exact = [x.detach()[:1, :2, ..., :4] if x.dim() == 4 else x.detach()[:1, :2] for x in long()]
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in exact]
        out = linear_attention(*inputs[:3], causal=True, log_decay=inputs[3])
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() < 2e-5 * b.abs().max()


def long():
    """Gates with a memory of about 5 to 5,000 tokens."""
    q, k, v, gates = example(16384)
    return q, k, v, gates * torch.tensor([1.0, 0.1, 1e-3], dtype=gates.dtype)[:, None]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_summed_in_float32(dtype):
    q, k, v, gates = (x.detach().to(dtype).requires_grad_() for x in example(300))
    out = linear_attention(q, k, v, causal=True, log_decay=gates)
    exact = linear_attention_naive(
        q.double(), k.double(), v.double(), causal=True, log_decay=gates.double()
    )
    assert out.dtype == dtype
    assert (out - exact).abs().max() < 2 * torch.finfo(dtype).eps * exact.abs().max()
    (grad,) = torch.autograd.grad(out.float().square().sum(), gates)
    assert grad.dtype == dtype
    assert grad.isfinite().all()


def test_a_constant_decay_is_that_of_every_token_and_gets_a_gradient():
    q, k, v, _ = (x.detach() for x in example(100))
    rate = torch.tensor([-0.2, -0.01, 0.0], dtype=torch.float64, requires_grad=True)
    outs = [
        form(q, k, v, causal=True, log_decay=decay)
        for form in (linear_attention, linear_attention_naive)
        for decay in (rate, rate.detach(), rate[:, None].expand(B, H, 100))
    ]
    grads = [torch.autograd.grad(out.square().sum(), rate)[0] for out in outs if out.requires_grad]
    torch.testing.assert_close(outs, outs[:1] * 6, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grads, grads[:1] * 4, rtol=1e-8, atol=1e-8)
