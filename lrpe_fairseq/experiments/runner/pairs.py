"""Which pairs of features carry the denominators of linear attention, by distance.

With positive features and without positions, every key adds a positive score to the denominator of
Eq. 39. A pair that turns with the distance adds its cosine, which cancels over many keys; a pair
that stands still adds all of its mass. What a pair adds is therefore measured in units of the
denominator of the same features without positions.

Axes: B batch, H heads, T time, D' encoded features, G classes of pairs, N bins of distances.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lrpe_fairseq.attention.linear import EPS
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings.rotations.lrpe import LRPE
from lrpe_fairseq.encodings.wrappers.channel import channels_of

CLASSES = ("0", "below 1", "1 to 4", "4 to 32", "32 or more")
"""Classes of pairs, by the turns |theta| T / 2 pi that they make in a text of training."""
FROM = (1.0, 4.0, 32.0)
"""The turns from which the last three classes begin."""


@dataclass(frozen=True)
class PairParts:
    """What classes of pairs add to the denominators of some queries, as means over all of them.

    Both are (G, N) and in units of the denominator without positions, whose parts are ``plain``:
    the sum of ``plain`` is 1, and that of ``turned`` the mean of the quotient of the denominators.
    """

    turned: Tensor
    plain: Tensor
    clamped: float
    """The fraction of the denominators that are raised to the clamp."""


def classes_of(theta: Tensor, trained: int) -> Tensor:
    """Return the class in :data:`CLASSES` of every angle (E,), for T = ``trained``.

    A turn that misses 1 by a millionth counts as one, because angles are stored in float32.
    """
    turns = theta.detach().double().abs() * trained / (2 * math.pi)
    bounds = torch.tensor(FROM, dtype=torch.float64, device=turns.device) * (1 - 1e-6)
    found = 1 + torch.bucketize(turns, bounds, right=True)
    return torch.where(turns == 0, 0, found)


def feature_classes(encoding: LRPE, trained: int) -> Tensor:
    """Return the class of every encoded feature, int64 (D',); without an angle it is class 0."""
    channels = channels_of(encoding)
    angles = encoding.core.angles.detach()
    still = angles.new_zeros(max(0, int(channels.max()) + 1 - len(angles)))
    return classes_of(torch.cat([angles, still]), trained)[channels.to(angles.device)]


@torch.no_grad()
def pair_parts(
    attention: MultiheadAttention, x: Tensor, trained: int, edges: Sequence[int], queries: int
) -> PairParts:
    """Return what the pairs add to the denominators of the last queries of texts.

    Args:
        attention: causal linear attention with a type of LRPE that turns, without gates.
        x: its inputs, (B, T, C), of whole texts. trained: tokens of a text in training.
        edges: 0 = first lag of the first bin, ..., one more than the last lag of the last bin.
        queries: how many of the last tokens of each text are counted.
    Raises: ValueError for another attention.
    """
    require_pairs(attention)
    q, k = attention.feature_pairs(x)
    at = torch.arange(x.shape[1], device=x.device)
    encoding, first = attention.encoding, x.shape[1] - queries
    classes = feature_classes(encoding, trained).to(x.device)
    parts = []
    for positions in (at, torch.zeros_like(at)):  # turned, and as if all were in one place
        q2, k2 = encoding(q, k, positions, positions)
        parts.append(_by_bin(q2.double(), k2.double(), edges, first, classes))
    turned, plain = parts  # B H Q G N
    whole = plain.sum((-2, -1), keepdim=True)
    sums = turned.sum((-2, -1))
    return PairParts(
        turned=(turned / whole).mean((0, 1, 2)),
        plain=(plain / whole).mean((0, 1, 2)),
        clamped=(sums <= EPS).double().mean().item(),
    )


def require_pairs(attention: MultiheadAttention) -> None:
    """Raise a ValueError unless attention has denominators whose parts are those of pairs."""
    encoding = attention.encoding
    fits = isinstance(encoding, LRPE) and bool(encoding.angles)
    gated = encoding.forget_gate is not None or encoding.reflections is not None
    if not fits or gated or encoding.increments is not None or not attention.has_denominators:
        raise ValueError(
            f"{encoding.name!r} has no pairs of features that only turn under a denominator: "
            "choose linear attention with normalizer rotated, and rope or an LRPE type with "
            "rotations, without gates, reflections and increments"
        )


def _by_bin(q: Tensor, k: Tensor, edges: Sequence[int], first: int, classes: Tensor) -> Tensor:
    """Return the sums of the scores of every class over the keys of every bin, (B, H, Q, G, N).

    They are differences of prefix sums of the keys, so that no score of a pair of tokens is stored.
    """
    length = q.shape[2]
    prefix = torch.cat([torch.zeros_like(k[:, :, :1]), k.cumsum(2)], 2)  # B H T+1 D'
    at = torch.arange(first, length, device=q.device)
    rows, found = q[:, :, first:], []
    for nearest, end in itertools.pairwise(edges):
        newest, oldest = ((at + 1 - lag).clamp_min(0) for lag in (nearest, end))
        by_feature = rows * (prefix[:, :, newest] - prefix[:, :, oldest])
        parts = by_feature.new_zeros(*by_feature.shape[:3], len(CLASSES))
        found.append(parts.index_add_(-1, classes, by_feature))
    return torch.stack(found, -1)


@contextlib.contextmanager
def counted_pairs(
    model: nn.Module, trained: int, edges: Sequence[int]
) -> Iterator[list[dict[str, Any]]]:
    """Measure :func:`pair_parts` in all layers of a model, in the calls inside the block.

    The queries are the last T tokens of each text. Yields a list that has the rows at the end, one
    for every class and bin: ``turns``, ``from``, ``to`` (lags), ``part``, ``plain``; and one row
    with ``clamped``.
    """
    layers = [m for m in model.modules() if isinstance(m, MultiheadAttention)]
    for layer in layers:
        require_pairs(layer)
    found: list[PairParts] = []

    def measure(module: MultiheadAttention, inputs: tuple, keywords: dict) -> None:
        query = keywords["query"] if "query" in keywords else inputs[0]
        found.append(pair_parts(module, query.transpose(0, 1), trained, edges, trained))

    hooks = [layer.register_forward_pre_hook(measure, with_kwargs=True) for layer in layers]
    rows: list[dict[str, Any]] = []
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()
    rows += _rows(found, edges)


def _rows(found: Sequence[PairParts], edges: Sequence[int]) -> list[dict[str, Any]]:
    """Return the means over layers and batches of equal size as rows."""
    turned = torch.stack([parts.turned for parts in found]).mean(0)
    plain = torch.stack([parts.plain for parts in found]).mean(0)
    rows = [
        {
            "turns": name,
            "from": edges[n],
            "to": edges[n + 1] - 1,
            "part": turned[g, n].item(),
            "plain": plain[g, n].item(),
        }
        for g, name in enumerate(CLASSES)
        for n in range(len(edges) - 1)
        if plain[g].sum() > 0
    ]
    return [*rows, {"clamped": sum(p.clamped for p in found) / len(found)}]
