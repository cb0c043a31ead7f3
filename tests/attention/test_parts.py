"""Parts of a layer beside its encoding (FoX Pro), against their definition."""

import itertools

import pytest
import torch

from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.multihead import MultiheadAttention, feature_map
from lrpe_fairseq.attention.parts import PARTS
from lrpe_fairseq.errors import ChoiceError

WIDTH, HEADS = 16, 2
ALL = ",".join(PARTS)
TYPES = ("linear", "softmax")


def build(attention_type="softmax", parts=ALL, name="gated:lrpe-type2", **options):
    torch.manual_seed(0)
    options = {"causal": True, "attention_type": attention_type, **options}
    return started(MultiheadAttention(WIDTH, HEADS, position_encoding=name, parts=parts, **options))


def started(module):
    """The module in float64 with random weights of the parts: 1 and gates of 1/2 say little."""
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    return module.double().eval()


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def rms(x, weight, eps):
    weight = weight.view(HEADS, 1, -1)
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def definition(module, parts, x):
    """The layer for the text x (1, T, C) alone, causal, with the score matrix."""
    q, k, v = (heads(p(x)) for p in (module.q_proj, module.k_proj, module.v_proj))
    if "kv-shift" in parts:
        share = (x @ module.kv_shift.weight.mT).sigmoid().mT.unsqueeze(-1)  # 1 2H T 1
        mixed = torch.zeros(1, 2 * HEADS, *k.shape[2:]).double()
        for t, now in enumerate(torch.cat([k, v], 1).unbind(2)):
            before = torch.cat([k, v], 1)[:, :, t - 1] if t else 0
            mixed[:, :, t] = share[:, :, t] * before + (1 - share[:, :, t]) * now
        k, v = mixed.chunk(2, 1)
    if "qk-norm" in parts:
        q, k = rms(q, module.q_norm.weight, 1e-5), rms(k, module.k_norm.weight, 1e-5)
    at, gates = torch.arange(x.shape[1]), module.encoding.log_gates(x)
    seen = torch.ones(len(at), len(at)).tril().bool()
    seen = seen.triu(1 - module.window) if module.window else seen
    decay = gates.cumsum(-1).unsqueeze(-1) - gates.cumsum(-1).unsqueeze(-2)
    if module.attention_type == "linear":
        q, k = module.encoding(feature_map(q), feature_map(k), at, at)
        weights = (q @ k.mT * decay.exp()).masked_fill(~seen, 0.0)
        out = weights @ v / weights.sum(-1, keepdim=True)
    else:
        q, k = module.encoding(q, k, at, at)
        scores = q @ k.mT * (WIDTH // HEADS) ** -0.5 + decay
        out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    if "output-norm" in parts:
        out = rms(out, module.out_norm.weight, 1e-6)
    out = out.transpose(1, 2).flatten(2)
    if "output-gate" in parts:
        out = out * (x @ module.out_gate.weight.mT).sigmoid()
    return module.out_proj(out)


CHOICES = [*PARTS, ALL]
CASES = [(kind, parts) for kind in TYPES for parts in CHOICES]


def texts():
    """x (3, 12, C), its padding on the left, on the right and in between, and the rows alone."""
    x = torch.randn(3, 12, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    padding = torch.zeros(3, 12, dtype=torch.bool)
    padding[0, :4] = padding[1, 9:] = padding[2, [0, 3, 4, 8]] = True
    return x.requires_grad_(), padding, [x[row, real][None] for row, real in enumerate(~padding)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("attention_type", "parts"), CASES)
def test_a_layer_with_parts_is_its_definition_with_padding_and_in_decoding(
    attention_type, parts, window
):
    module, (x, padding, alone) = build(attention_type, parts, window=window), texts()
    wanted = torch.cat([definition(module, parts, text)[0] for text in alone])
    found = module.attend(x, padding)[0][~padding]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    learned = [x, *module.parameters()]
    grads = (torch.autograd.grad(out.square().sum(), learned) for out in (found, wanted))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)
    state, pieces, order = {}, [], torch.tensor([1, 2, 0, 2])
    with torch.no_grad():
        for first, last in ((0, 3), (3, 5), (5, 6), (6, 7), (7, 12)):
            if first == 6:  # beams
                module.reorder_incremental_state(state, order)
                x, padding, pieces = x[order], padding[order], [p[order] for p in pieces]
            given = x[:, first:last].transpose(0, 1), None, None, padding[:, first:last], state
            pieces.append(module(*given)[0].transpose(0, 1))
    rows = wanted.split([8, 9, 8])
    wanted = torch.cat([rows[row] for row in order])
    torch.testing.assert_close(torch.cat(pieces, 1)[~padding], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("attention_type", "parts"), CASES)
def test_packed_documents_are_each_text_alone_with_parts(attention_type, parts):
    module, (x, padding, _) = build(attention_type, parts), texts()
    starts = torch.zeros_like(padding)
    starts[0, [4, 6, 7]] = starts[2, [5, 10]] = True
    found, state, pieces = module.attend(x, padding, starts=starts)[0], None, []
    for cut in (slice(0, 5), slice(5, 6), slice(6, 12)):
        own = {"starts": starts[:, cut]}
        piece, state = module.attend(x[:, cut], padding[:, cut], state, True, **own)
        pieces.append(piece)
    real = ~padding
    torch.testing.assert_close(torch.cat(pieces, 1)[real], found[real], rtol=1e-9, atol=1e-9)
    for row, ends in enumerate(([4, 6, 7, 12], [0, 9], [0, 5, 10, 12])):
        for first, last in itertools.pairwise(ends):
            real = first + (~padding[row, first:last]).nonzero().flatten()
            wanted = definition(module, parts, x[row, real][None])[0]
            torch.testing.assert_close(found[row, real], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attention_type", TYPES)
def test_parts_change_no_other_weight_and_none_of_them_adds_one(attention_type):
    states = []
    for parts in ("none", ALL):
        torch.manual_seed(0)
        options = {"attention_type": attention_type, "position_encoding": "fox", "causal": True}
        states.append(MultiheadAttention(WIDTH, HEADS, parts=parts, **options).state_dict())
    plain, own = states
    assert all(torch.equal(own[name], plain[name]) for name in plain)
    sizes = {name: own[name].numel() for name in own.keys() - plain.keys()}
    assert sizes == {
        "q_norm.weight": WIDTH,
        "k_norm.weight": WIDTH,
        "out_norm.weight": WIDTH,
        "out_gate.weight": WIDTH**2,
        "kv_shift.weight": 2 * HEADS * WIDTH,
    }


@pytest.mark.parametrize("attention_type", TYPES)
def test_cross_attention_has_the_parts_of_its_queries_and_of_the_memory(attention_type):
    options = {"attention_type": attention_type, "position_encoding": "rope"}
    torch.manual_seed(0)
    served = ALL.replace(",kv-shift", "")
    module = started(CrossAttention(WIDTH, HEADS, memory_dim=12, parts=served, **options))
    x, _, _ = texts()
    memory = torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(2)).double()
    q, k, v = map(heads, (module.q_proj(x), module.k_proj(memory), module.v_proj(memory)))
    q, k = rms(q, module.q_norm.weight, 1e-5), rms(k, module.k_norm.weight, 1e-5)
    linear, at = attention_type == "linear", (torch.arange(12), torch.arange(7))
    q, k = module.encoding(*(map(feature_map, (q, k)) if linear else (q, k)), *at)
    scores = q @ k.mT if linear else (q @ k.mT * (WIDTH // HEADS) ** -0.5).softmax(-1)
    out = rms(scores @ v / scores.sum(-1, keepdim=True), module.out_norm.weight, 1e-6)
    gate = (x @ module.out_gate.weight.mT).sigmoid()
    wanted, state, pieces = module.out_proj(gate * out.transpose(1, 2).flatten(2)), None, []
    for piece in (x[:, :5], x[:, 5:]):
        out, _, state = module.attend(piece, memory, None, state, True)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, 1), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attention_type", TYPES)
def test_a_layer_with_parts_is_near_double_in_half_precision(attention_type, dtype):
    exact, module = (build(attention_type, normalizer="none") for _ in range(2))
    x, padding, _ = texts()
    x = x.detach().to(dtype)
    out = module.to(dtype).attend(x, padding)[0]
    assert out.dtype == dtype
    wanted = exact.attend(x.double(), padding)[0]
    torch.testing.assert_close(out.double()[~padding], wanted[~padding], rtol=0, atol=0.05)


def test_bad_parts_are_refused_in_one_sentence():
    for given, message in (
        ({"parts": "qk-norm,gate"}, "unknown attention part 'gate'; choose none, or a list of qk"),
        ({"parts": None}, "the parts of attention are a text, .*, not None"),
        ({"parts": ["qk-norm"]}, "the parts of attention are a text, .*, not \\['qk-norm'\\]"),
        (
            {"attention_type": "linear", "normalizer": "layernorm"},
            "output-norm and the normalizer layernorm both normalize the output: choose one",
        ),
    ):
        with pytest.raises(ChoiceError, match=message):
            build(**given)
    options = {"attention_type": "softmax", "position_encoding": "none"}
    with pytest.raises(ChoiceError, match="choose other parts for cross-attention"):
        CrossAttention(WIDTH, HEADS, parts="kv-shift", **options)


def test_parts_and_reflections_start_from_numbers_of_their_own():
    module = MultiheadAttention(
        *(64, 4), attention_type="softmax", position_encoding="gated:path", causal=True,
        parts=",".join(PARTS),
    )  # fmt: skip
    drawn = [p for n, p in module.named_parameters() if p.dim() == 2 and "proj" not in n]
    first = [p.flatten()[0].item() for p in drawn if p.std() > 0]
    assert len(first) >= 7
    assert len(set(first)) == len(first)
