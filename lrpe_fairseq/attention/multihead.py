"""Multi-head self-attention, linear or softmax, with any encoding.

This module contains projections, masks, positions, incremental state and the reordering of beams.
fairseq's layers call this module only.

Axes: B batch, H heads, T query time, S key time, D key width, E value width, C = H D.
"""

import math
import warnings
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.attention import linear, softmax
from lrpe_fairseq.attention.linear import (
    NORMALIZERS,
    LinearState,
    linear_attention,
    linear_attention_block,
    linear_attention_naive,
)
from lrpe_fairseq.attention.scored import Settings, Tokens, scored_attention
from lrpe_fairseq.attention.softmax import SoftmaxState
from lrpe_fairseq.encodings import Encoding, EncodingOptions, ScoreEncoding, build_encoding
from lrpe_fairseq.encodings.base import ELU_PLUS_ONE, PositionCache, check_positions
from lrpe_fairseq.encodings.biases import query_scale
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels.dispatch import is_transformed

ATTENTION_TYPES = ("linear", "softmax")
NOT_EXPORTED = (
    "TorchScript, torch.jit.trace and ONNX are not supported by lrpe_fairseq's attention; run the "
    "model in Python"
)


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


class MultiheadAttention(nn.Module):
    """Self-attention of one layer.

    Args:
        embed_dim: C. num_heads: H; must divide C.
        attention_type: "linear" (first phi(x) = 1 + elu(x), then the encoding) or "softmax"
            (the encoding is applied to the projected q and k; scale D^-0.5).
        position_encoding: a name in ENCODINGS or the free form.
        causal: True if a token attends only to itself and earlier tokens.
        dropout: on softmax weights. Linear attention has no weights and ignores it, as in the
            paper (Table 7: "attention dropout is only used for vanilla attention").
        normalizer: of linear attention; see ``attention.linear.NORMALIZERS``.
        seed: seed of the encoding's fixed random parts. options: options of individual encodings.
        score_decay: c in (0, 1]: the encoded score of (s, t) is multiplied by c^n, before decays of
            the weight. n is the number of steps between s and t in the domain of the encoding
            (``Encoding.steps_between``). Linear attention multiplies the score of its kernel and
            supports it for positions on a line.
        wrap_linear: applied to each projection, for example fairseq's quantization noise.
    Raises: ChoiceError for an unknown name, a width that is not divisible by H, or an encoding
        that the attention type does not support.
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
        score_decay: float = 1.0,
        wrap_linear: Callable[[nn.Linear], nn.Module] = lambda linear: linear,
    ) -> None:
        super().__init__()
        _check_choices(embed_dim, num_heads, attention_type, normalizer)
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.attention_type, self.normalizer = attention_type, normalizer
        self.causal, self.dropout, self.retain_dropout = causal, dropout, False
        self.positions: Tensor | None = None  # of the next calls of forward; None counts tokens
        self.window: int | None = None  # in evaluation: tokens that a token attends to, with itself
        self.sees_padding = "padding-ignored" in options.fidelity
        self.encoding = build_encoding(
            position_encoding, self.head_dim, num_heads, causal=causal, seed=seed, options=options
        )
        spec = self.encoding.spec
        self.scale = self.head_dim**-0.5 if position_encoding == "none" else query_scale(spec)
        if isinstance(self.encoding, ScoreEncoding):
            self.scale *= self.encoding.content_scale
        if attention_type == "linear" and not self.encoding.serves_linear:
            raise ChoiceError(
                f"position encoding {position_encoding!r} needs the score matrix, which linear "
                "attention does not compute; use it with softmax attention"
            )
        self.score_decay = score_decay
        _check_score_decay(score_decay, attention_type, self.encoding)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            wrap_linear(_xavier_linear(embed_dim, gain)) for gain in (*[2**-0.5] * 3, 1.0)
        )
        use_norm = attention_type == "linear" and normalizer == "layernorm"
        self.norm = nn.LayerNorm(embed_dim) if use_norm else None

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

    def make_generation_fast_(
        self,
        name: str = "",
        retain_dropout: bool = False,
        retain_dropout_modules: list[str] | None = None,
        **keywords: Any,
    ) -> None:
        """Called by fairseq before inference: keep attention dropout for ``--retain-dropout``."""
        modules = retain_dropout_modules
        self.retain_dropout = retain_dropout and (
            modules is None or "MultiheadAttention" in modules
        )

    def __prepare_scriptable__(self) -> None:
        """Called by ``torch.jit.script`` for this module or a model that contains it."""
        raise NotImplementedError(NOT_EXPORTED)

    def remembering(self, memory: Memory) -> dict[str, Memory]:
        """Return an ``incremental_state`` with which :meth:`forward` also attends to ``memory``.

        The call stores no state in it.
        """
        return {self._state_key: memory}

    def reorder_incremental_state(self, incremental_state: dict, new_order: Tensor) -> None:
        """Called by fairseq in beam search: select the states of ``new_order`` (B',)."""
        state = self._get_input_buffer(incremental_state)
        if state is not None:
            incremental_state[self._state_key] = reorder_attention_state(state, new_order)

    def _get_input_buffer(self, incremental_state: dict | None) -> AttentionState | Memory | None:
        return None if incremental_state is None else incremental_state.get(self._state_key)

    @property
    def _state_key(self) -> str:
        return f"lrpe_attention.{id(self)}"

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
            _warn_about_compiler()
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
        key_padding_mask = None if self.sees_padding else key_padding_mask
        explicit = positions is not None
        positions = positions if explicit else block_positions(x, key_padding_mask, state)
        attend = self._linear if self.attention_type == "linear" else self._softmax
        out, past = attend(x, positions, key_padding_mask, state, keep_state)
        out = self._project_out(out, x)
        if not keep_state:
            return out, None
        if explicit:
            following = positions.expand(x.shape[:2]).amax(1) + 1
        else:
            following = _next_position(x, key_padding_mask, state)
        return out, AttentionState(past, following)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, H, T, D)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, (B, H, T, D) each, of x (B, T, C)."""
        return tuple(self._heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))

    def _folds(self, x: Tensor) -> bool:
        """True if P is multiplied into the weights, which is cheaper for at least C tokens.

        False if a hook changes the weights in each call (quantization noise).
        """
        plain = not (self.q_proj._forward_pre_hooks or self.k_proj._forward_pre_hooks)
        return plain and self.encoding.foldable and x.shape[0] * x.shape[1] >= x.shape[2]

    def _folded(self, projection: nn.Linear, x: Tensor) -> tuple[Tensor, ...]:
        """Return the planes of (P W) x + P b, (B, H, T, D) each; P W is computed once per call."""
        weight = projection.weight.unflatten(0, (self.num_heads, self.head_dim)).mT  # H C D
        bias = projection.bias.unflatten(0, (self.num_heads, 1, self.head_dim))  # H 1 D
        planes = zip(*map(self.encoding.projection, (weight, bias)), strict=True)
        return tuple(self._heads(F.linear(x, w.mT.flatten(0, 1), b.flatten())) for w, b in planes)

    def _encoded(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q~, k~ and v of softmax attention; score encodings do not change q and k."""
        if isinstance(self.encoding, ScoreEncoding):
            return self._project(x)
        if not self._folds(x):
            q, k, v = self._project(x)
            return *self.encoding(q, k, positions, positions), v
        planes = (self._folded(p, x) for p in (self.q_proj, self.k_proj))
        q, k = self.encoding.turn(*planes, positions, positions)
        return q, k, self._heads(self.v_proj(x))

    def _project_out(self, out: Tensor, x: Tensor) -> Tensor:
        """(B, H, T, E) -> (B, T, C) in the dtype of x."""
        return self.out_proj(self._normalized(out.transpose(1, 2).flatten(2)).to(x.dtype))

    def _normalized(self, out: Tensor) -> Tensor:
        """Apply the optional LayerNorm over all heads (TMLR) in the precision of the sums."""
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
        if self.norm is not None:  # sums without a denominator overflow float16
            v = v.to(torch.promote_types(v.dtype, torch.float32))
        options = {"key_padding_mask": padding, "normalizer": self.normalizer}
        if self.normalizer == "content":
            options["content"] = feature_map(q), feature_map(k)
        q, k = self._features(q, k, positions)
        options["log_decay"] = self._log_decay(x, padding, state, keep_state)
        if self.window is not None:
            self._require_whole(state, keep_state)
            return linear_attention_naive(q, k, v, causal=True, window=self.window, **options), None
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
        q, k = self._features(q, k, _counted(x.shape[1], x.device))
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
        if isinstance(self.encoding, ScoreEncoding):
            return None
        gates = self.encoding.log_gates(x)
        if gates is None or padding is None or padding.dim() == 3:
            return gates
        return gates.masked_fill(padding.bool().unsqueeze(1), 0.0)

    def _features(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Apply feature map and encoding to q and k (B, H, T, D), in the order of the encoding."""
        if self.encoding.denominator_vanishes and q.dtype == torch.float16:
            self._warn_about_denominator()
        one_pass = self.encoding.one_pass(q, positions, FEATURE_MAP)
        if one_pass is not None:
            return one_pass(q), one_pass(k)
        if self.encoding.before_feature_map:
            q, k = self.encoding(q, k, positions, positions)
            return feature_map(q), feature_map(k)
        return self.encoding(feature_map(q), feature_map(k), positions, positions)

    def _warn_about_denominator(self) -> None:
        if self.normalizer == "rotated":
            _warn_once(
                f"{self.encoding.name}: the denominator of normalizer 'rotated' is often near "
                "zero, so float16 gradients overflow; use normalizer 'layernorm' or 'content', or "
                "bfloat16"
            )

    def _after_memory(self, x: Tensor, memory: Memory) -> Tensor:
        """Compute attention of x (B, T, C) over [memory, x]: (B, H, T, E). Keys start M earlier."""
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
        """Compute softmax attention. Queries are the tokens from ``first`` on, keys are all."""
        if self.window is not None:
            self._require_whole(state, keep_state or padding is not None)
            padding = _hidden(x.shape[1], self.window, x.device)
        q, k, v = self._encoded(x, positions)
        past, keys = None, Tokens(positions, _running_sums(self._gates(x, padding), state))
        queries = keys
        if first:
            q, queries = q[:, :, first:], keys.of(slice(first, None))
            queries = queries._replace(positions=_counted(x.shape[1], x.device, first))
        if keep_state:
            past = _extend(state and state.past, k, v, keys, padding)
            k, v, positions, padding, sums = past.parts
            padding = padding if padding.any() else None
            keys = Tokens(positions, sums)
        dropout = self.dropout if self.training or self.retain_dropout else 0.0
        settings = Settings(self.causal, self.scale, dropout, self.score_decay)
        out = scored_attention(self.encoding, q, k, v, queries, keys, padding, settings)
        return out, past


def feature_map(x: Tensor) -> Tensor:
    """Compute phi(x) = 1 + elu(x) > 0 (Katharopoulos et al., 2020; LRPE, Section 4.1)."""
    return F.elu(x).add_(1.0)


FEATURE_MAP = ELU_PLUS_ONE
"""The name of :func:`feature_map` in ``QueryKeyEncoding.one_pass``."""


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


@torch.compiler.disable
def _warn_about_compiler() -> None:
    _warn_once(
        "torch.compile: attention of lrpe_fairseq stays outside the compiled graph and runs as in "
        "eager execution"
    )


def block_positions(
    x: Tensor, key_padding_mask: Tensor | None, state: AttentionState | None
) -> Tensor:
    """Return int64 positions of the block x (B, T, C): (T,) if all rows are equal, else (B, T).

    Real tokens are counted first, then padding, which is masked. Positions of batches that are
    padded on the right are therefore (T,), the cheapest case for encodings. The same tensor object
    is returned for the same length or mask, so that encodings can cache.
    """
    if key_padding_mask is None:
        steps = _counted(x.shape[1], x.device)
    else:
        count = partial(_count_real_first, key_padding_mask)
        steps = _positions_of_mask.get(key_padding_mask, None, count)
    return steps if state is None else state.next_position.unsqueeze(1) + steps


_positions_of_mask = PositionCache()
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
    same = _counted(steps.shape[1], steps.device)
    return same if torch.equal(steps, same.expand_as(steps)) else steps


def _hidden(length: int, window: int, device: torch.device) -> Tensor:
    """Return the mask (1, T, T) of the keys before the last ``window`` keys of each query."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril(-window)[None]


def _counted(length: int, device: torch.device, first: int = 0) -> Tensor:
    """Return first, ..., length - 1 (int64); the same tensor object for the same arguments."""
    if is_transformed():  # a traced or fake tensor must not be cached
        return torch.arange(first, length, device=device)
    return _cached_count(length, device, first)


@lru_cache(maxsize=256)
def _cached_count(length: int, device: torch.device, first: int) -> Tensor:
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


def _check_choices(embed_dim: int, num_heads: int, attention_type: str, normalizer: str) -> None:
    if num_heads < 1 or embed_dim % num_heads:
        raise ChoiceError(f"the width {embed_dim} is not divisible by {num_heads} attention heads")
    if attention_type not in ATTENTION_TYPES:
        raise ChoiceError(
            f"unknown attention type {attention_type!r}; choose one of {', '.join(ATTENTION_TYPES)}"
        )
    if normalizer not in NORMALIZERS:
        raise ChoiceError(
            f"unknown normalizer {normalizer!r}; choose one of {', '.join(NORMALIZERS)}"
        )


def _check_score_decay(decay: float, attention_type: str, encoding: Encoding) -> None:
    if not 0 < decay <= 1:
        raise ChoiceError(f"the score decay must be above 0 and at most 1, got {decay}")
    if decay != 1 and attention_type == "linear" and not encoding.steps_are_lags:
        raise ChoiceError(
            f"a score decay in linear attention needs positions on a line, which {encoding.name!r} "
            "does not have here; use softmax attention or --score-decay 1"
        )


def _xavier_linear(width: int, gain: float) -> nn.Linear:
    linear = nn.Linear(width, width)
    nn.init.xavier_uniform_(linear.weight, gain=gain)
    nn.init.zeros_(linear.bias)
    return linear
