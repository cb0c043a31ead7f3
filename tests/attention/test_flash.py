"""Softmax attention through the Triton kernel, in Triton's interpreter, against PyTorch."""

from functools import partial

import pytest
import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import ENCODINGS, encoding_class, is_causal_only
from lrpe_fairseq.kernels import loader, triton_calls
from tests.end_to_end.cases import computes, sampled

flash_triton = pytest.importorskip("lrpe_fairseq.kernels.flash.flash_triton")
stick_triton = pytest.importorskip("lrpe_fairseq.kernels.flash.stick_triton")
BATCH, HEADS, TIME, WIDTH = 2, 2, 19, 16
LEFT = torch.zeros(BATCH, TIME, dtype=torch.bool)
LEFT[1, :5] = True
BETWEEN = torch.zeros(BATCH, TIME, dtype=torch.bool)
BETWEEN[0, [2, 3, 11]] = True
MASKS = {"whole": {}, "left": {"key_padding_mask": LEFT, "one_sided": True},
         "between": {"key_padding_mask": BETWEEN}}  # fmt: skip
BY_LAG = ("alibi", "fire", "kerple-log", "kerple-power", "permuteformer", "sandwich", "t5")
"""Encodings whose score depends on the lag between tokens."""
BY_TOKEN = ("deberta", "shaw", "transformer-xl")
"""Encodings whose bias is a product of a query or a key with a vector by lag."""
BY_GATES = ("fox", "gated:alibi", "gated:lrpe-type2")
WIDE = ("cosformer", "lrpe-tmlr-type1", "lrpe-type8")
"""Encodings whose features are wider than values."""
SHARES = "stick-breaking"
"""With a kernel of its own."""


def expected(name, causal, mask):
    """True if the kernel serves the encoding; torch's own serves plain scores of equal widths."""
    if name == "path":  # its scores need the keys before them
        return False
    if name in BY_LAG and (causal or name != "permuteformer"):  # which decays if causal
        return mask != "between" or (name == "alibi" and causal)
    if name in BY_TOKEN:
        return mask != "between"
    if name == SHARES:
        return True
    data = not encoding_class(name).decomposable
    return not data and (name in WIDE or name in BY_GATES or mask != "whole")


@pytest.fixture
def calls(monkeypatch):
    """The arguments of every call of the kernel, which is used on the CPU."""
    found, modules = [], {triton_calls.FLASH: flash_triton, triton_calls.STICK: stick_triton}

    def counted(kernel, *given, **options):
        found.append(options)
        return kernel(*given, **options)

    for module, name in ((flash_triton, "flash_attention"), (stick_triton, "stick_attention")):
        monkeypatch.setattr(module, name, partial(counted, getattr(module, name)))
    monkeypatch.setattr(loader, "triton_kernels", modules.get)
    return found


def results(module, time=TIME, **options):
    """Output at real tokens, and the gradients of the input and of every parameter."""
    x = torch.randn(BATCH, time, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = module.attend(x, **options)[0]
    padding = options.get("key_padding_mask")
    out = out if padding is None else out.masked_fill(padding[..., None], 0.0)
    weights = torch.arange(out.numel()).cos().view_as(out)
    learned = [p for p in module.parameters() if p.requires_grad]
    grads = torch.autograd.grad((out * weights).sum(), [x, *learned], allow_unused=True)
    return [out, *(g for g in grads if g is not None)]


def compared(name, causal, calls, monkeypatch, fidelity="", encoding=None, **options):
    """Compare kernel and PyTorch; return the number of the kernel's calls."""
    torch.manual_seed(0)
    given = {"attention_type": "softmax", "position_encoding": name, "causal": causal}
    given |= ({"fidelity": fidelity} if fidelity else {}) | (encoding or {})
    module = MultiheadAttention(WIDTH, HEADS, **given).eval()
    found, count = results(module, **options), len(calls)
    monkeypatch.setattr(loader, "triton_kernels", lambda name: None)
    torch.testing.assert_close(found, results(module, **options), rtol=2e-4, atol=2e-5)
    return count


QUICK = ("none", "alibi", "t5", "fox", "permuteformer", "lrpe-type8", "cope", SHARES, *BY_TOKEN)
CASES = [
    (name, causal, mask)
    for name in (*ENCODINGS, *BY_GATES[1:])
    for causal in (True, False)
    for mask in MASKS
    if computes("softmax", name) and (causal or not is_causal_only(name))
]


@pytest.mark.parametrize(
    ("name", "causal", "mask"),
    sampled(CASES, [case for turn, case in enumerate(CASES) if case[0] in QUICK and turn % 2]),
)
def test_the_kernel_serves_what_is_data_and_equals_pytorch(name, causal, mask, calls, monkeypatch):
    count = compared(name, causal, calls, monkeypatch, **MASKS[mask])
    assert count == expected(name, causal, mask)


@pytest.mark.parametrize("name", BY_LAG)
def test_the_kernel_serves_the_published_codes_too(name, calls, monkeypatch):
    """One of them has one table for all heads."""
    assert compared(name, True, calls, monkeypatch, fidelity="published") == 1


@pytest.mark.parametrize("name", ["rope", "alibi", "t5", "fox", "permuteformer", SHARES, "deberta"])
def test_a_window_is_a_window_of_the_kernel(name, calls, monkeypatch):
    assert compared(name, True, calls, monkeypatch, window=4) == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("distance", [17, 200])
def test_t5_is_exact_at_far_lags(distance, causal, calls, monkeypatch):
    """In texts longer and shorter than its largest distance; a tile of far lags loads one number,
    and its gradient is that of the last bucket."""
    monkeypatch.setattr(flash_triton, "tile_of", lambda *_: flash_triton.Tile(16, 16))
    options, padding = {"t5_max_distance": distance}, torch.zeros(BATCH, 40, dtype=torch.bool)
    padding[1, 36:] = True
    given = {"time": 40, "key_padding_mask": padding, "one_sided": True, "encoding": options}
    assert compared("t5", causal, calls, monkeypatch, **given) == 1
    assert 0 < calls[0]["far"] <= distance


def test_a_learned_decay_gets_its_gradient_from_pytorch(calls, monkeypatch):
    options = {"attention_type": "softmax", "position_encoding": "alibi", "causal": True}
    module, learned = MultiheadAttention(WIDTH, HEADS, **options), -torch.rand(HEADS)
    monkeypatch.setattr(module.encoding, "log_decay", lambda device: learned.requires_grad_())
    module.attend(torch.randn(BATCH, TIME, WIDTH))[0].square().sum().backward()
    assert learned.grad.abs().min() > 0
    assert not calls
