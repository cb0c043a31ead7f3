"""``selective:<name>`` against the equations, the inner encoding, and itself in pieces."""

import math

import pytest
import torch
from torch.nn import functional as F

from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.multihead import MultiheadAttention, feature_map
from lrpe_fairseq.encodings import FAMILIES, EncodingOptions, build_encoding
from tests.references import score_matrix

WIDTH, HEADS, D = 16, 2, 8
KINDS = ("softmax", "linear")
OPTIONS = {"plain": {}, "gate and SiLU": {"selective_gate": True, "selective_silu": True}}


def module_of(name, kind, *, live=True, **options):
    """Attention in float64; ``live``: no parameter of the encoding is zero."""
    torch.manual_seed(0)
    options = {"causal": True, "normalizer": "layernorm", **options}
    options |= {"attention_type": kind, "position_encoding": name}
    module = MultiheadAttention(WIDTH, HEADS, **options).double().eval()
    return woken(module) if live else module


def woken(module):
    noise = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=noise)
    return module


def text(length, batch=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64)


def increments(encoding, x):
    """delta (B, T, H, E) token by token, from the equation."""
    own, out = encoding.increments, []
    slices = x.unflatten(-1, (HEADS, D))
    unit = (slices / slices.norm(dim=-1, keepdim=True)).flatten(-2)
    low = unit @ own.down.mT @ own.up.mT
    for t in range(x.shape[1]):
        step = sum(own.filter[j] * low[:, t - j] for j in range(min(4, t + 1)))
        step = F.silu(step) if own.options.selective_silu else step
        step = (step + own.bias.exp()).unflatten(-1, (HEADS, -1))
        if own.options.selective_gate:
            gate = torch.sigmoid(unit[:, t] @ own.gate.mT + own.gate_bias)
            step = 2 * gate.unsqueeze(-1) * step
        out.append(step)
    return torch.stack(out, 1)


def written_out(module, x):
    """Attention of x from complex features: score (s, t) turns by the increments in between."""
    encoding, linear = module.encoding, module.attention_type == "linear"
    q, k, v = (
        p(x).unflatten(-1, (HEADS, D)) for p in (module.q_proj, module.k_proj, module.v_proj)
    )
    q, k = (feature_map(q), feature_map(k)) if linear else (q, k)
    v_p, theta = encoding.projection.v, encoding.core.theta
    q, k = (z - 2 * (z @ v_p).unsqueeze(-1) * v_p / (v_p @ v_p) for z in (q, k))
    q, k = (torch.complex(z[..., ::2], z[..., 1::2]) for z in (q, k))
    steps, length = increments(encoding, x), x.shape[1]
    scores = q.real.new_zeros(x.shape[0], HEADS, length, length)
    for s in range(length):
        for t in range(s + 1 if module.causal else length):
            low, high = min(s, t), max(s, t)
            turn = theta * steps[:, low + 1 : high + 1].sum(1) * (1 if s >= t else -1)
            pairs = (q[:, s].conj() * k[:, t] * torch.exp(-1j * turn)).real.sum(-1)
            scores[:, :, s, t] = pairs
    if linear:
        weights = scores
    else:
        hidden = torch.ones(length, length).triu(1).bool() if module.causal else torch.tensor(False)
        weights = (scores / math.sqrt(D)).masked_fill(hidden, -math.inf).softmax(-1)
    out = torch.einsum("bhst,bthe->bshe", weights, v).flatten(2)
    return module.out_proj(module.norm(out) if linear else out)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_turn_by_the_increments_in_between(kind, causal, options):
    module = module_of("selective:lrpe-type2", kind, causal=causal, **options)
    x = text(7).requires_grad_()
    found, wanted = module.attend(x)[0], written_out(module, x)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    learned = {"x": x, **dict(module.named_parameters())}
    pairs = [torch.autograd.grad(o.square().sum(), learned.values()) for o in (found, wanted)]
    for name, one, other in zip(learned, *pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: n + m)
        assert one.abs().max() > 1e-6, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES["selective"].names)
def test_it_starts_as_the_inner_encoding_and_learns(name, kind):
    for causal in (True, False):
        for options in OPTIONS.values():
            inner = module_of(name.removeprefix("selective:"), kind, live=False, causal=causal)
            module = module_of(name, kind, live=False, causal=causal, **options)
            module.load_state_dict(inner.state_dict(), strict=False)
            found, wanted = module.attend(text(9))[0], inner.attend(text(9))[0]
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    found.square().sum().backward()
    own = module.encoding.increments
    assert all(p.grad.abs().max() > 1e-6 for p in (own.up, own.bias, own.gate))


@pytest.mark.parametrize("kind", KINDS)
def test_increments_of_a_quarter_are_context_scaling_by_4(kind):
    module, x = module_of("selective:rope", kind, live=False), text(9)
    with torch.no_grad():
        module.encoding.increments.bias.fill_(-math.log(4))
    scaled = {"context_scaling": "linear", "context_factor": 4.0}
    wanted = module_of("rope", kind, live=False, **scaled).attend(x)[0]
    torch.testing.assert_close(module.attend(x)[0], wanted, rtol=1e-7, atol=1e-7)
    both = module_of("selective:rope", kind, live=False, **scaled).attend(x)[0]
    torch.testing.assert_close(both, wanted, rtol=1e-10, atol=1e-10)


def scores_of(encoding, x, shift=0.0):
    q, k = (text(x.shape[1], seed=s).unflatten(-1, (HEADS, D)).transpose(1, 2) for s in (3, 4))
    places = encoding.phases(x, None, None, {})[0] + shift
    q, k = encoding(q, k, places, places)
    return q @ k.mT


@pytest.mark.parametrize("name", ["selective:rope", "selective:lrpe-type8"])
def test_scores_depend_on_the_tokens_between_and_the_reach_of_the_filter_only(name):
    encoding, x = module_of(name, "softmax").encoding, text(20)
    here = scores_of(encoding, x)
    assert (scores_of(encoding, x, 1e9) - here).abs().max() < 1e-5
    other, u = x.clone(), 9
    other[:, u] += 1
    changed = (scores_of(encoding, other) - here).abs().amax((0, 1)) > 1e-9
    s, t = torch.meshgrid(torch.arange(20), torch.arange(20), indexing="ij")
    low, high = torch.minimum(s, t), torch.maximum(s, t)
    assert torch.equal(changed, (high >= u) & (low < u + 3) & (s != t))


def test_float32_is_right_after_16384_tokens_and_under_autocast():
    exact = module_of("selective:rope", "linear").encoding
    rounded = woken(module_of("selective:rope", "linear", live=False).float()).encoding
    x = text(16_384, batch=1)
    places, found = (
        e.phases(x.to(t), None, None, {})[0]
        for e, t in ((exact, torch.float64), (rounded, torch.float32))
    )
    assert found.dtype == torch.float64
    assert (found - places).abs().max() < 1e-5 * places.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rounded.phases(x.float(), None, None, {})[0], found)


def test_other_encodings_and_uses_are_refused_in_one_sentence():
    names = {"selective:lrpe-type4", "selective:t5", "selective:fox", "selective:gated:rope"}
    for name in (*names, "selective:selective:rope", "selective:fope"):
        with pytest.raises(ValueError, match="one angle per pair; choose one of rope, lrpe-type1"):
            build_encoding(name, D, HEADS, causal=True)
    options = EncodingOptions(grid_width=4, position_grid="axial")
    with pytest.raises(ValueError, match="summed from the text, without rows"):
        build_encoding("selective:rope", D, HEADS, options=options)
    with pytest.raises(ValueError, match="follow one text; choose an encoding with fixed"):
        CrossAttention(WIDTH, HEADS, attention_type="softmax", position_encoding="selective:rope")


def test_explicit_positions_without_a_text_are_those_of_the_inner_encoding():
    generator = torch.Generator().manual_seed(1)
    q, k = torch.rand(2, 2, HEADS, 5, D, generator=generator, dtype=torch.float64)
    at = torch.tensor([0, 3, 9, 10, 70_000])
    found, wanted = (
        score_matrix(build_encoding(name, D, HEADS), q, k, at, at)
        for name in ("selective:lrpe-type2", "lrpe-type2")
    )
    assert torch.equal(found, wanted)
