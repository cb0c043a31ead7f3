"""CAPE (Zheng et al., 2024): a network over the heads corrects an additive bias at every pair.

The published version calls the method DAPE. It is not the CAPE of Likhomanenko et al. (2021), which
augments absolute positions.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.networks import linear
from lrpe_fairseq.encodings.core.options import EncodingSpec
from lrpe_fairseq.encodings.core.positions import constant
from lrpe_fairseq.encodings.core.protocols import Card, Properties, ScoreEncoding
from lrpe_fairseq.encodings.scores.biases import LagBias
from lrpe_fairseq.encodings.scores.fire import FIRE
from lrpe_fairseq.encodings.scores.kerple import KerpleLog
from lrpe_fairseq.encodings.scores.slopes import alibi_slopes

BLOCK = 1 << 24
"""Number of hidden activations that one block of queries may have on a GPU."""

CACHE_BLOCK = 1 << 19
"""The same on a CPU, where they should stay in its cache."""


def _card(base: str, beyond: str) -> Card:
    """Return the card of CAPE over the method ``base``."""
    return Card(
        mechanism="bias",
        equation=r"z'_{st} = z_{st} + b_{st} + W_2 \, \mathrm{LeakyReLU}"
        r"\big( W_1 [z_{st}; b_{st}] + c_1 \big) + c_2 "
        rf"\quad \text{{over heads, }} b \text{{ of {base}}}",
        cost="97 H + 32 parameters and those of the bias; 96 H multiply-adds per pair",
        beyond=beyond,
        source=f"[Zheng et al. (2024)](https://arxiv.org/abs/2405.14722), with the bias of {base}",
    )


class CAPE(ScoreEncoding):
    """z + b + W2 LeakyReLU(W1 [z; b] + c1) + c2, vectors over the heads at each pair (s, t).

    z is the scaled score and b the bias of another encoding, :attr:`base_class`. W1 (w, 2H) and
    W2 (H, w) with w = ``width`` belong to the layer and are initialized like ``nn.Linear``. The
    parameters of the bias also belong to the layer, as in the authors' code. Unlike there, those of
    KERPLE are not decayed, as in its own code (docs/fidelity.md).

    Computed in float32 or wider, in blocks of queries: a hidden activation has w / H times the size
    of the scores. A result that float16 cannot represent becomes its largest number.

    Trap: the paper's equation has no separate "+ b"; the authors' code does, and this class follows
    it. With W2 = c2 = 0 it is the base encoding.
    """

    without_absolute = True
    base_class: ClassVar[type[LagBias]]
    """The encoding whose bias is b."""

    def __init__(self, spec: EncodingSpec, width: int = 32) -> None:
        super().__init__(spec)
        heads = spec.num_heads
        self.base = self.base_class(spec)
        self.base.shared = False
        generator = spec.generator("cape")
        self.inner = linear(2 * heads, width, generator)
        self.outer = linear(width, heads, generator)

    @property
    def properties(self) -> Properties:
        """Those of the base encoding."""
        return self.base.properties

    def forward(
        self,
        scores: Tensor,
        q: Tensor,
        k: Tensor,
        q_positions: Tensor,
        k_positions: Tensor,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Correct the scores of all heads; see :meth:`ScoreEncoding.forward`."""
        wide = torch.promote_types(scores.dtype, torch.float32)
        bias = self.base.bias(q.to(wide), k.to(wide), q_positions, k_positions)
        pairs = scores[:, :1, :1].numel()  # of one query
        block = BLOCK if scores.is_cuda else CACHE_BLOCK
        rows = max(1, block // (max(1, pairs) * self.inner.out_features))
        blocks = zip(scores.split(rows, -2), bias.split(rows, -2), strict=True)
        return torch.cat([self._corrected(part, b) for part, b in blocks], -2)

    def _corrected(self, scores: Tensor, bias: Tensor) -> Tensor:
        """Return z' in the dtype of z (B, H, R, S), for b (H, R, S) or (B, H, R, S), float32."""
        z = scores.to(bias.dtype).flatten(-2)
        b = bias.flatten(-2)
        inner, outer = self.inner.weight.to(z.dtype), self.outer.weight.to(z.dtype)
        of_z, of_b = inner.tensor_split(2, -1)
        constant = of_b @ b + self.inner.bias.to(z.dtype).unsqueeze(-1)
        start = z + b + self.outer.bias.to(z.dtype).unsqueeze(-1)
        # batched products: a matrix times a batch would copy the hidden activations
        batched = (len(z), -1, -1)
        hidden = torch.baddbmm(constant.expand(batched), of_z.expand(batched), z)
        result = torch.baddbmm(start, outer.expand(batched), F.leaky_relu(hidden))
        result = result.unflatten(-1, scores.shape[-2:])
        if result.dtype == scores.dtype:
            return result
        limits = torch.finfo(scores.dtype)
        return result.clamp(limits.min, limits.max).to(scores.dtype)


class LinearBias(LagBias):
    """score_st - m_h n, n = |s - t|: the bias of ALiBi with its fixed slopes."""

    def of_lag(self, lag: Tensor) -> Tensor:
        """Return -m n, float64 (..., H)."""
        slopes = tuple(alibi_slopes(self.spec.num_heads))
        m = constant(slopes, torch.float64, lag.device)
        return -m * lag.abs().unsqueeze(-1)


class CAPEALiBi(CAPE):
    """score z + b + f([z; b]) with b = -m_h n of ALiBi, f a network over the heads at each pair.

    See :class:`CAPE`.
    """

    base_class = LinearBias
    card = _card("ALiBi", "The bias falls linearly; the network may undo that by content.")


class CAPEKerple(CAPE):
    """score z + b + f([z; b]) with b of KERPLE-log, f a network over the heads at each pair.

    See :class:`CAPE`.
    """

    base_class = KerpleLog
    card = _card("KERPLE-log", "The bias falls logarithmically; the network may undo that.")


class CAPEFIRE(CAPE):
    """score z + b + f([z; b]) with b of FIRE, f a network over the heads at each pair, causal only.

    See :class:`CAPE`. In the authors' code this FIRE has LeakyReLU; here it has ReLU, as alone.
    """

    base_class = FIRE
    causal_only = True
    card = _card("FIRE", "As of FIRE: the argument of its function stays in [0, 1].")
