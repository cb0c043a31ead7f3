"""Two-dimensional RoPE (Heo et al., 2024): axial with fixed and mixed with learned frequencies."""

import math

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.grids import axes_of
from lrpe_fairseq.encodings.core.options import EncodingSpec
from lrpe_fairseq.encodings.core.parameters import undecayed
from lrpe_fairseq.encodings.core.positions import constant
from lrpe_fairseq.encodings.core.protocols import Card, Encoding, Properties
from lrpe_fairseq.encodings.rotations.cores import Rotation, bands, phases, phases_by_head
from lrpe_fairseq.encodings.rotations.lrpe import LRPE
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels.encode.encode import Angles, Turns

AXIAL_BASE = 100.0  # of the fixed frequencies (Heo et al., Section 3.2)
MIXED_BASE = 10.0  # of the initial magnitudes of the mixed frequencies (the authors' code)
SOURCE = "[Heo et al. (2024)](https://arxiv.org/abs/2403.13298), Section 3.2"


class RoPE2D(LRPE):
    """Axial RoPE: D/4 pairs of features turn by row theta_i, D/4 pairs by column theta_i.

    theta_i = 100^(-i/(D/4)), i = 0..D/4-1 (Heo et al., 2024, Section 3.2). The first half of the
    features belongs to the row, the second half to the column; the paper alternates the two.

    The score depends on the differences of rows and columns only, so a shift by whole rows does not
    change it. If D is not divisible by 4, the last features are unchanged.

    Trap: with ``grid_width`` 0 the positions are on a line, half of the features do not turn, and
    the method is not two-dimensional.

    Raises: ChoiceError for a head width below 4.
    """

    Options = Encoding.Options
    reads_grid = True
    card = Card(
        mechanism="tree and grid",
        equation=(
            r"\sum_{i} \mathrm{Re}\left[\bar q_i k_i e^{-\mathrm{i}\theta_i \Delta_{row}} + "
            r"\bar q_{i+D/4} k_{i+D/4} e^{-\mathrm{i}\theta_i \Delta_{col}}\right], \quad "
            r"\theta_i = 100^{-i/(D/4)}"
        ),
        cost="O(D) per token and head",
        beyond="No promise: rows and columns that training did not reach turn by new angles.",
        source=SOURCE,
    )

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec, "identity", AxialRotation(spec))
        self.properties = Properties(shift_unit=max(spec.options.grid_width, 1))


class RoPE2DMixed(LRPE):
    """Mixed RoPE: pair i of head h turns by row alpha_hi + column beta_hi, both learned.

    Each layer has its own alpha and beta, (H, 2 (D // 4)) each (Heo et al., 2024, Section 3.2).
    They start at magnitude 10^(-i/(D/4)), i = 0..D/4-1, and in one random direction per head for
    the first D/4 pairs; the second D/4 pairs have the same magnitudes in the orthogonal direction.

    The score depends on the differences of rows and columns only. If D is not divisible by 4, the
    last features are unchanged. With ``grid_width`` 0 the positions are on a line, and beta is not
    used.

    Trap: all pairs turn fast, so that the denominator of Eq. 39 is often negative. Use the
    normalizer "layernorm" or "content".

    Raises: ChoiceError for a head width below 4.
    """

    Options = Encoding.Options
    reads_grid = True
    keys_by_head = True
    card = Card(
        mechanism="tree and grid",
        equation=(
            r"\sum_{i} \mathrm{Re}\left[\bar q_i k_i "
            r"e^{-\mathrm{i}(\alpha_{hi} \Delta_{row} + \beta_{hi} \Delta_{col})}\right]"
        ),
        cost="O(D) per token and head, and O(H T D) cosines",
        beyond="No promise: rows and columns that training did not reach turn by new angles.",
        source=SOURCE,
    )

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec, "identity", MixedRotation(spec))
        self.properties = Properties(shift_unit=max(spec.options.grid_width, 1))
        self.denominator_vanishes = True  # base 10: no pair turns slowly


class AxialRotation(Rotation):
    """Rotates D/4 pairs by row theta and the next D/4 pairs by column theta."""

    base = AXIAL_BASE
    scales = "angles of both axes; yarn's L is a number of rows or columns"
    reads_length = False

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        self.grid_width = spec.options.grid_width

    def frequencies(self, spec: EncodingSpec) -> Tensor:
        """Return the frequencies of one axis, (D/4,) float64."""
        return self.bands(_of_axis(self.options.turned(spec.head_dim)))

    @property
    def turned(self) -> int:
        """Two features for every angle and axis."""
        return 4 * len(self.theta)

    def phases(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the phases of every position: (T, D/2) or (B, 1, T, D/2), complex."""
        axes = axes_of(positions, self.grid_width)
        parts = [phases(axis, self.angles, dtype) for axis in axes]
        if isinstance(parts[0], Turns):
            return Turns(*(torch.cat(part, -1) for part in zip(*parts, strict=True)))
        return torch.cat(parts, -1)

    def in_kernel(self, device: torch.device) -> Angles:
        """Return the angles; each pair has one of 0 for the axis that does not turn it."""
        theta = tuple(self.angles.tolist())
        still = (0.0,) * len(self.theta)
        of_axis = (theta + still, still + theta)
        return Angles(*(constant(x, torch.float64, device) for x in of_axis), self.grid_width)


class MixedRotation(nn.Module):
    """Rotates the pairs of every head by row alpha + column beta, the learned frequencies."""

    scales = ""

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        self.grid_width = spec.options.grid_width
        magnitude = bands(_of_axis(spec.head_dim), MIXED_BASE)
        draw = torch.rand(
            spec.num_heads, 1, generator=spec.generator("rope-2d-mixed"), device="cpu"
        )
        direction = draw.double() * (2 * math.pi)
        halves = [direction, direction + math.pi / 2]
        self.row = undecayed(torch.cat([magnitude * d.sin() for d in halves], -1).float())
        self.column = undecayed(torch.cat([magnitude * d.cos() for d in halves], -1).float())

    def powers(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the phases of every head and position: (H, T, E) or (B, H, T, E), complex."""
        row, column = axes_of(positions, self.grid_width)
        turn = phases_by_head(row, self.row, dtype)
        other = phases_by_head(column, self.column, dtype)
        return turn.times(other) if isinstance(turn, Turns) else turn * other

    def in_kernel(self, device: torch.device) -> Angles:
        """Return the learned angles of rows and columns."""
        return Angles(self.row, self.column, self.grid_width)

    forward = Rotation.forward


def _of_axis(width: int) -> int:
    """Return the number of features that turn by one axis, of ``width`` features."""
    if width < 4:
        raise ChoiceError(
            f"a rotation by rows and columns needs a head width of at least 4, got {width}"
        )
    return width // 2
