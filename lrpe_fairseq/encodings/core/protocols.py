"""The two protocols of relative positional encoding and their capability fields.

A relative encoding is *decomposable* if the score of (s, t) is the inner product of a query that
depends only on s and a key that depends only on t (LRPE, Definition 3.1, Eq. 13). Decomposable
encodings implement :class:`QueryKeyEncoding` and support linear and softmax attention. The others
need the score matrix, implement :class:`ScoreEncoding` and support softmax attention only.

Axes: B batch, H heads, T query time, S key time, D key width.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.departures import Departure
from lrpe_fairseq.encodings.core.forms import (
    ByToken,
    Fold,
    Form,
    Transport,
    masked_softmax,
)
from lrpe_fairseq.encodings.core.options import EncodingSpec, query_scale
from lrpe_fairseq.encodings.core.parameters import Float32Module
from lrpe_fairseq.encodings.core.positions import Lags, check_positions
from lrpe_fairseq.kernels import dispatch
from lrpe_fairseq.kernels.conditions import without_autocast
from lrpe_fairseq.kernels.encode.encode import Transform

ATTENTION = "lrpe_fairseq.attention.multihead.MultiheadAttention"
"""What applies every encoding completely, for the sentences to users who call one themselves."""
FEWEST = 5
"""Arguments of a score encoding: the scores, q, k and the positions of both."""


@dataclass(frozen=True)
class Card:
    """What the gallery (docs/encodings.md) says about an encoding.

    mechanism: "none", "rotation", "decay", "gate", "transport", "bias", "content" or "tree and
        grid".
    equation: LaTeX without delimiters; s is the query's position, t the key's, n = s - t.
    cost: additional cost of one layer, in the symbols of the code (B, H, T, S, D).
    beyond: what the method promises for positions that training did not reach.
    source: authors and year, with a link; section or equation.
    """

    mechanism: str
    equation: str
    cost: str
    beyond: str
    source: str


@dataclass(frozen=True)
class Properties:
    """What an encoding promises about its scores; the property suite asserts it.

    relative: a score depends on t - s only: "exact", "in expectation" for random codes, or "no".
    relative_up_to: the largest position for which that holds; None if there is no limit.
    relative_by: what a score depends on if positions are no integers on a line, such as a path.
    shift_unit: shifts by multiples of this number do not change a score: W on a grid of width W.
    keeps_norm: an encoded query or key has the norm of the original.
    contextual: distances depend on the tokens in between, and not on positions.
    reach: number of earlier tokens that a causal filter mixes into each token; an attention window
        does not limit them.
    """

    relative: str = "exact"
    relative_up_to: int | None = None
    relative_by: str = ""
    shift_unit: int = 1
    keeps_norm: bool = True
    contextual: bool = False
    reach: int = 0


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
    no_softmax: str = ""
    """What softmax attention cannot compute, the rest of a sentence that begins with the encoding's
    name; empty if softmax attention supports it."""
    properties: Properties = Properties()
    """What is promised about the scores; attention and models do not read it."""
    reads_grid: bool = False
    """True if the encoding has two axes on a grid: it reads ``EncodingOptions.grid_width`` itself
    and needs no ``position_grid``."""
    reads_nodes: bool = False
    """True if positions may be int64 codes of the nodes of trees (``nodes``)."""
    causal_only: bool = False
    """True if the method is defined for causal attention only."""
    without_absolute: bool = False
    """True if the method is defined for models without absolute positions. A model that adds them
    gets a warning."""
    host_reads: str = ""
    """Why a training step with counted positions reads values of tensors on the host; empty if it
    reads none. On a GPU each read waits for all launched work. On a CPU every encoding may read."""
    shared: bool = False
    """True if all layers share one set of parameters; see :meth:`share_with`."""
    inner_name: str = ""
    """The name without wrappers (``gated:``, ``path:``), whose parameters each layer has its own;
    ``build_encoding`` sets it."""
    shared_by_stacks: bool = False
    """True if also an encoder, a decoder and its cross-attention share it, with equal options."""

    scales: str = ""
    """What ``--context-scaling`` changes, in words for the gallery; empty if the encoding has no
    rotations and refuses ``scaling.RotationOptions``."""
    angles: str = ""
    """"fixed" or "learned" for an encoding that takes ``angles.AngleOptions``; else empty."""
    whole_texts: str = ""
    """Why self-attention may read whole texts only, in one sentence; empty if it also decodes."""
    unsplit: str = ""
    """Why a text cannot be split over processes, in one sentence; empty if it can. Encodings with
    :attr:`whole_texts` cannot be split either."""
    content_scale: float = 1.0
    """Factor of the content score q k^T in softmax attention, in addition to D^-0.5. The q that a
    score encoding receives has this factor."""
    feature_factors: tuple[float, ...] | None = None
    """Factors of the encoded features of a query, D' of them, in softmax attention; None: all 1.
    They are those of the products q_j k_j of a score, beside :attr:`content_scale`."""
    has_states: bool = False
    """True if queries and keys are rotated by per-token states, which each layer of a stack but the
    last updates; see :class:`~lrpe_fairseq.encodings.rotations.tape.TAPE`."""
    turns: bool = False
    """True if features turn with the position: scores of positive features may be negative, and the
    denominator of Eq. 39 can vanish on texts longer than those of training."""
    keys_by_head: bool = False
    """True if equal keys of two heads at one position are encoded differently, or are carried along
    the text differently. Otherwise the state of grouped queries keeps one key for a group."""
    denominator_vanishes: bool = False
    """True if the denominator of Eq. 39 is often close to zero or negative. Linear attention with
    normalizer "rotated" then divides by the clamp: results are finite in float32 and bfloat16, but
    float16 gradients overflow. Use normalizer "layernorm" or "content" instead."""

    streams: tuple[str, ...] = ()
    """Names of the encoding's random streams whose number a part of the layer may have too; see
    :meth:`EncodingSpec.generator`."""

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        self.spec = spec
        self.forget_gate: nn.Module | None = None
        self.reflections: nn.Module | None = None
        self.increments: nn.Module | None = None

    @property
    def softmax_scale(self) -> float:
        """The factor of q k^T in softmax attention."""
        return self.content_scale * query_scale(self.spec)

    def form(self, lags: Lags | None, positions: Tensor) -> Form:
        """Return what the encoding does to the scores of one call of softmax attention.

        lags: the smallest and largest lag s - t, if attention has counted the positions; else None.
        positions: int64 (T,) or (B, T) of the queries.
        """
        raise NotImplementedError

    @property
    def options(self) -> Any:
        """The options of this method, an instance of its ``Options``."""
        return self.spec.options.of(self.Options)

    def log_decay(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Return the natural logarithm of a constant decay per token, (H,) float32, or None.

        Attention multiplies by exp(log_decay n), n the number of real tokens in t+1..s. It never
        computes r^s and r^-t separately: they overflow. In softmax attention :meth:`form` says what
        is multiplied; in linear attention it is the score.
        """
        return None

    def log_gates(self, x: Tensor) -> Tensor | None:
        """Return the logarithms of a decay that depends on the tokens, or None.

        x is the input of the layer, (B, T, C). The result is (B, H, T) float32, at
        most 0, or (B, H, T, D') for a decay of every encoded feature, which is for linear attention
        only. Attention multiplies by the exponential of its sum over t+1..s, and sets it to 0 at
        padding. A constant decay comes on top.
        """
        return None if self.forget_gate is None else self.forget_gate(x)

    def transport(
        self,
        x: Tensor,
        positions: Tensor,
        padding: Tensor | None,
        starts: Tensor | None,
        history: Mapping[str, Tensor],
    ) -> tuple[Transport | None, dict[str, Tensor]]:
        """Return the reflections of the tokens, which are applied to earlier keys, or None.

        Their vectors are encoded like keys. Without reflections the score is the encoding's.

        Args:
            x: the input of the layer, (B, T, C). positions: as of :meth:`QueryKeyEncoding.forward`.
            padding, starts: as of ``history.history``.
            history: the tensors returned for the previous piece of the text, or none.
        Returns: the transport, and the history for the next piece, whose tensors have the batch as
            first axis.
        """
        if self.reflections is None:
            return None, {}
        with without_autocast(x):
            w, beta, tail = self.reflections(x, padding, starts, history.get("reflections"))
            return Transport(self.encode_one(w, positions), beta), {"reflections": tail}

    def phases(
        self,
        x: Tensor,
        padding: Tensor | None,
        starts: Tensor | None,
        history: Mapping[str, Tensor],
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return sums computed from the text that replace token positions, or None.

        They are (B, H, T, E) float64, for :meth:`QueryKeyEncoding.forward`. Arguments and history
        are as in :meth:`transport`.
        """
        if self.increments is None:
            return None, {}
        return self.increments(x, padding, starts, history)

    def share_with(self, owner: "Encoding") -> None:
        """Replace the parameters by those of ``owner``, an encoding of the same name.

        Called by ``sharing.share_across_layers`` if :attr:`shared` is true.
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

    def fold(self) -> Fold | None:
        """Return the parts of an encoding with a first linear map P without positions, or None.

        Attention then takes ``turn(projection(q), projection(k), ...)`` in place of
        :meth:`forward`; softmax attention multiplies P into its weights, at no cost per token.
        """
        return None

    def in_parts(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode by the parts of :meth:`fold`, in float32 or wider, else by :meth:`forward`."""
        fold = self.fold()
        if fold is None:
            return self.forward(q, k, q_positions, k_positions)
        wide = torch.promote_types(q.dtype, torch.float32)
        planes = (fold.projection(x.to(wide)) for x in (q, k))
        q2, k2 = fold.turn(*planes, q_positions, k_positions)
        return q2.to(q.dtype), k2.to(k.dtype)

    def form(self, lags: Lags | None, positions: Tensor) -> Form:
        """Return the constant decay; see :meth:`Encoding.form`."""
        return Form(decay=self.log_decay(positions.device))

    def __call__(self, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Encode queries and keys, for callers outside of attention; see :meth:`forward`.

        It warns of what the method does to the scores in addition.
        """
        beside = self._beside()
        if beside:
            warnings.warn(
                f"{self.name!r} acts on the scores too, and q and k are without its {beside}: use "
                f"{ATTENTION}",
                stacklevel=2,
            )
        return super().__call__(*given, **named)

    def _beside(self) -> str:
        """Return the words for what acts on the scores beside q and k; empty for nothing."""
        decays = not self.form(None, torch.zeros(1, dtype=torch.int64, device="cpu")).has_only()
        has = {
            "decay": decays,
            "gates": self.forget_gate is not None,
            "reflections": self.reflections is not None,
        }
        return " and ".join(word for word, given in has.items() if given)

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode queries and keys.

        Args:
            q, k: (B, H, T, D) and (B, H, S, D), any floating dtype, which the result has too.
            q_positions, k_positions: int64, (T,) or (B, T), and (S,) or (B, S). Checked by
                :func:`check_positions`. Or :meth:`phases`, if the encoding has them.
        Returns: q~ (B, H, T, D') and k~ (B, H, S, D') with D' = :attr:`feature_dim`.
        """
        raise NotImplementedError

    @property
    def feature_dim(self) -> int:
        """Width D' of the encoded features."""
        return self.spec.head_dim

    def transform(self, phi: bool) -> Transform | None:
        """Return Lambda^(s) P as data that kernels compute in one pass, or None.

        phi: True if the feature map 1 + elu(x) comes first.
        """
        return None

    def encode_both(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor, phi: bool
    ) -> tuple[Tensor, Tensor]:
        """Encode q and k in one pass over memory where a kernel does, else by its parts.

        The result is that of :meth:`forward`; with ``phi`` together with the feature map.
        """
        transform = self.transform(phi)
        if transform is not None:
            self.check(q_positions, q)
            # self-attention has one object of positions for queries and keys of one shape
            if k_positions is not q_positions or k.shape[2] != q.shape[2]:
                self.check(k_positions, k)
            encoded = dispatch.encode_both(q, k, transform, q_positions, k_positions)
            if encoded is not None:
                return encoded
        if not phi:
            return self.in_parts(q, k, q_positions, k_positions)
        if self.before_feature_map:
            return dispatch.feature_maps(*self.forward(q, k, q_positions, k_positions))
        return self.in_parts(*dispatch.feature_maps(q, k), q_positions, k_positions)

    def encode_one(self, x: Tensor, positions: Tensor) -> Tensor:
        """Encode x (B, H, T, D) like keys, without the feature map; see :meth:`encode_both`."""
        transform = self.transform(phi=False)
        if transform is not None:
            self.check(positions, x)
            encoded = dispatch.encode_one(x, transform, positions)
            if encoded is not None:
                return encoded
        return self.in_parts(x, x, positions, positions)[1]

    def has_one_launch(self, q: Tensor, k: Tensor) -> bool:
        """True if one launch on a GPU encodes q and k, which is cheaper than :meth:`fold`."""
        transform = self.transform(phi=False)
        return transform is not None and dispatch.encodes_in_one_launch(q, k, transform.variant)

    def check(self, positions: Tensor, x: Tensor) -> Tensor:
        """Return positions of x (B, H, T, D) after :func:`check_positions`."""
        return check_positions(positions, x)


class ScoreEncoding(Encoding):
    """(scores, q, k, positions, visible) -> scores, for encodings that need the score matrix.

    An additive method implements :meth:`bias` only, which fused kernels accept as a mask. Other
    methods override :meth:`forward`, and also :meth:`weigh` if their weights are not a softmax.
    Attention then stores the score matrix.
    """

    by_token: Callable[[Tensor, Tensor, Lags], ByToken] | None = None
    """(q, k, lags) -> :class:`ByToken`, or None. A method of encodings whose :meth:`bias` is the
    product of a query or a key with a vector by lag. lags: the smallest and the largest one of
    visible pairs, of tokens that attention has counted. Trap: unlike in :meth:`bias`, q is not
    scaled."""

    far: int | None = None
    """The bias by lag is the same for all lags from here on, and for all up to -far; None: not
    known. A kernel then loads one number for a tile of such lags."""

    additive: ClassVar[bool] = True
    """True if :meth:`bias` defines the encoding completely. Computed: False for a class that
    overrides :meth:`forward` or :meth:`weigh`."""

    def widened(self, x: Tensor, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k with features that the method computes from the input of the layer.

        Attention calls it before anything is scaled or stored, so that a state of decoding holds
        the features of keys. They must not change q k^T. By default there are none.

        Args: x: (B, T, C). q, k: (B, H, T, D). positions: int64 (T,) or (B, T).
        """
        return q, k

    def __call__(self, *given: Any, **named: Any) -> Tensor:
        """Encode the scores; see :meth:`forward`.

        Raises: TypeError for q and k without scores, as a :class:`QueryKeyEncoding` takes them.
        """
        if len(given) + len(named) < FEWEST:
            raise TypeError(
                f"{self.name!r} acts on the scores, not on q and k alone: use {ATTENTION}"
            )
        return super().__call__(*given, **named)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        methods = cls.forward, cls.weigh
        cls.additive = methods == (ScoreEncoding.forward, ScoreEncoding.weigh)

    def form(self, lags: Lags | None, positions: Tensor) -> Form:
        """Return a table of biases by lag, a bias, or functions; see :meth:`Encoding.form`."""
        if self.additive:
            table = None if lags is None else self.bias_by_lag(*lags, positions.device)
            if table is None:
                return Form(bias=self.bias, by_token=self.by_token)
            return Form(table=table, far=self.far)
        # the flash kernel and the blocks know the softmax: it is no function of the encoding
        replaces_softmax = type(self).weigh is not ScoreEncoding.weigh
        return Form(rescore=self.forward, weigh=self.weigh if replaces_softmax else None)

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
