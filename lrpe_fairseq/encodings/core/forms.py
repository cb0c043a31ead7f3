"""What an encoding does to queries, keys and scores, as values that attention reads.

Axes: B batch, H heads, T query time, S key time, D key width.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.positions import Lags

Planes = tuple[Tensor, ...]
"""A real tensor as (re,) or a complex tensor as (re, im)."""


LOWEST = -3e4
"""Smallest bias: exp(-3e4) is 0 in every floating dtype, and float16 can represent -3e4."""


class ByToken(NamedTuple):
    """A bias as data of the queries and the keys, for lags n = s - t: scores
    scale q_s.k_t + by_query_s[n] + by_key_t[n]."""

    q: Tensor
    """(B, H, T, D): what replaces q, not scaled."""
    first_lag: int
    """The lag of the first of C columns. Lags without a column have the value of the nearest."""
    by_query: Tensor | None = None
    """(B, H, T, C)."""
    by_key: Tensor | None = None
    """(B, H, S, C)."""


class Form(NamedTuple):
    """What an encoding does to the scaled scores z_st of softmax attention; None: nothing.

    In this order: z is multiplied by exp(score_decay n) and :attr:`factor`, mapped by
    :attr:`rescore`, and the biases and decay n are added; :attr:`weigh` replaces the softmax. n is
    the number of real tokens between s and t. An encoding has at most one of ``score_decay`` and
    :attr:`factor`, and with either of them no :attr:`bias`. The functions run in float32 or
    wider, and without autocast, on blocks of queries.
    """

    table: Tensor | None = None
    """(H, R), or (1, R) for one table of all heads: the bias of every lag from ``lags[0]`` on;
    float32 or wider."""
    far: int | None = None
    """The table is the same for all lags from here on, and for all up to -far; None: not known."""
    decay: Tensor | None = None
    """(H,): see :meth:`Encoding.log_decay`."""
    score_decay: Tensor | None = None
    """(H,): as ``decay``, of the score itself."""
    factor: Callable[[Tensor, Tensor], Tensor] | None = None
    """(q_positions, k_positions) -> float64 (T, S) or (B, T, S)."""
    bias: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """:meth:`ScoreEncoding.bias`."""
    by_token: Callable[[Tensor, Tensor, Lags], ByToken] | None = None
    """:meth:`ScoreEncoding.by_token`: ``bias`` as data that a kernel supports."""
    rescore: Callable[..., Tensor] | None = None
    """:meth:`ScoreEncoding.forward`."""
    weigh: Callable[[Tensor, Tensor | None, torch.dtype], Tensor] | None = None
    """:meth:`ScoreEncoding.weigh`."""
    shares: bool = False
    """True if ``weigh`` computes stick-breaking weights, which a kernel computes too: starting from
    the newest key, each takes sigmoid(z) of what is left."""

    def has_only(self, *names: str) -> bool:
        """True if no other field is given. Comparing a tensor with None would take 30 us."""
        fields = zip(self._fields, self, strict=True)
        return {name for name, x in fields if x is not None and x is not False} <= {*names}


class Transport(NamedTuple):
    """Reflections that carry keys along the text: the score of (s, t) becomes
    q~_s^T H_s H_(s-1) ... H_(t+1) k~_t with H_u = I - beta_u w_u w_u^T. Causal attention only.

    Decays, gates and all other terms act on these scores as on any others.
    """

    w: Tensor | None
    """(B, H, T, D'), of norm 1 and encoded like a key; float32 or wider. None: the keys themselves;
    see :meth:`by_keys`."""
    beta: Tensor
    """(B, H, T), in [0, 2]; 0 at padding."""

    def by_keys(self, k: Tensor) -> tuple["Transport", Tensor]:
        """Return the transport with its w, and the keys that it carries.

        k: (B, H, T, D'), the encoded keys of the same tokens. With a w both are returned unchanged.
        Without one, w_t = k_t / |k_t| and the keys are beta_t w_t. The sums of linear attention are
        then those of the delta rule. Both are float32 or wider.
        """
        if self.w is not None:
            return self, k
        wide = torch.promote_types(k.dtype, self.beta.dtype)
        w = F.normalize(k.to(wide), dim=-1)
        return Transport(w, self.beta), self.beta.unsqueeze(-1) * w

    def of(self, part: slice) -> "Transport":
        """Return the reflections of a slice of the tokens."""
        return Transport(self.w[:, :, part], self.beta[:, :, part])


class Fold(NamedTuple):
    """An encoding in two parts; its scores are those of :meth:`QueryKeyEncoding.forward`.

    projection: the linear map P, from (..., H, T, D) to planes of this shape.
    turn: encodes the planes of P q and P k at positions of queries and of keys, as ``forward``.
    """

    projection: Callable[[Tensor], Planes]
    turn: Callable[[Planes, Planes, Tensor, Tensor], tuple[Tensor, Tensor]]


def masked_softmax(scores: Tensor, visible: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute a softmax over visible keys, in float32 or wider; see :meth:`ScoreEncoding.weigh`."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if visible is None:
        return scores.softmax(-1, dtype=wide).to(dtype)
    # the smallest number and not -inf: a row without a visible key must not be NaN
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, dtype=wide).to(dtype).masked_fill(~visible, 0.0)
