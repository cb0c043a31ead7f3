"""How the Triton kernels are launched: on which device, and on how many programs."""

import gc
import weakref
from contextlib import contextmanager
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

from lrpe_fairseq.kernels import loader, results, tiles_triton
from lrpe_fairseq.kernels.encode import encode_triton
from lrpe_fairseq.kernels.encode.encode import Variant
from lrpe_fairseq.kernels.flash import flash_triton
from lrpe_fairseq.kernels.linear import causal_triton, full_triton, sweep_triton
from tests.triton_probe import launched

MANY, MOST = 70_000, 65_535
"""Sequences, more than CUDA allows programs on any axis of a grid but the first."""


FOR_FEW_SEQUENCES = {f"{sweep_triton.__name__}._{x}_kernel" for x in ("sums", "scan", "later")}


class Recorder:
    """Replaces a kernel: computes nothing, and records the device and the grid of its launches."""

    device = None  # of the guard that is active

    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *args, **_: self.launches.append((Recorder.device, args[0].device, grid))


@contextmanager
def guard(x):
    """Replaces torch.cuda.device_of, which does nothing for tensors of a CPU."""
    Recorder.device = x.device
    yield
    Recorder.device = None


@pytest.fixture
def launches(monkeypatch):
    """(device of the guard, device of the tensors, grid) of every launch, by kernel."""
    found = {}
    for module in (causal_triton, encode_triton, full_triton, sweep_triton):
        monkeypatch.setattr(module, "on_device", lambda x: True, raising=False)
        for name in filter(launched, list(vars(module))):
            kernel = f"{module.__name__}.{name}"
            monkeypatch.setattr(module, name, Recorder(found.setdefault(kernel, [])))
    monkeypatch.setattr(torch.cuda, "device_of", guard)
    return found


def test_every_kernel_runs_on_the_device_of_its_tensors_for_any_number_of_sequences(launches):
    gates = torch.zeros(MANY, 1, 1).requires_grad_()
    for dtype in (torch.float16, torch.float32):
        x = torch.rand(MANY, 1, 1, 16).to(dtype).requires_grad_()
        assert causal_triton.serves(x, x)
        causal_triton.causal_sums(x, x, x, "normalized", gates, 1e-6)[0].sum().backward()
    half = torch.rand(MANY, 1, 1, 16).half().requires_grad_()
    full_triton.full_sums(half, half, half, "normalized", 1e-6)[0].sum().backward()
    assert encode_triton.serves(x, x, Variant())
    encode_triton.feature_maps(x)[0].sum().backward()
    assert len(launches) == 18
    for name, found in launches.items():
        assert found or name in FOR_FEW_SEQUENCES, name
        for guarded, device, grid in found:
            assert guarded == device, name
            assert grid[0] >= MANY, name
            assert all(programs <= MOST for programs in grid[1:]), name


def test_a_text_of_any_length_has_the_blocks_of_its_gates_on_the_first_axis(launches):
    """A failure would switch the kernels off for texts of all lengths."""
    tokens = sweep_triton.SPAN * MOST + 1
    gates = torch.zeros(1, 1, 1).expand(1, 1, tokens).requires_grad_()
    x = torch.zeros(1, 1, 1, 16).half().expand(1, 1, tokens, 16)
    with torch.no_grad():
        sweep_triton._Sweep.apply(x, x, x, gates, "normalized", 1e-6)
    for name, found in launches.items():
        for _, _, grid in found:
            assert all(programs <= MOST for programs in grid[1:]), name
    ((*_, grid),) = launches[f"{sweep_triton.__name__}._logarithms_kernel"]
    assert grid == (MOST + 1,)


@pytest.mark.parametrize("tokens", [1000, sweep_triton.GATED * MOST, 2**31 - 1])
def test_a_text_with_gates_has_no_more_parts_than_an_axis_of_a_grid(tokens):
    x = torch.empty(1, 1, tokens, 16, device="meta")
    call = sweep_triton._Call(x, x, "sums", 1e-6, decays=True, with_gates=True)
    assert call.parts <= MOST
    assert call.span % sweep_triton.SPAN == 0
    assert tokens > sweep_triton.GATED * MOST or call.span <= sweep_triton.GATED


def test_triton_searches_once_for_calls_that_one_compiled_kernel_serves(monkeypatch):
    monkeypatch.setattr(loader, "_runs_compiled", lambda: True)
    kernel = MagicMock(arg_names=["x", "n", "FIRST", "SECOND"])
    search = kernel.__getitem__.return_value  # kernel[grid]
    compiled, constants = search.return_value, {"SECOND": 2, "FIRST": 1, "num_warps": 4}
    x, other = torch.zeros(8), torch.zeros(8)
    loader.launch(kernel, (3,), x, 5, **constants)
    loader.launch(kernel, (7,), other, 6, **constants)
    search.assert_called_once_with(x, 5, **constants)
    compiled.__getitem__.assert_called_once_with((7, 1, 1))
    compiled[7, 1, 1].assert_called_once_with(other, 6, 1, 2)
    for args in ((x.half(), 5), (x[1:], 5), *((x, n) for n in (1, 32, 2**31 + 1, None, other))):
        loader.launch(kernel, (3,), *args, **constants)
    for name in constants:
        loader.launch(kernel, (3,), x, 5, **(constants | {name: 8}))
    assert search.call_count == 11


def test_a_kernel_is_held_as_long_as_its_compiled_form_is_known_by_its_id(monkeypatch):
    monkeypatch.setattr(loader, "_runs_compiled", lambda: True)
    monkeypatch.setattr(loader, "_compiled", {})

    class Kernel:
        arg_names = ("x",)

        def __getitem__(self, grid):
            return lambda *args, **constants: "compiled"

    kernel = Kernel()
    loader.launch(kernel, (3,), torch.zeros(8))
    seen = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert seen() is not None  # else another kernel could have its id, and its compiled form


def test_a_size_that_is_not_given_is_no_integer(monkeypatch):
    """Triton compiles None as a constant."""
    monkeypatch.setattr(loader, "_runs_compiled", lambda: True)
    monkeypatch.setattr(loader, "_compiled", {})
    params = [MagicMock(do_not_specialize=size) for size in (False, True, True)]
    kernel = MagicMock(arg_names=["x", "far", "n"], params=params)
    x, search = torch.zeros(8), kernel.__getitem__.return_value
    for far, n, table in ((None, 5, 1), (None, 2**40, 1), (9, 5, 2), (10, 6, 2), (None, 6, 1)):
        loader.launch(kernel, (3,), x, far, n, TABLE=table)
    assert search.call_count == 3


def test_rows_whose_offsets_pass_int32_are_brought_together():
    far = torch.empty(128, 2**15, 8, 64, device="meta").permute(1, 2, 0, 3)
    assert far.stride(2) == results.FARTHEST
    assert tiles_triton.straight(far).stride(2) == 64
    assert results.result_like(far, 64).stride(2) == 8 * 64
    assert results.result_like(far[1:], 64).stride(2) == (2**15 - 1) * 8 * 64


def test_heads_whose_offsets_pass_int32_are_brought_together():
    far = torch.empty(1, 4, 2**24, 32, device="meta")
    for bring in (flash_triton.rows_of, flash_triton.gradient_of):
        assert bring(far).stride()[1:3] == (32, 4 * 32)
        assert bring(far[:, :, :9]).stride()[1:3] == (32, 4 * 32)
        near = far[:, :3]
        assert bring(near).stride() == near.stride()


class NotCompiled(Exception):
    """As Triton's CompilationError: what it says of a function that a kernel calls is its cause."""

    def __init__(self, line, message):
        super().__init__(f"at 3:34:\n{line}\n^\n{message or ''}".strip())
        self.error_message = message


def test_a_kernel_that_does_not_compile_says_why_and_not_only_where(monkeypatch):
    said = "input and other must have equal ranks >= 2"

    def compile_kernel(*_):
        try:
            raise NotCompiled("return tl.dot(x, y)", said)
        except NotCompiled as error:
            raise NotCompiled("tl.store(p, product(x))", None) from error

    monkeypatch.setattr(loader, "_launch", compile_kernel)
    with pytest.raises(loader.LaunchError, match=f"_kernel: {said} .NotCompiled."):
        loader.launch(MagicMock(__name__="_kernel"), (1,), torch.zeros(1))
