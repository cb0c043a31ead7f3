"""Angles that a training of limited length can teach: a floor, and angles stored as logarithms.

An Adam step of rate eta moves a plain angle by about eta. The slowest angle of RoPE is 1.3e-4 at
D = 64, so a learned slow angle walks at random, up to about one turn per text of training. Longer
texts then show phases that training has never seen. A logarithm moves by a share of the angle
instead, and an angle of 0 shows one phase in texts of any length.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.options import EncodingSpec, option
from lrpe_fairseq.encodings.core.parameters import undecayed
from lrpe_fairseq.encodings.core.positions import constant, exact_type
from lrpe_fairseq.encodings.rotations.scaling import RotationOptions
from lrpe_fairseq.errors import ChoiceError

FLOORS = ("none", "turn", "clip")
PARAMETERS = ("plain", "log")

KAPPA = 16.0
"""kappa in theta = exp(rho / kappa): an Adam step of rate eta changes an angle by eta / kappa of
itself. The value of GRAPE's code (Zhang et al., 2026)."""


@dataclass(frozen=True)
class AngleOptions:
    """Options of RoPE and of the LRPE types whose Lambda turns by angles; the others refuse them.

    They are about the angles theta without context scaling, which acts on what remains of them.
    """

    angle_floor: str = option(
        "none",
        "rope and LRPE with rotations: angles that turn less than once in L tokens, L the "
        "--tokens-per-sample of a language model or --context-length, are fixed at 0 (turn) or "
        "start at one turn in L (clip)",
        choices=FLOORS,
    )
    angle_parameter: str = option(
        "plain",
        "LRPE with learned angles: theta itself (plain) or theta = exp(rho / 16) (log) is learned",
        choices=PARAMETERS,
    )
    angle_lr_scale: float = option(
        1.0,
        "LRPE with learned angles: their learning rate under Adam, in units of that of the other "
        "parameters",
        least=1e-6,
        most=1e6,
    )

    def __post_init__(self) -> None:
        if self.angle_lr_scale != 1 and self.angle_parameter == "log":
            raise ChoiceError(
                "--angle-lr-scale is for --angle-parameter plain: a step of a logarithm is a share "
                "of the angle already"
            )


class AngleFloor(nn.Module):
    """What ``--angle-floor`` does to the angles |theta| < 2 pi / L, with L tokens in training.

    "turn" fixes them at 0, in training and in evaluation. "clip" raises them to 2 pi / L at the
    start; fixed angles stay there. The others are untouched, as is 0 by "clip": learned ones are
    learned freely and may cross 2 pi / L. Which angles are below the floor is decided at the start
    and saved in the checkpoint with L, so a model that is read with another length keeps them. The
    kind is saved as well, and a checkpoint of the other kind is refused; older ones lack it.

    Args:
        kind: "turn" or "clip". theta: the angles at the start, (E,) float64. length: L.
    Raises: ChoiceError if L is not known, if "turn" would fix every angle at 0, and if a checkpoint
        has the other kind.
    """

    def __init__(self, kind: str, theta: Tensor, length: int) -> None:
        super().__init__()
        if length < 1:
            raise ChoiceError(
                f"--angle-floor {kind} needs --context-length, the tokens of a text in training"
            )
        self.kind = kind
        turning = theta.abs() * length >= 2 * math.pi
        if kind == "turn" and theta.any() and not turning.any():
            raise ChoiceError(
                f"--angle-floor turn leaves no angle: none turns once in {length} tokens; choose "
                "--angle-floor clip, or leave the floor out"
            )
        self.register_buffer("turning", turning | (theta == 0) if kind == "clip" else turning)
        self.register_buffer("length", torch.tensor(length, device="cpu"))
        self.register_buffer("clips", torch.tensor(kind == "clip", device="cpu"))
        self.register_load_state_dict_pre_hook(_check_kind)

    def forward(self, theta: Tensor) -> Tensor:
        """Return the angles (E,) after the floor, on the device of ``theta``."""
        if self.kind == "turn":
            return self.still(theta)
        once = 2 * math.pi / int(self.length)
        return theta.masked_fill(~self.turning.to(theta.device), once)

    def still(self, theta: Tensor) -> Tensor:
        """Return learned angles (E,): 0, without a gradient, where the floor fixes them at 0."""
        if self.kind == "clip":
            return theta
        return theta.masked_fill(~self.turning.to(theta.device), 0.0)


def _check_kind(floor: AngleFloor, state: dict, prefix: str, *rest: object) -> None:
    """Refuse the angles of a checkpoint with the other kind of floor; see :class:`AngleFloor`."""
    clips = state.setdefault(f"{prefix}clips", torch.tensor(floor.kind == "clip"))
    kind = "clip" if clips else "turn"
    if kind != floor.kind:
        raise ChoiceError(
            f"the checkpoint was trained with --angle-floor {kind}, not {floor.kind}: read it with "
            f"--angle-floor {kind}"
        )


def require_same_angles(
    core: nn.Module, state: dict, prefix: str, _metadata: dict, strict: bool, *rest: object
) -> None:
    """Refuse a checkpoint whose angles have another floor or form than the core that reads it.

    A hook of ``load_state_dict``. With ``strict=False`` the floor may differ.
    Raises: ChoiceError with the option that reads the checkpoint.
    """
    floored = f"{prefix}floor.turning" in state
    if strict and floored != (core.floor is not None):
        clips = state.get(f"{prefix}floor.clips")
        kind = ("clip" if clips else "turn") if floored else "none"
        raise ChoiceError(
            f"the checkpoint was trained with --angle-floor {kind}: read it with --angle-floor "
            f"{kind}"
        )
    if f"{prefix}log_theta" in state and not isinstance(core, Logarithmic):
        raise ChoiceError(
            "the checkpoint has logarithms of angles: read it with --angle-parameter log"
        )


def floor_of(spec: EncodingSpec, theta: Tensor) -> AngleFloor | None:
    """Return the floor that a user chose for the angles ``theta`` (E,), or None."""
    kind = spec.options.of(AngleOptions).angle_floor
    if kind == "none":
        return None
    return AngleFloor(kind, theta, spec.options.of(RotationOptions).context_length)


def logarithm(theta: Tensor) -> Tensor:
    """Return rho = kappa log theta, of the shape of ``theta``, whose entries are positive."""
    return KAPPA * theta.double().log()


class Logarithmic(nn.Module):
    """Mixin of cores with learned angles: theta = exp(rho / kappa), kappa = 16.

    rho is ``log_theta`` in checkpoints, float32, and no Adam decays it. ``theta`` of a checkpoint
    with plain angles is loaded as kappa log theta.

    With P = I no function is lost, because W_q and W_k can learn to swap the features of a pair,
    which reverses its angle. Behind a fixed P linear attention loses negative angles.

    Raises: ChoiceError if a checkpoint has angles that are not positive.
    """

    floor: AngleFloor | None
    zeros_at_start: tuple[bool, ...]

    def register_frequencies(self, theta: Tensor) -> None:
        """Register rho, a float32 parameter; angles fixed at 0 have a rho that is not read."""
        theta = theta if self.floor is None else self.floor(theta)
        start = logarithm(theta.masked_fill(theta == 0, 1.0))
        self.log_theta = undecayed(start.float(), by_any_adam=True)
        self.cache = None
        self.register_load_state_dict_pre_hook(_from_plain)

    @property
    def theta(self) -> Tensor:
        """The angles without context scaling, (E,), float64 where the device has it."""
        rho = self.log_theta
        theta = (rho.to(exact_type(rho.device)) / KAPPA).exp()
        return self.fixed_at_0(theta)

    @property
    def unscaled(self) -> Tensor:
        """The angles per token before context scaling, (E,), with the floor."""
        return self.theta


class Slow(nn.Module):
    """Mixin of cores with learned angles: theta = c rho, c of ``--angle-lr-scale``.

    An Adam step moves rho by about its rate, whatever the size of the gradient, and theta by c
    times that: the angles have a learning rate of their own under any optimizer of Adam's kind, in
    half precision too. A gradient that is multiplied by c would change nothing. It is the update
    of a parameter group with c times the rate, with Adam's epsilon divided by c; a weight decay of
    ``adam`` shrinks the angles as without the option.

    Checkpoints hold ``theta``, in radians, so that they are read with any c: as float64, because
    c times a float32 number that is rounded to float32 and divided by c may be another number.
    """

    options_of_angles: AngleOptions

    def register_frequencies(self, theta: Tensor) -> None:
        """Register rho, a float32 parameter."""
        theta = theta if self.floor is None else self.floor(theta)
        self.slow_theta = undecayed((theta / self.lr_scale).float())
        self.cache = None
        self.register_state_dict_post_hook(_as_theta)
        self.register_load_state_dict_pre_hook(_from_theta)

    @property
    def lr_scale(self) -> float:
        """c, a positive number."""
        return self.options_of_angles.angle_lr_scale

    @property
    def theta(self) -> Tensor:
        """The angles without context scaling, (E,), float64 where the device has it."""
        rho = self.slow_theta
        return rho.to(exact_type(rho.device)) * self.lr_scale


def _as_theta(module: Slow, state: dict, prefix: str, *rest: object) -> None:
    """Write the angles in radians into a checkpoint: float64, of which rho is read exactly."""
    rho = state.pop(f"{prefix}slow_theta")
    state[f"{prefix}theta"] = rho.double() * module.lr_scale


def _from_theta(module: Slow, state: dict, prefix: str, *rest: object) -> None:
    """Read the angles of a checkpoint, in radians, as rho."""
    theta = state.pop(f"{prefix}theta", None)
    if theta is not None:
        state[f"{prefix}slow_theta"] = (theta.double() / module.lr_scale).float()


def _from_plain(module: Logarithmic, state: dict, prefix: str, *rest: object) -> None:
    """Replace ``theta`` of a checkpoint by its logarithm; see :class:`Logarithmic`."""
    theta = state.get(f"{prefix}theta")
    if theta is None:
        return
    still = constant(module.zeros_at_start, torch.bool, theta.device)
    if module.floor is not None and module.floor.kind == "turn":
        still = still | ~state.get(f"{prefix}floor.turning", ~still)
    if not (still | (theta > 0)).all():
        raise ChoiceError(
            "the checkpoint has learned angles that are not positive, which have no logarithm: "
            "read it with --angle-parameter plain"
        )
    del state[f"{prefix}theta"]
    state[f"{prefix}log_theta"] = logarithm(theta.masked_fill(still, 1.0)).float()
