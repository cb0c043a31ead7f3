"""What self- and cross-attention have in common: projections, encoding, feature map and output.

Axes: B batch, H heads, T query time, S key time, D key width, E value width, C width.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.attention.linear import check_normalizer
from lrpe_fairseq.attention.parts import Gate, HeadNorm, KVShift, parse_parts
from lrpe_fairseq.attention.states import Owner
from lrpe_fairseq.attention.tokens import Given, Tokens, tokens_of
from lrpe_fairseq.encodings import LONGEST, EncodingOptions, build_encoding, check_number
from lrpe_fairseq.encodings.core.forms import Planes
from lrpe_fairseq.encodings.core.networks import as_stored, stored
from lrpe_fairseq.encodings.core.protocols import Encoding
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels import dispatch
from lrpe_fairseq.kernels.conditions import is_exporting

ATTENTION_TYPES = ("linear", "softmax")
OTHER_NAMES = {
    "attention_dropout": "dropout",
    "attention_heads": "num_heads",
    "attention_normalizer": "normalizer",
    "attention_parts": "parts",
    "attention_window": "window",
    "encoding_seed": "seed",
    "kv_heads": "num_kv_heads",
}
"""Option of the command line and of a YAML -> the argument of attention that it is."""
NOT_EXPORTED = (
    "TorchScript, torch.jit.trace and ONNX are not supported by lrpe_fairseq's attention; run the "
    "model in Python"
)


class ProjectedAttention(nn.Module):
    """Base class of attention with H heads: everything before and after the sums over keys.

    The arguments and errors are those of :class:`.multihead.MultiheadAttention`.
    Raises: ValueError for options given both by keyword and as ``options``.
    """

    kind: ClassVar[str]
    """What a state is of, for the errors of ``states.check_owner``."""

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
        window: int | None = None,
        parts: str = "none",
        seed: int = 0,
        options: EncodingOptions | None = None,
        wrap_linear: Callable[[nn.Linear], nn.Module] = lambda linear: linear,
        qkv_bias: bool = True,
        out_bias: bool = True,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        score_scale: float | None = None,
        **encoding_options: Any,
    ) -> None:
        super().__init__()
        _check_names(encoding_options)
        if options is not None and encoding_options:
            raise ValueError("give the options of an encoding by keyword or as options, not both")
        options = EncodingOptions(**encoding_options) if options is None else options
        _check_choices(attention_type, normalizer)
        _check_dropout(dropout)
        _check_biases(qkv_bias=qkv_bias, out_bias=out_bias)
        self.embed_dim, self.num_heads, self.score_scale = embed_dim, num_heads, score_scale
        self.num_kv_heads = _checked_kv_heads(num_heads, num_kv_heads)
        self.head_dim = _checked_head_dim(embed_dim, num_heads, head_dim)
        self.attention_type, self.normalizer = attention_type, normalizer
        self.causal, self.dropout, self.retain_dropout = causal, dropout, False
        self.window = checked_window(window, causal)
        self.given = Given()  # for calls of forward; a stack of layers shares one
        self.encoding = self._build_encoding(position_encoding, seed, options)
        for name, projection in self._projections(qkv_bias, out_bias).items():
            setattr(self, name, wrap_linear(projection))
        use_norm = attention_type == "linear" and normalizer == "layernorm"
        self.norm = nn.LayerNorm(num_heads * self.head_dim) if use_norm else None
        self.parts = parse_parts(parts)
        self._add_parts(self.parts)
        self.update: nn.Module | None = None
        """What a layer adds to the states of the encoding; see ``MultiheadAttention.advance``."""
        self._read: list[Tensor] = []  # the states, and their means by the weights

    def _build_encoding(self, name: str, seed: int, options: EncodingOptions) -> Encoding:
        """Return the encoding. Raises: ChoiceError if attention does not support it."""
        of_heads = self.num_heads * self.head_dim
        encoding = build_encoding(
            name,
            self.head_dim,
            self.num_heads,
            causal=self.causal,
            seed=seed,
            options=options,
            width=None if of_heads == self.embed_dim else self.embed_dim,
            score_scale=self.score_scale,
        )
        if self.attention_type == "linear" and not encoding.serves_linear:
            needed = "states" if encoding.has_states else "the score matrix"
            raise ChoiceError(
                f"position encoding {name!r} needs {needed}, which linear "
                "attention does not compute; use it with softmax attention"
            )
        if self.attention_type == "softmax" and encoding.no_softmax:
            raise ChoiceError(
                f"position encoding {name!r} {encoding.no_softmax}; use it with linear attention"
            )
        wider = encoding.no_softmax and encoding.feature_dim != self.head_dim
        if self.normalizer == "bounded" and wider:
            raise ChoiceError(
                f"position encoding {name!r} decays each of its {encoding.feature_dim} features by "
                f"a factor of its own, and the normalizer 'bounded' reads {self.head_dim} without "
                "encoding; use another normalizer"
            )
        return encoding

    @property
    def group(self) -> int:
        """The number of query heads that read one head of keys and values."""
        return self.num_heads // self.num_kv_heads

    def _sizes(self) -> dict[str, int]:
        """Return the numbers of features that the projections to q, k and v compute."""
        of_keys = self.num_kv_heads * self.head_dim
        return {"q_proj": self.num_heads * self.head_dim, "k_proj": of_keys, "v_proj": of_keys}

    def _projections(self, qkv_bias: bool, out_bias: bool) -> dict[str, nn.Linear]:
        return _self_projections(self.embed_dim, self._sizes(), qkv_bias, out_bias)

    def _add_parts(self, parts: frozenset[str]) -> None:
        """Build the ``attention.parts``; their parameters exist only where they are used."""
        if "output-norm" in parts and self.norm is not None:
            raise ChoiceError(
                "the attention part output-norm and the normalizer layernorm both normalize the "
                "output: choose one"
            )
        spec, width = self.encoding.spec, self.num_heads * self.head_dim
        qk_norm = "qk-norm" in parts
        self.q_norm = HeadNorm(spec, 1e-5, self.num_heads) if qk_norm else None
        self.k_norm = HeadNorm(spec, 1e-5, self.num_kv_heads) if qk_norm else None
        self.out_norm = HeadNorm(spec, 1e-6) if "output-norm" in parts else None
        output_gate = "output-gate" in parts
        self.out_gate = Gate(self.encoding, width, "output-gate") if output_gate else None
        kv_shift = "kv-shift" in parts
        self.kv_shift = KVShift(self.encoding, self.num_kv_heads) if kv_shift else None

    @property
    def owner(self) -> Owner:
        """What the states of this module belong to."""
        return Owner(
            kind=self.kind,
            attention_type=self.attention_type,
            normalizer=self.normalizer,
            encoding=self.encoding.name,
            spec=self.encoding.spec,
            window=self.window,
            parts=self.parts,
            kv_heads=self.num_kv_heads,
        )

    # --- fairseq's interface -------------------------------------------------------------------

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

    def reorder_incremental_state(self, incremental_state: dict, new_order: Tensor) -> None:
        """Called by fairseq in beam search: select the states of ``new_order`` (B',)."""
        state = self._get_input_buffer(incremental_state)
        if state is not None:
            incremental_state[self._state_key] = self._reordered(state, new_order)

    def _reordered(self, state: Any, new_order: Tensor) -> Any:
        """Return the state of the rows ``new_order`` (B',), int64 indices into the batch."""
        raise NotImplementedError

    def _get_input_buffer(self, incremental_state: dict | None) -> Any:
        return None if incremental_state is None else incremental_state.get(self._state_key)

    @property
    def _state_key(self) -> str:
        return f"lrpe_attention.{id(self)}"

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Called by fairseq before a checkpoint is loaded: split projections of before 2020."""
        split_in_projections(state_dict, f"{name}." if name else "")

    # --- projections ---------------------------------------------------------------------------

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, H D) -> (B, H, T, D), of any number of heads."""
        return x.unflatten(-1, (x.shape[-1] // self.head_dim, self.head_dim)).transpose(1, 2)

    def _for_queries(self, x: Tensor) -> Tensor:
        """Repeat heads of keys or values (B, K, S, D) for their queries, (B, H, S, D)."""
        return x if x.shape[1] == self.num_heads else x.repeat_interleave(self.group, 1)

    def _mapped(self, function: Callable[[Tensor], Tensor], x: Tensor, time_first: bool) -> Tensor:
        """Apply ``function`` to the last axis of :func:`stored` x; return heads (B, H, T, D)."""
        y = function(x)
        y = y.view(*y.shape[:2], y.shape[-1] // self.head_dim, self.head_dim)  # also of no token
        return y.permute(1, 2, 0, 3) if time_first else y.transpose(1, 2)

    def _project(
        self, x: Tensor, memory: Tensor | None = None, tokens: Tokens | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q of x (B, T, C), and k and v of the memory (B, S, C'), or of x.

        They are shifted and normalized where parts say so, and repeated for the queries that share
        them. tokens: of x, for a shift.
        """
        x_stored = stored(x)
        q = self._queries(*x_stored)
        source = x_stored if memory is None else stored(memory)
        if self.kv_shift is None:
            k, v = self._mapped(self.k_proj, *source), self._mapped(self.v_proj, *source)
        else:
            # keys and values are shifted alike, in one pass over the text
            kv = torch.cat([as_stored(self.k_proj, x), as_stored(self.v_proj, x)], -1)
            kv = self.kv_shift.shifted(x, kv, tokens or tokens_of(x))
            k, v = map(self._heads, kv.chunk(2, -1))
        k = k if self.k_norm is None else self.k_norm(k)
        return q, self._for_queries(k), self._for_queries(v)

    def _queries(self, x: Tensor, time_first: bool) -> Tensor:
        """Return q (B, H, T, D) of :func:`stored` x, normalized if a part says so."""
        q = self._mapped(self.q_proj, x, time_first)
        return q if self.q_norm is None else self.q_norm(q)

    def _encoded(
        self, x: Tensor, queries: Tokens, memory: Tensor | None = None, keys: Tokens | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q~, k~ and v of softmax attention; score encodings do not change q and k.

        Keys and values are those of the memory (B, S, C'), or of x.
        """
        if not self.encoding.decomposable:
            q, k, v = self._project(x, memory, queries)
            return *self.encoding.widened(x, q, k, queries.positions), v
        source, keys = (x, queries) if memory is None else (memory, keys)
        fold = self.encoding.fold() if self._folds(x, source) else None
        if fold is None:
            q, k, v = self._project(x, memory, queries)
            q, k = self.encoding.encode_both(
                q, k, queries.read_by_encoding, keys.read_by_encoding, phi=False
            )
            return q, k, v
        q_planes = self._folded(fold.projection, self.q_proj, x)
        k_planes = self._folded(fold.projection, self.k_proj, source)
        k_planes = tuple(map(self._for_queries, k_planes))
        q, k = fold.turn(q_planes, k_planes, queries.read_by_encoding, keys.read_by_encoding)
        return q, k, self._for_queries(self._mapped(self.v_proj, *stored(source)))

    def _folds(self, x: Tensor, source: Tensor) -> bool:
        """True if P is multiplied into the weights of q and k.

        x: the input of the queries; source: that of the keys. False where it is cheaper not to: for
        fewer tokens than features, and where a GPU encodes q and k in one launch. Also false if a
        projection is more than a linear map (a hook, quantization noise, an adapter), or if a part
        stands between the projections and P.
        """
        if self.q_norm is not None or self.kv_shift is not None:
            return False
        # an exported program takes any number of tokens
        few = any(y.shape[0] * y.shape[1] < y.shape[2] for y in (x, source) if not is_exporting())
        if few:
            return False
        if not (is_plain_linear(self.q_proj) and is_plain_linear(self.k_proj)):
            return False
        # a kernel is chosen by one head of the inputs, which have the layout of q and k
        q = x[..., : self.head_dim]
        k = q if source is x else source[..., : self.head_dim]
        return not self.encoding.has_one_launch(q, k)

    def _folded(
        self, p: Callable[[Tensor], Planes], projection: nn.Linear, x: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the planes of (P W) x + P b, (B, H, T, D) each; P W is computed once per call."""
        weight = projection.weight.unflatten(0, (-1, self.head_dim)).mT  # H C D
        bias = projection.bias
        bias = weight.new_zeros(len(projection.weight)) if bias is None else bias
        bias = bias.unflatten(0, (-1, 1, self.head_dim))  # H 1 D
        if self.encoding.keys_by_head and len(weight) < self.num_heads:
            weight, bias = (part.repeat_interleave(self.group, 0) for part in (weight, bias))
        x, time_first = stored(x)
        planes = []
        for w, b in zip(p(weight), p(bias), strict=True):
            of_plane = partial(F.linear, weight=w.mT.flatten(0, 1), bias=b.flatten())
            planes.append(self._mapped(of_plane, x, time_first))
        return tuple(planes)

    # --- the feature map -----------------------------------------------------------------------

    def _features(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the features of q (B, H, T, D) and k (B, H, S, D), whose products are the scores.

        Feature map and encoding are applied in the right order, and q is scaled. q_positions,
        k_positions: what the encoding reads; one object if they are equal.
        """
        if self.encoding.denominator_vanishes and q.dtype == torch.float16:
            self._warn_about_denominator()
        q, k = self.encoding.encode_both(q, k, q_positions, k_positions, phi=True)
        return self._scaled(q), k

    def _content(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of q and k without encoding, which some normalizers read."""
        q, k = dispatch.feature_maps(q, k)
        return self._scaled(q), k

    def _scaled(self, features: Tensor) -> Tensor:
        """Multiply the features of queries in linear attention by ``score_scale``."""
        return features if self.score_scale is None else features * self.score_scale

    def _warn_about_denominator(self) -> None:
        if self.normalizer == "rotated":
            _warn_once(
                f"{self.encoding.name}: the denominator of normalizer 'rotated' is often near "
                "zero, so float16 gradients overflow; use normalizer 'layernorm', 'bounded' or "
                "'content', or bfloat16"
            )

    def _result_type(self, x: Tensor) -> torch.dtype:
        """Return the dtype of results of linear attention: float32 if sums overflow float16."""
        normalized = self.norm is not None or self.out_norm is not None
        return torch.float32 if normalized and x.dtype == torch.float16 else x.dtype

    # --- the output ----------------------------------------------------------------------------

    @property
    def _dropout(self) -> float:
        """The dropout of softmax attention in the current mode."""
        return self.dropout if self.training or self.retain_dropout else 0.0

    def _project_out(self, out: Tensor, x: Tensor) -> Tensor:
        """(B, H, T, E) -> (B, T, C) in the dtype of x, the input of the layer (B, T, C)."""
        out = out if self.out_norm is None else self.out_norm(out)
        # kernels write results in the layout of q: no copy is made of either
        time_first = out.stride(2) > out.stride(0)
        axes = (2, 0, 1, 3) if time_first else (0, 2, 1, 3)
        y = self._normalized(out.permute(axes).flatten(2))  # as it is stored
        if self.out_gate is not None:
            gate = self.out_gate(x)
            y = y * (gate.transpose(0, 1) if time_first else gate)
        y = self.out_proj(y.to(x.dtype))
        return y.transpose(0, 1) if time_first else y

    def _normalized(self, y: Tensor) -> Tensor:
        """Apply the optional LayerNorm over all heads (TMLR), to float32 sums in float16."""
        if self.norm is None:
            return y
        weight, bias = (p.to(y.dtype) for p in (self.norm.weight, self.norm.bias))
        return F.layer_norm(y, self.norm.normalized_shape, weight, bias, self.norm.eps)


def split_in_projections(state: dict[str, Tensor], prefix: str | None = None) -> None:
    """Split ``in_proj_weight`` and ``in_proj_bias`` of fairseq before 2020 into q, k and v.

    state: names -> tensors, changed in place. prefix: of the module; None for all modules.
    """
    for name in list(state):
        module, point, last = name.rpartition(".")
        module += point
        if last in ("in_proj_weight", "in_proj_bias") and prefix in (None, module):
            parts = state.pop(name).chunk(3)
            for projection, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                state[f"{module}{projection}.{last.removeprefix('in_proj_')}"] = part


def feature_map(x: Tensor) -> Tensor:
    """Compute phi(x), x (B, H, T, D), in one pass over memory if the Triton kernel supports x."""
    return dispatch.feature_maps(x)[0]


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _check_names(given: Mapping[str, Any]) -> None:
    """Refuse an option under its name on the command line. Raises: ChoiceError, with our name."""
    for name in OTHER_NAMES.keys() & given.keys():
        raise ChoiceError(
            f"{name!r} is called {OTHER_NAMES[name]!r} in Python: give it by this name"
        )


def _checked_head_dim(embed_dim: int, num_heads: int, head_dim: int | None) -> int:
    """Return D: ``head_dim``, by default C / H. Raises: ChoiceError if H does not divide C then."""
    check_number("embed_dim", embed_dim, least=1, most=LONGEST)
    if head_dim is not None:
        check_number("head_dim", head_dim, least=1, most=LONGEST)
        return head_dim
    if embed_dim % num_heads:
        raise ChoiceError(f"the width {embed_dim} is not divisible by {num_heads} attention heads")
    return embed_dim // num_heads


def _checked_kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
    """Return the number of heads of keys and values, by default H."""
    check_number("num_heads", num_heads)
    if num_heads < 1:
        raise ChoiceError(f"num_heads must be at least 1, not {num_heads}")
    if num_kv_heads is None:
        return num_heads
    check_number("num_kv_heads", num_kv_heads, least=1, most=LONGEST)
    if num_heads % num_kv_heads:
        raise ChoiceError(
            f"{num_kv_heads} heads of keys and values cannot be shared equally by {num_heads} "
            "attention heads: choose a number that divides it"
        )
    return num_kv_heads


def _check_choices(attention_type: str, normalizer: str) -> None:
    if attention_type not in ATTENTION_TYPES:
        raise ChoiceError(
            f"unknown attention type {attention_type!r}; choose one of {', '.join(ATTENTION_TYPES)}"
        )
    check_normalizer(normalizer)


def _check_biases(**biases: bool) -> None:
    for name, bias in biases.items():
        if not isinstance(bias, bool):
            raise ChoiceError(f"{name} must be true or false, not {bias!r}")


def _check_dropout(dropout: float) -> None:
    check_number("dropout", dropout, Real)
    if not 0 <= dropout < 1:
        raise ChoiceError(f"dropout must be at least 0 and less than 1, not {dropout:g}")


def is_plain_linear(module: nn.Module) -> bool:
    """True if the module computes W x + b with its own weights and has no hooks."""
    hooks = module._forward_pre_hooks, module._forward_hooks
    hooks += module._backward_pre_hooks, module._backward_hooks
    unchanged = getattr(module.forward, "__func__", None) is nn.Linear.forward
    return unchanged and not any(hooks)


def checked_window(window: int | None, causal: bool) -> int | None:
    """Return ``window``. Raises: ChoiceError for less than one token, or if not causal."""
    if window is not None:
        check_number("the number of tokens of an attention window", window, least=1, most=LONGEST)
    if window is not None and not causal:
        raise ChoiceError(
            "an attention window needs causal attention: choose none for an encoder or "
            "cross-attention"
        )
    return window


def _self_projections(
    width: int, sizes: dict[str, int], qkv_bias: bool, out_bias: bool
) -> dict[str, nn.Linear]:
    """Return the projections of self-attention, Xavier with gain 2^-0.5 (q, k, v) or 1, bias 0.

    sizes: the features of q, k and v by name. qkv_bias, out_bias: False for no biases of q, k and
    v, or of the output.
    """
    found = {n: _xavier_linear(width, size, 2**-0.5, qkv_bias) for n, size in sizes.items()}
    return {**found, "out_proj": _xavier_linear(sizes["q_proj"], width, 1.0, out_bias)}


def _xavier_linear(inputs: int, outputs: int, gain: float, bias: bool) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)  # the same draws with and without a bias
    nn.init.xavier_uniform_(linear.weight, gain=gain)
    nn.init.zeros_(linear.bias)
    if not bias:
        linear.bias = None
    return linear


def cross_projections(
    width: int, memory_dim: int, sizes: dict[str, int], out_bias: bool
) -> dict[str, nn.Linear]:
    """Return the projections of cross-attention as fairseq's MultiheadAttention draws them.

    The order of the draws and the biases are fairseq's, so that under one seed a model starts from
    the same weights with its cross-attention and with ours. sizes, out_bias: see
    :func:`_self_projections`.
    """
    inputs = {"k_proj": memory_dim, "v_proj": memory_dim, "q_proj": width}
    projections = {name: nn.Linear(given, sizes[name]) for name, given in inputs.items()}
    projections["out_proj"] = nn.Linear(sizes["q_proj"], width)
    for name, linear in projections.items():
        gain = 2**-0.5 if name != "out_proj" and memory_dim == width else 1.0
        nn.init.xavier_uniform_(linear.weight, gain=gain)
    nn.init.zeros_(projections["out_proj"].bias)
    if not out_bias:
        projections["out_proj"].bias = None
    return projections
