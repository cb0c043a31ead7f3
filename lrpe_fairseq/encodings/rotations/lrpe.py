"""The LRPE family: W_s = P^H Lambda^(s) P with P unitary (LRPE ICLR, Eq. 23-25, Table 1, C.7).

The encoded query is q~_s = Lambda^(s) P q_s, and the key is encoded likewise. P^H cancels in the
score (Eq. 76) and is never computed. P (``projections``) and Lambda (``cores``) are chosen by name
and combine freely.

A complex vector is represented by its *planes*, the tuple (re, im), and a real vector by (re,).
The planes are concatenated last, so that the inner product of two results is Re(q~^H k~).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.companions import REAL, check_companion
from lrpe_fairseq.encodings.core.forms import Fold, Planes
from lrpe_fairseq.encodings.core.options import EncodingSpec
from lrpe_fairseq.encodings.core.positions import check_positions
from lrpe_fairseq.encodings.core.protocols import Card, QueryKeyEncoding
from lrpe_fairseq.encodings.rotations.cores import Permutation, Rotation, Unitary, build_core
from lrpe_fairseq.encodings.rotations.projections import (
    PROJECTIONS,
    Fourier,
    Householder,
    Identity,
    LRPEOptions,
    OddEven,
)
from lrpe_fairseq.encodings.rotations.scaling import RotationOptions
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels.encode.encode import Transform, Variant


class LRPE(QueryKeyEncoding):
    """q~_s = Lambda^(s) P q_s, k~_t = Lambda^(t) P k_t (Eq. 76), shared by all heads.

    Trap: a rotation turns pairs of features, so the last feature of a head of odd width does not
    turn. The constructor warns of it.

    Args:
        projection: a name of :data:`PROJECTIONS`.
        core: a name of ``cores.CORES``, or a module like those of ``cores``.
    Raises: ChoiceError for a head width that the core does not support.
    """

    Options = LRPEOptions

    def __init__(self, spec: EncodingSpec, projection: str, core: str | nn.Module) -> None:
        super().__init__(spec)
        self._parts = (projection, core) if isinstance(core, str) else ()
        self.projection = PROJECTIONS[projection](spec)
        self.core = build_core(core, spec) if isinstance(core, str) else core
        self.angles = self.core.angle_kind if isinstance(core, str) else ""
        self._planes = 2 if projection == "fourier" or isinstance(self.core, Unitary) else 1
        if type(self).card is None:  # a subclass has its own
            self.card = _card(self.projection, self.core)
        self.turns = not isinstance(self.core, Permutation)
        self.scales = self.core.scales
        rotations = spec.options.of(RotationOptions)
        self.whole_texts = rotations.by_text
        self.content_scale, self.feature_factors = self._factors(rotations.score_factor)
        # the Fourier transform of a positive vector is largest in bin 0, which turns fastest
        self.denominator_vanishes = projection == "fourier"

    def use_angles(self, angles: Sequence[float], score_factor: float = 1.0) -> None:
        """Turn by other fixed angles, in radians per token, one for each pair that turns.

        They are those of a pretrained model that no context scaling gives. score_factor: of the
        scores in softmax attention; the square of a factor of cos and sin.
        Raises: ChoiceError unless the angles are fixed, without a scaling, and as many.
        """
        plain = type(self.core) is Rotation and self.core.floor is None
        rotations = self.spec.options.of(RotationOptions)
        if not plain or rotations.context_scaling != "none":
            raise ChoiceError(
                f"{self.name!r} takes no angles of a pretrained model: choose rope without "
                "--context-scaling and --angle-floor"
            )
        if len(angles) != len(self.core.theta):
            raise ChoiceError(
                f"{len(self.core.theta)} pairs turn, but {len(angles)} angles are given"
            )
        exact = {"dtype": torch.float64, "device": "cpu"}
        self.core.register_frequencies(torch.tensor(angles, **exact))
        self.content_scale, self.feature_factors = self._factors(score_factor)

    def _factors(self, factor: float) -> tuple[float, tuple[float, ...] | None]:
        """Return the factor of scores, and of features if not all turn.

        yarn multiplies cos and sin. So only the features that turn have the factor, the first ones
        of every plane.
        """
        all_turn = not isinstance(self.core, Rotation) or self.core.turned == self.spec.head_dim
        if factor == 1 or all_turn:
            return factor, None
        # of every plane (re, im) the first features turn
        still = self.spec.head_dim - self.core.turned
        return 1.0, ((factor,) * self.core.turned + (1.0,) * still) * self._planes

    def summary(self) -> str:
        """Return the names of P and Lambda, joined by " x ", for a member of the family."""
        return " x ".join(self._parts) or super().summary()

    @property
    def feature_dim(self) -> int:
        """D, or 2D if features are complex."""
        return self._planes * self.spec.head_dim

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode in float32 or wider; see :meth:`QueryKeyEncoding.forward`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        # P and Lambda in float32: a half type would be rounded twice
        planes = (self.projection(x.to(wide)) for x in (q, k))
        turned = self.turn(*planes, q_positions, k_positions)
        return tuple(x.to(q.dtype) for x in turned)

    def fold(self) -> Fold | None:
        """Return P and Lambda unless P is the identity; see :meth:`QueryKeyEncoding.fold`."""
        plain = isinstance(self.projection, Identity)
        return None if plain else Fold(self.projection, self.turn)

    def turn(
        self, q: Planes, k: Planes, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Apply Lambda^(s) to the planes of P q and P k; see :class:`Fold`."""
        wide = torch.promote_types(q[0].dtype, torch.float32)
        self.check(q_positions, q[0])
        self.check(k_positions, k[0])
        q_power = self.core.powers(q_positions, wide)
        same = k_positions is q_positions  # as in self-attention
        k_power = q_power if same else self.core.powers(k_positions, wide)
        return self._turned(q, q_power, wide), self._turned(k, k_power, wide)

    def transform(self, phi: bool) -> Transform | None:
        """Return P and Lambda^(s) as data; see :meth:`QueryKeyEncoding.transform`.

        No kernel has a Fourier matrix P with a Lambda that is not unitary.
        """
        fourier = isinstance(self.projection, Fourier)
        unitary = isinstance(self.core, Unitary)
        if fourier and not unitary:
            return None
        variant = Variant(
            phi=phi,
            halves=isinstance(self.projection, OddEven),
            wide=unitary,
            permutes=isinstance(self.core, Permutation),
            fourier=fourier,
        )
        return Transform(
            variant=variant,
            powers=self.core.powers,
            angles=self.core.in_kernel,
            normal=self.projection.v if isinstance(self.projection, Householder) else None,
            matrix=self.projection.matrix if fourier else None,
        )

    def check(self, positions: Tensor, x: Tensor) -> Tensor:
        """Return positions after :func:`check_positions`, or sums of increments for x."""
        if self.increments is None or getattr(positions, "ndim", 0) != 4:
            return check_positions(positions, x)
        shape = x.shape[0], self.spec.num_heads, x.shape[-2]
        shapes = (*shape, self.core.angles.shape[-1]), (*shape, 1)
        return check_companion("phases", positions, REAL, "(B, H, T, E or 1)", shapes, x)

    def _turned(self, planes: Planes, power: Tensor, wide: torch.dtype) -> Tensor:
        turned = self.core(tuple(x.to(wide) for x in planes), power)
        turned = turned[0] if len(turned) == 1 else torch.cat(turned, dim=-1)
        return turned.to(planes[0].dtype)


def _card(projection: nn.Module, core: nn.Module) -> Card:
    """Describe one combination of P and Lambda."""
    source = (
        "[Qin et al. (2023)](https://openreview.net/forum?id=xoLyps2qWc); "
        "[ICLR submission](https://openreview.net/forum?id=xMWFqb5Uyk), Table 1 and C.7"
    )
    if isinstance(projection, Identity) and type(core) is Rotation:
        source = "[Su et al. (2021)](https://arxiv.org/abs/2104.09864); LRPE with P = I"
    return Card(
        mechanism="rotation",
        equation=r"\mathrm{Re}\big[(\Lambda^{(s)} P q_s)^{\mathsf H} \Lambda^{(t)} P k_t\big],"
        rf" \qquad {projection.latex}, \qquad {core.latex}",
        cost="O(D^2) per token and head" if isinstance(projection, Fourier) else "O(D) per token",
        beyond="a permutation repeats after its period"
        if isinstance(core, Permutation)
        else "nothing: phases of distances that training has not seen",
        source=source,
    )
