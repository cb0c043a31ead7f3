"""PaTH (Yang et al., 2025): reflections computed from the text; ``path`` and ``path:<name>``."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.history import causal_filter
from lrpe_fairseq.encodings.core.options import EncodingSpec, option
from lrpe_fairseq.encodings.core.parameters import drawn
from lrpe_fairseq.encodings.core.protocols import Card, Encoding, QueryKeyEncoding
from lrpe_fairseq.encodings.none import NoEncoding, Unchanged
from lrpe_fairseq.encodings.wrappers.fox import FoX

RANK, TAPS = 32, 3
"""Rank of the map to w, and tokens of its filter, as in the authors' code."""


@dataclass(frozen=True)
class PathOptions:
    """Options of PaTH, in ``path`` and in ``path:<name>``."""

    path_bias: float = option(
        0.0, "PaTH: initial bias of beta; 0 is beta = 1, a projection per token; -4 is almost none"
    )


class Reflections(nn.Module):
    """w_u = l2(SiLU(filter_3(W_2 W_1 x_u))) and beta_u = 2 sigmoid(b_h x_u + c_h), for each head.

    W_1 (32, C), W_2 (H D, 32), the causal filter (3, H D) and b (H, C) start from N(0, 0.02^2),
    drawn with the spec's generator, and c (H,) from ``bias``.

    beside: the names of the encoding's random streams.
    """

    def __init__(self, spec: EncodingSpec, bias: float, beside: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.heads = spec.num_heads
        width = spec.num_heads * spec.head_dim
        draw = partial(drawn, spec.generator("path", beside))
        self.down, self.up = draw(RANK, spec.input_width), draw(width, RANK)
        self.filter = draw(TAPS, width)
        self.weight = draw(self.heads, spec.input_width)
        self.bias = nn.Parameter(torch.full((self.heads,), float(bias), device="cpu"))

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None = None,
        starts: Tensor | None = None,
        tail: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return w (B, H, T, D) and beta (B, H, T) of x (B, T, C), float32 or wider, and the tail.

        Arguments are those of ``history.history``; beta is 0 at padding. Trap: w is normalized
        last and never rounded, because a product of 1,000 reflections with |w| = 1 + 2^-9 grows by
        a factor of 2,900.
        """
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        x = x.to(wide)
        y = F.linear(F.linear(x, self.down.to(wide)), self.up.to(wide))
        taps = self.filter.to(wide)
        y, tail = causal_filter(y, taps, padding=padding, starts=starts, tail=tail)
        y = F.silu(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        beta = betas(x, self.weight, self.bias, 2.0, padding)
        return F.normalize(y, dim=-1), beta, tail


def betas(
    x: Tensor, weight: Tensor, bias: Tensor, largest: float, padding: Tensor | None
) -> Tensor:
    """Return beta_u = largest sigmoid(b_h x_u + c_h), (B, H, T) in the dtype of x (B, T, C).

    weight: b, (H, C). bias: c, (H,). padding: (B, T), true where beta is 0, or None.
    """
    beta = largest * F.linear(x, weight.to(x), bias.to(x)).sigmoid().transpose(1, 2)
    return beta if padding is None else beta.masked_fill(padding.unsqueeze(1), 0.0)


CARD = Card(
    mechanism="transport",
    equation=r"q_s^\top H_s H_{s-1} \cdots H_{t+1} k_t,\quad H_u = I - \beta_u w_u w_u^\top,\quad "
    r"\lVert w_u \rVert = 1,\ \beta_u \in (0, 2)",
    cost="32 (C + H D) + 3 H D + H (C + 1) parameters; in linear attention about 3 times its "
    "products; scores in blocks in softmax attention",
    beyond="The reflections depend on content only. With beta near 1 every token deletes a "
    "direction, so that little is left of a key after some multiples of D tokens.",
    source="[Yang et al. (2025)](https://arxiv.org/abs/2505.16381)",
)


class Path(Unchanged):
    """q_s.H_s ... H_(t+1) k_t with reflections H_u = I - beta_u w_u w_u^T of the layer's input.

    The query's own reflection is inside the product and the key's is not. Each layer has separate
    reflections. |H| <= 1, so a key never grows.

    Trap: scores of linear attention may be negative, so that the denominator of Eq. 39 can vanish;
    use normalizer "layernorm" or "content".
    """

    Options = PathOptions
    causal_only = True
    without_absolute = True

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        add_reflections(self)


def path(spec: EncodingSpec, inner: Callable[[EncodingSpec], QueryKeyEncoding]) -> Encoding:
    """Build ``path:<name>``: the encoding E acts on q, k and w, each at its own position.

    That is PaTH with H_u Omega^(p_u - p_(u-1)) in place of H_u, where Omega^n = E_(p+n)^H E_p. With
    beta = 0 it is the encoding.
    """
    encoding = inner(spec)
    add_reflections(encoding)
    return encoding


def add_reflections(encoding: Encoding) -> None:
    """Add reflections to an encoding."""
    spec = encoding.spec
    bias = spec.options.of(PathOptions).path_bias
    encoding.reflections = Reflections(spec, bias, encoding.streams)
    encoding.causal_only = encoding.denominator_vanishes = encoding.keys_by_head = True
    encoding.properties = replace(encoding.properties, contextual=True, reach=TAPS - 1)
    encoding.card = CARD


def can_be_carried(kind: type[Encoding]) -> bool:
    """True for a class of encodings that map queries, keys and w alike, and keep their norms."""
    keeps_norm = issubclass(kind, QueryKeyEncoding) and kind.properties.keeps_norm
    return keeps_norm and not kind.has_states and kind not in (FoX, NoEncoding, Path)
