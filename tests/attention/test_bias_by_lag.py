"""A bias that is a function of the lag: expanded from a table, without reading positions."""

import pytest
import torch

from lrpe_fairseq.attention import softmax, tokens
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import ENCODINGS, ScoreEncoding, build_encoding

BATCH, HEADS, TIME, WIDTH = 3, 4, 50, 64


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


@pytest.mark.parametrize("scores", [softmax.BLOCK, BATCH * HEADS * TIME * 9])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_expanded_table_is_the_bias_of_every_pair(name, causal, padding, scores, monkeypatch):
    monkeypatch.setattr(softmax, "BLOCK", scores)
    found = results(name, causal, padding)
    monkeypatch.setattr(tokens, "known_lags", lambda *_: None)
    for ours, wanted in zip(found, results(name, causal, padding), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-12)


def test_tables_are_those_of_four_methods():
    assert NAMES == ["t5", "kerple-log", "kerple-power", "sandwich"]
