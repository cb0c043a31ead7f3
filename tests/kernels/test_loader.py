"""How kernels are chosen, compiled, cached and loaded."""

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from lrpe_fairseq.attention.linear import linear_attention, linear_attention_naive
from lrpe_fairseq.attention.multihead import feature_map
from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.kernels import loader
from lrpe_fairseq.kernels.linear import causal_cpu, half
from lrpe_fairseq.kernels.linear.causal_cpu import SOURCE

pytestmark = pytest.mark.skipif(
    causal_cpu.library() is None, reason="causal_cpu.cpp does not compile here"
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache folder, and a library that is not loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loader.load_library.cache_clear()
    yield tmp_path / "lrpe_fairseq"
    loader.load_library.cache_clear()


@pytest.fixture
def quick(monkeypatch):
    """Compile without optimization."""
    monkeypatch.setattr(loader, "FLAGS", (*loader.FLAGS, "-O0"))


@pytest.fixture(scope="module")
def compiled_before(tmp_path_factory):
    """A cache folder with the library, compiled without optimization."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(loader, "FLAGS", (*loader.FLAGS, "-O0"))
        return loader._library(SOURCE).parent


@pytest.fixture
def library(compiled_before, fresh, quick):
    """The library in a cache folder that a test may spoil."""
    shutil.copytree(compiled_before, fresh)
    return next(fresh.iterdir())


def test_it_is_compiled_once_for_the_user_alone(fresh, quick, monkeypatch):
    umask = os.umask(0)
    try:
        library = loader._library(SOURCE)
    finally:
        os.umask(umask)
    assert list(fresh.iterdir()) == [library]
    assert {path.stat().st_mode & 0o777 for path in (fresh, library)} == {0o700}
    monkeypatch.setattr(subprocess, "run", None)
    assert isinstance(causal_cpu.library(), ctypes.CDLL)


def test_compiling_is_logged_once_in_a_process(fresh, caplog, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda done, **_: Path(done[-1]).touch())
    loader._log_compiling.cache_clear()
    fresh.mkdir()
    with caplog.at_level("INFO", logger=loader.__name__):
        for name in ("first.so", "second.so"):
            loader._compile(["c++"], fresh / name)
    assert caplog.messages == ["compiling the CPU kernels, once for this machine"]


def test_a_compiled_library_is_loaded_without_that_line(library, caplog):
    loader._log_compiling.cache_clear()
    with caplog.at_level("INFO", logger=loader.__name__):
        assert loader._library(SOURCE) == library
    assert not caplog.messages


def sums_are_finite(_):
    q = torch.rand(1, 2, 70, 16)
    assert causal_cpu.library() is not None
    return causal_cpu.causal_sums(q, q, q, "normalized", None, 1e-6)[0].isfinite().all().item()


def without_optimization():
    loader.FLAGS = (*loader.FLAGS, "-O0")


def test_two_processes_compile_at_once(fresh):
    # a fork of a process with threads may wait for a lock that nobody holds
    with multiprocessing.get_context("spawn").Pool(2, without_optimization) as pool:
        assert pool.map(sums_are_finite, range(2), chunksize=1) == [True] * 2
        pool.close()
        pool.join()
    assert len(list(fresh.iterdir())) == 1


def test_a_library_of_which_one_byte_changed_is_compiled_again(library):
    assert loader._is_complete(library)
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)
    assert loader._library(SOURCE) == library
    assert loader._is_complete(library)


def world_writable(path):
    path.chmod(0o777)


def owned_by_another(path):
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 12345, -1)


def linked_elsewhere(path):
    moved = path.with_name("moved")
    path.rename(moved)
    path.symlink_to(moved)


@pytest.mark.parametrize("what", ["library", "folder"])
@pytest.mark.parametrize("change", [world_writable, owned_by_another, linked_elsewhere])
def test_what_others_could_have_written_is_not_loaded(change, what, library, caplog):
    assert loader._library(SOURCE) == library
    change(library if what == "library" else library.parent)
    elsewhere = loader._library(SOURCE)
    assert elsewhere.parent == loader._temporary_folder()
    assert elsewhere.parent.stat().st_mode & 0o777 == 0o700
    assert len(caplog.records) == 1
    assert "is not a private" in caplog.text


def test_a_struct_that_differs_between_python_and_cpp_is_an_error(monkeypatch):
    library = causal_cpu.library()
    assert library.Call(batch=2, q=loader.View(time=3)).q.time == 3
    with pytest.raises(AttributeError, match="bach"):
        library.Call(bach=2)
    first, second, *rest = loader.View._fields_
    for fields in (
        [second, first, *rest],  # other order
        [("other", first[1]), second, *rest],  # other name
        [(first[0], ctypes.c_double), second, *rest],  # other type of the same size
        [first, second, *rest, ("more", ctypes.c_int64)],
        [first, second, *rest[:-1]],
    ):
        changed = type("Changed", (ctypes.Structure,), {"_fields_": fields})
        monkeypatch.setattr(loader, "View", changed)
        with pytest.raises(ImportError, match="different fields"):
            loader.load_library.__wrapped__(SOURCE)


@pytest.mark.parametrize("compiler", ['c++ "', "no-such-compiler", "false"])
def test_without_a_compiler_linear_attention_runs_and_says_what_to_do(
    compiler, fresh, monkeypatch, caplog
):
    monkeypatch.setenv("CXX", compiler)
    inputs = torch.rand(3, 2, 2, 70, 16, dtype=torch.float64).unbind()
    found = linear_attention(*inputs, causal=True)
    torch.testing.assert_close(found, linear_attention_naive(*inputs, causal=True))
    assert "set CXX to GCC 12, clang 14 or newer, or LRPE_FAIRSEQ_KERNELS=0" in caplog.text
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert not list(fresh.glob("*"))


def test_an_error_of_the_compiler_is_told_in_its_own_words(fresh, monkeypatch, caplog):
    monkeypatch.setattr(loader, "FLAGS", (*loader.FLAGS, "-DVECTOR_BYTES=nonsense"))
    assert causal_cpu.library() is None
    assert "error: " in caplog.text
    assert "nonsense" in caplog.text
    assert not list(fresh.iterdir())


def test_kernels_can_be_switched_off(fresh, monkeypatch, caplog):
    monkeypatch.setenv("LRPE_FAIRSEQ_KERNELS", "0")
    assert causal_cpu.library() is None
    assert not caplog.text
    found = {"device": "cpu", "causal": "pytorch", "encode": "pytorch"}
    assert loader.kernels_in_use("cpu") == {**found, "reason": "LRPE_FAIRSEQ_KERNELS=0"}


def test_run_files_can_say_which_kernels_ran():
    found = {"device": "cpu", "causal": "cpu-c++", "encode": "cpu-c++"}
    assert loader.kernels_in_use("cpu") == found
    if not torch.cuda.is_available():
        assert loader.kernels_in_use("cuda")["reason"] == "no GPU is available"


def forget():
    """Forget what was found of GPUs and of Triton."""
    for cache in (loader._triton_kernels, loader._why_triton_fails, loader.capability_of):
        cache.cache_clear()


@pytest.mark.parametrize("asked", [True, False])
def test_a_gpu_before_ampere_leaves_all_to_pytorch_and_says_so_once_if_asked(
    asked, monkeypatch, caplog
):
    if asked:
        monkeypatch.setenv("LRPE_FAIRSEQ_KERNELS", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla V100")
    monkeypatch.setattr(loader.importlib.util, "find_spec", lambda name: True)
    forget()
    try:
        for _ in range(2):
            assert loader.triton_kernels("lrpe_fairseq.kernels.linear.causal_triton") is None
    finally:
        forget()
    assert len(caplog.records) == asked
    assert ("Tesla V100 is older than Ampere" in caplog.text) == asked
    assert loader.kernels_in_use()["causal"] == "pytorch"


def test_a_gpu_on_which_triton_fails_leaves_all_to_pytorch_and_says_why(monkeypatch, caplog):
    pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")
    from lrpe_fairseq.kernels import probe_triton

    def fails(device):
        assert device == "cuda:1"  # that of this process, also in another thread
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(probe_triton, "run", fails)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    forget()
    try:
        for _ in range(2):
            assert loader.triton_kernels("lrpe_fairseq.kernels.linear.causal_triton") is None
        assert loader.kernels_in_use()["causal"] == "pytorch"
    finally:
        forget()
    assert len(caplog.records) == 1
    assert "Triton does not run here (Failed to find C compiler)" in caplog.text


@pytest.fixture
def hopper(monkeypatch):
    """A machine with a GPU of compute capability 9 on which Triton runs, as far as it is asked."""
    pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 4))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "the GPU")
    given = loader._why_triton_fails
    monkeypatch.setattr(loader, "_why_triton_fails", lambda: "")
    for cache in (loader._triton_kernels, loader.capability_of, given):
        cache.cache_clear()
    yield monkeypatch
    for cache in (loader._triton_kernels, loader.capability_of, given):
        cache.cache_clear()


T4, A100 = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def t4_and_a100(monkeypatch):
    """A machine with a T4, which is the current device, and an A100; returns what was probed."""
    pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")
    from lrpe_fairseq.kernels import probe_triton

    def capability(device=None):
        asked.append(device)
        return (8, 0) if device in (A100, 1) else (7, 5)

    asked, probed = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    monkeypatch.setattr(probe_triton, "run", probed.append)
    forget()
    yield types.SimpleNamespace(asked=asked, probed=probed)
    forget()


def on(device, dtype=torch.float16):
    """A tensor of a GPU, as far as it is asked."""
    return types.SimpleNamespace(is_cuda=True, dtype=dtype, device=device, shape=(1, 2, 9, 64))


def test_an_a100_beside_a_t4_runs_the_kernels_which_ever_is_current(t4_and_a100):
    assert loader.triton_kernels("lrpe_fairseq.kernels.linear.causal_triton") is not None
    assert t4_and_a100.probed == ["cuda:1"]
    assert loader.on_device(on(A100))
    assert not loader.on_device(on(T4))
    assert loader.kernels_in_use()["reason"].startswith("Tesla T4 is older than Ampere")


def test_torch_is_asked_once_for_the_capability_of_a_gpu(t4_and_a100):
    for _ in range(3):
        loader.on_device(on(A100))
        loader.on_device(on(T4))
    assert t4_and_a100.asked == [A100, T4]


def test_a_graph_has_kernels_for_the_gpu_of_its_tensors(t4_and_a100, monkeypatch):
    from lrpe_fairseq.kernels import dispatch, tiles_triton, triton_operators

    # an empty tensor of a GPU, which says where it is
    monkeypatch.setattr(torch, "empty", lambda *_, device: on(device))
    tiles_triton._major_of.cache_clear()
    for device, serves in ((A100, True), (T4, False)):
        x = on(device)
        assert triton_operators.serves_linear(x, x, both_ways=True) == serves
        assert triton_operators.serves_softmax(x, x, x) == serves
        assert dispatch.has_flash(x) == serves
    assert triton_operators._largest_state("cuda", 1) == tiles_triton.STATE[8]
    tiles_triton._major_of.cache_clear()


KERNELS = (
    "flash.flash_triton",
    "flash.stick_triton",
    "linear.causal_triton",
    "encode.encode_triton",
)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("version", "old"),
    [("3.2.0", True), ("3.3.1", True), ("3.4.0", False), ("3.10.0+git1", False), ("4.0", False)],
)
def test_the_kernels_need_triton_3_4(version, old, kernels, hopper, caplog):
    import triton

    hopper.setattr(triton, "__version__", version)
    for _ in range(2):
        found = loader.triton_kernels(f"lrpe_fairseq.kernels.{kernels}")
        assert (found is None) == old
    assert len(caplog.records) == old
    if old:
        said = f"need Triton 3.4 or newer (torch 2.8 or newer), and this is {version}, so PyTorch"
        assert said in caplog.text


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_amd_gpu_leaves_all_to_pytorch(kernels, hopper, caplog):
    x = types.SimpleNamespace(is_cuda=True, dtype=torch.float16, device="cuda")
    assert loader.on_device(x)
    hopper.setenv("LRPE_FAIRSEQ_KERNELS", "1")
    hopper.setattr(torch.version, "hip", "6.4.43484")
    assert loader.triton_kernels(f"lrpe_fairseq.kernels.{kernels}") is None
    assert not loader.on_device(x)
    assert "the GPU runs ROCm, and the kernels have NVIDIA's instructions" in caplog.text
    found = loader.kernels_in_use()
    assert (found["causal"], found["encode"]) == ("pytorch", "pytorch")


def test_an_amd_gpu_has_no_products_of_halves_in_float32(monkeypatch):
    monkeypatch.setattr(half, "is_plain", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 4))
    monkeypatch.setattr(torch.ops.aten.bmm, "dtype", "the overload of torch 2.8", raising=False)
    x = types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device="cuda")
    assert half.serves(x, x)
    monkeypatch.setattr(torch.version, "hip", "6.4.43484")
    assert not half.serves(x, x)


def test_without_a_usable_cache_folder_kernels_are_compiled_elsewhere(
    fresh, quick, monkeypatch, tmp_path, caplog
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert causal_cpu.library() is not None
    assert len(caplog.records) == 1
    assert str(loader._temporary_folder()) in caplog.text


@pytest.mark.parametrize("size", [16, 32, 64])
def test_vectors_of_every_processor_give_the_same(size, fresh, quick, monkeypatch):
    inputs = torch.rand(3, 2, 2, 70, 24, dtype=torch.float64).unbind()
    encoding, x = build_encoding("lrpe-type5", 24, 2), torch.randn(2, 2, 70, 24)
    positions = torch.arange(70)
    monkeypatch.setattr(loader, "FLAGS", (*loader.FLAGS, f"-DVECTOR_BYTES={size}"))
    loader.load_library.cache_clear()
    found = linear_attention(*inputs, causal=True)
    torch.testing.assert_close(found, linear_attention_naive(*inputs, causal=True))
    expected = encoding(*[feature_map(x)] * 2, *[positions] * 2)[0]
    found, _ = encoding.encode_both(x, x, positions, positions, phi=True)
    torch.testing.assert_close(found, expected)
    assert len(list(fresh.iterdir())) == 2


SANITIZED = """
import torch
from lrpe_fairseq.kernels import loader
from lrpe_fairseq.kernels.linear import causal_cpu as native
from lrpe_fairseq.encodings import build_encoding
loader.FLAGS = (*loader.FLAGS, '-fsanitize=address', '-O0')
for keys, values, length in ((6, 3, 70), (16, 16, 32), (34, 17, 300)):
    q, k, v = (torch.rand(1, 2, length, n, requires_grad=True) for n in (keys, keys, values))
    assert native.serves(q, k, v)
    for wanted in native.WANTED:
        rates = torch.tensor([-0.1, -0.2])
        native.causal_sums(q, k, v, wanted, rates, 1e-6)[0].sum().backward()
    for number in (3, 4, 5, 8):
        encoding, at = build_encoding(f'lrpe-type{number}', keys, 2), torch.arange(length)
        encoding.encode_both(q, k, at, at, phi=True)[0].sum().backward()
print('clean')
"""


def test_every_read_and_write_is_inside_its_arrays(tmp_path):
    """By the address sanitizer, on widths and lengths that fill nothing up."""
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(found) or shutil.which(compiler) is None:
        pytest.skip("the compiler brings no address sanitizer")
    environment = {**os.environ, "LD_PRELOAD": found, "XDG_CACHE_HOME": str(tmp_path)}
    environment["ASAN_OPTIONS"] = "detect_leaks=0"
    command = [sys.executable, "-c", SANITIZED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "clean", done.stderr[-2000:]
