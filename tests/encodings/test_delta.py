"""``delta`` and ``gated:delta`` against a loop over tokens of the delta rule, in float64."""

import itertools
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from lrpe_fairseq.attention import transport
from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.linear import linear_attention_naive
from lrpe_fairseq.attention.multihead import Memory, MultiheadAttention
from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.encodings.core.forms import Transport
from lrpe_fairseq.errors import ChoiceError

B, H, T, D = 2, 2, 37, 8
WIDTH = H * D
NAMES = ("delta", "gated:delta")
NORMALIZERS = ("rotated", "layernorm", "none")
PADDING = torch.zeros(B, T, dtype=torch.bool)
PADDING[0, [0, 5, 6, 20]] = PADDING[1, 30:] = True
STARTS = torch.zeros(B, T, dtype=torch.bool)
STARTS[0, [9, 10, 25]] = STARTS[1, 3] = True


def module_of(name, normalizer="none", dtype=torch.float64, **options):
    """Attention whose beta and gates differ from token to token."""
    torch.manual_seed(0)
    own = {"attention_type": "linear", "position_encoding": name, "causal": True}
    module = MultiheadAttention(WIDTH, H, normalizer=normalizer, **{**own, **options})
    for parameter in module.encoding.parameters():
        parameter.data += torch.randn(parameter.shape)
    return module.to(dtype).eval()


def text(length=T, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, length, WIDTH, generator=generator, dtype=torch.float64)


def by_recurrence(module, x, padding=None, starts=None):
    """S <- alpha (S - beta k (k^T S)) + beta k v^T and q^T S, for every row, head and token."""
    heads = [f(x).unflatten(-1, (H, D)) for f in (module.q_proj, module.k_proj, module.v_proj)]
    q, k, v = (y.permute(0, 2, 1, 3) for y in heads)  # B H T D
    q, k = 1 + F.elu(q), 1 + F.elu(k)
    own, gate = module.encoding.reflections, module.encoding.forget_gate
    rows = []
    for b, h in itertools.product(range(B), range(H)):
        state, sums = torch.zeros(D, D, dtype=x.dtype), torch.zeros(D, dtype=x.dtype)
        row = []
        for s in range(x.shape[1]):
            if padding is not None and padding[b, s]:
                row.append(torch.zeros(D, dtype=x.dtype))
                continue
            alpha = 1.0 if gate is None else (x[b, s] @ gate.weight[h] + gate.bias[h]).sigmoid()
            alpha = 0.0 if starts is not None and starts[b, s] else alpha
            beta = own.largest * (x[b, s] @ own.weight[h] + own.bias[h]).sigmoid()
            key = k[b, h, s] / k[b, h, s].square().sum().sqrt()
            state = alpha * (state - beta * torch.outer(key, key @ state))
            state = state + beta * torch.outer(key, v[b, h, s])
            sums = alpha * (sums - beta * key * (key @ sums)) + beta * key
            total = (q[b, h, s] @ sums).clamp_min(1e-6) if module.normalizer == "rotated" else 1.0
            row.append(q[b, h, s] @ state / total)
        rows.append(torch.stack(row))
    out = torch.stack(rows).unflatten(0, (B, H)).transpose(1, 2).flatten(2)
    out = out if module.norm is None else module.norm(out)
    return module.out_proj(out)


def in_pieces(module, x, padding=None, starts=None):
    """The output from states, in blocks and single tokens."""
    state, parts = None, []
    for first, last in itertools.pairwise([0, 1, 13, 14, 15, 36, T]):
        part = slice(first, last)
        masks = [None if y is None else y[:, part] for y in (padding, starts)]
        out, state = module.attend(x[:, part], masks[0], state, True, starts=masks[1])
        parts.append(out)
    return torch.cat(parts, 1)


def at_once(module, x, padding=None, starts=None):
    return module.attend(x, padding, starts=starts)[0]


def gradients(function, module, x, padding, starts):
    """Output at real tokens, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    out = function(module, x, padding, starts)
    out = out if padding is None else out.masked_fill(padding.unsqueeze(-1), 0.0)
    weights = torch.arange(out.numel()).cos().view_as(out)
    learned = [x, *module.parameters()]
    return [out, *torch.autograd.grad((out * weights).sum(), learned, materialize_grads=True)]


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(("name", "normalizer"), list(itertools.product(NAMES, NORMALIZERS)))
def test_it_is_the_recurrence_of_the_delta_rule(name, normalizer, negative):
    module = module_of(name, normalizer, delta_negative_eigenvalues=negative)
    for padding, starts in ((None, None), (PADDING, None), (None, STARTS), (PADDING, STARTS)):
        starts = starts if padding is None or starts is None else starts & ~padding
        wanted = gradients(by_recurrence, module, text(), padding, starts)
        for function in (at_once, in_pieces):
            with mock.patch.object(transport, "CHUNK", 7):
                found = gradients(function, module, text(), padding, starts)
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_naive_scores_are_those_of_the_chunks(name):
    module = module_of(name)
    x = text()
    tokens = module.encoding.transport(x, torch.arange(T), None, None, {})[0]
    q, k, v = module._project(x)
    given, keys = tokens.by_keys(1 + F.elu(k))
    options = {"transport": given, "log_decay": module.encoding.log_gates(x), "normalizer": "none"}
    found = linear_attention_naive(1 + F.elu(q), keys, v, causal=True, **options)
    found = module.out_proj(found.transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, by_recurrence(module, x), rtol=1e-10, atol=1e-10)


def test_a_window_hides_values_and_not_the_updates_between_them():
    """Each value in the window, alone, by the recurrence."""
    module, whole, window = module_of("delta", window=4), module_of("delta"), 4
    x = text(12)
    values = module.v_proj(x)
    wanted = []
    for s in range(12):
        shown = torch.zeros(12, 1, dtype=torch.bool)
        shown[max(0, s - window + 1) : s + 1] = True
        given = (values * shown).detach()
        with mock.patch.object(whole.v_proj, "forward", lambda _, given=given: given):
            wanted.append(by_recurrence(whole, x)[:, s])
    found = module.attend(x)[0]
    torch.testing.assert_close(found, torch.stack(wanted, 1), rtol=1e-10, atol=1e-10)


def test_beta_starts_near_one_half_or_one_and_stays_below_1_or_2():
    for negative, start in ((False, 0.5), (True, 1.0)):
        encoding = build_encoding(
            "delta", D, H, causal=True, delta_negative_eigenvalues=negative
        )  # fmt: skip
        given = torch.arange(3), None, None, {}
        found, history = encoding.transport(torch.zeros(1, 3, WIDTH), *given)
        torch.testing.assert_close(found.beta, torch.full((1, H, 3), start))
        assert history == {}
        encoding.reflections.bias.data.fill_(30.0)
        assert encoding.transport(torch.zeros(1, 3, WIDTH), *given)[0].beta.max() <= 2 * start
        shapes = {n: tuple(p.shape) for n, p in encoding.reflections.named_parameters()}
        assert shapes == {"weight": (H, WIDTH), "bias": (H,)}
        assert 0.01 < encoding.reflections.weight.std() < 0.03


def test_the_norms_of_a_query_and_of_a_key_change_nothing_but_the_scale_of_the_output():
    q, k, v = (torch.rand(1, 1, 9, 4, dtype=torch.float64) for _ in range(3))
    beta = Transport(None, torch.rand(1, 1, 9, dtype=torch.float64))

    def sums(q, k, normalizer):
        given, keys = beta.by_keys(k)
        options = {"causal": True, "normalizer": normalizer, "transport": given}
        return linear_attention_naive(q, keys, v, **options)

    for normalizer in ("none", "rotated"):
        found = sums(q, 3 * k, normalizer)
        torch.testing.assert_close(found, sums(q, k, normalizer), rtol=1e-12, atol=1e-12)
    found = sums(3 * q, k, "rotated")
    torch.testing.assert_close(found, sums(q, k, "rotated"), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums(3 * q, k, "none"), 3 * sums(q, k, "none"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_are_normalized_in_float32_for_half_types_and_under_autocast(dtype):
    k, beta = torch.rand(1, 1, 50, 64).to(dtype), torch.rand(1, 1, 50)
    with torch.autocast("cpu", torch.bfloat16):
        given, keys = Transport(None, beta).by_keys(k)
    assert given.w.dtype == keys.dtype == torch.float32
    assert (given.w.norm(dim=-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_have_the_state_of_linear_attention_is_refused(name):
    options = {"position_encoding": name, "causal": True}
    with pytest.raises(ChoiceError, match="softmax attention does not have; use it with linear"):
        MultiheadAttention(WIDTH, H, attention_type="softmax", **options)
    options["attention_type"] = "linear"
    for refused in (
        lambda: MultiheadAttention(WIDTH, H, **{**options, "causal": False}),
        lambda: CrossAttention(WIDTH, H, position_encoding=name, attention_type="linear"),
    ):
        with pytest.raises(ChoiceError, match="for causal attention only; choose another"):
            refused()
    with pytest.raises(ChoiceError, match="reflections follow the order of tokens"):
        MultiheadAttention(WIDTH, H, **options, grid_width=4, position_grid="sum")
    with pytest.raises(ValueError, match="only causal softmax attention has a memory"):
        module_of(name).attend(text(3), state=Memory(text(2).transpose(0, 1)))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("path:delta", "reflections can be added to encodings that keep norms"),
        ("gated:path:delta", "reflections can be added to encodings that keep norms"),
        ("selective:delta", "angles from the text need rotations"),
        ("gated-channel:delta", "decays of single features commute with rotations of pairs only"),
        ("delta:rope", "unknown position encoding"),
    ],
)
def test_other_combinations_are_refused_in_one_sentence(name, reason):
    with pytest.raises(ChoiceError, match=reason) as error:
        build_encoding(name, D, H, causal=True)
    assert "\n" not in str(error.value)
