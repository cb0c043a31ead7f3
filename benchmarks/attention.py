"""Linear attention against the naive form and SDPA: forward and backward, causal and not."""

from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import Timing, contest
from lrpe_fairseq.attention.linear import linear_attention, linear_attention_naive
from lrpe_fairseq.kernels import loader, triton_calls
from lrpe_fairseq.kernels.linear import causal_cpu

HEADS, WIDTH = 8, 64
TOKENS = {"cpu": 2**12, "cuda": 2**18}  # per batch, unless one sequence is longer
LENGTHS = (512, 8192)
BIDIRECTIONAL_LENGTHS = (128, 512, 2048, 8192)


def measure(device: str, dtype: torch.dtype, rounds: int) -> list[dict]:
    """Return rows of {length, tokens, contestant, seconds, spread, tokens_per_second, speed_up}.

    ``speed_up``: speed of our linear attention over the row's contestant, in the same rounds.
    Ours is the kernel if available (C++ on a CPU, Triton on a GPU), else the PyTorch definition.
    """
    forms = causal_forms(device)
    best, rows = ("kernel" if "kernel" in forms else "chunked"), []
    for length in LENGTHS:
        able = {n: form for n, form in forms.items() if n != "naive" or fits(device, length)}
        tokens = tokens_of(device, length)
        timings = _contest(able, length, tokens, device, dtype, rounds)
        rows += [row(length, tokens, name, timings, best) for name in timings]
    return rows


def causal_forms(device: str) -> dict[str, Callable]:
    """Return the contestants, including our kernel if the device has one."""
    forms = {"chunked": chunked, "naive": naive, "sdpa": sdpa}
    if has_kernel(device):
        forms["kernel"] = ours
    return forms


def has_kernel(device: str) -> bool:
    """True if causal linear attention has a kernel for the device."""
    found = causal_cpu.library() if device == "cpu" else loader.triton_kernels(triton_calls.CAUSAL)
    return found is not None


def tokens_of(device: str, length: int) -> int:
    """Return the number of tokens of a batch of sequences of this length."""
    return max(TOKENS[device], length)


def fits(device: str, length: int) -> bool:
    """True if the T x T matrices of a batch fit into memory."""
    return device == "cpu" or length <= 1024


def measure_bidirectional(
    device: str, dtype: torch.dtype, rounds: int, lengths: Sequence[int] = BIDIRECTIONAL_LENGTHS
) -> list[dict]:
    """Return rows like :func:`measure` for bidirectional attention, as in RoBERTa."""
    rows = []
    for length in lengths:
        tokens = tokens_of(device, length)
        forms = {"linear": bidirectional, "sdpa": F.scaled_dot_product_attention}
        timings = _contest(forms, length, tokens, device, dtype, rounds)
        rows += [row(length, tokens, name, timings, "linear") for name in timings]
    return rows


def _contest(
    forms: dict[str, Callable],
    length: int,
    tokens: int,
    device: str,
    dtype: torch.dtype,
    rounds: int,
) -> dict[str, Timing]:
    steps = {name: step(form, length, tokens, device, dtype) for name, form in forms.items()}
    return contest(steps, rounds if length < 4096 else max(3, rounds // 2), settle=steps)


def check(device: str = "cpu") -> None:
    """Raise AssertionError unless all contestants compute the same result."""
    exact = torch.rand(3, 1, 2, 300, 16, dtype=torch.float64)
    for form, definition in ((chunked, naive), (ours, naive), (bidirectional, naive_bidirectional)):
        _agree(form, exact, definition, exact, tolerance=1e-9)
    if has_kernel(device):
        given = torch.rand(3, 2, 2, 300, 64, device=device)
        _agree(ours, given, naive, given.double(), tolerance=1e-4)


def _agree(fast: Callable, given: Tensor, slow: Callable, exact: Tensor, tolerance: float) -> None:
    """Compare outputs and gradients; ``given`` stacks q, k and v."""
    results = []
    for form, stacked in ((fast, given), (slow, exact)):
        inputs = [x.clone().requires_grad_() for x in stacked]
        out = form(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our causal linear attention in PyTorch (chunked)."""
    nowhere = mock.patch.object(causal_cpu, "serves", return_value=False)
    with nowhere, mock.patch.object(loader, "triton_kernels", return_value=None):
        return linear_attention(q, k, v, causal=True)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our causal linear attention, with the kernel for the device if available."""
    return linear_attention(q, k, v, causal=True)


def bidirectional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our bidirectional linear attention."""
    return linear_attention(q, k, v, causal=False)


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal linear attention through the T x T matrix, as in the authors' code."""
    return linear_attention_naive(q, k, v, causal=True)


def naive_bidirectional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition of bidirectional linear attention."""
    return linear_attention_naive(q, k, v, causal=False)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's causal softmax attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def step(
    form: Callable, length: int, tokens: int, device: str, dtype: torch.dtype
) -> Callable[[], None]:
    """One forward and backward pass on ``tokens`` tokens in sequences of ``length``."""
    shape = (tokens // length, HEADS, length, WIDTH)
    inputs = [torch.rand(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
    grad = torch.randn(shape, device=device, dtype=dtype)

    def run() -> None:
        torch.autograd.grad(form(*inputs), inputs, grad)

    return run


def row(length: int, tokens: int, name: str, timings: dict[str, Timing], against: str) -> dict:
    """Return one contestant's measurements, with the speed-up of ``against`` over it."""
    timing = timings[name]
    return {
        "length": length,
        "tokens": tokens,
        "contestant": name,
        "seconds": timing.median,
        "spread": timing.spread,
        "tokens_per_second": tokens / timing.median,
        "speed_up": timing.ratio(timings[against]),
    }
