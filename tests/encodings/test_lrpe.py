"""LRPE against dense matrices built from the equations."""

import warnings

import pytest
import torch

from lrpe_fairseq.attention import projected
from lrpe_fairseq.attention.linear import EPS, linear_attention
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.softmax import fused_attention
from lrpe_fairseq.encodings import ENCODINGS, FAMILIES, EncodingOptions, build_encoding
from lrpe_fairseq.encodings.rotations.cores import CORES
from lrpe_fairseq.encodings.rotations.permutations import CyclicPowers
from lrpe_fairseq.encodings.rotations.projections import PROJECTIONS
from tests.pairwise import pairwise
from tests.references import dense_lambda, dense_p, dense_scores, dense_w, frequencies

LRPE_FORMS = FAMILIES["lrpe"].names

LENGTHS = (1, 2, 63, 64, 65, 200)
TYPES = {
    "rope": ("identity", "rotation"),
    "lrpe-type1": ("householder", "rotation-half"),
    "lrpe-type2": ("householder", "rotation-learned"),
    "lrpe-type3": ("householder-learned", "rotation-learned"),
    "lrpe-type4": ("householder", "permutation"),
    "lrpe-type5": ("odd-even", "rotation-half"),
    "lrpe-type6": ("odd-even", "rotation-learned"),
    "lrpe-type7": ("odd-even", "permutation"),
    "lrpe-type8": ("fourier", "unitary"),
    "lrpe-tmlr-type1": ("householder", "unitary-learned"),
    "lrpe-tmlr-type2": ("householder", "rotation-learned"),
    "lrpe-tmlr-type3": ("householder", "permutation"),
}


def example(length, width, heads=1, batch=1):
    generator = torch.Generator().manual_seed(length * 100 + width)
    shape = (batch, heads, length, width)
    return [torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def test_the_types_of_table_1_and_of_the_second_paper_are_the_named_combinations():
    for name, (p, core) in TYPES.items():
        encoding = build_encoding(name, head_dim=8, num_heads=2)
        assert type(encoding.projection) is PROJECTIONS[p], name
        assert type(encoding.core) is CORES[core], name
    assert set(TYPES) == {n for n in ENCODINGS if n.startswith("lrpe") or n == "rope"}


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize("form", LRPE_FORMS)
def test_features_are_lambda_s_p_q_as_dense_matrices(form, width):
    _, p_name, core_name = form.split(":")
    encoding = build_encoding(form, head_dim=width, num_heads=2)
    q, k, _ = example(5, width)
    positions = torch.tensor([0, 1, 2, 9, 31])
    q2, _ = encoding(q, k, positions, positions)
    p = dense_p(encoding, p_name)
    for row, s in enumerate(positions.tolist()):
        matrix = dense_lambda(encoding, core_name, s) @ p
        expected = q[:, :, row].to(torch.complex128) @ matrix.T
        planes = [expected.real, expected.imag][: q2.shape[-1] // width]
        torch.testing.assert_close(q2[:, :, row], torch.cat(planes, -1), rtol=0, atol=1e-12)
        if len(planes) == 1:
            assert expected.imag.abs().max() < 1e-12


@pytest.mark.parametrize(("form", "width", "length"), pairwise(LRPE_FORMS, [8, 7], LENGTHS))
def test_both_attentions_equal_the_dense_definition_in_outputs_and_gradients(form, width, length):
    _, p_name, core_name = form.split(":")
    encoding = build_encoding(form, head_dim=width, num_heads=2, seed=3)
    inputs = [x.requires_grad_() for x in example(length, width)]
    q, k, v = inputs
    positions = torch.arange(length)
    w = [dense_w(encoding, p_name, core_name, lag) for lag in range(-length + 1, length)]
    scores = dense_scores(torch.stack(w), q, k)
    q2, k2 = encoding(q, k, positions, positions)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    weights = scores.masked_fill(~seen, 0)
    linear = weights @ v / weights.sum(-1, keepdim=True).clamp_min(EPS)
    softmax = (scores * width**-0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    tame = weights.sum(-1).min() > 1e-2  # a tiny denominator magnifies rounding without bound
    if tame:
        assert_same_with_gradients(linear, linear_attention(q2, k2, v, causal=True), inputs)
    ours = fused_attention(q2, k2, v, dropout=0.0, is_causal=True, scale=width**-0.5)
    assert_same_with_gradients(softmax, ours, inputs)
    unnormalized = linear_attention(q2, k2, v, causal=True, normalizer="none")
    assert_same_with_gradients(weights @ v, unnormalized, inputs, scale=length)


def assert_same_with_gradients(expected, actual, inputs, scale=1):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10 * scale)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    wanted = torch.autograd.grad(expected, inputs, weights, retain_graph=True)
    got = torch.autograd.grad(actual, inputs, weights, retain_graph=True)
    torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-8 * scale)


@pytest.mark.parametrize("form", LRPE_FORMS)
def test_positions_up_to_2_to_the_31_need_no_table(form):
    encoding = build_encoding(form, head_dim=8, num_heads=2)
    q, k, _ = example(3, 8)
    far = torch.tensor([2**31 - 9, 2**31 - 2, 2**31 - 1])
    near = far - far[0]
    (q1, k1), (q2, k2) = encoding(q, k, near, near), encoding(q, k, far, far)
    torch.testing.assert_close(q1 @ k1.mT, q2 @ k2.mT, rtol=0, atol=1e-5)


def test_permutation_powers_are_repeated_application():
    generator = torch.Generator().manual_seed(0)
    for width in (1, 2, 5, 64):
        pi = torch.randperm(width, generator=generator)
        power, powers = torch.arange(width), CyclicPowers()
        for s in range(200):
            assert torch.equal(powers.powers(pi, torch.tensor([s]))[0], power)
            back = powers.powers(pi, torch.tensor([-s]))[0]
            assert torch.equal(back[power], torch.arange(width))
            power = pi[power]


@pytest.mark.parametrize("core", [c for c in CORES if c != "permutation"])
@pytest.mark.parametrize("halve", [torch.float16, torch.bfloat16, torch.float32])
def test_the_angle_in_use_is_within_1e_3_rad_up_to_position_16384(core, halve):
    encoding = build_encoding(f"lrpe:identity:{core}", head_dim=64, num_heads=2).to(halve)
    positions = torch.tensor([1, 511, 4096, 10000, 16383, 16384])
    in_use = encoding.core.powers(positions, torch.float32).to(torch.complex128)
    exact = torch.exp(1j * positions[:, None].double() * frequencies(core, 64))
    assert (in_use / exact).angle().abs().max() < 1e-3


def learns(name):
    return next(build_encoding(name, 8, 2).parameters(), None) is not None


LEARNED = [n for n in (*ENCODINGS, *LRPE_FORMS) if n.startswith("lrpe") and learns(n)]


@pytest.mark.parametrize("attention_type", ["linear", "softmax"])
@pytest.mark.parametrize("name", LEARNED)
def test_frozen_learned_parts_give_what_trainable_ones_give(name, attention_type):
    torch.manual_seed(0)
    options = {"attention_type": attention_type, "position_encoding": name, "causal": True}
    module = MultiheadAttention(16, 2, **options).eval()
    x = torch.randn(2, 7, 16)
    wanted, _ = module.attend(x)
    module.encoding.requires_grad_(False)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(module.attend(x)[0], wanted, rtol=1e-5, atol=1e-6)
    module.attend(x)[0].sum().backward()
    assert all(p.grad is None for p in module.encoding.parameters())
    assert module.q_proj.weight.grad.abs().sum() > 0


def reflection(start, seed=0, width=64):
    options = EncodingOptions(lrpe_householder_start=start)
    name = "lrpe:householder-learned:rotation"
    return build_encoding(name, width, 1, seed=seed, options=options).projection


def test_the_learned_reflection_starts_from_a_standard_normal():
    norms = torch.stack([reflection("normal", seed).v.detach().norm() for seed in range(50)])
    assert abs(norms.mean() - 8) < 0.3  # sqrt(64)
    assert float(reflection("unit").v.detach().norm()) == pytest.approx(1)
    plain = build_encoding("lrpe-type3", 64, 1).projection.v
    assert torch.equal(plain, reflection("normal").v)


def test_type_8_in_float16_with_the_rotated_normalizer_warns_once():
    projected._warn_once.cache_clear()
    options = {"attention_type": "linear", "position_encoding": "lrpe-type8", "causal": True}
    x = torch.randn(1, 5, 16).half()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MultiheadAttention(16, 2, **options).attend(x.float())
        MultiheadAttention(16, 2, normalizer="layernorm", **options).half().attend(x)
        assert caught == []
        for _ in range(2):
            MultiheadAttention(16, 2, **options).half().attend(x)
    (warning,) = caught
    assert "use normalizer 'layernorm', 'bounded' or 'content'" in str(warning.message)


ODD = 9


@pytest.mark.parametrize(
    ("name", "turns_pairs"),
    [(n, True) for n in ("rope", "lrpe-type2", "lrpe-type3", "lrpe-type6", "tape", "gated:rope")]
    + [(n, False) for n in ("lrpe-type1", "lrpe-type4", "lrpe-type8", "lrpe-tmlr-type1", "none")],
)
def test_a_head_of_odd_width_warns_of_the_feature_that_does_not_turn(name, turns_pairs):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        encoding = build_encoding(name, ODD, 2, causal=True)
        build_encoding(name, ODD - 1, 2, causal=True)  # without a word
        options = EncodingOptions(rotation_fraction=0.5) if turns_pairs else EncodingOptions()
        build_encoding(name, ODD, 2, causal=True, options=options)  # as the user wants it
    said = [str(one.message) for one in seen]
    assert len(said) == turns_pairs
    if turns_pairs:
        assert "the last of the 9 features of each head does not turn" in said[0]
        q = torch.randn(1, 2, 5, ODD)
        (turned,) = encoding.core((q,), encoding.core.powers(torch.arange(5), q.dtype))
        assert torch.equal(turned[..., -1], q[..., -1])
        assert "the last feature does not turn" in encoding.core.latex
