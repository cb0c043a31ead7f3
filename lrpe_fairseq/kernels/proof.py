"""Triton kernels are proved at first use, and the definition serves where a proof fails.

No kernel has been measured on every card and with every release of Triton. So before the first
result of a family of kernels with new compile-time constants is used, :func:`run` computes an
:class:`Example`: a tiny call with the same constants, forward and backward, whose results are
compared with the definition in float64 on the CPU. Texts of other lengths have the same constants,
so the real call uses what the proof has compiled. Where an example fails, and where a later launch
raises an exception, forward or backward, there is one warning, and PyTorch computes such calls from
then on.

- A proof draws no random numbers of torch's generators.
- It runs in a thread of its own, so that no autocast, no hook of saved tensors (checkpointing) and
  no inference mode of the caller reaches it. The thread uses the caller's device and stream. It
  runs backward functions without the engine of autograd, whose thread may be the caller.
- While a CUDA graph is captured there is no proof: what is not proved yet is left to the
  definition, for that call. The same holds while another thread proves the same constants.
- Results are kept by device, so every card is proved.
- Ranks agree on the results; see ``agreement``.
"""

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lrpe_fairseq.kernels import agreement, loader
from lrpe_fairseq.kernels.conditions import is_captured
from lrpe_fairseq.kernels.loader import LaunchError
from lrpe_fairseq.kernels.results import FARTHEST, is_aligned

R = TypeVar("R")
Tensors = dict[str, Tensor | None]

BOUNDS = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Largest error of a proof, relative to the largest number of a result. About three times the
bounds of the tests; what is wrong is wrong by far more."""
LEAST = 0.02
"""What the largest number of a result counts as, at least."""

logger = logging.getLogger(__name__)


class Key(NamedTuple):
    """A family of kernels, a device, and what is compiled in."""

    family: str
    device: torch.device
    constants: tuple[Any, ...]
    aligned: tuple[bool, ...] = ()
    """For the first inputs of the example, if they start at a multiple of 16 bytes: a kernel is
    compiled for that too, see ``loader._key``."""

    @property
    def name(self) -> str:
        """The same for equal constants on all ranks."""
        text = f"{self.family} {self.constants} {self.aligned}"
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def key_of(
    family: str, device: torch.device, constants: tuple[Any, ...], inputs: Iterable[Tensor | None]
) -> Key:
    """Return the key of a call.

    inputs: those that its kernels read where they lie, in the order of the inputs of its example.
        None for one that is not given, or that the call copies.
    """
    return Key(family, device, constants, tuple(map(_starts_aligned, inputs)))


def _starts_aligned(x: Tensor | None) -> bool:
    """True if the kernels read x, or the copy of its rows, from a multiple of 16 bytes on."""
    return x is None or (x.dim() == 4 and _is_copied(x)) or is_aligned(x)


@dataclass(frozen=True)
class Example:
    """A tiny call of an autograd function whose forward and backward launch kernels.

    The arguments of ``function`` are ``inputs`` and then ``rest``. ``definition`` computes the same
    results from inputs in float64 on the CPU; its results are the first ones of ``function``.
    """

    function: type[torch.autograd.Function]
    inputs: Tensors
    rest: tuple[Any, ...]
    definition: Callable[[Tensors], tuple[Tensor, ...]]
    exact: frozenset[str] = field(default_factory=frozenset)
    """Inputs that the definition takes as they are: indices, positions."""

    @property
    def bound(self) -> float:
        """The largest error that rounding explains."""
        return BOUNDS[next(x.dtype for x in self.inputs.values() if x is not None)]


# --- choosing ------------------------------------------------------------------------------------

_known: dict[Key, bool] = {}
_failed_in: dict[Key, int] = {}
"""The backward pass in which the kernels of a key failed; see :func:`_is_recomputed`."""
_reasons: dict[Key, str] = {}
_busy: set[Key] = set()
_warned: set[str] = set()
_lock = threading.Lock()
_local = threading.local()


def run(key: Key, example: Callable[[], Example], kernels: Callable[[], R]) -> R | None:
    """Compute ``kernels()`` if its kernels are proved; None where the definition must serve.

    example: makes an example with the constants of ``key``.
    """
    known = _known.get(key)
    if known is None:
        known = _prove(key, example)
    elif known:
        # what a backward pass recomputes must have the form of the forward pass
        if _backward_pass() == OUTSIDE and _failed_elsewhere(key):
            known = _give_up(key, "it failed on another rank")
    else:
        known = _is_recomputed(key)
    if not known:
        _record(key)
        return None
    before = current()
    _local.key = key
    try:
        return kernels()
    except LaunchError as error:
        _give_up(key, str(error))
        _record(key)
        return None
    finally:
        _local.key = before


def current() -> Key | None:
    """Return the key of the call that this thread computes; its backward pass needs it."""
    return getattr(_local, "key", None)


def backward(key: Key | None, kernels: Callable[[], R], definition: Callable[[], R]) -> R:
    """Compute the gradients of a call in ``kernels``, or by the definition if a launch fails.

    key: see :func:`current`. Nothing is lost by a launch that fails: a call saves its inputs.
    Raises: RuntimeError if the definition fails too, for example for want of memory.
    """
    try:
        return kernels()
    except LaunchError as error:
        if key is None:  # a proof, or a test that calls kernels itself
            raise
        _give_up(key, f"in the backward pass {error}")
        _failed_in.setdefault(key, _backward_pass())
        _record(key)
        try:
            return definition()
        except Exception as second:
            raise RuntimeError(
                f"the Triton kernels of {key.family} failed in the backward pass ({error}), and so "
                f"did their definition ({str(second).splitlines()[0]}): set {loader.VARIABLE}=0, "
                "which switches the kernels off, and start again from the last checkpoint"
            ) from error


OUTSIDE = -1
"""The number of the backward pass where there is none."""


def _backward_pass() -> int:
    """Return the number of the backward pass that this thread computes, or :data:`OUTSIDE`."""
    return torch._C._current_graph_task_id()


def _is_recomputed(key: Key) -> bool:
    """True within the backward pass in which the kernels of ``key`` have failed.

    Activation checkpointing recomputes forward passes there. They were computed by the kernels, and
    by the definition they would save other tensors, which torch refuses.
    """
    return _failed_in.get(key, OUTSIDE) == _backward_pass() != OUTSIDE


def _failed_elsewhere(key: Key) -> bool:
    failures = agreement.failures()
    return bool(failures) and key.name in failures  # the name takes a while


def proved() -> dict[Key, bool]:
    """Return what this process has proved so far, and whether it serves."""
    return dict(_known)


def _prove(key: Key, example: Callable[[], Example]) -> bool:
    """Return the result of a proof, made now; False without one if it cannot be made now."""
    if is_captured(key.device):
        return False
    with _lock:
        if key in _busy:
            return False
        _busy.add(key)
    try:
        start = time.monotonic()
        reason = _in_a_thread(key.device, lambda: _why_wrong(placed(example(), key.aligned)))
        # ranks at the same call need about the same time
        wait = max(1.0, 2 * (time.monotonic() - start))
        passed = agreement.settle(key.name, not reason, wait)
        if not passed:
            return _give_up(key, reason or "it failed on another rank")
        _known[key] = True
        return True
    finally:
        _busy.discard(key)


def _why_wrong(example: Example) -> str:
    """Return what is wrong with the results of an example; "" if nothing is."""
    for name, error in errors(example).items():
        if not error <= example.bound:  # also for nan
            return f"{name} differs from the definition by {error:.2g}"
    return ""


def _in_a_thread(device: torch.device, check: Callable[[], str]) -> str:
    """Return the result of ``check`` in a new thread, or the exception that it raises."""
    on_device, stream = nullcontext(), nullcontext()
    if device.type == "cuda":
        on_device = torch.cuda.device(device)
        stream = torch.cuda.stream(torch.cuda.current_stream(device))
    found = []

    def work() -> None:
        try:
            with on_device, stream:
                found.append(check())
        except Exception as error:  # whatever Triton, its compilers or CUDA raise
            lines = str(error).strip().splitlines() or [""]
            found.append(lines[0] if isinstance(error, LaunchError) else f"{error!r:.300}")

    thread = threading.Thread(target=work, name="lrpe_fairseq-proof")
    thread.start()
    thread.join()
    return found[0]


def _give_up(key: Key, reason: str) -> bool:
    """Let the definition serve from now on, with one warning per family; returns False."""
    _known[key], _reasons[key] = False, reason
    agreement.settle(key.name, False, 0.0)
    level = logging.INFO if key.family in _warned else logging.WARNING
    _warned.add(key.family)
    logger.log(
        level,
        "the Triton kernels of %s are not used on %s (torch %s, Triton %s): %s; PyTorch computes "
        "such calls from now on; %s=0 switches all kernels off, and scripts/doctor.sh --kernels "
        "shows what to report",
        key.family,
        card(key.device),
        torch.__version__,
        triton_version(),
        reason,
        loader.VARIABLE,
    )
    return False


def _record(key: Key) -> None:
    """Record for the run file that the definition serves calls that have a kernel."""
    if key in _reasons:  # not where a proof is yet to be made
        served = f"definition, because {_reasons[key]}"
        loader.log_served(f"kernel of {key.family}", served, key.device.type)


def card(device: torch.device) -> str:
    """Return the name of what runs the kernels on ``device``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else loader.INTERPRETER


def triton_version() -> str:
    """Return the version of Triton."""
    try:
        return version("triton")
    except PackageNotFoundError:  # a build of another name
        return "of another name"


# --- computing -----------------------------------------------------------------------------------


def errors(example: Example) -> dict[str, float]:
    """Return the error of every result and gradient, relative to the largest number of each.

    The backward function is called without autograd's engine, on which a proof inside a backward
    pass would wait for ever.
    """
    found = _by_kernels(example)
    wanted = _by_definition(example, found)
    return {name: relative_error(found[name], x) for name, x in wanted.items()}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest error, relative to the largest number of ``wanted``, on the CPU."""
    if not wanted.numel():
        return 0.0
    is_complex = wanted.is_complex()
    difference = found.detach().cpu().to(torch.complex128 if is_complex else torch.float64) - wanted
    return (difference.abs().max() / wanted.abs().max().clamp_min(LEAST)).item()


def _by_kernels(example: Example) -> dict[str, Tensor]:
    out = example.function.apply(*example.inputs.values(), *example.rest)
    out = (out,) if isinstance(out, Tensor) else out
    found = {f"result {n}": x.detach() for n, x in enumerate(out, 1)}
    node = next((x.grad_fn for x in out if x.grad_fn is not None), None)
    if node is None:
        return found
    with torch.no_grad():
        grads = node.apply(*(weights(x) if x.requires_grad else None for x in out))
    return found | {
        f"the gradient of {name}": grad
        for name, grad in zip(example.inputs, grads, strict=False)
        if grad is not None
    }


def _by_definition(example: Example, found: dict[str, Tensor]) -> dict[str, Tensor]:
    inputs = {name: _exact(name, x, example) for name, x in example.inputs.items()}
    with torch.enable_grad():
        out = example.definition(inputs)
    wanted = {f"result {n}": x.detach() for n, x in enumerate(out, 1)}
    leaves = {name: x for name, x in inputs.items() if x is not None and x.requires_grad}
    if not leaves:
        return wanted
    # rounded as those of the kernels
    given = [weights(x).to(found[name].dtype).to(x) for name, x in wanted.items()]
    grads = torch.autograd.grad(out, list(leaves.values()), given, allow_unused=True)
    return wanted | {
        f"the gradient of {name}": x for name, x in zip(leaves, grads, strict=True) if x is not None
    }


def _exact(name: str, x: Tensor | None, example: Example) -> Tensor | None:
    """Return an input for the definition: float64 on the CPU."""
    if x is None:
        return None
    wide = x.detach().cpu()
    if name not in example.exact:
        wide = wide.to(torch.complex128 if x.is_complex() else torch.float64)
    return wide.requires_grad_(x.requires_grad)


def placed(example: Example, aligned: tuple[bool, ...]) -> Example:
    """Return the example with inputs that start at a multiple of 16 bytes where ``aligned``."""
    if all(aligned):
        return example
    moved = dict(example.inputs)
    for name, kept in zip(example.inputs, aligned, strict=False):
        x = moved[name]
        if x is not None and not kept:
            moved[name] = _moved(x)
    return replace(example, inputs=moved)


def _moved(x: Tensor) -> Tensor:
    """Return a copy of x that starts an element after a multiple of 16 bytes."""
    x, learns = x.detach(), x.requires_grad
    strides = x.contiguous().stride() if 0 in x.stride() else x.stride()
    last = sum((size - 1) * step for size, step in zip(x.shape, strides, strict=True))
    memory = x.new_empty(last + 2)
    return memory.as_strided(x.shape, strides, 1).copy_(x).detach().requires_grad_(learns)


def weights(like: Tensor) -> Tensor:
    """Return the gradients of results from which those of the inputs are computed."""
    return torch.arange(like.numel(), device=like.device).cos().view(like.shape).to(like.dtype)


# --- making examples -----------------------------------------------------------------------------


class Numbers:
    """Makes inputs of examples, from a generator of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return normal numbers."""
        x = torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")
        return x.to(self.device, dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return numbers between 0 and 1."""
        x = torch.rand(shape, generator=self.generator, dtype=torch.float32, device="cpu")
        return x.to(self.device, dtype)

    def rows(
        self, like: Tensor, batch: int, heads: int, time: int, positive: bool = False
    ) -> Tensor:
        """Return (batch, heads, time, D) with the dtype, the width and the alignment of ``like``.

        In memory the heads of a token lie together, as in layers.
        """
        width, step = like.shape[3], alignment(like)
        wide = next(n for n in range(width, width + 17) if alignment_of(n) == step)
        make = self.uniform if positive else self.normal
        x = make(batch, time, heads, wide, dtype=like.dtype)[..., :width].transpose(1, 2)
        return x.detach().requires_grad_(like.requires_grad)


def alignment(x: Tensor) -> int:
    """Return the largest of 1, 2, 4, 8 and 16 that divides the strides of x (B, H, T, .)."""
    if _is_copied(x):  # its rows then lie one after another
        return alignment_of(x.shape[3])
    return math.gcd(16, *x.stride()[:3])


def _is_copied(x: Tensor) -> bool:
    """True for rows (B, H, T, .) that ``tiles_triton.straight`` copies."""
    return x.stride(3) != 1 or x.stride(2) >= FARTHEST


def alignment_of(n: int) -> int:
    """Return the largest of 1, 2, 4, 8 and 16 that divides n."""
    return math.gcd(16, n)
