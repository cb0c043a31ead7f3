"""A bias that is a function of the lag: expanded from a table, without reading positions."""

import pytest
import torch

from lrpe_fairseq.attention import softmax, tokens
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import ENCODINGS, EncodingOptions, ScoreEncoding, build_encoding
from lrpe_fairseq.encodings.core.positions import counted
from lrpe_fairseq.kernels.flash import flash
from tests.encodings.lags import assert_same_with_gradients, queries_and_keys

BATCH, HEADS, TIME, WIDTH = 3, 4, 50, 64
CPU = torch.device("cpu")


def has_table(name):
    encoding = build_encoding(name, head_dim=16, num_heads=HEADS, causal=True)
    if not isinstance(encoding, ScoreEncoding):
        return False
    return encoding.bias_by_lag(-3, 3, torch.device("cpu")) is not None


NAMES = [name for name in ENCODINGS if has_table(name)]
PADDING = torch.zeros(BATCH, TIME, dtype=torch.bool)
PADDING[1, :7] = PADDING[2, 40:] = True


def results(name, causal, padding):
    """Output at real tokens, and the gradients of the input and of every parameter, in float64."""
    torch.manual_seed(0)
    options = {"attention_type": "softmax", "position_encoding": name, "causal": causal}
    module = MultiheadAttention(WIDTH, HEADS, **options).double()
    x = torch.randn(BATCH, TIME, WIDTH, dtype=torch.float64, requires_grad=True)
    out = module.attend(x, padding)[0]
    out = out if padding is None else out.masked_fill(padding[..., None], 0.0)
    weights = torch.arange(out.numel()).cos().view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("scores", [softmax.blocks.BLOCK, BATCH * HEADS * TIME * 9])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize(
    ("name", "causal"),
    [(name, causal) for name in NAMES for causal in (True, False) if causal or name != "fire"],
)
def test_the_expanded_table_is_the_bias_of_every_pair(name, causal, padding, scores, monkeypatch):
    monkeypatch.setattr(softmax.blocks, "BLOCK", scores)
    found = results(name, causal, padding)
    monkeypatch.setattr(tokens, "known_lags", lambda *_: None)
    torch.testing.assert_close(found, results(name, causal, padding), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "causal"),
    [(name, causal) for name in NAMES for causal in (True, False) if causal or name != "fire"],
)
def test_a_bias_is_constant_at_far_lags_if_it_says_so(name, causal):
    """The flash kernel then loads one number for many pairs."""
    encoding = build_encoding(name, head_dim=16, num_heads=HEADS, causal=causal)
    form = encoding.form((-400, 400), counted(401, CPU))
    assert form.far == encoding.far
    assert (encoding.far is not None) == (name == "t5")
    if encoding.far is not None:
        before, far = form.table[:, : 401 - encoding.far], form.table[:, 400 + encoding.far :]
        assert (before == before[:, :1]).all()
        assert (far == far[:, :1]).all()
        assert (form.table[:, 399 + encoding.far] != far[:, 0]).all()


def small(name: str, causal: bool) -> ScoreEncoding:
    options = EncodingOptions(frozenset({"embed-dim-scale"}), shaw_distance=3, deberta_distance=4)
    return build_encoding(name, 8, HEADS, causal=causal, options=options).double()


ONE = counted(1, CPU)
BY_TOKEN = [name for name in ENCODINGS if small(name, True).form(None, ONE).by_token is not None]


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("name", ENCODINGS)
def test_a_form_has_one_kind_of_factor_at_most_and_no_bias_with_it(name, decay):
    """Attention would read one of them only, without a warning."""
    options = EncodingOptions(ape_decay=decay) if name.startswith("ape") else EncodingOptions()
    encoding = build_encoding(name, 16, HEADS, causal=True, options=options)
    form = encoding.form((0, 4), counted(5, CPU))
    factors = [x for x in (form.score_decay, form.factor) if x is not None]
    assert len(factors) <= 1
    assert not factors or form.bias is None


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 1), (True, 6), (False, None)])
@pytest.mark.parametrize("name", BY_TOKEN)
def test_biases_of_every_token_are_the_bias_of_every_pair(name, causal, window):
    encoding, (q, k) = small(name, causal), queries_and_keys(7, 12, HEADS, 8)
    first, scale = 5 if causal else 0, encoding.softmax_scale
    positions = counted(first + 7, CPU, first), counted(12, CPU)
    lags = (0, (window or 12) - 1) if causal else (-11, 6)
    found = encoding.by_token(q, k, lags)._asdict()
    options = {"causal": causal, "scale": scale, "window": window}
    ours = flash.definition(found.pop("q"), k, k, **found, **options)
    visible = flash.visible(flash.lags(q, k, causal), causal, None, None, window)
    bias = encoding.bias(scale * q, k, *positions)
    wanted = softmax.softmax_attention_naive(q, k, k, scale=scale, bias=bias, visible=visible)
    assert_same_with_gradients(ours, wanted, [q, k, *encoding.parameters()])


def test_the_methods_of_both_forms():
    assert NAMES == ["t5", "kerple-log", "kerple-power", "sandwich", "fire"]
    assert BY_TOKEN == ["transformer-xl", "shaw", "deberta"]
