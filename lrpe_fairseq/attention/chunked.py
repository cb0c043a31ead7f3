"""The causal sums of linear attention in PyTorch, chunk by chunk: O(T) in time and memory.

Scores are computed within a chunk; earlier tokens contribute through the state. The definition is
``kernels.causal.definition``. The C++ and Triton forms are in ``kernels``.

Axes: L = B H sequences of N chunks of C tokens, D key width, E value width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.kernels import causal
from lrpe_fairseq.kernels.causal import chunks_of, cut, decay_matrix, present
from lrpe_fairseq.kernels.dispatch import exact, gradients_of, is_plain

SCAN = 64
"""Number of chunks whose running sums of keys are computed by one SCAN x SCAN product."""

PIECE = 4096
"""Tokens of a head that a CPU processes at a time, so that intermediate results stay in its cache
and their memory is reused. A GPU processes all tokens at once."""


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, wanted: str, log_decay: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`causal.definition` in half the time and memory for a constant decay (H,).

    T is split into equal chunks of at most ``causal.CHUNK`` tokens; the last one is padded with
    zero rows. The definition itself is used for a decay per token, for a decay that needs a
    gradient, and where :func:`is_plain` is false.
    """
    if not is_plain(q, k, v) or varies(log_decay):
        return causal.definition(q, k, v, wanted, log_decay, eps)
    batch, heads, length, _ = q.shape
    chunks, size = chunks_of(length)
    # contiguous once; otherwise every product of both passes would copy the strided heads
    rows = (cut(x, chunks, size).contiguous() for x in (q, k, v))
    out, denominator = _CausalSums.apply(*rows, wanted, log_decay, eps)
    out = out.reshape(batch, heads, chunks * size, -1)[:, :, :length]
    if wanted != "sums":
        return out, None
    return out, denominator.reshape(batch, heads, chunks * size)[:, :, :length]


def varies(log_decay: Tensor | None) -> bool:
    """True for a decay per token, or one that needs a gradient."""
    if log_decay is None:
        return False
    return log_decay.dim() == 3 or (log_decay.requires_grad and torch.is_grad_enabled())


class BlockDecay(NamedTuple):
    """Decay factors for a block of T tokens, (H, T or 1, 1), or (B, H, T or 1, 1) per token.

    into: r^(i+1), from the state before the block to token i. out_of: r^(T-1-i), from token i to
    the state after the block. whole: r^T, from the state before the block to the one after it.
    """

    into: Tensor
    out_of: Tensor
    whole: Tensor


def block_decay(log_decay: Tensor, length: int, like: Tensor) -> BlockDecay:
    """Return the factors for ``length`` tokens with log_decay (H,) or (B, H, T)."""
    if log_decay.dim() == 3:
        left = log_decay.double().cumsum(-1).unsqueeze(-1)
        powers = (left, left[..., -1:, :] - left, left[..., -1:, :])
    else:
        step = torch.arange(length, device=like.device, dtype=like.dtype).unsqueeze(-1)
        rate = log_decay.to(like)[:, None, None]
        powers = (rate * (step + 1), rate * (length - 1 - step), rate * length)
    return BlockDecay(*(torch.exp(power).to(like) for power in powers))


class _CausalSums(torch.autograd.Function):
    """(result, denominator) of (B, H, N, C, .) chunks.

    The N states are saved, and the C x C scores are recomputed in the backward pass, so memory is
    linear in T. G is the gradient of the numerators and g that of the denominators. A denominator
    is a numerator whose values are 1, so g acts as one more column of G.
    """

    @staticmethod
    def forward(ctx, q, k, v, wanted, log_decay, eps):
        ctx.rows, ctx.settings = q.shape[:2], (wanted, log_decay, eps)
        ctx.pieces = _pieces(q, log_decay)
        given_rows = q, k, v
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # L N C .
        out, denominator = torch.empty_like(v), q.new_empty(*q.shape[:3], 1)
        keys = q.new_empty(*q.shape[:2], 1, q.shape[-1])
        states = q.new_empty(*q.shape[:2], q.shape[-1], v.shape[-1])
        before = _zero_total(states), _zero_total(keys)
        for piece in ctx.pieces:
            parts = piece.of(q, k, v, out, denominator, states, keys)
            _results(piece, before, *parts, wanted, eps)
        kept = (out, denominator) if wanted == "normalized" else (None, None)
        ctx.save_for_backward(*given_rows, *kept, states, keys)
        given = denominator.unflatten(0, ctx.rows) if wanted == "sums" else None
        return out.unflatten(0, ctx.rows), given

    @staticmethod
    def backward(ctx, grad, g):
        if torch.is_grad_enabled():
            return _gradients_as_graph(ctx, grad, g)
        *given_rows, out, denominator, states, keys = ctx.saved_tensors
        q, k, v = (x.flatten(0, 1) for x in given_rows)
        wanted, _, eps = ctx.settings
        grad, g = grad.flatten(0, 1), None if g is None else g.flatten(0, 1)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        after = _zero_total(states), _zero_total(keys)
        with exact(q):
            for piece in reversed(ctx.pieces):
                grad_here, g_here = piece.of(grad, g)
                if wanted == "normalized":
                    kept = piece.of(out, denominator)
                    grad_here, g_here = _through_quotient(grad_here, *kept, eps)
                parts = piece.of(q, k, v, states, keys, *grads)
                _gradients(piece, after, grad_here, g_here, *parts)
        return *(x.unflatten(0, ctx.rows) for x in grads), None, None, None


def _gradients_as_graph(ctx, grad: Tensor, g: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of a call with their graph, for second derivatives."""
    chunks = ctx.saved_tensors[0].shape[2:4]

    def definition(*rows: Tensor) -> tuple[Tensor, ...]:
        results = causal.definition(*(x.flatten(2, 3) for x in rows), *ctx.settings)
        return tuple(x.unflatten(2, chunks) for x in present(*results))

    grads = present(grad, None if g is None else g.squeeze(-1))
    inputs, needed = ctx.saved_tensors[:3], ctx.needs_input_grad[:3]
    return *gradients_of(definition, inputs, needed, grads), None, None, None


def _zero_total(sums: Tensor) -> Tensor:
    """Return zeros (L, ., .), the initial running total of ``sums`` (L, N, ., .)."""
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
    """Compute ``out``, ``denominator``, ``states`` and ``keys`` of a piece."""
    k_in, q_in = piece.decayed_out_of(k), piece.decayed_into(q)
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
    """Compute ``grad_q``, ``grad_k`` and ``grad_v`` of a piece."""
    k_in, q_in = piece.decayed_out_of(k), piece.decayed_into(q)
    grad_states = piece.scan(torch.bmm(q_in.mT, grad), after[0], reverse=True)
    torch.bmm(grad, states.mT, out=grad_q)
    torch.bmm(v, grad_states.mT, out=grad_k)
    if g is None:
        grad_scores = torch.bmm(grad, v.mT)
    else:
        grad_scores = torch.baddbmm(g, grad, v.mT)
        grad_q.addcmul_(g, keys)
        grad_k += piece.scan_rows(torch.bmm(g.mT, q_in), after[1], reverse=True)
    piece.decayed_into(grad_q, out=grad_q)
    piece.decayed_out_of(grad_k, out=grad_k)
    grad_scores = piece.mask(grad_scores)
    grad_q.baddbmm_(grad_scores, k)
    grad_k.baddbmm_(grad_scores.mT, q)
    scores = piece.mask(torch.bmm(q, k.mT))
    torch.bmm(scores.mT, grad, out=grad_v).baddbmm_(k_in, grad_states)


def _through_quotient(
    grad: Tensor, out: Tensor, denominator: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both parts of out = numerator / max(denominator, eps)."""
    clamped = denominator.clamp_min(eps)
    g = (grad * out).sum(-1, keepdim=True).div_(clamped).neg_()
    return grad / clamped, g.masked_fill_(denominator < eps, 0.0)


# --- pieces ------------------------------------------------------------------------------------


class _Decay(NamedTuple):
    """A :class:`BlockDecay` for the chunks of R sequences, and ``within`` a chunk, (R, C, C)."""

    into: Tensor
    out_of: Tensor
    whole: Tensor
    within: Tensor


class _Piece(NamedTuple):
    """Chunks that are processed together: all chunks of R sequences, or some of one sequence.

    rows: the sequences. span: the chunks. steps: decay from each chunk to later ones, (R or 1, S,
    S), lower triangular. decay: the factors within a chunk, or None.
    """

    rows: slice
    span: slice
    steps: Tensor
    decay: _Decay | None

    def of(self, *whole: Tensor | None) -> list[Tensor | None]:
        """Return the M chunks of this piece from every (L, N, ., .), as one batch (M, ., .)."""
        return [x if x is None else x[self.rows, self.span].flatten(0, 1) for x in whole]

    def _by_row(self, x: Tensor) -> Tensor:
        """(M, ., .) -> (R, M / R, ., .)."""
        return x.unflatten(0, (self.rows.stop - self.rows.start, -1))

    def mask(self, scores: Tensor) -> Tensor:
        """Apply the causal mask and the decay to scores (M, C, C), in place."""
        if self.decay is not None:
            self._by_row(scores).mul_(self.decay.within.unsqueeze(1))
        return scores.tril_()

    def decayed_into(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return x times ``decay.into``."""
        return x if self.decay is None else self._times(x, self.decay.into, out)

    def decayed_out_of(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return x times ``decay.out_of``."""
        return x if self.decay is None else self._times(x, self.decay.out_of, out)

    def _times(self, x: Tensor, factor: Tensor, out: Tensor | None) -> Tensor:
        out = torch.empty_like(x) if out is None else out
        torch.mul(self._by_row(x), factor.unsqueeze(1), out=self._by_row(out))
        return out

    def scan(
        self, parts: Tensor, total: Tensor, out: Tensor | None = None, reverse: bool = False
    ) -> Tensor:
        """Compute the exclusive (decayed) running sum of (M, ., .) over each sequence's chunks.

        ``total`` (L, ., .) holds the sums of all sequences before this piece. It is updated in
        place to the sums after it.
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
        """Compute :meth:`scan` of rows (M, 1, .) with one product, which is faster than a loop.

        ``total`` is one more row of that product, before the first or after the last.
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
    """Return pieces that cover all chunks of q (B, H, N, C, D), in the order of time."""
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
