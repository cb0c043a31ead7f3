"""``score_decay``: the score of (s, t) times c^n, n the steps between the positions."""

from argparse import Namespace

import pytest
import torch

from lrpe_fairseq.attention import scored
from lrpe_fairseq.attention.multihead import MultiheadAttention, feature_map
from lrpe_fairseq.encodings import EncodingOptions
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.models.options import AttentionOptions, build_attention
from tests.references import score_matrix, visible_matrix

WIDTH, HEADS, LENGTH, C = 16, 2, 7, 0.8
GRID = {"grid_width": 3, "position_grid": "axial"}


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def build(name, attention_type="softmax", causal=True, decay=C, options=None, **keywords):
    torch.manual_seed(0)
    return MultiheadAttention(
        WIDTH, HEADS, attention_type=attention_type, position_encoding=name, causal=causal,
        options=EncodingOptions(**(options or {})), score_decay=decay, **keywords,
    ).double().eval()  # fmt: skip


def attended(module, weights, v):
    return module.out_proj((weights @ v).transpose(1, 2).flatten(2))


SEQUENCE = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
CELLS = torch.tensor(
    [[abs(a // 3 - b // 3) + abs(a % 3 - b % 3) for b in range(7)] for a in range(7)]
)
NODES = torch.tensor([  # steps between the first nodes of a binary tree, counted by hand
    [0, 1, 1, 2, 2, 2, 2],
    [1, 0, 2, 1, 1, 3, 3],
    [1, 2, 0, 3, 3, 1, 1],
    [2, 1, 3, 0, 2, 4, 4],
    [2, 1, 3, 2, 0, 4, 4],
    [2, 3, 1, 4, 4, 0, 2],
    [2, 3, 1, 4, 4, 2, 0],
])  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("rope", {}, SEQUENCE),
        ("none", {}, SEQUENCE),
        ("permuteformer", {}, SEQUENCE),
        ("t5", {}, SEQUENCE),
        ("shaw", {}, SEQUENCE),
        ("ape-tree", {}, NODES),
        ("rope", GRID, CELLS),
        ("rope-2d", {"grid_width": 3}, CELLS),
    ],
)
def test_softmax_of_the_score_times_c_to_the_distance(name, options, steps, causal):
    module, x, at = (
        build(name, causal=causal, options=options),
        normal(2, 7, WIDTH),
        torch.arange(7),
    )
    q, k, v = module._project(x)
    scores = score_matrix(module.encoding, q * module.scale, k, at, at) * C**steps
    visible = visible_matrix(module.encoding, q, k)
    scores = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
    wanted = attended(module, scores.softmax(-1), v)
    torch.testing.assert_close(module.attend(x)[0], wanted)


def test_a_decay_of_the_weight_is_applied_to_the_decayed_score():
    module, x = build("alibi"), normal(2, 7, WIDTH)
    q, k, v = module._project(x)
    bias = module.encoding.log_decay().double()[:, None, None] * SEQUENCE
    scores = module.scale * (q @ k.mT) * C**SEQUENCE + bias
    scores = scores.masked_fill(~visible_matrix(module.encoding, q, k), -torch.inf)
    torch.testing.assert_close(module.attend(x)[0], attended(module, scores.softmax(-1), v))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["rope", "ape", "permuteformer"])
def test_linear_attention_multiplies_the_score_of_its_kernel(name, causal):
    module = build(name, "linear", causal, normalizer="none")
    x, at = normal(2, 7, WIDTH), torch.arange(7)
    q, k, v = module._project(x)
    scores = score_matrix(module.encoding, feature_map(q), feature_map(k), at, at) * C**SEQUENCE
    scores = scores.tril() if causal else scores
    torch.testing.assert_close(
        module.attend(x)[0], attended(module, scores, v), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("attention_type", ["linear", "softmax"])
def test_padding_and_decoding_change_nothing(attention_type):
    module, x = build("rope", attention_type), normal(1, LENGTH, WIDTH)
    alone = module.attend(x)[0]
    padding = torch.zeros(1, LENGTH + 2).bool()
    padding[0, [0, 4]] = True
    padded = normal(1, LENGTH + 2, WIDTH, seed=1)
    padded[~padding] = x[0]
    torch.testing.assert_close(module.attend(padded, padding)[0][~padding][None], alone)
    state, parts = None, []
    for cut in (slice(0, 3), slice(3, 4), slice(4, 7)):
        out, state = module.attend(x[:, cut], None, state, True)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), alone)


@pytest.mark.parametrize("name", ["rope", "alibi", "t5", "ape-tree", "stick-breaking"])
def test_blocks_of_rows_have_the_outputs_and_gradients_of_the_whole(name, monkeypatch):
    module, x = build(name), normal(2, LENGTH, WIDTH).requires_grad_()
    found = []
    for limit in (1, scored.BLOCK):
        monkeypatch.setattr(scored, "BLOCK", limit)
        out = module.attend(x)[0]
        found.append([out, torch.autograd.grad(out.square().sum(), x)[0]])
    torch.testing.assert_close(*found)


def test_one_is_off():
    x = normal(2, LENGTH, WIDTH)
    for attention_type in ("linear", "softmax"):
        plain, one = (build("ape", attention_type, decay=c).attend(x)[0] for c in (C, 1.0))
        assert (plain - one).abs().max() > 1e-3
        off = MultiheadAttention(
            WIDTH, HEADS, attention_type=attention_type, position_encoding="ape", causal=True
        )
        off.double().load_state_dict(build("ape", attention_type).state_dict())
        assert torch.equal(off.attend(x)[0], one)


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.01, float("nan")])
def test_a_factor_that_is_no_decay_is_refused(decay):
    with pytest.raises(ChoiceError, match="above 0 and at most 1"):
        build("rope", decay=decay)


@pytest.mark.parametrize(
    ("name", "options"),
    [("ape-tree", {}), ("ape:cycle7", {}), ("rope", GRID), ("rope-2d", {"grid_width": 3})],
)
def test_linear_attention_refuses_a_decay_off_the_line(name, options):
    with pytest.raises(ChoiceError, match="needs positions on a line"):
        build(name, "linear", options=options)
    build(name, "linear", options=options, decay=1.0)


def test_linear_attention_refuses_explicit_positions_with_a_decay():
    module, x = build("rope", "linear"), normal(1, LENGTH, WIDTH)
    with pytest.raises(ValueError, match="counts tokens and cannot follow explicit positions"):
        module.attend(x, positions=torch.arange(LENGTH))


def test_the_command_line_option_reaches_attention():
    quiet = Namespace(pq=0, pq_block_size=8)
    cfg = Namespace(quant_noise=quiet, attention_dropout=0.0, no_token_positional_embeddings=True)
    options = AttentionOptions(position_encoding="rope", score_decay=0.98)
    for given, wanted in ((options, 0.98), (AttentionOptions(position_encoding="rope"), 1.0)):
        module = build_attention(given, cfg, WIDTH, HEADS, causal=True, layer=0)
        assert module.score_decay == wanted
