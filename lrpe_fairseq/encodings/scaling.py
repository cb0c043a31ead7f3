"""Options of rotations: their base, how many features turn, and slower angles for longer texts."""

import math
from dataclasses import dataclass

from torch import Tensor

from lrpe_fairseq.encodings.options import LONGEST, option
from lrpe_fairseq.encodings.positions import exact_type
from lrpe_fairseq.errors import ChoiceError

SCALINGS = ("none", "linear", "ntk", "yarn")
TURNS = (1, 32)
"""yarn: a pair with at most 1 turn in training is interpolated, one with 32 or more unchanged."""


@dataclass(frozen=True)
class RotationOptions:
    """Options of every encoding whose Lambda is a rotation; the others refuse them.

    Raises: ChoiceError for values that are impossible or would be ignored.
    """

    rotation_base: float = option(
        0.0, "rotations: base of the fixed or initial angles; 0: 10000, for rope-2d 100", above=1
    )
    rotation_fraction: float = option(
        1.0,
        "rotations: p; only the first p D features of a head are encoded, an even number",
        above=0,
        most=1,
    )
    context_scaling: str = option(
        "none",
        "rotations: angles for texts f times as long as in training: linear (divided by f), ntk "
        "(slow angles more) or yarn (those of fewer than 32 turns in training)",
        choices=SCALINGS,
    )
    context_factor: float = option(1.0, "context scaling: f, at least 1", least=1)
    context_length: int = option(
        0, "context scaling yarn: L, the tokens of a text in training", least=1, most=LONGEST
    )

    def __post_init__(self) -> None:
        if self.context_scaling == "none" and self.context_factor != 1:
            raise ChoiceError("--context-factor needs --context-scaling linear, ntk or yarn")
        if self.context_scaling == "yarn" and self.context_length < 1:
            raise ChoiceError(
                "--context-scaling yarn needs --context-length, the tokens of a text in training"
            )
        if self.context_scaling == "none" and self.context_length:
            raise ChoiceError(
                f"--context-length {self.context_length} needs --context-scaling yarn: choose a "
                "scaling, or leave --context-length out"
            )

    def turned(self, head_dim: int) -> int:
        """Return the number of features that turn, even unless they are all of ``head_dim``."""
        if self.rotation_fraction == 1:
            return head_dim
        width = int(self.rotation_fraction * head_dim + 1e-9) // 2 * 2
        if not width:
            raise ChoiceError(
                f"--rotation-fraction {self.rotation_fraction:g} leaves no pair of the {head_dim} "
                "features of a head: raise it"
            )
        return width

    @property
    def score_factor(self) -> float:
        """The factor of the scores of softmax attention: (0.1 ln f + 1)^2 for yarn, else 1."""
        sharper = self.context_scaling == "yarn"
        return (0.1 * math.log(self.context_factor) + 1) ** 2 if sharper else 1.0


def scaled(theta: Tensor, given: RotationOptions) -> Tensor:
    """Return the angles per token after context scaling, float64; without scaling ``theta`` itself.

    With i the place of an angle among the E, by size and decreasing, and r = L |w| / 2 pi its turns
    in a text of training:

        linear  w / f                                  (Chen et al., 2023)
        ntk     w f^(-i / (E - 1))                     (base f^(D / (D - 2)) for D = 2 E features)
        yarn    (1 - g) w / f + g w, g = clip((r - 1) / 31, 0, 1)        (Peng et al., 2023)

    Args:
        theta: w, (E,), in radians per token, fixed or learned.
    Trap: a learned angle is scaled in every call and keeps its value in the checkpoint.
    """
    if given.context_scaling == "none":
        return theta
    theta, f = theta.to(exact_type(theta.device)), given.context_factor
    if given.context_scaling == "linear":
        return theta / f
    if given.context_scaling == "ntk":
        place = theta.detach().abs().argsort(descending=True, stable=True).argsort()
        return theta * f ** (place.to(theta) / -max(len(theta) - 1, 1))
    few, many = TURNS
    turns = given.context_length / (2 * math.pi) * theta.abs()
    kept = ((turns - few) / (many - few)).clamp(0, 1)
    return theta * (1 / f + kept * (1 - 1 / f))  # exactly theta if f or kept is 1
