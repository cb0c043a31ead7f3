"""Flash attention against its definition in float64, in outputs and gradients.

Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1, set in
tests/conftest.py). It multiplies bfloat16 wrongly, so half precision is float16 there.
"""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lrpe_fairseq.kernels.flash import flash

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

from triton import language as tl

from lrpe_fairseq.kernels.flash import flash_tiles, flash_triton
from lrpe_fairseq.kernels.flash.flash_triton import Tile, flash_attention, serves
from tests import triton_probe
from tests.kernels.flash_cases import CASES, assert_near, exact, inputs, results

pytestmark = pytest.mark.skipif(bool(triton_probe.why_not()), reason=triton_probe.why_not())

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 3e-6, torch.float16: 2e-3}
QUICK = {
    torch.float32: ("table, full", "gates, full", "all, after a cache", "queries without keys",
                    "one token", "by query", "by query and key, after a cache", "decays, full",
                    "far table, full", "far table of a short text"),
    torch.float16: ("by query and key, clipped, full", "decay", "gates", "documents",
                    "table of a text longer than a tile", "all, full", "one query", "far table",
                    "far table, after a cache", "far table, queries without keys"),
}  # fmt: skip
ALL = [
    pytest.param(dtype, case, marks=[] if case in QUICK[dtype] else pytest.mark.exhaustive)
    for dtype in BOUNDS
    for case in CASES
]


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    """Large tiles in the interpreter, whose time is that of its operations, not of their size."""
    if DEVICE == "cpu":
        monkeypatch.setattr(flash_triton, "tile_of", lambda *_: Tile(64, 64))


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that is not written contains NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(2).isnan().all()
    assert torch.ones(2).new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("dtype", "case"), ALL)
def test_the_kernels_equal_the_definition_in_outputs_and_gradients(dtype, case):
    tensors, options = inputs(dtype=dtype, device=DEVICE, **CASES[case])
    if not serves(*(tensors[name] for name in "qkv"), tensors.get("table")):
        assert (dtype, case) == (torch.float32, "wide")
        return
    found = results(flash_attention, tensors, options)
    assert_near(found, exact(tensors, options), BOUNDS[dtype])
    assert all(found[name].dtype == x.dtype for name, x in tensors.items())


@pytest.mark.parametrize("causal", [True, False])
def test_far_lags_of_a_table_are_not_read(causal):
    """But one of them: tiles of 64 queries and keys reach 126 lags beyond."""
    tensors, options = inputs(T=200, B=1, H=1, table=True, far=5, causal=causal, device=DEVICE)
    wanted = exact(tensors, options)
    lag = torch.arange(399, device=DEVICE) + options["first_lag"]
    tensors["table"][:, lag.abs() > 5 + 126] = torch.nan
    assert_near(results(flash_attention, tensors, options), wanted, BOUNDS[torch.float32])


@pytest.mark.skipif(DEVICE == "cuda", reason="counts in the interpreter")
@pytest.mark.parametrize(("causal", "every", "near"), [(True, 6, 5), (False, 9, 7)])
def test_a_tile_of_far_lags_loads_one_number_of_a_table(causal, every, near, monkeypatch):
    """In the output and in every sweep of the backward pass; a text of three tiles of 64."""
    loads = []

    def counted(pointer):
        loads.append(pointer.numel.value)
        return tl.load(pointer)

    monkeypatch.setattr(flash_tiles, "fetched", counted)
    for far, expected in ((60, near), (150, every)):
        loads.clear()
        given = inputs(T=192, B=1, H=1, table=True, far=far, causal=causal)
        results(flash_attention, *given)
        # the output, the gradients of queries and of keys, and that of the table
        assert loads == 4 * expected * [64 * 64]


@pytest.mark.parametrize("tile", [Tile(16, 16), Tile(128, 64)], ids=str)
def test_results_do_not_depend_on_the_tiles(tile, monkeypatch):
    """Nor does the mask of dropout."""
    tensors, options = inputs(T=50, device=DEVICE, B=1, H=1, table=True, gates=True, dropout=0.5)
    wanted = exact(tensors, options)
    monkeypatch.setattr(flash_triton, "tile_of", lambda *_: tile)
    assert_near(results(flash_attention, tensors, options), wanted, BOUNDS[torch.float32])


def test_no_two_warps_compute_the_same_rows_of_a_tile():
    """Tensor cores have 16 rows a warp. Lags of a diagonal need as many queries as keys."""
    tables = flash_triton.LARGE_MEMORY, flash_triton.OTHERS, flash_triton.FLOAT32
    for name, sizes in (pair for tiles in tables for pair in tiles.items()):
        for _, (queries, keys, warps, _) in sizes:
            assert 16 * warps <= (keys if name == "key_gradient" else queries)
            assert queries >= keys or name != "lag_gradient"


def test_two_runs_give_equal_bits():
    case = CASES["all, full"] | {"B": 1, "T": 70}
    runs = [results(flash_attention, *inputs(device=DEVICE, **case)) for _ in range(2)]
    assert all(torch.equal(runs[0][name], x) for name, x in runs[1].items())


def test_a_query_without_a_visible_key_gets_zeros_and_gives_none():
    tensors, options = inputs(device=DEVICE, B=2, H=1)
    options["padding"] = torch.zeros(2, 70, dtype=torch.bool, device=DEVICE)
    options["padding"][0, :5] = options["padding"][1] = True
    found = results(flash_attention, tensors, options)
    for name in ("out", "q", "k", "v"):
        assert (found[name][0, :, :5] == 0).all(), name
        assert (found[name][1] == 0).all(), name
        assert (found[name][0, :, 6] != 0).any(), name


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_score_that_is_not_finite_is_not_hidden(value):
    tensors, options = inputs(T=20, B=1, H=1, device=DEVICE)
    tensors["q"][0, 0, 5, 3] = value
    found = results(flash_attention, tensors, options)
    assert found["out"][0, 0, 5].isnan().all()
    assert found["out"][0, 0, 6].isfinite().all()
    for name in ("k", "v"):
        assert found[name].isnan().any(), name


@pytest.mark.parametrize("steps", ["near 1/2", "near 1", "closed"])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_sums_of_the_gates_of_100000_tokens_are_exact_to_float32(dtype, steps):
    """The last queries and keys; plain float32 sums would be wrong by 4e-3 and more."""
    torch.manual_seed(1)
    logs = {
        "near 1/2": -torch.rand(100_000).double() * 1.4,
        "near 1": -torch.rand(100_000).double() * 1e-3 - torch.arange(100_000).lt(9e4) * 40.0,
        "closed": torch.where(torch.arange(100_000) % 50 == 7, -20.0, -1e-3).double(),
    }[steps]
    tensors, options = inputs(T=8, S=130, B=1, H=1, dtype=dtype, device=DEVICE)
    sums = logs.cumsum(0)[None, None, -130:].to(DEVICE)
    tensors |= {"c": sums[..., -8:].clone(), "d": sums}
    bound = 1e-6 if dtype == torch.float32 else BOUNDS[dtype]
    assert_near(results(flash_attention, tensors, options), exact(tensors, options), bound)


def test_dropped_weights_are_those_of_philox():
    """With the known answer of Random123 for a key and a counter of zeros."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = flash._philox(zero, (zero, zero, zero, zero))
    assert [int(w) for w in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    mask = flash.kept(zero + 2**40, torch.Size((2, 2, 60, 90)), 2**14).double() - 0.75
    assert abs(mask.mean()) < 4 * (0.1875 / mask.numel()) ** 0.5
    for axis in range(4):  # neighbours are independent
        length = mask.shape[axis] - 1
        product = mask.narrow(axis, 0, length) * mask.narrow(axis, 1, length)
        assert abs(product.mean()) < 4 * 0.1875 / product.numel() ** 0.5


def test_a_seed_is_drawn_from_torchs_generator():
    tensors, options = inputs(T=20, B=1, H=1, device=DEVICE, dropout=0.5)
    del options["seed"]
    outputs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outputs.append(results(flash_attention, tensors, options)["out"])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert (results(flash_attention, tensors, options | {"dropout": 1.0})["out"] == 0).all()


def test_any_strides_are_read():
    """Rows that are not contiguous, heads outside, and a gradient that is one number."""
    tensors, options = inputs(T=20, D=20, B=1, device=DEVICE)
    wanted = results(flash_attention, tensors, options, torch.ones(1, 2, 20, 16, device=DEVICE))
    q, k, v = (tensors[name] for name in "qkv")
    leaves = [x.detach().requires_grad_() for x in (q.mT.contiguous().mT, k.contiguous(), v)]
    out = flash_attention(*leaves, **options)
    out.sum().backward()
    assert out.transpose(1, 2).is_contiguous()
    for x, name in zip((out, *(x.grad for x in leaves)), ("out", "q", "k", "v"), strict=True):
        torch.testing.assert_close(x, wanted[name])


@pytest.mark.parametrize("learns", ["q", "table"])
def test_second_derivatives_are_refused_in_one_sentence(learns):
    tensors, options = inputs(T=5, B=1, H=1, table=True, device=DEVICE)
    tensors[learns].requires_grad_()
    out = flash_attention(*(tensors[name] for name in "qkv"), table=tensors["table"], **options)
    (grad,) = torch.autograd.grad(out.sum(), tensors[learns], create_graph=True)
    with pytest.raises(RuntimeError, match=r"sdpa_kernel\(SDPBackend\.MATH\)"):
        grad.sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        assert not serves(*(tensors[name] for name in "qkv"))


def test_what_the_kernels_do_not_support_is_not_served():
    q = torch.zeros(1, 1, 4, 16, device=DEVICE)
    assert serves(q, q, q)
    assert not serves(q.double(), q.double(), q.double())
    assert not serves(q.half(), q, q)
    assert not serves(q, q, q.expand(1, 1, 4, 16).repeat(1, 1, 1, 9))
    assert not serves(q, q, q, torch.zeros(1, 7, device="meta"))
    assert not serves(q[:, :, :0], q, q)
    wide = torch.zeros(1, 1, 4, 256, device=DEVICE)
    assert serves(wide.half(), wide.half(), q.half())
    assert not serves(wide, wide, q)


def test_biases_of_every_token_need_its_shape():
    q, k = torch.zeros(1, 2, 4, 16, device=DEVICE), torch.zeros(1, 2, 5, 16, device=DEVICE)
    for name, shape in (("by_query", (1, 2, 5, 8)), ("by_key", (1, 2, 4, 8))):
        biases = {name: torch.zeros(shape, device=DEVICE)}
        with pytest.raises(ValueError, match="biases by lag of every token must be"):
            flash_attention(q, k, k, causal=True, scale=1.0, **biases)


def test_sequences_are_on_the_first_axis_of_every_grid(monkeypatch):
    """CUDA allows 65,535 programs on the others."""
    grids = []
    monkeypatch.setattr(flash_triton, "launch", lambda kernel, grid, *_, **__: grids.append(grid))
    tensors, options = inputs(T=1, B=40_000, device="cpu", table=True, padding=True)
    results(flash_attention, tensors, options)
    assert len(grids) == 7  # four kernels, bounds of queries and of keys, and the sums by lag
    assert all(len(grid) == 1 for grid in grids)
