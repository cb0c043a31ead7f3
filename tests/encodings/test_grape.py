"""GRAPE's biases against loops over pairs of tokens, and against ALiBi and FoX, in float64."""

import math
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.encodings.scores.grape_a import GATES
from lrpe_fairseq.encodings.scores.grape_ap import EPS, FIXED_QUERY, WIDTH
from lrpe_fairseq.encodings.scores.slopes import alibi_slopes
from lrpe_fairseq.errors import ChoiceError

HEADS, D, C, T = 4, 8, 32, 17
SLOPES = torch.tensor(alibi_slopes(HEADS), dtype=torch.float64)
AT = torch.arange(T)
VARIANTS = [
    *[("grape-a", {"grape_gates": gates}) for gates in GATES],
    *(("grape-ap", {}), ("grape-ap", {"fidelity": FIXED_QUERY})),
]


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def encoding_of(name, **options):
    options = EncodingOptions(**options)
    encoding = build_encoding(name, D, HEADS, causal=True, options=options).double()
    for number, parameter in enumerate(encoding.parameters()):
        parameter.data += 0.3 * draw(*parameter.shape, seed=number)
    return encoding


def bias_of(encoding, q, k, x, at):
    """The bias (B, H, T, T) of unscaled q and k, as attention asks for it."""
    q, k = encoding.widened(x, q, k, at)
    q = q * encoding.softmax_scale
    scores = q @ k.mT
    return encoding(scores, q, k, at, at) - scores


def gates_by_hand(x, direction):
    """softplus(u_h . x / sqrt D) with |u_h| = 1, one by one."""
    if direction is None:
        return torch.zeros(x.shape[:3], dtype=x.dtype)
    rows = []
    for b, h, t in product(*map(range, x.shape[:3])):
        unit = direction[h] / direction[h].norm()
        rows.append(F.softplus(unit @ x[b, h, t] / math.sqrt(D)))
    return torch.stack(rows).view(x.shape[:3])


@pytest.mark.parametrize("gates", GATES)
def test_gated_slopes_and_their_gradients_are_those_of_the_equation(gates):
    encoding = encoding_of("grape-a", grape_gates=gates)
    q, k, x = draw(2, HEADS, T, D), draw(2, HEADS, T, D, seed=1), draw(2, T, C)
    learned = [q.requires_grad_(), k.requires_grad_(), *encoding.parameters()]
    found = bias_of(encoding, q, k, x, AT)
    of_query, of_key = gates_by_hand(q, encoding.of_query), gates_by_hand(k, encoding.of_key)
    wanted = torch.zeros_like(found)
    for s, t in product(range(T), repeat=2):
        rate = SLOPES * F.softplus(encoding.omega) * (of_query[:, :, s] + of_key[:, :, t])
        wanted[:, :, s, t] = -max(s - t, 0) * rate
    torch.testing.assert_close(found.tril(), wanted, rtol=1e-12, atol=1e-12)
    weight, grads = draw(*found.shape, seed=3), []
    for bias in (found.tril(), wanted):
        loss = (bias * weight).sum()
        grads.append(torch.autograd.grad(loss, learned, allow_unused=True, retain_graph=True))
    for a, b in zip(*grads, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_gated_slopes_with_keys_of_zero_are_alibi_times_log_2():
    encoding = build_encoding("grape-a", D, HEADS, causal=True).double()
    q, zero, x = draw(1, HEADS, T, D), torch.zeros(1, HEADS, T, D).double(), draw(1, T, C)
    lag = (AT[:, None] - AT).clamp_min(0)
    wanted = -math.log(2) * SLOPES[:, None, None] * lag
    found = bias_of(encoding, q, zero, x, AT)[0]
    torch.testing.assert_close(found.tril(), wanted.tril(), rtol=1e-6, atol=0)  # omega is float32


def test_the_gates_that_are_not_chosen_have_no_parameters():
    names = {
        g: {n for n, _ in encoding_of("grape-a", grape_gates=g).named_parameters()} for g in GATES
    }
    assert names == {
        "key": {"omega", "of_key"},
        "query": {"omega", "of_query"},
        "query-key": {"omega", "of_query", "of_key"},
    }
    key, both = (
        build_encoding("grape-a", D, HEADS, causal=True, options=EncodingOptions(grape_gates=g))
        for g in ("key", "query-key")
    )
    assert torch.equal(key.of_key, both.of_key)
    assert F.softplus(key.omega).tolist() == pytest.approx([1.0] * HEADS, rel=1e-6)


def positional(encoding, x, at):
    """p of the queries, and R_l p_l of the keys, (B, H, T, d), one by one."""
    raw = (x @ encoding.weight.T).view(*x.shape[:2], HEADS, WIDTH).transpose(1, 2)
    p = raw / (raw.square().mean(-1, keepdim=True) + EPS).sqrt()
    rows = []
    for t, position in enumerate(at.tolist()):
        c, s = math.cos(position), math.sin(position)
        turn = torch.block_diag(
            *[torch.tensor([[c, -s], [s, c]], dtype=torch.float64)] * (WIDTH // 2)
        )
        rows.append(p[:, :, t] @ turn.T)
    turned = torch.stack(rows, 2)
    return (raw if encoding.fixed_query else turned), turned


def sums_by_hand(of_query, of_key):
    """sum over l = t+1..s of a_h log sigmoid(p_s . R_l p_l / d), (B, H, T, T)."""
    batch, _, length, _ = of_query.shape
    found = torch.zeros(batch, HEADS, length, length, dtype=torch.float64)
    for s, t in product(range(length), repeat=2):
        for m in range(t + 1, s + 1):
            z = (of_query[:, :, s] * of_key[:, :, m]).sum(-1) / WIDTH
            found[:, :, s, t] = found[:, :, s, t] + SLOPES * F.logsigmoid(z)
    return found


@pytest.mark.parametrize("fidelity", ["correct", FIXED_QUERY])
def test_path_sums_and_their_gradients_are_those_of_the_equation(fidelity):
    encoding = encoding_of("grape-ap", fidelity=fidelity)
    q, k, x = draw(2, HEADS, 9, D), draw(2, HEADS, 9, D, seed=1), draw(2, 9, C).requires_grad_()
    at = torch.arange(9) + 5
    found = bias_of(encoding, q, k, x, at).tril()
    wanted = sums_by_hand(*positional(encoding, x, at))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    weight = draw(*found.shape, seed=3)
    grads = [
        torch.autograd.grad((b * weight).sum(), [x, encoding.weight], retain_graph=True)
        for b in (found, wanted)
    ]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_the_features_of_paths_do_not_change_the_product_of_query_and_key():
    encoding, q, k, x = (
        encoding_of("grape-ap"),
        draw(1, HEADS, T, D),
        draw(1, HEADS, T, D),
        draw(1, T, C),
    )
    wide = encoding.widened(x, q, k, AT)
    assert wide[0].shape[-1] == encoding.feature_dim == D + 2 * WIDTH
    torch.testing.assert_close(wide[0] @ wide[1].mT, q @ k.mT, rtol=1e-14, atol=1e-14)


def test_paths_with_a_query_of_zero_are_alibi_times_log_2():
    encoding = encoding_of("grape-ap")
    encoding.weight.data.zero_()
    x, q = draw(1, T, C), draw(1, HEADS, T, D)
    lag = (AT[:, None] - AT).clamp_min(0)
    wanted = -math.log(2) * SLOPES[:, None, None] * lag
    torch.testing.assert_close(bias_of(encoding, q, q, x, AT)[0].tril(), wanted, rtol=0, atol=1e-12)


def test_edges_without_the_query_are_forget_gates():
    """With one p_s for all s and keys that do not turn, an edge is log sigmoid(c p_l): FoX's."""
    encoding = encoding_of("grape-ap")
    log_gates = F.logsigmoid(draw(1, HEADS, T))
    q = torch.zeros(1, HEADS, T, D + 2 * WIDTH, dtype=torch.float64)
    k = q.clone()
    q[..., D] = WIDTH * encoding.softmax_scale  # the first feature of p_s, scaled as q is
    k[..., D + WIDTH] = torch.logit((log_gates / SLOPES[:, None]).exp())
    scores = torch.zeros(1, HEADS, T, T, dtype=torch.float64)
    found = encoding(scores, q, k, AT, AT)
    sums = log_gates.cumsum(-1)
    wanted = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril()
    torch.testing.assert_close(found.tril(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shift", [1, 100, 710, 100_000])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_a_shift_of_all_positions_changes_the_published_path_only(name, options, shift):
    encoding = encoding_of(name, **options)
    q, k, x = draw(1, HEADS, T, D), draw(1, HEADS, T, D, seed=1), draw(1, T, C)
    here, there = (bias_of(encoding, q, k, x, AT + n).tril() for n in (0, shift))
    change = (there - here).abs().max() / here.abs().max()
    published = options.get("fidelity") == FIXED_QUERY
    assert (change < 1e-9) is not published
    if published and shift == 710:  # nearly 113 turns
        assert change < 1e-3
    assert encoding.properties.relative == ("no" if published else "exact")


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_decoding_padding_and_documents_equal_the_text_alone(name, options):
    torch.manual_seed(0)
    module = MultiheadAttention(
        C, HEADS, attention_type="softmax", position_encoding=name, causal=True, **options
    )
    module = module.double().eval()
    x = draw(1, T, C, seed=4)
    alone, state, parts = module.attend(x)[0], None, []
    for token in x.split(1, 1):
        out, state = module.attend(token, None, state, True)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), alone, rtol=1e-10, atol=1e-10)
    padding = torch.zeros(1, T + 5, dtype=torch.bool)
    padding[0, [0, 1, 7, 8, 12]] = True
    padded = draw(1, T + 5, C, seed=9)
    padded[~padding] = x[0]
    found = module.attend(padded, padding)[0]
    torch.testing.assert_close(found[~padding], alone[0], rtol=1e-10, atol=1e-10)
    starts = torch.zeros(1, 2 * T, dtype=torch.bool)
    starts[0, T] = True
    packed = module.attend(torch.cat([draw(1, T, C, seed=7), x], 1), starts=starts)[0]
    torch.testing.assert_close(packed[:, T:], alone, rtol=1e-10, atol=1e-10)


def test_sums_from_the_newest_key_keep_their_digits_in_float32():
    """The authors' total minus prefix loses 1.6e-4 at 4,096 tokens."""
    encoding = build_encoding("grape-ap", D, HEADS, causal=True)
    x, q, at = draw(1, 4096, C), torch.zeros(1, HEADS, 4096, D), torch.arange(4096)
    wide, last = encoding.widened(x.float(), q, q, at), slice(4090, 4096)
    rows = wide[0][:, :, last] * encoding.softmax_scale
    scores, double = torch.zeros(1, HEADS, 6, 4096), [t.double() for t in (rows, wide[1])]
    found = encoding(scores, rows, wide[1], at[last], at)
    exact = encoding.double()(scores.double(), *double, at[last], at)
    assert (found[..., -64:].double() - exact[..., -64:]).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_half_types_round_a_bias_once(name, options, dtype):
    encoding = encoding_of(name, **options)
    half = build_encoding(name, D, HEADS, causal=True, options=EncodingOptions(**options))
    half.load_state_dict(encoding.state_dict())
    half.to(dtype)
    q, k, x = draw(1, HEADS, T, D), draw(1, HEADS, T, D, seed=1), draw(1, T, C)
    q, k, x = (y.to(dtype) for y in (q, k, x))
    at, scores = AT + 3, torch.zeros(1, HEADS, T, T, dtype=dtype)
    wide = half.widened(x, q, k, at)
    found = half(scores, wide[0], wide[1], at, at)
    wanted = encoding(scores.double(), wide[0].double(), wide[1].double(), at, at)
    assert found.dtype == dtype
    bound = torch.finfo(dtype).eps * wanted.tril().abs().max()
    assert (found.double() - wanted).tril().abs().max() <= bound


def rank_two(x, a, b, n):
    """exp(n L) x with L = a b^T - b a^T, by GRAPE's closed form for orthogonal a and b, (D,)."""
    generator, size = torch.outer(a, b) - torch.outer(b, a), a.norm() * b.norm()
    once = generator @ x
    half = (n * size / 2).sin()
    return x + (n * size).sin() / size * once + 2 * (half / size) ** 2 * (generator @ once)


def test_multiplicative_grape_with_canonical_planes_is_rope():
    encoding, x = build_encoding("rope", D, 1).double(), draw(1, 1, T, D)
    eye = torch.eye(D, dtype=torch.float64)
    wanted = x[0, 0].clone()
    for s in range(T):
        for i, theta in enumerate(encoding.core.theta):
            wanted[s] = rank_two(wanted[s], theta * eye[2 * i + 1], eye[2 * i], s)
    found = encoding(x, x, AT, AT)[0][0, 0]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_multiplicative_grape_in_an_orthogonal_basis_is_lrpe_with_the_basis_on_one_side():
    name = "lrpe:householder-learned:rotation-learned"
    encoding, q, k = build_encoding(name, D, 1).double(), draw(1, 1, T, D), draw(1, 1, T, D, seed=1)
    v = encoding.projection.v.detach().double()
    basis = torch.eye(D, dtype=torch.float64) - 2 * torch.outer(v, v) / (v @ v)
    theta, both = encoding.core.theta.detach().double(), []
    for x in (q, k):
        rows = x[0, 0] @ basis
        eye = torch.eye(D, dtype=torch.float64)
        for s in range(T):
            for i, angle in enumerate(theta):
                rows[s] = rank_two(rows[s], angle * eye[2 * i + 1], eye[2 * i], s)
        both.append(rows @ basis.T)
    found = encoding(q, k, AT, AT)
    torch.testing.assert_close(
        (found[0] @ found[1].mT)[0, 0], both[0] @ both[1].T, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("name", ["grape-a", "grape-ap"])
def test_linear_and_bidirectional_attention_are_refused_in_one_sentence(name):
    given = {"position_encoding": name, "causal": True}
    with pytest.raises(ChoiceError, match="use it with softmax attention") as refused:
        MultiheadAttention(C, HEADS, attention_type="linear", **given)
    assert "\n" not in str(refused.value)
    with pytest.raises(ChoiceError, match="defined for causal attention only"):
        build_encoding(name, D, HEADS)
