"""Base, fraction and context scaling of rotations, against angles computed from the formulas."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from torch.func import functional_call

from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.linear import linear_attention_naive
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.projected import feature_map
from lrpe_fairseq.encodings import COMPOSED_NAMES, ENCODINGS, EncodingOptions, build_encoding
from lrpe_fairseq.encodings.core.options import flag_of
from lrpe_fairseq.encodings.rotations.scaling import (
    BY_TEXT,
    SCALINGS,
    YARN,
    RotationOptions,
    scaled,
)
from lrpe_fairseq.errors import ChoiceError

ROTATING = {
    *("rope", "lrpe-type1", "lrpe-type2", "lrpe-type3", "lrpe-type5", "lrpe-type6", "lrpe-type8"),
    *("lrpe-tmlr-type1", "lrpe-tmlr-type2", "rope-2d", "fope", "tape"),
}
NAMES = (*ENCODINGS, *COMPOSED_NAMES)
F, L, D, HEADS = 4.0, 128, 16, 2
AT = torch.tensor([0, 1, 2, 9, 100, 5001])
ON = [name for name in SCALINGS if name not in ("none", *BY_TEXT)]
"""tests/encodings/test_long_texts.py has those of the length of the text."""


def encoding_of(name, scaling="none", factor=F, width=D, **options):
    """The encoding in float64; its learned parts are moved from their start, always alike."""
    if scaling != "none":
        options |= {"context_scaling": scaling, "context_factor": factor, "context_length": L}
    options = EncodingOptions(**options)
    encoding = build_encoding(name, width, HEADS, causal=True, options=options).double()
    for parameter in encoding.parameters():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
        parameter.data += 0.1 * noise
    return encoding


def example(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, HEADS, len(AT), D, generator=generator).to(dtype)


def rotates(name):
    inner = (
        name.removeprefix("gated-channel:")
        .removeprefix("gated:")
        .removeprefix("path:")
        .removeprefix("selective:")
    )
    return inner in ROTATING or (inner.startswith("lrpe:") and not inner.endswith("permutation"))


def correction(turns, rho):
    """Where the logarithm of the turns, by size and decreasing, passes log rho; one by one."""
    logs = [math.log(r) for r in turns]
    last = len(logs) - 2
    i = next((i for i in range(last) if logs[i] >= math.log(rho) > logs[i + 1]), None)
    if i is None:
        i = 0 if math.log(rho) > logs[0] else last
    return i + (logs[i] - math.log(rho)) / (logs[i] - logs[i + 1])


def kept_by_place(angles, order):
    """The share of each angle that is not divided, in the authors' code; one by one."""
    turns = [L * abs(angles[i]) / (2 * math.pi) for i in order]
    low = max(math.floor(correction(turns, 32)), 0)
    high = min(math.ceil(correction(turns, 1)), 2 * len(angles) - 1)
    high = high + 0.001 if high == low else high
    ramp = {i: (place - low) / (high - low) for place, i in enumerate(order)}
    return [1 - min(max(ramp[i], 0), 1) for i in range(len(angles))]


def formula(angles, scaling):
    """The angles after context scaling, one by one."""
    order = sorted(range(len(angles)), key=lambda i: -abs(angles[i]))
    found = list(angles)
    for place, i in enumerate(order):
        w = angles[i]
        if scaling == "linear":
            found[i] = w / F
        elif scaling == "ntk":
            features = 2 * len(angles)
            found[i] = w * F ** (-2 * place / (features - 2))
        elif scaling == "yarn":
            g = kept_by_place(angles, order)[i]
            found[i] = (1 - g) * w / F + g * w
        elif scaling == "yarn-printed":
            g = min(max((L * abs(w) / (2 * math.pi) - 1) / 31, 0), 1)
            found[i] = (1 - g) * w / F + g * w
        elif scaling == "llama3":
            g = min(max((L * abs(w) / (2 * math.pi) - 1) / 3, 0), 1)
            found[i] = (1 - g) * w / F + g * w
    return found


def with_angles(name, angles):
    """The encoding without options, whose angles are these."""
    encoding, angles = encoding_of(name), torch.tensor(angles, dtype=torch.float64)
    if isinstance(encoding.core.theta, torch.nn.Parameter):
        encoding.core.theta.data = angles
    else:
        encoding.core.theta = angles
    return encoding


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_scaled_rotations_or_refuses_in_one_sentence(name):
    scaling = {"context_scaling": "linear", "context_length": 9}
    for options in ({"rotation_fraction": 0.5}, {"rotation_base": 500.0}, scaling):
        if rotates(name):
            assert encoding_of(name, **options).scales
        else:
            given = flag_of(next(iter(options)))
            with pytest.raises(ChoiceError, match=f"does not support {given}: leave") as refused:
                encoding_of(name, **options)
            assert name in str(refused.value)
            assert "\n" not in str(refused.value)
    assert bool(encoding_of(name).scales) == rotates(name)


@pytest.mark.parametrize("name", sorted(filter(rotates, NAMES)))
def test_factor_1_equals_no_scaling_to_the_bit(name):
    x, plain = example(torch.float32), encoding_of(name)
    for scaling in ON:
        one = encoding_of(name, scaling, 1.0)
        assert torch.equal(one(x, x, AT, AT)[0], plain(x, x, AT, AT)[0])
        assert one.softmax_scale == plain.softmax_scale


@pytest.mark.parametrize("scaling", ON)
@pytest.mark.parametrize("name", sorted(ROTATING - {"fope"}))
def test_features_are_those_of_the_angles_of_the_formula(name, scaling):
    x, encoding = example(), encoding_of(name, scaling)
    expected = with_angles(name, formula(encoding_of(name).core.theta.tolist(), scaling))
    found = encoding(x, x, AT, AT)[0]
    torch.testing.assert_close(found, expected(x, x, AT, AT)[0], rtol=0, atol=1e-9)
    x = x.float()
    encoded, _ = encoding.encode_both(x, x, AT, AT, phi=False)
    torch.testing.assert_close(encoded.double(), found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", sorted(ROTATING))
def test_linear_scaling_by_f_equals_positions_divided_by_f(name):
    x, plain = example(), encoding_of(name)
    own = {"fope_length": 4 * 512} if name == "fope" else {}
    far = encoding_of(name, "linear", **own)(x, x, 4 * AT, 4 * AT)[0]
    torch.testing.assert_close(far, plain(x, x, AT, AT)[0], rtol=0, atol=1e-9)


def test_fope_scales_its_frequencies_before_they_are_clipped():
    plain = encoding_of("fope", fope_length=90)
    encoding = encoding_of("fope", "ntk", fope_length=90)
    every = formula([10000 ** (-i / 8) for i in range(8)], "ntk")
    kept = [w for w in every if w >= 2 * math.pi / 90]
    torch.testing.assert_close(encoding.core.angles, torch.tensor(kept, dtype=torch.float64))
    assert len(kept) < len(plain.core.theta)
    encoding.load_state_dict(plain.state_dict())
    cut = plain.core.coefficients[:, :, : len(kept), : len(kept)]
    assert torch.equal(encoding.core.coefficients, cut)


def test_fope_says_at_which_length_a_scaled_frequency_remains():
    said = "no frequency of fope remains at --fope-length 512: set it to at least 629, or lower"
    with pytest.raises(ChoiceError, match=said):
        encoding_of("fope", "linear", 100.0)
    encoding = encoding_of("fope", "linear", 100.0, fope_length=629)  # 200 pi = 628.3
    assert len(encoding.core.theta) == 1


def test_printed_yarn_divides_slow_pairs_and_keeps_fast_ones_to_the_bit():
    once = 2 * math.pi / L
    theta = torch.tensor([40 * once, 32 * once, 16.5 * once, once, 0.3 * once, 0.0]).double()
    for f in (2.0, 3.0, 7.3):
        given = RotationOptions(context_scaling="yarn-printed", context_factor=f, context_length=L)
        found = scaled(-theta, given)
        assert torch.equal(found[:1], -theta[:1])
        torch.testing.assert_close(found[1], -theta[1])
        torch.testing.assert_close(found[2], -(theta[2] + theta[2] / f) / 2)
        torch.testing.assert_close(found[3:], -theta[3:] / f)


def yarn_of_transformers(base, features, length, f):
    """The inverse frequencies of transformers' ``_compute_yarn_parameters``, one by one.

    The same as ``scaled_rope/LlamaYaRNScaledRotaryEmbedding.py`` of jquesnelle/yarn a18e5498.
    """

    def dimension(rotations):
        inside = length / (rotations * 2 * math.pi)
        return features * math.log(inside) / (2 * math.log(base))

    low = max(math.floor(dimension(32)), 0)
    high = min(math.ceil(dimension(1)), features - 1)
    high = high + 0.001 if low == high else high
    found = []
    for i in range(features // 2):
        frequency = 1 / base ** (2 * i / features)
        extrapolated = 1 - min(max((i - low) / (high - low), 0), 1)
        found.append(frequency / f * (1 - extrapolated) + frequency * extrapolated)
    return found


@pytest.mark.parametrize("features", [2, 4, 32, 64, 128])
@pytest.mark.parametrize("base", [100.0, 10000.0, 500000.0])
def test_yarn_is_the_ramp_of_transformers_for_every_length_and_factor(base, features):
    """Also where both ends of the ramp are equal, negative or beyond the last pair."""
    theta = base ** -(torch.arange(0, features, 2, dtype=torch.float64) / features)
    order = torch.randperm(len(theta), generator=torch.Generator().manual_seed(4))
    for length in (1, 6, 40, 128, 512, 4096, 131072, 10**7):
        for f in (1.0, 2.0, 7.3, 16.0):
            given = {"context_scaling": "yarn", "context_factor": f, "context_length": length}
            given = RotationOptions(rotation_base=base, **given)
            wanted = torch.tensor(yarn_of_transformers(base, features, length, f)).double()
            torch.testing.assert_close(scaled(theta, given), wanted, rtol=1e-6, atol=0)
            # places go by size: the order of the angles and their signs do not matter
            found = scaled(-theta[order], given)
            torch.testing.assert_close(found, -wanted[order], rtol=1e-6, atol=0)


def test_yarn_differs_from_the_printed_formula_where_training_texts_are_short():
    """At L = 128, D = 32 and f = 16 six of 16 pairs differ: no pair makes 32 turns in training."""
    theta, given = torch.tensor(yarn_of_transformers(10000.0, 32, 128, 1.0)).double(), {}
    for name in YARN:
        options = RotationOptions(context_scaling=name, context_factor=16.0, context_length=128)
        given[name] = scaled(theta, options)
    assert given["yarn"][0] == theta[0]
    assert given["yarn-printed"][0] < 0.65 * theta[0]
    ratio = given["yarn-printed"] / given["yarn"]
    assert int((ratio - 1).abs().gt(1e-9).sum()) == 6
    assert ratio.min() < 0.3


@pytest.mark.parametrize("angles", [[1.0, 1.0, 1.0], [0.0, 0.0], [0.5, 0.0, 0.0, 0.0], [0.3]])
@pytest.mark.parametrize("length", [1, 128, 10**6])
def test_yarn_of_equal_angles_and_of_angles_0_is_finite_and_between_w_and_w_over_f(angles, length):
    given = RotationOptions(context_scaling="yarn", context_factor=F, context_length=length)
    theta = torch.tensor(angles, dtype=torch.float64, requires_grad=True)
    found = scaled(theta, given)
    assert ((found <= theta) & (found >= theta / F)).all()
    (gradient,) = torch.autograd.grad(found.sum(), theta)
    assert ((gradient <= 1) & (gradient >= 1 / F)).all()


@pytest.mark.parametrize("scaling", ON)
@pytest.mark.parametrize("name", ["lrpe-type2", "lrpe-tmlr-type1"])
def test_gradients_reach_the_angles_before_scaling(name, scaling):
    encoding, x, at = encoding_of(name, scaling), example()[:1, :1, :3], AT[:3]

    def encoded(theta):
        return functional_call(encoding, {"core.theta": theta}, (x, x, at, at))[0]

    theta = encoding.core.theta.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(encoded, theta)


@pytest.mark.parametrize("scaling", YARN)
@pytest.mark.parametrize("name", ["rope", "lrpe-type2", "lrpe-type8"])
def test_yarn_multiplies_the_scores_of_softmax_attention_and_not_those_of_linear(name, scaling):
    options = EncodingOptions(context_scaling=scaling, context_factor=F, context_length=L)
    x = torch.randn(2, 9, 2 * D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    at = torch.arange(9)
    for kind in ("softmax", "linear"):
        torch.manual_seed(0)
        given = {"attention_type": kind, "position_encoding": name, "options": options}
        module = MultiheadAttention(2 * D, 2, causal=True, **given).double()
        q, k, v = module._project(x)
        if kind == "linear":
            q, k = module.encoding(feature_map(q), feature_map(k), at, at)
            wanted = linear_attention_naive(q, k, v, causal=True)
        else:
            q, k = module.encoding(q, k, at, at)
            scores = q @ k.mT * D**-0.5 * (0.1 * math.log(F) + 1) ** 2
            hidden = torch.ones(9, 9).triu(1).bool()
            wanted = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        expected = module._project_out(wanted, x)
        torch.testing.assert_close(module.attend(x)[0], expected, rtol=1e-9, atol=1e-9)


AXIAL = {"grid_width": 3, "position_grid": "axial"}


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        *product(("rope", "lrpe-type2", "lrpe-type8"), ({}, AXIAL), ("self", "cross")),
        *(("selective:rope", {}, "self"), ("tape", {}, "self")),
    ],
)
def test_yarn_multiplies_the_turned_features_only_as_transformers_does(name, options, kind):
    """cos and sin of q and of k are multiplied by m, so the products of turned features by m^2."""
    scaling = {"context_scaling": "yarn", "context_factor": F, "context_length": L}
    given = EncodingOptions(rotation_fraction=0.5, **scaling, **options)
    torch.manual_seed(0)
    kinds = {"self": partial(MultiheadAttention, causal=True), "cross": CrossAttention}
    own = {"attention_type": "softmax", "position_encoding": name, "options": given}
    module = kinds[kind](2 * D, 2, **own).double()
    x = torch.randn(2, 9, 2 * D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    q, k, v = module._project(x)
    q, k = module.encoding(q, k, torch.arange(9), torch.arange(9))
    m = 0.1 * math.log(F) + 1
    plane = D // (2 if options else 1)  # each axis of a grid has half of the features
    turned = torch.arange(q.shape[-1]) % plane < plane // 2
    q, k = q * torch.where(turned, m, 1.0), k * torch.where(turned, m, 1.0)
    scores = q @ k.mT * D**-0.5
    if kind == "self":
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    expected = module._project_out(scores.softmax(-1) @ v, x)
    found = module.attend(x)[0] if kind == "self" else module.attend(x, x)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    if kind == "self":
        first, state = module.attend(x[:, :8], keep_state=True)
        last = module.attend(x[:, 8:], state=state)[0]
        torch.testing.assert_close(torch.cat([first, last], 1), expected, rtol=1e-9, atol=1e-9)
    else:
        weights = module.attend(x, x, need_weights=True)[1]
        torch.testing.assert_close(weights, scores.softmax(-1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fraction", [0.4, 0.55, 0.75])
@pytest.mark.parametrize("name", sorted(ROTATING - {"fope"}))
def test_the_features_with_the_factor_of_yarn_are_those_that_turn(name, fraction):
    """Not the last ones of half a rotation, nor of rows and columns of an odd number of pairs."""
    options = {"rotation_fraction": fraction, "grid_width": 3 if name == "rope-2d" else 0}
    assert encoding_of(name, "yarn", 1.0, **options).feature_factors is None
    encoding, x = encoding_of(name, "yarn", **options), example()
    at_0, turned = (encoding(x, x, at, at)[0] for at in (0 * AT, AT))
    turns = (turned - at_0).abs().amax((0, 1, 2)) > 0
    m = 0.1 * math.log(F) + 1
    assert encoding.feature_factors == pytest.approx(torch.where(turns, m**2, 1.0).tolist())
    assert encoding.content_scale == 1


@pytest.mark.parametrize("name", sorted(ROTATING))
def test_a_fraction_of_the_features_turns_as_in_a_head_of_that_width(name):
    plane, x = D // 4 * 2, example()
    found = encoding_of(name, rotation_fraction=0.55).core
    start = build_encoding(name, plane, HEADS).core
    own = D // 4 if name in ("lrpe-type1", "lrpe-type5") else plane // 2
    if name in ("lrpe-type8", "lrpe-tmlr-type1"):
        assert found.angles[plane:].count_nonzero() == 0
    elif name not in ("lrpe-type1", "lrpe-type5"):
        assert len(found.angles) <= own
    if name in ("rope", "lrpe-type8", "rope-2d"):
        torch.testing.assert_close(found.angles[: len(start.angles)], start.angles)
    turned = found((x,), found.powers(AT, torch.float64))[0]
    torch.testing.assert_close(turned[..., plane:], x[..., plane:], rtol=0, atol=0)
    assert (turned[..., 3:, :plane] - x[..., 3:, :plane]).abs().amax() > 0.1


def test_a_base_replaces_that_of_the_method():
    for name, usual in (("rope", 10000.0), ("lrpe-type2", 10000.0), ("rope-2d", 100.0)):
        plain, same = encoding_of(name), encoding_of(name, rotation_base=usual)
        assert torch.equal(plain.core.theta, same.core.theta)
    angles = encoding_of("rope", rotation_base=500.0).core.angles.tolist()
    assert angles == pytest.approx([500 ** (-2 * i / D) for i in range(D // 2)])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rotation_base": 1.0}, "--rotation-base must be above 1, not 1"),
        ({"rotation_fraction": 0.0}, "--rotation-fraction must be above 0 and at most 1, not 0"),
        ({"rotation_fraction": 0.1}, "--rotation-fraction 0.1 leaves no pair of the 16 features"),
        (
            {"context_factor": 2.0},
            "--context-factor needs --context-scaling linear, ntk, yarn, yarn-printed, llama3",
        ),
        ({"context_scaling": "ntk", "context_factor": 0.5}, "must be at least 1, not 0.5"),
        ({"context_scaling": "yarn", "context_factor": 2.0}, "yarn needs --context-length"),
        ({"context_scaling": "yarn-printed"}, "yarn-printed needs --context-length"),
        (
            {"context_length": 9},
            "--context-length 9 needs --context-scaling yarn, yarn-printed, llama3, dynamic or "
            "longrope, --rotation-spectrum turns, or --angle-floor: choose",
        ),
        ({"rotation_base": math.inf}, "--rotation-base must be a finite number, not inf"),
        ({"context_scaling": "ntkk"}, "unknown context_scaling 'ntkk'; choose one of none, linear"),
    ],
)
def test_impossible_or_ignored_options_are_refused(options, sentence):
    with pytest.raises(ChoiceError, match=sentence):
        build_encoding("rope", D, HEADS, options=EncodingOptions(**options))


@pytest.mark.parametrize(
    ("name", "width", "turned"),
    [("lrpe-type1", 16, 8), ("lrpe-type5", 16, 8), ("rope", 7, 6), ("rope-2d", 6, 4)],
)
@pytest.mark.filterwarnings("ignore:a rotation turns pairs of features")
def test_features_that_no_fraction_leaves_out_but_that_never_turn_have_no_factor(
    name, width, turned
):
    grid = {"grid_width": 3} if name == "rope-2d" else {}
    encoding = encoding_of(name, "yarn", width=width, **grid)
    m = 0.1 * math.log(F) + 1
    expected = [m**2] * turned + [1.0] * (width - turned)
    assert encoding.feature_factors == pytest.approx(expected)
    assert encoding.content_scale == 1
