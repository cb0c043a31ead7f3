"""The two protocols of relative positional encoding and their capability fields.

A relative encoding is *decomposable* if the score of (s, t) is the inner product of a query that
depends only on s and a key that depends only on t (LRPE, Definition 3.1, Eq. 13). Decomposable
encodings implement :class:`QueryKeyEncoding` and support linear and softmax attention. The others
need the score matrix, implement :class:`ScoreEncoding` and support softmax attention only.

Axes: B batch, H heads, T query time, S key time, D key width.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.departures import Departure
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels.dispatch import is_transformed

Planes = tuple[Tensor, ...]
"""A real tensor as (re,) or a complex tensor as (re, im)."""

POSITION_GRIDS = ("flat", "sum", "axial")
"""Position of the cell at (row, column) of a grid: its number row by row; row + column; or the row
for one half of the features and the column for the other half (``grid.GridEncoding``)."""

OptionsOf = TypeVar("OptionsOf")


# --- options -----------------------------------------------------------------------------------


def option(default: Any, help_text: str, choices: tuple[str, ...] | None = None) -> Any:
    """Return a field of an encoding's ``Options``: default, help text and allowed values."""
    return field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True, init=False)
class EncodingOptions:
    """Options of individual methods, and the departures that are switched on.

    fidelity: names of departures of the authors' code from the papers. Empty means that the papers
        are followed.
    grid_width: W of a grid whose cells are numbered row by row: position s is row s // W, column
        s mod W. 0: positions are on a line. Read by the encodings that have two axes.
    position_grid: how the other encodings read a grid, a name in :data:`POSITION_GRIDS`.
    grid_height: number of rows, 0 if as many as columns. Read by encodings whose coordinates are
        fractions of the grid.
    values: the options that differ from their defaults, by name; see each class's ``Options``.

    >>> EncodingOptions(toy_size=3).values
    {'toy_size': 3}
    """

    fidelity: frozenset[str]
    grid_width: int
    position_grid: str
    grid_height: int
    values: Mapping[str, Any]

    def __init__(
        self,
        fidelity: frozenset[str] = frozenset(),
        grid_width: int = 0,
        position_grid: str = "flat",
        grid_height: int = 0,
        **values: Any,
    ) -> None:
        _check_grid(grid_width, position_grid, grid_height)
        object.__setattr__(self, "fidelity", fidelity)
        object.__setattr__(self, "grid_width", grid_width)
        object.__setattr__(self, "position_grid", position_grid)
        object.__setattr__(self, "grid_height", grid_height)
        object.__setattr__(self, "values", values)

    def of(self, kind: type[OptionsOf]) -> OptionsOf:
        """Return the options of one method, whose ``Options`` class is ``kind``.

        Raises: ChoiceError for a value that is not among an option's choices.
        """
        own = {f.name: self.values[f.name] for f in fields(kind) if f.name in self.values}
        for f in fields(kind):
            choices = f.metadata.get("choices")
            if choices and own.get(f.name, f.default) not in choices:
                raise ChoiceError(
                    f"unknown {f.name} {own[f.name]!r}; choose one of {', '.join(choices)}"
                )
        return kind(**own)


def _check_grid(grid_width: int, position_grid: str, grid_height: int) -> None:
    if min(grid_width, grid_height) < 0:
        raise ChoiceError(
            "width and height of a grid cannot be negative, got "
            f"--grid-width {grid_width} and --grid-height {grid_height}"
        )
    if grid_height and not grid_width:
        raise ChoiceError("--grid-height needs --grid-width, the number of columns of the grid")
    if position_grid not in POSITION_GRIDS:
        raise ChoiceError(
            f"unknown position grid {position_grid!r}; choose one of {', '.join(POSITION_GRIDS)}"
        )
    if position_grid != "flat" and not grid_width:
        raise ChoiceError(
            f"position grid {position_grid!r} needs the number of columns of the grid; set "
            "--grid-width"
        )


@dataclass(frozen=True)
class Card:
    """What the gallery (docs/encodings.md) says about an encoding.

    equation: LaTeX without delimiters; s is the query's position, t the key's, n = s - t.
    cost: additional cost of one layer, in the symbols of the code (B, H, T, S, D).
    beyond: what the method promises for positions that training did not reach.
    source: authors, year, section or equation.
    drawn_with: options for the picture, if the defaults do not show the method.
    """

    equation: str
    cost: str
    beyond: str
    source: str
    drawn_with: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Properties:
    """What an encoding promises about its scores; the property suite asserts it.

    relative: a score depends on t - s only: "exact", "in expectation" for random codes, or "no".
    relative_up_to: the largest position for which that holds; None if there is no limit.
    relative_by: what a score depends on if positions are no integers on a line, such as a path.
    shift_unit: shifts by multiples of this number do not change a score: W on a grid of width W.
    keeps_norm: an encoded query or key has the norm of the original.
    contextual: distances depend on the tokens in between, and not on positions.
    """

    relative: str = "exact"
    relative_up_to: int | None = None
    relative_by: str = ""
    shift_unit: int = 1
    keeps_norm: bool = True
    contextual: bool = False


@dataclass(frozen=True)
class EncodingSpec:
    """The argument of every encoding's constructor.

    head_dim: width D of one head. num_heads: H. causal: True if s attends to t <= s only.
    seed: seed of a separate generator for the encoding's fixed random parts (Householder vectors,
        permutations, noise in evaluation). Models that differ in their encoding only therefore
        start from the same weights under one training seed.
    options: options of individual methods.
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
        """Return a CPU generator for this encoding; each ``stream`` is independent."""
        return torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + stream)


def query_scale(spec: EncodingSpec) -> float:
    """Return the factor of q in softmax attention, without a ``content_scale``.

    It is D^-0.5, or (H D)^-0.5 with the departure ``embed-dim-scale``.
    """
    wide = "embed-dim-scale" in spec.options.fidelity
    return (spec.num_heads * spec.head_dim if wide else spec.head_dim) ** -0.5


LOWEST = -3e4
"""Smallest bias: exp(-3e4) is 0 in every floating dtype, and float16 can represent -3e4."""


# --- what an encoding does to the scores -------------------------------------------------------

Lags = tuple[int, int]
"""The smallest and the largest lag s - t of a call."""


class Form(NamedTuple):
    """What an encoding does to the scaled scores z_st of softmax attention; None: nothing.

    In this order: z is multiplied by exp(score_decay n) and :attr:`factor`, mapped by
    :attr:`rescore`, and the biases and decay n are added; :attr:`weigh` replaces the softmax. n is
    the number of real tokens between s and t. The functions run in float32 or wider, and without
    autocast, on blocks of queries.
    """

    table: Tensor | None = None
    """(H, R): the bias of every lag from ``lags[0]`` on; float32 or wider."""
    decay: Tensor | None = None
    """(H,): see :meth:`Encoding.log_decay`."""
    score_decay: Tensor | None = None
    """(H,): as ``decay``, of the score itself."""
    factor: Callable[[Tensor, Tensor], Tensor] | None = None
    """(q_positions, k_positions) -> float64 (T, S) or (B, T, S)."""
    bias: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """:meth:`ScoreEncoding.bias`."""
    rescore: Callable[..., Tensor] | None = None
    """:meth:`ScoreEncoding.forward`."""
    weigh: Callable[[Tensor, Tensor | None, torch.dtype], Tensor] | None = None
    """:meth:`ScoreEncoding.weigh`."""


# --- the protocols -----------------------------------------------------------------------------


def undecayed(start: Tensor, learned: bool = True, by_any_adam: bool = False) -> nn.Parameter:
    """Return a parameter without weight decay: an angle, a frequency or a generator of rotations.

    start: its initial value. learned: False for a parameter without gradients.
    by_any_adam: False if only ``lrpe_adam`` leaves it undecayed, True if ``adam`` does, too.

    The mark is fairseq's own attribute, which fairseq copies to the float32 copies of half types.
    """
    parameter = nn.Parameter(start, requires_grad=learned)
    parameter.optim_overrides = {"optimizer": {"weight_decay_scale": 0, "any_adam": by_any_adam}}
    return parameter


class Float32Module(nn.Module):
    """A module whose floating-point parameters and buffers stay in float32 or wider.

    fairseq's trainer calls ``.half()`` or ``.to(bfloat16)`` on the whole model. A learned frequency
    in half precision would give a phase that is wrong by several full rotations at position
    10,000, and running statistics in half precision would stop changing.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float32Module":
        """Follow ``.to(device)``, but keep float tensors and gradients in float32 or wider."""
        floating = [(n, t) for n, t in self.named_tensors() if t.is_floating_point()]
        exact = {name: t.detach() for name, t in floating}
        gradients = {name: t.grad.detach() for name, t in floating if t.grad is not None}
        super()._apply(fn, recurse)
        for name, tensor in self.named_tensors():
            if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
                tensor.data = exact[name].to(tensor.device)
                tensor.grad = gradients[name].to(tensor.device) if name in gradients else None
        return self

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return all parameters and buffers of this module and its children, with their names."""
        return [*self.named_parameters(), *self.named_buffers()]


class Encoding(Float32Module):
    """Base class of both protocols: options, capability fields, and parameters kept in float32.

    A capability field states an exception to what attention and models expect of every encoding.
    The property suite reads it, and :attr:`properties`, and asserts the exception.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of this method; a subclass overrides it with fields from :func:`option`.

        Each field becomes a command-line option and a hydra field of the same name, so its name
        starts with the name of the method.
        """

    departures: ClassVar[Mapping[str, Departure]] = {}
    """Departures of the published code that this method can reproduce, by name."""

    card: Card | None = None
    """The entry of the gallery; a class attribute, or set by the constructor."""
    name: str = ""
    """The name passed to ``build_encoding``, which sets it."""
    decomposable: ClassVar[bool] = False
    """True for a :class:`QueryKeyEncoding`: it changes q and k."""
    serves_linear: bool = False
    """True if linear attention supports it: a decomposable encoding whose decay, if any, counts
    tokens."""
    properties: Properties = Properties()
    """What is promised about the scores; attention and models do not read it."""
    reads_grid: bool = False
    """True if the encoding has two axes on a grid: it reads ``EncodingOptions.grid_width`` itself
    and needs no ``position_grid``."""
    reads_nodes: bool = False
    """True if positions may be int64 codes of the nodes of trees (``domains``)."""
    causal_only: bool = False
    """True if the method is defined for causal attention only."""
    without_absolute: bool = False
    """True if the method is defined for models without absolute positions; others are warned."""
    shared: bool = False
    """True if all layers share one set of parameters; see :meth:`share_with`."""
    shared_by_stacks: bool = False
    """True if also an encoder, a decoder and its cross-attention share it, with equal options."""

    content_scale: ClassVar[float] = 1.0
    """Factor of the content score q k^T, in addition to D^-0.5. The q that the encoding receives
    has this factor."""
    turns: bool = False
    """True if features turn with the position: scores of positive features may be negative, and the
    denominator of Eq. 39 can vanish on texts longer than those of training."""
    denominator_vanishes: bool = False
    """True if the denominator of Eq. 39 is often close to zero or negative. Linear attention with
    normalizer "rotated" then divides by the clamp: results are finite in float32 and bfloat16, but
    float16 gradients overflow. Use normalizer "layernorm" or "content" instead."""

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        self.spec = spec
        self.forget_gate: nn.Module | None = None

    @property
    def softmax_scale(self) -> float:
        """The factor of q k^T in softmax attention."""
        return self.content_scale * query_scale(self.spec)

    def form(self, lags: Lags | None, device: torch.device) -> Form:
        """Return what the encoding does to the scores of one call of softmax attention.

        lags: the smallest and largest lag s - t, if attention has counted the positions; else None.
        """
        raise NotImplementedError

    @property
    def options(self) -> Any:
        """The options of this method, an instance of its ``Options``."""
        return self.spec.options.of(self.Options)

    def log_decay(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Return the natural logarithm of a constant decay per token, (H,) float32, or None.

        Attention multiplies by exp(log_decay n), where n is the number of real tokens in t+1..s,
        because r^s and r^-t overflow separately. In softmax attention :meth:`form` says what is
        multiplied, in linear attention it is the score of the kernel.
        """
        return None

    def log_gates(self, x: Tensor) -> Tensor | None:
        """Return the logarithms of a decay that depends on the tokens, or None.

        Args:
            x: the input of the layer, (B, T, C) with C = H D.
        Returns: (B, H, T) float32, at most 0. Attention multiplies by the exponential of their sum
            over t+1..s, and sets them to 0 at padding. A constant decay comes on top.
        """
        return None if self.forget_gate is None else self.forget_gate(x)

    def share_with(self, owner: "Encoding") -> None:
        """Replace the parameters by those of ``owner``, an encoding of the same name.

        Called by :func:`lrpe_fairseq.encodings.sharing.share_across_layers` if :attr:`shared` is
        true.
        """
        raise NotImplementedError(f"{type(self).__name__} has no parameters to share")

    def summary(self) -> str:
        """Describe the encoding in one line: by default the first sentence of the docstring."""
        paragraph = " ".join((type(self).__doc__ or "").split("\n\n")[0].split())
        return re.split(r"(?<!\.)\. ", paragraph)[0].rstrip(".")


class QueryKeyEncoding(Encoding):
    """(q, k, positions) -> (q~, k~); the score is the inner product of q~ and k~.

    The width may grow: complex features become [Re, Im], so that the real inner product is
    Re(q~^H k~). Trap: softmax attention still scales by D^-0.5 of the *original* width.
    """

    decomposable = serves_linear = True
    before_feature_map: bool = False
    """True if linear attention encodes before the feature map instead of after it."""

    foldable: bool = False
    """True if the encoding equals ``turn(projection(q), projection(k), ...)`` with a linear
    :attr:`projection`. Softmax attention then multiplies P into its weights once per call, at
    no cost per token. A foldable encoding defines :attr:`projection` and :meth:`turn`."""
    projection: nn.Module
    """Only if :attr:`foldable`: the linear map P, a module that maps (..., D) to planes of shape
    (..., D). It must not depend on positions."""

    def turn(
        self, q: Planes, k: Planes, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode the planes of P q and P k; only if :attr:`foldable`.

        Args:
            q, k: the results of :attr:`projection`, (B, H, T, D) and (B, H, S, D) each.
            q_positions, k_positions: as in :meth:`forward`.
        Returns: as :meth:`forward`.
        """
        raise NotImplementedError(f"{type(self).__name__} is not foldable")

    def form(self, lags: Lags | None, device: torch.device) -> Form:
        """Return the constant decay; see :meth:`Encoding.form`."""
        return Form(decay=self.log_decay(device))

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode queries and keys.

        Args:
            q, k: (B, H, T, D) and (B, H, S, D), any floating dtype, which the result has too.
            q_positions, k_positions: int64, (T,) or (B, T), and (S,) or (B, S). Checked by
                :func:`check_positions`.
        Returns: q~ (B, H, T, D') and k~ (B, H, S, D') with D' = :attr:`feature_dim`.
        """
        raise NotImplementedError

    @property
    def feature_dim(self) -> int:
        """Width D' of the encoded features."""
        return self.spec.head_dim

    def one_pass(
        self, x: Tensor, positions: Tensor, phi: bool
    ) -> Callable[[Tensor], Tensor] | None:
        """Return a function that encodes in one pass over memory, or None without such a kernel.

        Args:
            x: (B, H, T, D), an example of the function's argument.
            positions: as in :meth:`forward`.
            phi: True to apply the feature map 1 + elu(x) first.
        Returns: a function of tensors like ``x``, equal to the encoding of x or of phi(x).
        """
        return None


class ScoreEncoding(Encoding):
    """(scores, q, k, positions, visible) -> scores, for encodings that need the score matrix.

    An additive method implements :meth:`bias` only, which fused kernels accept as a mask. Other
    methods override :meth:`forward`, and also :meth:`weigh` if their weights are not a softmax.
    Attention then stores the score matrix.
    """

    additive: ClassVar[bool] = True
    """True if :meth:`bias` defines the encoding completely. Computed: False for a class that
    overrides :meth:`forward` or :meth:`weigh`."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        own = cls.forward, cls.weigh
        cls.additive = own == (ScoreEncoding.forward, ScoreEncoding.weigh)

    def form(self, lags: Lags | None, device: torch.device) -> Form:
        """Return a table of biases by lag, a bias, or functions; see :meth:`Encoding.form`."""
        if self.additive:
            table = None if lags is None else self.bias_by_lag(*lags, device)
            return Form(bias=self.bias) if table is None else Form(table=table)
        own = type(self).weigh is not ScoreEncoding.weigh
        return Form(rescore=self.forward, weigh=self.weigh if own else None)

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
            visible: (B or 1, 1, T, S) bool, true if the query may attend to the key; None if it
                always may. For methods that count keys. Attention applies the mask itself.
        Returns: (B, H, T, S).
        """
        return scores + self.bias(q, k, q_positions, k_positions)

    def bias(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return the additive term, broadcastable to (B, H, T, S); see :meth:`forward`."""
        raise NotImplementedError(f"{type(self).__name__} is not additive: call forward")

    def bias_by_lag(self, first: int, last: int, device: torch.device) -> Tensor | None:
        """Return the bias of every lag s - t from ``first`` to ``last``, (H, last - first + 1).

        Attention then expands it to pairs without reading positions. It is float32 or wider. None
        if the bias depends on more than the lag: attention calls :meth:`bias`, the definition.
        """
        return None

    def weigh(self, scores: Tensor, visible: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the attention weights (B, H, T, S) in ``dtype``, 0 where ``visible`` is false.

        The default is the softmax of the encoded scores. The weights of a query without a visible
        key are all zero.
        """
        return masked_softmax(scores, visible, dtype)


def masked_softmax(scores: Tensor, visible: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute a softmax over visible keys, in float32 or wider; see :meth:`ScoreEncoding.weigh`."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if visible is None:
        return scores.softmax(-1, dtype=wide).to(dtype)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, dtype=wide).to(dtype).masked_fill(~visible, 0.0)


# --- positions ---------------------------------------------------------------------------------


def check_positions(positions: Tensor, x: Tensor) -> Tensor:
    """Return ``positions`` if it is int64 of shape (T,) or (B, T) for x (B, ..., T, D).

    Floating-point positions are refused because float32 cannot represent all integers above 2^24.
    Other shapes, such as (T, 2), are refused because they would broadcast as a batch.
    Raises: ValueError for these.
    """
    batch, length = x.shape[0], x.shape[-2]
    if positions.dtype != torch.int64 or positions.shape not in ((length,), (batch, length)):
        raise ValueError(
            f"positions must be an int64 tensor of shape (T,) or (B, T), here ({length},) or "
            f"({batch}, {length}), got {positions.dtype} of shape {tuple(positions.shape)}"
        )
    return positions


def over_heads(per_position: Tensor, positions: Tensor) -> Tensor:
    """Add an axis for the heads: (T, X) is returned unchanged, (B, T, X) as (B, 1, T, X)."""
    return per_position if positions.dim() == 1 else per_position.unsqueeze(1)


def counted(length: int, device: torch.device, first: int = 0) -> Tensor:
    """Return first, ..., length - 1 (int64); the same tensor object for the same arguments."""
    if is_transformed():  # a traced or fake tensor must not be cached
        return within(torch.arange(first, length, device=device), first, length - 1)
    return _cached_count(length, device, first)


@lru_cache(maxsize=256)
def _cached_count(length: int, device: torch.device, first: int) -> Tensor:
    with torch.inference_mode(False):
        return within(torch.arange(first, length, device=device), first, length - 1)


def within(positions: Tensor, first: int, last: int) -> Tensor:
    """Note on ``positions`` (T,) or (B, T) that attention has counted them from first to last.

    If there are last - first + 1 of them, each row has every number once, and (T,) has them in
    order. The note is an attribute of this tensor object; :func:`known_range` reads it.
    """
    positions.known_range = first, last
    return positions


def known_range(positions: Tensor) -> tuple[int, int] | None:
    """Return the smallest and largest position, without reading them; None if it is not known."""
    return getattr(positions, "known_range", None)


def known_lags(q_positions: Tensor, k_positions: Tensor) -> Lags | None:
    """Return the smallest and largest lag s - t, without reading; None if it is not known."""
    of_q, of_k = known_range(q_positions), known_range(k_positions)
    if of_q is None or of_k is None or of_k[1] < of_k[0]:
        return None
    return of_q[0] - of_k[1], of_q[1] - of_k[0]


BLOCKS = 8
"""Number of blocks of queries whose positions a cache keeps."""


def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``values`` on a device; the same tensor for the same arguments, copied there once."""
    if is_transformed():  # a traced or fake tensor must not be cached
        return torch.tensor(values, dtype=dtype, device=device)
    return _cached_constant(values, dtype, device)


@lru_cache(maxsize=256)
def _cached_constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


class PositionCache:
    """A cache of the last values computed from some tensors, outside the state dict.

    Attention passes the *same* positions object to every layer and step of one length, so tensors
    are compared by identity: no values are compared and no device is synchronized. An in-place
    edit invalidates the entry. Trap: an edit through ``.data`` does not, so a parameter or buffer
    may be a source only if its values are checked as well.

    Threads may share a cache: the entries are one tuple, replaced after a value is computed.

    size: the number of values. Two serve cross-attention, which alternates between the positions of
        a source and of a target; several serve attention in blocks of queries.
    """

    def __init__(self, size: int = 1) -> None:
        self._size, self._entries = size, ()

    def get(
        self, sources: Tensor | tuple[Tensor, ...], key: Any, compute: Callable[[], Any]
    ) -> Any:
        """Return the cached value, or ``compute()`` if the source objects or ``key`` are new.

        ``key`` holds everything else that the value depends on, such as its dtype.
        """
        if torch.compiler.is_compiling():
            return compute()  # the compiler cannot compare object identities
        sources = sources if isinstance(sources, tuple) else (sources,)
        if torch.is_inference_mode_enabled() or any(s.is_inference() for s in sources):
            return compute()  # inference tensors have no version and cannot be used in training
        versions = [s._version for s in sources]
        for entry in self._entries:
            if entry[1:3] == (versions, key) and _same_objects(entry[0], sources):
                return entry[3]
        value = compute()
        self._entries = ((sources, versions, key, value), *self._entries[: self._size - 1])
        return value

    def __deepcopy__(self, memo: dict) -> "PositionCache":
        return PositionCache(self._size)

    def __reduce__(self) -> tuple:
        return PositionCache, (self._size,)


def _same_objects(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    """True if both tuples hold the same objects."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
