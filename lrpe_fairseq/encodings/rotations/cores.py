"""The position-dependent unitary maps Lambda^(s) of the LRPE family (Eq. 23-25, C.7, C.8).

``core.powers(positions, dtype)`` returns the phases or indices, which depend only on the positions.
``core(planes, core.powers(...))`` applies Lambda^(s) to the last axis of every plane (..., T, D).
"""

import warnings
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.forms import Planes
from lrpe_fairseq.encodings.core.options import EncodingSpec
from lrpe_fairseq.encodings.core.parameters import undecayed
from lrpe_fairseq.encodings.core.positions import (
    PositionCache,
    check_positions,
    constant,
    exact_type,
    known_range,
    over_heads,
)
from lrpe_fairseq.encodings.rotations.angles import (
    AngleFloor,
    AngleOptions,
    Logarithmic,
    Slow,
    floor_of,
    require_same_angles,
)
from lrpe_fairseq.encodings.rotations.permutations import CyclicPowers, permute
from lrpe_fairseq.encodings.rotations.scaling import RotationOptions, scaled
from lrpe_fairseq.encodings.rotations.spectra import spectrum
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels import dispatch
from lrpe_fairseq.kernels.conditions import is_plain, is_transformed
from lrpe_fairseq.kernels.encode.encode import (
    Angles,
    Transform,
    Turns,
    Variant,
    complex_of,
    each_part,
    rotated,
)

BASE = 10000.0
"""Base of the frequencies alpha_t = 10000^(-2t/d) (C.7)."""

UNTURNED = r",\ \text{and of an odd } D \text{ the last feature does not turn}"
"""What a rotation of pairs leaves, in LaTeX."""


class Rotation(nn.Module):
    """Lambda^(s) rotates the pair (2i, 2i+1) by s alpha_i, alpha_i = 10000^(-2i/e) (Eq. 24).

    e is the largest even number up to d. If d is odd, the last feature does not turn (q = 1 in
    Eq. 24), so that its part of a score has no position; the constructor warns of it. Angles are in
    radians. ``RotationOptions`` changes base, e and angles.

    Args:
        theta: other frequencies than those of :meth:`frequencies`.
        floored: True if ``AngleOptions`` is read, as for a core of :data:`CORES`.
    """

    base: ClassVar[float] = BASE
    angle_kind: ClassVar[str] = "fixed"
    """"fixed" or "learned" angles; empty for a core without angles."""
    scales: ClassVar[str] = "angles"
    """What context scaling changes, in words; see ``Encoding.scales``."""
    reads_length: ClassVar[bool] = True
    """True if positions count tokens, so that angles may depend on the length of the text."""

    latex = (
        r"\Lambda^{(s)} = \mathrm{diag}_i\, R(s\, \alpha_i),\ \alpha_i = 10000^{-2i/D}"
        rf"{UNTURNED}"
    )

    def __init__(
        self, spec: EncodingSpec, theta: Tensor | None = None, floored: bool = False
    ) -> None:
        super().__init__()
        self.options = spec.options.of(RotationOptions)
        self.options_of_angles = spec.options.of(AngleOptions)
        self.width = spec.head_dim
        if not self.reads_length:
            self._refuse_lengths()
        theta = self.frequencies(spec) if theta is None else theta
        # Not a buffer: transformers replaces buffers that are not saved by uninitialized memory.
        self.zeros_at_start = tuple((theta == 0).tolist())
        self.floor: AngleFloor | None = floor_of(spec, theta) if floored else None
        self.register_load_state_dict_pre_hook(require_same_angles)
        self.register_frequencies(theta)
        self.register_load_state_dict_post_hook(_after_loading)
        scaled(theta, self.options)  # raises for another number of factors

    def _refuse_lengths(self) -> None:
        """Refuse options that need positions in a text of known length."""
        by_turns = self.options.rotation_spectrum == "turns"
        if not (by_turns or self.options.by_text):
            return
        scaling = f"--context-scaling {self.options.context_scaling}"
        raise ChoiceError(
            f"{'--rotation-spectrum turns' if by_turns else scaling} needs angles of token "
            "positions in a text: choose rope or an LRPE type with rotations"
        )

    def frequencies(self, spec: EncodingSpec) -> Tensor:
        """Return the frequencies without context scaling, (E,) float64, radians per token.

        Raises: ChoiceError if the head width is too small.
        """
        if spec.head_dim < 2:
            raise ChoiceError(f"a rotation needs a head width of at least 2, got {spec.head_dim}")
        width = self.options.turned(spec.head_dim)
        if width % 2:
            warnings.warn(
                f"a rotation turns pairs of features, so that the last of the {width} features of "
                "each head does not turn and its part of a score has no position; choose an even "
                "head width",
                stacklevel=2,
            )
        return self.bands(width)

    def bands(self, width: int) -> Tensor:
        """Return :func:`bands` with the base and the spectrum that the user chose."""
        return self.options.start(bands(width, self.options.rotation_base or self.base))

    @property
    def turned(self) -> int:
        """The number of features with a cosine and a sine, the first ones of a head."""
        return self.options.turned(self.width) // 2 * 2

    @property
    def angles(self) -> Tensor:
        """The angles per token after context scaling, (E,), in a text as long as in training."""
        return self.angles_in(None)

    def angles_in(self, length: int | None) -> Tensor:
        """Return the angles per token in a text of ``length`` tokens, (E,); None: of L tokens."""
        return scaled(self.unscaled, self.options, length)

    @property
    def unscaled(self) -> Tensor:
        """The angles per token before context scaling, (E,), with the floor."""
        return self.theta

    def fixed_at_0(self, theta: Tensor) -> Tensor:
        """Return learned angles (E,): 0, without a gradient, where spectrum or floor fix them."""
        theta = theta if self.floor is None else self.floor.still(theta)
        if self.options.rotation_spectrum == "partial":
            return theta
        still = constant(self.zeros_at_start, torch.bool, theta.device)
        return theta.masked_fill(still, 0.0)

    def register_frequencies(self, theta: Tensor) -> None:
        """Store fixed frequencies; casting or broadcasting a buffer would change them."""
        self.theta_without_floor = theta
        self.theta = theta if self.floor is None else self.floor(theta)
        self.cache = PositionCache()
        if self.options.rotation_spectrum == "turns":
            length = torch.tensor(self.options.context_length, device="cpu")
            self.register_buffer("spectrum_length", length)

    def after_loading(self) -> None:
        """Compute fixed angles from the length and the floor that were loaded.

        ``load_state_dict`` calls it; whoever assigns buffers in another way must call it.
        """
        if self.cache is None:  # learned angles are among the weights
            return
        if self.options.rotation_spectrum == "turns":
            self.theta_without_floor = spectrum(
                self.theta_without_floor,
                kind=self.options.rotation_spectrum,
                fraction=self.options.rotation_fraction,
                length=int(self.spectrum_length),
            )
        self.theta = self.theta_without_floor
        if self.floor is not None:
            self.theta = self.floor(self.theta)

    def powers(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return exp(i s theta) for every position: (T, E) or (B, 1, T, E), complex.

        Or for places s, float64 (B, H, T, E) or (B, H, T, 1), which are not cached.
        """
        # learned angles change with every update, and phases of the text with every batch
        if self.cache is None or positions.is_floating_point():
            return self.phases(positions, dtype)
        compute = partial(self.phases, positions, dtype)
        return self.cache.get((positions, self.theta), dtype, compute)

    def phases(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the result of :meth:`powers`.

        If angles depend on the length of the text, it is the last position + 1. In a batch with
        padding it is that of the longest row, as in transformers.
        """
        length = length_of(positions) if self.options.by_text else None
        angles = self.angles_in(length)
        device = positions.device
        if torch.compiler.is_compiling():
            return phases(positions, angles, dtype)
        if positions.is_floating_point() and not angles.requires_grad:  # not cached
            angles = constant(tuple(angles.tolist()), exact_type(device), device)
        return phases(positions, angles, dtype)

    def in_kernel(self, device: torch.device) -> Angles | None:
        """Return that from which a GPU kernel computes Lambda; None if it needs :meth:`powers`."""
        if self.options.by_text:
            return None
        return Angles(constant(tuple(self.angles.tolist()), torch.float64, device))

    def forward(self, planes: Planes, turn: Tensor) -> Planes:
        """Rotate every plane (..., T, D) by ``turn``, the result of :meth:`powers`."""
        return tuple(rotate_pairs(x, turn) for x in planes)


class LearnedRotation(Rotation):
    """The rotation with learned frequencies, initialized to those of :class:`Rotation`."""

    latex = (
        r"\Lambda^{(s)} = \mathrm{diag}_i\, R(s\, \theta_i),\ \theta \text{ learned}"
        rf"{UNTURNED}"
    )
    scales = "learned angles"
    angle_kind = "learned"

    @property
    def unscaled(self) -> Tensor:
        """The learned angles, (E,); those that are fixed at 0 have no gradient."""
        return self.fixed_at_0(self.theta)

    def register_frequencies(self, theta: Tensor) -> None:
        """Register a float32 parameter. An edit through ``.data`` would not be seen by a cache."""
        self.theta = undecayed((theta if self.floor is None else self.floor(theta)).float())
        self.cache = None

    def in_kernel(self, device: torch.device) -> Angles | None:
        """Return the learned angles, or None if they depend on the length of the text."""
        return None if self.options.by_text else Angles(self.angles)


class HalfRotation(Rotation):
    """The rotation of the first e = d // 2 features, rounded up to even (C.7).

    The frequencies are 10000^(-2i/e), as in the pseudo-code (C.8); the text prints 10000^(-2t/d).
    """

    latex = (
        r"\Lambda^{(s)} = \mathrm{diag}(R(s\, \alpha_i),\, I),\ \alpha_i = 10000^{-2i/E},\ "
        r"E = D/2 \text{ features turn}"
    )

    def frequencies(self, spec: EncodingSpec) -> Tensor:
        """Return the frequencies.

        Raises: ChoiceError below width 3, where every feature would be rotated.
        """
        if spec.head_dim < 3:
            raise ChoiceError(
                f"rotation-half needs a head width of at least 3, got {spec.head_dim}"
            )
        half = spec.head_dim // 2
        return self.bands(min(half + half % 2, self.options.turned(spec.head_dim)))

    @property
    def turned(self) -> int:
        """Two features for every angle."""
        return 2 * len(self.theta)


class Unitary(Rotation):
    """Lambda^(s) = diag(exp(i s alpha_t)), alpha_t = 10000^(-2t/d), t = 0..d-1 (Eq. 23).

    A real input becomes complex, so the encoded width doubles.
    """

    latex = r"\Lambda^{(s)} = \mathrm{diag}_j\, e^{i s \alpha_j},\ \alpha_j = 10000^{-2j/D}"

    def frequencies(self, spec: EncodingSpec) -> Tensor:
        """Return one frequency for each feature that turns, (E,) float64."""
        base = self.options.rotation_base or self.base
        return self.options.start(bands(2 * self.options.turned(spec.head_dim), base**2))

    @property
    def turned(self) -> int:
        """One feature for every angle."""
        return self.options.turned(self.width)

    def angles_in(self, length: int | None) -> Tensor:
        """Return the angles in a text of ``length`` tokens, (D,): 0 for features that are still."""
        angles = super().angles_in(length)
        return F.pad(angles, (0, self.width - len(angles)))

    def forward(self, planes: Planes, turn: Tensor) -> Planes:
        """One or two planes (..., T, D) -> the planes (re, im)."""
        if len(planes) == 1:
            return planes[0] * turn.real, planes[0] * turn.imag
        re, im = planes
        return re * turn.real - im * turn.imag, re * turn.imag + im * turn.real


class LearnedUnitary(Unitary):
    """The unitary diagonal with learned frequencies (TMLR, Type 1)."""

    latex = r"\Lambda^{(s)} = \mathrm{diag}_j\, e^{i s \theta_j},\ \theta \text{ learned}"
    scales = "learned angles"
    angle_kind = "learned"

    unscaled = LearnedRotation.unscaled
    register_frequencies = LearnedRotation.register_frequencies
    in_kernel = LearnedRotation.in_kernel


class LogRotation(Logarithmic, LearnedRotation):
    """:class:`LearnedRotation` with ``--angle-parameter log``."""


class LogUnitary(Logarithmic, LearnedUnitary):
    """:class:`LearnedUnitary` with ``--angle-parameter log``."""


class SlowRotation(Slow, LearnedRotation):
    """:class:`LearnedRotation` with ``--angle-lr-scale``."""


class SlowUnitary(Slow, LearnedUnitary):
    """:class:`LearnedUnitary` with ``--angle-lr-scale``."""


def _after_loading(core: Rotation, keys: object) -> None:
    core.after_loading()


def after_loading(model: nn.Module) -> None:
    """Call :meth:`Rotation.after_loading` of all rotations of a model."""
    for module in model.modules():
        if isinstance(module, Rotation):
            module.after_loading()


class Permutation(nn.Module):
    """Lambda^(s) = (I)_{pi^s}: feature j at position s is feature pi^s(j) (Eq. 25, 59).

    pi is drawn once and saved in the checkpoint.
    """

    latex = r"\Lambda^{(s)} = \text{permutation } \pi^s"
    scales = ""
    angle_kind = ""

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        draw = torch.randperm(spec.head_dim, generator=spec.generator("permutation"), device="cpu")
        self.register_buffer("permutation", draw)
        self.cycles = CyclicPowers()

    def powers(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the indices of pi^s, (T, D) or (B, 1, T, D)."""
        return over_heads(self.cycles.powers(self.permutation, positions), positions)

    def in_kernel(self, device: torch.device) -> Tensor:
        """Return the cycles of pi; see :meth:`Rotation.in_kernel`."""
        return self.cycles.cycles(self.permutation)

    def forward(self, planes: Planes, power: Tensor) -> Planes:
        """Permute the last axis of every plane (..., T, D) by ``power``, from :meth:`powers`."""
        return tuple(permute(x, power) for x in planes)


def bands(width: int, base: float = BASE) -> Tensor:
    """Return base^(-2i/w), i = 0..w/2-1, float64, w the even part of ``width``."""
    pairs = width // 2
    return base ** (torch.arange(pairs, dtype=torch.float64, device="cpu") / -pairs)


def length_of(positions: Tensor) -> int:
    """Return the last position + 1, which attention knows if it has counted them."""
    known = known_range(positions)
    if known is not None:
        return known[1] + 1
    return int(positions.max()) + 1 if positions.numel() else 0


def phases(positions: Tensor, theta: Tensor, dtype: torch.dtype) -> Tensor | Turns:
    """Compute exp(i s theta), complex (T, E) or (B, 1, T, E), for positions s (T,) or (B, T).

    For places s of every pair, float64 (B, H, T, E), it is (B, H, T, E), with gradients of s.
    The angle (radians) is float64: in float32 it would be off by 6e-3 at position 100,000.
    """
    compute = _phases if is_transformed() else _Phases.apply
    if positions.is_floating_point():  # sums of increments have heads already
        return compute(theta, positions, dtype)
    turn = compute(theta, positions.unsqueeze(-1), dtype)
    return each_part(turn, lambda x: over_heads(x, positions))


def phases_by_head(positions: Tensor, theta: Tensor, dtype: torch.dtype) -> Tensor | Turns:
    """Compute :func:`phases` for theta (H, E) of every head: (H, T, E) or (B, H, T, E)."""

    def by_head(turn: Tensor) -> Tensor:
        turn = turn.unflatten(-1, theta.shape).transpose(-2, -3)
        return turn.squeeze(1) if positions.dim() == 2 else turn

    return each_part(phases(positions, theta.flatten(), dtype), by_head)


def _phases(theta: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor | Turns:
    """Compute exp(i s theta), (..., E), for s (..., 1) or (..., E) in differentiable operations."""
    exact = exact_type(s.device)
    angle = s.to(exact) * theta.to(exact).to(s.device)
    return complex_of(angle.cos().to(dtype), angle.sin().to(dtype))


class _Phases(torch.autograd.Function):
    """exp(i s theta); with g = Im(conj(phase) gradient), d theta = sum_s s g and d s = theta g.

    Differentiable any number of times, because the saved phase is an output.
    """

    @staticmethod
    def forward(ctx, theta, s, dtype):
        phase = _phases(theta, s, dtype)
        ctx.save_for_backward(s if ctx.needs_input_grad[0] else None, phase, theta)
        return phase

    @staticmethod
    def backward(ctx, grad):
        s, phase, theta = ctx.saved_tensors
        exact = exact_type(phase.device)
        turned = (phase.conj() * grad).imag.to(exact)
        of_theta = None
        of_s = None
        if ctx.needs_input_grad[0]:
            of_theta = (s.to(exact) * turned).flatten(0, -2).sum(0).to(theta)
        if ctx.needs_input_grad[1]:
            of_s = turned * theta.to(turned)
        return of_theta, of_s, None


ROTATION = Variant(phi=False)


def rotate_pairs(x: Tensor, turn: Tensor | Turns) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of x (..., T, D) by the complex ``turn``.

    turn: (T, E) or (B, 1, T, E), or one per head, (H, T, E) or (B, H, T, E). The features from 2E
        on are unchanged.
    """
    turned = dispatch.applied(x, turn, ROTATION)
    if turned is not None:
        return turned
    if isinstance(turn, Turns) or x.shape[-1] % 2 or not is_plain(x, turn):
        # rows of odd width are not aligned to complex numbers; compilers do not support them
        return rotated(x, turn)
    width = 2 * turn.shape[-1]
    turned = torch.view_as_real(_pairs(x[..., :width]) * turn).flatten(-2)
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], dim=-1)


def rotate_both(
    q: Tensor, k: Tensor, theta: Tensor, q_positions: Tensor, k_positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate the pairs (2i, 2i+1) of q and k (B, H, T, D) by s theta; theta: (H, E) of every head.

    Computed in float32 or wider, by one kernel on a GPU. The result has the dtype of q and k.
    """
    check_positions(q_positions, q)
    check_positions(k_positions, k)
    transform = Transform(
        ROTATION,
        powers=lambda positions, dtype: phases_by_head(positions, theta, dtype),
        angles=lambda device: Angles(theta.to(device)),
    )
    encoded = dispatch.encode_both(q, k, transform, q_positions, k_positions)
    if encoded is not None:
        return encoded
    wide = torch.promote_types(q.dtype, torch.float32)
    q_turn = phases_by_head(q_positions, theta, wide)
    same = k_positions is q_positions
    k_turn = q_turn if same else phases_by_head(k_positions, theta, wide)
    turned_q = rotate_pairs(q.to(wide), q_turn).to(q.dtype)
    turned_k = rotate_pairs(k.to(wide), k_turn).to(k.dtype)
    return turned_q, turned_k


def _pairs(x: Tensor) -> Tensor:
    """(..., 2E) real -> (..., E) complex; a copy if x is not aligned to pairs."""
    x = x.contiguous()
    # complex numbers begin at even elements of memory
    x = x.clone() if x.storage_offset() % 2 else x
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


CORES = {
    "rotation": Rotation,
    "rotation-learned": LearnedRotation,
    "rotation-half": HalfRotation,
    "unitary": Unitary,
    "unitary-learned": LearnedUnitary,
    "permutation": Permutation,
}
"""Lambda by name: the cores of the names ``lrpe:<P>:<Lambda>``."""

LOGARITHMIC = {LearnedRotation: LogRotation, LearnedUnitary: LogUnitary}
"""The cores with learned angles -> those that learn the logarithms."""

SLOW = {LearnedRotation: SlowRotation, LearnedUnitary: SlowUnitary}
"""The cores with learned angles -> those with a learning rate of their own."""


def build_core(name: str, spec: EncodingSpec) -> nn.Module:
    """Build the core ``name`` of :data:`CORES` with ``AngleOptions``.

    Raises: ChoiceError for a floor or logarithms of angles that the core does not have.
    """
    kind = CORES[name]
    options = spec.options.of(AngleOptions)
    if options == AngleOptions():
        return kind(spec)
    if not issubclass(kind, Rotation):
        raise ChoiceError(
            f"Lambda {name!r} has no angles: leave out --angle-lr-scale, --angle-floor and "
            "--angle-parameter, or choose rope or an LRPE type with rotations"
        )
    learned = {"--angle-parameter log": options.angle_parameter == "log"}
    learned["--angle-lr-scale"] = options.angle_lr_scale != 1
    for option, chosen in learned.items():
        if chosen and kind not in LOGARITHMIC:
            raise ChoiceError(
                f"Lambda {name!r} has fixed angles: leave out {option}, or choose "
                "lrpe-type2, lrpe-type3, lrpe-type6 or lrpe-tmlr-type1"
            )
    if options.angle_parameter == "log":
        kind = LOGARITHMIC[kind]
    elif options.angle_lr_scale != 1:
        kind = SLOW[kind]
    return kind(spec, floored=True)
