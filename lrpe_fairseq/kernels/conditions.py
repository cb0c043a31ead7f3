"""Conditions under which kernels may run, and second derivatives of their gradients.

Every kernel and every hand-written gradient has a definition: the same function in ordinary
differentiable PyTorch operations. The definition is used for second derivatives, and under
torch.func, fake tensors and tracing; for torch.compile see ``operators``. Which kernel serves a
call is decided in ``dispatch``.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

P, R = ParamSpec("P"), TypeVar("R")


def called_in_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """Let a compiler call ``function`` while it traces, and take its result for a constant.

    The arguments are numbers and strings. ``torch.compiler.assume_constant_result`` does the same,
    but imports ``torch._dynamo``, which takes longer than all of this package.
    """
    function._dynamo_marked_constant = True
    return function


def is_captured(device: torch.device) -> bool:
    """True while a CUDA graph is captured on ``device``."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Return a context without autocast, which would round float32 numbers to half precision.

    Where autocast is off it does nothing: entering ``torch.autocast`` takes 20 us.
    """
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def gradients_without_autocast(backward: Callable[P, R]) -> Callable[P, R]:
    """Disable autocast in the ``backward`` of a torch.autograd.Function.

    A backward pass that is called inside ``torch.autocast`` would multiply in half precision what
    the forward pass has multiplied without.
    """

    @wraps(backward)
    def call(ctx: Any, *grads: Tensor) -> Any:
        with without_autocast(grads[0]):
            return backward(ctx, *grads)

    return call


def is_plain(*tensors: Tensor | None) -> bool:
    """True if code may access the memory of ``tensors`` directly and define their gradient.

    False under torch.compile, tracing, a dispatch mode (fake tensors, make_fx) and forward-mode
    differentiation. Also False for subclasses, tensors wrapped by torch.func (grad, vmap, ...),
    tensors without memory (device meta) and empty tensors. Use the definition in these cases.
    """
    if is_transformed():
        return False
    # a loop: a generator would take twice as long, and several calls of every layer are here
    for x in tensors:  # noqa: SIM110
        if x is not None and not (_is_concrete(x) and x.numel() > 0):
            return False
    return True


def may_read_values(*tensors: Tensor) -> bool:
    """True if code may decide by the values of ``tensors``.

    False under torch.compile, tracing and a dispatch mode, and for subclasses, tensors wrapped
    by torch.func and device meta. Then use operations that are correct for all values.
    """
    return not _is_traced() and all(_is_concrete(x) for x in tensors)


def reads_are_free(*tensors: Tensor) -> bool:
    """True if code may decide by the values of ``tensors``, and reading them waits for nothing.

    That is :func:`may_read_values` of tensors on a CPU. A read on a GPU waits until it has computed
    all that was launched before, and the next launches come late.
    """
    return may_read_values(*tensors) and all(_is_on_cpu(x) for x in tensors)


def _is_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def is_transformed() -> bool:
    """True under torch.compile, torch.func, tracing, a dispatch mode or forward-mode AD."""
    return (
        _is_traced()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def is_exporting() -> bool:
    """True under torch.export; torch 2.6 cannot say so."""
    known = getattr(torch.compiler, "is_exporting", None)
    return known is not None and known()


def _is_traced() -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.jit.is_tracing()
    )


def _is_concrete(x: Tensor) -> bool:
    # a subclass may have no memory of its own, or other rules of dispatch
    return (
        type(x) in (Tensor, nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not torch._C._functorch.is_legacy_batchedtensor(x)  # several gradients at once
        and not x.is_meta
    )


def gradients_of(
    definition: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """Compute gradients of ``definition(*inputs)``, which can be differentiated again.

    Call this in the backward pass of a torch.autograd.Function if ``torch.is_grad_enabled()``, that
    is, under create_graph; otherwise the gradients have no graph. Trap: ``inputs`` must be the
    arguments of the Function, as in ctx.saved_tensors. A copy made in its forward pass is detached
    from the graph, and second derivatives through it would silently be zero.

    Args:
        inputs: arguments of ``definition``. needed: ctx.needs_input_grad, for each of them.
        grads: the gradients of its results.
    Returns: a gradient, or None, for every input.
    """
    keeps_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, so that an input that depends on another one is not counted twice
        views = [x.view_as(x) if need else x for x, need in zip(inputs, needed, strict=True)]
        results = definition(*views)
        results = (results,) if isinstance(results, Tensor) else results
        wanted = [x for x, need in zip(views, needed, strict=True) if need]
        gradients = iter(torch.autograd.grad(results, wanted, grads, create_graph=keeps_graph))
    return [next(gradients) if need else None for need in needed]
