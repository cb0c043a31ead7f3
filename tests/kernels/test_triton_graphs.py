"""Compiled graphs call the Triton kernels by operators, whose results are those of eager execution.

The kernels run in Triton's interpreter.
"""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

from lrpe_fairseq.attention.linear import linear_attention
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.kernels import loader, proof, triton_calls, triton_operators
from lrpe_fairseq.kernels.flash import flash, stick
from lrpe_fairseq.kernels.linear import causal
from lrpe_fairseq.kernels.results import LIMIT, narrow
from tests import triton_probe
from tests.kernels.injected import Fails, replaced

pytestmark = [
    pytest.mark.skipif(bool(triton_probe.why_not()), reason=triton_probe.why_not()),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter"),
]
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
LENGTH = 19


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(loader, "SERVED", {})
    loader.interpret()
    yield
    loader.interpret(on=False)


# --- attention -----------------------------------------------------------------------------------


def attention(name, attention_type, **options):
    torch.manual_seed(0)
    options = {"attention_type": attention_type, "position_encoding": name, **options}
    return MultiheadAttention(32, 2, **{"causal": True, **options})


def padded():
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[1, -5:] = True
    return {"key_padding_mask": padding}


def documents():
    starts = torch.zeros(2, LENGTH, dtype=torch.bool)
    starts[0, 7] = True
    return {"starts": starts}


CASES = {
    "rope, linear": ("rope", "linear", {}, {}),
    "fox, linear, padded": ("fox", "linear", {}, padded()),
    "lrpe-type2, linear, documents": ("lrpe-type2", "linear", {}, documents()),
    "alibi, linear, both ways": ("alibi", "linear", {"causal": False}, {}),
    "rope, padded": ("rope", "softmax", {}, padded()),
    "t5": ("t5", "softmax", {}, {}),
    "alibi, both ways": ("alibi", "softmax", {"causal": False}, {}),
    "fox, documents": ("fox", "softmax", {}, documents()),
    "fox, window": ("fox", "softmax", {"window": 6}, {}),
    "shaw": ("shaw", "softmax", {}, {}),
    "stick-breaking, padded": ("stick-breaking", "softmax", {}, padded()),
}


def results_of(function, x, parameters):
    out = function(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, [x, *parameters], weights, allow_unused=True)]


def assert_close(found, wanted, **tolerances):
    for x, y in zip(found, wanted, strict=True):
        if x is None or y is None:  # a compiler may give zeros where there is no gradient
            assert all(grad is None or not grad.any() for grad in (x, y))
        else:
            torch.testing.assert_close(x, y, **tolerances)


@pytest.mark.parametrize("name", CASES)
def test_one_graph_calls_the_kernels(name):
    encoding, attention_type, options, given = CASES[name]
    module = attention(encoding, attention_type, **options).eval()
    parameters = [p for p in module.parameters() if p.requires_grad]

    def function(x):
        return module.attend(x, **given)[0]

    x = torch.randn(2, LENGTH, 32).requires_grad_()
    wanted = results_of(function, x, parameters)
    loader.SERVED.clear()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = results_of(compiled, x, parameters)
    assert not [str(w.message) for w in caught if "lrpe" in str(w.message) + w.filename]
    assert [kernel for served in loader.SERVED.values() for kernel in served] == ["triton on cpu"]
    assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_graph_with_all_keys_calls_the_kernel_of_half_types():
    module = attention("none", "linear", causal=False).bfloat16().eval()
    x = torch.randn(2, LENGTH, 32).bfloat16().requires_grad_()
    parameters = list(module.parameters())

    def function(x):
        return module.attend(x)[0]

    wanted = results_of(function, x, parameters)
    loader.SERVED.clear()
    found = results_of(torch.compile(function, backend="aot_eager", fullgraph=True), x, parameters)
    assert loader.SERVED == {"linear attention": ["triton on cpu"]}
    errors = [proof.relative_error(x, y.double()) for x, y in zip(found, wanted, strict=True)]
    assert max(errors) <= 3e-2


@pytest.mark.exhaustive
def test_a_graph_serves_other_lengths_in_inductor():
    module = attention("fox", "softmax").eval()
    parameters = list(module.parameters())

    def function(x):
        return module.attend(x)[0]

    compiled = torch.compile(function, dynamic=True, fullgraph=True)
    for length in (LENGTH, 70):
        x = torch.randn(2, length, 32).requires_grad_()
        found = results_of(compiled, x, parameters)
        assert_close(found, results_of(function, x, parameters), rtol=1e-4, atol=1e-4)


def test_kernels_are_looked_for_outside_of_fake_tensors():
    """What is found is kept, so a first look while torch.export traces must not fail."""
    loader.interpret()  # forgets what was found
    with FakeTensorMode():
        assert triton_operators.has_triton(triton_operators.FLASH)


@pytest.mark.parametrize("causal", [True, False])
def test_widths_may_be_symbolic(causal):
    """As under ``dynamic=True``, in functions that build no layers."""

    def function(q, k, v):
        return linear_attention(q, k, v, causal=causal)

    given = [x.half() for x in rows()]
    found = torch.compile(function, backend="aot_eager", dynamic=True, fullgraph=True)(*given)
    torch.testing.assert_close(found, function(*given), rtol=1e-3, atol=1e-3)


# --- operators -----------------------------------------------------------------------------------


def rows(count=3, time_first=False):
    generator = torch.Generator().manual_seed(3)
    shape, axes = ((9, 2, 2, 16), (1, 2, 0, 3)) if time_first else ((2, 9, 2, 16), (0, 2, 1, 3))
    return [torch.rand(shape, generator=generator).permute(axes) for _ in range(count)]


def gates():
    return -torch.rand(2, 2, 9, generator=torch.Generator().manual_seed(4)) / 8


def sums(wanted):
    def operator(q, k, v, decay):
        return causal.present(*triton_operators.causal_sums(q, k, v, wanted, decay, 1e-6))

    def definition(q, k, v, decay):
        return causal.present(*causal.definition(q, k, v, wanted, decay, 1e-6))

    return operator, definition, [*rows(time_first=wanted == "sums"), gates()]


def full_sums():
    def operator(*given):
        return causal.present(*triton_operators.full_sums(*given, "sums", 1e-6))

    def definition(*given):
        return causal.present(*causal.full_definition(*given, "sums", 1e-6))

    return operator, definition, rows()


SEED = torch.tensor([5])


def flash_with(**options):
    options |= {"scale": 0.25, "first_lag": -8}

    def operator(q, k, v, table):
        return (triton_operators.flash_attention(q, k, v, table=table, **options),)

    def definition(q, k, v, table):
        return (flash.definition(q, k, v, table=table, seed=SEED, **options),)

    return operator, definition, [*rows(), torch.linspace(-1, 1, 34).view(2, 17)]


def stick_with(**options):
    def operator(*given):
        return (triton_operators.stick_attention(*given, scale=0.25, **options),)

    def definition(*given):
        return (stick.definition(*given, scale=0.25, seed=SEED, **options),)

    return operator, definition, rows(time_first=True)


PADDING = {"padding": torch.arange(9).ge(7).expand(2, 9)}
OPERATORS = {
    "numerators": sums("numerator"),
    "sums": sums("sums"),
    "quotients": sums("normalized"),
    "all keys": full_sums(),
    "flash": flash_with(causal=True, **PADDING),
    "flash, dropout": flash_with(causal=False, dropout=0.3),
    "stick": stick_with(**PADDING),
    "stick, dropout": stick_with(dropout=0.3),
}


def with_gradients(function, given):
    leaves = [x.detach().requires_grad_() for x in given]
    out = function(*leaves)
    weights = [torch.linspace(0, 1, x.numel()).view(x.shape) for x in out]
    return [*out, *torch.autograd.grad(out, leaves, weights)]


@pytest.fixture
def seeded(monkeypatch):
    """Dropout's seed is that of the definitions."""
    monkeypatch.setattr(triton_operators, "_seed", lambda q, dropout: SEED if dropout else None)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("with_triton", [True, False])
def test_an_operator_is_its_definition(name, with_triton, monkeypatch, seeded):
    """In outputs and gradients; also where a graph runs without Triton."""
    if not with_triton:
        monkeypatch.setattr(loader, "triton_kernels", lambda module: None)
    operator, definition, given = OPERATORS[name]
    found, wanted = with_gradients(operator, given), with_gradients(definition, given)
    assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_large_gradients_of_half_types_are_not_limited():
    """Also if they are copied, as those of keys that several heads share."""
    q, k, v = (x.half().requires_grad_() for x in rows())
    shared = k[:, :1].expand_as(k)
    weights = torch.full_like(v, 2000.0)

    def gradients(call):
        out = call(q, shared, v, scale=0.25, causal=True)
        return torch.autograd.grad(out, (q, k, v), weights)

    found, wanted = map(gradients, (triton_operators.flash_attention, flash.definition))
    assert max(x.abs().max() for x in wanted) > 2 * LIMIT
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=50.0)


def test_the_seed_of_dropout_is_drawn_once_for_a_call_and_its_gradient():
    q, k, v = rows()
    call = {"scale": 0.25, "causal": True, "dropout": 0.5}
    torch.manual_seed(1)
    first = with_gradients(lambda *x: (triton_operators.flash_attention(*x, **call),), (q, k, v))
    torch.manual_seed(1)
    seed = torch.randint(2**63 - 1, (1,))
    again = with_gradients(lambda *x: (flash.definition(*x, seed=seed, **call),), (q, k, v))
    assert_close(first, again, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPERATORS)
def test_fake_forms_and_gradients_are_those_of_the_operator(name, seeded):
    operator, _, given = OPERATORS[name]
    calls = []

    class Recording:
        def __init__(self, wrapped):
            self.wrapped = wrapped

        def __call__(self, *arguments):
            calls.append((self.wrapped._forward, arguments))
            return self.wrapped(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        for own in ("_causal_sums", "_full_sums", "_flash", "_stick"):
            patch.setattr(triton_operators, own, Recording(getattr(triton_operators, own)))
        operator(*(x.detach().requires_grad_() for x in given))
    ((called, arguments),) = calls
    torch.library.opcheck(called, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("kernel", ["output_kernel", "key_gradient_kernel"])
def test_a_launch_that_fails_in_a_graph_leaves_the_call_to_the_definition(kernel, monkeypatch):
    monkeypatch.setattr(proof, "_known", {})
    monkeypatch.setattr(proof, "_warned", set())
    operator, definition, given = OPERATORS["flash"]
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)
    with replaced(monkeypatch, "flash.flash_kernels", kernel, Fails()) as injected:
        found = with_gradients(compiled, given)
    assert injected.launches
    assert_close(found, with_gradients(definition, given), rtol=1e-5, atol=1e-5)
    assert any("definition" in kernel for kernel in loader.SERVED["kernel of softmax attention"])


def test_the_gradient_of_a_saturated_quotient_is_zero():
    """Where the definition serves, as in cross-attention with a memory of another length."""
    q, k, v = rows()
    given = [(q - 0.5).half(), (k[:, :, :6] - 0.5).half(), v[:, :, :6].half() * 30]
    results = []
    for function in (triton_operators.full_sums, triton_calls.full_sums_without):
        leaves = [x.detach().requires_grad_() for x in given]
        out, _ = function(*leaves, "normalized", 1e-6)
        out = narrow(out, torch.float16) if out.dtype != torch.float16 else out
        assert out.abs().max() == LIMIT
        results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert_close(*results, rtol=1e-2, atol=1e-2)
