"""Cross-attention: the score of a target and a source position under every encoding."""

import copy

import pytest
import torch
from torch import nn

from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.linear import NORMALIZERS, linear_attention_naive
from lrpe_fairseq.attention.multihead import feature_map
from lrpe_fairseq.encodings import (
    ENCODINGS,
    EncodingOptions,
    ScoreEncoding,
    build_encoding,
    encoding_class,
    is_causal_only,
)
from lrpe_fairseq.encodings.core.sharing import share_across_layers
from lrpe_fairseq.encodings.trees import nodes
from lrpe_fairseq.errors import ChoiceError
from tests.references import score_matrix

WIDTH, HEADS, SOURCE = 16, 2, 12
NAMES = (*ENCODINGS, "ape:tree3+sequence", "gated:rope")
TYPES = ("linear", "softmax")


def refusal(name, attention_type):
    """Return what the capability fields of an encoding refuse it for; "" if it is served."""
    kind = encoding_class(name)
    if is_causal_only(name):
        return "causal attention only; choose another one for an encoder or cross-attention"
    if kind.has_states:
        return "positions follow one text" if attention_type == "softmax" else "needs states"
    if attention_type == "softmax":
        return ""
    if not kind.serves_linear:
        return "needs the score matrix"
    decays = build_encoding(name, WIDTH // HEADS, HEADS).log_decay() is not None
    return "decay counts the tokens between a query and a key" if decays else ""


PAIRS = [(name, kind) for name in NAMES for kind in TYPES]
SERVED = [pair for pair in PAIRS if not refusal(*pair)]


def build(name="rope", attention_type="softmax", seed=0, options=None, **changes):
    torch.manual_seed(seed)
    given = EncodingOptions(**(options or {}))
    module = CrossAttention(
        WIDTH, HEADS, attention_type=attention_type, position_encoding=name, options=given,
        **{"memory_dim": SOURCE, **changes},
    ).double().eval()  # fmt: skip
    for parameter in module.encoding.parameters():  # tables that start at zero say nothing
        parameter.data += 0.2 * normal(*parameter.shape, seed=9)
    return module


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def dense(module, x, memory, positions, memory_positions, padding):
    """Output and weights from the score matrix; in linear attention the weights are scores."""
    q, k, v = module._project(x, memory)
    at, encoding = (positions, memory_positions), module.encoding
    hidden = padding[:, None, None]
    if module.attention_type == "linear":
        if encoding.before_feature_map:
            q, k = map(feature_map, encoding(q, k, *at))
            scores = q @ k.mT
        else:
            scores = score_matrix(encoding, feature_map(q), feature_map(k), *at)
        weights = scores.masked_fill(hidden, 0.0)
        out = weights @ v / weights.sum(-1, keepdim=True).clamp_min(1e-6)
    else:
        own = encoding.content_scale if isinstance(encoding, ScoreEncoding) else 1
        scores = score_matrix(encoding, q * (encoding.softmax_scale / own), k, *at)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out = weights @ v
    return module.out_proj(out.transpose(1, 2).flatten(2)), weights


def gradients(out, *inputs):
    found = torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_an_encoding_is_served_as_the_definition_or_refused_in_one_sentence(name, attention_type):
    if refusal(name, attention_type):
        with pytest.raises(ChoiceError, match=refusal(name, attention_type)) as error:
            build(name, attention_type)
        assert "\n" not in str(error.value)
        return
    module = build(name, attention_type)
    x, memory = normal(2, 5, WIDTH).requires_grad_(), normal(2, 7, SOURCE, seed=1).requires_grad_()
    padding = torch.zeros(2, 7).bool()
    padding[0, [0, 1, 4]] = True
    own = torch.tensor([[4, 5, 0, 1, 6, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    wanted, weights = dense(module, x, memory, torch.arange(5), own, padding)
    learned = [p for p in module.parameters() if p.requires_grad]
    wanted_gradients = gradients(wanted, x, memory, *learned)
    for needed in (False, True):
        out, found, state = module.attend(x, memory, padding, need_weights=needed)
        assert state is None
        torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(gradients(out, x, memory, *learned), wanted_gradients)
        if attention_type == "linear" or not needed:
            assert found is None
        else:
            torch.testing.assert_close(found, weights.masked_fill(padding[:, None, None], 0.0))


@pytest.mark.parametrize(("name", "attention_type"), SERVED)
def test_the_score_depends_on_both_positions_through_their_difference(name, attention_type):
    module, at, there = build(name, attention_type), torch.arange(5), torch.arange(7)
    x, memory = normal(2, 5, WIDTH), normal(2, 7, SOURCE, seed=1)

    def out(positions, memory_positions):
        places = {"positions": positions, "memory_positions": memory_positions}
        return module.attend(x, memory, **places)[0]

    here, encoding = module.attend(x, memory)[0], module.encoding
    assert torch.equal(out(at, there), here)
    if name not in ("none", "alibi"):  # a decay counts tokens
        assert (out(at + 97, there) - here).abs().max() > 1e-6
    own = encoding.properties
    if own.relative == "exact" and own.relative_up_to is None:
        moved = 500 * own.shift_unit
        torch.testing.assert_close(out(at + moved, there + moved), here)


@pytest.mark.parametrize("attention_type", TYPES)
def test_only_left_translation_of_both_trees_changes_nothing(attention_type):
    module = build("ape-tree", attention_type)
    x, memory = normal(2, 5, WIDTH), normal(2, 7, SOURCE, seed=1)
    target, source = (torch.randint(0, 60, (2, n), generator=torch.Generator()) for n in (5, 7))

    def out(move):
        places = {"positions": move(target), "memory_positions": move(source)}
        return module.attend(x, memory, **places)[0]

    here, below = out(lambda p: p), torch.tensor(500)
    torch.testing.assert_close(out(lambda p: nodes.concat(below, p, 2)), here)
    assert (out(lambda p: nodes.concat(p, below, 2)) - here).abs().max() > 1e-3


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_linear_attention_is_the_naive_form_with_every_normalizer(normalizer):
    module = build("ape", "linear", normalizer=normalizer)
    x, memory = normal(2, 5, WIDTH), normal(2, 7, SOURCE, seed=1)
    padding = torch.zeros(2, 7).bool()
    padding[1, 5:] = True
    q, k, v = module._project(x, memory)
    features = feature_map(q), feature_map(k)
    encoded = module.encoding(*features, torch.arange(5), torch.arange(7))
    options = {"causal": False, "key_padding_mask": padding, "normalizer": normalizer}
    wanted = linear_attention_naive(*encoded, v, content=features, **options)
    found = module.attend(x, memory, padding)[0]
    torch.testing.assert_close(found, module._project_out(wanted, x))


@pytest.mark.parametrize(("name", "attention_type"), SERVED)
def test_decoding_a_padded_source_through_beam_reorder_equals_each_row_alone(name, attention_type):
    module, calls = build(name, attention_type), []
    module.k_proj.register_forward_hook(lambda *_: calls.append(1))
    x, memory = normal(9, 3, WIDTH), normal(8, 3, SOURCE, seed=1)
    padding = torch.zeros(3, 8).bool()
    padding[0, :3], padding[1, 6:], padding[2, 2] = True, True, True
    rows, state, steps = torch.arange(3), {}, []
    with torch.no_grad():
        for step in range(9):
            if order := {3: [2, 0, 1], 6: [1, 1, 0, 2]}.get(step):
                module.reorder_incremental_state(state, torch.tensor(order))
                rows, x = rows[order], x[:, order]
                steps = [out[:, order] for out in steps]
            given = memory[:, rows], None, padding[rows], state
            steps.append(module(x[step : step + 1], *given)[0])
        assert len(calls) == 1
        found = torch.cat(steps)
        for place, row in enumerate(rows.tolist()):
            own = memory[~padding[row], row : row + 1]
            alone, _ = module(x[:, place : place + 1], own)
            torch.testing.assert_close(found[:, place : place + 1], alone)


@pytest.mark.parametrize("attention_type", TYPES)
@pytest.mark.parametrize("name", ["rope", "alibi", "t5"])
def test_padding_of_the_target_is_not_counted(name, attention_type):
    if refusal(name, attention_type):
        return
    module = build(name, attention_type)
    x, memory = normal(1, 6, WIDTH), normal(1, 7, SOURCE, seed=1)
    alone = module.attend(x, memory)[0]
    padded, padding = normal(1, 8, WIDTH, seed=2), torch.zeros(1, 8).bool()
    padding[0, [0, 3]] = True
    padded[~padding] = x[0]
    out = module.attend(padded, memory, query_padding_mask=padding)[0]
    torch.testing.assert_close(out[~padding], alone[0])
    state, parts = None, []
    for cut in (slice(0, 4), slice(4, 8)):
        mask = {"query_padding_mask": padding[:, cut]}
        part, _, state = module.attend(padded[:, cut], memory, None, state, True, **mask)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1)[~padding], alone[0])


@pytest.mark.parametrize("name", ["ape-tree", "rope"])
@pytest.mark.parametrize("attention_type", TYPES)
def test_decoding_at_explicit_nodes_equals_parallel(name, attention_type):
    module = build(name, attention_type)
    x, memory = normal(2, 6, WIDTH), normal(2, 7, SOURCE, seed=1)
    target, source = (torch.randint(0, 60, (2, n), generator=torch.Generator()) for n in (6, 7))
    whole, _, _ = module.attend(x, memory, positions=target, memory_positions=source)
    state, parts = None, []
    for s in range(6):
        own = {"positions": target[:, s : s + 1], "memory_positions": source}
        part, _, state = module.attend(x[:, s : s + 1], memory, None, state, True, **own)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("grid", ["sum", "axial"])
@pytest.mark.parametrize("name", ["ape", "ape:sequence+cycle7", "lrpe-type2"])
@pytest.mark.parametrize("attention_type", TYPES)
def test_decoding_on_a_grid_equals_parallel(name, attention_type, grid):
    module = build(name, attention_type, options={"position_grid": grid, "grid_width": 3})
    x, memory = normal(2, 6, WIDTH), normal(2, 7, SOURCE, seed=1)
    whole, _, _ = module.attend(x, memory)
    state, parts = None, []
    for s in range(6):
        part, _, state = module.attend(x[:, s : s + 1], memory, None, state, True)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attention_type", TYPES)
def test_half_precision_is_finite_and_near_double(attention_type, dtype):
    exact, module = (build("ape", attention_type, normalizer="content") for _ in range(2))
    module = module.to(dtype)
    x, memory = normal(2, 5, WIDTH).to(dtype), normal(2, 70, SOURCE, seed=1).to(dtype)
    out, _, _ = module.attend(x, memory, need_weights=True)
    assert out.dtype == dtype
    wanted, _, _ = exact.attend(x.double(), memory.double())
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=0.05)


def test_dropout_acts_on_softmax_weights_and_not_on_those_that_are_returned():
    module = build("ape", dropout=0.5).train()
    x, memory = normal(2, 5, WIDTH), normal(2, 7, SOURCE, seed=1)
    torch.manual_seed(0)
    (one, weights, _), (other, same, _) = (
        module.attend(x, memory, need_weights=True) for _ in range(2)
    )
    assert not torch.equal(one, other)
    assert torch.equal(weights, same)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, 5).double())


def test_a_decoder_shares_across_cross_attention_but_not_with_its_self_attention():
    layers = nn.ModuleList(
        build_encoding("kerple-log", 8, HEADS, causal=causal, seed=seed)
        for seed in range(2)
        for causal in (True, False)
    )
    share_across_layers(layers)
    assert layers[2].r1 is layers[0].r1
    assert layers[3].r1 is layers[1].r1
    assert layers[1].r1 is not layers[0].r1
    twin = copy.deepcopy(layers)
    twin.load_state_dict(layers.state_dict())


@pytest.mark.parametrize("width", [0, -1, 1.5, "a"])
def test_the_width_of_a_memory_is_a_positive_whole_number(width):
    with pytest.raises(ChoiceError, match=r"memory_dim must be (a whole number|at least 1)"):
        build(memory_dim=width)


def test_cross_attention_may_be_told_that_it_is_not_causal():
    assert not build(causal=False).causal
    with pytest.raises(ChoiceError, match="leave causal at False"):
        build(causal=True)
