"""Multi-head self-attention, linear or softmax, with any encoding: projections, masks,
positions, incremental state and beam reorder. The one module that fairseq's layers call.

Axes: B batch, H heads, T query time, S key time, D key width, E value width, C = H D.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.attention import linear, softmax
from lrpe_fairseq.attention.linear import (
    NORMALIZERS,
    LinearState,
    linear_attention,
    linear_attention_block,
)
from lrpe_fairseq.attention.softmax import (
    SoftmaxState,
    softmax_attention,
    softmax_attention_naive,
)
from lrpe_fairseq.encodings import EncodingOptions, ScoreEncoding, build_encoding
from lrpe_fairseq.encodings.base import PositionCache
from lrpe_fairseq.kernels.dispatch import is_transformed

ATTENTION_TYPES = ("linear", "softmax")


class AttentionState(NamedTuple):
    """State of one attention module between calls."""

    past: LinearState | SoftmaxState
    next_position: Tensor  # B, int64: real tokens seen so far


class Memory(NamedTuple):
    """What a segment sees besides itself (Transformer-XL, Section 3.2): inputs of earlier segments,
    of which today's weights make keys and values."""

    inputs: Tensor  # M B C, without gradient
    hidden: Tensor | None = None  # B T M+T, true where a token must not see another


class MultiheadAttention(nn.Module):
    """Self-attention of one layer.

    Args:
        embed_dim: C. num_heads: H; must divide C.
        attention_type: "linear" (phi(x) = 1 + elu(x) first, then the encoding) or "softmax"
            (the encoding acts on the projected q, k; scale D^-0.5).
        position_encoding: a name of ENCODINGS or the free form.
        causal: whether a token sees only itself and what came before.
        dropout: on softmax weights. Linear attention forms no weights and has none, as in the
            paper (Table 7: "attention dropout is only used for vanilla attention").
        normalizer: of linear attention, see ``attention.linear.NORMALIZERS``.
        seed: of the encoding's fixed random parts. options: knobs of single encodings.
        wrap_linear: applied to each projection, e.g. fairseq's quantization noise.
    Raises: ValueError for an unknown name, a width that H does not divide, or an encoding
        that the attention type cannot use.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        attention_type: str,
        position_encoding: str,
        causal: bool,
        dropout: float = 0.0,
        normalizer: str = "rotated",
        seed: int = 0,
        options: EncodingOptions = EncodingOptions(),
        wrap_linear: Callable[[nn.Linear], nn.Module] = lambda linear: linear,
    ) -> None:
        super().__init__()
        _check_choices(embed_dim, num_heads, attention_type, normalizer)
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.attention_type, self.normalizer = attention_type, normalizer
        self.causal, self.dropout = causal, dropout
        self.sees_padding = "padding-ignored" in options.fidelity
        published = "embed-dim-scale" in options.fidelity and position_encoding != "none"
        self.scale = (embed_dim if published else self.head_dim) ** -0.5
        self.encoding = build_encoding(
            position_encoding, self.head_dim, num_heads, causal=causal, seed=seed, options=options
        )
        if attention_type == "linear" and not self.encoding.serves_linear:
            raise ValueError(
                f"position encoding {position_encoding!r} needs the score matrix, which linear "
                "attention never forms; use it with softmax attention"
            )
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            wrap_linear(_xavier_linear(embed_dim, gain)) for gain in (*[2**-0.5] * 3, 1.0)
        )
        use_norm = attention_type == "linear" and normalizer == "layernorm"
        self.norm = nn.LayerNorm(embed_dim) if use_norm else None

    # --- fairseq's door: (T, B, C), and a dictionary of states ---------------------------------

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
        """fairseq's call: query (T, B, C) -> ((T, B, C), None); attention weights never exist.

        ``key`` and ``value`` are the query in self-attention and are not read. Causality is
        the module's own, so ``attn_mask`` is refused. With ``incremental_state`` the query is
        the next block (usually one token) and its mask is the block's own.
        """
        if attn_mask is not None:
            raise ValueError("attn_mask is not supported: build the module with causal=True")
        state = self._get_input_buffer(incremental_state)
        keep_state = incremental_state is not None and not isinstance(state, Memory)
        out, state = self.attend(query.transpose(0, 1), key_padding_mask, state, keep_state)
        if keep_state:
            incremental_state[self._state_key] = state
        return out.transpose(0, 1), None

    def remembering(self, memory: Memory) -> dict[str, Memory]:
        """An ``incremental_state`` for :meth:`forward`: attend to ``memory`` too, keep nothing."""
        return {self._state_key: memory}

    def reorder_incremental_state(self, incremental_state: dict, new_order: Tensor) -> None:
        """Follow beam search: keep the states of ``new_order`` (B',), as fairseq calls it."""
        state = self._get_input_buffer(incremental_state)
        if state is not None:
            incremental_state[self._state_key] = reorder_attention_state(state, new_order)

    def _get_input_buffer(self, incremental_state: dict | None) -> AttentionState | Memory | None:
        return None if incremental_state is None else incremental_state.get(self._state_key)

    @property
    def _state_key(self) -> str:
        return f"lrpe_attention.{id(self)}"

    # --- inside: (B, T, C) ---------------------------------------------------------------------

    @torch.compiler.disable  # runs as it is: compiled backward passes of linear attention fail
    def attend(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        state: AttentionState | Memory | None = None,
        keep_state: bool = False,
    ) -> tuple[Tensor, AttentionState | None]:
        """Self-attention of x (B, T, C), continuing ``state``; returns (B, T, C) and the state.

        key_padding_mask: (B, T) of this block, true at padding, on either side. Positions
        count real tokens, so left- and right-padded batches agree. The state after the block
        is returned if ``keep_state`` (causal only), else None. After a Memory padding may stand
        on the right only, where causality hides it.
        """
        if keep_state and not self.causal:
            raise ValueError("only causal attention can be continued: build it with causal=True")
        if isinstance(state, Memory):
            return self._project_out(self._after_memory(x, state), x), None
        key_padding_mask = None if self.sees_padding else key_padding_mask
        positions = block_positions(x, key_padding_mask, state)
        attend = self._linear if self.attention_type == "linear" else self._softmax
        out, past = attend(x, positions, key_padding_mask, state, keep_state)
        out = self._project_out(out, x)
        if not keep_state:
            return out, None
        return out, AttentionState(past, _next_position(x, key_padding_mask, state))

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, H, T, D)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (B, H, T, D) of x (B, T, C)."""
        return tuple(self._heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))

    def _folds(self, x: Tensor) -> bool:
        """Whether P goes into the weights: cheaper than per token once tokens outnumber C.

        Not where a hook rewrites the weights on each call (quantization noise).
        """
        plain = not (self.q_proj._forward_pre_hooks or self.k_proj._forward_pre_hooks)
        return plain and self.encoding.foldable and x.shape[0] * x.shape[1] >= x.shape[2]

    def _folded(self, projection: nn.Linear, x: Tensor) -> tuple[Tensor, ...]:
        """The planes of P W x + P b, (B, H, T, D) each, with P W formed once per call."""
        weight = projection.weight.unflatten(0, (self.num_heads, self.head_dim)).mT  # H C D
        bias = projection.bias.unflatten(0, (self.num_heads, self.head_dim))  # H D
        planes = zip(*map(self.encoding.projection, (weight, bias)), strict=True)
        return tuple(self._heads(F.linear(x, w.mT.flatten(0, 1), b.flatten())) for w, b in planes)

    def _encoded(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q~, k~, v of softmax attention; score encodings leave q and k as they are."""
        if isinstance(self.encoding, ScoreEncoding):
            return self._project(x)
        if not self._folds(x):
            q, k, v = self._project(x)
            return *self.encoding(q, k, positions, positions), v
        planes = (self._folded(p, x) for p in (self.q_proj, self.k_proj))
        q, k = self.encoding.turn(*planes, positions, positions)
        return q, k, self._heads(self.v_proj(x))

    def _project_out(self, out: Tensor, x: Tensor) -> Tensor:
        """(B, H, T, E) -> (B, T, C), of x's type."""
        return self.out_proj(self._normalized(out.transpose(1, 2).flatten(2)).to(x.dtype))

    def _normalized(self, out: Tensor) -> Tensor:
        """LayerNorm over all heads (TMLR), in the precision of the sums; else as it is."""
        if self.norm is None:
            return out
        weight, bias = (p.to(out.dtype) for p in (self.norm.weight, self.norm.bias))
        return F.layer_norm(out, self.norm.normalized_shape, weight, bias, self.norm.eps)

    def _linear(
        self,
        x: Tensor,
        positions: Tensor,
        padding: Tensor | None,
        state: AttentionState | None,
        keep_state: bool,
    ) -> tuple[Tensor, LinearState | None]:
        q, k, v = self._project(x)
        if self.norm is not None:  # sums without a denominator outgrow float16
            v = v.to(torch.promote_types(v.dtype, torch.float32))
        options = {"key_padding_mask": padding, "normalizer": self.normalizer}
        if self.normalizer == "content":
            options["content"] = feature_map(q), feature_map(k)
        q, k = self._features(q, k, positions)
        options["log_decay"] = self.encoding.log_decay()
        if not keep_state:
            return linear_attention(q, k, v, causal=self.causal, **options), None
        return linear_attention_block(q, k, v, state=state and state.past, **options)

    def _features(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """phi and the encoding of q and k (B, H, T, D), in the order that the encoding wants."""
        one_pass = self.encoding.one_pass(q, positions)
        if one_pass is not None:
            return one_pass(q), one_pass(k)
        if self.encoding.before_feature_map:
            q, k = self.encoding(q, k, positions, positions)
            return feature_map(q), feature_map(k)
        return self.encoding(feature_map(q), feature_map(k), positions, positions)

    def _after_memory(self, x: Tensor, memory: Memory) -> Tensor:
        """Attention of x (B, T, C) over [memory, x]: (B, H, T, E). Keys begin M before queries."""
        if self.attention_type == "linear" or not self.causal:
            raise ValueError("only causal softmax attention has a memory of earlier segments")
        x = torch.cat([memory.inputs.transpose(0, 1), x], 1)
        positions, first = _counted(x.shape[1], x.device), memory.inputs.shape[0]
        return self._softmax(x, positions, memory.hidden, None, False, first)[0]

    def _softmax(
        self,
        x: Tensor,
        positions: Tensor,
        padding: Tensor | None,
        state: AttentionState | None,
        keep_state: bool,
        first: int = 0,
    ) -> tuple[Tensor, SoftmaxState | None]:
        """Softmax attention; only tokens from the ``first`` on ask, all are seen."""
        q, k, v = self._encoded(x, positions)
        past, k_positions = None, positions
        if first:
            q, positions = q[:, :, first:], _counted(x.shape[1], x.device, first)
        if keep_state:
            past = _extend(state and state.past, k, v, positions, padding)
            k, v, k_positions, padding = past.parts
            padding = padding if padding.any() else None
        options = {
            "causal": self.causal,
            "scale": self.scale,
            "key_padding_mask": padding,
            "dropout": self.dropout if self.training else 0.0,
        }
        if isinstance(self.encoding, ScoreEncoding):
            scaled = q * options["scale"]
            options["bias"] = self.encoding.bias(scaled, k, positions, k_positions)
            return softmax_attention(q, k, v, **options), past
        log_decay = self.encoding.log_decay()
        if log_decay is None:
            return softmax_attention(q, k, v, **options), past
        decay = score_decay(log_decay, positions, k_positions)
        return softmax_attention_naive(q, k, v, rescore=decay.mul, **options), past


def feature_map(x: Tensor) -> Tensor:
    """phi(x) = 1 + elu(x), positive (Katharopoulos et al. 2020; LRPE section 4.1)."""
    return F.elu(x).add_(1.0)


def block_positions(
    x: Tensor, key_padding_mask: Tensor | None, state: AttentionState | None
) -> Tensor:
    """int64 positions of the block x (B, T, C): (T,) where all rows count alike, else (B, T).

    Real tokens are counted first and padding, which is masked anyway, after them: padding at the
    end of the rows leaves (T,), which costs encodings least.
    The same tensor object comes back for the same length or mask, so encodings can cache.
    """
    if key_padding_mask is None:
        steps = _counted(x.shape[1], x.device)
    else:
        count = partial(_count_real_first, key_padding_mask)
        steps = _positions_of_mask.get(key_padding_mask, None, count)
    return steps if state is None else state.next_position.unsqueeze(1) + steps


_positions_of_mask = PositionCache()


def _count_real_first(key_padding_mask: Tensor) -> Tensor:
    """Of a mask (B, T), true at padding: (T,) or (B, T). A GPU is waited for, once a mask."""
    padding = key_padding_mask.bool()
    real = ~padding
    after = real.sum(1, keepdim=True) + padding.cumsum(1)
    steps = torch.where(padding, after, real.cumsum(1)) - 1
    same = _counted(steps.shape[1], steps.device)
    return same if torch.equal(steps, same.expand_as(steps)) else steps


def _counted(length: int, device: torch.device, first: int = 0) -> Tensor:
    """first, ..., length - 1; the same tensor for the same arguments."""
    if is_transformed():  # a traced or fake tensor must not be kept
        return torch.arange(first, length, device=device)
    return _kept_count(length, device, first)


@lru_cache(maxsize=256)
def _kept_count(length: int, device: torch.device, first: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(first, length, device=device)


def _next_position(
    x: Tensor, key_padding_mask: Tensor | None, state: AttentionState | None
) -> Tensor:
    batch, length, _ = x.shape
    if key_padding_mask is None:
        real = torch.full((batch,), length, device=x.device)
    else:
        real = (~key_padding_mask.bool()).sum(1)
    return real if state is None else state.next_position + real


def reorder_attention_state(state: AttentionState, new_order: Tensor) -> AttentionState:
    """The state of rows ``new_order`` (B',), int64 indices into the batch."""
    form = linear if isinstance(state.past, LinearState) else softmax
    past = form.reorder_state(state.past, new_order)
    return AttentionState(past, state.next_position.index_select(0, new_order))


def _extend(
    past: SoftmaxState | None, k: Tensor, v: Tensor, positions: Tensor, padding: Tensor | None
) -> SoftmaxState:
    batch, length = k.shape[0], k.shape[2]
    if padding is None:
        padding = torch.zeros(batch, length, dtype=torch.bool, device=k.device)
    new = SoftmaxState(k, v, positions.expand(batch, length), padding.bool())
    return softmax.extend_state(past, new)


def score_decay(log_decay: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """exp(log_decay (s - t)) for t <= s, 1 beyond: (H, T, S) or (B, H, T, S)."""
    lag = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)
    lag = lag.clamp_min(0).unsqueeze(-3).to(log_decay.dtype)
    return torch.exp(log_decay.view(-1, 1, 1) * lag)


def _check_choices(embed_dim: int, num_heads: int, attention_type: str, normalizer: str) -> None:
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(f"the width {embed_dim} is not divisible by {num_heads} attention heads")
    if attention_type not in ATTENTION_TYPES:
        raise ValueError(
            f"unknown attention type {attention_type!r}; choose one of {', '.join(ATTENTION_TYPES)}"
        )
    if normalizer not in NORMALIZERS:
        raise ValueError(
            f"unknown normalizer {normalizer!r}; choose one of {', '.join(NORMALIZERS)}"
        )


def _xavier_linear(width: int, gain: float) -> nn.Linear:
    linear = nn.Linear(width, width)
    nn.init.xavier_uniform_(linear.weight, gain=gain)
    nn.init.zeros_(linear.bias)
    return linear
