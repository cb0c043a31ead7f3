"""torch.compile and torch.export make one graph of a model, and its results are those of eager."""

import warnings

import pytest
import torch

from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.softmax.fused import softmax_attention_naive
from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.kernels import operators
from lrpe_fairseq.kernels.encode import encode, encode_cpu
from lrpe_fairseq.kernels.encode.encode import Turns, Variant
from lrpe_fairseq.kernels.linear import causal
from tests.end_to_end.cases import each_encoding_once

COMPOSED = (
    ("linear", "gated:lrpe-type2"),
    ("linear", "gated-channel:rope"),
    ("softmax", "selective:rope"),
    ("linear", "path:lrpe-type2"),
    ("softmax", "gated:path:rope"),
)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def assert_same_gradients(eager, compiled, x, inputs):
    """Output and gradients of both functions agree to rounding."""
    results = []
    for function in (eager, compiled):
        out = function(x)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append([out, *torch.autograd.grad(out, inputs, weights, allow_unused=True)])
    for found, wanted in zip(*results[::-1], strict=True):
        if wanted is None or found is None:  # a compiler may give zeros where there is no gradient
            assert all(grad is None or not grad.any() for grad in (found, wanted))
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def attention_of(attention_type, name, dtype=torch.float64, **options):
    torch.manual_seed(0)
    options = {"attention_type": attention_type, "position_encoding": name, **options}
    return MultiheadAttention(32, 2, **{"causal": True, **options}).to(dtype).eval()


def assert_compiled_is_eager(attention_type, name, backend, lengths, dtype=torch.float64):
    module = attention_of(attention_type, name, dtype)

    def function(x):
        return module.attend(x)[0]

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for length in lengths:
        x = torch.randn(2, length, 32, dtype=dtype).requires_grad_()
        inputs = [x, *(p for p in module.parameters() if p.requires_grad)]
        assert_same_gradients(function, compiled, x, inputs)


@pytest.mark.parametrize(("attention_type", "name"), [*each_encoding_once(), *COMPOSED])
def test_one_graph_with_the_gradients_of_eager_execution(attention_type, name):
    assert_compiled_is_eager(attention_type, name, "aot_eager", [21])


@pytest.mark.parametrize(("attention_type", "name"), [("linear", "lrpe-type2"), ("softmax", "fox")])
def test_inductor_compiles_two_lengths(attention_type, name):
    assert_compiled_is_eager(attention_type, name, "inductor", [70, 33])


CHUNKED = (
    ("linear", "delta"),
    ("linear", "gated-channel:rope"),
    ("linear", "path:rope"),
    ("softmax", "path"),
)
"""Encodings that compute a number of chunks which depends on the length."""

WINDOWS = (
    ("linear", "fox", "content"),
    ("linear", "gated-channel:rope", "bounded"),
    ("linear", "path", "layernorm"),
    ("softmax", "rope", None),
    ("softmax", "t5", None),
    ("softmax", "fox", None),
    ("softmax", "cope", None),
    ("softmax", "path", None),
)
"""Attention that computes blocks of a window, and a normalizer."""


@pytest.mark.parametrize(
    ("attention_type", "name", "options"),
    [
        *((*case, {}) for case in CHUNKED),
        ("linear", "rope", {"window": 8}),
        ("softmax", "rope", {"window": 70}),
    ],
)
def test_more_lengths_than_graphs_are_compiled(attention_type, name, options):
    """Dynamo compiles eight graphs of a function, and fullgraph raises an error at the ninth."""
    module = attention_of(attention_type, name, **options)
    compiled = torch.compile(module.attend, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for length in range(30, 330, 30):
            x = torch.randn(2, length, 32, dtype=torch.float64)
            torch.testing.assert_close(compiled(x)[0], module.attend(x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", ["plain", "padded", "padding between", "documents"])
@pytest.mark.parametrize(("attention_type", "name", "normalizer"), WINDOWS)
def test_a_window_has_the_gradients_of_eager_execution(attention_type, name, normalizer, tokens):
    options = {"window": 9} if normalizer is None else {"window": 9, "normalizer": normalizer}
    module = attention_of(attention_type, name, **options)
    padding = torch.zeros(2, 150, dtype=torch.bool)
    padding[1, 120:] = True
    if tokens == "padding between":
        padding[0, 40:60] = True
    starts = torch.zeros_like(padding)
    starts[:, [33, 101]] = True
    masks = {} if tokens == "plain" else {"key_padding_mask": padding}
    masks = {"starts": starts} if tokens == "documents" else masks
    one_sided = tokens == "padded"

    def function(x):
        return module.attend(x, one_sided=one_sided, **masks)[0]

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 150, 32, dtype=torch.float64).requires_grad_()
    inputs = [x, *(p for p in module.parameters() if p.requires_grad)]
    assert_same_gradients(function, compiled, x, inputs)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("attention_type", "name"), each_encoding_once())
def test_inductor_computes_every_encoding(attention_type, name):
    """At one length only, because inductor needs ten to twenty seconds for each encoding."""
    assert_compiled_is_eager(attention_type, name, "inductor", [33])


@pytest.mark.parametrize("name", ["lrpe-type2", "lrpe-type4", "lrpe-type8", "permuteformer"])
def test_float32_calls_the_kernels_in_one_graph(name, monkeypatch):
    """Float64 has no kernel of an encoding."""
    calls = []
    run = encode_cpu.encoded
    monkeypatch.setattr(encode_cpu, "encoded", lambda *given: calls.append(1) or run(*given))
    module = attention_of("linear", name, torch.float32)
    compiled = torch.compile(module.attend, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 21, 32)
    with torch.no_grad():
        found = compiled(x)[0]
        assert len(calls) == 2
        torch.testing.assert_close(found, module.attend(x)[0])


def test_a_compiled_model_warns_of_nothing():
    first, second = (attention_of("linear", "lrpe-type2", seed=seed) for seed in (0, 1))

    def model(x):
        return second.attend(first.attend(torch.sin(x))[0])[0]

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (7, 5, 7):
            x = torch.randn(2, length, 32, dtype=torch.float64).requires_grad_()
            assert_same_gradients(model, compiled, x, [x])
    assert not [str(w.message) for w in caught if "lrpe" in str(w.message) + w.filename]


@pytest.mark.parametrize("attention_type", ["linear", "softmax"])
@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_compiled(attention_type, causal):
    module = attention_of(attention_type, "lrpe-type2", causal=causal)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 9:] = True

    def function(x):
        return module.attend(x, padding)[0]

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 12, 32, dtype=torch.float64).requires_grad_()
    assert_same_gradients(function, compiled, x, [x, *module.parameters()])


DECODED = ("rope", "fox", "t5", "stick-breaking", "path", "spe", "transformer-xl")


@pytest.mark.parametrize(
    ("attention_type", "name"),
    [("linear", "fox"), ("linear", "spe"), *(("softmax", name) for name in DECODED)],
)
def test_decoding_step_by_step_is_one_graph_for_every_length(attention_type, name):
    module = attention_of(attention_type, name)

    def step(x, state):
        return module.attend(x, state=state, keep_state=True)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    with torch.no_grad():
        outputs, state = [], None
        for part in x.split([4, *[1] * 12], dim=1):  # a prompt, then more tokens than graphs
            found, state = compiled(part, state)
            outputs.append(found)
        torch.testing.assert_close(torch.cat(outputs, 1), module.attend(x)[0])


@pytest.mark.parametrize("attention_type", ["linear", "softmax"])
def test_cross_attention_is_compiled(attention_type):
    torch.manual_seed(0)
    options = {"attention_type": attention_type, "position_encoding": "rope"}
    module = CrossAttention(32, 2, **options).double().eval()
    memory = torch.randn(2, 9, 32, dtype=torch.float64)

    def function(x):
        return module.attend(x, memory)[0]

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 12, 32, dtype=torch.float64).requires_grad_()
    assert_same_gradients(function, compiled, x, [x, *module.parameters()])


@pytest.mark.parametrize(
    ("attention_type", "name", "options"),
    [
        *((*case, {}) for case in (("linear", "lrpe-type2"), ("linear", "fox"), *CHUNKED)),
        ("softmax", "t5", {}),
        ("softmax", "fire", {}),
        ("linear", "rope", {"window": 8}),
        ("softmax", "fox", {"window": 70}),
    ],
)
def test_an_exported_program_takes_other_lengths(attention_type, name, options):
    module = attention_of(attention_type, name, torch.float32, **options)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def forward(self, x):
            return self.attention.attend(x)[0]

    length = torch.export.Dim("length", min=2, max=4096)
    x = torch.randn(2, 20, 32)
    program = torch.export.export(Model(), (x,), dynamic_shapes={"x": {1: length}})
    for count in (20, 7, 300):
        x = torch.randn(2, count, 32)
        torch.testing.assert_close(program.module()(x), module.attend(x)[0], rtol=1e-4, atol=1e-5)


def columns(x):
    """The same numbers with columns contiguous in memory, as a convolution leaves projections."""
    return x.mT.contiguous().mT


@pytest.mark.parametrize("name", ["rope", "lrpe-type1", "lrpe-type2", "lrpe-type4"])
def test_projections_of_a_convolution_have_the_gradients_of_eager_execution(name):
    torch.manual_seed(0)
    encoding, positions = build_encoding(name, head_dim=8, num_heads=2), torch.arange(5)
    project = torch.nn.Conv1d(16, 32, 1)

    def function(x):
        q, k = project(x).unflatten(1, (2, 2, 8)).unbind(1)
        q, k = encoding(q.mT, k.mT, positions, positions)
        return q @ k.mT

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same_gradients(function, compiled, torch.randn(1, 16, 5), [*project.parameters()])


# --- the operators -----------------------------------------------------------------------------


def test_the_names_of_operators_change_with_the_files_that_decide_their_results(tmp_path):
    """Compilers keep graphs on disk, by these names."""
    assert operators._encoded._qualname == operators.named("encode")
    file = tmp_path / "a.py"
    found = set()
    for text in ("one", "two"):
        file.write_text(text)
        found.add(operators._digest([str(file)]))
    assert len(found) == 2
    assert operators._digest(operators.SOURCES) in operators.named("encode")


def sums_inputs(dtype=torch.float64):
    torch.manual_seed(0)
    q, k, v = (torch.rand(2, 3, 300, 8, dtype=dtype).requires_grad_() for _ in range(3))
    gates = -torch.rand(2, 3, 300, dtype=dtype).requires_grad_()
    return q, k, v, gates.detach().requires_grad_()


@pytest.mark.parametrize("wanted", ["numerator", "sums", "normalized"])
@pytest.mark.parametrize("with_gates", [True, False])
@pytest.mark.parametrize("in_cpp", [True, False])
def test_the_operator_of_causal_sums_is_its_definition(wanted, with_gates, in_cpp, monkeypatch):
    """Also where a graph runs without the compiled library."""
    if not in_cpp:
        monkeypatch.setattr(operators, "_sums_in_cpp", lambda *rows: False)
    *rows, gates = sums_inputs()
    inputs = [*rows, gates] if with_gates else rows
    gates = gates if with_gates else None
    results = []
    for function in (operators.causal_sums, causal.definition):
        out = causal.present(*function(*rows, wanted, gates, 1e-6))
        weights = [torch.linspace(0, 1, x.numel(), dtype=x.dtype).view_as(x) for x in out]
        results.append([*out, *torch.autograd.grad(out, inputs, weights)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


def encode_inputs(variant):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 10, 8).requires_grad_()
    if variant.permutes:
        return x, None, torch.randperm(8).expand(2, 3, 10, 8)
    width = 8 if variant.wide or variant.fourier else 4
    turn = Turns(*(torch.randn(10, width).requires_grad_() for _ in range(2)))
    p = torch.randn(8, 16) if variant.fourier else torch.randn(8).requires_grad_()
    return x, p, turn


VARIANTS = {
    "reflection": Variant(),
    "halves": Variant(phi=False, halves=True),
    "wide": Variant(wide=True),
    "permutation": Variant(phi=False, permutes=True),
    "fourier": Variant(phi=False, fourier=True, wide=True),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("in_cpp", [True, False])
def test_the_operator_of_encodings_is_its_definition(name, in_cpp, monkeypatch):
    if not in_cpp:
        monkeypatch.setattr(operators, "_encodes_in_cpp", lambda *given: False)
    variant = VARIANTS[name]
    x, p, power = encode_inputs(variant)
    parts = () if variant.permutes else power
    inputs = [y for y in (x, p, *parts) if y is not None and y.requires_grad]
    results = []
    for function in (operators.encoded, encode.definition):
        out = function(x, p, power, variant)
        weights = torch.linspace(0, 1, out.numel()).view_as(out)
        results.append([out, *torch.autograd.grad(out, inputs, weights)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wanted", ["numerator", "sums", "normalized"])
@pytest.mark.parametrize("layout", [torch.clone, columns])
def test_fake_forms_and_gradients_are_those_of_the_operator_of_causal_sums(wanted, layout):
    *rows, gates = sums_inputs(torch.float32)
    rows = [layout(x.detach()).requires_grad_() for x in rows]
    arguments = *rows, gates, wanted, 1e-6, True
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operators._sums, arguments, test_utils=checks)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("layout", [torch.clone, columns])
def test_fake_forms_and_gradients_are_those_of_the_operator_of_encodings(name, layout):
    variant = VARIANTS[name]
    x, p, power = encode_inputs(variant)
    x = layout(x.detach()).requires_grad_()
    at = power if variant.permutes else torch.stack(power, -1).detach().requires_grad_()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operators._encoded, (x, p, at, *variant), test_utils=checks)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("hidden", [0, 5, 12])
def test_the_operator_of_padded_attention_is_its_definition(causal, hidden):
    """Without padding, with some, and with a text of padding only."""
    torch.manual_seed(0)
    rows = [torch.randn(2, 3, 12, 8, dtype=torch.float64) for _ in range(3)]
    rows = [columns(x).requires_grad_() for x in rows]
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 12 - hidden :] = True
    visible = ~padding[:, None, None]
    if causal:
        visible = visible & torch.ones(12, 12, dtype=torch.bool).tril()
    weights = torch.linspace(-1, 1, 2 * 3 * 12 * 8, dtype=torch.float64).view(2, 3, 12, 8)
    results = []
    for out in (
        operators.padded_attention(*rows, padding, causal, 0.3),
        softmax_attention_naive(*rows, scale=0.3, visible=visible),
    ):
        results.append([out, *torch.autograd.grad(out, rows, weights)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_fake_forms_and_gradients_are_those_of_the_operator_of_padded_attention():
    rows = [torch.randn(2, 3, 12, 8).requires_grad_() for _ in range(3)]
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 9:] = True
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operators._padded, (*rows, padding, True, 0.3), test_utils=checks)
