"""The causal sums in C++: what ``test_linear`` does not ask of every form."""

import pytest
import torch

from lrpe_fairseq.attention.linear import (
    EPS,
    LOWEST_DECAY,
    linear_attention,
    linear_attention_naive,
)
from lrpe_fairseq.kernels.linear import causal, causal_cpu
from tests.references import assert_near

BATCH, HEADS = 2, 3

pytestmark = pytest.mark.skipif(
    causal_cpu.library() is None, reason="causal_cpu.cpp does not compile here"
)


def example(length, keys=20, values=24, dtype=torch.float32):
    generator = torch.Generator().manual_seed(length)
    shapes = ((BATCH, HEADS, length, width) for width in (keys, keys, values))
    return [torch.rand(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def weights_of(out):
    """As different from neighbor to neighbor as the terms of a gradient: few cancel."""
    return torch.arange(out.numel(), dtype=torch.float64).cos().to(out.dtype).view_as(out)


def results(form, inputs, wanted="normalized", log_decay=None):
    """Outputs and gradients, the denominators' among them; the fourth input is a decay."""
    q, k, v, log_decay = inputs if len(inputs) == 4 else (*inputs, log_decay)
    found = causal.present(*form(q, k, v, wanted, log_decay, EPS))
    loss = sum((x * weights_of(x)).sum() for x in found)
    return [*found, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("decay", [None, (-3.0, -0.3, -0.01)], ids=["plain", "decay"])
@pytest.mark.parametrize("wanted", causal_cpu.WANTED)
@pytest.mark.parametrize(
    ("keys", "values"), [(3, 1), (5, 3), (16, 16), (64, 64), (128, 64), (200, 96), (256, 256)]
)
def test_every_width_is_served_in_float32(keys, values, wanted, decay):
    inputs = example(70, keys, values)
    log_decay = None if decay is None else torch.tensor(decay)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    assert causal_cpu.serves(*inputs)
    found = results(causal_cpu.causal_sums, inputs, wanted, log_decay)
    assert_near(found, results(causal.definition, exact, wanted, log_decay), 1e-5)


def with_gates(inputs, dtype=None):
    """``inputs`` and gates down to e^-50, some of them shut; all as leaves of ``dtype``."""
    generator = torch.Generator().manual_seed(1)
    gates = -50 * torch.rand(*inputs[0].shape[:3], generator=generator).pow(4)
    gates[:, :, ::17] = LOWEST_DECAY
    return [x.detach().to(dtype or inputs[0].dtype).requires_grad_() for x in (*inputs, gates)]


@pytest.mark.parametrize("wanted", causal_cpu.WANTED)
@pytest.mark.parametrize(
    ("length", "keys", "values"), [(1, 3, 1), (31, 5, 3), (70, 200, 96), (150, 16, 24)]
)
def test_a_decay_per_token_equals_the_definition(length, keys, values, wanted, monkeypatch):
    monkeypatch.setattr(causal_cpu, "SEGMENT", 64)
    inputs = example(length, keys, values)
    exact = results(causal.definition, with_gates(inputs, torch.float64), wanted)
    for dtype, scale in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        given = with_gates(inputs, dtype)
        assert causal_cpu.serves(*given)
        assert_near(results(causal_cpu.causal_sums, given, wanted), exact, scale)


@pytest.mark.parametrize("layout", [lambda x: x.mT.contiguous().mT, lambda x: x[:, :1, :1]])
def test_gates_of_any_layout_are_read_right(layout):
    inputs = example(70, dtype=torch.float64)
    gates = layout(with_gates(inputs)[3].detach()).expand(BATCH, HEADS, 70)
    inputs, copied = [*inputs, gates.requires_grad_()], [*inputs, gates.contiguous()]
    wanted = results(causal.definition, copied, "normalized")
    assert_near(results(causal_cpu.causal_sums, inputs, "normalized"), wanted, 1e-9)


def test_a_clamped_denominator_has_no_gradient():
    inputs = example(80, dtype=torch.float64)
    with torch.no_grad():
        inputs[1].sub_(0.5)  # denominators of either sign
    denominators = (inputs[0] @ inputs[1].mT).tril().sum(-1)
    assert (denominators < EPS).any()
    assert (denominators > EPS).any()
    assert_near(results(causal_cpu.causal_sums, inputs), results(causal.definition, inputs), 1e-9)


def heads_inside(x):
    """(B, H, T, D) of memory B T H D, as a projection leaves it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def part_of_more(x):
    return torch.cat([x, x + 1, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]] - 1


def minus_in_name(x):
    """With torch's bit for a minus that is not in memory yet, as .imag of a conjugate has it."""
    return torch.view_as_complex(torch.stack([x, -x], -1)).conj().imag


def columns(x):
    return x.mT.contiguous().mT


@pytest.mark.parametrize("layout", [heads_inside, part_of_more, minus_in_name, columns])
def test_any_layout_in_memory_is_read_right(layout):
    inputs = example(70, dtype=torch.float64)
    given = [layout(x.detach()).requires_grad_() for x in inputs]
    assert_near(results(causal_cpu.causal_sums, given), results(causal.definition, inputs), 1e-9)


@pytest.mark.parametrize("which", range(3))
def test_rows_that_overlap_in_memory_are_read_right(which):
    inputs = [x.detach() for x in example(3, 8, 8, torch.float64)]
    inputs[which] = torch.rand(BATCH, HEADS, 40, dtype=torch.float64).unfold(-1, 8, 1)[:, :, :3]
    given, copied = (
        [y.requires_grad_() for y in x]
        for x in (
            [x.detach() for x in inputs],
            [x.clone(memory_format=torch.contiguous_format) for x in inputs],
        )
    )
    assert_near(results(causal_cpu.causal_sums, given), results(causal.definition, copied), 1e-9)


def test_results_lie_in_memory_as_the_arguments_do():
    inputs = [heads_inside(x.detach()).requires_grad_() for x in example(70)]
    out, _, _, grad_v = results(causal_cpu.causal_sums, inputs)
    assert out.stride() == grad_v.stride() == inputs[2].stride()


def test_a_gradient_that_is_one_number_everywhere():
    inputs = example(40, dtype=torch.float64)
    wanted = torch.autograd.grad(linear_attention_naive(*inputs, causal=True).sum(), inputs)
    found = torch.autograd.grad(linear_attention(*inputs, causal=True).sum(), inputs)
    assert_near(found, wanted, 1e-9)


@pytest.mark.parametrize("gated", [False, True])
def test_a_sequence_gives_the_same_bits_in_any_batch_and_on_any_number_of_threads(gated):
    inputs = with_gates(example(300)) if gated else [*example(300), None]
    given = [x for x in inputs if x is not None]
    one = [x.detach()[1:].contiguous().requires_grad_() for x in given]

    def sums(leaves, part=slice(None)):
        q, k, v, *gates = leaves
        out, _ = causal_cpu.causal_sums(q, k, v, "normalized", gates[0] if gates else None, EPS)
        weights = weights_of(given[2])[part]
        return [out, *torch.autograd.grad(out, leaves, weights)]

    together, alone, threads = sums(given), sums(one, slice(1, None)), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        threaded = sums(given)
    finally:
        torch.set_num_threads(threads)
    for a, b, c in zip(together, threaded, alone, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[1:], c)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda *x: [y.bfloat16() for y in x], "half types are widened first"),
        (lambda q, k, v: (q.double(), k, v), "one type"),
        (lambda q, k, v: (q, k[:, :1], v), "one shape: no broadcasting"),
        (lambda q, k, v: (q, k, v[:, :, :-1]), "as many values as keys"),
        (lambda q, k, v: (q[:, :, :0], k[:, :, :0], v[:, :, :0]), "no token"),
        (lambda q, k, v: (q, k, v.repeat(1, 1, 1, 20)), "too wide"),
        (lambda *x: [y.to("meta") for y in x], "no memory"),
    ],
)
def test_what_is_left_to_the_pytorch_form(change, why, monkeypatch):
    inputs = example(20)
    assert causal_cpu.serves(*inputs)
    assert not causal_cpu.serves(*change(*inputs)), why
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 * BATCH * HEADS + 1)
    assert not causal_cpu.serves(*inputs), "fewer sequences than half the threads"


def test_a_decay_that_is_not_one_of_each_head_is_refused():
    with pytest.raises(RuntimeError, match="expand"):
        causal_cpu.causal_sums(*example(20), "normalized", torch.zeros(HEADS - 1), EPS)
