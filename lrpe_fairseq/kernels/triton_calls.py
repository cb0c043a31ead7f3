"""Calls of Triton kernels in eager execution: proved first, and computed without if they fail.

``dispatch`` chooses which calls come here. Each function returns the definition, or None for the
caller's own, where its kernels fail; see ``proof``.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

import importlib
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lrpe_fairseq.kernels import loader, proof
from lrpe_fairseq.kernels.linear import causal, causal_cpu, half

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

Sums = tuple[Tensor, Tensor | None]
"""A result (B, H, T, E), and denominators (B, H, T) or None."""


def _proofs(module: str) -> ModuleType:
    return importlib.import_module(PROOFS[module])


def encoded(triton: ModuleType, *arguments: Any) -> tuple[Tensor, Tensor] | None:
    """Compute ``encode_triton.encode``, or return None if its kernels failed."""
    examples = _proofs(ENCODE)
    return proof.run(
        examples.key_of(*arguments),
        partial(examples.example_of, *arguments),
        partial(triton.encode, *arguments),
    )


# --- linear attention ----------------------------------------------------------------------------


def log_linear(kernel: str, q: Tensor) -> None:
    """Record which kernel computes linear attention of q; see ``loader.log_served``."""
    loader.log_served("linear attention", kernel, q.device.type)


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> Sums:
    """Compute ``causal.definition`` in Triton, or without if its kernels failed."""
    examples, given = _proofs(CAUSAL), (q, k, v, wanted, log_decay, eps)
    kernels = partial(loader.triton_kernels(CAUSAL).causal_sums, *given)
    example = partial(examples.causal_example_of, *given)
    found = proof.run(examples.causal_key_of(*given), example, kernels)
    if found is not None:
        log_linear("triton", q)
        return found
    return causal_sums_without(*given)


def causal_sums_without(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> Sums:
    """Compute ``causal.definition`` without Triton."""
    if half.serves(q, v, log_decay):
        return half_causal_sums(q, k, v, wanted, log_decay, eps)
    return plain_causal_sums(*_widened(q, k, v), wanted, log_decay, eps)


def full_sums(q: Tensor, k: Tensor, v: Tensor, wanted: str, eps: float) -> Sums:
    """Compute ``causal.full_definition`` in Triton, or without if its kernels failed."""
    examples, given = _proofs(FULL), (q, k, v, wanted, eps)
    kernels = partial(loader.triton_kernels(FULL).full_sums, *given)
    example = partial(examples.full_example_of, *given)
    found = proof.run(examples.full_key_of(*given), example, kernels)
    if found is not None:
        log_linear("triton", q)
        return found
    return full_sums_without(*given)


def full_sums_without(q: Tensor, k: Tensor, v: Tensor, wanted: str, eps: float) -> Sums:
    """Compute ``causal.full_definition`` without Triton."""
    if half.serves(q, v):
        return half_full_sums(q, k, v, wanted, eps)
    log_linear("pytorch", q)
    return causal.full_definition(*_widened(q, k, v), wanted, eps)


HALF = "pytorch, products in half precision"


def half_causal_sums(q: Tensor, *given: Any) -> Sums:
    """Compute ``half.causal_sums``."""
    log_linear(HALF, q)
    return half.causal_sums(q, *given)


def half_full_sums(q: Tensor, *given: Any) -> Sums:
    """Compute ``half.full_sums``."""
    log_linear(HALF, q)
    return half.full_sums(q, *given)


def plain_causal_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> Sums:
    """Compute ``causal.definition`` of rows in float32 or wider, in C++ if supported."""
    in_cpp = causal_cpu.serves(q, k, v, log_decay)
    log_linear("c++" if in_cpp else "pytorch", q)
    sums = causal_cpu.causal_sums if in_cpp else causal.definition
    return sums(q, k, v, wanted, log_decay, eps)


def _widened(*rows: Tensor) -> list[Tensor]:
    """Return rows in float32 or wider, as the definitions take them."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in rows]


# --- softmax attention ---------------------------------------------------------------------------


def flash_attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor | None:
    """Compute ``flash.definition`` in Triton, or return None without a kernel for the tensors."""
    return _attention(FLASH, "flash_attention", (q, k, v), arguments)


def stick_attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor | None:
    """Compute ``stick.definition`` in Triton, or return None without a kernel for the tensors."""
    return _attention(STICK, "stick_attention", (q, k, v), arguments)


def _attention(
    module: str, name: str, rows: tuple[Tensor, ...], arguments: dict[str, Any]
) -> Tensor | None:
    triton = loader.triton_kernels(module)
    if triton is None or not triton.serves(*rows, *_tensors(arguments)):
        return None
    examples = _proofs(module)
    family = {FLASH: examples.FLASH, STICK: examples.STICK}[module]
    return proof.run(
        examples.key_of(family, *rows, **arguments),
        partial(examples.example_of, family, *rows, **arguments),
        partial(getattr(triton, name), *rows, **arguments),
    )


def _tensors(arguments: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a kernel, alone or in pairs."""
    for value in arguments.values():
        values = value if isinstance(value, tuple) else (value,)
        for x in values:
            if isinstance(x, Tensor):
                yield x
