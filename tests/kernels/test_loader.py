"""How the kernels in C++ come to be loaded."""

import ctypes
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lrpe_fairseq.attention.linear import linear_attention, linear_attention_naive
from lrpe_fairseq.attention.multihead import feature_map
from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.encodings.base import ELU_PLUS_ONE
from lrpe_fairseq.kernels import loader
from lrpe_fairseq.kernels.causal_cpu import SOURCE

pytestmark = pytest.mark.skipif(
    loader.compiled(SOURCE) is None, reason="causal_cpu.cpp does not compile here"
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache folder, and a library that is not loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loader.compiled.cache_clear()
    yield tmp_path / "lrpe_fairseq"
    loader.compiled.cache_clear()


def test_it_is_compiled_once(fresh, monkeypatch):
    with ThreadPoolExecutor(2) as pool:  # as two processes would, at the same time
        first, second = pool.map(lambda _: loader._library(SOURCE), range(2))
    assert first == second
    assert [x.name for x in fresh.iterdir()] == [first.name]
    monkeypatch.setattr(subprocess, "run", None)
    assert isinstance(loader.compiled(SOURCE), ctypes.CDLL)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_linear_attention_runs_and_says_what_to_do(
    compiler, fresh, monkeypatch, caplog
):
    monkeypatch.setenv("CXX", compiler)
    inputs = torch.rand(3, 2, 2, 70, 16, dtype=torch.float64).unbind()
    found = linear_attention(*inputs, causal=True)
    torch.testing.assert_close(found, linear_attention_naive(*inputs, causal=True))
    assert "set CXX to GCC 12, clang 14 or newer, or LRPE_FAIRSEQ_KERNELS=0" in caplog.text
    assert len(caplog.records) == 1
    assert not list(fresh.iterdir())


def test_an_error_of_the_compiler_is_told_in_its_own_words(fresh, monkeypatch, caplog):
    monkeypatch.setattr(loader, "FLAGS", (*loader.FLAGS, "-DVECTOR_BYTES=nonsense"))
    assert loader.compiled(SOURCE) is None
    assert "error: " in caplog.text
    assert "nonsense" in caplog.text
    assert not list(fresh.iterdir())


def test_it_can_be_switched_off(fresh, monkeypatch, caplog):
    monkeypatch.setenv("LRPE_FAIRSEQ_KERNELS", "0")
    assert loader.compiled(SOURCE) is None
    assert not caplog.text


def test_a_cache_folder_that_cannot_be_written_costs_speed_only(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    loader.compiled.cache_clear()
    try:
        assert loader.compiled(SOURCE) is None
    finally:
        loader.compiled.cache_clear()
    assert "more slowly" in caplog.text


@pytest.mark.parametrize("size", [16, 32, 64])
def test_vectors_of_every_processor_give_the_same(size, fresh, monkeypatch):
    inputs = torch.rand(3, 2, 2, 70, 24, dtype=torch.float64).unbind()
    encoding, x = build_encoding("lrpe-type5", 24, 2), torch.randn(2, 2, 70, 24)
    positions = torch.arange(70)
    monkeypatch.setattr(loader, "FLAGS", (*loader.FLAGS, f"-DVECTOR_BYTES={size}"))
    loader.compiled.cache_clear()
    found = linear_attention(*inputs, causal=True)
    torch.testing.assert_close(found, linear_attention_naive(*inputs, causal=True))
    expected = encoding(*[feature_map(x)] * 2, *[positions] * 2)[0]
    torch.testing.assert_close(encoding.one_pass(x, positions, ELU_PLUS_ONE)(x), expected)
    assert len(list(fresh.iterdir())) == 2


def test_every_read_and_write_is_inside_its_arrays(tmp_path):
    """By the address sanitizer, on widths and lengths that fill nothing up."""
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(found) or shutil.which(compiler) is None:
        pytest.skip("the compiler brings no address sanitizer")
    script = (
        "import torch\n"
        "from lrpe_fairseq.attention import native\n"
        "from lrpe_fairseq.encodings import build_encoding, kernels\n"
        "kernels.FLAGS = (*loader.FLAGS, '-fsanitize=address', '-O1')\n"
        "for keys, values, length in ((6, 3, 70), (16, 16, 32), (34, 17, 300)):\n"
        "    shapes = [(1, 2, length, n) for n in (keys, keys, values)]\n"
        "    q, k, v = (torch.rand(s, requires_grad=True) for s in shapes)\n"
        "    rates = torch.tensor([-0.1, -0.2])\n"
        "    assert native.serves(q, k, v)\n"
        "    for wanted in native.WANTED:\n"
        "        out, _ = native.causal_sums(q, k, v, wanted, rates, 1e-6)\n"
        "        out.sum().backward()\n"
        "    for number in (3, 4, 5, 8):\n"
        "        encoding = build_encoding(f'lrpe-type{number}', keys, 2)\n"
        "        encoding.one_pass(q, torch.arange(length), 'elu+1')(q).sum().backward()\n"
        "print('clean')\n"
    )
    environment = dict(
        os.environ, LD_PRELOAD=found, ASAN_OPTIONS="detect_leaks=0", XDG_CACHE_HOME=str(tmp_path)
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "clean", done.stderr[-2000:]
