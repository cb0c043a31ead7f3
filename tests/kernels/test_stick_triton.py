"""Stick-breaking attention against its definition in float64, in outputs and gradients.

As in test_flash_triton.py, the kernels run in Triton's interpreter without a GPU.
"""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lrpe_fairseq.kernels.flash.flash_triton import Tile
from tests import triton_probe
from tests.kernels.flash_cases import assert_near
from tests.kernels.stick_cases import CASES, definition, exact, inputs, results
from tests.kernels.test_flash_triton import BOUNDS, DEVICE, poisoned

stick_triton = pytest.importorskip("lrpe_fairseq.kernels.flash.stick_triton")
pytestmark = pytest.mark.skipif(bool(triton_probe.why_not()), reason=triton_probe.why_not())

QUICK = {
    (torch.float32, "a long reach"),
    (torch.float32, "large scores"),
    (torch.float32, "all, after a cache"),
    (torch.float32, "queries without keys"),
    (torch.float32, "one token"),
    (torch.float16, "documents"),
    (torch.float16, "a reach of a few keys"),
    (torch.float16, "dropout"),
}
ALL = [
    pytest.param(dtype, case, marks=[] if (dtype, case) in QUICK else pytest.mark.exhaustive)
    for dtype in BOUNDS
    for case in CASES
]
__all__ = ["poisoned"]


def attention(*given, **options):
    return stick_triton.stick_attention(*given, **options)


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    """Large tiles in the interpreter, whose time is that of its operations, not of their size."""
    if DEVICE == "cpu":
        monkeypatch.setattr(stick_triton, "tile_of", lambda _: Tile(64, 32))


@pytest.mark.parametrize(("dtype", "case"), ALL)
def test_the_kernels_equal_the_definition_in_outputs_and_gradients(dtype, case):
    tensors, options = inputs(dtype=dtype, device=DEVICE, **CASES[case])
    if not stick_triton.serves(*tensors.values()):
        pytest.skip("too wide")
    found = results(attention, tensors, options)
    assert_near(found, exact(tensors, options), BOUNDS[dtype])
    assert all(found[name].dtype == x.dtype for name, x in tensors.items())


def test_results_depend_on_the_tiles_by_rounding_and_on_the_memory_for_carries_not(monkeypatch):
    tensors, options = inputs(T=40, B=3, H=1, device=DEVICE, padding=True, dropout=0.5)
    wanted = exact(tensors, options)
    monkeypatch.setattr(stick_triton, "tile_of", lambda _: Tile(16, 32))
    runs = []
    for memory in (2**28, 2 * 8 * 2 * 40):  # for all sequences, for two
        monkeypatch.setattr(stick_triton, "MEMORY", memory)
        runs.append(results(attention, tensors, options))
    assert_near(runs[0], wanted, BOUNDS[torch.float32])
    assert all(torch.equal(runs[0][name], x) for name, x in runs[1].items())


def test_keys_without_a_weight_are_not_read():
    """Scores near 8 leave nothing after 14 keys; the first 32 values are NaN."""
    tensors, options = inputs(T=300, B=1, H=1, near=8.0, device=DEVICE)
    tensors["v"][:, :, :32] = torch.nan
    weights = torch.zeros(1, 1, 300, 16, device=DEVICE)
    weights[:, :, 200:] = 1
    found = results(attention, tensors, options, weights)
    assert found["out"][:, :, 200:].isfinite().all()
    assert found["q"][:, :, 200:].isfinite().all()


def test_no_small_share_of_a_long_text_is_lost(monkeypatch):
    """Each of 4,000 keys takes 5e-7."""
    tensors, options = inputs(T=2, S=4000, B=1, H=1, device=DEVICE)
    options["scale"] = 1.0
    tensors["q"].fill_(-0.9), tensors["k"].fill_(1.0), tensors["v"].add_(1.0)
    if DEVICE == "cpu":
        monkeypatch.setattr(stick_triton, "tile_of", lambda _: Tile(16, 256))
    assert_near(results(attention, tensors, options), exact(tensors, options), 1e-5)


def test_gradients_of_any_size_are_as_exact():
    tensors, options = inputs(T=70, B=1, H=1, device=DEVICE)
    weights = torch.randn(1, 1, 70, 16, device=DEVICE)
    runs = [results(attention, tensors, options, weights * 2.0**n) for n in (0, -40, 40)]
    for run, n in zip(runs[1:], (-40, 40), strict=True):
        assert all(torch.equal(runs[0][name] * 2.0**n, run[name]) for name in "qkv")


def test_a_fully_padded_text_and_the_first_token_get_zeros():
    tensors, options = inputs(device=DEVICE, B=2, H=1)
    options["padding"] = torch.zeros(2, 70, dtype=torch.bool, device=DEVICE)
    options["padding"][0, :5] = options["padding"][1] = True
    found = results(attention, tensors, options)
    for name in ("out", "q", "k", "v"):
        assert (found[name][1] == 0).all(), name
        assert (found[name][0, :, :5] == 0).all(), name
        assert (found[name][0, :, 7] != 0).any(), name
    assert (found["out"][0, :, 5] == 0).all()


def test_second_derivatives_are_refused():
    tensors, options = inputs(T=5, B=1, H=1, device=DEVICE)
    q, k, v = (x.requires_grad_() for x in tensors.values())
    (grad,) = torch.autograd.grad(attention(q, k, v, **options).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"sdpa_kernel\(SDPBackend\.MATH\)"):
        grad.sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        assert not stick_triton.serves(q, k, v)
    assert definition(q, k, v, **options).requires_grad
