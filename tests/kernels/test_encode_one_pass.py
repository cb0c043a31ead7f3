"""phi, P and Lambda in one pass against the encodings themselves, with gradients.

``fused`` is a Triton kernel, without a GPU in Triton's interpreter; ``native`` is C++ for CPUs.
"""

import copy
from itertools import cycle
from unittest import mock

import pytest
import torch

from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.multihead import MultiheadAttention, feature_map
from lrpe_fairseq.attention.tokens import Tokens
from lrpe_fairseq.encodings import ENCODINGS, EncodingOptions, QueryKeyEncoding, build_encoding
from lrpe_fairseq.kernels import dispatch, loader
from lrpe_fairseq.kernels.encode import encode, encode_cpu
from tests.end_to_end.cases import sampled
from tests.pairwise import pairwise
from tests.references import assert_near

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS = 2, 3
SERVED = [
    *("rope", "lrpe-type1", "lrpe-type2", "lrpe-type3", "lrpe-type5", "lrpe-type6"),
    *("lrpe-tmlr-type1", "lrpe-tmlr-type2", "lrpe:householder-learned:unitary-learned"),
    *("lrpe:odd-even:rotation", "lrpe:identity:unitary", "lrpe:odd-even:unitary"),
    *("lrpe:odd-even:unitary-learned", "cosformer", "rope-2d", "rope-2d-mixed", "fope"),
    *("permuteformer", "lrpe-type4", "lrpe-type7", "lrpe-tmlr-type3"),
    "lrpe:householder-learned:permutation",
]
NATIVE = ["lrpe-type8", "lrpe:fourier:unitary-learned"]
"""Served in C++ only: Fourier matrices with a unitary Lambda."""


@pytest.fixture(autouse=True, params=["fused", "native"])
def form(request, monkeypatch):
    """The kernel in question is taken wherever width and layout fit; kernels without a GPU too."""
    encode_triton = None
    if request.param == "fused":
        pytest.importorskip("triton", reason="the kernel needs triton, a test dependency")
        from tests import triton_probe

        if reason := triton_probe.why_not():
            pytest.skip(reason)
        from lrpe_fairseq.kernels.encode import encode_triton

        monkeypatch.setattr(encode_triton, "on_device", lambda x: True)
    elif DEVICE != "cpu":
        pytest.skip("this kernel is for CPUs")
    if request.param == "native":
        if encode_cpu.library() is None:
            pytest.skip("encode_cpu.cpp does not compile here")
    else:
        monkeypatch.setattr(encode_cpu, "serves", lambda *_: False)
    kernels = {"lrpe_fairseq.kernels.encode.encode_triton": encode_triton}
    monkeypatch.setattr(loader, "triton_kernels", kernels.get)
    return request.param


def by_definition(encoding, x, positions, phi=encode.feature_map):
    """Lambda P phi(x), step by step."""
    with mock.patch.object(encode_cpu, "serves", return_value=False):
        return encoding(*[phi(x)] * 2, *[positions] * 2)[0]


def example(time, width=16, dtype=torch.float32):
    """x (B, H, T, D) as a projection leaves it, and positions of a batch and of each row."""
    generator = torch.Generator().manual_seed(time)
    x = torch.randn(BATCH, time, HEADS * width, generator=generator).to(DEVICE, dtype)
    if time % 2:  # as in fairseq's layers
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    shared = torch.arange(5, time + 5, device=DEVICE)
    return x, {"shared": shared, "own": torch.stack([shared, shared + 1000])}


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def built(name, width=16):
    name, _, scaled = name.partition(" ")
    encoding = build_encoding(
        name, width, HEADS, seed=1, options=SCALED if scaled else EncodingOptions()
    ).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # a learned v of length one would hide a wrong gradient of its length
        for parameter in encoding.parameters():
            parameter.mul_(1 + torch.rand(parameter.shape, generator=generator).to(DEVICE))
    return encoding


def one_pass(encoding, x, positions, phi=True):
    """What encodes x as queries in a kernel; x are also the keys. None without a kernel."""
    transform = encoding.transform(phi)
    given = transform, positions, positions
    if transform is None or dispatch.encode_both(x, x, *given) is None:
        return None
    return lambda x: dispatch.encode_both(x, x, *given)[0]


def gradients(outs, encoding, *xs):
    weights = [torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y).to(y) for y in outs]
    return torch.autograd.grad(outs, [*xs, *encoding.parameters()], weights)


SHAPES = [(45, "own"), (32, "shared"), (1, "own"), (45, "shared"), (32, "own"), (1, "shared")]
"""Numbers of tokens and whose the positions are."""


@pytest.mark.parametrize(
    ("name", "time", "kind"),
    sampled(
        [(name, *shape) for name in SERVED for shape in SHAPES],
        [(name, *shape) for name, shape in zip(SERVED, cycle(SHAPES), strict=False)],
    ),
)
def test_one_pass_gives_the_encoding_and_its_gradients(name, time, kind):
    assert_one_pass_is_the_encoding(name, time, kind)


SCALED = EncodingOptions(
    rotation_fraction=0.5, context_scaling="yarn", context_factor=4.0, context_length=64
)


@pytest.mark.parametrize(
    "name",
    [
        *("lrpe-type3", "lrpe-type7", "lrpe-tmlr-type1", "rope-2d-mixed", "permuteformer"),
        *("rope scaled", "lrpe-type3 scaled", "lrpe-tmlr-type1 scaled", "rope-2d scaled"),
        *("lrpe-type5 scaled", "lrpe:odd-even:unitary scaled", "fope scaled"),
    ],
)
@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_one_pass_without_the_feature_map_of_softmax_attention(name):
    assert_one_pass_is_the_encoding(name, 45, "own", phi=False)


@pytest.mark.parametrize(
    "name", ["rope", "lrpe-type3", "lrpe-type7", "permuteformer", "rope-2d-mixed"]
)
@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_positions_up_to_two_to_the_31(name):
    assert_one_pass_is_the_encoding(name, 45, "own", far=2**31 - 2000)


@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_features_of_an_angle_that_is_not_finite_are_nan():
    encoding, (x, positions) = built("lrpe-type3"), example(5)
    encoding.core.theta.data[2] = float("inf")
    found = one_pass(encoding, heads(x), positions["own"])(heads(x))
    assert found.isnan().any(dim=(0, 1, 2)).nonzero().flatten().tolist() == [4, 5]


@pytest.mark.parametrize("name", ["lrpe-type3", "rope-2d-mixed"])
@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_two_runs_give_equal_bits_and_gradients_of_half_precision_are_rounded_once(name):
    """Memory that is not written contains NaN."""
    encoding, (x, positions) = built(name), example(45, dtype=torch.float16)
    given, results = (positions["own"], positions["shared"]), []
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        for _ in range(2):
            q, k = (x.clone().requires_grad_() for _ in range(2))
            out = dispatch.encode_both(heads(q), heads(k), encoding.transform(True), *given)
            results.append([*out, *gradients(out, encoding, q, k)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, *results))
    q, k = (x.double().requires_grad_() for _ in range(2))
    exact = copy.deepcopy(encoding).double()
    out = exact(encode.feature_map(heads(q)), encode.feature_map(heads(k)), *given)
    assert_near(results[0], [*out, *gradients(out, exact, q, k)], 1e-3, least=1.0)


@pytest.mark.parametrize(
    "name",
    [
        *("rope", "lrpe-type2", "lrpe-type5", "lrpe-tmlr-type1", "fope", "liere", "ape"),
        *("selective:lrpe-type3", "selective:lrpe-tmlr-type1"),
    ],
)
@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_softmax_attention_is_the_same_with_and_without_it(name, monkeypatch):
    from lrpe_fairseq.kernels.encode import encode_triton

    torch.manual_seed(0)
    options = {"attention_type": "softmax", "position_encoding": name, "causal": True}
    module = MultiheadAttention(32, 2, **options).to(DEVICE)
    for parameter in module.encoding.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    x = torch.randn(2, 40, 32, device=DEVICE, requires_grad=True)
    results = []
    for kernels in (loader.triton_kernels, lambda name: None):
        monkeypatch.setattr(loader, "triton_kernels", kernels)
        with mock.patch.object(encode_triton, "_launch", wraps=encode_triton._launch) as launch:
            out, _ = module.attend(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])])
        assert launch.call_count == 2 - len(results)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [32, 48])
@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_queries_and_keys_of_different_sequences(width, monkeypatch):
    torch.manual_seed(0)
    options = {"attention_type": "softmax", "position_encoding": "lrpe-type2"}
    module = CrossAttention(32, 2, memory_dim=width, **options).to(DEVICE)
    x, memory = torch.randn(2, 5, 32, device=DEVICE), torch.randn(2, 9, width, device=DEVICE)
    at_q, at_k = torch.arange(5, device=DEVICE), torch.arange(9, device=DEVICE).expand(2, 9)
    given = x, Tokens(at_q), memory, Tokens(at_k)
    found = module._encoded(*given)
    monkeypatch.setattr(loader, "triton_kernels", lambda name: None)
    torch.testing.assert_close(found, module._encoded(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["fused", "native"], indirect=True)
def test_the_feature_of_nan_is_nan(form):
    encoding, (x, positions) = built("lrpe-type2"), example(5)
    x[0, 3] = torch.nan
    rows = heads(x).requires_grad_()
    found = one_pass(encoding, rows, positions["shared"])(rows)
    (gradient,) = torch.autograd.grad(found.sum(), rows)
    for numbers in (found, gradient):
        assert numbers[0, :, 3].isnan().all()
        assert numbers[0, :, 4].isfinite().all()


@pytest.mark.parametrize(("name", "time", "kind"), pairwise(NATIVE, [1, 32, 45], ["shared", "own"]))
@pytest.mark.parametrize("form", ["native"], indirect=True)
def test_one_pass_in_cpp_gives_the_encoding_and_its_gradients(name, time, kind):
    assert_one_pass_is_the_encoding(name, time, kind)


@pytest.mark.parametrize(("count", "width"), [(1, 64), (17, 10), (35, 24), (12, 128)])
@pytest.mark.parametrize("name", ["lrpe-type3", "lrpe-type6", "lrpe-tmlr-type1", *NATIVE])
@pytest.mark.parametrize("form", ["native"], indirect=True)
def test_any_number_of_heads_of_any_width(name, count, width, monkeypatch):
    monkeypatch.setitem(globals(), "HEADS", count)
    assert_one_pass_is_the_encoding(name, 5, "own", width)


@pytest.mark.parametrize("name", [*SERVED, *NATIVE])
@pytest.mark.parametrize("form", ["native"], indirect=True)
def test_a_row_that_is_not_finite_stays_alone(name):
    """Rows share a cache, up to the end of their last vector, which 20 numbers do not fill."""
    encoding, (x, positions) = built(name, 20), example(9, 20)
    encode = one_pass(encoding, heads(x), positions["shared"])
    clean, broken = (heads(x).detach().requires_grad_() for _ in range(2))
    wanted = encode(clean)
    weights = torch.linspace(-1, 1, wanted.numel()).view_as(wanted)
    wanted_gradient = torch.autograd.grad(wanted, clean, weights)[0]
    with torch.no_grad():
        broken[0, 1, 4] = float("nan")
    weights[1, 0, 3] = float("inf")
    found = encode(broken)
    gradient = torch.autograd.grad(found, broken, weights)[0]
    others = torch.ones(broken.shape[:3], dtype=torch.bool)
    others[0, 1, 4] = False
    assert torch.equal(found[others], wanted[others])
    others[1, 0, 3] = False
    assert torch.equal(gradient[others], wanted_gradient[others])


@pytest.mark.parametrize("name", ["rope", "lrpe-type2", "lrpe-type4"])
@pytest.mark.parametrize("form", ["native"], indirect=True)
def test_rows_that_overlap_in_memory_have_their_own_gradients(name):
    encoding, (_, positions) = built(name), example(3)
    rows = torch.randn(2, HEADS, 40).unfold(-1, 16, 1)[:, :, :3]
    encode = one_pass(encoding, rows, positions["shared"])
    found = []
    for x in (rows, rows.contiguous()):
        x = x.detach().requires_grad_()
        out = encode(x)
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        found.append([out, *torch.autograd.grad(out, x, weights)])
    torch.testing.assert_close(*found)


def assert_one_pass_is_the_encoding(name, time, kind, width=16, phi=True, far=0):
    """In outputs and in gradients of q, of k and of what is learned."""
    encoding, given = built(name, width), [example(length, width) for length in (time, time + 3)]
    xs = [x.requires_grad_() for x, _ in given]
    at = [positions[kind] + far for _, positions in given]
    found = dispatch.encode_both(*map(heads, xs), encoding.transform(phi), *at)
    exact, wide = copy.deepcopy(encoding).double(), [x.detach().double() for x in xs]
    maps = {False: lambda x: x, True: encode.feature_map}
    with mock.patch.object(encode_cpu, "serves", return_value=False):
        features = [maps[phi](heads(x.requires_grad_())) for x in wide]
        expected = exact(*features, *at)
    assert_near(found, expected, 1e-6, least=1.0)
    both = gradients(found, encoding, *xs), gradients(expected, exact, *wide)
    assert_near(*both, 1e-5, least=1.0)


@pytest.mark.parametrize("name", ["rope", "lrpe-type3", "rope-2d-mixed", "fope", "permuteformer"])
def test_one_tensor_alone_is_encoded_like_the_keys_of_both(name):
    encoding, (x, positions) = built(name), example(45)
    x = x.requires_grad_()
    results = []
    for kind in ("shared", "own"):
        at = positions[kind]
        both = encoding.encode_both(heads(x), heads(x), at, at, phi=False)[1]
        one = encoding.encode_one(heads(x), at)
        results.append([gradients([y], encoding, x) for y in (one, both)])
        assert torch.equal(one, both)
    for one, both in results:
        torch.testing.assert_close(one, both, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_once(dtype, form):
    encoding, (x, positions) = built("lrpe-type2"), example(40, dtype=dtype)
    if form != "fused":
        assert one_pass(encoding, heads(x), positions["shared"]) is None
        return
    exact = by_definition(encoding, heads(x.float()), positions["shared"])
    found = one_pass(encoding, heads(x), positions["shared"])(heads(x))
    assert found.dtype == dtype
    torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_what_no_kernel_serves_is_left_to_the_encoding(form):
    served = SERVED + NATIVE if form == "native" else SERVED
    x, positions = example(8)
    at = positions["shared"]
    for name in ENCODINGS:
        encoding = build_encoding(name, 16, HEADS, causal=True).to(DEVICE)
        if isinstance(encoding, QueryKeyEncoding) and not encoding.has_states:
            found = one_pass(encoding, heads(x), at)
            assert (found is not None) == (name in served), name
    odd, _ = example(8, width=15)
    assert one_pass(build_encoding("rope", 15, HEADS), heads(odd), at) is None
    assert QueryKeyEncoding.transform(encoding, True) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("time", [1, 45])
@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_the_feature_map_alone_in_one_pass(time, dtype):
    x = example(time, dtype=dtype)[0].requires_grad_()
    exact = x.detach().double().requires_grad_()
    found, wanted = feature_map(heads(x)), encode.feature_map(heads(exact))
    assert type(found.grad_fn).__name__ == "_EncodedBackward"
    weights = torch.linspace(-1, 1, wanted.numel(), device=DEVICE).view_as(wanted).to(dtype)
    grads = [torch.autograd.grad(y, z, weights.to(y))[0] for y, z in ((found, x), (wanted, exact))]
    for a, b in ((found, wanted), grads):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_the_feature_map_alone_has_second_derivatives(form):
    x = example(3)[0].requires_grad_()
    seconds = []
    for phi in (feature_map, encode.feature_map):
        (first,) = torch.autograd.grad(phi(heads(x)).square().sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*seconds)


@pytest.mark.parametrize(("name", "phi"), [("lrpe-type3", True), ("rope", False)])
@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_the_encoding_has_second_derivatives(name, phi):
    """Also where x is linear and not saved."""
    encoding, (x, positions) = built(name), example(3)
    x.requires_grad_()
    leaves, seconds = [x, *encoding.parameters()], []
    maps = {False: lambda x: x, True: encode.feature_map}
    fused = one_pass(encoding, heads(x), positions["own"], phi)
    for by in (fused, lambda x: by_definition(encoding, x, positions["own"], maps[phi])):
        out = by(heads(x)).pow(3).sum()
        grads = torch.autograd.grad(out, leaves, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    torch.testing.assert_close(*seconds, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["lrpe-type2", "lrpe-type5", "lrpe-tmlr-type1"])
@pytest.mark.parametrize("normalizer", ["rotated", "content"])
def test_linear_attention_is_the_same_with_and_without_it(name, normalizer, monkeypatch):
    torch.manual_seed(0)
    options = {"attention_type": "linear", "position_encoding": name, "causal": False}
    module = MultiheadAttention(32, 2, normalizer=normalizer, **options).to(DEVICE)
    x = torch.randn(2, 9, 32, device=DEVICE)
    padding = torch.zeros(2, 9, dtype=torch.bool, device=DEVICE)
    padding[0, :4] = True
    in_one_pass, _ = module.attend(x, padding)
    monkeypatch.setattr(loader, "triton_kernels", lambda name: None)
    monkeypatch.setattr(encode_cpu, "serves", lambda *_: False)
    step_by_step, _ = module.attend(x, padding)
    torch.testing.assert_close(in_one_pass, step_by_step, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "kept"), [("rope", False), ("lrpe-type2", True)])
@pytest.mark.parametrize("form", ["native"], indirect=True)
def test_a_fixed_rotation_keeps_nothing_of_x(name, kept, form):
    x, positions = example(40)
    encoding, x = built(name), heads(x.requires_grad_())
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel()) or t, lambda t: t
    ):
        plane = (x,)
        q, k = encoding.turn(plane, plane, positions["shared"], positions["shared"])
    assert (x.numel() in sizes) == kept
    exact = [y.double() for y in plane]
    wanted = encoding.turn(exact, exact, positions["shared"], positions["shared"])[0]
    assert_near([q], [wanted], 1e-6, least=1.0)
    weights = torch.linspace(-1, 1, q.numel()).view_as(q)
    found, expected = (torch.autograd.grad(y, x, weights.to(y))[0] for y in (k, wanted))
    assert found.stride() == x.stride()
    assert_near([found], [expected], 1e-5, least=1.0)
