"""Multi-head cross-attention, linear or softmax, with encodings of both positions.

A query at position s of the target attends to all tokens of a memory, the output of an encoder,
whose token t has position t of the source. Keys and values of the memory are encoded once per
sentence; a decoder keeps them, or their sums in linear attention, in its incremental state.

Axes: B batch, H heads, T time of the target, S time of the source, D key width, E value width,
C = H D width of the decoder, C' width of the memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.attention import parallel
from lrpe_fairseq.attention.linear import (
    LinearState,
    attend_to_memory,
    reads_content,
    summed_memory,
)
from lrpe_fairseq.attention.projected import (
    NOT_EXPORTED,
    ProjectedAttention,
    cross_projections,
    feature_map,
)
from lrpe_fairseq.attention.softmax import encoded_attention, encoded_weights
from lrpe_fairseq.attention.states import Owner, check_owner
from lrpe_fairseq.attention.tokens import Names, Tokens, check_tokens, tokens_after, tokens_of
from lrpe_fairseq.encodings import LONGEST, check_number
from lrpe_fairseq.encodings.core.companions import REAL, check_companion
from lrpe_fairseq.encodings.core.networks import stored
from lrpe_fairseq.errors import ChoiceError


class EncodedMemory(NamedTuple):
    """Keys and values of a memory in softmax attention, and their tokens.

    Keys are encoded if the encoding is decomposable.
    """

    keys: Tensor  # B H S D
    values: Tensor  # B H S E
    positions: Tensor  # S or B S
    counts: Tensor  # S or B S, int64: number of real tokens before each token
    padding: Tensor | None  # B S, true at padding; None without padding

    @property
    def tokens(self) -> Tokens:
        """The tokens of the keys."""
        return Tokens(self.positions, self.counts, self.padding)


class CrossState(NamedTuple):
    """State of one cross-attention module between calls."""

    memory: LinearState | EncodedMemory
    next_position: Tensor  # B, int64: number of real tokens of the target so far
    owner: Owner | None = None  # the layer that made it; None is not checked


OF_QUERY = Names(padding="query_padding_mask")
OF_MEMORY = Names("memory", "key_padding_mask", "memory_positions")


class CrossAttention(ProjectedAttention):
    """Attention of a decoder layer to the output of an encoder.

    The score depends on the position of the query in the target and on that of the key in the
    source: q~_s . k~_t for a decomposable encoding (Algebraic Positional Encodings, Kogkalidis et
    al. 2024, Section 3.1). With the encoding "none" and softmax it is fairseq's cross-attention,
    and it starts from the same weights under the same seed.

    With ``num_kv_heads`` the state keeps the keys and values of all heads.

    Args: see :class:`.multihead.MultiheadAttention`; never causal. memory_dim: C', by default C.
    Raises: ChoiceError as there, and for what needs one sequence: an encoding for causal attention
        only, positions summed from a text, and in linear attention a decay between query and key.
    """

    kind = "cross-attention"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        memory_dim: int | None = None,
        causal: bool = False,
        **options: Any,
    ) -> None:
        if causal is not False:
            raise ChoiceError("cross-attention reads the whole memory: leave causal at False")
        if memory_dim is not None:
            check_number("memory_dim", memory_dim, least=1, most=LONGEST)
        self.memory_dim = embed_dim if memory_dim is None else memory_dim
        super().__init__(embed_dim, num_heads, causal=False, **options)
        if self.kv_shift is not None:
            raise ChoiceError(
                "the attention part kv-shift mixes a token with the one before it in the same "
                "text: choose other parts for cross-attention"
            )
        if self.attention_type == "linear" and self.encoding.log_decay() is not None:
            raise ChoiceError(
                f"linear cross-attention does not support {self.encoding.name!r}, whose decay "
                "counts the tokens between a query and a key of one sequence; use softmax "
                "cross-attention"
            )
        if self.encoding.whole_texts:
            raise ChoiceError(
                "cross-attention reads two texts, and --context-scaling dynamic and longrope turn "
                "by the length of one: choose ntk, yarn or llama3"
            )
        if self.encoding.increments is not None or self.encoding.has_states:
            raise ChoiceError(
                f"cross-attention does not support {self.encoding.name!r}, whose positions follow "
                "one text; choose an encoding with fixed positions, such as rope"
            )

    def _projections(self, qkv_bias: bool, out_bias: bool) -> dict[str, nn.Linear]:
        if not qkv_bias:
            raise ChoiceError("the projections of cross-attention have biases: omit qkv_bias")
        return cross_projections(self.embed_dim, self.memory_dim, self._sizes(), out_bias)

    # --- fairseq's interface: (T, B, C), and a dictionary of states ----------------------------

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = False,
        static_kv: bool = True,
        attn_mask: Tensor | None = None,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Called by fairseq: query (T, B, C), key (S, B, C') -> (T, B, C) and the weights.

        The weights are (B, T, S), the mean of the heads, or (H, B, T, S) for
        ``need_head_weights``, before dropout. They are None unless they are needed, and always in
        linear attention. ``value`` is not used, because it equals the key. With
        ``incremental_state`` the query is the next block; the memory of the first call is kept.
        Positions and padding of the query are those of ``self.given``, which the stack sets.
        Raises: ValueError for an ``attn_mask``.
        """
        if attn_mask is not None:
            raise ValueError("attn_mask is not supported by cross-attention")
        if torch.jit.is_tracing():
            raise NotImplementedError(NOT_EXPORTED)
        out, weights, state = self.attend(
            query.transpose(0, 1),
            key.transpose(0, 1),
            key_padding_mask,
            self._get_input_buffer(incremental_state),
            incremental_state is not None,
            positions=self.given.positions,
            memory_positions=self.given.memory_positions,
            query_padding_mask=self.given.query_padding,
            need_weights=need_weights or need_head_weights,
        )
        if incremental_state is not None:
            incremental_state[self._state_key] = state
        if weights is not None:
            weights = weights.transpose(0, 1) if need_head_weights else weights.mean(1)
        return out.transpose(0, 1), weights

    def _reordered(self, state: CrossState, new_order: Tensor) -> CrossState:
        memory = state.memory
        rows = len(state.next_position)
        if isinstance(memory, EncodedMemory):
            # one row of positions serves every text until rows are selected
            memory = memory._replace(
                positions=memory.positions.expand(rows, memory.positions.shape[-1]),
                counts=memory.counts.expand(rows, memory.counts.shape[-1]),
            )
        parts = (None if part is None else part.index_select(0, new_order) for part in memory)
        following = state.next_position.index_select(0, new_order)
        return CrossState(type(memory)(*parts), following, state.owner)

    # --- inside: (B, T, C) ---------------------------------------------------------------------

    def attend(
        self,
        x: Tensor,
        memory: Tensor,
        key_padding_mask: Tensor | None = None,
        state: CrossState | None = None,
        keep_state: bool = False,
        *,
        positions: Tensor | None = None,
        memory_positions: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, CrossState | None]:
        """Compute cross-attention of x (B, T, C) to ``memory`` (B, S, C').

        Args:
            key_padding_mask: (B, S), true where the memory is padding, which may be anywhere.
            state: the state that the previous block of the target returned. The memory, its mask
                and its positions are then those of the first block, and the arguments are ignored.
            keep_state: True to return the state after the block, else None.
            positions: int64 (T,) or (B, T) of x. memory_positions: int64 (S,) or (B, S). None
                counts real tokens, also after a block with explicit positions. A decay always
                counts real tokens.
            query_padding_mask: (B, T), true where x is padding, for counting only.
            need_weights: True to return the weights of softmax attention.
        Returns: (B, T, C), the weights (B, H, T, S) before dropout or None, and the state.
        Raises: ValueError for a tensor of another shape, dtype or device than it must have, and for
            a state of another layer or batch; in ``sequence_parallel``.
        """
        check_tokens(x, query_padding_mask, positions, width=self.embed_dim, names=OF_QUERY)
        before = past = source = None
        if state is None:  # the first call: the memory is encoded and kept
            source = self._tokens_of_memory(x, memory, key_padding_mask, memory_positions)
        else:  # later calls read the state, and not the memory
            check_owner(state, CrossState, self.owner, x)
            before = state.next_position
            past = state.memory
        queries = tokens_of(x, query_padding_mask, before, positions)
        weights = None
        if self.attention_type == "linear":
            out, past = self._linear(x, queries, memory, source, past)
        else:
            q, past = self._softmax(x, queries, memory, source, past)
            out, weights = self._attended(q, queries, past, need_weights)
        out = self._project_out(out, x)
        if not keep_state:
            return out, weights, None
        following = tokens_after(x, query_padding_mask, before)
        return out, weights, CrossState(past, following, self.owner)

    def _tokens_of_memory(
        self, x: Tensor, memory: Tensor, padding: Tensor | None, positions: Tensor | None
    ) -> Tokens:
        """Return the tokens of a memory (B, S, C') that belongs to x (B, T, C)."""
        parallel.check_outside("cross-attention")
        shape = len(x), None, self.memory_dim
        check_companion("memory", memory, REAL, "(B, S, C')", (shape,), x)
        check_tokens(memory, padding, positions, names=OF_MEMORY)
        return tokens_of(memory, padding, positions=positions)

    def _linear(
        self,
        x: Tensor,
        queries: Tokens,
        memory: Tensor,
        source: Tokens | None,
        past: LinearState | None,
    ) -> tuple[Tensor, LinearState]:
        """Return the output (B, H, T, E) and the sums over the memory, ``past`` if given."""
        with_content = reads_content(self.normalizer)
        options = {"normalizer": self.normalizer}
        if past is None:
            q, k, v = self._project(x, memory)
            content = feature_map(k) if with_content else None
            encoded, k = self._features(q, k, queries.positions, source.positions)
            masked = {"key_padding_mask": source.padding, **options}
            past = summed_memory(k, v, content=content, **masked)
        else:
            q = self._queries(*stored(x))
            # keys at the same positions are encoded with the queries and dropped
            encoded, _ = self._features(q, q, queries.positions, queries.positions)
        content = self._scaled(feature_map(q)) if with_content else None
        options |= {"content": content, "dtype": self._result_type(q)}
        return attend_to_memory(encoded, past, **options), past

    def _softmax(
        self,
        x: Tensor,
        queries: Tokens,
        memory: Tensor,
        source: Tokens | None,
        past: EncodedMemory | None,
    ) -> tuple[Tensor, EncodedMemory]:
        """Return the encoded queries (B, H, T, D) and the encoded memory, ``past`` if given."""
        if past is None:
            q, k, v = self._encoded(x, queries, memory, source)
            return q, EncodedMemory(k, v, source.positions, source.real_counts, source.padding)
        q = self._queries(*stored(x))
        if not self.encoding.decomposable:
            return q, past
        # keys at the same positions are encoded with the queries and dropped
        positions = queries.positions
        return self.encoding.in_parts(q, q, positions, positions)[0], past

    def _attended(
        self, q: Tensor, queries: Tokens, past: EncodedMemory, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, H, T, E) and the weights (B, H, T, S) or None.

        Weights are computed once and multiplied with the values, without fused kernels.
        """
        if need_weights:
            weights = encoded_weights(
                self.encoding, q, past.keys, queries, past.tokens, causal=False
            )
            return F.dropout(weights, self._dropout) @ past.values, weights
        out = encoded_attention(
            self.encoding,
            q,
            past.keys,
            past.values,
            queries,
            past.tokens,
            causal=False,
            dropout=self._dropout,
        )
        return out, None
