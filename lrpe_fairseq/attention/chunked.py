"""The causal sums of linear attention in PyTorch, chunk by chunk: O(T) in time and memory.

Within a chunk the scores are formed; what came before enters through the state. The reference is
``linear.linear_attention_naive``; ``fused`` has the same sums as Triton kernels.

Axes: L = B H sequences of N chunks of C tokens, D key width, E value width.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 64
"""Longest chunk; the cost per token is O(CHUNK + D)."""

SCAN = 64
"""Chunks whose running sum of keys is one product, of a matrix of SCAN x SCAN."""

PIECE = 4096
"""Tokens of a head that a CPU works on at a time, so that what lies between arguments and results
stays in its cache and is not allocated anew. A GPU takes all at once."""


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """The causal sums of q, k (B, H, T, D) and v (B, H, T, E).

    ``wanted``: "numerator", sum_{t<=s} (q_s . k_t) v_t; "sums", that and the denominator
    sum_{t<=s} q_s . k_t (B, H, T); "normalized", their quotient, clamped to ``eps`` from below.
    ``log_decay`` (H,) multiplies the score of (s, t) by exp(log_decay (s - t)).

    T is cut into equal chunks of at most :data:`CHUNK`; the few zero rows that fill the last one
    never reach the caller.
    """
    batch, heads, length, _ = q.shape
    chunks = max(1, math.ceil(length / CHUNK))
    size = math.ceil(length / chunks)
    rows = (_cut(x, chunks, size) for x in (q, k, v))
    out, denominator = _CausalSums.apply(*rows, wanted, log_decay, eps)
    out = out.reshape(batch, heads, chunks * size, -1)[:, :, :length]
    if wanted != "sums":
        return out, None
    return out, denominator.reshape(batch, heads, chunks * size)[:, :, :length]


def decay_matrix(log_decay: Tensor, length: int, like: Tensor) -> Tensor:
    """(H, T, T): exp(log_decay (s - t)) for t <= s, 1 above the diagonal. Never overflows."""
    step = torch.arange(length, device=like.device)
    lag = (step.unsqueeze(-1) - step).clamp_min(0).to(like.dtype)
    return torch.exp(log_decay.to(like)[:, None, None] * lag)


class BlockDecay(NamedTuple):
    """Factors for one block of T tokens, each (H, T or 1, 1).

    ``into``: what is left at step i of what came before the block, r^(i+1). ``out_of``: what
    is left of step i after the block, r^(T-1-i). ``whole``: over the whole block, r^T.
    """

    into: Tensor
    out_of: Tensor
    whole: Tensor


def block_decay(log_decay: Tensor, length: int, like: Tensor) -> BlockDecay:
    """Those of a block of ``length`` tokens."""
    step = torch.arange(length, device=like.device, dtype=like.dtype).unsqueeze(-1)
    rate = log_decay.to(like)[:, None, None]
    powers = (rate * (step + 1), rate * (length - 1 - step), rate * length)
    return BlockDecay(*(torch.exp(power) for power in powers))


def _cut(x: Tensor, chunks: int, size: int) -> Tensor:
    """(B, H, T, D) -> (B, H, N, C, D), filled up with zero rows."""
    missing = chunks * size - x.shape[-2]
    # contiguous once, or every product of the two passes would copy the strided heads again
    x = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
    return x.reshape(*x.shape[:2], chunks, size, x.shape[-1])


class _CausalSums(torch.autograd.Function):
    """(result, denominator) of (B, H, N, C, .) chunks.

    Saves the N states, recomputes the C x C scores in the backward pass: memory is linear
    in T. With G the gradient of the numerators and g that of the denominators, g acts as the
    gradient of one more value column of ones.
    """

    @staticmethod
    def forward(ctx, q, k, v, wanted, log_decay, eps):
        ctx.rows, ctx.wanted, ctx.eps = q.shape[:2], wanted, eps
        ctx.pieces = _pieces(q, log_decay)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # L N C .
        out, denominator = torch.empty_like(v), q.new_empty(*q.shape[:3], 1)
        keys = q.new_empty(*q.shape[:2], 1, q.shape[-1])
        states = q.new_empty(*q.shape[:2], q.shape[-1], v.shape[-1])
        before = _nothing(states), _nothing(keys)
        for piece in ctx.pieces:
            parts = piece.of(q, k, v, out, denominator, states, keys)
            _results(piece, before, *parts, wanted, eps)
        kept = (out, denominator) if wanted == "normalized" else (None, None)
        ctx.save_for_backward(*kept, q, k, v, states, keys)
        given = denominator.unflatten(0, ctx.rows) if wanted == "sums" else None
        return out.unflatten(0, ctx.rows), given

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, g):
        *kept, q, k, v, states, keys = ctx.saved_tensors
        grad, g = grad.flatten(0, 1), None if g is None else g.flatten(0, 1)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        after = _nothing(states), _nothing(keys)
        with torch.autocast(q.device.type, enabled=False):
            for piece in reversed(ctx.pieces):
                grad_here, g_here = piece.of(grad, g)
                if ctx.wanted == "normalized":
                    grad_here, g_here = _through_quotient(grad_here, *piece.of(*kept), ctx.eps)
                parts = piece.of(q, k, v, states, keys, *grads)
                _gradients(piece, after, grad_here, g_here, *parts)
        return *(x.unflatten(0, ctx.rows) for x in grads), None, None, None


def _nothing(sums: Tensor) -> Tensor:
    """A running total of ``sums`` (L, N, ., .) before the first: zeros (L, ., .)."""
    return sums.new_zeros(sums.shape[0], *sums.shape[2:])


def _results(
    piece: "_Piece",
    before: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    denominator: Tensor,
    states: Tensor,
    keys: Tensor,
    wanted: str,
    eps: float,
) -> None:
    """Fill in ``out``, ``denominator``, ``states`` and ``keys`` of a piece."""
    k_in, q_in = piece.left_after(k), piece.left_of_before(q)
    scores = piece.mask(torch.bmm(q, k.mT))
    piece.scan(torch.bmm(k_in.mT, v), before[0], out=states)
    torch.bmm(scores, v, out=out).baddbmm_(q_in, states)
    if wanted == "numerator":
        return
    piece.scan_rows(k_in.sum(1, keepdim=True), before[1], out=keys)
    torch.sum(scores, -1, keepdim=True, out=denominator).baddbmm_(q_in, keys.mT)
    if wanted == "normalized":
        out /= denominator.clamp_min(eps)


def _gradients(
    piece: "_Piece",
    after: tuple[Tensor, Tensor],
    grad: Tensor,
    g: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    keys: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
) -> None:
    """Fill in the last three of a piece."""
    k_in, q_in = piece.left_after(k), piece.left_of_before(q)
    grad_states = piece.scan(torch.bmm(q_in.mT, grad), after[0], reverse=True)
    torch.bmm(grad, states.mT, out=grad_q)
    torch.bmm(v, grad_states.mT, out=grad_k)
    if g is None:
        grad_scores = torch.bmm(grad, v.mT)
    else:
        grad_scores = torch.baddbmm(g, grad, v.mT)
        grad_q.addcmul_(g, keys)
        grad_k += piece.scan_rows(torch.bmm(g.mT, q_in), after[1], reverse=True)
    piece.left_of_before(grad_q, out=grad_q)
    piece.left_after(grad_k, out=grad_k)
    grad_scores = piece.mask(grad_scores)
    grad_q.baddbmm_(grad_scores, k)
    grad_k.baddbmm_(grad_scores.mT, q)
    scores = piece.mask(torch.bmm(q, k.mT))
    torch.bmm(scores.mT, grad, out=grad_v).baddbmm_(k_in, grad_states)


def _through_quotient(
    grad: Tensor, out: Tensor, denominator: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of numerator and denominator of out = numerator / max(denominator, eps)."""
    clamped = denominator.clamp_min(eps)
    g = (grad * out).sum(-1, keepdim=True).div_(clamped).neg_()
    return grad / clamped, g.masked_fill_(denominator < eps, 0.0)


# --- pieces ------------------------------------------------------------------------------------


class _Decay(NamedTuple):
    """A :class:`BlockDecay` of R sequences' chunks, and the decay ``within`` a chunk, (R, C, C)."""

    into: Tensor
    out_of: Tensor
    whole: Tensor
    within: Tensor


class _Piece(NamedTuple):
    """Chunks that are worked on together: those of R whole sequences, or a part of one.

    ``steps``: what is left of a chunk when later ones begin, (R or 1, S, S) lower triangular.
    """

    rows: slice
    span: slice
    steps: Tensor
    decay: _Decay | None

    def of(self, *whole: Tensor | None) -> list[Tensor | None]:
        """The piece of every (L, N, ., .): its M chunks in one batch, (M, ., .)."""
        return [x if x is None else x[self.rows, self.span].flatten(0, 1) for x in whole]

    def _by_row(self, x: Tensor) -> Tensor:
        """(M, ., .) -> (R, M / R, ., .)."""
        return x.unflatten(0, (self.rows.stop - self.rows.start, -1))

    def mask(self, scores: Tensor) -> Tensor:
        """Zero above the diagonal and decay below it, in place."""
        if self.decay is not None:
            self._by_row(scores).mul_(self.decay.within.unsqueeze(1))
        return scores.tril_()

    def left_of_before(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x times what is left, at each step of a chunk, of all that came before the chunk."""
        return x if self.decay is None else self._times(x, self.decay.into, out)

    def left_after(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x times what is left of each step at the end of its chunk."""
        return x if self.decay is None else self._times(x, self.decay.out_of, out)

    def _times(self, x: Tensor, factor: Tensor, out: Tensor | None) -> Tensor:
        out = torch.empty_like(x) if out is None else out
        torch.mul(self._by_row(x), factor.unsqueeze(1), out=self._by_row(out))
        return out

    def scan(
        self, parts: Tensor, total: Tensor, out: Tensor | None = None, reverse: bool = False
    ) -> Tensor:
        """Exclusive (decayed) running sum of (M, ., .) over the chunks of every sequence.

        ``total`` (L, ., .): of all sequences, what came before this piece; then, what comes after.
        """
        out = torch.empty_like(parts) if out is None else out
        order = slice(None, None, -1 if reverse else 1)
        given, sums = (self._by_row(x).unbind(1)[order] for x in (parts, out))
        total = total[self.rows]
        sums[0].copy_(total)
        for part, here, following in zip(given, sums, (*sums[1:], total), strict=True):
            if self.decay is None:
                torch.add(here, part, out=following)
            else:
                torch.addcmul(part, here, self.decay.whole, out=following)
        return out

    def scan_rows(
        self, parts: Tensor, total: Tensor, out: Tensor | None = None, reverse: bool = False
    ) -> Tensor:
        """:meth:`scan` of rows (M, 1, .) by one product: a loop would cost more than its sums.

        ``total`` is one row more, before the first or after the last.
        """
        out = torch.empty_like(parts) if out is None else out
        given, sums = (self._by_row(x).squeeze(2).split(SCAN, 1) for x in (parts, out))  # R N .
        blocks = list(zip(given, sums, strict=True))
        total = total[self.rows]
        for part, here in reversed(blocks) if reverse else blocks:
            steps = self.steps[:, : part.shape[1] + 1, : part.shape[1] + 1]
            if reverse:
                seen = steps.mT @ torch.cat([part, total], 1)
                following, seen = seen.split([1, part.shape[1]], 1)
            else:
                seen = steps @ torch.cat([total, part], 1)
                seen, following = seen.split([part.shape[1], 1], 1)
            here.copy_(seen)
            total.copy_(following)
        return out


def _pieces(q: Tensor, log_decay: Tensor | None) -> list[_Piece]:
    """All chunks of q (B, H, N, C, D), in the order of time."""
    batch, heads, chunks, size, _ = q.shape
    sequences = batch * heads
    at_once = max(1, PIECE // size) if q.device.type == "cpu" else sequences * chunks
    rows, span = max(1, at_once // chunks), min(at_once, chunks)
    count = min(span, SCAN) + 1
    steps, decay = q.new_ones(1, count, count).tril_(), None
    if log_decay is not None:
        log_decay = log_decay.to(q).repeat(batch)
        steps = decay_matrix(log_decay * size, count, q).tril_()
        decay = _Decay(*block_decay(log_decay, size, q), decay_matrix(log_decay, size, q))
    pieces = []
    for row in range(0, sequences, rows):
        here = slice(row, min(row + rows, sequences))
        of_rows = None if decay is None else _Decay(*(factor[here] for factor in decay))
        own_steps = steps if decay is None else steps[here]
        for chunk in range(0, chunks, span):
            part = slice(chunk, min(chunk + span, chunks))
            pieces.append(_Piece(here, part, own_steps, of_rows))
    return pieces
