"""Options of rotations: their base, how many features turn, and slower angles for longer texts."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lrpe_fairseq.encodings.core.options import LONGEST, option
from lrpe_fairseq.encodings.core.positions import exact_type
from lrpe_fairseq.errors import ChoiceError

SCALINGS = ("none", "linear", "ntk", "yarn", "yarn-printed")
YARN = ("yarn", "yarn-printed")
"""The scalings that read ``context_length`` and multiply scores by a factor."""
SLOW, FAST = 1, 32
"""yarn: turns in a text of training. A pair with at most 1 is interpolated, one with 32 or more is
unchanged."""
USUAL_BASE = 10000.0
"""yarn: base of the spacing of angles where there is only one."""
EQUAL = 1e-9
"""yarn: smallest difference of the logarithms of neighbouring angles, which may be equal."""


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
        "(slow angles more), yarn (those of fewer than 32 turns in training, as in the authors' "
        "code) or yarn-printed (the same by the formula of the paper)",
        choices=SCALINGS,
    )
    context_factor: float = option(1.0, "context scaling: f, at least 1", least=1)
    context_length: int = option(
        0,
        "context scaling yarn and yarn-printed, and --angle-floor: L, the tokens of a text in "
        "training",
        least=1,
        most=LONGEST,
    )

    def __post_init__(self) -> None:
        if self.context_scaling == "none" and self.context_factor != 1:
            raise ChoiceError(f"--context-factor needs --context-scaling {', '.join(SCALINGS[1:])}")
        if self.context_scaling in YARN and self.context_length < 1:
            raise ChoiceError(
                f"--context-scaling {self.context_scaling} needs --context-length, the tokens of a "
                "text in training"
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
        """The factor of the scores of softmax attention: (0.1 ln f + 1)^2 for yarn, else 1.

        The authors' code multiplies cos and sin by 0.1 ln f + 1, so it is a factor of the features
        that turn: all features, unless ``rotation_fraction`` is below 1.
        """
        sharper = self.context_scaling in YARN
        return (0.1 * math.log(self.context_factor) + 1) ** 2 if sharper else 1.0


def scaled(theta: Tensor, options: RotationOptions) -> Tensor:
    """Return the angles per token after context scaling, float64; without scaling ``theta`` itself.

    With i the place of an angle among the E, by size and decreasing, and r = L |w| / 2 pi its turns
    in a text of training:

        linear        w / f                                  (Chen et al., 2023)
        ntk           w f^(-i / (E - 1))                     (base f^(D / (D - 2)) for D = 2 E)
        yarn          (1 - g) w / f + g w, g of :func:`_kept_by_place`    (Peng et al., 2023, code)
        yarn-printed  (1 - g) w / f + g w, g of :func:`_kept_by_turns`    (Eq. 17-22 of the paper)

    Args:
        theta: w, (E,), in radians per token, fixed or learned.
    Trap: a learned angle is scaled in every call and keeps its value in the checkpoint.
    """
    kind, f = options.context_scaling, options.context_factor
    if kind == "none":
        return theta
    theta = theta.to(exact_type(theta.device))
    if kind == "linear":
        return theta / f
    if kind == "ntk":
        return theta * f ** (_place(theta) / -max(len(theta) - 1, 1))
    kept = _kept_by_place(theta, options) if kind == "yarn" else _kept_by_turns(theta, options)
    return theta * (1 / f + kept * (1 - 1 / f))  # exactly theta if f or kept is 1


def _place(theta: Tensor) -> Tensor:
    """Return the place of every angle by size, 0 for the largest, in the dtype of ``theta``."""
    size = theta.detach().abs()
    return size.argsort(descending=True, stable=True).argsort().to(theta)


def _turns(theta: Tensor, options: RotationOptions) -> Tensor:
    """Return r = L |w| / 2 pi of every angle."""
    return options.context_length / (2 * math.pi) * theta.abs()


def _kept_by_turns(theta: Tensor, options: RotationOptions) -> Tensor:
    """Return g = clip((r - 1) / 31, 0, 1), (E,): linear in the turns, as the paper prints it."""
    return ((_turns(theta, options) - SLOW) / (FAST - SLOW)).clamp(0, 1)


def _kept_by_place(theta: Tensor, options: RotationOptions) -> Tensor:
    """Return g = 1 - clip((i - lo) / (hi - lo), 0, 1), (E,): linear in the place of an angle.

    lo = max(floor(i_32), 0) and hi = min(ceil(i_1), D - 1), or lo + 0.001 if they are equal, with
    D = 2 E and i_rho of :func:`_place_of`. It is that of the authors' code
    (jquesnelle/yarn a18e5498, scaled_rope/LlamaYaRNScaledRotaryEmbedding.py, lines 5-22 and 74-84)
    and of transformers (``_compute_yarn_parameters``), and it has no gradient.
    """
    turns = _turns(theta.detach(), options)
    base = options.rotation_base or USUAL_BASE
    first, last = (_place_of(rho, turns, base) for rho in (FAST, SLOW))
    first = first.floor().clamp_min(0)
    last = last.ceil().clamp_max(2 * len(theta) - 1)
    last = torch.where(last == first, last + 0.001, last)
    return 1 - ((_place(theta) - first) / (last - first)).clamp(0, 1)


def _place_of(rho: float, turns: Tensor, base: float) -> Tensor:
    """Return the place i_rho where angles by size make ``rho`` turns, (), usually between two.

    The logarithm of the turns is linear between neighbours, and beyond the outer two angles. For
    angles base^(-2i / D) this is the authors' D ln(L / 2 pi rho) / (2 ln base). A single angle has
    no neighbour; the next one would be ``base`` times slower.
    """
    smallest = torch.finfo(turns.dtype).tiny  # of an angle that is 0
    logs = turns.clamp_min(smallest).log().sort(descending=True).values - math.log(rho)
    if len(logs) == 1:
        logs = torch.cat([logs, logs - math.log(base)])
    before = ((logs >= 0).sum() - 1).clamp(0, len(logs) - 2)
    upper, lower = logs.gather(0, torch.stack([before, before + 1])).unbind()
    return before + upper / (upper - lower).clamp_min(EQUAL)
