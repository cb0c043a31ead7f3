"""The two protocols of relative positional encoding and their capability fields.

A relative encoding is *decomposable* if the score of (s, t) is an inner product of a query that
depends on s only and a key that depends on t only (LRPE, Definition 3.1, Eq. 13). Decomposable
encodings implement :class:`QueryKeyEncoding` and serve linear and softmax attention. The others
need the score matrix, implement :class:`ScoreEncoding` and serve softmax attention only.

Axes: B batch, H heads, T query time, S key time, D key width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from lrpe_fairseq.errors import ChoiceError

ELU_PLUS_ONE = "elu+1"
"""Name of the feature map phi(x) = 1 + elu(x), see :meth:`QueryKeyEncoding.one_pass`."""

Planes = tuple[Tensor, ...]
"""A real tensor as (re,), a complex one as (re, im)."""

OptionsOf = TypeVar("OptionsOf")


# --- options -----------------------------------------------------------------------------------


def option(default: Any, help_text: str, choices: tuple[str, ...] | None = None) -> Any:
    """A field of an encoding's ``Options``: default, help text, and the values it can take."""
    return field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True, init=False)
class EncodingOptions:
    """Options of single methods by name, and the departures that are switched on.

    fidelity: names of departures of the authors' code from the papers; empty is correct.
    values: the options that differ from their defaults; see each class's ``Options``.

    >>> EncodingOptions(toy_size=3).values
    {'toy_size': 3}
    """

    fidelity: frozenset[str]
    values: Mapping[str, Any]

    def __init__(self, fidelity: frozenset[str] = frozenset(), **values: Any) -> None:
        object.__setattr__(self, "fidelity", fidelity)
        object.__setattr__(self, "values", values)

    def of(self, kind: type[OptionsOf]) -> OptionsOf:
        """The options of one method; ``kind`` is its ``Options`` class.

        Raises: ChoiceError for a value that is none of an option's choices.
        """
        own = {f.name: self.values[f.name] for f in fields(kind) if f.name in self.values}
        for f in fields(kind):
            choices = f.metadata.get("choices")
            if choices and own.get(f.name, f.default) not in choices:
                raise ChoiceError(
                    f"unknown {f.name} {own[f.name]!r}; choose one of {', '.join(choices)}"
                )
        return kind(**own)


@dataclass(frozen=True)
class EncodingSpec:
    """What every encoding is built from; each constructor takes exactly this.

    head_dim: width D of one head. num_heads: H. causal: True if s sees t <= s only.
    seed: seeds the encoding's own generator of fixed random parts (Householder vectors,
    permutations, noise in evaluation), so that two encodings under one training seed start
    from the same weights everywhere else. options: options of single methods.
    Raises: ChoiceError unless both sizes are positive.
    """

    head_dim: int
    num_heads: int
    causal: bool = False
    seed: int = 0
    options: EncodingOptions = EncodingOptions()

    def __post_init__(self) -> None:
        if self.head_dim < 1 or self.num_heads < 1:
            raise ChoiceError(
                f"head_dim and num_heads must be positive, got {self.head_dim} and {self.num_heads}"
            )

    def generator(self, stream: int = 0) -> torch.Generator:
        """A CPU generator for this encoding only; ``stream`` separates independent draws."""
        return torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + stream)


# --- the protocols -----------------------------------------------------------------------------


class Encoding(nn.Module):
    """What both protocols share: options, capability fields, parameters that stay float32.

    A capability field is an exception to a property that the test suite demands of every
    encoding. The suite reads the field and asserts it; it never skips.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of this method; a subclass replaces it. Fields are made by :func:`option`.

        Each field becomes a command-line option and a hydra field of the same name, so a name
        starts with the method's.
        """

    departures: ClassVar[Mapping[str, str]] = {}
    """Departures of published code that this method can reproduce: name -> one sentence."""

    name: str = ""
    """The name it was built by; set by ``build_encoding``."""
    serves_linear: ClassVar[bool] = False
    """True if linear attention can use it (decomposable encodings only)."""
    relative: ClassVar[str] = "exact"
    """How the score depends on t - s only: "exact", or "in expectation" (random codes)."""
    keeps_norm: ClassVar[bool] = True
    """True if an encoded query or key has the norm of the original."""
    shared: bool = False
    """True if all layers use one set of parameters; see :meth:`share_with`."""

    denominator_vanishes: bool = False
    """True if Eq. 39's denominator is often near or below zero, so that linear attention with
    normalizer "rotated" divides by the clamp: finite in float32 and bfloat16, but float16
    gradients overflow. Use normalizer "layernorm" or "content" instead."""

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        self.spec = spec

    @property
    def options(self) -> Any:
        """This method's own options, an instance of its ``Options``."""
        return self.spec.options.of(self.Options)

    def share_with(self, owner: "Encoding") -> None:
        """Use the parameters of ``owner``, an encoding of the same name, from now on.

        Called by :func:`lrpe_fairseq.encodings.sharing.share_across_layers` where
        :attr:`shared` is true.
        """
        raise NotImplementedError(f"{type(self).__name__} has no parameters to share")

    def summary(self) -> str:
        """What the encoding is, in one line: by default the first sentence of the class."""
        sentence = (type(self).__doc__ or "").split(". ")[0].split("\n\n")[0]
        return " ".join(sentence.split()).rstrip(".")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Encoding":
        """Move with ``.to(device)`` but never round below float32.

        fairseq's trainer calls ``.half()`` or ``.to(bfloat16)`` on the whole model; a learned
        frequency rounded to half precision is off by whole turns at position 10,000.
        """
        exact = {name: t.detach() for name, t in self.named_tensors() if t.is_floating_point()}
        super()._apply(fn, recurse)
        for name, tensor in self.named_tensors():
            if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
                tensor.data = exact[name].to(tensor.device)
        return self

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """All parameters and buffers of this module and its children."""
        return [*self.named_parameters(), *self.named_buffers()]


class QueryKeyEncoding(Encoding):
    """(q, k, positions) -> (q~, k~); the score is the plain inner product of q~ and k~.

    Widths may grow: complex features become [Re, Im], so that the real inner product is
    Re(q~^H k~). Softmax attention still scales by the *original* width's D^-0.5.
    """

    serves_linear = True
    before_feature_map: ClassVar[bool] = False
    """In linear attention: encode before the feature map, not after it."""

    foldable: bool = False
    """True if the encoding is ``turn(projection(q), projection(k), ...)`` with a linear
    :attr:`projection`. Softmax attention then multiplies P into its weights once per call, at
    no cost per token. A foldable encoding has :attr:`projection` and :meth:`turn`."""
    projection: nn.Module
    """Only if :attr:`foldable`: the linear map P, a module that takes (..., D) to its planes,
    each (..., D). It must not depend on positions."""

    def turn(
        self, q: Planes, k: Planes, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Only if :attr:`foldable`: encode the planes of P q and P k.

        Args:
            q, k: what :attr:`projection` returns, (B, H, T, D) and (B, H, S, D) each.
            q_positions, k_positions: as in :meth:`forward`.
        Returns: what :meth:`forward` returns.
        """
        raise NotImplementedError(f"{type(self).__name__} is not foldable")

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode queries and keys.

        Args:
            q, k: (B, H, T, D) and (B, H, S, D), any floating dtype; kept in the result.
            q_positions, k_positions: int64, (T,) or (B, T), and (S,) or (B, S); checked by
                :func:`check_positions`.
        Returns: q~ (B, H, T, D') and k~ (B, H, S, D') with D' = :attr:`feature_dim`.
        """
        raise NotImplementedError

    @property
    def feature_dim(self) -> int:
        """Width D' of the encoded features."""
        return self.spec.head_dim

    def one_pass(
        self, x: Tensor, positions: Tensor, feature_map: str | None
    ) -> Callable[[Tensor], Tensor] | None:
        """The encoding after a feature map in one pass over memory, or None if there is none.

        Args:
            x: (B, H, T, D), an example of what the result will be called with.
            positions: as in :meth:`forward`.
            feature_map: the map that attention applies before the encoding, by its name
                (:data:`ELU_PLUS_ONE`); None for no map.
        Returns: a function of tensors like ``x``, equal to the encoding of feature_map(x).
        """
        return None

    def log_decay(self) -> Tensor | None:
        """(H,) float32 natural log of a decay per token of the score, or None.

        A causal score is multiplied by exp(log_decay n), n the number of real tokens in
        t+1..s. The attention applies it, because r^s and r^-t on their own overflow.
        """
        return None


class ScoreEncoding(Encoding):
    """(scores, q, k, positions, visible) -> scores, for encodings that need the score matrix.

    An additive method implements :meth:`bias` only, which fused kernels take as a mask. Any
    other method overrides :meth:`forward`, and :meth:`weigh` if its weights are no softmax;
    attention then keeps the score matrix in memory.
    """

    additive: ClassVar[bool] = True
    """True if :meth:`bias` says everything. Derived: False where a class overrides
    :meth:`forward` or :meth:`weigh`."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        own = cls.forward, cls.weigh
        cls.additive = own == (ScoreEncoding.forward, ScoreEncoding.weigh)

    def forward(
        self,
        scores: Tensor,
        q: Tensor,
        k: Tensor,
        q_positions: Tensor,
        k_positions: Tensor,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Encode positions into the scores, before masking and softmax.

        Args:
            scores: (B, H, T, S) = q k^T.
            q: (B, H, T, D), already scaled by D^-0.5. k: (B, H, S, D).
            q_positions, k_positions: as in :meth:`QueryKeyEncoding.forward`.
            visible: (B or 1, 1, T, S) bool, true where the query may see the key; None if
                everywhere. For methods that count keys; attention masks by itself.
        Returns: (B, H, T, S).
        """
        return scores + self.bias(q, k, q_positions, k_positions)

    def bias(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """The additive part, broadcastable to (B, H, T, S); arguments as in :meth:`forward`."""
        raise NotImplementedError(f"{type(self).__name__} is not additive: call forward")

    def weigh(self, scores: Tensor, visible: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Attention weights (B, H, T, S) in ``dtype`` of encoded scores, 0 where not visible.

        The softmax, unless a method replaces it. A query that sees no key has zeros.
        """
        return masked_softmax(scores, visible, dtype)


def masked_softmax(scores: Tensor, visible: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Softmax over visible keys in float32 or wider; see :meth:`ScoreEncoding.weigh`."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if visible is None:
        return scores.softmax(-1, dtype=wide).to(dtype)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, dtype=wide).to(dtype).masked_fill(~visible, 0.0)


# --- positions ---------------------------------------------------------------------------------


def check_positions(positions: Tensor, x: Tensor) -> Tensor:
    """Return ``positions`` if it is int64 of shape (T,) or (B, T) for x (B, ..., T, D).

    Floating positions are refused because float32 cannot count beyond 2^24; any other shape,
    such as (T, 2), because it would broadcast as a batch.
    Raises: ValueError.
    """
    batch, length = x.shape[0], x.shape[-2]
    if positions.dtype != torch.int64 or positions.shape not in ((length,), (batch, length)):
        raise ValueError(
            f"positions must be an int64 tensor of shape (T,) or (B, T), here ({length},) or "
            f"({batch}, {length}), got {positions.dtype} of shape {tuple(positions.shape)}"
        )
    return positions


def over_heads(per_position: Tensor, positions: Tensor) -> Tensor:
    """(T, X) stays; (B, T, X) becomes (B, 1, T, X), to broadcast over (B, H, T, X)."""
    return per_position if positions.dim() == 1 else per_position.unsqueeze(1)


class PositionCache:
    """Remembers what was last computed from some tensors, outside the state dict.

    Attention passes the *same* positions object to every layer and step of one length, so the
    key is identity: values are not compared and no device is synchronized. An edit in place
    counts as a new tensor; one through ``.data`` goes unnoticed, so nothing that a user may edit
    (a parameter or a buffer) belongs among the sources without a check of its values.

    Threads may share a cache: the entry is one tuple, replaced after the value is computed.
    """

    def __init__(self) -> None:
        self._entry: tuple | None = None

    def get(
        self, sources: Tensor | tuple[Tensor, ...], key: Any, compute: Callable[[], Any]
    ) -> Any:
        """``compute()`` once per (source objects, key); ``key`` names dtype and the like."""
        if torch.compiler.is_compiling():
            return compute()  # the compiler traces what is computed and cannot compare identities
        sources = sources if isinstance(sources, tuple) else (sources,)
        if torch.is_inference_mode_enabled() or any(s.is_inference() for s in sources):
            return compute()  # inference tensors have no version and must not reach training
        versions = [s._version for s in sources]
        entry = self._entry
        if entry is not None and entry[1:3] == (versions, key) and _same(entry[0], sources):
            return entry[3]
        value = compute()
        self._entry = sources, versions, key, value
        return value

    def __deepcopy__(self, memo: dict) -> "PositionCache":
        return PositionCache()

    def __reduce__(self) -> tuple:
        return PositionCache, ()


def _same(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    """True if both hold the same objects."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
