"""Multi-head self-attention, linear or softmax, with any encoding: projections, masks,
positions, incremental state and beam reorder. fairseq's layers call this module only.

Axes: B batch, H heads, T query time, S key time, D key width, E value width, C = H D.
"""

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
)
from lrpe_fairseq.attention.softmax import (
    SoftmaxState,
    softmax_attention,
    softmax_attention_naive,
)
from lrpe_fairseq.encodings import EncodingOptions, ScoreEncoding, build_encoding
from lrpe_fairseq.encodings.base import ELU_PLUS_ONE, PositionCache, check_positions
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
    next_position: Tensor  # B, int64: real tokens seen so far


class Memory(NamedTuple):
    """What a segment sees besides itself (Transformer-XL, Section 3.2): inputs of earlier segments,
    from which the present weights compute keys and values."""

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
        seed: of the encoding's fixed random parts. options: options of single encodings.
        wrap_linear: applied to each projection, e.g. fairseq's quantization noise.
    Raises: ChoiceError for an unknown name, a width that H does not divide, or an encoding
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
        self.causal, self.dropout, self.retain_dropout = causal, dropout, False
        self.sees_padding = "padding-ignored" in options.fidelity
        published = "embed-dim-scale" in options.fidelity and position_encoding != "none"
        self.scale = (embed_dim if published else self.head_dim) ** -0.5
        self.encoding = build_encoding(
            position_encoding, self.head_dim, num_heads, causal=causal, seed=seed, options=options
        )
        if attention_type == "linear" and not self.encoding.serves_linear:
            raise ChoiceError(
                f"position encoding {position_encoding!r} needs the score matrix, which linear "
                "attention never forms; use it with softmax attention"
            )
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
        """fairseq's call: query (T, B, C) -> ((T, B, C), None); attention weights are not returned.

        ``key`` and ``value`` are the query in self-attention and are not read. Causality is
        the module's own, so ``attn_mask`` is refused. With ``incremental_state`` the query is
        the next block (usually one token) and its mask is the block's own.
        """
        if attn_mask is not None:
            raise ValueError("attn_mask is not supported: build the module with causal=True")
        if torch.jit.is_tracing():
            raise NotImplementedError(NOT_EXPORTED)
        state = self._get_input_buffer(incremental_state)
        keep_state = incremental_state is not None and not isinstance(state, Memory)
        out, state = self.attend(query.transpose(0, 1), key_padding_mask, state, keep_state)
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
        """fairseq's call before inference: keep attention dropout for ``--retain-dropout``."""
        modules = retain_dropout_modules
        self.retain_dropout = retain_dropout and (
            modules is None or "MultiheadAttention" in modules
        )

    def __prepare_scriptable__(self) -> None:
        """Called by ``torch.jit.script``, also for a model that contains this module."""
        raise NotImplementedError(NOT_EXPORTED)

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

    def attend(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        state: AttentionState | Memory | None = None,
        keep_state: bool = False,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState | None]:
        """Self-attention of x (B, T, C), continuing ``state``; returns (B, T, C) and the state.

        Args:
            key_padding_mask: (B, T) of this block, true at padding, which may stand anywhere.
                After a Memory it may stand on the right only, where causality hides it.
            state: what an earlier block returned, or a Memory.
            keep_state: return the state after the block (causal only), else None.
            positions: int64 (T,) or (B, T) of this block; None counts real tokens, so that left-
                and right-padded batches agree. A decay counts real tokens in either case. Not
                with a Memory.
        Under torch.compile it runs outside the compiled graph and warns once.
        Raises: ValueError for arguments that do not fit together.
        """
        if torch.compiler.is_compiling():
            _warn_of_the_compiler()
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
        """:meth:`attend`, in eager execution always."""
        if keep_state and not self.causal:
            raise ValueError("only causal attention can be continued: build it with causal=True")
        if positions is not None:
            check_positions(positions, x)
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
        """q, k, v (B, H, T, D) of x (B, T, C)."""
        return tuple(self._heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))

    def _folds(self, x: Tensor) -> bool:
        """True if P is multiplied into the weights: cheaper than per token from C tokens on.

        Not if a hook rewrites the weights on each call (quantization noise).
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
        options["log_decay"] = self._log_decay(padding, state, keep_state)
        if not keep_state:
            return linear_attention(q, k, v, causal=self.causal, **options), None
        return linear_attention_block(q, k, v, state=state and state.past, **options)

    def _log_decay(
        self, padding: Tensor | None, state: AttentionState | None, keep_state: bool
    ) -> Tensor | None:
        """The decay (H,), or (B, H, T) where padding stands after tokens that are still seen.

        A constant decay counts slots, which are tokens only if no padding stands between.
        """
        log_decay = self.encoding.log_decay()
        if log_decay is None or padding is None:
            return log_decay
        between, after = _gaps_of_mask.get(padding, None, partial(_gaps, padding))
        if not (between or (keep_state and (after or state is not None))):
            return log_decay
        batch, length = padding.shape
        return log_decay[:, None].expand(batch, -1, length)

    def _features(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The feature map and the encoding of q and k (B, H, T, D), in the encoding's order."""
        if self.encoding.denominator_vanishes and q.dtype == torch.float16:
            self._warn_of_the_denominator()
        one_pass = self.encoding.one_pass(q, positions, FEATURE_MAP)
        if one_pass is not None:
            return one_pass(q), one_pass(k)
        if self.encoding.before_feature_map:
            q, k = self.encoding(q, k, positions, positions)
            return feature_map(q), feature_map(k)
        return self.encoding(feature_map(q), feature_map(k), positions, positions)

    def _warn_of_the_denominator(self) -> None:
        if self.normalizer == "rotated":
            _warn_once(
                f"{self.encoding.name}: the denominator of normalizer 'rotated' is often near "
                "zero, so float16 gradients overflow; use normalizer 'layernorm' or 'content', or "
                "bfloat16"
            )

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
            "dropout": self.dropout if self.training or self.retain_dropout else 0.0,
        }
        return self._attended(q, k, v, positions, k_positions, options), past

    def _attended(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_positions: Tensor,
        k_positions: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """Softmax attention (B, H, T, E) with what the encoding does to the scores."""
        if isinstance(self.encoding, ScoreEncoding):
            given = q * self.scale, k, q_positions, k_positions
            if self.encoding.additive:
                return softmax_attention(q, k, v, bias=self.encoding.bias(*given), **options)
            options["weigh"] = self.encoding.weigh
            options["rescore"] = lambda scores, visible: self.encoding(scores, *given, visible)
            return softmax_attention_naive(q, k, v, **options)
        log_decay = self.encoding.log_decay()
        if log_decay is None:
            return softmax_attention(q, k, v, **options)
        decay = score_decay(log_decay, q.shape[-2], k.shape[-2], options["key_padding_mask"])
        options["rescore"] = lambda scores, visible: scores * decay
        return softmax_attention_naive(q, k, v, **options)


def feature_map(x: Tensor) -> Tensor:
    """phi(x) = 1 + elu(x), positive (Katharopoulos et al. 2020; LRPE section 4.1)."""
    return F.elu(x).add_(1.0)


FEATURE_MAP = ELU_PLUS_ONE
"""The name under which encodings know :func:`feature_map`."""


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


@torch.compiler.disable
def _warn_of_the_compiler() -> None:
    _warn_once(
        "torch.compile: attention of lrpe_fairseq stays outside the compiled graph and runs as in "
        "eager execution"
    )


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
_gaps_of_mask = PositionCache()


def _gaps(key_padding_mask: Tensor) -> tuple[bool, bool]:
    """True if padding of a mask (B, T) stands between real tokens, and if it stands after one."""
    real = ~key_padding_mask.bool()
    before = real.cumsum(1) > 0
    after = real.flip(1).cumsum(1).flip(1) > 0
    padded = before & ~real
    return tuple(torch.stack([(padded & after).any(), padded.any()]).tolist())


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


def score_decay(
    log_decay: Tensor, rows: int, columns: int, key_padding_mask: Tensor | None
) -> Tensor:
    """exp(log_decay n), n the number of real tokens in t+1..s, 1 for t > s.

    ``rows`` queries are the last of ``columns`` keys; a mask (B, S) is true at padding.
    Returns: (H, T, S), or (B, H, T, S) where there is a mask.
    """
    if key_padding_mask is None or key_padding_mask.dim() == 3:  # hidden keys are real tokens
        count = _counted(columns, log_decay.device)
    else:
        count = (~key_padding_mask.bool()).cumsum(-1)
    lag = count[..., columns - rows :].unsqueeze(-1) - count.unsqueeze(-2)
    lag = lag.clamp_min(0).unsqueeze(-3).to(log_decay.dtype)
    return torch.exp(log_decay.view(-1, 1, 1) * lag)


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


def _xavier_linear(width: int, gain: float) -> nn.Linear:
    linear = nn.Linear(width, width)
    nn.init.xavier_uniform_(linear.weight, gain=gain)
    nn.init.zeros_(linear.bias)
    return linear
