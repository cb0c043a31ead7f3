"""Rotations exp(sum_a p_a A_a) in blocks: LieRE (Ostmeier et al., 2025), ComRoPE (Yu et al., 2025).

A_a = -A_a^T is a learned generator for axis a, block diagonal with blocks of width b, and p_a is
the coordinate on that axis. On a line there is one axis, the position. A grid of R rows and W
columns (``--grid-height``, ``--grid-width``) has the axes row and column. As in the authors' codes,
a coordinate is a fraction of its own axis: row / (R - 1) and column / (W - 1) in LieRE, row / R and
column / W in ComRoPE. R and W are those of the training, which a checkpoint contains: on another
grid cells at one offset have the rotation that was trained for it. (The authors' codes take R and W
of the grid that is read, which changes all rotations.)

Axes: B batch, H heads, T time, D head width, N axes, J blocks, b width of a block, G = H J,
K vectors that share the positions, M positions.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.forms import Fold
from lrpe_fairseq.encodings.core.grids import rows_and_columns
from lrpe_fairseq.encodings.core.options import LONGEST, EncodingSpec, option
from lrpe_fairseq.encodings.core.parameters import undecayed
from lrpe_fairseq.encodings.core.positions import PositionCache
from lrpe_fairseq.encodings.core.protocols import Card, Properties, QueryKeyEncoding
from lrpe_fairseq.encodings.rotations.cores import bands, rotate_both
from lrpe_fairseq.encodings.rotations.generators import (
    EIGENBASIS,
    Eigen,
    Spectrum,
    canonical,
    encode_both,
    exponential,
    folded,
    from_groups,
    generator_of,
    skew_of_triangle,
    to_groups,
    triangle,
    turn,
)
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels.conditions import may_read_values

NOISE = 0.001
"""Standard deviation of the noise in an entry of A on a line. 0.01 would remove the slow rotations
of RoPE within a few hundred tokens, and denominators of Eq. 39 would often be close to zero."""


# --- the encodings -----------------------------------------------------------------------------


class BlockRotation(QueryKeyEncoding):
    """q~ = R(p) q and k~ = R(p) k with an orthogonal R(p), block diagonal in blocks of width b.

    b = min(``rotation_block``, D // ``least_blocks``). The last D mod b features are unchanged, as
    the last feature of RoPE for an odd D. A subclass defines ``turned``, which rotates x
    (G, K, M, b) at positions of any shape with M entries. The buffer ``grid`` has the rows and
    columns of the grid in training.
    Raises: ChoiceError unless b is at least 2.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of LieRE and ComRoPE."""

        rotation_block: int = option(
            8,
            "LieRE, ComRoPE: width of the blocks of features that are rotated together",
            least=2,
            most=LONGEST,
        )

    reads_grid = True
    turns = True
    keys_by_head = True
    host_reads = EIGENBASIS
    last_at_one: ClassVar[bool] = False
    """True if the last row and column of a grid have the coordinate 1, as in linspace(0, 1)."""

    def __init__(self, spec: EncodingSpec, least_blocks: int = 1) -> None:
        super().__init__(spec)
        self.axes = 2 if spec.options.grid_width else 1
        # generators from large random numbers turn narrow heads into nearly independent directions
        self.denominator_vanishes = self.axes == 2
        self.block = min(self.options.rotation_block, spec.head_dim // least_blocks)
        if self.block < 2:
            raise ChoiceError(
                "rotation_block must be at least 2 and the head width at least "
                f"{2 * least_blocks}, got {self.options.rotation_block} and {spec.head_dim}"
            )
        self.blocks = spec.head_dim // self.block
        self.spectrum = Spectrum()
        if self.axes == 2:
            options = spec.options
            trained = options.grid_height or options.grid_width, options.grid_width
            self.register_buffer("grid", torch.tensor(trained, device="cpu"))
            self.register_load_state_dict_pre_hook(_of_this_grid)

    @property
    def learned(self) -> Tensor:
        """The parameter of which the generators are functions."""
        raise NotImplementedError

    def skew(self) -> Tensor:
        """Return the generators of the blocks, float64 (G, b, b), or one more axis for each A."""
        raise NotImplementedError

    def eigen(self, skew: Tensor) -> Eigen:
        """Find the eigenbasis of generators; see ``generators.Find``."""
        return self.spectrum.entry(skew, self.learned)

    def train(self, mode: bool = True) -> "BlockRotation":
        """Set the mode; the next eigenbasis is computed anew."""
        self.spectrum.forget()
        return super().train(mode)

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate q and k; see :meth:`QueryKeyEncoding.forward`."""
        return encode_both(self._rotated, q, k, q_positions, k_positions)

    def fold(self) -> Fold | None:
        """Fold P^T of A = P generator(theta) P^T on a line; see :meth:`QueryKeyEncoding.fold`."""
        fills = self.axes == 1 and self.blocks * self.block == self.spec.head_dim
        found = canonical(self.skew(), self.eigen) if fills else None
        if found is None:
            return None
        basis, theta = (x.unflatten(0, (-1, self.blocks)) for x in found)  # H J
        theta = self.rates(theta).flatten(1)
        return folded(basis, lambda q, k, *at: rotate_both(q, k, theta, *at))

    def rates(self, theta: Tensor) -> Tensor:
        """Return the angles per token of each pair, for those of A, (H, J, b / 2)."""
        return theta

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (n, B, H, T, D) at positions (T,) or (B, T), in float32 or wider."""
        width = self.blocks * self.block
        wide = x[..., :width].to(torch.promote_types(x.dtype, torch.float32))
        groups = to_groups(wide, self.blocks, positions.dim() == 2)
        out = from_groups(self.turned(groups, positions), wide.shape, self.blocks).to(x.dtype)
        return out if width == x.shape[-1] else torch.cat([out, x[..., width:]], dim=-1)

    def coordinates(self, positions: Tensor) -> Tensor:
        """Return p of every position, float64 (M, N); see the docstring of this file."""
        positions = positions.flatten()
        if self.axes == 1:
            return positions.unsqueeze(-1).double()
        axes = rows_and_columns(positions, self.spec.options.grid_width)
        sizes = (self.grid - int(self.last_at_one)).clamp_min(1)
        return torch.stack(axes, dim=-1).double() / sizes


class LieRE(BlockRotation):
    """q~_p = exp(sum_a p_a A_a) q_p, A_a a learned block-diagonal skew-symmetric matrix per head.

    A_a = L_a - L_a^T; the strictly lower triangle L_a (N, H, J, b (b - 1) / 2) is learned, per
    layer. Eigenbases are float64, so R(p) is orthogonal at any position.

    On a line the score is exactly relative, and this is LRPE with a learned block-orthogonal P and
    learned angles. L starts from RoPE's frequencies in pairs of features, plus N(0, 0.001^2): the
    paper's U(0, 2 pi) is meant for coordinates in [0, 1] and would be noise for integers. On a grid
    L starts from U(0, 2 pi), as in the authors' code.

    Trap: on a grid the score is *not* relative, because R(p)^T R(p') = R(p' - p) only if A_0 and
    A_1 commute. There one eigenbasis is computed for each distinct cell, block and head.
    """

    card = Card(
        mechanism="tree and grid",
        equation=(
            r"(R_s q_s)^\top R_t k_t,\quad R_s = \exp\Big(\sum_a p_a(s)\, A_a\Big),\quad "
            r"A_a = L_a - L_a^\top \text{ in blocks of width } b"
        ),
        cost="O(B H T D b) and one eigenbasis, O(H D b^2); on a grid one for each distinct cell",
        beyond="No promise: the angles grow with the position, as in RoPE.",
        source="[Ostmeier et al. (2025)](https://arxiv.org/abs/2406.10322)",
    )
    last_at_one = True

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        size = self.block * (self.block - 1) // 2
        generator = spec.generator("liere")
        shape = self.axes, spec.num_heads, self.blocks, size
        if self.axes == 1:
            start = line_start(spec.num_heads, self.blocks, self.block)[..., *triangle(self.block)]
            draw = start + NOISE * torch.randn(shape, generator=generator, device="cpu")
        else:
            self.properties = Properties(relative="no")
            draw = 2 * math.pi * torch.rand(shape, generator=generator, device="cpu")
        self.lower = undecayed(draw)
        self._cells = PositionCache()

    @property
    def learned(self) -> Tensor:
        """The triangles L."""
        return self.lower

    def skew(self) -> Tensor:
        """Return A of every axis, float64 (N, G, b, b), on a line (G, b, b)."""
        skew = skew_of_triangle(self.lower.double(), self.block).flatten(1, 2)
        return skew[0] if self.axes == 1 else skew

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (G, K, M, b)."""
        skew = self.skew()
        if self.axes == 1:
            amounts = self.coordinates(positions).expand(-1, len(x)).t()
            return turn(x, skew, amounts, self.eigen)
        cells, index = self._cells.get(positions, None, lambda: distinct(positions))
        rotation = exponential(torch.einsum("ma,agij->mgij", self.coordinates(cells), skew))
        return torch.einsum("mgij,gkmj->gkmi", rotation.to(x.dtype)[index], x)


class ComRoPE(BlockRotation):
    """q~_p = exp(sum_a p_a A_a) q_p with commuting A_a: block j of A_a is theta_aj (P_j - P_j^T).

    R(p)^T R(p') = R(p' - p), so the score is exactly relative in every axis. P (H, J, b, b) is
    learned per layer. On a grid it starts from N(0, 1), as in the paper; on a line A starts as that
    of :class:`LieRE`. The paper shifts coordinates by half a cell, which cancels in every score,
    and adds noise to them in training, which is not done here. A subclass defines ``amounts``,
    sum_a theta_aj p_a, float64 (M, J), for coordinates (M, N).
    """

    def __init__(self, spec: EncodingSpec, least_blocks: int = 1) -> None:
        super().__init__(spec, least_blocks)
        self.properties = Properties(shift_unit=spec.options.grid_width or 1)
        shape = spec.num_heads, self.blocks, self.block, self.block
        draw = torch.randn(shape, generator=spec.generator("comrope"), device="cpu")
        if self.axes == 1:
            draw = NOISE / math.sqrt(2) * draw + line_start(*shape[:3])  # A has twice its variance
        self.p = undecayed(draw)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (G, K, M, b)."""
        amounts = self.amounts(self.coordinates(positions)).t().repeat(self.spec.num_heads, 1)
        return turn(x, self.skew(), amounts, self.eigen)

    @property
    def learned(self) -> Tensor:
        """The matrices P."""
        return self.p

    def skew(self) -> Tensor:
        """Return P - P^T, float64 (G, b, b)."""
        p = self.p.double().flatten(0, 1)
        return p - p.mT


class ComRoPEAP(ComRoPE):
    """ComRoPE with axial partition: block j turns by the coordinate of axis j mod N alone.

    theta_aj = 1 if a = j mod N, else 0. Blocks are at most D / 2 wide on a grid, so that each axis
    has one. On a line it equals :class:`LieRE`.
    """

    card = Card(
        mechanism="tree and grid",
        equation=(
            r"q_s^\top \exp\big(\mathrm{diag}_j\, (p_{j \bmod N}(t) - p_{j \bmod N}(s))\, "
            r"(P_j - P_j^\top)\big)\, k_t"
        ),
        cost="O(B H T D b) and one eigenbasis, O(H D b^2)",
        beyond="No promise: the angles grow with the position, as in RoPE.",
        source="[Yu et al. (2025)](https://arxiv.org/abs/2506.03737), axial partition",
    )

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec, least_blocks=2 if spec.options.grid_width else 1)

    def amounts(self, coordinates: Tensor) -> Tensor:
        """Return p_(j mod N); see :class:`ComRoPE`."""
        return coordinates[:, torch.arange(self.blocks, device=coordinates.device) % self.axes]


class ComRoPELD(ComRoPE):
    """ComRoPE with linearly dependent axes: block j turns by sum_a theta_aj p_a.

    theta (N, J) is learned and common to all heads, as in the authors' code. It starts from N(0, 1)
    on a grid and from 1 on a line, where this equals :class:`LieRE`.
    """

    card = Card(
        mechanism="tree and grid",
        equation=(
            r"q_s^\top \exp\Big(\mathrm{diag}_j \sum_a \theta_{aj}\, (p_a(t) - p_a(s))\, "
            r"(P_j - P_j^\top)\Big)\, k_t"
        ),
        cost="O(B H T D b) and one eigenbasis, O(H D b^2)",
        beyond="No promise: the angles grow with the position, as in RoPE.",
        source="[Yu et al. (2025)](https://arxiv.org/abs/2506.03737), linearly dependent",
    )

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        shape = self.axes, self.blocks
        draw = torch.randn(shape, generator=spec.generator("comrope-axes"), device="cpu")
        self.theta = undecayed(torch.ones(shape, device="cpu") if self.axes == 1 else draw)

    def amounts(self, coordinates: Tensor) -> Tensor:
        """Return sum_a theta_aj p_a; see :class:`ComRoPE`."""
        return coordinates @ self.theta.double()

    def rates(self, theta: Tensor) -> Tensor:
        """Return the angles of A times those of the blocks."""
        return theta * self.theta[0].double().unsqueeze(-1)


def _of_this_grid(module: nn.Module, state: dict, prefix: str, *rest: object) -> None:
    """Give a checkpoint that is too old to contain its grid the one of this module."""
    state.setdefault(f"{prefix}grid", module.grid)


# --- generators --------------------------------------------------------------------------------


def line_start(heads: int, blocks: int, block: int) -> Tensor:
    """Return L (H, J, b, b), with which exp(s (L - L^T)) is RoPE's rotation of the pairs.

    Entry (2i + 1, 2i) of block j is 10000^(-n/E), n the number of the pair and E the number of
    pairs in a head. An odd block has one feature that is not rotated.
    """
    theta = bands(2 * blocks * (block // 2)).view(blocks, -1)
    return generator_of(theta, block).tril().float().expand(heads, -1, -1, -1)


def distinct(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct positions (M',) and the index (M,) of each position among them.

    Where code may not decide by values (under torch.compile and the like), all are returned.
    """
    positions = positions.flatten()
    if not may_read_values(positions):
        return positions, torch.arange(len(positions), device=positions.device)
    return torch.unique(positions, return_inverse=True)
