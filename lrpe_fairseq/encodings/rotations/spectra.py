"""Spectra of the angles of rotations: which angles the pairs of a head have at the start."""

import math

import torch
from torch import Tensor

SPECTRA = ("partial", "proportional", "turns")
FASTEST = math.pi
"""Fastest angle of :func:`turns`, in radians per token: half a turn. Whole positions cannot tell a
whole turn per token from none, and an angle above pi from one below."""


def kept_pairs(pairs: int, fraction: float) -> int:
    """Return floor(p E), the number of the E pairs of a head that turn.

    >>> kept_pairs(32, 0.25)
    8
    """
    return int(fraction * pairs + 1e-9)


def spectrum(theta: Tensor, kind: str, fraction: float, length: int) -> Tensor:
    """Return the angles at the start, (E,) float64.

        partial       theta itself: a fraction of the features turns as a head of that width
        proportional  the floor(p E) first of theta, and 0 for the rest (p-RoPE: Barbero et al.,
                      2025; transformers 5.24.0, ``_compute_proportional_rope_parameters``)
        turns         :func:`turns`, and 0 for the rest

    Args:
        theta: the angles of a whole head, fastest first, (E,). kind: a name of :data:`SPECTRA`.
        fraction: p. length: L, the tokens of a text in training, for turns.
    """
    if kind == "partial":
        return theta
    kept = kept_pairs(len(theta), fraction)
    turning = turns(kept, length) if kind == "turns" else theta[:kept]
    return torch.cat([turning, torch.zeros_like(theta[kept:])])


def turns(pairs: int, length: int) -> Tensor:
    """Return angles from half a turn per token to one turn in L tokens, (E,) float64.

    w_i = pi (2 / L)^(i / (E - 1)), i = 0..E-1: the ratio of neighbours is constant. A single angle
    is the slowest one. The last one is a little above 2 pi / L, so that rounding does not take it
    below one turn in L tokens.
    """
    slowest = 2 * math.pi / length * (1 + 1e-12)
    place = torch.arange(pairs, dtype=torch.float64, device="cpu") / max(pairs - 1, 1)
    if pairs == 1:
        place = place + 1
    return FASTEST * (slowest / FASTEST) ** place
