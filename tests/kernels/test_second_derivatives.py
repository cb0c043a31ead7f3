"""Second derivatives: right, or refused in one sentence. Never zero or a part without a word."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lrpe_fairseq.attention.linear import EPS, linear_attention, linear_attention_naive
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.kernels.encode import encode, encode_cpu
from lrpe_fairseq.kernels.linear import causal, causal_cpu
from tests.end_to_end.cases import each_encoding_once, sampled, usable

WIDTH, HEADS, TIME = 8, 2, 5
PAIRS = sampled(
    [(name, attention_type) for attention_type, name in usable()],
    [(name, attention_type) for attention_type, name in each_encoding_once()],
)


def module_of(name, attention_type, dtype=torch.float64):
    """Attention under the encoding; without Eq. 39 where its denominator is nearly zero.

    Third derivatives of such a quotient reach 1e20, which finite differences do not resolve.
    """
    torch.manual_seed(0)
    vanishes = build_encoding(name, WIDTH // HEADS, HEADS, causal=True).denominator_vanishes
    options = {"attention_type": attention_type, "position_encoding": name, "causal": True}
    normalizer = "content" if vanishes else "rotated"
    module = MultiheadAttention(WIDTH, HEADS, normalizer=normalizer, **options)
    return module.to(dtype).eval()


def vector(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.fixture
def differentiable():
    """The backend of softmax attention that can be differentiated twice."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def loss_of(module):
    """A function of the input (1, T, C) and of every parameter that is not quadratic."""
    return lambda x: module.attend(x)[0].square().mul(vector(1, TIME, WIDTH, seed=3).to(x)).sum()


def gradient(loss, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0]


@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_hvp_equals_finite_differences(name, attention_type, differentiable):
    loss, x = loss_of(module_of(name, attention_type)), vector(1, TIME, WIDTH)
    along, step = vector(1, TIME, WIDTH, seed=1), 1e-5
    _, found = torch.autograd.functional.hvp(loss, x, along)
    difference = gradient(loss, x + step * along) - gradient(loss, x - step * along)
    torch.testing.assert_close(found, difference / (2 * step), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_a_gradient_penalty_trains_every_parameter_right(name, attention_type, differentiable):
    module, x = module_of(name, attention_type), vector(1, TIME, WIDTH)
    parameters = [p for p in module.parameters() if p.requires_grad]

    def penalty():
        given = x.detach().requires_grad_()
        loss = loss_of(module)(given)
        return torch.autograd.grad(loss, given, create_graph=True)[0].square().sum()

    grads = torch.autograd.grad(penalty(), parameters, allow_unused=True)
    for number, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
        along = vector(*parameter.shape, seed=number).to(parameter)
        kept, step = parameter.detach().clone(), 1e-3 if parameter.dtype != x.dtype else 1e-6
        values = []
        for sign in (1, -1):
            parameter.data = kept + sign * step * along
            values.append(penalty().detach())
        parameter.data = kept
        wanted = (values[0] - values[1]) / (2 * step)
        found = torch.zeros(()) if grad is None else (grad * along).sum()
        torch.testing.assert_close(found.to(wanted), wanted, rtol=1e-4, atol=1e-4)


def weighted(out):
    return (out * torch.arange(out.numel(), dtype=torch.float64).cos().view_as(out).to(out)).sum()


def second_derivatives(function, inputs):
    """Of a function that is not quadratic in its inputs, by way of the gradient's square."""
    out = weighted(function(*inputs).square())
    grads = torch.autograd.grad(out, inputs, create_graph=True)
    return torch.autograd.grad(sum(weighted(g.square()) for g in grads), inputs)


def heads_inside(*shape, seed, dtype):
    """(B, H, T, D) that lies in memory as (B, T, H, D), made of a leaf that needs a gradient."""
    b, h, t, d = shape
    return vector(b, t, h, d, seed=seed, dtype=dtype).transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("wanted", causal_cpu.WANTED)
@pytest.mark.parametrize("decay", [None, (-0.3, -0.1)], ids=["plain", "decay"])
def test_the_causal_sums_in_cpp(decay, wanted):
    if causal_cpu.library() is None:
        pytest.skip("causal_cpu.cpp does not compile here")
    inputs = [heads_inside(2, 2, 70, 3, seed=n, dtype=torch.float64) for n in range(3)]
    rate = None if decay is None else torch.tensor(decay)

    def of_sums(by):
        def function(q, k, v):
            parts = causal.present(*by(q.exp(), k.exp(), v, wanted, rate, EPS))
            return torch.cat([x.flatten() for x in parts])

        return second_derivatives(function, inputs)

    found, expected = of_sums(causal_cpu.causal_sums), of_sums(causal.definition)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_an_input_that_is_given_twice_is_not_counted_twice():
    x = heads_inside(1, 1, 9, 4, seed=0, dtype=torch.float64)

    def by(form):
        return second_derivatives(lambda x: form(x.exp(), x.exp() * 2, x, causal=True), [x])

    torch.testing.assert_close(by(linear_attention), by(linear_attention_naive))


FORMS = {
    "rotation": encode.Variant(),
    "odd-even": encode.Variant(halves=True),
    "unitary": encode.Variant(wide=True),
    "permutation": encode.Variant(permutes=True),
    "fourier": encode.Variant(fourier=True, wide=True),
    "rotation alone": encode.Variant(phi=False),
}


@pytest.mark.parametrize("reflects", [False, True])
@pytest.mark.parametrize("kind", FORMS)
def test_the_encodings_in_cpp(kind, reflects):
    """Against the definition in float64; also where x is linear and not saved."""
    form = FORMS[kind]
    if encode_cpu.library() is None:
        pytest.skip("encode_cpu.cpp does not compile here")
    if reflects and (form.permutes or form.fourier):
        return
    x = heads_inside(2, 3, 4, 8, seed=0, dtype=torch.float32)
    wide = x.detach().double().requires_grad_()
    p, p_wide = None, None
    if reflects or form.fourier:
        p = vector(8, 16) if form.fourier else vector(8)
        p, p_wide = (p.to(t).requires_grad_(reflects) for t in (torch.float32, torch.float64))
    if form.permutes:
        index = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)).argsort(-1)
        at = exact = index.expand(2, 3, 4, 8)
        leaves = []
    else:
        angle = vector(4, 8 if form.wide else 3, seed=5)
        exact = torch.polar(torch.ones_like(angle), angle).requires_grad_()
        at = exact.detach().to(torch.complex64).requires_grad_()
        leaves = [(at, exact)]
    leaves = [(x, wide), *leaves, *([(p, p_wide)] if reflects else [])]
    ours, theirs = zip(*leaves, strict=True)
    results = []
    for inputs, by in (
        (ours, lambda: encode_cpu.encode(x, p, at, form)),
        (theirs, lambda: encode.definition(wide, p_wide, exact, form)),
    ):
        out = weighted(by().square())
        grads = torch.autograd.grad(out, inputs, create_graph=True)
        squares = (torch.view_as_real(g) if g.is_complex() else g for g in grads)
        results.append(torch.autograd.grad(sum(weighted(g.square()) for g in squares), inputs))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.to(b.dtype), b, rtol=1e-3, atol=1e-3 * b.abs().max().item())


def test_fused_softmax_attention_refuses_second_derivatives_in_one_sentence():
    module, x = module_of("rope", "softmax"), vector(1, TIME, WIDTH).requires_grad_()
    (first,) = torch.autograd.grad(loss_of(module)(x), x, create_graph=True)
    plain = gradient(loss_of(module), x)
    torch.testing.assert_close(first.detach(), plain)
    with pytest.raises(RuntimeError, match=r"sdpa_kernel\(SDPBackend\.MATH\)"):
        first.sum().backward()
    with pytest.raises(RuntimeError, match=r"sdpa_kernel\(SDPBackend\.MATH\)"):
        torch.autograd.functional.hvp(loss_of(module), x.detach(), torch.ones_like(x))
