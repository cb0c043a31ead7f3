"""ALiBi, FoX and ``gated:<name>`` against the equations, and against each other."""

import copy
import math

import pytest
import torch

from lrpe_fairseq.attention.multihead import Memory, MultiheadAttention, feature_map
from lrpe_fairseq.attention.softmax import encoded_attention
from lrpe_fairseq.attention.tokens import Tokens
from lrpe_fairseq.encodings import (
    ENCODINGS,
    FAMILIES,
    EncodingOptions,
    build_encoding,
    encoding_class,
)
from lrpe_fairseq.encodings.scores.slopes import alibi_slopes
from tests.end_to_end.cases import computes

WIDTH, HEADS, D = 12, 3, 4
KINDS = ("softmax", "linear")


def module_of(name, kind, **options):
    torch.manual_seed(0)
    options = {"causal": True, "attention_type": kind, "position_encoding": name, **options}
    return MultiheadAttention(WIDTH, HEADS, **options).double().eval()


def text(length, batch=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64)


def set_gates(module, gates):
    """Replace the gates of a module by constants in (0, 1], one per head."""
    gate = module.encoding.forget_gate
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.copy_(torch.logit(torch.as_tensor(gates, dtype=torch.float64)))


def written_out(module, x, exponents):
    """Attention of x (B, T, C) pair by pair; ``exponents(row, head, s, t)`` is a log weight."""
    q, k, v = (
        p(x).unflatten(-1, (HEADS, D)) for p in (module.q_proj, module.k_proj, module.v_proj)
    )
    linear = module.attention_type == "linear"
    rows = []
    for b in range(x.shape[0]):
        for s in range(x.shape[1]):
            heads = []
            for h in range(HEADS):
                last = s + 1 if module.causal else x.shape[1]
                factors = torch.stack([exponents(b, h, s, t) for t in range(last)]).exp()
                if linear:
                    own = feature_map(k[b, :last, h]) @ feature_map(q[b, s, h])
                else:
                    own = (k[b, :last, h] @ q[b, s, h] / math.sqrt(D)).exp()
                weights = own * factors
                heads.append(weights @ v[b, :last, h] / weights.sum())
            rows.append(torch.cat(heads))
    return module.out_proj(torch.stack(rows).unflatten(0, x.shape[:2]))


def assert_equal_with_gradients(module, found, wanted, x, tolerance=1e-9):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    inputs = [x, *module.parameters()]
    pairs = [torch.autograd.grad(out.square().sum(), inputs) for out in (found, wanted)]
    torch.testing.assert_close(*pairs, rtol=tolerance, atol=tolerance)


def slopes_by_recursion(heads):
    """The authors' ``get_slopes``, written from its definition."""
    power = 2 ** math.floor(math.log2(heads))
    if power == heads:
        start = 2 ** (-8 / heads)
        return [start ** (h + 1) for h in range(heads)]
    return slopes_by_recursion(power) + slopes_by_recursion(2 * power)[::2][: heads - power]


@pytest.mark.parametrize("heads", range(1, 17))
def test_the_closed_form_of_the_slopes_equals_the_recursion(heads):
    assert alibi_slopes(heads) == pytest.approx(slopes_by_recursion(heads), rel=1e-14)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_alibi_is_the_sum_written_out(kind, causal):
    module, x = module_of("alibi", kind, causal=causal), text(5).requires_grad_()
    slopes = torch.tensor(alibi_slopes(HEADS), dtype=torch.float32).double()
    wanted = written_out(module, x, lambda b, h, s, t: -slopes[h] * abs(s - t))
    assert_equal_with_gradients(module, module.attend(x)[0], wanted, x)


def weights_of(module, q, rows):
    """The weights of the last ``rows`` queries, for queries equal to keys q (B, H, T, D)."""
    length = q.shape[2]
    tokens = Tokens(torch.arange(length))
    values = torch.eye(length, dtype=q.dtype).expand(*q.shape[:2], -1, -1)
    given = q[:, :, -rows:], q, values, tokens.of(slice(-rows, None)), tokens
    return encoded_attention(module.encoding, *given, causal=module.causal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_in_a_half_type_is_rounded_once(dtype):
    """Products of a slope and a position, as in key-only biases, are wrong by 2 nats here."""
    module = module_of("alibi", "softmax")
    weights = weights_of(module, torch.zeros(1, HEADS, 2048, D, dtype=dtype), 1)[..., -9:]
    exact = weights_of(module, torch.zeros(1, HEADS, 2048, D).double(), 1)[..., -9:]
    torch.testing.assert_close(weights.double(), exact, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_fox_is_the_product_of_gates_written_out(kind):
    module, x = module_of("fox", kind), text(5).requires_grad_()
    with torch.no_grad():
        module.encoding.forget_gate.weight.mul_(50)
    gate = module.encoding.forget_gate
    gates = torch.sigmoid(x @ gate.weight.mT + gate.bias)
    wanted = written_out(module, x, lambda b, h, s, t: gates[b, t + 1 : s + 1, h].log().sum())
    assert_equal_with_gradients(module, module.attend(x)[0], wanted, x)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(n, kind) for n in (*FAMILIES["gated"].names, "fox") for kind in KINDS if computes(kind, n)],
)
def test_open_gates_change_nothing(name, kind):
    plain = module_of("none" if name == "fox" else name.removeprefix("gated:"), kind)
    gated, x = module_of(name, kind), text(9)
    gated.load_state_dict(plain.state_dict(), strict=False)
    set_gates(gated, [1.0] * HEADS)
    assert gated.encoding.feature_dim == plain.encoding.feature_dim
    torch.testing.assert_close(gated.attend(x)[0], plain.attend(x)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shut_gate_hides_earlier_tokens_and_nothing_else(kind):
    module, x = module_of("fox", kind), text(8)
    set_gates(module, [0.9] * HEADS)
    open_, _ = module.attend(x)
    gate = module.encoding.log_gates

    def shut_at_3(x):
        gates = gate(x).clone()
        gates[..., 3] = -1e4
        return gates

    module.encoding.log_gates = shut_at_3
    shut, _ = module.attend(x)
    torch.testing.assert_close(shut[:, :3], open_[:, :3], rtol=1e-12, atol=1e-12)
    module.encoding.log_gates = gate
    torch.testing.assert_close(shut[:, 3:], module.attend(x[:, 3:])[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fox", "gated:lrpe-type2"])
def test_float32_is_right_after_16384_tokens(name, kind):
    """Differences of float32 sums of gates would be wrong by 7e-4 there."""
    exact, x = module_of(name, kind), text(16_384, batch=1)
    rounded = copy.deepcopy(exact).float()
    results = []
    for module in (exact, rounded):
        own = x.to(module.q_proj.weight.dtype)
        if kind == "softmax":  # the last rows only, in O(T)
            memory = Memory(own[:, :-32].transpose(0, 1))
            results.append(module.attend(own[:, -32:], None, memory)[0])
        else:
            results.append(module.attend(own)[0][:, -32:])
    torch.testing.assert_close(results[1].double(), results[0], rtol=1e-4, atol=1e-5)


def test_gates_are_computed_in_float32_under_autocast():
    encoding = build_encoding("fox", 4, 3, causal=True)
    x = text(5).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = encoding.log_gates(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, encoding.log_gates(x))
    half = encoding.half()
    assert half.log_gates(x.half()).dtype == torch.float32


def test_the_option_fox_bias_opens_the_gates_at_the_start():
    start = {"fox": 0.0, "gated:rope": 5.0}
    for name, bias in start.items():
        options = EncodingOptions(fox_bias=bias) if bias else EncodingOptions()
        encoding = build_encoding(name, 4, 3, causal=True, options=options)
        found = encoding.log_gates(torch.zeros(1, 2, WIDTH))
        torch.testing.assert_close(found.exp(), torch.full((1, 3, 2), 1 / (1 + math.exp(-bias))))
        assert encoding.forget_gate.weight.std() < 0.04


def test_every_decomposable_encoding_without_gates_can_be_gated():
    linear = {name for name in ENCODINGS if encoding_class(name).serves_linear}
    assert {f"gated:{name}" for name in linear - {"fox"}} == {*FAMILIES["gated"].names}
    for name in FAMILIES["lrpe"].names:
        gated = build_encoding(f"gated:{name}", 4, 3, causal=True)
        assert (gated.properties.contextual, gated.causal_only) == (True, True)


def test_a_checkpoint_of_version_0_1_is_loaded():
    gated = build_encoding("gated:spe", 4, 3, causal=True)
    old = {f"inner.{name}": v for name, v in gated.state_dict().items() if "forget" not in name}
    old |= {f"gate.{n}": v + 1 for n, v in gated.forget_gate.state_dict().items()}
    loaded = build_encoding("gated:spe", 4, 3, causal=True)
    loaded.load_state_dict(old)
    assert torch.equal(loaded.gate, gated.gate)
    assert torch.equal(loaded.forget_gate.bias, gated.forget_gate.bias + 1)
