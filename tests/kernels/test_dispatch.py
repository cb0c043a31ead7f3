"""Which kernel serves a call is decided in one place."""

import re
from pathlib import Path

import pytest
import torch

import lrpe_fairseq
from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.kernels import dispatch, loader, triton_calls
from lrpe_fairseq.kernels.encode import encode, encode_cpu
from lrpe_fairseq.kernels.linear import causal, half

PACKAGE = Path(lrpe_fairseq.__file__).parent


def test_only_modules_of_calls_ask_kernels_and_loads_those_of_triton():
    asks = re.compile(r"\.serves\(|loader\.triton_kernels\(")
    asking = [path for path in PACKAGE.rglob("*.py") if asks.search(path.read_text("utf-8"))]
    assert {path.name for path in asking} == {
        "dispatch.py",
        "triton_calls.py",
        "triton_operators.py",
    }


def test_without_kernels_every_operation_is_left_to_its_definition(monkeypatch):
    monkeypatch.setattr(loader, "triton_kernels", lambda module: None)
    for module in (encode_cpu, triton_calls.causal_cpu):
        monkeypatch.setattr(module, "serves", lambda *_: False)
    x, positions = torch.rand(1, 2, 5, 8), torch.arange(5)
    transform = build_encoding("lrpe-type3", 8, 2).transform(phi=True)
    assert dispatch.encode_both(x, x, transform, positions, positions) is None
    assert dispatch.encode_one(x, transform, positions) is None
    assert dispatch.applied(x, transform.powers(positions, x.dtype), encode.Variant(False)) is None
    assert not dispatch.encodes_in_one_launch(x, x, transform.variant)
    assert dispatch.linear_kernel(x, x, None, causal=True) is None
    assert dispatch.flash_attention(x, x, x, causal=True, scale=1.0) is None
    assert dispatch.stick_attention(x, x, x, scale=1.0) is None
    for phi in dispatch.feature_maps(x, -x):
        assert phi.shape == x.shape
    found = dispatch.plain_causal_sums(x, x, x, "sums", None, 1e-6)
    expected = causal.definition(x, x, x, "sums", None, 1e-6)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("dtype", "width", "is_causal", "name"),
    [
        (torch.float32, 64, True, "triton"),
        (torch.bfloat16, 256, True, "triton"),
        (torch.bfloat16, 64, False, "triton"),
        (torch.float32, 64, False, None),
        (torch.bfloat16, 256, False, triton_calls.HALF),
    ],
)
def test_states_that_do_not_fit_registers_have_triton_kernels_of_causal_sums_only(
    dtype, width, is_causal, name, monkeypatch
):
    causal_triton = pytest.importorskip("lrpe_fairseq.kernels.linear.causal_triton")
    from importlib import import_module

    monkeypatch.setattr(loader, "triton_kernels", import_module)
    monkeypatch.setattr(causal_triton, "on_device", lambda x: True)
    monkeypatch.setattr(half, "serves", lambda q, v, decay: v.dtype != torch.float32)
    x = torch.rand(1, 1, 4, width).to(dtype)
    kernel = dispatch.linear_kernel(x, x, None, is_causal)
    assert (None if kernel is None else kernel.name) == name
