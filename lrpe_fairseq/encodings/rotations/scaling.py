"""Options of rotations: their base, how many features turn, and slower angles for longer texts."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lrpe_fairseq.encodings.core.options import LONGEST, option, shortened
from lrpe_fairseq.encodings.core.positions import constant, exact_type
from lrpe_fairseq.encodings.rotations.spectra import SPECTRA, kept_pairs, spectrum
from lrpe_fairseq.errors import ChoiceError

YARN = ("yarn", "yarn-printed")
"""The scalings that multiply scores by a factor of f only."""
BY_TEXT = ("dynamic", "longrope")
"""The scalings whose angles depend on the length of the text that is read."""
SCALINGS = ("none", "linear", "ntk", *YARN, "llama3", *BY_TEXT)
WITH_LENGTH = (*YARN, "llama3", *BY_TEXT)
"""The scalings that read ``context_length``."""
SLOW, FAST = 1, 32
"""yarn: turns in a text of training. A pair with at most 1 is interpolated, one with 32 or more is
unchanged."""
LLAMA_FAST = 4
"""llama3: the same number as :data:`FAST` (``high_freq_factor`` of transformers)."""
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
    rotation_spectrum: str = option(
        "partial",
        "rotations: partial (p D features turn as those of a head of that width), proportional "
        "(p-RoPE: the fastest p of a head's own angles, the others are 0) or turns (a share p of "
        "the angles from half a turn per token to one turn in --context-length tokens, the others "
        "are 0)",
        choices=SPECTRA,
    )
    context_scaling: str = option(
        "none",
        "rotations: angles for texts f times as long as in training: linear (divided by f), ntk "
        "(slow angles more), yarn (those of fewer than 32 turns in training, as in the authors' "
        "code), yarn-printed (the same by the formula of the paper), llama3 (those of fewer than 4 "
        "turns), dynamic (ntk by the length of the text that is read) or longrope "
        "(--longrope-factors)",
        choices=SCALINGS,
    )
    context_factor: float = option(1.0, "context scaling: f, at least 1", least=1)
    context_length: int = option(
        0,
        "context scaling yarn, yarn-printed, llama3, dynamic and longrope, --rotation-spectrum "
        "turns, and --angle-floor: L, the tokens of a text in training",
        least=1,
        most=LONGEST,
    )
    longrope_factors: str = option(
        "",
        "context scaling longrope: numbers that angles are divided by, from the fastest angle to "
        "the slowest, separated by commas: first one for each angle in texts of at most L tokens, "
        "then one for each in longer texts",
    )

    def __post_init__(self) -> None:
        kind = self.context_scaling
        if kind == "none" and self.context_factor != 1:
            raise ChoiceError(f"--context-factor needs --context-scaling {', '.join(SCALINGS[1:])}")
        if kind in WITH_LENGTH and self.context_length < 1:
            raise ChoiceError(
                f"--context-scaling {kind} needs --context-length, the tokens of a text in training"
            )
        if self.rotation_spectrum == "turns" and self.rotation_base:
            raise ChoiceError(
                "--rotation-base is not read by --rotation-spectrum turns, whose angles have no "
                "base: leave it out"
            )
        if self.rotation_spectrum == "turns" and self.context_length < 2:
            raise ChoiceError(
                "--rotation-spectrum turns needs --context-length, at least 2 tokens of a text in "
                "training"
            )
        if kind == "longrope" and self.context_length < 2:
            raise ChoiceError("--context-scaling longrope needs a --context-length of at least 2")
        if (kind == "longrope") != bool(self.longrope_factors):
            raise ChoiceError(
                "--context-scaling longrope and --longrope-factors need each other: give both or "
                "none"
            )
        if self.longrope_factors:
            _numbers(self.longrope_factors)

    def turned(self, head_dim: int) -> int:
        """Return the number of features with an angle, even unless they are all of ``head_dim``.

        They are those that turn, and with another spectrum than ``partial`` all, of which some have
        the angle 0.
        """
        if self.rotation_fraction == 1:
            return head_dim
        width = int(self.rotation_fraction * head_dim + 1e-9) // 2 * 2
        if not width:
            raise ChoiceError(
                f"--rotation-fraction {self.rotation_fraction:g} leaves no pair of the {head_dim} "
                "features of a head: raise it"
            )
        return width if self.rotation_spectrum == "partial" else head_dim

    def start(self, theta: Tensor) -> Tensor:
        """Return the angles of the chosen spectrum, (E,) float64, for those of a whole head.

        Raises: ChoiceError if none is left.
        """
        kind, fraction = self.rotation_spectrum, self.rotation_fraction
        if kind != "partial" and not kept_pairs(len(theta), fraction):
            raise ChoiceError(
                f"--rotation-fraction {fraction:g} leaves none of the {len(theta)} "
                "angles of a head: raise it"
            )
        return spectrum(theta, kind=kind, fraction=fraction, length=self.context_length)

    @property
    def score_factor(self) -> float:
        """The factor of the scores of softmax attention: (0.1 ln f + 1)^2 for yarn, 1 + ln f / ln L
        for longrope, else 1.

        The authors' code multiplies cos and sin by the root of it, so it is a factor of the
        features that turn: not of the last feature of an odd width, nor of those that
        ``rotation_fraction``, half a rotation, or rows and columns leave out.
        """
        if self.context_scaling in YARN:
            return (0.1 * math.log(self.context_factor) + 1) ** 2
        if self.context_scaling == "longrope":
            return 1 + math.log(self.context_factor) / math.log(self.context_length)
        return 1.0

    @property
    def by_text(self) -> str:
        """Why only whole texts can be read; empty for scalings that also decode.

        Angles change with every token of a text beyond L. Keys that a cache holds, and the sums of
        linear attention, were turned by the angles of a shorter text.
        """
        if self.context_scaling not in BY_TEXT:
            return ""
        return (
            f"--context-scaling {self.context_scaling} turns all tokens by the length of their "
            "text, so it reads one whole text per row only, without a state or packed documents: "
            "use ntk, yarn or llama3 for decoding"
        )


def scaled(theta: Tensor, options: RotationOptions, length: int | None = None) -> Tensor:
    """Return the angles per token after context scaling, float64; without scaling ``theta`` itself.

    With i the place of an angle among the E, by size and decreasing, r = L |w| / 2 pi its turns in
    a text of training, and l the length of the text that is read:

        linear        w / f                                  (Chen et al., 2023)
        ntk           w f^(-i / (E - 1))                     (base f^(D / (D - 2)) for D = 2 E)
        dynamic       ntk with max(1, f l / L - f + 1) for f
        yarn          (1 - g) w / f + g w, g of :func:`_kept_by_place`    (Peng et al., 2023, code)
        yarn-printed  (1 - g) w / f + g w, g = clip((r - 1) / 31, 0, 1)   (Eq. 17-22 of the paper)
        llama3        (1 - g) w / f + g w, g = clip((r - 1) / 3, 0, 1)
        longrope      w / c_i, c the short factors if l <= L, else the long ones

    ``dynamic``, ``llama3`` and ``longrope`` are those of transformers (5.24.0,
    ``modeling_rope_utils.py``: ``_compute_dynamic_ntk_parameters``, ``_compute_llama3_parameters``
    with ``low_freq_factor`` 1 and ``high_freq_factor`` 4, ``_compute_longrope_parameters``).

    Args:
        theta: w, (E,), in radians per token, fixed or learned.
        length: l; None: L.
    Trap: a learned angle is scaled in every call and keeps its value in the checkpoint.
    Raises: ChoiceError if there are not 2 E factors for longrope.
    """
    kind = options.context_scaling
    f = options.context_factor
    if kind == "none":
        return theta
    theta, most = theta.to(exact_type(theta.device)), options.context_length
    length = most if length is None else length
    if kind == "linear":
        return theta / f
    if kind == "dynamic":
        f = max(1.0, f * length / most - (f - 1))
    if kind in ("ntk", "dynamic"):
        return theta * f ** (_place(theta) / -max(len(theta) - 1, 1))
    if kind == "longrope":
        return theta / _factors(theta, options, longer=length > most)
    if kind == "yarn":
        kept = _kept_by_place(theta, options)
    else:
        kept = _kept_by_turns(theta, options, LLAMA_FAST if kind == "llama3" else FAST)
    return theta * (1 / f + kept * (1 - 1 / f))  # exactly theta if f or kept is 1


def _numbers(given: str) -> tuple[float, ...]:
    """Return the numbers of ``longrope_factors``. Raises: ChoiceError unless all are positive."""
    try:
        found = tuple(float(number) for number in given.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < number < math.inf for number in found):
        raise ChoiceError(
            "--longrope-factors must be positive numbers, separated by commas, not "
            f"{shortened(given)}"
        )
    return found


def _factors(theta: Tensor, options: RotationOptions, longer: bool) -> Tensor:
    """Return the longrope factor of every angle, (E,): short ones, or long ones if ``longer``."""
    known, count = _numbers(options.longrope_factors), len(theta)
    if len(known) != 2 * count:
        raise ChoiceError(
            f"--longrope-factors has {len(known)} numbers, but {count} angles need {2 * count}: "
            "one for each in texts up to --context-length, then one for each in longer texts"
        )
    own = constant(known[count:] if longer else known[:count], theta.dtype, theta.device)
    return own[_place(theta).long()]


def _place(theta: Tensor) -> Tensor:
    """Return the place of every angle by size, 0 for the largest, in the dtype of ``theta``."""
    size = theta.detach().abs()
    return size.argsort(descending=True, stable=True).argsort().to(theta)


def _turns(theta: Tensor, options: RotationOptions) -> Tensor:
    """Return r = L |w| / 2 pi of every angle."""
    return options.context_length / (2 * math.pi) * theta.abs()


def _kept_by_turns(theta: Tensor, options: RotationOptions, fast: float) -> Tensor:
    """Return g = clip((r - 1) / (fast - 1), 0, 1), (E,): linear in the turns r."""
    return ((_turns(theta, options) - SLOW) / (fast - SLOW)).clamp(0, 1)


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
