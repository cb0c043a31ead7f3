"""Multi-head self-attention, linear or softmax, with any encoding.

This module contains masks, positions, incremental state and the reordering of beams. Projections
are in ``attention.projected``. fairseq's layers call this module and ``attention.cross`` only.

Axes: B batch, H heads, K heads of keys and values, T query time, S key time, D key width, E value
width, C width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.attention import linear, parallel, softmax
from lrpe_fairseq.attention.linear import (
    LinearState,
    linear_attention,
    linear_attention_block,
    linear_attention_window,
    reads_content,
)
from lrpe_fairseq.attention.operators import carried
from lrpe_fairseq.attention.parallel import SplitSequence
from lrpe_fairseq.attention.projected import (
    ATTENTION_TYPES,
    NOT_EXPORTED,
    ProjectedAttention,
    checked_window,
    feature_map,
)
from lrpe_fairseq.attention.softmax import SoftmaxState, encoded_attention
from lrpe_fairseq.attention.states import Owner, check_owner
from lrpe_fairseq.attention.tokens import Tokens, check_tokens, tokens_after, tokens_of
from lrpe_fairseq.encodings.core.companions import NUMBERS, REAL, check_companion
from lrpe_fairseq.encodings.core.forms import Transport
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels import dispatch
from lrpe_fairseq.kernels.conditions import is_exporting

__all__ = [
    "ATTENTION_TYPES",
    "AttentionState",
    "Memory",
    "MultiheadAttention",
    "feature_map",
    "reorder_attention_state",
]


class AttentionState(NamedTuple):
    """State of one attention module between calls."""

    past: LinearState | SoftmaxState
    next_position: Tensor  # B, int64: number of real tokens so far
    history: dict[str, Tensor] = {}  # B ...: state of the filters and sums over the text
    owner: Owner | None = None  # the layer that made it; None is not checked


class Memory(NamedTuple):
    """Inputs of earlier segments that a segment attends to (Transformer-XL, Section 3.2).

    Keys and values are computed from them with the current weights.
    """

    inputs: Tensor  # M B C, without gradient
    segments: Tensor | None = None  # B M+T, int: documents; a token sees its own only


class MultiheadAttention(ProjectedAttention):
    """Multi-head self-attention with a relative positional encoding, for plain PyTorch and fairseq.

    >>> attention = MultiheadAttention(
    ...     64, 4, attention_type="linear", position_encoding="fox", causal=True, fox_bias=3.0
    ... )
    >>> out, state = attention.attend(x, keep_state=True)  # x, out: (B, T, 64)

    Args:
        embed_dim: C, the width. num_heads: H; must divide C unless ``head_dim`` is given. Names are
            those of ``nn.MultiheadAttention`` where the meaning is the same; batches come first.
        attention_type: "linear" (phi(x) = 1 + elu(x) first, then the encoding; O(T) time and a
            state of constant size) or "softmax" (scale D^-0.5).
        position_encoding: a name of ``lrpe_fairseq.encodings.ENCODINGS`` or a composed name.
        causal: True if a token attends only to itself and earlier tokens.
        dropout: on softmax weights; linear attention has none (LRPE, Table 7).
        normalizer: what linear attention divides by: "rotated" (Eq. 39 of LRPE), "bounded",
            "content", "layernorm" or "none"; see ``lrpe_fairseq.attention.linear.NORMALIZERS``.
        window: a token attends to the last ``window`` tokens only, itself included; None: to all.
        parts: of the layer beside its encoding, separated by commas ("qk-norm,output-gate"); see
            ``lrpe_fairseq.attention.parts``.
        qkv_bias: False for no biases in the projections to q, k and v. out_bias: False for no bias
            in the output projection.
        num_kv_heads: K, heads of keys and values; must divide H. Query head h reads number
            h // (H / K) (grouped queries; Ainslie et al. 2023). Encoding, decay and gates are per
            query head. None: H.
        head_dim: D, the width of a head. None: C / H.
        score_scale: the factor of all scores. None: D^-0.5 in softmax attention, 1 in linear.
        seed: of the encoding's fixed random parts, which have a generator of their own.
        options: the encoding's options as one value, instead of by keyword.
        wrap_linear: applied to each projection, for example fairseq's quantization noise.
        encoding_options: options of the encoding by keyword, named as on the command line
            (``fox_bias``, ``grid_width``). Trap: those of another encoding are ignored.
    Raises: ChoiceError for an unknown name or option, a width that is not divisible by H, a window
        that is not causal, or an encoding that the attention type does not support.
    """

    kind = "self-attention"

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
        Positions and documents are those of ``self.given``, which the stack of layers sets. The
        smaller of its window and the layer's own applies.
        Raises: ValueError for an ``attn_mask``; causality is an argument of the constructor.
        """
        if attn_mask is not None:
            raise ValueError("attn_mask is not supported: build the module with causal=True")
        if torch.jit.is_tracing():
            raise NotImplementedError(NOT_EXPORTED)
        state = self._get_input_buffer(incremental_state)
        # a memory is read and not extended, so that no state is kept
        keep_state = incremental_state is not None and not isinstance(state, Memory)
        out, state = self.attend(
            query.transpose(0, 1),
            key_padding_mask,
            state,
            keep_state,
            self.given.positions,
            window=self.given.window,
            one_sided=self.given.one_sided,
            # the documents of a memory are those of its segments
            starts=None if isinstance(state, Memory) else self.given.starts,
        )
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
        *,
        window: int | None = None,
        one_sided: bool = False,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState | None]:
        """Compute self-attention of x (B, T, C) from ``state``; return (B, T, C) and the new state.

        Args:
            key_padding_mask: (B, T) of this block, true at padding, which may be anywhere. A Memory
                has no padding.
            state: the state that the previous block returned, or a Memory.
            keep_state: True to return the state after the block (causal only), else None.
            positions: int64 (T,) or (B, T) of this block. None counts real tokens, so that left-
                and right-padded batches give equal results. A decay always counts real tokens.
                Not supported with a Memory.
            window: a token attends to the last ``window`` tokens only, itself included, and to no
                more than the window of the module; for causal attention to a whole text.
            one_sided: True if the padding of a row is all before or all after its tokens. It saves
                time where a score depends on the lag.
            starts: bool (B, T), true at every token that begins a document (causal only). A token
                attends to its own document only; positions, gates and linear states start anew.
                The first token of a text need not be marked. A Memory has documents of its own.
        In ``parallel.sequence_parallel`` x is this process's part of a longer text.
        Raises: ValueError for incompatible arguments, for a tensor of another shape, dtype or
            device than it must have, and for a state of another layer or batch.
        """
        self._check(x, key_padding_mask, state, keep_state, positions, starts)
        if window is not None and (not self.causal or state is not None or keep_state):
            raise ValueError("a window needs causal attention to whole texts, without a state")
        if isinstance(state, Memory):
            _check_beside_memory(keep_state, positions, starts)
            return self._after_memory(x, key_padding_mask, state), None
        whole = state is None and not keep_state
        window = self._narrowest(window, x.shape[1] if whole else None)
        options = {"window": window, "one_sided": one_sided, "starts": starts}
        if self._sequence is not None:
            return self._attend_part(x, key_padding_mask, positions, options), None
        return self._attend(x, key_padding_mask, state, keep_state, positions, options)

    @property
    def _sequence(self) -> SplitSequence | None:
        """The text over several processes of which x is a part, or None."""
        return self.given.sequence or parallel.current()

    def _narrowest(self, window: int | None, length: int | None) -> int | None:
        """Return the smaller of ``window`` and the module's own; None if it hides nothing.

        length: of a whole text, or of this process's part of it; None after a state.
        """
        if self._sequence is not None:
            length = sum(self._sequence.lengths(length))
        # of two windows the smaller one hides more
        window = checked_window(window, self.causal)
        if window is None or (self.window is not None and self.window < window):
            window = self.window
        if window is None or length is None or is_exporting():  # an export takes any length
            return window
        return window if window < length else None

    def _check(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None,
        state: AttentionState | Memory | None,
        keep_state: bool,
        positions: Tensor | None,
        starts: Tensor | None,
    ) -> None:
        """Refuse what does not belong to x, to this layer or to causal attention."""
        check_tokens(x, key_padding_mask, positions, starts, self.embed_dim)
        if self._sequence is not None:
            has_state = keep_state or state is not None
            parallel.check(self._sequence, x, self.causal, has_state, self.encoding)
        if keep_state and not self.causal:
            raise ValueError("keep_state needs causal attention: build the module with causal=True")
        pieces = keep_state or state is not None or starts is not None
        if self.encoding.whole_texts and pieces:
            raise ChoiceError(self.encoding.whole_texts)
        if starts is not None and (not self.causal or positions is not None):
            raise ValueError("documents need causal attention and positions that are counted")
        if isinstance(state, Memory):
            _check_memory(state, x)
            return
        if state is None:
            return
        check_owner(state, AttentionState, self.owner, x)
        if isinstance(state.past, LinearState):
            return
        # a state finds its documents by positions of 0, which explicit positions may repeat
        explicit = positions is not None or not (state.past.counted or state.past.packed)
        if explicit and (starts is not None or state.past.packed):
            raise ValueError("documents need positions that are counted in all blocks of a text")

    def _attend(
        self,
        x: Tensor,
        padding: Tensor | None,
        state: AttentionState | None,
        keep_state: bool,
        positions: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, AttentionState | None]:
        """Compute :meth:`attend` after its checks."""
        if x.shape[1] == 0 and (keep_state or state is not None):
            return x, (state if keep_state else None)
        before = None if state is None else state.next_position
        # a copy, because the filters update it in place and the caller's state stays valid
        history = {} if state is None else dict(state.history)
        tokens = tokens_of(x, padding, before, positions, history=history, **options)
        tokens = self._of_text(x, tokens)
        attend = self._linear if self.attention_type == "linear" else self._softmax
        past = None if state is None else state.past
        out, past = attend(x, tokens, past, keep_state or state is not None)
        out = self._project_out(out, x)
        if not keep_state:
            return out, None
        following = tokens_after(x, padding, before)
        if positions is not None:
            following = _next_after(tokens, x.shape[0], before)
        elif tokens.segments is not None:  # counted from the start of the last document
            last = tokens.positions[:, -1]
            following = last + (1 if tokens.padding is None else ~tokens.padding[:, -1])
        return out, AttentionState(past, following, history, self.owner)

    def _attend_part(
        self,
        x: Tensor,
        padding: Tensor | None,
        positions: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Compute :meth:`attend` of a part of a text over several processes, after its checks."""
        sequence = self._sequence
        with sequence.one_text():
            tokens = self._of_text(x, sequence.tokens(x, padding, positions, **options))
            attend = self._linear if self.attention_type == "linear" else self._softmax
            out, _ = attend(x, tokens, sequence, True)
        return self._project_out(out, x)

    def _linear(
        self,
        x: Tensor,
        tokens: Tokens,
        past: LinearState | SoftmaxState | SplitSequence | None,
        keep_state: bool,
    ) -> tuple[Tensor, LinearState | SoftmaxState | None]:
        """Return the output (B, H, T, E), and the state after the block if it is kept."""
        if tokens.window is not None:
            return self._linear_window(x, tokens, past, keep_state)
        q, k, v = self._project(x, tokens=tokens)
        options = {"key_padding_mask": tokens.padding, "normalizer": self.normalizer}
        options["dtype"] = self._result_type(v)
        if reads_content(self.normalizer):  # before the encoding replaces q and k
            options["content"] = self._content(q, k)
        q, k, tokens = self._features_of(q, k, tokens)
        options |= {"starts": tokens.starts, "transport": tokens.transport}
        in_slots = tokens.first_slot is not None and not keep_state
        options["log_decay"] = self._log_decay(x, tokens.padding, in_slots)
        if not keep_state:
            return linear_attention(q, k, v, causal=self.causal, **options), None
        if isinstance(past, SplitSequence):
            return parallel.linear_attention_part(past, q, k, v, **options), None
        out, past = linear_attention_block(q, k, v, state=self._of_all_heads(past), **options)
        return out, self._of_groups(past)

    def _linear_window(
        self, x: Tensor, tokens: Tokens, past: SoftmaxState | SplitSequence | None, keep_state: bool
    ) -> tuple[Tensor, SoftmaxState | None]:
        """Compute :meth:`_linear` with a window; the state holds the last keys of the window.

        The features without encoding that a normalizer reads are appended to the encoded keys.
        """
        tokens = self._with_gates(x, tokens, past)
        q, k, v = self._project(x, tokens=tokens)
        content = self._content(q, k) if reads_content(self.normalizer) else None
        q, k, tokens = self._features_of(q, k, tokens)
        queries = tokens
        keys = tokens
        width = k.shape[-1]
        # one state holds both kinds of keys, so that a window cuts them together
        if content is not None:
            k = torch.cat([k, content[1]], -1)
        if keep_state:
            k, v, queries, keys, past = self._remembered(k, v, tokens, past)
            k, v = self._for_queries(k), self._for_queries(v)
        if content is not None:
            content = content[0], k[..., width:]
            k = k[..., :width]
        options = {"normalizer": self.normalizer, "log_decay": self.encoding.log_decay(x.device)}
        options["dtype"] = self._result_type(v)
        return linear_attention_window(q, k, v, queries, keys, content=content, **options), past

    def _features_of(self, q: Tensor, k: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tokens]:
        """Return the features of q and k (B, H, T, D), and their tokens.

        A transport without vectors of its own gets them from the keys; see ``Transport.by_keys``.
        """
        q, k = self._features(q, k, tokens.read_by_encoding, tokens.read_by_encoding)
        if tokens.transport is None:
            return q, k, tokens
        transport, k = tokens.transport.by_keys(k)
        return q, k, tokens._replace(transport=transport)

    def state_size(self, length: int) -> int:
        """Return how many numbers of keys, values and sums the state has after ``length`` tokens.

        For one sequence, without what belongs to a token alone (positions, padding, gates) and
        without the history, which does not grow.
        """
        width = getattr(self.encoding, "feature_dim", self.head_dim)
        linear, content = self.attention_type == "linear", reads_content(self.normalizer)
        if linear and self.window is None:
            heads = self.num_heads // self._group_of_sums
            summed = 0 if self.normalizer == "content" else width
            summed += self.head_dim if content else 0
            return heads * (width * self.head_dim + summed)
        kept = length if self.window is None else min(length, max(1, self.window - 1))
        # content features or states stand beside the keys or values of each token
        of_keys = width + (self.head_dim if linear and content else 0)
        of_values = self.head_dim * (1 if self.update is None else 2)
        keys, values = (self.num_heads // group for group in self._groups)
        return kept * (keys * of_keys + values * of_values)

    @property
    def _groups(self) -> tuple[int, int]:
        """How many heads of equal keys, and of equal values, follow each other."""
        of_keys = 1 if self.encoding.keys_by_head else self.group
        return of_keys, (1 if self.encoding.has_states else self.group)

    @property
    def _group_of_sums(self) -> int:
        """How many heads of equal sums of linear attention follow each other."""
        decays = self.encoding.log_decay() is not None or self.encoding.forget_gate is not None
        return 1 if decays else self._groups[0]

    def _of_groups(self, state: LinearState) -> LinearState:
        """Return the sums of one head of every group, which are those of the others."""
        step = self._group_of_sums
        return state if step == 1 else LinearState(*(part[:, ::step] for part in state))

    def _of_all_heads(self, state: LinearState | None) -> LinearState | None:
        """Return the sums of all heads."""
        if state is None or self._group_of_sums == 1:
            return state
        times = self._group_of_sums
        return LinearState(*(part.repeat_interleave(times, 1) for part in state))

    def _remembered(
        self, k: Tensor, v: Tensor, tokens: Tokens, past: SoftmaxState | None
    ) -> tuple[Tensor, Tensor, Tokens, Tokens, SoftmaxState]:
        """Return :func:`_remembered` of the heads that are kept."""
        of_keys, of_values = self._groups
        return _remembered(k[:, ::of_keys], v[:, ::of_values], tokens, past)

    @property
    def has_denominators(self) -> bool:
        """True for linear attention to all tokens that divides by the denominator of Eq. 39."""
        whole = self.window is None
        return whole and self.attention_type == "linear" and self.normalizer == "rotated"

    def denominators(self, x: Tensor) -> Tensor:
        """Return the denominators of Eq. 39 for x (B, T, C) before they are clamped, (B, H, T).

        They are the sums of all scores, which are the output for values of 1 without a normalizer.
        """
        check_tokens(x, starts=self.given.starts)
        tokens = self._of_text(x, tokens_of(x, starts=self.given.starts))
        q, k, _ = self._project(x, tokens=tokens)
        q, k, tokens = self._features_of(q, k, tokens)
        ones = q.new_ones(*q.shape[:3], 1)
        options = {"causal": self.causal, "normalizer": "none", "log_decay": self._log_decay(x)}
        options |= {"starts": tokens.starts, "transport": tokens.transport}
        return linear_attention(q, k, ones, **options).squeeze(-1)

    def feature_pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return phi(q) and phi(k) of x (B, T, C) without the encoding, (B, H, T, D) each."""
        check_tokens(x)
        q, k, _ = self._project(x, tokens=tokens_of(x))
        return dispatch.feature_maps(q, k)

    def _log_decay(
        self, x: Tensor, padding: Tensor | None = None, in_slots: bool = True
    ) -> Tensor | None:
        """Return the decay of linear attention: (B, H, T) per token, or (H,) for every slot.

        The gates of x (B, T, C) are per token. A constant decay is (H,), except in a causal model
        with padding, if slots do not count as tokens do.
        """
        constant = self.encoding.log_decay(x.device)
        gates = self._gates(x, padding)
        if gates is not None:
            return gates if constant is None else gates + constant.unsqueeze(-1)
        if constant is None or padding is None or in_slots or not self.causal:
            return constant
        batch, length = padding.shape
        return constant[:, None].expand(batch, -1, length)

    def _gates(self, x: Tensor, padding: Tensor | None) -> Tensor | None:
        """Return the logarithms of the gates of x (B, T, C), 0 at padding; or None.

        They are (B, H, T), or (B, H, T, D') for every encoded feature.
        """
        gates = self.encoding.log_gates(x)
        if gates is None or padding is None:
            return gates
        hidden = padding.unsqueeze(1)
        return gates.masked_fill(hidden if gates.dim() == 3 else hidden.unsqueeze(-1), 0.0)

    def _after_memory(self, x: Tensor, padding: Tensor | None, memory: Memory) -> Tensor:
        """Compute attention of x (B, T, C) over [memory, x], (B, T, C). Keys start M earlier.

        padding: (B, T), true at padding of x, or None.
        """
        if self.attention_type == "linear" or not self.causal:
            raise ValueError("only causal softmax attention has a memory of earlier segments")
        if self.update is not None or self.given.states is not None:
            raise ValueError(
                f"{self.encoding.name!r} keeps no states of earlier segments: use another encoding"
            )
        length = memory.inputs.shape[0]
        whole = torch.cat([memory.inputs.transpose(0, 1), x], 1)
        padding = None if padding is None else F.pad(padding.bool(), (length, 0))
        starts = None if memory.segments is None else _starts(memory.segments, padding)
        tokens = tokens_of(whole, padding, starts=starts, window=self.window)
        tokens = self._of_text(whole, tokens)
        out, _ = self._softmax(whole, tokens, None, False, length)
        return self._project_out(out, x)

    def _softmax(
        self,
        x: Tensor,
        tokens: Tokens,
        past: SoftmaxState | SplitSequence | None,
        keep_state: bool,
        first: int = 0,
    ) -> tuple[Tensor, SoftmaxState | None]:
        """Return the output (B, H, T, E), and the state after the block if it is kept.

        Queries are the tokens from ``first`` on, keys are all, and those of ``past``.
        """
        tokens = self._with_gates(x, tokens, past)
        stated = self.encoding.has_states
        q, k, v = self._with_states(x, tokens) if stated else self._encoded(x, tokens)
        queries = keys = tokens
        if first:  # the tokens of a memory are keys only
            q = q[:, :, first:]
            queries = tokens.of(slice(first, None))
            k = k if tokens.transport is None else _carried_before(k, tokens.transport, first)
        if keep_state:
            k, v, queries, keys, past = self._remembered(k, v, tokens, past)
        options = {"causal": self.causal, "dropout": self._dropout}
        with parallel.own_dropout(past, self._dropout, x):
            out = encoded_attention(self.encoding, q, k, v, queries, keys, **options)
        if self.update is not None:
            out, means = out.split([self.head_dim, out.shape[-1] - self.head_dim], -1)
            self._read.append(means)
        return out, past

    def _with_states(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return q~ and k~, turned by states of the tokens, and v.

        If the layer has an update, the states are further features of v.
        """
        q, k, v = self._project(x, tokens=tokens)
        states, self.given.states = self.given.states, None  # of this pass only
        if states is None:
            states = self.encoding.start(tokens.positions, q)
        else:
            shape = tuple(q.shape)
            shapes = shape, (1, *shape[1:])
            check_companion("given.states", states, REAL, "(B, H, T, D)", shapes, q)
        if self.update is not None:
            self._read = [states]
            v = torch.cat([v, states.to(v).expand(len(v), -1, -1, -1)], -1)
        return self.encoding.turned(q, states), self.encoding.turned(k, states), v

    def advance(self, module: nn.Module, inputs: tuple, y: Tensor) -> None:
        """Update the states for the next layer; a forward hook of the layer's last linear map.

        y: its output (T, B, C).
        """
        if self.update is not None:
            self.given.states = self.update(*self._read, y.transpose(0, 1))
            self._read = []

    def _with_gates(
        self, x: Tensor, tokens: Tokens, past: SoftmaxState | SplitSequence | None
    ) -> Tokens:
        """Return the tokens of x (B, T, C) with sums of log gates continued from ``past``.

        Those of single features are one after another, (B, H D', T). In a part of a text they
        begin at the part, until keys are gathered.
        """
        gates = self._gates(x, tokens.padding)
        if gates is None:
            return tokens
        if gates.dim() == 4:
            gates = gates.mT.flatten(1, 2)
        # float64: differences of sums over a long text must be exact to float32
        sums = gates.double().cumsum(-1)
        continued = isinstance(past, SoftmaxState)
        return tokens._replace(sums=sums + past.sums[..., -1:] if continued else sums)

    def _of_text(self, x: Tensor, tokens: Tokens) -> Tokens:
        """Add places and transport to the tokens of x (B, T, C); update their history in place."""
        history = {} if tokens.history is None else tokens.history
        masks = tokens.padding, tokens.starts, history
        phases, after = self.encoding.phases(x, *masks)
        transport, reflected = self.encoding.transport(x, tokens.positions, *masks)
        history.update(after | reflected)
        return tokens._replace(phases=phases, transport=transport)


def _starts(documents: Tensor, padding: Tensor | None) -> Tensor:
    """Return true at real tokens whose document is not that of the real token before, bool (B, N).

    documents: int (B, N). padding: bool (B, N), or None.
    """
    if padding is not None:  # padding belongs to the document before it
        slots = torch.arange(padding.shape[1], device=padding.device)
        documents = documents.gather(1, slots.masked_fill(padding, 0).cummax(1).values)
    return F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))


def _carried_before(k: Tensor, transport: Transport, first: int) -> Tensor:
    """Return the keys k (B, H, S, D), those before ``first`` carried to the one before it."""
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    past = carried(k[:, :, :first], transport.of(slice(first)))
    return torch.cat([past, k[:, :, first:]], 2)


def _remembered(
    k: Tensor, v: Tensor, tokens: Tokens, past: SoftmaxState | SplitSequence | None
) -> tuple[Tensor, Tensor, Tokens, Tokens, SoftmaxState | None]:
    """Return keys, values, the tokens of the queries and of the keys, and the state after a block.

    k, v, tokens: of the block; its queries also see the past, in a window or whole. There is no
    state after a part of a text over several processes.
    """
    if isinstance(past, SplitSequence):
        return *parallel.gathered(past, k, v, tokens), None
    if tokens.transport is not None:  # a key is rounded once, not at every token
        k = k.to(torch.promote_types(k.dtype, torch.float32))
    every = softmax.extend_state(past, softmax.state_of(k, v, tokens))
    after = softmax.carry(every, tokens.transport)
    queries = tokens
    keys = every.tokens
    window = tokens.window
    # the tokens of a block are counted from its start, those of the state from that of the text
    if keys.counts is not None:
        queries = queries._replace(counts=keys.counts[..., -k.shape[2] :])
    if keys.segments is not None:
        queries = queries._replace(segments=keys.segments[..., -k.shape[2] :])
    if window is None:
        return every.keys, every.values, queries, keys, after
    keys = keys._replace(window=window if window < every.keys.shape[2] else None)
    after = softmax.last_tokens(after, max(1, window - 1))  # the last sum of gates stays
    return every.keys, every.values, queries, keys, after


def _next_after(tokens: Tokens, batch: int, before: Tensor | None) -> Tensor:
    """Return the position after the last real token of explicit positions, int64 (B,)."""
    positions = tokens.positions.expand(batch, tokens.positions.shape[-1])
    if tokens.padding is not None:
        positions = positions.masked_fill(tokens.padding, -1)
    following = positions.amax(1) + 1
    return following if before is None else torch.maximum(following, before)


def reorder_attention_state(state: AttentionState, new_order: Tensor) -> AttentionState:
    """Return the state of the rows ``new_order`` (B',), int64 indices into the batch."""
    module = linear if isinstance(state.past, LinearState) else softmax
    past = module.reorder_state(state.past, new_order)
    history = {name: part.index_select(0, new_order) for name, part in state.history.items()}
    following = state.next_position.index_select(0, new_order)
    return AttentionState(past, following, history, state.owner)


def _check_memory(memory: Memory, x: Tensor) -> None:
    """Refuse a memory of another batch, width or device than x (B, T, C)."""
    batch, length, width = x.shape
    shape = None, batch, width
    check_companion("the inputs of a memory", memory.inputs, REAL, "(M, B, C)", (shape,), x)
    if memory.segments is not None:
        shape = batch, len(memory.inputs) + length
        axes = "(B, M + T)"
        check_companion("the segments of a memory", memory.segments, NUMBERS, axes, (shape,), x)


def _check_beside_memory(keep_state: bool, positions: Tensor | None, starts: Tensor | None) -> None:
    """Refuse arguments of a call that a memory of segments would ignore."""
    if positions is not None:
        raise ValueError("explicit positions cannot be combined with a memory of segments")
    if keep_state:
        raise ValueError("a memory of segments is read and never continued: leave keep_state out")
    if starts is not None:
        raise ValueError(
            "a memory of segments has documents of its own: give them as its segments, and leave "
            "starts out"
        )
