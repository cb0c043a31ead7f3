"""Linear attention against the naive form and SDPA, forward and backward, causal and not."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import Timing, contest
from lrpe_fairseq.attention.linear import linear_attention, linear_attention_naive

HEADS, WIDTH = 8, 64
LENGTHS = (512, 8192)
BIDIRECTIONAL_LENGTHS = (128, 512, 2048, 8192)


def measure(device: str, dtype: torch.dtype, rounds: int) -> list[dict]:
    """Rows of {length, tokens, contestant, seconds, spread, tokens_per_second, speed_up}.

    ``speed_up`` of chunked linear attention over the row's contestant, in the same rounds.
    """
    rows = []
    for length in LENGTHS:
        tokens = max(4096, length)
        forms = {"chunked": chunked, "naive": naive, "sdpa": sdpa}
        timings = _contest(forms, length, tokens, device, dtype, rounds)
        rows += [row(length, tokens, name, timings, "chunked") for name in timings]
    return rows


def measure_bidirectional(
    device: str, dtype: torch.dtype, rounds: int, lengths: Sequence[int] = BIDIRECTIONAL_LENGTHS
) -> list[dict]:
    """Rows as of :func:`measure`, of attention to all tokens, as in RoBERTa; by length."""
    rows = []
    for length in lengths:
        tokens = max(4096, length)
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


def check() -> None:
    """Raise AssertionError unless the contestants agree (a speed-up of something else is none)."""
    inputs = [torch.rand(1, 2, 300, 16, dtype=torch.float64).requires_grad_() for _ in range(3)]
    for causal in (True, False):
        results = []
        for form in (linear_attention, linear_attention_naive):
            out = form(*inputs, causal=causal)
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        for fast, slow in zip(*results, strict=True):
            torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our causal linear attention."""
    return linear_attention(q, k, v, causal=True)


def bidirectional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our linear attention to all tokens."""
    return linear_attention(q, k, v, causal=False)


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same through the T x T matrix, as the authors' code does."""
    return linear_attention_naive(q, k, v, causal=True)


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
    """One contestant's figures, with the speed-up of ``against`` over it."""
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
