"""Linear attention against the naive form and SDPA, forward and backward, causal and not."""

import importlib.util
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import Timing, contest
from lrpe_fairseq.attention.linear import KERNELS, linear_attention, linear_attention_naive
from lrpe_fairseq.encodings import kernels

HEADS, WIDTH = 8, 64
TOKENS = {"cpu": 2**12, "cuda": 2**18}  # of a batch, unless one sequence is longer
LENGTHS = (512, 8192)
BIDIRECTIONAL_LENGTHS = (128, 512, 2048, 8192)


def measure(device: str, dtype: torch.dtype, rounds: int) -> list[dict]:
    """Rows of {length, tokens, contestant, seconds, spread, tokens_per_second, speed_up}.

    ``speed_up`` of our linear attention over the row's contestant, in the same rounds: of the
    Triton kernel where it can be used, else of the chunked form.
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
    """Our forms and the others; on a GPU with our kernel and fla's, where they can be used."""
    forms = {"chunked": chunked, "naive": naive, "sdpa": sdpa}
    if device != "cpu" and kernels.load(KERNELS) is not None:
        forms["kernel"] = ours
    if device != "cpu" and importlib.util.find_spec("fla") is not None:
        forms["fla"] = fla
    return forms


def tokens_of(device: str, length: int) -> int:
    """Tokens of a batch of sequences of that length."""
    return max(TOKENS[device], length)


def fits(device: str, length: int) -> bool:
    """Whether the T x T matrices of a batch fit into memory."""
    return device == "cpu" or length <= 1024


def measure_bidirectional(
    device: str, dtype: torch.dtype, rounds: int, lengths: Sequence[int] = BIDIRECTIONAL_LENGTHS
) -> list[dict]:
    """Rows as of :func:`measure`, of attention to all tokens, as in RoBERTa; by length."""
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
    """Raise AssertionError unless the contestants agree (a speed-up of something else is none)."""
    if device != "cpu" and kernels.load(KERNELS) is not None:
        _check_kernel(device)
    inputs = [torch.rand(1, 2, 300, 16, dtype=torch.float64).requires_grad_() for _ in range(3)]
    for causal in (True, False):
        results = []
        for form in (linear_attention, linear_attention_naive):
            out = form(*inputs, causal=causal)
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        for fast, slow in zip(*results, strict=True):
            torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


def _check_kernel(device: str) -> None:
    """The kernel against the naive form in float64, both on the GPU."""
    inputs = [torch.rand(2, 2, 300, 64, device=device).requires_grad_() for _ in range(3)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    results = []
    for form, given in ((ours, inputs), (naive, exact)):
        out = form(*given)
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast.double(), slow, rtol=1e-4, atol=1e-4)


def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our causal linear attention in PyTorch."""
    with mock.patch.object(kernels, "load", return_value=None):
        return linear_attention(q, k, v, causal=True)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our causal linear attention, by the Triton kernel where it can be used."""
    return linear_attention(q, k, v, causal=True)


def fla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The chunked form of flash-linear-attention, whose tensors are (B, T, H, D)."""
    from fla.ops.linear_attn import chunk_linear_attn

    return chunk_linear_attn(q, k, v, scale=1.0)[0]


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
    shape = (tokens // length, *((length, HEADS) if form is fla else (HEADS, length)), WIDTH)
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
