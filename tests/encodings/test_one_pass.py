"""The one-pass kernel of phi, P and Lambda against the encodings themselves, with gradients.

Without a GPU it runs in Triton's interpreter (TRITON_INTERPRET=1, set in tests/conftest.py).
"""

import copy

import pytest
import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention, feature_map
from lrpe_fairseq.encodings import ENCODINGS, QueryKeyEncoding, build_encoding, kernels
from lrpe_fairseq.encodings import base as encodings_base

pytest.importorskip("triton", reason="the kernel needs triton, which is a test dependency")

from lrpe_fairseq.encodings import fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS = 2, 3
SERVED = [
    "rope",
    "lrpe-type1",
    "lrpe-type2",
    "lrpe-type3",
    "lrpe-type5",
    "lrpe-type6",
    "lrpe-tmlr-type1",
    "lrpe-tmlr-type2",
    "lrpe:householder-learned:unitary-learned",
    "lrpe:odd-even:rotation",
    "lrpe:identity:unitary",
]


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Kernels are taken wherever width and layout fit, in the interpreter without a GPU."""
    monkeypatch.setattr(fused, "on_device", lambda x: True)
    monkeypatch.setattr(kernels, "load", lambda name: fused)


def example(time, width=16, dtype=torch.float32):
    """x (B, H, T, D) as a projection leaves it, and positions of a batch and of each row."""
    generator = torch.Generator().manual_seed(time)
    x = torch.randn(BATCH, time, HEADS * width, generator=generator).to(DEVICE, dtype)
    shared = torch.arange(5, time + 5, device=DEVICE)
    return x, {"shared": shared, "own": torch.stack([shared, shared + 1000])}


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def built(name, width=16):
    encoding = build_encoding(name, width, HEADS, seed=1).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # a learned v of length one would hide a wrong gradient of its length
        for parameter in encoding.parameters():
            parameter.mul_(1 + torch.rand(parameter.shape, generator=generator).to(DEVICE))
    return encoding


def gradients(out, encoding, x):
    weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(out.dtype)
    return torch.autograd.grad(out, [x, *encoding.parameters()], weights)


@pytest.mark.parametrize("kind", ["shared", "own"])
@pytest.mark.parametrize("time", [1, 32, 45])
@pytest.mark.parametrize("name", SERVED)
def test_one_pass_gives_the_encoding_and_its_gradients(name, time, kind):
    encoding, (x, positions) = built(name), example(time)
    x.requires_grad_()
    found = encoding.one_pass(heads(x))(heads(x), positions[kind])
    exact, wide = copy.deepcopy(encoding).double(), x.detach().double().requires_grad_()
    expected, _ = exact(*[feature_map(heads(wide))] * 2, *[positions[kind]] * 2)
    assert_near(found, expected, 1e-6)
    both = gradients(found, encoding, x), gradients(expected, exact, wide)
    for grad, wanted in zip(*both, strict=True):
        assert_near(grad, wanted, 1e-5)


def assert_near(found, wanted, scale):
    assert found.shape == wanted.shape
    bound = scale * wanted.abs().max().clamp_min(1.0)  # sums of terms near one may cancel
    assert (found.double() - wanted).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_once(dtype):
    encoding, (x, positions) = built("lrpe-type2"), example(40, dtype=dtype)
    exact, _ = encoding(*[feature_map(heads(x.float()))] * 2, *[positions["shared"]] * 2)
    found = encoding.one_pass(heads(x))(heads(x), positions["shared"])
    assert found.dtype == dtype
    torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_what_no_kernel_serves_is_left_to_the_encoding():
    x, _ = example(8)
    for name in ENCODINGS:
        encoding = build_encoding(name, 16, HEADS)
        if isinstance(encoding, QueryKeyEncoding):
            assert (encoding.one_pass(heads(x)) is not None) == (name in SERVED), name
    odd, _ = example(8, width=20)
    assert build_encoding("rope", 20, HEADS).one_pass(heads(odd)) is None
    assert encodings_base.QueryKeyEncoding.one_pass(encoding, x) is None


@pytest.mark.parametrize("name", ["lrpe-type2", "lrpe-type5", "lrpe-tmlr-type1"])
@pytest.mark.parametrize("normalizer", ["rotated", "content"])
def test_linear_attention_is_the_same_with_and_without_the_kernel(name, normalizer, monkeypatch):
    torch.manual_seed(0)
    options = {"attention_type": "linear", "position_encoding": name, "causal": False}
    module = MultiheadAttention(32, 2, normalizer=normalizer, **options).to(DEVICE)
    x = torch.randn(2, 9, 32, device=DEVICE)
    padding = torch.zeros(2, 9, dtype=torch.bool, device=DEVICE)
    padding[0, :4] = True
    with_kernel, _ = module.attend(x, padding)
    monkeypatch.setattr(kernels, "load", lambda name: None)
    without, _ = module.attend(x, padding)
    torch.testing.assert_close(with_kernel, without, rtol=1e-4, atol=1e-5)
