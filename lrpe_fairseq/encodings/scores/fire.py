"""FIRE (Li et al., 2024): a learned function of the lag relative to the query's position."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.forms import LOWEST, Form
from lrpe_fairseq.encodings.core.networks import Linear, linear
from lrpe_fairseq.encodings.core.options import LONGEST, EncodingSpec, option
from lrpe_fairseq.encodings.core.positions import (
    BLOCKS,
    Lags,
    PositionCache,
    check_positions,
    counted,
    known_range,
)
from lrpe_fairseq.encodings.core.protocols import Card, Properties
from lrpe_fairseq.encodings.scores.biases import LagBias
from lrpe_fairseq.kernels.conditions import reads_are_free

EPS = 1e-6
"""Added to the denominator, as in the published code."""

BLOCK = 1 << 24
"""Number of values that one block of queries may have in a layer of f."""


class FIRE(LagBias):
    """score_st + f(psi(n) / psi(max(L, s)))_h, n = s - t, psi(x) = log(1 + |c| x), causal only.

    s is the position of the query. f maps a number to one bias per head: ``layers`` hidden
    layers of ``width`` with ReLU, initialized like ``nn.Linear``. Learned are f, c (initially 0.1)
    and a factor lambda of the threshold L = |lambda| ``fire_length`` (initially 1), in every layer,
    or once in all layers with ``fire_shared`` (FIRE-S). psi is float64; f has the precision of its
    weights.

    f with one hidden layer is a chain of line segments (:func:`segments`), so that a pair costs the
    search of one segment and a line, for any L. On a CPU, where L is read at no cost, f is
    evaluated once per lag for the first queries, at positions s <= L, and as segments for those
    after them. On a GPU L is never read: all pairs take segments.

    Trap: for s > L the bias depends on s as well as on n. It is relative up to L only
    (:attr:`properties`).
    """

    @dataclass(frozen=True)
    class Options:
        """Options of FIRE: initial threshold, and True for FIRE-S."""

        fire_length: int = option(
            512, "FIRE: initial threshold L, in tokens", least=1, most=LONGEST
        )
        fire_shared: bool = option(False, "FIRE: one set of parameters in all layers (FIRE-S)")

    causal_only = True
    without_absolute = True
    card = Card(
        mechanism="bias",
        equation=r"b_{st} = f_\theta\!\left( \frac{\psi(n)}{\psi(\max(L, s))} \right)_{\!h}, "
        r"\quad \psi(x) = \log(1 + |c| x)",
        cost="66 + 33 H parameters; on a CPU 32 (1 + H) multiply-adds per lag up to L; beyond, and "
        "on a GPU, H lines and a search among 33 segments per pair",
        beyond="Beyond L the argument of f stays in [0, 1]: the oldest key has argument 1 at any "
        "length.",
        source="[Li et al. (2024)](https://arxiv.org/abs/2310.04418)",
    )

    def __init__(self, spec: EncodingSpec, width: int = 32, layers: int = 1) -> None:
        super().__init__(spec)
        self.shared, self._length = self.options.fire_shared, self.options.fire_length
        self.width = width
        self._last = PositionCache(BLOCKS)
        self.c = nn.Parameter(torch.full((1,), 0.1, dtype=torch.float32))
        self.threshold_factor = nn.Parameter(torch.ones(1, dtype=torch.float32))
        widths = [1, *[width] * layers, spec.num_heads]
        generator = spec.generator("fire")
        *hidden, last = [linear(a, b, generator) for a, b in pairwise(widths)]
        between = [part for layer in hidden for part in (layer, nn.ReLU())]
        self.f = nn.Sequential(*between, last)

    def share_with(self, owner: "FIRE") -> None:
        """Use f, c and the threshold of ``owner``."""
        self.f = owner.f
        self.c = owner.c
        self.threshold_factor = owner.threshold_factor

    @property
    def threshold(self) -> Tensor:
        """L, float64 (1,), in tokens."""
        return (self.threshold_factor.double() * self._length).abs()

    @property
    def properties(self) -> Properties:
        """Relative up to the position floor(L); beyond, the bias depends on the query's too."""
        return Properties(relative_up_to=int(self.threshold.detach()))

    def form(self, lags: Lags | None, positions: Tensor) -> Form:
        """Return a table by lag if every query is known to be at s <= L, else a bias.

        On a GPU it is not known, because L would have to be read.
        """
        relative = lags is not None and self._near(positions) == positions.shape[-1]
        return super().form(lags if relative else None, positions)

    def bias(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return (H, T, S), or (B, H, T, S) for positions with a batch axis, in the dtype of q."""
        check_positions(q_positions, q)
        check_positions(k_positions, k)
        near = self._near(q_positions)
        if near == q_positions.shape[-1]:
            return super().bias(q, k, q_positions, k_positions)
        pairs = k_positions.shape[-1] * q_positions[..., :1].numel()
        rows = max(1, BLOCK // (max(1, pairs) * max(self.width, self.spec.num_heads)))
        after = q_positions[..., near:]
        # blocks would fix the length in a compiled graph
        parts = (after,) if torch.compiler.is_compiling() else after.split(rows, -1)
        blocks = [
            self._of_pairs(part.unsqueeze(-1), k_positions.unsqueeze(-2)).to(q.dtype)
            for part in parts
        ]
        far = torch.cat(blocks, -2)
        if not near:
            return far
        first, _ = known_range(q_positions)
        before = counted(first + near, q_positions.device, first)
        return torch.cat([super().bias(q[..., :near, :], k, before, k_positions), far], -2)

    def _near(self, q_positions: Tensor) -> int:
        """Return how many of the first queries are known to be at s <= L; 0 if L is NaN.

        0 on a GPU, where a read of L would wait.
        """
        count = q_positions.shape[-1]
        if q_positions.numel() == 0 or not reads_are_free(q_positions, self.threshold_factor):
            return 0
        limit = self.threshold.detach().item()
        known = known_range(q_positions)
        if known is None:
            last = self._last.get(q_positions, None, lambda: int(q_positions.max()))
            return count if last <= limit else 0
        first, last = known
        if last <= limit:
            return count
        in_order = q_positions.dim() == 1 and last - first == count - 1
        return max(0, math.floor(limit) - first + 1) if in_order and limit >= 0 else 0

    def of_lag(self, lag: Tensor) -> Tensor:
        """Return the bias of every lag (..., H) for queries at s <= L."""
        return self.f(self._argument(lag, self.threshold).unsqueeze(-1))

    def _of_pairs(self, s: Tensor, t: Tensor) -> Tensor:
        """Return the bias (..., H, T, S) of queries at s (..., T, 1) and keys at t (..., 1, S)."""
        longest = torch.maximum(self.threshold, s.double())
        x = self._argument((s - t).clamp_min(0), longest)
        if len(self.f) == 3:
            return along_segments(x, *segments(self.f[0], self.f[-1])).clamp_min(LOWEST)
        return self.f(x.unsqueeze(-1)).movedim(-1, -3).clamp_min(LOWEST)

    def _argument(self, lag: Tensor, longest: Tensor) -> Tensor:
        """Return psi(lag) / psi(longest) in the dtype of f, for a float64 ``longest``."""
        c = self.c.double().abs()
        x = torch.log1p(c * lag.double()) / (torch.log1p(c * longest) + EPS)
        return x.to(self.f[-1].weight.dtype)


def segments(hidden: Linear, last: Linear) -> tuple[Tensor, Tensor, Tensor]:
    """Return a network with one hidden layer of w ReLUs and one input as w + 1 line segments.

    With hidden units u_i x + c_i and outputs sum_i a_hi ReLU(u_i x + c_i) + b_h, segment j lies
    between the j-th and the next of the sorted kinks -c_i / u_i, and there

        f(x) = A_j x + B_j,  A_j = sum_(i active) a_i u_i,  B_j = b + sum_(i active) a_i c_i.

    A unit is active above its kink if u_i > 0, below it if u_i < 0, and for every x or none if
    u_i = 0. Gradients are those of the network, but at a kink itself, where both are subgradients.

    Returns: the kinks (w,), ascending, without gradient; A and B, (H, w + 1).
    """
    u = hidden.weight.squeeze(-1)
    c = hidden.bias
    with torch.no_grad():
        flat = u == 0
        kinks, order = torch.where(flat, torch.inf, -c / torch.where(flat, 1.0, u)).sort()
        rank = order.argsort()
        above = rank < torch.arange(len(u) + 1, device=u.device).unsqueeze(-1)  # w + 1, w
        active = torch.where(flat, c > 0, above == (u > 0)).to(u)
    a = last.weight
    return kinks, (a * u) @ active.mT, (a * c) @ active.mT + last.bias.unsqueeze(-1)


def along_segments(x: Tensor, kinks: Tensor, slope: Tensor, start: Tensor) -> Tensor:
    """Return f(x), (..., H, T, S), for x (..., T, S) and the result of :func:`segments`.

    Each query selects from its own view of the segments, so that the gradient of a segment is a
    sum of sums of queries: added up one by one, a million float32 terms would lose two digits.
    """
    heads = slope.shape[0]
    index = torch.bucketize(x.detach(), kinks).unsqueeze(-2).expand(*x.shape[:-1], heads, -1)

    def selected(values: Tensor) -> Tensor:
        return values.expand(*x.shape[:-1], -1, -1).gather(-1, index)

    return torch.addcmul(selected(start), selected(slope), x.unsqueeze(-2)).movedim(-2, -3)
