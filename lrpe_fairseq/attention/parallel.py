"""One text over several processes: each holds a part of its tokens (sequence parallelism).

Causal attention of a part needs little of the parts before it. Linear attention needs the state
that they leave: every rank computes the state of its own part from zero and the decay over that
part, these are gathered once, and each rank combines those before it (LASP, Sun et al. 2024):

    S_r = sum_(i<r) A_(r-1) ... A_(i+1) S_i

A_i is 1, a decay, or for a transport of keys the product of the reflections. Softmax attention, and
linear attention in a window, gather keys, values and sums of gates. Causal filters gather the last
tokens of each part, and sums over the text gather one number for each of theirs.

Everything is ordinary PyTorch on ``torch.distributed``. All ranks of a group must call the same
layers in the same order, forward and backward.

Axes: N ranks, B batch, H heads, T tokens of this rank's part, D key width, E value width, C width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lrpe_fairseq.attention import linear, softmax
from lrpe_fairseq.attention.linear import linear_attention
from lrpe_fairseq.attention.operators import carried, carried_sums
from lrpe_fairseq.attention.tokens import Tokens, tokens_of
from lrpe_fairseq.encodings.core.forms import Transport
from lrpe_fairseq.encodings.core.history import Earlier, history
from lrpe_fairseq.encodings.core.positions import PositionCache, counted
from lrpe_fairseq.encodings.core.protocols import Encoding
from lrpe_fairseq.encodings.core.randomness import noise_of
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels.conditions import without_autocast

_current: list["SplitSequence"] = []


@contextmanager
def sequence_parallel(group: Any = None, length: int | None = None) -> Iterator["SplitSequence"]:
    """Let causal self-attention read its x (B, T, C) as this rank's part of a longer text.

    >>> with sequence_parallel(group, length=tokens.shape[1]) as sequence:
    ...     out, _ = attention.attend(sequence.part(x))  # (B, T, C) of this rank
    ...     loss(out, sequence.part(target)).backward()

    Gradients of parameters are those of this rank's tokens: sum them over the ranks. The backward
    pass may be outside, unless activation checkpointing computes attention again in it.

    Args:
        group: a process group of torch.distributed; its ranks hold the parts in order. None: all
            processes.
        length: tokens of the whole text, whose parts are those of :meth:`SplitSequence.part`.
            None: all ranks hold equally many.
    Masks: either all ranks pass ``key_padding_mask`` (or ``starts``) of their parts, or none does.
    Raises: ValueError in the call of attention for what cannot be split; see :func:`check`.
    """
    sequence = SplitSequence(group, length)
    _current.append(sequence)
    try:
        yield sequence
    finally:
        _current.pop()


def current() -> "SplitSequence | None":
    """Return the innermost :func:`sequence_parallel`, or None."""
    return _current[-1] if _current else None


def check_outside(what: str) -> None:
    """Raise ValueError in :func:`sequence_parallel`, which does not split ``what``."""
    if _current:
        raise ValueError(
            f"{what} cannot be split over processes: call it outside sequence_parallel"
        )


class Facts(NamedTuple):
    """What is known of the parts of all ranks, (N, B) each, int64."""

    real: Tensor
    """Real tokens of the part."""
    open: Tensor
    """Real tokens since the last start of a document in the part, or all if there is none."""
    cut: Tensor
    """1 if a document begins in the part, else 0."""


class SplitSequence:
    """A text over the ranks of a group, and this rank's place in it.

    group, length: see :func:`sequence_parallel`. sent: bytes that this rank has sent to others so
    far, each collective counted as its ring (N - 1 messages); forward and backward.
    """

    def __init__(self, group: Any = None, length: int | None = None) -> None:
        self.group, self.length, self.sent = group, length, 0
        self.rank, self.size, self.first_rank = self._find_ranks()
        if length is not None and length < self.size:
            raise ValueError(
                f"a text of {length} tokens cannot be split over {self.size} processes: pad it to "
                f"at least {self.size} tokens"
            )
        self._facts = PositionCache()

    def _find_ranks(self) -> tuple[int, int, int]:
        """Return the rank in the group, the number of ranks, and the first one's global rank."""
        first = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        return dist.get_rank(self.group), dist.get_world_size(self.group), first

    def lengths(self, own: int) -> list[int]:
        """Return the tokens of every part; ``own``: those of this rank."""
        if self.length is None:
            return [own] * self.size
        short, more = divmod(self.length, self.size)
        return [short + (rank < more) for rank in range(self.size)]

    @property
    def place(self) -> slice:
        """The tokens of this rank in the whole text. Raises: ValueError without a length."""
        if self.length is None:
            raise ValueError("pass the length of the whole text to sequence_parallel")
        lengths = self.lengths(0)
        first = sum(lengths[: self.rank])
        return slice(first, first + lengths[self.rank])

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of the whole x; parts differ by at most one token."""
        place = self.place
        return x.narrow(dim, place.start, place.stop - place.start)

    @contextmanager
    def one_text(self) -> Iterator[None]:
        """Let encodings draw the same random numbers on all ranks of the group."""
        with noise_of(self.first_rank):
            yield

    def gather(self, x: Tensor) -> Tensor:
        """Return x of every rank, (N, ...). In the backward pass gradients are summed."""
        return _Gather.apply(x, self)

    def exchange(self, x: Tensor) -> Tensor:
        """Return x of every rank, (N, ...), without a gradient."""
        found = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(found.unbind(0)), x.contiguous(), self.group)
        return found

    def summed(self, grads: Tensor) -> Tensor:
        """Return this rank's part (...) of the sum of all ranks' grads (N, ...)."""
        if dist.get_backend(self.group) == "nccl":
            own = torch.empty_like(grads[0])
            dist.reduce_scatter_tensor(own, grads, group=self.group)
            return own
        dist.all_reduce(grads, group=self.group)
        return grads[self.rank]

    def count(self, x: Tensor) -> None:
        """Count the bytes of one collective of tensors like x, as a ring sends them."""
        self.sent += (self.size - 1) * x.numel() * x.element_size()

    def facts(self, x: Tensor, padding: Tensor | None, starts: Tensor | None) -> Facts:
        """Return :class:`Facts` of parts like x (B, T, C); communicates once for equal masks."""
        lengths = self.lengths(x.shape[1])
        if padding is None and starts is None:
            real = torch.tensor(lengths, device=x.device).unsqueeze(1).expand(-1, len(x))
            return Facts(real, real, torch.zeros_like(real))
        sources = tuple(mask for mask in (padding, starts) if mask is not None)
        key = padding is None, starts is None
        return self._facts.get(sources, key, lambda: self._gathered_facts(padding, starts))

    def _gathered_facts(self, padding: Tensor | None, starts: Tensor | None) -> Facts:
        real = torch.ones_like(starts) if padding is None else ~padding.bool()
        own = real.sum(1)
        if starts is None:
            return Facts(*self.gather(torch.stack([own, own, torch.zeros_like(own)])).unbind(1))
        starts = starts & real
        since = (real & ~_before_a_start(starts)).sum(1)
        return Facts(*self.gather(torch.stack([own, since, starts.any(1).long()])).unbind(1))

    def tokens(
        self,
        x: Tensor,
        padding: Tensor | None,
        positions: Tensor | None,
        *,
        starts: Tensor | None = None,
        window: int | None = None,
        one_sided: bool = False,
    ) -> Tokens:
        """Return the tokens of this part x (B, T, C), counted from the start of the text.

        Arguments are those of ``tokens_of``. ``one_sided`` is not read: it is of the whole text.
        """
        facts = self.facts(x, padding, starts)
        more = {"window": window, "history": _Histories(EarlierParts(self, facts))}
        if padding is None and starts is None:
            first = sum(self.lengths(x.shape[1])[: self.rank])
            counts = counted(first + x.shape[1], x.device, first)
            if positions is None:
                return Tokens(counts, first_slot=first, **more)
            return Tokens(positions, counts, **more)
        before = torch.zeros_like(facts.open[0])
        for since, cut in zip(facts.open[: self.rank], facts.cut[: self.rank], strict=True):
            before = torch.where(cut.bool(), since, before + since)
        return tokens_of(x, padding, before, positions, starts=starts, **more)


class _Gather(torch.autograd.Function):
    """All-gather; backward: reduce-scatter, which gloo computes as an all-reduce.

    Trap: on every rank something that needs a gradient must depend on the result, if only by a part
    of it without elements; otherwise that rank never takes part in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: SplitSequence) -> Tensor:
        ctx.sequence = sequence
        sequence.count(x)
        return sequence.exchange(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
        wide = grads.to(torch.promote_types(grads.dtype, torch.float32)).contiguous()
        ctx.sequence.count(wide[0])
        return ctx.sequence.summed(wide).to(grads.dtype), None


class _OneProcess(SplitSequence):
    """The last rank of a group that does not exist: all ranks would send the same."""

    def __init__(self, ranks: int, length: int) -> None:
        self._ranks = ranks
        super().__init__(None, length)

    def _find_ranks(self) -> tuple[int, int, int]:
        return self._ranks - 1, self._ranks, 0

    def exchange(self, x: Tensor) -> Tensor:
        return x.expand(self.size, *x.shape).clone()

    def summed(self, grads: Tensor) -> Tensor:
        return grads.sum(0)


def bytes_sent(attention: Any, length: int, ranks: int, batch: int = 1) -> int:
    """Return the bytes that a rank sends for one layer, forward and backward, without masks.

    They are counted in a pass of this process alone over a part of random numbers. A ring sends
    what all ranks hold N - 1 times, and so do the sums of gradients.

    Args:
        attention: a ``MultiheadAttention``. length: tokens of the whole text. ranks: N.
    """
    sequence = _OneProcess(ranks, length)
    weight = attention.out_proj.weight
    own = sequence.place.stop - sequence.place.start
    x = weight.new_zeros(batch, own, len(weight)).normal_().requires_grad_()
    _current.append(sequence)
    try:
        out, _ = attention.attend(x)
        torch.autograd.grad(out.sum(), x)
    finally:
        _current.pop()
    return sequence.sent


def _before_a_start(starts: Tensor) -> Tensor:
    """Return true at tokens after which another document begins, bool (B, T)."""
    later = F.pad(starts[:, 1:], (0, 1)).long()
    return later.flip(1).cumsum(1).flip(1) > 0


def check(
    sequence: SplitSequence, x: Tensor, causal: bool, has_state: bool, encoding: Encoding
) -> None:
    """Refuse a call of attention that cannot be split.

    x: (B, T, C). has_state: True if it continues or returns a state, or has a memory.
    Raises: ValueError, in one sentence, for attention to later tokens, a state, another number of
        tokens than that of this rank's part, or an encoding that cannot be split.
    """
    check_encoding(encoding)
    if not causal:
        raise ValueError(
            "attention to later tokens cannot be split over processes: leave sequence_parallel, or "
            "build the module with causal=True"
        )
    if has_state:
        raise ValueError(
            "a state or a memory of earlier segments cannot be used in sequence_parallel: pass the "
            "whole text at once"
        )
    wanted = sequence.lengths(x.shape[1])[sequence.rank]
    if x.shape[1] != wanted or not wanted:
        raise ValueError(
            f"rank {sequence.rank} of {sequence.size} holds {wanted} of {sequence.length} tokens, "
            f"got {x.shape[1]}: use the part that sequence_parallel returns"
        )


@contextmanager
def own_dropout(past: Any, dropout: float, x: Tensor) -> Iterator[None]:
    """Let every rank of a SplitSequence drop weights of softmax attention independently.

    fairseq seeds the generators of all processes alike, and here they stay alike: each rank drops
    by a generator of its own, seeded with a number that all draw, plus the rank. Nothing changes
    without dropout, or for another ``past``.
    """
    if not (isinstance(past, SplitSequence) and dropout):
        yield
        return
    seed = int(torch.randint(2**62, (), device="cpu")) + past.rank
    devices = [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def check_encoding(encoding: Encoding) -> None:
    """Raise ChoiceError if texts with this encoding cannot be split over processes."""
    if reason := encoding.unsplit or encoding.whole_texts:
        raise ChoiceError(reason)


# --- the tokens before a part ------------------------------------------------------------------


class EarlierParts(Earlier):
    """The tokens of earlier ranks, for filters and sums over the text."""

    def __init__(self, sequence: SplitSequence, facts: Facts) -> None:
        self.sequence, self.facts = sequence, facts

    def tail(self, x: Tensor, count: int, padding: Tensor | None, starts: Tensor | None) -> Tensor:
        """Return the last ``count`` real tokens before this part; see ``Earlier.tail``."""
        _, own = history(x, count, padding=padding, starts=starts)
        tails = self.sequence.gather(own)
        _, since, cut = self.facts
        found = tails[:0].sum(0)
        slots = torch.arange(count, device=x.device)
        for rank in range(self.sequence.rank):
            new = torch.where(cut[rank].bool(), count, since[rank].clamp_max(count)).unsqueeze(1)
            kept = found.take_along_dim((slots + new).clamp_max(count - 1).unsqueeze(-1), 1)
            found = torch.where((slots < count - new).unsqueeze(-1), kept, tails[rank])
        return found

    def total(self, last: Tensor) -> Tensor:
        """Return the sum over earlier parts of ``last``, the sum over this part."""
        return self.sequence.gather(last)[: self.sequence.rank].sum(0)


class _Histories(dict):
    """Histories of which each that is not set is that of the earlier parts."""

    def __init__(self, earlier: Earlier) -> None:
        super().__init__()
        self.earlier = earlier

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, self.earlier)


# --- linear attention --------------------------------------------------------------------------


def linear_attention_part(
    sequence: SplitSequence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    normalizer: str = "rotated",
    content: tuple[Tensor, Tensor] | None = None,
    log_decay: Tensor | None = None,
    starts: Tensor | None = None,
    transport: Transport | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute causal linear attention of this rank's part of a text.

    Arguments are those of :func:`linear_attention` (causal) for this part.
    Returns: (B, H, T, E), equal to the rows of the whole. One all-gather of B H (D E + D + 1)
        numbers, for a transport of B H (D E + D + D D), at any T.
    """
    masks = {"key_padding_mask": key_padding_mask, "starts": starts}
    part = _carried_part if transport is not None else _part
    with without_autocast(q):
        numerator, denominator = part(
            sequence, q, k, v, linear.sums_encoded(normalizer), log_decay, transport, **masks
        )
        unencoded = None
        if linear.reads_content(normalizer):
            ones = torch.ones_like(content[1][..., :1])
            decay = log_decay if normalizer == "bounded" else None
            given = sequence, *content, ones, False, decay, None
            unencoded = _part(*given, **masks)[0].squeeze(-1)
        denominator = linear.at_least(denominator, unencoded)
        return linear.divided(numerator, denominator, dtype or v.dtype, normalizer)


def _part(
    sequence: SplitSequence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    with_denominator: bool,
    log_decay: Tensor | None,
    transport: None,
    *,
    key_padding_mask: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return numerator (B, H, T, E) and denominator (B, H, T), float32 or wider."""
    wide = torch.promote_types(v.dtype, torch.float32)
    v = _with_ones(v) if with_denominator else v
    masks = {"key_padding_mask": key_padding_mask, "starts": starts}
    options = {"normalizer": "none", "log_decay": log_decay, "dtype": wide}
    out = linear_attention(q, k, v, causal=True, **options, **masks)
    into, out_of, whole = _decay(q, log_decay, key_padding_mask, starts)
    k = linear.zero_at_padding(k, key_padding_mask).to(wide) * out_of
    payload = torch.cat([(k.mT @ v.to(wide)).flatten(2), whole], -1)
    sums, whole = sequence.gather(payload).split([k.shape[-1] * v.shape[-1], 1], -1)
    state = sums[:0].sum(0)
    for rank in range(sequence.rank):
        state = whole[rank] * state + sums[rank]
    out = out + (q.to(wide) * into) @ state.unflatten(-1, (k.shape[-1], v.shape[-1]))
    return (out[..., :-1], out[..., -1]) if with_denominator else (out, None)


def _decay(
    q: Tensor, log_decay: Tensor | None, padding: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decay from before the part to each token, from each token to the end of the part,
    (B, H, T, 1) or broadcastable, and over the part (B, H, 1), like q but float32 or wider.

    A start of a document is a decay of 0.
    """
    wide, length = torch.promote_types(q.dtype, torch.float32), q.shape[2]
    if log_decay is None:
        logs = q.new_zeros(1, 1, length, dtype=torch.float64)
    elif log_decay.dim() == 1:
        logs = log_decay.double()[None, :, None].expand(-1, -1, length)
    else:
        logs = log_decay.double()
        logs = logs if padding is None else logs.masked_fill(padding.bool().unsqueeze(1), 0.0)
    total = logs.clamp_min(linear.LOWEST_DECAY).cumsum(-1)
    into, out_of = total.exp(), (total[..., -1:] - total).exp()
    whole = into[..., -1:]
    if starts is not None:
        started = starts.cumsum(1).bool().unsqueeze(1)
        into = into.masked_fill(started, 0.0)
        out_of = out_of.masked_fill(_before_a_start(starts).unsqueeze(1), 0.0)
        whole = whole.masked_fill(started[..., -1:], 0.0)
    whole = whole.expand(*q.shape[:2], 1)
    return into.to(wide).unsqueeze(-1), out_of.to(wide).unsqueeze(-1), whole.to(wide)


def _carried_part(
    sequence: SplitSequence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    with_denominator: bool,
    log_decay: Tensor | None,
    transport: Transport,
    *,
    key_padding_mask: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`_part` with a transport.

    The sums run from the state [0, I]. They end in [S, A], of which S is this part's state from
    zero, and A what the part makes of a state before it; the outputs for I are the queries as they
    read that state.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    q, k, v = q.to(wide), linear.zero_at_padding(k, key_padding_mask).to(wide), v.to(wide)
    v = _with_ones(v) if with_denominator else v
    width, before = v.shape[-1], torch.eye(k.shape[-1], dtype=wide, device=k.device)
    before = F.pad(before, (width, 0)).expand(*k.shape[:2], -1, -1)
    log_decay = linear.decay_of_real_tokens(log_decay, key_padding_mask)
    log_decay = linear.with_cuts(log_decay, starts, q)
    values = F.pad(v, (0, k.shape[-1]))
    out, after = carried_sums(q, k, values, transport, log_decay, before, linear.LOWEST_DECAY)
    parts = sequence.gather(after)
    state = parts[:0, ..., :width].sum(0)
    for own in parts[: sequence.rank]:
        state = own[..., width:] @ state + own[..., :width]
    out = out[..., :width] + out[..., width:] @ state
    return (out[..., :-1], out[..., -1]) if with_denominator else (out, None)


def _with_ones(v: Tensor) -> Tensor:
    """Return v (B, H, T, E) with a last feature of 1, stored time first if v is.

    Dropout after the layer draws in the order of memory, as on one device.
    """
    ones = torch.ones_like(v[..., :1])
    if v.stride(2) <= v.stride(0):
        return torch.cat([v, ones], -1)
    return torch.cat([x.movedim(2, 0) for x in (v, ones)], -1).movedim(0, 2)


# --- attention to gathered keys ----------------------------------------------------------------


def gathered(
    sequence: SplitSequence, k: Tensor, v: Tensor, tokens: Tokens
) -> tuple[Tensor, Tensor, Tokens, Tokens]:
    """Return keys and values of the text up to the end of this part, and their tokens.

    Args: k, v, tokens: of this part; sums of gates are counted from its start.
    Returns: k (B, H, S, D), v (B, H, S, E), and the tokens of the queries, which are the last keys,
        and of the keys. With a transport they are carried to the token before this part.
    """
    keys, values = _gathered_keys(sequence, k, v, tokens.transport)
    sums = _gathered_sums(sequence, tokens.sums)
    length, own = keys.shape[2], k.shape[2]
    if tokens.first_slot is not None:
        every = Tokens(counted(length, k.device), first_slot=0, sums=sums)
    else:
        every = _gathered_tokens(sequence, k, tokens)._replace(sums=sums)
    last = {"counts": every.counts, "segments": every.segments, "sums": every.sums}
    queries = tokens._replace(**{n: x[..., -own:] for n, x in last.items() if x is not None})
    window = tokens.window
    hides = window is not None and window < length
    return keys, values, queries, every._replace(window=window if hides else None)


def _gathered_keys(
    sequence: SplitSequence, k: Tensor, v: Tensor, transport: Transport | None
) -> tuple[Tensor, Tensor]:
    """Return keys and values of :func:`gathered`; their numbers of heads may differ."""
    width, ends = k.shape[-1], k
    if transport is not None:  # a key is rounded once, not at every token
        k = k.to(torch.promote_types(k.dtype, torch.float32))
        unit = torch.eye(width, dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        move, ends = carried(torch.cat([unit, k], 2), transport).split([width, k.shape[2]], 2)
        moves = sequence.gather(move)
    own = _by_token(ends), _by_token(v.to(ends.dtype))
    sizes = [x.shape[-1] for x in own]
    found = [x.split(sizes, -1) for x in _gathered(sequence, torch.cat(own, -1), 1)]
    keys = _by_head(found[0][0][:, :0], k)
    keys = keys if transport is None else keys @ moves[0]  # every rank uses what it has gathered
    for rank in range(sequence.rank):
        keys = keys if transport is None else keys @ moves[rank]
        keys = torch.cat([keys, _by_head(found[rank][0], k)], 2)
    values = torch.cat([_by_head(x, v).to(v.dtype) for _, x in found[: sequence.rank]] + [v], 2)
    return torch.cat([keys, k], 2), values


def _by_token(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H D)."""
    return x.transpose(1, 2).flatten(2)


def _by_head(x: Tensor, like: Tensor) -> Tensor:
    """(B, T, H D) -> (B, H, T, D), with the heads of ``like`` (B, H, ., D)."""
    return x.unflatten(-1, (like.shape[1], like.shape[-1])).transpose(1, 2)


def _gathered_sums(sequence: SplitSequence, sums: Tensor | None) -> Tensor | None:
    """Return the sums of gates (B, H, S) up to the end of this part; sums: from its start."""
    if sums is None:
        return None
    found = _gathered(sequence, sums, 2)
    parts, total = [], found[0][..., :0].sum(-1, keepdim=True)
    for part in [*found[: sequence.rank], sums]:
        parts.append(part + total)
        total = parts[-1][..., -1:]
    return torch.cat(parts, 2)


def _gathered_tokens(sequence: SplitSequence, k: Tensor, tokens: Tokens) -> Tokens:
    """Return the tokens of the text up to the end of this part, without sums."""
    state = softmax.state_of(k, k, tokens)
    signed = torch.where(state.padding, -1 - state.positions, state.positions)
    signed = torch.cat([*_gathered(sequence, signed, 1)[: sequence.rank], signed], 1)
    padding = signed < 0
    positions = torch.where(padding, -1 - signed, signed)
    return state._replace(positions=positions, padding=padding).tokens._replace(sums=None)


def _gathered(sequence: SplitSequence, x: Tensor, dim: int) -> list[Tensor]:
    """Return x of every rank; lengths along ``dim`` may differ by one token."""
    lengths = sequence.lengths(x.shape[dim])
    missing = max(lengths) - x.shape[dim]
    if missing:
        x = torch.cat([x, x.narrow(dim, 0, missing)], dim)  # any numbers: they are cut off below
    return [part.narrow(dim, 0, n) for part, n in zip(sequence.gather(x), lengths, strict=True)]
