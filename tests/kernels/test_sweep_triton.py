"""Linear attention with states in registers, against the T x T matrix in float64.

Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1, see tests/conftest.py).
"""

import pytest
import torch

from lrpe_fairseq.attention.linear import EPS

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

from lrpe_fairseq.kernels import full_triton, sweep_triton
from tests import triton_probe
from tests.pairwise import pairwise

pytestmark = pytest.mark.skipif(bool(triton_probe.why_not()), reason=triton_probe.why_not())

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS = 2, 2
BOUND = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}
"""Largest error of outputs and gradients, relative to the largest reference (at least 0.02)."""


SHAPES = [(1, 32, 32), (17, 24, 16), (70, 64, 64), (50, 128, 64), (33, 20, 48), (20, 192, 64)]
"""Time, key width and value width."""


def definition(q, k, v, wanted, log_decay, eps, segments=None):
    """The T x T matrix. A decay of 0 or less than e^-1000 is the same."""
    scores = q @ k.mT
    if log_decay is not None:
        rate = log_decay if log_decay.dim() == 3 else log_decay[None, :, None].expand(q.shape[:3])
        total = rate.clamp_min(-1e3).cumsum(-1)
        scores = scores * (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp()
    if segments is not None:
        run = (segments[:, 1:] != segments[:, :-1]).cumsum(-1)
        run = torch.nn.functional.pad(run, (1, 0))
        scores = scores * (run[:, None, :, None] == run[:, None, None, :])
    scores = scores.tril()
    out, denominator = scores @ v, scores.sum(-1)
    if wanted == "normalized":
        out = out / denominator.clamp_min(eps).unsqueeze(-1)
    return out, denominator if wanted == "sums" else None


def decay_of(kind, time):
    """Gates may be open, weak, strong and shut."""
    if kind == "head":
        return -torch.tensor([0.0, 0.3])
    gates = -0.1 * torch.rand(BATCH, HEADS, time)
    gates[..., 3::17], gates[..., 5::23], gates[..., 7::41] = 0.0, -1e4, -30.0
    gates[:, 1, ::29] = -torch.inf
    return gates if kind == "token" else None


def example(time, keys, values, dtype, decay=None, documents=False):
    """q and k positive, all views of (B, T, H, .); the decay; the numbers of the documents."""
    torch.manual_seed(time)
    widths = (keys, keys, values)
    q, k, v = (torch.randn(BATCH, time, HEADS, w).transpose(1, 2) for w in widths)
    q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    segments = None
    if documents:
        segments = (torch.rand(BATCH, time) < 0.1).cumsum(-1).remainder(3).int().to(DEVICE)
    rate = decay_of(decay, time)
    leaves = [x.to(dtype) for x in (q, k, v)] + ([] if rate is None else [rate])
    return [x.to(DEVICE) for x in leaves], segments


def results(form, leaves, wanted, segments, dtype=None):
    """Return the results and the gradients of a weighted sum of their elements."""
    own = [x.detach().to(dtype or x.dtype).requires_grad_() for x in leaves]
    q, k, v, *rest = own
    found = form(q, k, v, wanted, rest[0] if rest else None, EPS, segments)
    found = [x for x in found if x is not None]
    torch.manual_seed(0)
    weights = [torch.randn(x.shape).to(leaves[0].dtype).to(x) for x in found]
    return [*found, *torch.autograd.grad(found, own, weights)]


def errors(leaves, wanted, segments, form=sweep_triton.causal_sums, reference=definition):
    """The error of every result and gradient, relative to the largest number."""
    found = results(form, leaves, wanted, segments)
    exact = results(reference, leaves, wanted, segments, torch.float64)
    pairs = list(zip(found, exact, strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    return [((a.double() - b).abs().max() / b.abs().max().clamp_min(0.02)).item() for a, b in pairs]


FACTORS = (SHAPES, ["normalized", "sums", "numerator"], [None, "head", "token"], [False, True],
           [1, 1000], list(BOUND))  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "wanted", "decay", "documents", "programs", "dtype"), pairwise(*FACTORS)
)
def test_outputs_and_gradients_equal_the_definition(
    shape, wanted, decay, documents, programs, dtype, monkeypatch
):
    """In one part and in many."""
    monkeypatch.setattr(sweep_triton, "PROGRAMS", programs)
    leaves, segments = example(*shape, dtype, decay, documents)
    found = errors(leaves, wanted, segments)
    assert max(found) <= BOUND[dtype]


def full_definition(q, k, v, wanted, log_decay, eps, segments):
    scores = q @ k.mT
    out, denominator = scores @ v, scores.sum(-1)
    if wanted == "normalized":
        out = out / denominator.clamp_min(eps).unsqueeze(-1)
    return out, denominator if wanted == "sums" else None


def full_sums(q, k, v, wanted, log_decay, eps, segments):
    return full_triton.full_sums(q, k, v, wanted, eps)


@pytest.mark.parametrize(
    ("shape", "wanted", "keys", "programs", "dtype"),
    pairwise([*SHAPES[:4], (33, 128, 128)], FACTORS[1], [None, 7, 90], [1, 1000], list(BOUND)),
)
def test_sums_over_all_keys_equal_the_definition(shape, wanted, keys, programs, dtype, monkeypatch):
    monkeypatch.setattr(full_triton, "PROGRAMS", programs)
    leaves, _ = example(*shape, dtype)
    if keys is not None:
        leaves[1:] = example(keys, *shape[1:], dtype)[0][1:]
    found = errors(leaves, wanted, None, full_sums, full_definition)
    assert max(found) <= BOUND[dtype]
