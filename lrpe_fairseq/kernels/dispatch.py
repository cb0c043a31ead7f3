"""Which family of kernels serves a call: the only place that asks them and chooses.

Triton modules choose between their own kernels, by width and dtype. Single tokens of decoding do
not come here: they are a few products in PyTorch.

| operation | on a GPU (Triton) | on a CPU | without a kernel |
|---|---|---|---|
| Lambda P phi of q and k | ``encode.encode_triton`` | ``encode.encode_cpu`` | the encoding |
| phi alone | ``encode.encode_triton`` | – | ``encode.encode.feature_map`` |
| causal sums | ``linear.causal_triton`` | ``linear.causal_cpu`` | ``linear.causal`` |
| sums over all keys | ``linear.full_triton`` | – | ``linear.causal`` |
| softmax with terms | ``flash.flash_triton`` | – | blocks of queries |
| stick-breaking | ``flash.stick_triton`` | ``flash.stick_cpu`` | blocks of queries |

Kernels of a CPU are C++, except for ``flash.stick_cpu``, which has tiles in PyTorch.

Sums of half types on a GPU that no Triton kernel serves have ``linear.half``. docs/speed.md and
results/bench have the figures. Not measured: ``linear.half``, flash attention of padded batches and
documents, and stick-breaking attention.

Each function returns None, or the definition, where no kernel supports the tensors: of another
dtype, width or device, under torch.func and tracing, with ``LRPE_FAIRSEQ_KERNELS=0``, or where a
kernel does not compile. Triton kernels are proved before their first result is used, and not used
where that fails; see ``proof``. Under torch.compile and torch.export ``operators`` calls the C++
kernels and ``triton_operators`` those of Triton; the features of a GPU are left to the compiler.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.kernels import loader, operators, triton_calls, triton_operators
from lrpe_fairseq.kernels.encode import encode_cpu
from lrpe_fairseq.kernels.encode.encode import Transform, Variant, feature_map
from lrpe_fairseq.kernels.flash import stick_cpu
from lrpe_fairseq.kernels.linear import half
from lrpe_fairseq.kernels.triton_calls import CAUSAL, ENCODE, FLASH, HALF

Pair = tuple[Tensor, Tensor]
"""A tensor of the queries and one of the keys."""


# --- features of queries and keys --------------------------------------------------------------


def encode_both(
    q: Tensor, k: Tensor, transform: Transform, q_positions: Tensor, k_positions: Tensor
) -> Pair | None:
    """Compute Lambda P phi of q (B, H, T, D) and k (B, H, S, D), or return None without a kernel.

    Positions are not checked; see ``encode_triton.encode``.
    """
    given = q, k, transform, q_positions, k_positions
    triton = _triton_encoder(q, k, transform.variant)
    if triton is not None:
        found = triton_calls.encoded(triton, *triton.arguments_of_both(*given))
        if found is not None:
            return found
    kernel = _cpu_encoder(q, k, transform.variant)
    return None if kernel is None else kernel.encode_both(*given)


def encode_one(x: Tensor, transform: Transform, positions: Tensor) -> Tensor | None:
    """Compute Lambda P phi of x (B, H, T, D), or return None without a kernel."""
    triton = _triton_encoder(x, x, transform.variant)
    if triton is not None:
        found = triton_calls.encoded(triton, *triton.arguments_of_one(x, transform, positions))
        if found is not None:
            return found[0]
    kernel = _cpu_encoder(x, x, transform.variant)
    return None if kernel is None else kernel.encode_one(x, transform, positions)


def _cpu_encoder(q: Tensor, k: Tensor, variant: Variant) -> ModuleType | None:
    """Return the module whose kernel in C++ encodes q and k, or None."""
    if torch.compiler.is_compiling():
        return operators if encode_cpu.fits(q, k, variant) else None
    return encode_cpu if encode_cpu.serves(q, k, variant) else None


def _triton_encoder(q: Tensor, k: Tensor, variant: Variant) -> ModuleType | None:
    if torch.compiler.is_compiling():
        return None
    triton = loader.triton_kernels(ENCODE)
    return triton if triton is not None and triton.serves(q, k, variant) else None


def encodes_in_one_launch(q: Tensor, k: Tensor, variant: Variant) -> bool:
    """True if a Triton kernel encodes q and k.

    One launch is cheaper than to multiply P into the weights of the projections and turn the
    results. On a CPU it is not.
    """
    return _triton_encoder(q, k, variant) is not None


def applied(x: Tensor, power: Tensor, variant: Variant) -> Tensor | None:
    """Apply Lambda^(s), phases or indices, to x (B, H, T, D) in C++, or return None without.

    variant: without phi. A GPU has no such kernel: there q and k are encoded together.
    """
    if torch.compiler.is_compiling():
        fits = encode_cpu.fits(x, x, variant)
        return encode_cpu.encode(x, None, power, variant, operators.encoded) if fits else None
    if not encode_cpu.serves(x, x, variant):
        return None
    return encode_cpu.encode(x, None, power, variant)


PHI = Variant()


def feature_maps(q: Tensor, k: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Compute phi of q (B, H, T, D) and k (B, H, S, D), in one launch if a kernel supports them.

    Returns: phi(q) and phi(k); the second is None without k.
    """
    triton = _triton_encoder(q, q if k is None else k, PHI)
    if triton is not None:
        found = triton_calls.encoded(triton, *triton.arguments_of_phi(q, k))
        if found is not None:
            return found
    return feature_map(q), (None if k is None else feature_map(k))


# --- linear attention --------------------------------------------------------------------------


class LinearKernel(NamedTuple):
    """A kernel that takes rows of half types; its sums are float32, its results may be rounded.

    causal_sums: as ``causal.definition``. full_sums: as ``causal.full_definition``.
    """

    name: str
    causal_sums: Callable[..., tuple[Tensor, Tensor | None]]
    full_sums: Callable[..., tuple[Tensor, Tensor | None]]


_HALF = LinearKernel(HALF, triton_calls.half_causal_sums, triton_calls.half_full_sums)
_TRITON = LinearKernel("triton", triton_calls.causal_sums, triton_calls.full_sums)
_IN_GRAPHS = LinearKernel("triton", triton_operators.causal_sums, triton_operators.full_sums)


def linear_kernel(
    q: Tensor, v: Tensor, log_decay: Tensor | None, causal: bool
) -> LinearKernel | None:
    """Return the kernel of a GPU for linear attention of q (B, H, T, D) and v (B, H, S, E).

    None where no kernel serves them: then rows are made float32 or wider, and
    :func:`plain_causal_sums` or the definition computes the sums. Bidirectional attention with a
    decay is computed as two causal sums.
    """
    both_ways = not causal and log_decay is None
    if torch.compiler.is_compiling():
        return _IN_GRAPHS if triton_operators.serves_linear(q, v, both_ways) else None
    triton = loader.triton_kernels(CAUSAL)
    if triton is not None and triton.serves(q, v, log_decay):
        # without a mask two products of matrices in PyTorch serve float32 and wide heads
        fits = not both_ways or triton.fits_registers(q, v)
        return _TRITON if fits else _half_kernel(q, v, log_decay)
    return _half_kernel(q, v, log_decay)


def _half_kernel(q: Tensor, v: Tensor, log_decay: Tensor | None) -> LinearKernel | None:
    return _HALF if half.serves(q, v, log_decay) else None


def plain_causal_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute ``causal.definition``, in C++ if supported; in a compiled graph by one operator."""
    if torch.compiler.is_compiling():
        return operators.causal_sums(q, k, v, wanted, log_decay, eps)
    return triton_calls.plain_causal_sums(q, k, v, wanted, log_decay, eps)


def log_linear(kernel: str, q: Tensor) -> None:
    """Record which kernel computes linear attention of q; see ``loader.log_served``."""
    triton_calls.log_linear(kernel, q)


# --- softmax attention -------------------------------------------------------------------------


def has_flash(x: Tensor) -> bool:
    """True if this process has the Triton kernel of softmax attention, and not for another GPU."""
    if torch.compiler.is_compiling():
        return triton_operators.has_flash(x)
    older = x.is_cuda and not loader.runs_on(x.device)
    return loader.triton_kernels(FLASH) is not None and not older


def flash_attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor | None:
    """Compute ``flash.definition`` in Triton, or return None without a kernel for the tensors."""
    if not torch.compiler.is_compiling():
        return triton_calls.flash_attention(q, k, v, **arguments)
    serves = triton_operators.serves_softmax(q, k, v)
    return triton_operators.flash_attention(q, k, v, **arguments) if serves else None


def stick_attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor | None:
    """Compute ``stick_triton.stick_attention``, or return None without a kernel."""
    if not torch.compiler.is_compiling():
        return triton_calls.stick_attention(q, k, v, **arguments)
    serves = triton_operators.serves_softmax(q, k, v)
    return triton_operators.stick_attention(q, k, v, **arguments) if serves else None


def tiled_stick_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
    """Compute ``stick_cpu.stick_attention``, or return None where it does not support the tensors.

    Without masks and dropout.
    """
    if torch.compiler.is_compiling() or not stick_cpu.serves(q, k, v):
        return None
    return stick_cpu.stick_attention(q, k, v, scale)


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor, causal: bool, scale: float
) -> Tensor | None:
    """Compute ``operators.padded_attention``, or return None outside compiled graphs of a CPU."""
    alike = q.shape[:2] == k.shape[:2] and q.shape[3] == v.shape[3]
    if not (torch.compiler.is_compiling() and q.device.type == "cpu" and alike):
        return None
    return operators.padded_attention(q, k, v, padding, causal, scale)
