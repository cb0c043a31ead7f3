"""Multi-head self-attention, linear or softmax, with any encoding.

This module contains masks, positions, incremental state and the reordering of beams. Projections
are in ``attention.projected``. fairseq's layers call this module and ``attention.cross`` only.

Axes: B batch, H heads, T query time, S key time, D key width, E value width, C = H D.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.attention import linear, softmax
from lrpe_fairseq.attention.linear import (
    LinearState,
    linear_attention,
    linear_attention_block,
    linear_attention_window,
)
from lrpe_fairseq.attention.projected import (
    ATTENTION_TYPES,
    NOT_EXPORTED,
    ProjectedAttention,
    feature_map,
    warn_about_compiler,
)
from lrpe_fairseq.attention.scored import Tokens, counted, scored_attention
from lrpe_fairseq.attention.softmax import SoftmaxState
from lrpe_fairseq.encodings import Encoding
from lrpe_fairseq.encodings.base import PositionCache, check_positions
from lrpe_fairseq.errors import ChoiceError

__all__ = [
    "ATTENTION_TYPES",
    "AttentionState",
    "Memory",
    "MultiheadAttention",
    "block_positions",
    "feature_map",
    "reorder_attention_state",
]


class AttentionState(NamedTuple):
    """State of one attention module between calls."""

    past: LinearState | SoftmaxState
    next_position: Tensor  # B, int64: number of real tokens so far


class Memory(NamedTuple):
    """Inputs of earlier segments that a segment attends to (Transformer-XL, Section 3.2).

    Keys and values are computed from them with the current weights.
    """

    inputs: Tensor  # M B C, without gradient
    hidden: Tensor | None = None  # B T M+T, true where a token must not attend to another


class MultiheadAttention(ProjectedAttention):
    """Self-attention of one layer.

    Args: see :class:`ProjectedAttention`. In linear attention a ``score_decay`` multiplies the
        score of the kernel and needs positions on a line.
    Raises: ChoiceError as ProjectedAttention, and for a score decay that linear attention does not
        support.
    """

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        _check_linear_decay(self.score_decay, self.attention_type, self.encoding)
        self.window: int | None = None  # in evaluation: tokens that a token attends to, with itself

    # --- fairseq's interface: (T, B, C), and a dictionary of states ----------------------------

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = False,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, None]:
        """Called by fairseq: query (T, B, C) -> ((T, B, C), None). No weights are returned.

        ``key`` and ``value`` are not used, because they equal the query in self-attention. With
        ``incremental_state`` the query and its mask are the next block, usually one token.
        ``self.positions`` are those of ``attend``; the stack of layers sets them.
        Raises: ValueError for an ``attn_mask``; causality is an argument of the constructor.
        """
        if attn_mask is not None:
            raise ValueError("attn_mask is not supported: build the module with causal=True")
        if torch.jit.is_tracing():
            raise NotImplementedError(NOT_EXPORTED)
        state = self._get_input_buffer(incremental_state)
        keep_state = incremental_state is not None and not isinstance(state, Memory)
        x = query.transpose(0, 1)
        out, state = self.attend(x, key_padding_mask, state, keep_state, self.positions)
        if keep_state:
            incremental_state[self._state_key] = state
        return out.transpose(0, 1), None

    def _reordered(self, state: AttentionState, new_order: Tensor) -> AttentionState:
        return reorder_attention_state(state, new_order)

    def remembering(self, memory: Memory) -> dict[str, Memory]:
        """Return an ``incremental_state`` with which :meth:`forward` also attends to ``memory``.

        The call stores no state in it.
        """
        return {self._state_key: memory}

    # --- inside: (B, T, C) ---------------------------------------------------------------------

    def attend(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        state: AttentionState | Memory | None = None,
        keep_state: bool = False,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState | None]:
        """Compute self-attention of x (B, T, C) from ``state``; return (B, T, C) and the new state.

        Args:
            key_padding_mask: (B, T) of this block, true at padding, which may be anywhere. After a
                Memory padding must be on the right, where the causal mask hides it.
            state: the state that the previous block returned, or a Memory.
            keep_state: True to return the state after the block (causal only), else None.
            positions: int64 (T,) or (B, T) of this block. None counts real tokens, so that left-
                and right-padded batches give equal results. A decay always counts real tokens.
                Not supported with a Memory.
        Under torch.compile it runs outside the compiled graph and warns once.
        Raises: ValueError for incompatible arguments.
        """
        if torch.compiler.is_compiling():
            warn_about_compiler()
        return self._attend(x, key_padding_mask, state, keep_state, positions)

    @torch.compiler.disable  # compiled backward passes of linear attention fail
    def _attend(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None,
        state: AttentionState | Memory | None,
        keep_state: bool,
        positions: Tensor | None,
    ) -> tuple[Tensor, AttentionState | None]:
        """Compute :meth:`attend`, always in eager execution."""
        if keep_state and not self.causal:
            raise ValueError("keep_state needs causal attention: build the module with causal=True")
        if positions is not None:
            check_positions(positions, x)
            if self.attention_type == "linear" and self.score_decay != 1:
                raise ValueError(
                    "the score decay of linear attention counts tokens and cannot follow explicit "
                    "positions; use softmax attention"
                )
        if isinstance(state, Memory):
            if positions is not None:
                raise ValueError("explicit positions cannot be combined with a memory of segments")
            return self._project_out(self._after_memory(x, state), x), None
        key_padding_mask = None if self.encoding.ignores_padding else key_padding_mask
        explicit = positions is not None
        positions = positions if explicit else block_positions(x, key_padding_mask, state)
        given = x, positions, key_padding_mask, state, keep_state
        if self.attention_type == "linear":
            out, past = self._linear(*given)
        else:
            limit = x.shape[1] if state is None and not explicit else None
            out, past = self._softmax(*given, limit=limit)
        out = self._project_out(out, x)
        if not keep_state:
            return out, None
        if explicit:
            following = _next_after(positions.expand(x.shape[:2]), key_padding_mask, state)
        else:
            following = next_position(x, key_padding_mask, state)
        return out, AttentionState(past, following)

    def _linear(
        self,
        x: Tensor,
        positions: Tensor,
        padding: Tensor | None,
        state: AttentionState | None,
        keep_state: bool,
    ) -> tuple[Tensor, LinearState | None]:
        q, k, v = self._project(x)
        v = v.to(self._value_type(v))
        options = {"key_padding_mask": padding, "normalizer": self.normalizer}
        if self.normalizer == "content":
            options["content"] = feature_map(q), feature_map(k)
        q, k = self._features(q, k, positions)
        options["log_decay"] = self._log_decay(x, padding, state, keep_state)
        if self.window is not None:
            self._require_whole(state, keep_state)
            return linear_attention_window(q, k, v, window=self.window, **options), None
        if not keep_state:
            return linear_attention(q, k, v, causal=self.causal, **options), None
        return linear_attention_block(q, k, v, state=state and state.past, **options)

    def _require_whole(self, state: AttentionState | None, more: bool) -> None:
        """Raise ValueError if the call does not suit :attr:`window`."""
        if not self.causal or state is not None or more:
            raise ValueError("a window needs causal attention to whole texts, without a state")

    @property
    def has_denominators(self) -> bool:
        """True for linear attention that divides by the denominator of Eq. 39."""
        return self.attention_type == "linear" and self.normalizer == "rotated"

    def denominators(self, x: Tensor) -> Tensor:
        """Return the denominators of Eq. 39 for x (B, T, C) before they are clamped, (B, H, T).

        They are the sums of all scores, which are the output for values of 1 without a normalizer.
        """
        q, k, _ = self._project(x)
        q, k = self._features(q, k, counted(x.shape[1], x.device))
        log_decay = self._log_decay(x, None, None, False)
        ones = q.new_ones(*q.shape[:3], 1)
        options = {"causal": self.causal, "normalizer": "none", "log_decay": log_decay}
        return linear_attention(q, k, ones, **options).squeeze(-1)

    def _log_decay(
        self, x: Tensor, padding: Tensor | None, state: AttentionState | None, keep_state: bool
    ) -> Tensor | None:
        """Return the decay of linear attention: (B, H, T) per token, or (H,) for every token.

        The gates of x (B, T, C) are per token. A constant decay is (H,), except where a causal
        model has padding before tokens that are still visible: there (H,) would count slots.
        """
        constant, gates = self._constant_decay(x.device), self._gates(x, padding)
        if gates is not None:
            return gates if constant is None else gates + constant.unsqueeze(-1)
        if constant is None or padding is None or not self.causal:
            return constant
        between, after = _gaps_of_mask.get(padding, None, partial(_gaps, padding))
        if not (between or (keep_state and (after or state is not None))):
            return constant
        batch, length = padding.shape
        return constant[:, None].expand(batch, -1, length)

    def _constant_decay(self, device: torch.device) -> Tensor | None:
        """Return the decay of linear attention per token, (H,): the encoding's and score_decay."""
        own = self.encoding.log_decay()
        if self.score_decay == 1:
            return own
        decay = torch.full((self.num_heads,), math.log(self.score_decay), device=device)
        return decay if own is None else own + decay

    def _gates(self, x: Tensor, padding: Tensor | None) -> Tensor | None:
        """Return the logarithms of the gates of x (B, T, C): (B, H, T), or None without gates.

        They are 0 where ``padding`` (B, T) is true. A mask of pairs (B, T, S) has no padding.
        """
        gates = self.encoding.log_gates(x)
        if gates is None or padding is None or padding.dim() == 3:
            return gates
        return gates.masked_fill(padding.bool().unsqueeze(1), 0.0)

    def _after_memory(self, x: Tensor, memory: Memory) -> Tensor:
        """Compute attention of x (B, T, C) over [memory, x]: (B, H, T, E). Keys start M earlier."""
        if self.attention_type == "linear" or not self.causal:
            raise ValueError("only causal softmax attention has a memory of earlier segments")
        x = torch.cat([memory.inputs.transpose(0, 1), x], 1)
        positions, first = counted(x.shape[1], x.device), memory.inputs.shape[0]
        return self._softmax(x, positions, memory.hidden, None, False, first)[0]

    def _softmax(
        self,
        x: Tensor,
        positions: Tensor,
        padding: Tensor | None,
        state: AttentionState | None,
        keep_state: bool,
        first: int = 0,
        limit: int | None = None,
    ) -> tuple[Tensor, SoftmaxState | None]:
        """Compute softmax attention. Queries are the tokens from ``first`` on, keys are all.

        limit: a number above all positions, if attention has counted them; else None.
        """
        if self.window is not None:
            self._require_whole(state, keep_state or padding is not None)
            padding = _hidden(x.shape[1], self.window, x.device)
        q, k, v = self._encoded(x, positions)
        past, sums = None, _running_sums(self._gates(x, padding), state)
        queries = keys = Tokens(positions, sums, first=_first_of(positions), limit=limit)
        if first:
            q, queries = q[:, :, first:], keys.of(slice(first, None))
        if keep_state:
            past = _extend(state and state.past, k, v, keys, padding)
            k, v, positions, padding, sums = past.parts
            padding = padding if padding.any() else None
            keys = Tokens(positions, sums)
        given = queries, keys, padding, self._settings()
        out = scored_attention(self.encoding, q, k, v, *given)
        return out, past


def block_positions(
    x: Tensor, key_padding_mask: Tensor | None, state: AttentionState | None
) -> Tensor:
    """Return int64 positions of the block x (B, T, C): (T,) if all rows are equal, else (B, T).

    Real tokens are counted first, then padding, which is masked. Positions of batches that are
    padded on the right are therefore (T,), the cheapest case for encodings. The same tensor object
    is returned for the same length or mask, so that encodings can cache.
    """
    if key_padding_mask is None:
        steps = counted(x.shape[1], x.device)
    else:
        count = partial(_count_real_first, key_padding_mask)
        steps = _positions_of_mask.get(key_padding_mask, None, count)
    return steps if state is None else state.next_position.unsqueeze(1) + steps


_positions_of_mask = PositionCache(2)  # of a source and a target
_gaps_of_mask = PositionCache()


def _gaps(key_padding_mask: Tensor) -> tuple[bool, bool]:
    """Return two flags for a mask (B, T): padding lies between real tokens; padding follows one."""
    real = ~key_padding_mask.bool()
    before = real.cumsum(1) > 0
    after = real.flip(1).cumsum(1).flip(1) > 0
    padded = before & ~real
    return tuple(torch.stack([(padded & after).any(), padded.any()]).tolist())


def _count_real_first(key_padding_mask: Tensor) -> Tensor:
    """Return the positions for a mask (B, T), true at padding: (T,) or (B, T).

    This synchronizes a GPU once per mask.
    """
    padding = key_padding_mask.bool()
    real = ~padding
    after = real.sum(1, keepdim=True) + padding.cumsum(1)
    steps = torch.where(padding, after, real.cumsum(1)) - 1
    same = counted(steps.shape[1], steps.device)
    return same if torch.equal(steps, same.expand_as(steps)) else steps


def _hidden(length: int, window: int, device: torch.device) -> Tensor:
    """Return the mask (1, T, T) of the keys before the last ``window`` keys of each query."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril(-window)[None]


def _first_of(positions: Tensor) -> int | None:
    """Return 0 for the object that :func:`block_positions` returns without padding, else None."""
    same = counted(positions.shape[-1], positions.device)
    return 0 if positions is same else None


def next_position(
    x: Tensor, key_padding_mask: Tensor | None, state: AttentionState | None
) -> Tensor:
    """Return the number of real tokens up to the end of the block x (B, T, C), int64 (B,).

    key_padding_mask: of the block. state: what came before it, with a ``next_position``.
    """
    batch, length, _ = x.shape
    if key_padding_mask is None:
        real = torch.full((batch,), length, device=x.device)
    else:
        real = (~key_padding_mask.bool()).sum(1)
    return real if state is None else state.next_position + real


def _next_after(
    positions: Tensor, key_padding_mask: Tensor | None, state: AttentionState | None
) -> Tensor:
    """Return the position after the last real token of ``positions`` (B, T), int64 (B,)."""
    if key_padding_mask is not None:
        positions = positions.masked_fill(key_padding_mask.bool(), -1)
    following = positions.amax(1) + 1
    return following if state is None else torch.maximum(following, state.next_position)


def reorder_attention_state(state: AttentionState, new_order: Tensor) -> AttentionState:
    """Return the state of the rows ``new_order`` (B',), int64 indices into the batch."""
    module = linear if isinstance(state.past, LinearState) else softmax
    past = module.reorder_state(state.past, new_order)
    return AttentionState(past, state.next_position.index_select(0, new_order))


def _running_sums(gates: Tensor | None, state: AttentionState | None) -> Tensor | None:
    """Return the sums of the log gates (B, H, T) of all tokens so far, float64, or None."""
    if gates is None:
        return None
    sums = gates.double().cumsum(-1)
    return sums if state is None else sums + state.past.sums[..., -1:]


def _extend(
    past: SoftmaxState | None, k: Tensor, v: Tensor, tokens: Tokens, padding: Tensor | None
) -> SoftmaxState:
    batch, length = k.shape[0], k.shape[2]
    if padding is None:
        padding = torch.zeros(batch, length, dtype=torch.bool, device=k.device)
    sums = tokens.sums
    if sums is None:
        sums = k.new_empty(batch, 0, length, dtype=torch.float64)
    positions = tokens.positions.expand(batch, length)
    new = SoftmaxState(k, v, positions, padding.bool(), sums)
    return softmax.extend_state(past, new)


def _check_linear_decay(decay: float, attention_type: str, encoding: Encoding) -> None:
    if decay != 1 and attention_type == "linear" and not encoding.steps_are_lags:
        raise ChoiceError(
            f"a score decay in linear attention needs positions on a line, which {encoding.name!r} "
            "does not have here; use softmax attention or --score-decay 1"
        )
