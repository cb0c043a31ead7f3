"""Causal linear attention without a decay, with a constant one and with one per token."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.attention import HEADS, WIDTH
from benchmarks.timing import contest
from lrpe_fairseq.attention.linear import linear_attention, linear_attention_naive

LENGTHS = tuple(2**n for n in range(9, 17))
TOKENS = 2**16  # per batch
KINDS = ("none", "constant", "per token")


def measure(
    device: str,
    dtype: torch.dtype,
    rounds: int,
    lengths: Sequence[int] = LENGTHS,
    tokens: int = TOKENS,
) -> list[dict]:
    """Return rows of {length, tokens, decay, seconds_per_token, spread, speed, flatness}.

    A step is a forward and a backward pass on ``tokens`` tokens in sequences of ``length``; the
    gradient of a decay per token is part of it. ``speed``: over that without a decay at the same
    length. ``flatness``: time per token over that at the first length. All ratios are taken within
    a round.
    """
    data = _data(tokens, device, dtype)
    steps = {(n, kind): step(kind, n, *data) for n in lengths for kind in KINDS}
    timings = contest(steps, rounds, settle=steps)
    return [
        {
            "length": n,
            "tokens": tokens,
            "decay": kind,
            "seconds_per_token": timing.median / tokens,
            "spread": timing.spread,
            "speed": timings[n, "none"].ratio(timing),
            "flatness": timing.ratio(timings[lengths[0], kind]),
        }
        for (n, kind), timing in timings.items()
    ]


def step(kind: str, length: int, rows: Tensor, gates: Tensor) -> Callable[[], None]:
    """One forward and backward pass; q, k, v and the gradient are ``rows``, cut by length."""
    shape = (-1, HEADS, length)
    q, k, v, grad = (x.view(*shape, WIDTH) for x in rows)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    log_decay = {"none": None, "constant": gates[:HEADS]}.get(kind, gates.view(shape))
    if kind == "per token":
        inputs.append(log_decay.requires_grad_())

    def run() -> None:
        out = linear_attention(q, k, v, causal=True, log_decay=log_decay)
        torch.autograd.grad(out, inputs, grad)

    return run


def check(device: str = "cpu") -> None:
    """Raise AssertionError unless every kind gives the outputs and gradients of the definition."""
    rows = torch.rand(3, 2, 2, 300, WIDTH, device=device)
    for log_decay in (-torch.rand(2, device=device), -torch.rand(2, 2, 300, device=device)):
        results = []
        for form, dtype in ((linear_attention, rows.dtype), (linear_attention_naive, torch.double)):
            given = [x.to(dtype).requires_grad_() for x in rows]
            gates = log_decay.to(dtype)
            leaves = given if gates.dim() == 1 else [*given, gates.requires_grad_()]
            out = form(*given, causal=True, log_decay=gates)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def _data(tokens: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return memory for q, k, v and a gradient, and logarithms of gates between e^-1 and 1."""
    rows = torch.rand(4, tokens * HEADS * WIDTH, device=device, dtype=dtype)
    return rows, -torch.rand(tokens * HEADS, device=device)
