"""Checks of the Triton kernels for ``scripts/doctor.sh --kernels``: every family, on this card.

A check computes a call by what attention chooses, forward and backward, and by its definition in
float64 on the CPU, and times it beside PyTorch. Each runs in a process of its own, because a
wrong kernel may end the process, or never end; they compile at once and are timed in turn. Without
a GPU the kernels run in Triton's interpreter, in float16, on calls of a few tokens.

Axes: B batch, H heads, T time, D width.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lrpe_fairseq.attention.linear import linear_attention, linear_attention_naive
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.kernels import dispatch, loader, proof
from lrpe_fairseq.kernels.encode.encode import feature_map
from lrpe_fairseq.kernels.flash import flash

SECONDS = {True: 120, False: 900}
"""Time limit of a check with a GPU (True), and in the interpreter."""
AT_ONCE = 14
"""Checks that run at once: half of them, because each needs memory for a context on the GPU."""
ROUNDS = 5
WIDTH, SLOW_WIDTH = 64, 16


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call."""

    batch: int
    heads: int
    time: int
    width: int


SMALL = {True: Sizes(2, 2, 300, WIDTH), False: Sizes(2, 2, 9, SLOW_WIDTH)}
"""Of the call that is compared, with a GPU (True) and in the interpreter."""
LARGE = Sizes(8, 8, 1024, WIDTH)
"""Of the call that is timed, with a GPU."""

Leaves = dict[str, Tensor]
Compute = Callable[[Leaves], Tensor]


@dataclass(frozen=True)
class Call:
    """What learns, the call as attention computes it, and its definition.

    ``definition`` takes leaves in float64 on the CPU; ``pytorch`` those of the call.
    """

    leaves: Leaves
    attention: Compute
    definition: Compute
    pytorch: Compute


# --- calls ---------------------------------------------------------------------------------------


def _rows(sizes: Sizes, dtype: torch.dtype, device: str, positive: bool = False) -> Leaves:
    """Return q, k and v (B, H, T, D); a token's heads lie together, as in layers."""
    generator = torch.Generator().manual_seed(0)
    shape = 3, sizes.batch, sizes.time, sizes.heads, sizes.width
    x = torch.randn(shape, generator=generator)
    x[:2] = x[:2].abs() if positive else x[:2]
    rows = x.to(device, dtype).transpose(2, 3).unbind()
    return {name: row.detach().requires_grad_() for name, row in zip("qkv", rows, strict=True)}


def _gates(sizes: Sizes, device: str) -> Tensor:
    """Return log gates (B, H, T), float32."""
    generator = torch.Generator().manual_seed(1)
    shape = sizes.batch, sizes.heads, sizes.time
    return (-torch.rand(shape, generator=generator) / 8).to(device)


def _linear(sizes: Sizes, dtype: torch.dtype, device: str, **form: Any) -> Call:
    """Return a call of linear attention. form: causal, normalizer, decay ("head", "token")."""
    leaves = _rows(sizes, dtype, device, positive=True)
    decay, options = form.pop("decay", None), {"normalizer": "rotated", **form}
    fixed = -torch.arange(1, sizes.heads + 1).float() / 16 if decay == "head" else None
    if decay == "token":
        leaves["log_decay"] = _gates(sizes, device).requires_grad_()

    def compute(attention: Callable[..., Tensor], given: Leaves) -> Tensor:
        q, k, v, *gates = given.values()
        log_decay = gates[0] if gates else fixed
        if log_decay is not None:
            log_decay = log_decay.to(q.device)
        return attention(q, k, v, log_decay=log_decay, **options)

    ours = partial(compute, linear_attention)
    return Call(leaves, ours, partial(compute, linear_attention_naive), ours)


def _encode(sizes: Sizes, dtype: torch.dtype, device: str, name: str) -> Call:
    """Return Lambda P phi of q and k by an encoding."""
    encoding = build_encoding(name, sizes.width, sizes.heads)
    rows = _rows(sizes, dtype, device)
    leaves = {x: rows[x] for x in "qk"}
    learned = {n: p for n, p in encoding.named_parameters() if p.requires_grad}
    leaves |= {n: p.detach().to(device).requires_grad_() for n, p in learned.items()}

    def compute(by: str, given: Leaves) -> Tensor:
        q, k, *parameters = given.values()
        at = torch.arange(sizes.time, device=q.device)
        module = _Encodes(encoding.to(q.device), by)
        named = zip((f"encoding.{n}" for n in learned), parameters, strict=True)
        return torch.func.functional_call(module, dict(named), (q, k, at))

    definition = partial(compute, "definition")
    return Call(leaves, partial(compute, "kernel"), definition, definition)


class _Encodes(nn.Module):
    """An encoding as a function of q, k and positions."""

    def __init__(self, encoding: nn.Module, by: str) -> None:
        super().__init__()
        self.encoding, self.by = encoding, by

    def forward(self, q: Tensor, k: Tensor, at: Tensor) -> Tensor:
        """Return the features of q and of k, one after the other."""
        if self.by == "kernel":
            return torch.cat(self.encoding.encode_both(q, k, at, at, phi=True))
        return torch.cat(self.encoding.in_parts(feature_map(q), feature_map(k), at, at))


def _softmax(sizes: Sizes, dtype: torch.dtype, device: str, *terms: str, **form: Any) -> Call:
    """Return a call of softmax attention with terms, or with ``stick`` of stick-breaking."""
    leaves = _rows(sizes, dtype, device)
    options = {"scale": sizes.width**-0.5, **form}
    sticks = options.pop("stick", False)
    if not sticks:
        options |= {"causal": True, "first_lag": 0}
    made = dict(_terms(sizes, dtype, device, terms))
    leaves |= {name: made.pop(name) for name in ("table", "gates", "by_query") if name in made}
    if options.get("dropout"):
        made["seed"] = torch.tensor([5])

    def compute(attention: Callable[..., Tensor | None], given: Leaves) -> Tensor:
        rest = {name: x for name, x in given.items() if name not in "qkv"}
        if "gates" in rest:
            rest["gates"] = (rest["gates"].double().cumsum(2),) * 2
        for name, x in made.items():
            to = given["q"].device
            rest[name] = tuple(y.to(to) for y in x) if isinstance(x, tuple) else x.to(to)
        return attention(given["q"], given["k"], given["v"], **rest, **options)

    definition = partial(compute, _sticks if sticks else flash.definition)
    run = dispatch.stick_attention if sticks else dispatch.flash_attention

    def attention(given: Leaves) -> Tensor:
        out = compute(run, given)
        return definition(given) if out is None else out

    return Call(leaves, attention, definition, definition)


def _terms(
    sizes: Sizes, dtype: torch.dtype, device: str, names: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    """Yield terms and masks of softmax attention by the names of its arguments."""
    generator = torch.Generator().manual_seed(2)
    batch, heads, length = sizes.batch, sizes.heads, sizes.time
    if "table" in names:
        table = torch.randn(heads, length, generator=generator).to(device)
        yield "table", table.requires_grad_()
    if "decay" in names:
        yield "decay", -torch.arange(1, heads + 1).float() / 16
    if "gates" in names:
        yield "gates", _gates(sizes, device).requires_grad_()
    if "by token" in names:
        own = torch.randn(batch, heads, length, length, generator=generator)
        yield "by_query", own.to(device, dtype).requires_grad_()
    if "padding" in names:
        yield "padding", torch.arange(length).ge(length - length // 4).expand(batch, -1)
    if "documents" in names:
        number = (torch.arange(length) // max(2, length // 3)).int().expand(batch, -1)
        yield "segments", (number, number)


def _sticks(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **_: Any) -> Tensor:
    """Compute stick-breaking attention with all weights in memory."""
    weigh = build_encoding("stick-breaking", q.shape[3], q.shape[1], causal=True).weigh
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = weigh(q.to(wide) @ k.to(wide).mT * scale, seen, wide)
    return weights.to(v.dtype) @ v


def _layer(sizes: Sizes, dtype: torch.dtype, device: str, attention: str) -> Call:
    """Return a layer of PaTH, in float32: it has no kernel of its own."""
    del dtype
    torch.manual_seed(0)
    width = sizes.heads * sizes.width
    choices = {"attention_type": attention, "position_encoding": "path"}
    if attention == "linear":
        choices["normalizer"] = "none"
    layer = MultiheadAttention(width, sizes.heads, causal=True, **choices).eval()
    x = torch.randn(sizes.batch, sizes.time, width).to(device)
    leaves = {"x": x.requires_grad_()}
    leaves |= {n: p.detach().to(device).requires_grad_() for n, p in layer.named_parameters()}

    def compute(given: Leaves) -> Tensor:
        x, *parameters = given.values()
        layer.to(x.device, x.dtype)
        names = [f"layer.{name}" for name, _ in layer.named_parameters()]
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(_Attends(layer), named, (x,))

    return Call(leaves, compute, compute, compute)


class _Attends(nn.Module):
    """A layer as a function of batch-first tensors."""

    def __init__(self, layer: MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        return self.layer.attend(x)[0]


ENCODINGS = (
    "rope",
    "rope-2d-mixed",
    "cosformer",
    "fope",
    "lrpe-type1",
    "lrpe-type3",
    "lrpe-type4",
    "lrpe-type5",
    "lrpe-type7",
    "lrpe-tmlr-type1",
    "permuteformer",
)
CHECKS: dict[str, Callable[..., Call]] = {
    "linear, causal": partial(_linear, causal=True),
    "linear, full": partial(_linear, causal=False),
    "linear, gates": partial(_linear, causal=True, decay="token"),
    "linear, decay": partial(_linear, causal=True, decay="head"),
    "linear, sums": partial(_linear, causal=True, normalizer="none"),
    **{f"encode {name}": partial(_encode, name=name) for name in ENCODINGS},
    "softmax, table": lambda *at: _softmax(*at, "table"),
    "softmax, decay": lambda *at: _softmax(*at, "decay"),
    "softmax, gates": lambda *at: _softmax(*at, "gates"),
    "softmax, padding": lambda *at: _softmax(*at, "padding"),
    "softmax, dropout": lambda *at: _softmax(*at, dropout=0.1),
    "softmax, window": lambda *at: _softmax(*at, window=max(4, at[0].time // 4)),
    "softmax, documents": lambda *at: _softmax(*at, "documents"),
    "softmax, by token": lambda *at: _softmax(*at, "by token"),
    "stick-breaking": lambda *at: _softmax(*at, stick=True),
    "linear, path": partial(_layer, attention="linear"),
    "softmax, path": partial(_layer, attention="softmax"),
}
PATHS = ("linear, path", "softmax, path")
"""Checks of layers whose parts PyTorch may compute."""


# --- one check -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What a check has found; without times until it is timed, and in the interpreter.

    ``errors``: by result, relative to its largest number.
    """

    served: str
    errors: dict[str, float]
    bound: float
    milliseconds: float | None = None
    pytorch: float | None = None
    reason: str = ""

    @property
    def passed(self) -> bool:
        """True if every number is right and no kernel was given up."""
        return not self.reason and all(error <= self.bound for error in self.errors.values())


def find(name: str) -> Finding:
    """Compute one check in this process."""
    on_gpu = torch.cuda.is_available()
    loader.SERVED.clear()
    if not on_gpu:
        loader.interpret()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float16)
    call = CHECKS[name](SMALL[on_gpu], dtype, device)
    found = _results(call.attention, call.leaves)
    exact = {x: y.detach().cpu().double().requires_grad_() for x, y in call.leaves.items()}
    wanted = _results(call.definition, exact, found["output"].dtype)
    errors = {x: proof.relative_error(found[x], y) for x, y in wanted.items()}
    served, reason = _served()
    if not reason and served != "triton" and name not in PATHS:
        reason = "no Triton kernel serves this call, so nothing was checked"
    return Finding(served, errors, proof.BOUNDS[found["output"].dtype], reason=reason)


def times(name: str) -> tuple[float, float]:
    """Return the milliseconds of a check's large call, and those of PyTorch, on a GPU."""
    call = CHECKS[name](LARGE, torch.bfloat16, "cuda")
    ours = _milliseconds(call.attention, call.leaves)
    with mock.patch.object(loader, "triton_kernels", return_value=None):
        return ours, _milliseconds(call.pytorch, call.leaves)


def _served() -> tuple[str, str]:
    """Return what computed the call, and why its kernels were given up."""
    given_up = [x for what, x in loader.SERVED.items() if what.startswith("kernel of ")]
    if given_up:
        return "definition", given_up[0][0]
    logged = [x for what, x in loader.SERVED.items() if " attention" in what]
    if logged:
        return logged[0][0].split(" on ")[0], ""
    return "triton" if any(proof.proved().values()) else "pytorch", ""


def _results(
    compute: Compute, leaves: Leaves, rounded: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the output and the gradient of every leaf, by name."""
    out = compute(leaves)
    weights = proof.weights(out)
    weights = weights if rounded is None else weights.to(rounded).to(out)
    grads = torch.autograd.grad(out, list(leaves.values()), weights, allow_unused=True)
    found = {f"gradient of {x}": y for x, y in zip(leaves, grads, strict=True) if y is not None}
    return {"output": out.detach(), **found}


def _milliseconds(compute: Compute, leaves: Leaves) -> float:
    """Return the median time of a forward and backward pass."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        _results(compute, leaves)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


# --- all checks ----------------------------------------------------------------------------------


def why_not() -> str:
    """Return what the checks lack here, in one sentence; "" if nothing."""
    if not loader.kernels_enabled():
        return f"{loader.VARIABLE}=0 switches the kernels off: unset it"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if torch.cuda.is_available():
        return loader.why_unsupported()
    return ""


def findings() -> Iterator[tuple[str, Finding | str]]:
    """Yield every check's name, and what it found, or why it found nothing.

    As many as there are cores, at most :data:`AT_ONCE`, compile and compare at once; then each is
    timed alone.
    """
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before a child imports triton
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    names, count = list(CHECKS), min(AT_ONCE, len(os.sched_getaffinity(0)))
    for first in range(0, len(names), count):
        yield from _side_by_side(context, names[first : first + count], SECONDS[on_gpu])


def _side_by_side(
    context: Any, names: Sequence[str], seconds: int
) -> Iterator[tuple[str, Finding | str]]:
    """Yield what checks find that compute at once, each in a process of its own."""
    checks = [_Check(context, name, seconds) for name in names]
    try:
        found = [check.result() for check in checks]
        for check, result in zip(checks, found, strict=True):
            if isinstance(result, str):
                check.end()  # a kernel that never ends would slow the others' times
        for check, result in zip(checks, found, strict=True):
            timed = isinstance(result, Finding) and torch.cuda.is_available()
            yield check.name, check.times(result) if timed else result
            check.end()  # its memory is needed by the next one
    finally:
        for check in checks:
            check.end()


class _Check:
    """A process that computes a check, then waits to be asked for its times."""

    def __init__(self, context: Any, name: str, seconds: int) -> None:
        """seconds: the time limit, of the comparison and of the times."""
        self.name, self._seconds = name, seconds
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(name, theirs))
        self._process.start()
        theirs.close()
        self._end = time.monotonic() + seconds

    def result(self) -> Any:
        """Return what the process sends next, or in a sentence why it sends nothing."""
        try:
            if not self._ours.poll(max(0, self._end - time.monotonic())):
                return f"no result after {self._seconds} s"
            return self._ours.recv()
        except EOFError:
            self._process.join()
            return f"its process ended with status {self._process.exitcode}"

    def times(self, found: Finding) -> Finding | str:
        """Return ``found`` with the times, or in a sentence why there are none."""
        self._end = time.monotonic() + self._seconds
        with contextlib.suppress(OSError):  # a process that has ended is reported below
            self._ours.send("time")
        measured = self.result()
        if isinstance(measured, str):
            return measured
        return replace(found, milliseconds=measured[0], pytorch=measured[1])

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _serve(name: str, connection: Connection) -> None:
    """Send what a check finds, and its times when they are asked for."""
    for compute in (find, times):
        try:
            connection.send(compute(name))
        except Exception as error:  # whatever a broken kernel leads to
            lines = str(error).strip().splitlines() or [""]
            connection.send(f"{type(error).__name__}: {lines[0]}")
            return
        with contextlib.suppress(EOFError):
            connection.recv()
