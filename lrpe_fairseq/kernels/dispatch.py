"""Which family of kernels serves a call: the only place that asks them and chooses.

Triton modules choose between their own kernels, by width and dtype. Single tokens of decoding do
not come here: they are a few products in PyTorch.

| operation | on a GPU (Triton) | on a CPU (C++) | without a kernel |
|---|---|---|---|
| Lambda P phi of q and k | ``encode.encode_triton`` | ``encode.encode_cpu`` | the encoding |
| phi alone | ``encode.encode_triton`` | – | ``encode.encode.feature_map`` |
| causal sums | ``linear.causal_triton`` | ``linear.causal_cpu`` | ``linear.causal`` |
| sums over all keys | ``linear.full_triton`` | – | ``linear.causal`` |
| softmax with terms | ``flash.flash_triton`` | – | blocks of queries |
| stick-breaking | ``flash.stick_triton`` | – | blocks of queries |

Sums of half types on a GPU that no Triton kernel serves have ``linear.half``. docs/speed.md and
results/bench have the figures. Not measured: ``linear.half``, flash attention of padded batches and
documents, and stick-breaking attention.

Each function returns None, or the definition, where no kernel supports the tensors: of another
dtype, width or device, under torch.func and tracing, with ``LRPE_FAIRSEQ_KERNELS=0``, or where a
kernel does not compile. Triton kernels are proved before their first result is used, and not used
where that fails; see ``proof``. Under torch.compile and torch.export the C++ kernels are called by
``operators``; attention of a GPU with Triton stays outside the graph.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.kernels import loader, operators, proof
from lrpe_fairseq.kernels.conditions import called_in_tracing
from lrpe_fairseq.kernels.encode import encode_cpu
from lrpe_fairseq.kernels.encode.encode import Transform, Variant, feature_map
from lrpe_fairseq.kernels.linear import causal, causal_cpu, half
from lrpe_fairseq.kernels.linear.causal import full_definition

ENCODE = "lrpe_fairseq.kernels.encode.encode_triton"
CAUSAL = "lrpe_fairseq.kernels.linear.causal_triton"
FULL = "lrpe_fairseq.kernels.linear.full_triton"
FLASH = "lrpe_fairseq.kernels.flash.flash_triton"
STICK = "lrpe_fairseq.kernels.flash.stick_triton"
PROOFS = {
    ENCODE: "lrpe_fairseq.kernels.encode.encode_proof",
    CAUSAL: "lrpe_fairseq.kernels.linear.linear_proof",
    FULL: "lrpe_fairseq.kernels.linear.linear_proof",
    FLASH: "lrpe_fairseq.kernels.flash.flash_proof",
    STICK: "lrpe_fairseq.kernels.flash.flash_proof",
}
"""Which module makes the examples of a module of Triton kernels."""

Pair = tuple[Tensor, Tensor]
"""A tensor of the queries and one of the keys."""


@called_in_tracing
def has_triton() -> bool:
    """True if this process has Triton kernels."""
    return loader.has_triton_kernels(CAUSAL)


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
        found = _encoded(triton, *triton.arguments_of_both(*given))
        if found is not None:
            return found
    kernel = _cpu_encoder(q, k, transform.variant)
    return None if kernel is None else kernel.encode_both(*given)


def encode_one(x: Tensor, transform: Transform, positions: Tensor) -> Tensor | None:
    """Compute Lambda P phi of x (B, H, T, D), or return None without a kernel."""
    triton = _triton_encoder(x, x, transform.variant)
    if triton is not None:
        found = _encoded(triton, *triton.arguments_of_one(x, transform, positions))
        if found is not None:
            return found[0]
    kernel = _cpu_encoder(x, x, transform.variant)
    return None if kernel is None else kernel.encode_one(x, transform, positions)


def _cpu_encoder(q: Tensor, k: Tensor, variant: Variant) -> ModuleType | None:
    """Return the module whose kernel in C++ encodes q and k, or None."""
    if torch.compiler.is_compiling():
        return operators if encode_cpu.fits(q, k, variant) else None
    return encode_cpu if encode_cpu.serves(q, k, variant) else None


def _encoded(triton: ModuleType, *arguments: Any) -> Pair | None:
    """Compute ``encode_triton.encode``, or return None if its kernels failed."""
    examples = _proofs(ENCODE)
    return proof.run(
        examples.key_of(*arguments),
        partial(examples.example_of, *arguments),
        partial(triton.encode, *arguments),
    )


def _proofs(module: str) -> ModuleType:
    return importlib.import_module(PROOFS[module])


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
        found = _encoded(triton, *triton.arguments_of_phi(q, k))
        if found is not None:
            return found
    return feature_map(q), None if k is None else feature_map(k)


# --- linear attention --------------------------------------------------------------------------


class LinearKernel(NamedTuple):
    """A kernel that takes rows of half types; its sums are float32.

    causal_sums: as ``causal.definition``. full_sums: as ``causal.full_definition``. The one that a
    call does not need may be None.
    """

    name: str
    causal_sums: Callable[..., tuple[Tensor, Tensor | None]] | None = None
    full_sums: Callable[..., tuple[Tensor, Tensor | None]] | None = None


def _half_causal_sums(q: Tensor, *given: Any) -> tuple[Tensor, Tensor | None]:
    log_linear(HALF.name, q)
    return half.causal_sums(q, *given)


def _half_full_sums(q: Tensor, *given: Any) -> tuple[Tensor, Tensor | None]:
    log_linear(HALF.name, q)
    return half.full_sums(q, *given)


HALF = LinearKernel("pytorch, products in half precision", _half_causal_sums, _half_full_sums)


def linear_kernel(
    q: Tensor, v: Tensor, log_decay: Tensor | None, causal: bool
) -> LinearKernel | None:
    """Return the kernel of a GPU for linear attention of q (B, H, T, D) and v (B, H, S, E).

    None where no kernel serves them: then rows are made float32 or wider, and
    :func:`plain_causal_sums` or the definition computes the sums. Bidirectional
    attention with a decay is computed as two causal sums.
    """
    triton = loader.triton_kernels(CAUSAL)
    if triton is not None and triton.serves(q, v, log_decay):
        if causal or log_decay is not None:
            return LinearKernel("triton", causal_sums=_triton_causal_sums)
        # two products of matrices in PyTorch serve float32 and wide heads
        if triton.fits_registers(q, v):
            return LinearKernel("triton", full_sums=_triton_full_sums)
    return HALF if half.serves(q, v, log_decay) else None


def _triton_causal_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute ``causal.definition`` in Triton, or without if its kernels failed."""
    examples, given = _proofs(CAUSAL), (q, k, v, wanted, log_decay, eps)
    kernels = partial(loader.triton_kernels(CAUSAL).causal_sums, *given)
    example = partial(examples.causal_example_of, *given)
    found = proof.run(examples.causal_key_of(*given), example, kernels)
    if found is not None:
        log_linear("triton", q)
        return found
    if half.serves(q, v, log_decay):
        return _half_causal_sums(*given)
    return plain_causal_sums(*_widened(q, k, v), *given[3:])


def _triton_full_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute ``causal.full_definition`` in Triton, or without if its kernels failed."""
    examples, given = _proofs(FULL), (q, k, v, wanted, eps)
    kernels = partial(loader.triton_kernels(FULL).full_sums, *given)
    example = partial(examples.full_example_of, *given)
    found = proof.run(examples.full_key_of(*given), example, kernels)
    if found is not None:
        log_linear("triton", q)
        return found
    if half.serves(q, v):
        return _half_full_sums(*given)
    log_linear("pytorch", q)
    return full_definition(*_widened(q, k, v), wanted, eps)


def _widened(*rows: Tensor) -> list[Tensor]:
    """Return rows in float32 or wider, as the definitions take them."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in rows]


def plain_causal_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute ``causal.definition``, in C++ if supported; in a compiled graph by one operator."""
    if torch.compiler.is_compiling():
        return operators.causal_sums(q, k, v, wanted, log_decay, eps)
    in_cpp = causal_cpu.serves(q, k, v, log_decay)
    log_linear("c++" if in_cpp else "pytorch", q)
    sums = causal_cpu.causal_sums if in_cpp else causal.definition
    return sums(q, k, v, wanted, log_decay, eps)


def log_linear(kernel: str, q: Tensor) -> None:
    """Record which kernel computes linear attention of q; see ``loader.log_served``."""
    loader.log_served("linear attention", kernel, q.device.type)


# --- softmax attention -------------------------------------------------------------------------


def has_flash() -> bool:
    """True if this process has the Triton kernel of softmax attention."""
    return loader.triton_kernels(FLASH) is not None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor | None:
    """Compute ``flash.definition`` in Triton, or return None without a kernel for the tensors."""
    triton = loader.triton_kernels(FLASH)
    if triton is None or not triton.serves(q, k, v, *_tensors(arguments)):
        return None
    examples = _proofs(FLASH)
    return proof.run(
        examples.key_of(examples.FLASH, q, k, v, **arguments),
        partial(examples.example_of, examples.FLASH, q, k, v, **arguments),
        partial(triton.flash_attention, q, k, v, **arguments),
    )


def stick_attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor | None:
    """Compute ``stick_triton.stick_attention``, or return None without a kernel."""
    triton = loader.triton_kernels(STICK)
    if triton is None or not triton.serves(q, k, v, *_tensors(arguments)):
        return None
    examples = _proofs(STICK)
    return proof.run(
        examples.key_of(examples.STICK, q, k, v, **arguments),
        partial(examples.example_of, examples.STICK, q, k, v, **arguments),
        partial(triton.stick_attention, q, k, v, **arguments),
    )


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor, causal: bool, scale: float
) -> Tensor | None:
    """Compute ``operators.padded_attention``, or return None outside compiled graphs of a CPU."""
    alike = q.shape[:2] == k.shape[:2] and q.shape[3] == v.shape[3]
    if not (torch.compiler.is_compiling() and q.device.type == "cpu" and alike):
        return None
    return operators.padded_attention(q, k, v, padding, causal, scale)


def _tensors(arguments: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a kernel, alone or in pairs."""
    for value in arguments.values():
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, Tensor):
                yield x
