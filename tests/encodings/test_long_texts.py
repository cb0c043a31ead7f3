"""Context scaling against transformers' own functions, the spectra of angles, and the scalings that
depend on the length of the text."""

import math

import pytest
import torch

from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.encodings.rotations.scaling import BY_TEXT, RotationOptions, scaled
from lrpe_fairseq.encodings.rotations.spectra import kept_pairs, turns
from lrpe_fairseq.errors import ChoiceError

transformers = pytest.importorskip("transformers")
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

L, HEADS = 128, 2
CASES = [(16, 1e4, 128, 4.0), (64, 1e4, 512, 8.0), (128, 5e5, 8192, 8.0), (80, 1e6, 4096, 2.5)]


def of_transformers(kind, width, base, length, factor, read=None, **more):
    """The inverse frequencies and the factor of cos and sin of transformers 5.24.0."""
    rope = {"rope_type": kind, "rope_theta": base, "factor": factor, **more}
    if kind in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = length
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = transformers.LlamaConfig(
        hidden_size=HEADS * width,
        num_attention_heads=HEADS,
        head_dim=width,
        max_position_embeddings=length,
        rope_parameters=rope,
    )
    found, of_score = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=read)
    return found.double(), of_score


def bands(width, base):
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)


def factors_of(count):
    """Different factors for every pair, short ones and long ones."""
    short = [1 + 0.01 * i for i in range(count)]
    return short, [1 + 0.5 * i for i in range(count)]


def options_of(kind, count, factor=4.0, length=L, **more):
    if kind == "longrope":
        more["longrope_factors"] = ",".join(str(c) for part in factors_of(count) for c in part)
    return {"context_scaling": kind, "context_factor": factor, "context_length": length, **more}


@pytest.mark.parametrize("read", [1, "L", "L + 1", "4 L", 10**6])
@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "dynamic", "longrope"])
@pytest.mark.parametrize(("width", "base", "length", "factor"), CASES)
def test_scaled_angles_are_those_of_transformers(kind, read, width, base, length, factor):
    read = {"L": length, "L + 1": length + 1, "4 L": 4 * length}.get(read, read)
    short, long = factors_of(width // 2)
    more = {"short_factor": short, "long_factor": long} if kind == "longrope" else {}
    wanted, of_phase = of_transformers(kind, width, base, length, factor, read, **more)
    given = RotationOptions(
        rotation_base=base, **options_of(kind, width // 2, factor=factor, length=length)
    )
    theta = bands(width, base)
    torch.testing.assert_close(scaled(theta, given, read), wanted, rtol=2e-6, atol=0)
    assert given.score_factor == pytest.approx(of_phase**2, rel=1e-12)
    # learned angles in any order and of any sign are scaled by their rank
    order = torch.randperm(len(theta), generator=torch.Generator().manual_seed(1))
    found = scaled(-theta[order], given, read)
    torch.testing.assert_close(found, -scaled(theta, given, read)[order], rtol=1e-12, atol=0)


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.3, 1.0])
@pytest.mark.parametrize(("width", "base"), [(16, 1e4), (64, 1e4), (128, 1e6), (80, 500.0)])
def test_the_proportional_spectrum_is_that_of_transformers(width, base, share, factor):
    wanted, of_phase = of_transformers(
        "proportional", width, base, L, factor, partial_rotary_factor=share
    )
    scaling = {"context_scaling": "linear", "context_factor": factor} if factor != 1 else {}
    options = EncodingOptions(
        rotation_base=base, rotation_fraction=share, rotation_spectrum="proportional", **scaling
    )
    encoding = build_encoding("rope", width, HEADS, options=options)
    torch.testing.assert_close(encoding.core.angles, wanted, rtol=2e-6, atol=0)
    assert of_phase == 1
    assert (encoding.core.angles == 0).sum() == width // 2 - int(share * width / 2)


LEARNED = ("lrpe-type2", "lrpe-type3", "lrpe-tmlr-type1", "lrpe-type6")


@pytest.mark.parametrize("parameter", ["plain", "log"])
@pytest.mark.parametrize("spectrum", ["proportional", "turns"])
@pytest.mark.parametrize("name", LEARNED)
def test_learned_angles_that_the_spectrum_sets_to_0_stay_there(name, spectrum, parameter):
    length = {"context_length": L} if spectrum == "turns" else {}
    own = {"rotation_fraction": 0.25, "rotation_spectrum": spectrum, **length}
    options = EncodingOptions(angle_parameter=parameter, **own)
    encoding = build_encoding(name, 16, HEADS, options=options)
    count = len(encoding.core.theta)
    still = torch.arange(count) >= kept_pairs(count, 0.25)
    assert torch.equal(encoding.core.angles == 0, still)
    optimizer = torch.optim.Adam(encoding.core.parameters(), 0.1)
    x, at = torch.randn(1, HEADS, 9, 16), torch.arange(9)
    for _ in range(3):
        q, k = encoding(x, 2 * x, at, at)
        (q[:, :, 3:] * k[:, :, :-3]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(encoding.core.angles == 0, still)
    again = build_encoding(name, 16, HEADS, options=options)
    again.load_state_dict(encoding.state_dict())
    assert torch.equal(again.core.angles, encoding.core.angles)
    if parameter == "plain":
        log = EncodingOptions(angle_parameter="log", **own)
        with torch.no_grad():
            encoding.core.theta.abs_()
        read = build_encoding(name, 16, HEADS, options=log)
        read.load_state_dict(encoding.state_dict())
        torch.testing.assert_close(
            read.core.angles.detach(), encoding.core.angles.detach().double(), rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("length", [2, 7, 128, 512, 8192])
@pytest.mark.parametrize("pairs", [1, 2, 8, 32])
def test_the_spectrum_of_turns_goes_from_half_a_turn_to_one_turn_in_the_training_length(
    pairs, length
):
    found = turns(pairs, length)
    assert found[-1] == pytest.approx(2 * math.pi / length, rel=1e-11)
    assert (found * length >= 2 * math.pi).all()
    if pairs > 1:
        assert found[0] == pytest.approx(math.pi, rel=1e-11)
        ratio = found[1:] / found[:-1]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["rope", "lrpe-type1", "lrpe-type2", "lrpe-type8", "gated:rope"])
def test_a_floor_leaves_the_spectrum_of_turns_as_it_is(name):
    own = {"rotation_spectrum": "turns", "rotation_fraction": 0.75, "context_length": L}
    plain = build_encoding(name, 32, HEADS, causal=True, options=EncodingOptions(**own))
    for floor in ("turn", "clip"):
        floored = EncodingOptions(angle_floor=floor, **own)
        found = build_encoding(name, 32, HEADS, causal=True, options=floored)
        assert torch.equal(found.core.angles, plain.core.angles)


@pytest.mark.parametrize("floor", ["none", "turn"])
@pytest.mark.parametrize("name", ["rope", "lrpe-type1", "lrpe-type8"])
def test_a_checkpoint_remembers_the_length_of_its_spectrum(name, floor):
    def built(length):
        own = {"rotation_spectrum": "turns", "context_length": length, "angle_floor": floor}
        return build_encoding(name, 32, HEADS, options=EncodingOptions(**own))

    trained, read, x, at = built(L), built(16 * L), torch.randn(1, HEADS, 5, 32), torch.arange(5)
    read(x, x, at, at)
    assert not torch.equal(read.core.angles, trained.core.angles)
    read.load_state_dict(trained.state_dict())
    assert torch.equal(read.core.angles, trained.core.angles)
    assert torch.equal(read(x, x, at, at)[0], trained(x, x, at, at)[0])


NAMES = ("rope", "lrpe-type2", "lrpe-type8", "gated:lrpe-type2", "path:rope", "lrpe-type1")


def attention_of(name, kind, attention_type="softmax", length=8, **more):
    torch.manual_seed(0)
    pairs = 4 if name == "lrpe-type1" else 16 if name == "lrpe-type8" else 8
    options = EncodingOptions(**options_of(kind, pairs, length=length, **more))
    return MultiheadAttention(
        32,
        HEADS,
        attention_type=attention_type,
        position_encoding=name,
        causal=True,
        options=options,
    ).double()


@pytest.mark.parametrize("attention_type", ["linear", "softmax"])
@pytest.mark.parametrize("kind", BY_TEXT)
@pytest.mark.parametrize("name", NAMES)
def test_a_text_is_read_with_the_angles_of_its_length(name, kind, attention_type):
    """The same weights without scaling, whose angles are set to those of the length by hand."""
    module = attention_of(name, kind, attention_type)
    for read in (8, 9, 40):
        torch.manual_seed(0)
        plain = MultiheadAttention(
            32, HEADS, attention_type=attention_type, position_encoding=name, causal=True
        ).double()
        angles = scaled(module.encoding.core.unscaled, module.encoding.core.options, read)
        if isinstance(plain.encoding.core.theta, torch.nn.Parameter):
            plain.encoding.core.theta.data = angles.detach()
        else:
            plain.encoding.core.theta = angles
        plain.encoding.content_scale = module.encoding.content_scale
        plain.encoding.feature_factors = module.encoding.feature_factors
        x = torch.randn(2, read, 32, dtype=torch.float64)
        found, wanted = module.attend(x)[0], plain.attend(x)[0]
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        at = torch.arange(read)
        torch.testing.assert_close(module.attend(x, positions=at)[0], wanted, rtol=1e-9, atol=1e-9)
    short = module.attend(x[:, :8])[0]
    assert (found[:, :8] - short).abs().max() > 1e-4


@pytest.mark.parametrize("kind", BY_TEXT)
def test_pieces_of_a_text_are_refused_in_one_sentence(kind):
    module, x = attention_of("rope", kind), torch.randn(1, 9, 32, dtype=torch.float64)
    starts = torch.zeros(1, 9, dtype=torch.bool)
    with pytest.raises(ChoiceError, match="one whole text per row only") as refused:
        module.attend(x, keep_state=True)
    assert "\n" not in str(refused.value)
    with pytest.raises(ChoiceError, match=f"--context-scaling {kind} turns all tokens"):
        module.attend(x, starts=starts)
    with pytest.raises(ChoiceError, match="one whole text per row only"):
        module(x.transpose(0, 1), incremental_state={})


@pytest.mark.parametrize("kind", BY_TEXT)
@pytest.mark.parametrize(
    ("name", "grid", "sentence"),
    [
        ("selective:rope", {}, "sums its positions from the text"),
        ("rope-2d", {"grid_width": 3}, "needs angles of token positions"),
        ("fope", {}, "needs angles of token positions"),
        ("rope", {"grid_width": 3, "position_grid": "sum"}, "depend on the length of a text"),
    ],
)
def test_encodings_without_a_text_of_known_length_refuse_in_one_sentence(
    kind, name, grid, sentence
):
    with pytest.raises(ChoiceError, match=sentence) as refused:
        build_encoding(
            name, 16, HEADS, options=EncodingOptions(**options_of(kind, 8), **grid), causal=True
        )
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", BY_TEXT)
def test_cross_attention_refuses_the_length_of_one_text(kind):
    options = EncodingOptions(**options_of(kind, 8))
    with pytest.raises(ChoiceError, match="cross-attention reads two texts"):
        CrossAttention(
            32, HEADS, attention_type="softmax", position_encoding="rope", options=options
        )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"context_scaling": "llama3"}, "llama3 needs --context-length"),
        ({"context_scaling": "dynamic"}, "dynamic needs --context-length"),
        ({"longrope_factors": "1,2"}, "need each other"),
        ({"context_scaling": "longrope", "context_length": 9}, "need each other"),
        (
            {"context_scaling": "longrope", "context_length": 1, "longrope_factors": "1"},
            "a --context-length of at least 2",
        ),
        (
            {"context_scaling": "longrope", "context_length": 9, "longrope_factors": "1,x"},
            "must be positive numbers, separated by commas, not '1,x'",
        ),
        (
            {"context_scaling": "longrope", "context_length": 9, "longrope_factors": "1,0"},
            "must be positive numbers",
        ),
        (
            {"context_scaling": "longrope", "context_length": 9, "longrope_factors": "1,2,3"},
            "has 3 numbers, but 8 angles need 16",
        ),
        ({"longrope_factors": 3}, "--longrope-factors must be a text, not 3"),
        ({"rotation_spectrum": "turns"}, "turns needs --context-length"),
        (
            {"rotation_spectrum": "proportional", "rotation_fraction": 0.12},
            "leaves no pair|leaves none of the 8 angles",
        ),
    ],
)
def test_impossible_options_are_refused_in_one_sentence(options, sentence):
    with pytest.raises(ChoiceError, match=sentence) as refused:
        build_encoding("rope", 16, HEADS, options=EncodingOptions(**options))
    assert "\n" not in str(refused.value)
