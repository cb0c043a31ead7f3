"""Every encoding on a GPU is that of the CPU in float64; kernels; first updates of trainings."""

import pytest
import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.kernels import loader
from tests.fifty_updates import TOLERANCE, difference, losses
from tests.kernels import flash_cases, stick_cases
from tests.kernels import test_sweep_triton as sums
from tests.test_every_encoding import MODES, parts_of

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

WIDTH, HEADS, TIME = 64, 2, 100  # more than one chunk of the kernels, heads as wide as they serve
MODES = [mode for mode in MODES if mode[0] != "multiplicative"]  # exists in that file only


@pytest.fixture(params=["0", "1"], ids=["pytorch", "triton"])
def kernels(request, monkeypatch):
    """Both values of LRPE_FAIRSEQ_KERNELS."""
    monkeypatch.setenv(loader.VARIABLE, request.param)
    loader._triton_kernels.cache_clear()
    yield request.param
    loader._triton_kernels.cache_clear()


def module_of(name, attention_type, causal):
    """Attention in float64 on the CPU; without Eq. 39 where its denominator is nearly zero."""
    torch.manual_seed(0)
    name, options = parts_of(name)
    encoding = build_encoding(name, WIDTH // HEADS, HEADS, causal=causal, options=options)
    module = MultiheadAttention(
        WIDTH,
        HEADS,
        attention_type=attention_type,
        position_encoding=name,
        causal=causal,
        options=options,
        normalizer="content" if encoding.denominator_vanishes else "rotated",
    )
    return module.double().eval()


def example(batch=3, time=TIME):
    """x (T, B, C) and the padding (B, T) of its second sequence."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(time, batch, WIDTH, dtype=torch.float64, generator=generator)
    padding = torch.zeros(batch, time, dtype=torch.bool)
    padding[1, time // 2 :] = True
    return x, padding


def results(module, x, padding):
    """Return the outputs at real tokens and the gradients of x and of every parameter."""
    x = x.clone().requires_grad_()
    out, _ = module(x, key_padding_mask=padding)
    out = out.masked_fill(padding.T.unsqueeze(-1), 0.0)
    weights = torch.arange(out.numel(), device=out.device).cos().view_as(out).to(out)
    parameters = {key: p for key, p in module.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad((out * weights).sum(), [x, *parameters.values()], allow_unused=True)
    return dict(zip(["output", "input", *parameters], [out, *grads], strict=True))


POWERS = "generator.entries"
"""Parameters of APE. The rounding error of a matrix power grows with its exponent (up to 99)."""


def assert_near(found, wanted, scale):
    """Compare every tensor with a bound of ``scale`` times its largest number, at least 0.1.

    The bound is ten times larger for the gradients of :data:`POWERS`.
    """
    for key, expected in wanted.items():
        if expected is None:
            assert found[key] is None
            continue
        bound = scale * expected.abs().max().clamp_min(0.1) * (10 if POWERS in key else 1)
        error = (found[key].cpu().double() - expected.double()).abs().max()
        assert error <= bound, f"{key}: {error:.3g} above {bound:.3g}"


@pytest.mark.parametrize(("name", "attention_type", "causal"), MODES)
def test_a_gpu_computes_what_the_cpu_does(name, attention_type, causal, kernels):
    module, (x, padding) = module_of(name, attention_type, causal), example()
    wanted = results(module, x, padding)
    found = results(module.float().cuda(), x.float().cuda(), padding.cuda())
    assert_near(found, wanted, 1e-4)


SIZES = [(0, 40_000, 2), (1, 3, TIME)][: torch.cuda.device_count()]


@pytest.mark.parametrize(("device", "batch", "time"), SIZES)
def test_any_gpu_takes_more_sequences_than_most_axes_of_a_grid(device, batch, time, kernels):
    module, (x, padding) = module_of("lrpe-type2", "linear", True), example(batch, time)
    wanted = results(module, x, padding)
    module, x, padding = module.float().cuda(device), x.float().cuda(device), padding.cuda(device)
    assert_near(results(module, x, padding), wanted, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "attention_type", "causal"), MODES)
def test_half_types_are_near_float64(name, attention_type, causal, dtype, kernels):
    module, (x, padding) = module_of(name, attention_type, causal).to(dtype), example()
    found = results(module.cuda(), x.to("cuda", dtype), padding.cuda())
    assert all(value.isfinite().all() for value in found.values() if value is not None)
    wanted = results(module.cpu().double(), x.to(dtype).double(), padding)
    assert_near({"output": found["output"]}, {"output": wanted["output"]}, 0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("decay", [None, "head", "token", "fixed"])
@pytest.mark.parametrize("shape", [(1, 64, 64), (300, 32, 32), (513, 64, 64), (200, 128, 64)])
def test_states_in_registers_are_near_float64(shape, decay, dtype):
    leaves = sums.example(*shape, dtype, decay)
    assert max(sums.errors(leaves, "normalized")) <= sums.BOUND[dtype]
    leaves, forms = leaves[:3], (sums.full_sums, sums.full_definition)
    assert max(sums.errors(leaves, "normalized", *forms)) <= sums.BOUND[dtype]


@pytest.mark.parametrize(("name", "attention_type"), [mode[:2] for mode in MODES if mode[2]])
def test_token_by_token_equals_all_at_once(name, attention_type, kernels):
    module = module_of(name, attention_type, causal=True).float().cuda()
    x = example(time=9)[0].float().cuda()
    state = {}
    with torch.no_grad():
        whole, _ = module(x)
        steps = [module(token.unsqueeze(0), incremental_state=state)[0] for token in x]
    torch.testing.assert_close(torch.cat(steps), whole, rtol=1e-4, atol=1e-4)


FLASH_BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LONG = {
    "causal": {"T": 1000, "D": 64, "E": 64, "H": 4, "table": True, "gates": True},
    "full": {"T": 1000, "D": 64, "E": 64, "causal": False, "padding": True, "dropout": 0.1},
    "complex": {"T": 500, "D": 128, "E": 64, "decays": "score_decay", "window": 200},
    "widest": {"T": 300, "D": 256, "E": 128, "table": True, "gates": True, "dropout": 0.1},
}


@pytest.mark.parametrize("dtype", FLASH_BOUNDS, ids=str)
@pytest.mark.parametrize("case", [*flash_cases.CASES, *LONG])
def test_flash_attention_equals_its_definition(case, dtype):
    flash_triton = pytest.importorskip("lrpe_fairseq.kernels.flash.flash_triton")
    form = {**flash_cases.CASES, **LONG}[case]
    tensors, options = flash_cases.inputs(dtype=dtype, device="cuda", **form)
    if not flash_triton.serves(*(tensors[name] for name in "qkv")):
        assert (dtype, tensors["q"].shape[-1]) == (torch.float32, 256)
        return
    assert_as_defined(flash_cases, flash_triton.flash_attention, tensors, options)


def assert_as_defined(cases, attention, tensors, options):
    """Compare outputs and gradients with the definition, of two runs on memory full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    first, second = (cases.results(attention, tensors, options) for _ in range(2))
    torch.use_deterministic_algorithms(False)
    wanted, bound = cases.exact(tensors, options), FLASH_BOUNDS[tensors["q"].dtype]
    flash_cases.assert_near(first, wanted, bound)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert loader._runs_compiled()  # without Triton's search, in the second run


LONG_STICKS = {
    "long": {"T": 1000, "D": 64, "E": 64, "H": 4},
    "every key": {"T": 1000, "D": 64, "E": 64, "near": -8.0, "dropout": 0.1},
}


@pytest.mark.parametrize("dtype", FLASH_BOUNDS, ids=str)
@pytest.mark.parametrize("case", [*stick_cases.CASES, *LONG_STICKS])
def test_stick_breaking_attention_equals_its_definition(case, dtype):
    stick_triton = pytest.importorskip("lrpe_fairseq.kernels.flash.stick_triton")
    form = {**stick_cases.CASES, **LONG_STICKS}[case]
    tensors, options = stick_cases.inputs(dtype=dtype, device="cuda", **form)
    assert stick_triton.serves(*tensors.values())
    assert_as_defined(stick_cases, stick_triton.stick_attention, tensors, options)


def test_flash_attention_takes_more_sequences_than_cuda_allows_on_most_axes_of_a_grid():
    flash_triton = pytest.importorskip("lrpe_fairseq.kernels.flash.flash_triton")
    tensors, options = flash_cases.inputs(T=2, B=40_000, table=True, device="cuda")
    found = flash_cases.results(flash_triton.flash_attention, tensors, options)
    flash_cases.assert_near(found, flash_cases.exact(tensors, options), 2e-5)


CELLS = [("Type2-LN", "linear"), ("FoX, open", "linear"), ("RoPE", "softmax"), ("T5", "softmax")]
"""Not `Type2`: denominators near 0 amplify rounding, so that two forms on a CPU differ by 1 bit."""


@pytest.mark.parametrize(("label", "attention"), CELLS)
def test_fifty_updates_of_a_cell_of_books_are_those_of_a_cpu(label, attention, corpus, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bin").symlink_to(corpus.data)
    cpu, gpu = (
        losses(label, attention, device, tmp_path / f"{device}.log", tmp_path / "data")
        for device in ("cpu", "cuda")
    )
    assert difference(gpu, cpu) <= TOLERANCE
