"""The floor and the logarithm of angles, against the angles of the formulas."""

import copy
import math
from argparse import Namespace
from functools import partial

import pytest
import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.projected import feature_map
from lrpe_fairseq.encodings import (
    COMPOSED_NAMES,
    ENCODINGS,
    EncodingOptions,
    angles_of,
    build_encoding,
)
from lrpe_fairseq.encodings.layers import encoding_options
from lrpe_fairseq.encodings.rotations.angles import KAPPA, AngleOptions
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.optim.adam import LRPEAdam
from tests.references import frequencies

L, D, HEADS, WIDTH = 128, 32, 2, 64
ONCE = 2 * math.pi / L
CORE_OF = {
    "rope": "rotation",
    "lrpe-type1": "rotation-half",
    "lrpe-type2": "rotation-learned",
    "lrpe-type3": "rotation-learned",
    "lrpe-type5": "rotation-half",
    "lrpe-type6": "rotation-learned",
    "lrpe-type8": "unitary",
    "lrpe-tmlr-type1": "unitary-learned",
    "lrpe-tmlr-type2": "rotation-learned",
    "lrpe:identity:unitary": "unitary",
    "gated:lrpe-type2": "rotation-learned",
    "path:rope": "rotation",
    "selective:lrpe-type3": "rotation-learned",
    "gated:path:lrpe-type1": "rotation-half",
    "tape": "rotation",
}
LEARNED = [name for name, core in CORE_OF.items() if core.endswith("learned")]
FIXED = [name for name in CORE_OF if name not in LEARNED]
NAMES = (*ENCODINGS, *COMPOSED_NAMES)
CURES = [("turn", "plain"), ("none", "log"), ("turn", "log"), ("clip", "plain"), ("clip", "log")]
LEARNED_CURES = [(name, *cure) for name in LEARNED for cure in CURES]
AT = torch.tensor([0, 1, 2, 127, 128, 5001, 2**31 - 1])


def options_of(floor="turn", parameter="plain", length=L, **more):
    scaled = more.get("context_scaling", "none") != "none"
    length = length if scaled or floor != "none" else 0  # a length that nothing reads is refused
    return EncodingOptions(
        angle_floor=floor, angle_parameter=parameter, context_length=length, **more
    )


def encoding_of(name, *given, width=D, **more):
    return build_encoding(name, width, HEADS, causal=True, options=options_of(*given, **more))


def example(length=len(AT), dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 1, HEADS, length, D, generator=generator).to(dtype)


def rounding(name):
    """The relative error of exp(rho / 16), rho in float32: half a unit of rho, over 16."""
    largest = -KAPPA * math.log(float(frequencies(CORE_OF[name], D).min()))
    return 2 ** (math.floor(math.log2(largest)) - 24) / KAPPA * 1.01


def inner(name):
    for prefix in ("gated:", "gated-channel:", "path:", "selective:"):
        name = name.removeprefix(prefix)
    return name


# --- which angles ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [7, L, 2048])
@pytest.mark.parametrize("name", CORE_OF)
def test_angles_below_one_turn_in_training_are_0_and_the_others_untouched(name, length):
    theta = frequencies(CORE_OF[name], D)
    slow = theta * length < 2 * math.pi
    assert 0 < slow.sum() < len(theta)
    found = encoding_of(name, length=length).core.angles.detach().double()
    torch.testing.assert_close(found, theta.masked_fill(slow, 0.0), rtol=1e-7, atol=0)
    clipped = encoding_of(name, "clip", length=length).core.angles.detach().double()
    wanted = theta.masked_fill(slow, 2 * math.pi / length)
    torch.testing.assert_close(clipped, wanted, rtol=1e-7, atol=0)


@pytest.mark.parametrize("name", CORE_OF)
def test_with_a_floor_every_phase_of_any_text_was_seen_in_training(name):
    """Phases of 0..n at most one step apart cover what the later ones reach."""
    theta = encoding_of(name).core.angles.detach().double()
    seen = torch.arange(L, dtype=torch.float64)[:, None] * theta
    for far in (L, 16 * L, 10**6):
        phase = torch.arange(far, far + 64, dtype=torch.float64)[:, None] * theta
        apart = (phase.unsqueeze(1) - seen.unsqueeze(0)).remainder(2 * math.pi)
        apart = torch.minimum(apart, 2 * math.pi - apart).amin(1)
        assert bool((apart <= theta / 2 + 1e-7).all())
    plain = build_encoding(name, D, HEADS, causal=True).core.angles.detach().double()
    half = torch.minimum(plain * 16 * L, torch.tensor(math.pi))
    unseen = (plain > 0) & (plain * L < math.pi) & (half > plain * L)
    assert bool(unseen.any())


@pytest.mark.parametrize("name", ["lrpe-type2", "rope", "lrpe-tmlr-type1"])
def test_features_turn_by_the_angles_after_the_floor(name):
    encoding, (q, k) = encoding_of(name), example()
    bare = build_encoding(name, D, HEADS, causal=True)
    theta = encoding.core.angles.detach().double()
    if name == "rope":
        bare.core.theta = theta
    else:
        bare.core.theta.data = theta.float()
    for found, wanted in zip(encoding(q, k, AT, AT), bare(q, k, AT, AT), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    q, k = q.float(), k.float()
    encoded = encoding.encode_both(q, k, AT, AT, phi=False)
    torch.testing.assert_close(encoded, encoding(q, k, AT, AT), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_takes_the_options_of_its_angles_or_refuses_them_in_one_sentence(name):
    kind = angles_of(name)
    known = inner(name) in CORE_OF or (
        inner(name).startswith("lrpe:") and not name.endswith("permutation")
    )
    assert bool(kind) == known
    if kind:
        assert encoding_of(name, width=8).core.floor is not None
    else:
        with pytest.raises(ChoiceError, match="--angle-floor") as refused:
            encoding_of(name, width=8)
        assert "\n" not in str(refused.value)
    if kind == "learned":
        assert "core.log_theta" in encoding_of(name, "none", "log", width=8).state_dict()
    elif kind == "fixed":
        with pytest.raises(ChoiceError, match="has fixed angles: leave out --angle-parameter log"):
            encoding_of(name, "none", "log", width=8)


def test_bad_values_and_a_floor_without_a_length_are_refused_in_one_sentence():
    with pytest.raises(ChoiceError, match="--angle-floor turn needs --context-length") as refused:
        encoding_of("rope", length=0)
    assert "\n" not in str(refused.value)
    with pytest.raises(ChoiceError, match="choose one of none, turn, clip"):
        encoding_of("rope", "turns")
    with pytest.raises(ChoiceError, match="choose one of plain, log"):
        encoding_of("lrpe-type2", "none", "logarithm")


def test_a_grid_of_rows_and_columns_has_a_floor_on_each_axis():
    given = options_of(length=28 * 64, grid_width=28, position_grid="axial")
    encoding = build_encoding("lrpe-type2", D, HEADS, options=given)
    for part, side in ((encoding.row, 64), (encoding.column, 28)):
        theta = part.core.angles.detach()
        wanted = frequencies(CORE_OF["lrpe-type2"], D // 2)
        assert torch.equal(theta == 0, wanted * side < 2 * math.pi)
        assert bool((theta == 0).any())


def test_a_floor_that_leaves_no_angle_is_refused():
    with pytest.raises(ChoiceError, match="leaves no angle: none turns once in 6 tokens"):
        encoding_of("rope", length=6)
    assert bool(encoding_of("rope", "clip", length=6).core.angles.any())


def test_a_base_of_the_spectrum_without_one_is_refused():
    given = {"rotation_spectrum": "turns", "context_length": 64, "rotation_base": 500.0}
    with pytest.raises(ChoiceError, match="--rotation-base is not read"):
        EncodingOptions(**given)


# --- the denominator ------------------------------------------------------------------------------


def shares(encoding, q, k):
    """Sums over the keys so far of the score's parts, (B, H, T): of features at 0 and of others."""
    at = torch.arange(q.shape[-2])
    q, k = encoding(q, k, at, at)
    still = still_features(encoding)
    products = q * k.cumsum(-2)
    return products[..., still].sum(-1), products[..., ~still].sum(-1)


def still_features(encoding):
    """Which of the encoded features do not turn, from their values at two positions."""
    x, there = example(1)[0], torch.tensor([977])
    a, b = encoding(x, x, there, there)[0], encoding(x, x, there + 1, there + 1)[0]
    return (a == b).flatten(0, 2).all(0)


@pytest.mark.parametrize("name", ["rope", "lrpe-type1", "lrpe-type5", "lrpe-type6"])
def test_features_at_0_add_their_whole_content_to_the_denominator_at_any_distance(name):
    """For positive features that is a sum of positive terms; with P they are those of P phi."""
    q, k = feature_map(example(16 * L))
    encoding = encoding_of(name)
    still, _ = shares(encoding, q, k)
    here = torch.zeros(q.shape[-2], dtype=torch.int64)
    q, k = encoding(q, k, here, here)  # P alone
    kept = still_features(encoding)
    wanted = (q[..., kept] * k[..., kept].cumsum(-2)).sum(-1)
    torch.testing.assert_close(still, wanted, rtol=1e-12, atol=1e-12)
    if name != "lrpe-type1":  # whose Householder matrix has entries of both signs
        assert bool((still > 0).all())
    assert not bool(still_features(build_encoding(name, D, HEADS)).all())


@pytest.mark.parametrize("name", ["rope", "lrpe-type5", "lrpe-type6"])
def test_of_like_tokens_the_denominator_stays_above_the_mass_of_the_pairs_at_0(name):
    """The turning pairs are geometric sums, which are bounded; with slow pairs it vanishes."""
    x = feature_map(example(1)[0]).expand(-1, -1, 16 * L, -1)
    mass = (x * x.cumsum(-2)).sum(-1)
    still, turned = (part / mass for part in shares(encoding_of(name), x, x))
    assert bool((still[..., -1] > 0.2).all())
    assert bool(((still + turned)[..., L:] > 0.9 * still[..., L:]).all())
    bare = build_encoding(name, D, HEADS, causal=True)
    slow = torch.stack(shares(bare, x, x)).sum(0)[..., L:] / mass[..., L:]
    assert bool((slow < (still + turned)[..., L:]).any())


# --- learning -------------------------------------------------------------------------------------


def loss_of(encoding, q, k, at):
    q, k = encoding(q[..., : len(at), :], k[..., : len(at), :], at, at)
    return ((q @ k.transpose(-1, -2)).tril() ** 2).mean()


@pytest.mark.parametrize(("name", "floor", "parameter"), LEARNED_CURES)
def test_every_start_is_that_of_the_plain_angles_with_this_floor(name, floor, parameter):
    found = encoding_of(name, floor, parameter).core.angles.detach().double()
    wanted = frequencies(CORE_OF[name], D)
    if floor != "none":
        wanted = wanted.masked_fill(wanted < ONCE, {"turn": 0.0, "clip": ONCE}[floor])
    torch.testing.assert_close(found, wanted, rtol=rounding(name), atol=0)


def test_only_learned_angles_start_below_a_step_of_adam():
    """The numbers of docs/running.md, at heads of 64 and a rate of 0.004."""
    torch.manual_seed(0)

    def start(name, parameter):
        encoding = build_encoding(name, 64, 8, causal=True)
        return dict(encoding.named_parameters())[parameter].detach().abs()

    for name, share in (("lrpe-type2", 0.38), ("lrpe-tmlr-type1", 0.69)):
        below = (start(name, "core.theta") < 4e-3).double().mean()
        assert round(float(below), 2) == share
    rates = {"fire": "c", "grape-a": "omega", "kerple-log": "r2", "kerple-power": "r1"}
    for name, parameter in rates.items():
        assert float(start(name, parameter).min()) > 4e-3
    for name in ("alibi", "permuteformer"):
        assert not any(build_encoding(name, 64, 8, causal=True).parameters())


@pytest.mark.parametrize("parameter", ["plain", "log"])
@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_angle_at_0_gets_no_gradient_and_stays_0_and_the_others_move(name, parameter):
    encoding, (q, k) = encoding_of(name, "turn", parameter), example()
    before, at = encoding.core.angles.detach().clone(), AT[:5]
    parameter = encoding.core.theta if parameter == "plain" else encoding.core.log_theta
    for weight_decay in (0.0, 0.1):
        adam = torch.optim.AdamW(encoding.parameters(), lr=0.1, weight_decay=weight_decay)
        for _ in range(3):
            adam.zero_grad()
            loss_of(encoding, q, k, at).backward()
            assert torch.equal(parameter.grad == 0, before == 0)
            adam.step()
    after = encoding.core.angles.detach()
    assert torch.equal(after == 0, before == 0)
    assert bool((after != before)[before != 0].all())


def test_learned_angles_above_the_floor_may_cross_it():
    encoding = encoding_of("lrpe-type2")
    index = int((encoding.core.angles > 0).sum()) - 1
    with torch.no_grad():
        encoding.core.theta[index] = 1e-4
    assert float(encoding.core.angles[index].detach()) == pytest.approx(1e-4)


@pytest.mark.parametrize("name", LEARNED)
def test_an_adam_step_of_4e_3_changes_a_logarithmic_angle_by_at_most_3e_4_of_itself(name):
    changes = {}
    for parameter in ("plain", "log"):
        encoding, (q, k) = encoding_of(name, "none", parameter), example()
        before = encoding.core.angles.detach().double().clone()
        adam = torch.optim.Adam(encoding.parameters(), lr=4e-3, eps=1e-30)  # no gradient is small
        loss_of(encoding, q, k, AT[:5]).backward()
        adam.step()
        after = encoding.core.angles.detach().double()
        changes[parameter] = ((after - before) / before).abs()
        assert bool((changes[parameter] > 0).all())
    assert changes["log"].max() <= 3e-4
    assert changes["plain"].max() > 1


def test_the_gradient_of_a_logarithm_is_that_of_the_angle_by_the_chain_rule():
    q, k = example()
    plain, log = (encoding_of("lrpe-type2", "none", p).double() for p in ("plain", "log"))
    plain.core.theta.data = log.core.theta.detach().clone()
    for encoding in (plain, log):
        loss_of(encoding, q, k, AT[:5]).backward()
    wanted = plain.core.theta.grad * plain.core.theta.detach() / KAPPA
    torch.testing.assert_close(log.core.log_theta.grad, wanted, rtol=1e-9, atol=1e-15)


def test_no_adam_decays_logarithms():
    given = Namespace(
        lr=[1.0], adam_betas="(0.9, 0.98)", adam_eps=1e-8, weight_decay=0.1, use_old_adam=True,
        fp16_adam_stats=False, tpu=False,
    )  # fmt: skip
    log_theta = encoding_of("lrpe-type3", "none", "log").core.log_theta
    for adam in LRPEAdam.__mro__[:2]:
        groups = adam(given, [log_theta, torch.nn.Parameter(torch.zeros(2, 2))]).param_groups
        decays = [g["weight_decay"] for g in groups if any(p is log_theta for p in g["params"])]
        assert decays == [0.0], adam


# --- types, scaling, decoding ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("floor", "parameter"), CURES)
@pytest.mark.parametrize("name", ["rope", "lrpe-type2", "lrpe-tmlr-type1"])
def test_half_types_do_not_round_angles_and_floors(name, floor, parameter, dtype):
    parameter = "plain" if name == "rope" else parameter
    encoding = encoding_of(name, floor, parameter)
    before, state = encoding.core.angles.detach().clone(), copy.deepcopy(encoding.state_dict())
    encoding.to(dtype)
    assert torch.equal(encoding.core.angles.detach(), before)
    for key, value in encoding.state_dict().items():
        assert torch.equal(value, state[key])
        assert value.dtype == state[key].dtype
    x = example(dtype=torch.float64).to(dtype)
    found = encoding(x[0], x[1], AT, AT)[0]
    assert found.dtype == dtype
    wanted = encoding(x[0].double(), x[1].double(), AT, AT)[0]
    bound = torch.finfo(dtype).eps * wanted.abs().max()
    assert (found.double() - wanted).abs().max() <= bound


@pytest.mark.parametrize("scaling", ["linear", "ntk", "yarn"])
@pytest.mark.parametrize(("floor", "parameter"), CURES)
def test_context_scaling_acts_on_the_angles_after_the_floor(floor, parameter, scaling):
    given = {"context_scaling": scaling, "context_factor": 4.0}
    found = encoding_of("lrpe-type2", floor, parameter, **given).core.angles.detach()
    bare = encoding_of("lrpe-type2", "none", **given)
    theta = encoding_of("lrpe-type2", floor, parameter).core.angles.detach()
    bare.double().core.theta.data = theta.double()
    torch.testing.assert_close(found.double(), bare.core.angles.detach(), rtol=1e-12, atol=0)
    assert torch.equal(found == 0, theta == 0)


@pytest.mark.parametrize("attention_type", ["linear", "softmax"])
@pytest.mark.parametrize(("floor", "parameter"), CURES)
def test_decoding_equals_the_parallel_call_beyond_the_training_length(
    floor, parameter, attention_type
):
    torch.manual_seed(0)
    attention = MultiheadAttention(
        WIDTH,
        HEADS,
        position_encoding="lrpe-type2",
        attention_type=attention_type,
        causal=True,
        options=options_of(floor, parameter, length=8),
    )
    attention = attention.double().eval()
    x, state, steps = torch.randn(40, 2, WIDTH, dtype=torch.float64), {}, []
    for token in x.split(1):
        steps.append(attention(token, incremental_state=state)[0])
    torch.testing.assert_close(torch.cat(steps), attention(x)[0], rtol=1e-9, atol=1e-9)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("floor", ["turn", "clip"])
@pytest.mark.parametrize("name", CORE_OF)
def test_a_checkpoint_remembers_its_floor_when_it_is_read_at_another_length(name, floor):
    trained, (q, k) = encoding_of(name, floor), example()
    saved = copy.deepcopy(trained.state_dict())
    for length in (7, 16 * L):
        read = encoding_of(name, floor, length=length)
        read(q, k, AT, AT)  # phases that a cache could keep
        assert not torch.equal(read.core.angles, trained.core.angles)
        read.load_state_dict(saved)
        assert torch.equal(read.core.angles, trained.core.angles)
        for a, b in zip(read(q, k, AT, AT), trained(q, k, AT, AT), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(copy.deepcopy(read).core.angles, trained.core.angles)


@pytest.mark.parametrize(("trained", "chosen"), [("turn", "clip"), ("clip", "turn")])
@pytest.mark.parametrize("name", CORE_OF)
def test_a_checkpoint_with_the_other_floor_is_refused_in_one_sentence(name, trained, chosen):
    saved = encoding_of(name, trained).state_dict()
    said = (
        f"trained with --angle-floor {trained}, not {chosen}: read it with --angle-floor {trained}"
    )
    with pytest.raises(ChoiceError, match=said) as refused:
        encoding_of(name, chosen).load_state_dict(saved)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("trained", "chosen", "said"),
    [
        (("turn", "plain"), ("none", "plain"), "with --angle-floor turn: read it with"),
        (("clip", "plain"), ("none", "plain"), "with --angle-floor clip: read it with"),
        (("none", "plain"), ("turn", "plain"), "with --angle-floor none: read it with"),
        (("none", "log"), ("none", "plain"), "read it with --angle-parameter log"),
    ],
)
def test_a_checkpoint_with_other_angles_is_refused_in_one_sentence(trained, chosen, said):
    saved = encoding_of("lrpe-type2", *trained).state_dict()
    with pytest.raises(ChoiceError, match=said) as refused:
        encoding_of("lrpe-type2", *chosen).load_state_dict(saved)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("floor", ["turn", "clip"])
def test_a_checkpoint_that_does_not_name_its_floor_is_read(floor):
    trained = encoding_of("lrpe-type2", floor)
    saved = {key: x for key, x in trained.state_dict().items() if not key.endswith("floor.clips")}
    assert len(saved) == len(trained.state_dict()) - 1
    read = encoding_of("lrpe-type2", floor, length=7)
    read.load_state_dict(saved)
    assert torch.equal(read.core.angles, trained.core.angles)


@pytest.mark.parametrize("floor", ["none", "turn"])
@pytest.mark.parametrize("name", LEARNED)
def test_positive_plain_angles_of_a_checkpoint_are_read_as_logarithms(name, floor):
    plain = encoding_of(name, floor)
    with torch.no_grad():
        plain.core.theta *= 1.5
    log = encoding_of(name, floor, "log")
    log.load_state_dict(plain.state_dict())
    found = log.core.angles.detach()
    wanted = plain.core.angles.detach().double()
    torch.testing.assert_close(found, wanted, rtol=rounding(name), atol=0)


@pytest.mark.parametrize("angle", [0.0, -0.3])
def test_plain_angles_without_a_logarithm_are_refused_in_one_sentence(angle):
    plain = encoding_of("lrpe-type2", "none")
    with torch.no_grad():
        plain.core.theta[2] = angle
    with pytest.raises(ChoiceError, match="read it with --angle-parameter plain") as refused:
        encoding_of("lrpe-type2", "none", "log").load_state_dict(plain.state_dict())
    assert "\n" not in str(refused.value)


def test_without_the_options_nothing_is_added_to_a_checkpoint():
    for name in CORE_OF:
        plain = build_encoding(name, D, HEADS, causal=True)
        given = options_of("none", "plain", length=0)
        same = build_encoding(name, D, HEADS, causal=True, options=given)
        assert plain.state_dict().keys() == same.state_dict().keys()
        assert not any("floor" in key for key in plain.state_dict())


# --- a model's configuration ----------------------------------------------------------------------


def values_of(layer=0, **given):
    known = {"fidelity": "correct", "position_encoding": "lrpe-type2", **given}
    return encoding_options(Namespace(**known), layer).values


def test_a_language_model_has_the_length_of_its_training_blocks():
    given = {"angle_floor": "turn", "tokens_per_sample": L}
    assert values_of(**given)["context_length"] == L
    assert values_of(**given, context_length=64)["context_length"] == 64
    assert values_of(tokens_per_sample=L)["context_length"] == 0
    yarn = {**given, "context_scaling": "yarn", "context_factor": 2.0}
    with pytest.raises(ChoiceError, match="yarn needs --context-length"):
        values_of(**yarn)


def test_in_a_pattern_the_options_concern_the_layers_with_angles():
    given = {
        "position_encoding": "none,rope,lrpe-type2,lrpe-type4",
        "angle_floor": "turn",
        "angle_parameter": "log",
        "context_length": L,
    }
    found = [values_of(layer, **given) for layer in range(4)]
    assert [own["angle_floor"] for own in found] == ["none", "turn", "turn", "none"]
    assert [own["angle_parameter"] for own in found] == ["plain", "plain", "log", "plain"]
    for own, name in zip(found, given["position_encoding"].split(","), strict=True):
        build_encoding(name, D, HEADS, causal=True, options=EncodingOptions(**own))


def test_the_defaults_are_those_of_the_papers():
    assert AngleOptions() == AngleOptions(angle_floor="none", angle_parameter="plain")


# --- a learning rate of their own -----------------------------------------------------------------


def slow(name, scale, **more):
    options = EncodingOptions(angle_lr_scale=scale, **more)
    return build_encoding(name, D, HEADS, causal=True, options=options)


def after_steps(encoding, optimizer, count=5):
    """The angles after updates with gradients that do not depend on the angles."""
    weight = torch.randn(len(encoding.core.angles), generator=torch.Generator().manual_seed(3))
    for _ in range(count):
        (encoding.core.angles * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return encoding.core.angles.detach().double()


@pytest.mark.parametrize("scale", [0.1, 3.0])
@pytest.mark.parametrize("name", LEARNED)
def test_angles_with_a_rate_of_their_own_are_updated_as_a_group_of_parameters(name, scale):
    plain, own = build_encoding(name, D, HEADS, causal=True), slow(name, scale)
    start = plain.core.angles.detach().double()
    torch.testing.assert_close(own.core.angles.detach(), start, rtol=2e-7, atol=0)
    adam = partial(torch.optim.Adam, betas=(0.9, 0.98))
    wanted = after_steps(plain, adam([plain.core.theta], 4e-3 * scale, eps=1e-12))
    found = after_steps(own, adam([own.core.slow_theta], 4e-3, eps=1e-12))
    torch.testing.assert_close(found - start, wanted - start, rtol=1e-3, atol=1e-6)
    assert (found - start).abs().max() > 0.01 * scale


@pytest.mark.parametrize("name", LEARNED)
def test_a_gradient_times_a_number_would_not_change_the_steps_of_adam(name):
    """Why the option is no factor of the gradient."""
    one, other = (build_encoding(name, D, HEADS, causal=True) for _ in range(2))
    other.core.theta.register_hook(lambda grad: 0.1 * grad)
    found = [
        after_steps(e, torch.optim.Adam([e.core.theta], 4e-3, eps=1e-12)) for e in (one, other)
    ]
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("floor", ["none", "turn", "clip"])
@pytest.mark.parametrize("name", LEARNED)
def test_a_checkpoint_holds_angles_in_radians_whatever_their_rate(name, floor):
    length = {"context_length": L} if floor != "none" else {}
    plain = encoding_of(name, floor)
    with torch.no_grad():
        plain.core.theta *= 1.5
    saved = copy.deepcopy(plain.state_dict())
    for scale in (0.1, 7.0):
        own = slow(name, scale, angle_floor=floor, **length)
        assert own.state_dict().keys() == saved.keys()
        own.load_state_dict(copy.deepcopy(saved))
        torch.testing.assert_close(
            own.core.angles.detach(), plain.core.angles.detach().double(), rtol=2e-7, atol=0
        )
        again = encoding_of(name, floor)
        again.load_state_dict(own.state_dict())
        torch.testing.assert_close(again.core.angles, plain.core.angles, rtol=2e-7, atol=0)
        (q, k) = example()
        found = copy.deepcopy(own.half())(q, k, AT[:4].repeat(2)[:7], AT)
        assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("scale", [0.1, 0.3, 7.0])
@pytest.mark.parametrize("name", LEARNED)
def test_a_checkpoint_of_angles_with_a_rate_of_their_own_is_read_to_the_last_bit(name, scale):
    trained, read = slow(name, scale), slow(name, scale)
    with torch.no_grad():
        for rho in torch.rand(50, len(trained.core.slow_theta)):
            trained.core.slow_theta.copy_(rho)
            read.load_state_dict(copy.deepcopy(trained.state_dict()))
            assert torch.equal(read.core.slow_theta, rho)
            assert torch.equal(read.core.angles, trained.core.angles)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("rope", {"angle_lr_scale": 0.5}, "has fixed angles: leave out --angle-lr-scale"),
        ("fox", {"angle_lr_scale": 0.5}, "does not support --angle-lr-scale: leave it out, or"),
        ("alibi", {"angle_floor": "turn", "context_length": 8}, "support --angle-floor: leave it"),
        ("lrpe-type2", {"angle_lr_scale": 0.0}, "--angle-lr-scale must be at least 1e-06"),
        (
            "lrpe-type2",
            {"angle_lr_scale": 0.5, "angle_parameter": "log"},
            "--angle-lr-scale is for --angle-parameter plain",
        ),
    ],
)
def test_a_rate_that_no_angle_has_is_refused_in_one_sentence(name, options, sentence):
    with pytest.raises(ChoiceError, match=sentence) as refused:
        build_encoding(name, D, HEADS, causal=True, options=EncodingOptions(**options))
    assert "\n" not in str(refused.value)
