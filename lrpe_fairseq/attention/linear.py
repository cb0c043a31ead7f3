"""Linear attention on encoded features: naive, chunked, recurrent, bidirectional.

out_s = sum_t (q~_s . k~_t) v_t / den_s over the visible t (LRPE, Eq. 3 and 39). All forms take
the same arguments and give the same result; the naive one is the reference of the others.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lrpe_fairseq.encodings import kernels

NORMALIZERS = ("rotated", "content", "layernorm", "none")
"""``rotated``: sum of the scores themselves (Eq. 39). ``content``: sum of un-encoded scores, as
in RoFormer. ``layernorm``: no denominator here, a LayerNorm follows (TMLR). ``none``: nothing."""

EPS = 1e-6
"""Denominators are clamped to this from below, as the authors' code does."""

KERNELS = "lrpe_fairseq.attention.fused"

CHUNK = 64
"""Longest chunk of the causal form; the cost per token is O(CHUNK + D)."""


class LinearState(NamedTuple):
    """Everything a causal linear attention remembers, in float32 (or wider).

    kv: (B, H, D, E) = sum_t k~_t v_t^T. keys: (B, H, D') = sum of the denominator's keys.
    Zeros where there is no denominator.
    """

    kv: Tensor
    keys: Tensor


def linear_attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    normalizer: str = "rotated",
    content: tuple[Tensor, Tensor] | None = None,
    log_decay: Tensor | None = None,
) -> Tensor:
    """The T x S definition, O(T S) in time and memory; see :func:`linear_attention`."""
    q, k, v, content = _prepare(q, k, v, causal, key_padding_mask, normalizer, content, log_decay)
    scores = q @ k.transpose(-1, -2)
    if log_decay is not None:
        scores = scores * _decay_matrix(log_decay, q.shape[-2], q)
    scores = scores.tril() if causal else scores
    numerator = scores @ v
    if normalizer in ("layernorm", "none"):
        return numerator
    if content is not None:
        scores = content[0] @ content[1].transpose(-1, -2)
        scores = scores.tril() if causal else scores
    return numerator / scores.sum(-1, keepdim=True).clamp_min(EPS)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    normalizer: str = "rotated",
    content: tuple[Tensor, Tensor] | None = None,
    log_decay: Tensor | None = None,
) -> Tensor:
    """Linear attention in O(T) time and memory, any T.

    Args:
        q, k, v: (B, H, T, D), (B, H, S, D), (B, H, S, E), encoded features; S = T if causal.
        causal: whether s sees only t <= s.
        key_padding_mask: (B, S), true where a key is padding; such keys count nowhere.
        normalizer: one of :data:`NORMALIZERS`. ``rotated`` may meet a denominator near or below
            zero, which is clamped to :data:`EPS` (Type 8 does so often; see the docs).
        content: (q, k) un-encoded features, of equal width, needed by ``content`` only.
        log_decay: (H,), log of a per-token decay of the score; causal only, no gradient.
    Returns: (B, H, T, E) in the dtype of ``v`` (float16 saturates); sums are taken in float32 or
        wider. A query that sees no key gets zeros.
    Raises: ValueError for an unknown normalizer or arguments that do not fit together.
    """
    dtype, fast = v.dtype, kernels.load(KERNELS) if causal else None
    fast = fast if fast is not None and fast.serves(q, v) else None
    given = (q, k, v, causal, key_padding_mask, normalizer, content, log_decay)
    q, k, v, content = _prepare(*given, widen=fast is None)
    if causal:
        wanted = "normalized" if normalizer == "rotated" else "numerator"
        sums = _chunked if fast is None else partial(fast.causal_sums, eps=EPS)
        out, denominator = sums(q, k, v, wanted, log_decay)[0], None
    else:
        out, denominator = _full_sums(q, k, v, normalizer == "rotated")
    if content is not None:
        keys = content[1].cumsum(-2) if causal else content[1].sum(-2, keepdim=True)
        denominator = (content[0] * keys).sum(-1)
    return _narrow(_divide(out, denominator), dtype, normalizer)


def linear_attention_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: LinearState | None,
    key_padding_mask: Tensor | None = None,
    normalizer: str = "rotated",
    content: tuple[Tensor, Tensor] | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, LinearState]:
    """Causal attention of the next T >= 1 tokens given the state before them.

    Arguments as in :func:`linear_attention` (causal), for the block alone; ``state`` is None
    before the first token. Returns the block's (B, H, T, E) and the state after it. One token
    costs O(D E) wherever it stands.
    """
    dtype = v.dtype
    q, k, v, content = _prepare(q, k, v, True, key_padding_mask, normalizer, content, log_decay)
    before = state or _empty_state(q, v, content)
    advance = _advance_by_one if q.shape[-2] == 1 else _advance
    numerator, denominator, after = advance(
        q, k, v, before, log_decay, with_denominator=normalizer == "rotated"
    )
    if content is not None:
        keys = before.keys.unsqueeze(-2) + content[1].cumsum(-2)
        denominator, after = (content[0] * keys).sum(-1), after._replace(keys=keys[..., -1, :])
    return _narrow(_divide(numerator, denominator), dtype, normalizer), after


def reorder_state(state: LinearState, new_order: Tensor) -> LinearState:
    """The state of beams ``new_order`` (B',), int64 indices into the batch."""
    return LinearState(*(part.index_select(0, new_order) for part in state))


# --- shared by the forms -----------------------------------------------------------------------


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    key_padding_mask: Tensor | None,
    normalizer: str,
    content: tuple[Tensor, Tensor] | None,
    log_decay: Tensor | None,
    widen: bool = True,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Check, widen to at least float32, and drop padded keys; content only where it is used.

    Without ``widen`` q, k and v keep their type: what follows sums in float32 by itself.
    """
    if normalizer not in NORMALIZERS:
        raise ValueError(f"unknown normalizer {normalizer!r}; choose one of {NORMALIZERS}")
    if normalizer == "content" and content is None:
        raise ValueError("normalizer 'content' needs content=(q, k), the un-encoded features")
    if causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"causal needs as many queries as keys: {q.shape[-2]}, {k.shape[-2]}")
    if log_decay is not None and not causal:
        raise ValueError("a decay is defined for causal attention only: t > s would grow")
    wide = torch.promote_types(v.dtype, torch.float32)
    own = wide if widen else v.dtype
    keys = [k.to(own), v.to(own)] + ([content[1].to(wide)] if normalizer == "content" else [])
    if key_padding_mask is not None:
        dead = key_padding_mask.bool()[:, None, :, None]
        keys = [x.masked_fill(dead, 0.0) for x in keys]
    used = (content[0].to(wide), keys[2]) if normalizer == "content" else None
    return q.to(own), keys[0], keys[1], used


def _divide(numerator: Tensor, denominator: Tensor | None) -> Tensor:
    if denominator is None:
        return numerator
    return numerator / denominator.clamp_min(EPS).unsqueeze(-1)


def _narrow(out: Tensor, dtype: torch.dtype, normalizer: str) -> Tensor:
    """Cast to ``dtype``; float16 saturates, quotients at 1/64 of its range.

    A denominator at :data:`EPS` (Type 8 has many) means values near 1e8, beyond float16. The
    margin keeps the projection that follows finite as well. Sums without a denominator grow
    with T: ask for float32 (a float32 ``v``) where they are still to be normalized.
    """
    if dtype == torch.float16:
        margin = 64 if normalizer in ("rotated", "content") else 1
        limit = torch.finfo(dtype).max / margin
        out = out.clamp(-limit, limit)
    return out.to(dtype)


def _full_sums(
    q: Tensor, k: Tensor, v: Tensor, with_denominator: bool
) -> tuple[Tensor, Tensor | None]:
    """sum_t (q_s . k_t) v_t and, if wanted, sum_t q_s . k_t, over all t."""
    numerator = q @ (k.transpose(-1, -2) @ v)
    return numerator, (q @ k.sum(-2).unsqueeze(-1)).squeeze(-1) if with_denominator else None


def _empty_state(q: Tensor, v: Tensor, content: tuple[Tensor, Tensor] | None) -> LinearState:
    rows = q.shape[:2]
    counted = q if content is None else content[1]
    return LinearState(
        q.new_zeros(*rows, q.shape[-1], v.shape[-1]), q.new_zeros(*rows, counted.shape[-1])
    )


# --- one step of the recurrence, for a block and for a token ------------------------------------


def _advance(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: LinearState,
    log_decay: Tensor | None,
    with_denominator: bool,
) -> tuple[Tensor, Tensor | None, LinearState]:
    """The sums over all that a block of T tokens sees, and the state after it.

    Without a denominator the state's keys are left as they are.
    """
    into, out_of, whole = _block_decay(log_decay, q)
    wanted = "sums" if with_denominator else "numerator"
    numerator, denominator = _chunked(q, k, v, wanted, log_decay)
    q, k = q * into, k * out_of
    numerator = numerator + q @ before.kv
    kv, keys = before.kv * whole + k.transpose(-1, -2) @ v, before.keys
    if with_denominator:
        denominator = denominator + (q * keys.unsqueeze(-2)).sum(-1)
        keys = keys * whole.squeeze(-1) + k.sum(-2)
    return numerator, denominator, LinearState(kv, keys)


def _advance_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: LinearState,
    log_decay: Tensor | None,
    with_denominator: bool,
) -> tuple[Tensor, Tensor | None, LinearState]:
    """:func:`_advance` for T = 1, a fifth of its time: the state first, then what q reads of it."""
    kv, keys = before
    if log_decay is not None:
        rate = torch.exp(log_decay.to(q)).unsqueeze(-1)
        kv, keys = kv * rate.unsqueeze(-1), keys * rate
    kv = torch.addcmul(kv, k.transpose(-1, -2), v)
    denominator = None
    if with_denominator:
        keys = keys + k.squeeze(-2)
        denominator = (q * keys.unsqueeze(-2)).sum(-1)
    return q @ kv, denominator, LinearState(kv, keys)


# --- decay -------------------------------------------------------------------------------------


def _decay_matrix(log_decay: Tensor, length: int, like: Tensor) -> Tensor:
    """(H, T, T): exp(log_decay (s - t)) for t <= s, 1 above the diagonal. Never overflows."""
    step = torch.arange(length, device=like.device)
    lag = (step.unsqueeze(-1) - step).clamp_min(0).to(like.dtype)
    return torch.exp(log_decay.to(like)[:, None, None] * lag)


def _block_decay(log_decay: Tensor | None, like: Tensor) -> tuple:
    """Factors for one block of T tokens, each broadcastable to (B, H, T, .).

    ``into``: what is left at step i of what came before the block, r^(i+1). ``out_of``: what
    is left of step i after the block, r^(T-1-i). ``whole``: over the whole block, r^T.
    """
    if log_decay is None:
        return 1.0, 1.0, torch.ones((), dtype=like.dtype, device=like.device).view(1, 1, 1, 1)
    length = like.shape[-2]
    step = torch.arange(length, device=like.device, dtype=like.dtype)
    rate = log_decay.to(like)[:, None, None]
    into = torch.exp(rate * (step + 1).unsqueeze(-1))
    return into, torch.exp(rate * (length - 1 - step).unsqueeze(-1)), torch.exp(rate * length)


# --- the chunked causal form -------------------------------------------------------------------


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The causal sums of (B, H, T, .) tensors, chunk by chunk.

    ``wanted``: "numerator", sum_{t<=s} (q_s . k_t) v_t; "sums", that and the denominator
    sum_{t<=s} q_s . k_t (B, H, T); "normalized", their clamped quotient. Within a chunk the
    scores are formed; what came before enters through the state. T is cut into equal chunks of
    at most :data:`CHUNK`; the few zero rows that fill the last one never reach the caller.
    """
    batch, heads, length, _ = q.shape
    chunks = max(1, math.ceil(length / CHUNK))
    size = math.ceil(length / chunks)
    rows = [_cut(x, chunks, size) for x in (q, k, v)]
    out, denominator = _ChunkedAttention.apply(*rows, wanted, log_decay)
    out = out.reshape(batch, heads, chunks * size, -1)[:, :, :length]
    if wanted != "sums":
        return out, None
    return out, denominator.reshape(batch, heads, chunks * size)[:, :, :length]


def _cut(x: Tensor, chunks: int, size: int) -> Tensor:
    """(B, H, T, D) -> (B, H, N, C, D), filled up with zero rows."""
    missing = chunks * size - x.shape[-2]
    # contiguous once, or every product of the two passes would copy the strided heads again
    x = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
    return x.reshape(*x.shape[:2], chunks, size, x.shape[-1])


class _ChunkedAttention(torch.autograd.Function):
    """Causal linear attention on (B, H, N, C, D) chunks: (result, denominator).

    Saves the N states, recomputes the C x C scores in the backward pass: memory is linear
    in T. With G the gradient of the numerators and g that of the denominators, g acts as the
    gradient of one more value column of ones. Inside, all chunks form one batch.
    """

    @staticmethod
    def forward(ctx, q, k, v, wanted, log_decay):
        chunks = _Chunks(q.shape, log_decay, q)
        q, k, v = (x.flatten(0, 2) for x in (q, k, v))
        k_in, q_in = chunks.left_after(k), chunks.left_of_before(q)
        scores = chunks.mask(torch.bmm(q, k.mT))
        states = chunks.scan(torch.bmm(k_in.mT, v))
        out = torch.bmm(scores, v).baddbmm_(q_in, states)
        keys = denominator = None
        if wanted != "numerator":
            keys = chunks.scan(k_in.sum(1, keepdim=True))
            denominator = scores.sum(-1, keepdim=True).baddbmm_(q_in, keys.mT)
        if wanted == "normalized":
            out /= denominator.clamp_min(EPS)
        kept = (out, denominator) if wanted == "normalized" else (None, None)
        ctx.save_for_backward(q, k, v, states, keys, *kept)
        ctx.chunks, ctx.wanted = chunks, wanted
        return chunks.split(out), chunks.split(denominator) if wanted == "sums" else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_denominator):
        q, k, v, states, keys, out, denominator = ctx.saved_tensors
        chunks, grad, g = ctx.chunks, grad.flatten(0, 2), None
        if ctx.wanted == "sums":
            g = grad_denominator.flatten(0, 2)
        if ctx.wanted == "normalized":
            grad, g = _through_quotient(grad, out, denominator)
        k_in, q_in = chunks.left_after(k), chunks.left_of_before(q)
        grad_states = chunks.scan(torch.bmm(q_in.mT, grad), reverse=True)
        grad_q = torch.bmm(grad, states.mT)
        grad_k = torch.bmm(v, grad_states.mT)
        if g is None:
            grad_scores = torch.bmm(grad, v.mT)
        else:
            grad_scores = torch.baddbmm(g, grad, v.mT)
            grad_q.addcmul_(g, keys)
            grad_k += chunks.scan(torch.bmm(g.mT, q_in), reverse=True)
        grad_q, grad_k = chunks.left_of_before(grad_q), chunks.left_after(grad_k)
        grad_scores = chunks.mask(grad_scores)
        grad_q.baddbmm_(grad_scores, k)
        grad_k.baddbmm_(grad_scores.mT, q)
        scores = chunks.mask(torch.bmm(q, k.mT))
        grad_v = torch.bmm(scores.mT, grad).baddbmm_(k_in, grad_states)
        return *(chunks.split(x) for x in (grad_q, grad_k, grad_v)), None, None


def _through_quotient(grad: Tensor, out: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of numerator and denominator of out = numerator / max(denominator, EPS)."""
    clamped = denominator.clamp_min(EPS)
    g = (grad * out).sum(-1, keepdim=True).div_(clamped).neg_()
    return grad / clamped, g.masked_fill_(denominator < EPS, 0.0)


class _Chunks:
    """What joins B x H x N chunks that stand in one batch: masks, decay and running sums."""

    def __init__(self, shape: torch.Size, log_decay: Tensor | None, like: Tensor) -> None:
        self.shape = shape[:3]  # B H N
        self.decays = log_decay is not None
        if self.decays:
            into, out_of, self.whole = _block_decay(log_decay, like)
            self.into, self.out_of = into.unsqueeze(1), out_of.unsqueeze(1)  # H 1 C 1
            self.within = _decay_matrix(log_decay, shape[3], like).unsqueeze(1)  # H 1 C C

    def split(self, x: Tensor) -> Tensor:
        """(B H N, C, .) -> (B, H, N, C, .)."""
        return x.unflatten(0, self.shape)

    def mask(self, scores: Tensor) -> Tensor:
        """Zero above the diagonal and decay below it, in place."""
        if self.decays:
            self.split(scores).mul_(self.within)
        return scores.tril_()

    def left_of_before(self, x: Tensor) -> Tensor:
        """x times what is left, at each step of a chunk, of all that came before the chunk."""
        return (self.split(x) * self.into).flatten(0, 2) if self.decays else x

    def left_after(self, x: Tensor) -> Tensor:
        """x times what is left of each step at the end of its chunk."""
        return (self.split(x) * self.out_of).flatten(0, 2) if self.decays else x

    def scan(self, parts: Tensor, reverse: bool = False) -> Tensor:
        """Exclusive (decayed) running sum of (B H N, ., .) over the N chunks of a sequence."""
        sums = torch.empty_like(parts)
        part, total = (self.split(x).unbind(2) for x in (parts, sums))
        if reverse:
            part, total = part[::-1], total[::-1]
        total[0].zero_()
        for n in range(len(part) - 1):
            if self.decays:
                torch.addcmul(part[n], total[n], self.whole, out=total[n + 1])
            else:
                torch.add(total[n], part[n], out=total[n + 1])
        return sums
