"""Operators of compiled graphs: what torch.compile and torch.export call and do not trace.

The kernels are called by custom operators, each with a fake form, which computes shapes and
strides, and with a gradient, which is another operator. So a compiled model has one graph. In eager
execution the kernels have autograd functions, which also have second derivatives; these have none.

A compiled graph may run elsewhere than it was compiled, so an operator computes the definition
where the kernel does not serve its tensors.

Axes: B batch, H heads, T time, D key width, E value width.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from lrpe_fairseq.kernels import loader
from lrpe_fairseq.kernels.conditions import is_plain
from lrpe_fairseq.kernels.encode import encode, encode_cpu
from lrpe_fairseq.kernels.encode.encode import Transform, Turns, Variant
from lrpe_fairseq.kernels.linear import causal, causal_cpu

SOURCES = (
    "operators.py",
    "recomputed.py",
    "triton_operators.py",
    "loader.py",
    "results.py",
    "encode/encode_cpu.py",
    "linear/causal_cpu.py",
)
"""The files that decide the shapes, the strides and the gradients of operators."""


def named(operator: str) -> str:
    """Return the whole name of an operator, with a digest of :data:`SOURCES`.

    Compilers keep graphs on disk, by the names of their operators. Without the digest a changed
    operator would get graphs that were compiled for the strides of the old one.
    """
    return f"lrpe_fairseq::{operator}_{_DIGEST}"


def _digest(sources: Sequence[str]) -> str:
    here = Path(__file__).parent
    content = b"".join((here / source).read_bytes() for source in sources)
    return hashlib.sha256(content).hexdigest()[:12]


_DIGEST = _digest(SOURCES)


def _is_recorded(*tensors: Tensor | None) -> bool:
    """True if autograd records a call with these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """Return x; for None a tensor of no elements, as operators return tensors only."""
    return like.new_empty(0) if x is None else x


@contextmanager
def with_autograd() -> Iterator[None]:
    """Record gradients inside an operator, whose implementation torch calls below autograd."""
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView"):
        hidden = hidden.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden):
        yield


def _gradients_of(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return the gradients of ``function(*inputs)``, computed once more, for the needed inputs."""
    with with_autograd(), torch.enable_grad():
        leaves = [
            x.detach().requires_grad_() if need else x
            for x, need in zip(inputs, needed, strict=True)
        ]
        results = function(*leaves)
        results = (results,) if isinstance(results, Tensor) else results
        wanted = [x for x, need in zip(leaves, needed, strict=True) if need]
        found = iter(torch.autograd.grad(results, wanted, grads))
    return [next(found) if need else None for need in needed]


# --- causal sums of linear attention -------------------------------------------------------------


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`causal.definition` of q, k and v of one dtype, in C++ if supported."""
    log_decay = causal_cpu.by_token_if_learned(log_decay, q)
    keeps = _is_recorded(q, k, v, log_decay)
    out, denominators, _ = _sums(q, k, v, log_decay, wanted, eps, keeps)
    return out, (denominators if wanted == "sums" else None)


def _sums_in_cpp(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return is_plain(q, k, v) and all(x.numel() for x in (q, k, v)) and causal_cpu.fits(q, k, v)


@torch.library.custom_op(
    named("causal_sums"),
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? log_decay, str wanted, float eps, bool keeps)"
    " -> (Tensor, Tensor, Tensor)",
)
def _sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    wanted: str,
    eps: float,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the denominators, and the states that the gradient in C++ reads."""
    in_cpp = _sums_in_cpp(q, k, v)
    loader.log_served("linear attention", "c++" if in_cpp else "pytorch", q.device.type)
    if in_cpp:
        rows = (loader.contiguous_rows(x) for x in (q, k, v))
        found = causal_cpu.sums(*rows, log_decay, wanted, eps, keeps)
        return tuple(_or_empty(x, q) for x in found)
    out, denominators = causal.definition(q, k, v, wanted, log_decay, eps)
    if wanted == "normalized":
        denominators = q.new_empty(q.shape[:3])  # only C++ reads them
    states = causal_cpu.states_of(q, v) if keeps else q.new_empty(0)
    return loader.empty_rows(v).copy_(out), _or_empty(denominators, q), states


@_sums.register_fake
def _(q, k, v, log_decay, wanted, eps, keeps):
    denominators = q.new_empty(0) if wanted == "numerator" else q.new_empty(q.shape[:3])
    states = causal_cpu.states_of(q, v) if keeps else q.new_empty(0)
    return loader.empty_rows(v), denominators, states


@torch.library.custom_op(
    named("causal_sums_backward"),
    mutates_args=(),
    schema="(Tensor grad, Tensor? grad_denominators, Tensor q, Tensor k, Tensor v, "
    "Tensor? log_decay, Tensor states, Tensor? out, Tensor? denominators, str wanted, float eps, "
    "bool of_gates) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _sums_backward(
    grad: Tensor,
    grad_denominators: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    states: Tensor,
    out: Tensor | None,
    denominators: Tensor | None,
    wanted: str,
    eps: float,
    of_gates: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and, if ``of_gates``, of the decay."""
    if _sums_in_cpp(q, k, v):
        rows = *(loader.contiguous_rows(x) for x in (q, k, v)), log_decay
        kept = states, out, denominators
        found = causal_cpu.gradients(grad, grad_denominators, rows, kept, (wanted, eps), of_gates)
        return tuple(_or_empty(x, q) for x in found)

    def definition(*inputs: Tensor | None) -> tuple[Tensor, ...]:
        rows, decay = inputs[:3], inputs[3]
        return causal.present(*causal.definition(*rows, wanted, decay, eps))

    inputs = q, k, v, log_decay
    grads = causal.present(grad, grad_denominators)
    found = _gradients_of(definition, inputs, (True, True, True, of_gates), grads)
    laid_out = [
        loader.empty_rows(x).copy_(g) for x, g in zip(inputs, found, strict=True) if g is not None
    ]
    return *laid_out[:3], (laid_out[3] if of_gates else q.new_empty(0))


@_sums_backward.register_fake
def _(
    grad, grad_denominators, q, k, v, log_decay, states, out, denominators, wanted, eps, of_gates
):
    gates = q.new_empty(q.shape[:3], dtype=log_decay.dtype) if of_gates else q.new_empty(0)
    return *(loader.empty_rows(x) for x in (q, k, v)), gates


def _keep_sums(ctx, inputs, output):
    q, k, v, log_decay, wanted, eps, _ = inputs
    out, denominators, states = output
    kept = (out, denominators) if wanted == "normalized" else (None, None)
    ctx.settings = wanted, eps
    ctx.save_for_backward(q, k, v, log_decay, states, *kept)


def _sums_gradient(ctx, grad, grad_denominators, _):
    wanted, eps = ctx.settings
    of_gates = ctx.needs_input_grad[3]
    grad_denominators = grad_denominators if wanted == "sums" else None
    *found, gates = _sums_backward(
        grad, grad_denominators, *ctx.saved_tensors, wanted, eps, of_gates
    )
    return *found, (gates if of_gates else None), None, None, None


_sums.register_autograd(_sums_gradient, setup_context=_keep_sums)


# --- Lambda P phi --------------------------------------------------------------------------------


def encoded(x: Tensor, p: Tensor | None, power: Tensor | Turns, variant: Variant) -> Tensor:
    """Compute :func:`encode.definition` with arguments as ``encode_cpu.encoded`` takes them."""
    at = power if variant.permutes else torch.stack([power.real, power.imag], -1)
    return _encoded(x, p, at, *variant)


def encode_both(
    q: Tensor, k: Tensor, transform: Transform, q_positions: Tensor, k_positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``encode_cpu.encode_both`` by operators."""
    return encode_cpu.encode_both(q, k, transform, q_positions, k_positions, encoded)


def encode_one(x: Tensor, transform: Transform, positions: Tensor) -> Tensor:
    """Compute ``encode_cpu.encode_one`` by an operator."""
    return encode_cpu.encode_one(x, transform, positions, encoded)


_FLAGS = "bool phi, bool halves, bool wide, bool permutes, bool fourier"


def _encodes_in_cpp(x: Tensor, variant: Variant) -> bool:
    return is_plain(x) and x.numel() > 0 and encode_cpu.fits(x, x, variant)


def _power_of(at: Tensor, variant: Variant) -> Tensor:
    """Return indices, or phases as complex numbers."""
    return at if variant.permutes else torch.view_as_complex(at.contiguous())


@torch.library.custom_op(
    named("encode"),
    mutates_args=(),
    schema=f"(Tensor x, Tensor? p, Tensor at, {_FLAGS}) -> Tensor",
)
def _encoded(x: Tensor, p: Tensor | None, at: Tensor, *flags: bool) -> Tensor:
    """Return Lambda P phi(x). at: indices (B, H, T, D), or phases (T, E, 2) or (B, 1, T, E, 2)."""
    variant = Variant(*flags)
    power = _power_of(at, variant)
    if not _encodes_in_cpp(x, variant):
        return encode.definition(x, p, power, variant).contiguous()
    p = None if p is None else p.contiguous()
    power = loader.contiguous_rows(power)
    return encode_cpu.encoded(loader.contiguous_rows(x), p, power, variant)


@_encoded.register_fake
def _(x, p, at, phi, halves, wide, permutes, fourier):
    return x.new_empty(*x.shape[:3], x.shape[3] * (2 if wide else 1))


@torch.library.custom_op(
    named("encode_backward"),
    mutates_args=(),
    schema="(Tensor grad, Tensor? x, Tensor? p, Tensor at, SymInt[] shape, SymInt[] strides, "
    f"bool of_p, bool of_at, {_FLAGS}) -> (Tensor, Tensor, Tensor)",
)
def _encoded_backward(
    grad: Tensor,
    x: Tensor | None,
    p: Tensor | None,
    at: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    of_p: bool,
    of_at: bool,
    *flags: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (``shape``, ``strides``), of p and of ``at``, if they are needed.

    x: None for a linear map if the other two are not needed.
    """
    variant = Variant(*flags)
    power = _power_of(at, variant)
    grad_x = grad.new_empty_strided(shape, strides)
    if _encodes_in_cpp(grad_x, variant):
        rows = None if x is None else loader.contiguous_rows(x)
        unit = None if p is None else p.contiguous()
        power = loader.contiguous_rows(power)
        found = encode_cpu.gradients(grad, rows, unit, power, grad_x, variant, of_p, of_at)
    else:
        x = grad.new_zeros(shape) if x is None else x
        inputs, needed = (x, p, power), (True, of_p, of_at)
        found_x, *found = _gradients_of(
            lambda *given: encode.definition(*given, variant), inputs, needed, (grad,)
        )
        grad_x.copy_(found_x)
    of_units, of_power = found
    of_power = None if of_power is None else torch.view_as_real(of_power)
    return grad_x, _or_empty(of_units, grad), _or_empty(of_power, grad)


@_encoded_backward.register_fake
def _(grad, x, p, at, shape, strides, of_p, of_at, phi, halves, wide, permutes, fourier):
    units = p.new_empty(p.shape) if of_p else grad.new_empty(0)
    turns = at.new_empty(at.shape) if of_at else grad.new_empty(0)
    return grad.new_empty_strided(shape, strides), units, turns


def _keep_encoded(ctx, inputs, output):
    x, p, at, *flags = inputs
    ctx.flags = flags
    layout = torch.empty_like(x, device="meta")
    if x.shape[-1] != 1 and layout.stride(-1) != 1:  # C++ writes contiguous rows
        layout = torch.empty(x.shape, device="meta")
    ctx.layout = x.shape, layout.stride()
    needs_x = flags[0] or any(ctx.needs_input_grad[1:3])
    ctx.save_for_backward(x if needs_x else None, p, at)


def _encoded_gradient(ctx, grad):
    of_p, of_at = ctx.needs_input_grad[1:3]
    options = *ctx.layout, of_p, of_at, *ctx.flags
    grad_x, grad_p, grad_at = _encoded_backward(grad, *ctx.saved_tensors, *options)
    return grad_x, (grad_p if of_p else None), (grad_at if of_at else None), *(None,) * 5


_encoded.register_autograd(_encoded_gradient, setup_context=_keep_encoded)


# --- softmax attention of batches that may have padding -------------------------------------------


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor, causal: bool, scale: float
) -> Tensor:
    """Compute softmax(scale q k^T) v on a CPU without the keys of ``padding`` (B, S), (B, H, T, D).

    A graph has a mask of padding for every batch. This operator reads if there is padding, because
    without a mask torch's fused kernel skips the pairs that causality hides. q, k and v have one
    width and equally many heads; in causal attention they are the same tokens.
    """
    return _padded(q, k, v, padding, causal, scale)[0]


_aten = torch.ops.aten


@torch.library.custom_op(
    named("padded_attention"),
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor padding, bool causal, float scale)"
    " -> (Tensor, Tensor)",
)
def _padded(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the result, and the logarithms of the sums of weights (B, H, T)."""
    q, k, v = (loader.contiguous_rows(x) for x in (q, k, v))
    mask, blind, is_causal = _mask_of(q, k, padding, causal)
    out, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    out = out if blind is None else out.masked_fill(blind, 0.0)
    laid_out, of_sums = _padded_results(q)
    return laid_out.copy_(out), of_sums.copy_(sums)


def _padded_results(q: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(batch, length, heads, width).transpose(1, 2)
    return out, q.new_empty(batch, heads, length, dtype=wide)


def _mask_of(
    q: Tensor, k: Tensor, padding: Tensor, causal: bool
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return the bias of hidden pairs, the queries that see no key, and if torch hides later keys.

    A query that sees no key sees all of them, so that nothing is NaN.
    """
    if not padding.any():
        return None, None, causal
    visible = ~padding[:, None, None, :]
    if causal:
        pairs = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        visible = visible & pairs.tril()
    blind = ~visible.any(-1, keepdim=True)
    hidden = ~(visible | blind)
    bias = q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return bias.expand(-1, -1, q.shape[2], -1), blind, False


@_padded.register_fake
def _(q, k, v, padding, causal, scale):
    return _padded_results(q)


@torch.library.custom_op(
    named("padded_attention_backward"),
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor padding, Tensor out, Tensor sums, "
    "bool causal, float scale) -> (Tensor, Tensor, Tensor)",
)
def _padded_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor,
    out: Tensor,
    sums: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    q, k, v = (loader.contiguous_rows(x) for x in (q, k, v))
    mask, blind, is_causal = _mask_of(q, k, padding, causal)
    grad = grad if blind is None else grad.masked_fill(blind, 0.0)
    found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, sums, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return tuple(_padded_results(x)[0].copy_(g) for x, g in zip((q, k, v), found, strict=True))


@_padded_backward.register_fake
def _(grad, q, k, v, padding, out, sums, causal, scale):
    return tuple(_padded_results(x)[0] for x in (q, k, v))


def _keep_padded(ctx, inputs, output):
    *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _padded_gradient(ctx, grad, _):
    found = _padded_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale)
    return *found, None, None, None


_padded.register_autograd(_padded_gradient, setup_context=_keep_padded)
