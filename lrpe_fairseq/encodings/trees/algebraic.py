"""Algebraic positional encodings (Kogkalidis et al., 2024) of sequences, cycles, trees and sums.

A position is an element p of a group, and M(p) is an orthogonal matrix with M(p r) = M(p) M(r), so
the score q^T M(p^-1 r) k depends only on the path from p to r. M is fixed by the matrices of the
generators of the group, which are learned, W = exp(B) with B = L - L^T.

Axes: B batch, H heads, T time, D head width, d width of a component's slice, k branches of a tree.
"""

import math
import re
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.departures import Departure
from lrpe_fairseq.encodings.core.forms import Fold, Form, Planes
from lrpe_fairseq.encodings.core.grids import axes_of
from lrpe_fairseq.encodings.core.options import LONGEST, EncodingSpec, option, shortened
from lrpe_fairseq.encodings.core.parameters import undecayed
from lrpe_fairseq.encodings.core.positions import Lags, PositionCache, constant
from lrpe_fairseq.encodings.core.protocols import Card, Properties, QueryKeyEncoding
from lrpe_fairseq.encodings.rotations.cores import bands, phases_by_head, rotate_both, rotate_pairs
from lrpe_fairseq.encodings.rotations.generators import (
    EIGENBASIS,
    Eigen,
    Spectrum,
    canonical,
    encode_both,
    exponential,
    from_groups,
    generator_of,
    projected,
    skew_of_triangle,
    to_groups,
    triangle,
    turn,
)
from lrpe_fairseq.encodings.trees import nodes
from lrpe_fairseq.encodings.trees.products import tree_turn
from lrpe_fairseq.errors import ChoiceError

START_STD = 0.02  # of the entries of a generator under ``ape_init`` "identity"
MOST = 256  # branches of a tree
DIGITS = 20  # of a number, that are read
COMPONENT = re.compile(r"sequence|tree([1-9]\d*)|cycle([1-9]\d*)")
COMPONENTS = "sequence, treeK or cycleM (K branches, M positions)"
DEPTH = "the depth of the deepest node is the number of products"
"""Why trees read values; see ``Encoding.host_reads``."""
SOURCE = "[Kogkalidis, Bernardy and Garg (2024)](https://arxiv.org/abs/2312.16045)"


@dataclass(frozen=True)
class APEOptions:
    """Options of algebraic encodings."""

    ape_init: str = option(
        "rope",
        "APE: start from the rotations of RoPE, or close to the identity (entries of B from "
        "N(0, 0.02^2))",
        choices=("rope", "identity"),
    )
    ape_generator: str = option(
        "exponential",
        "APE: learn W = exp(B), or W = P R(theta) P^T (canonical), which folds into the "
        "projections of softmax attention; trees have no canonical form",
        choices=("exponential", "canonical"),
    )
    ape_learned: bool = option(True, "APE: learn the generators; otherwise they stay as they start")
    ape_branches: int = option(2, "ape-tree: number k of branches of a node", least=1, most=MOST)
    ape_decay: float = option(
        1.0,
        "APE: C of the locality factor C^n of the score, n the number of steps between two "
        "positions (0.98 in the published code)",
        above=0,
        most=1,
    )


# --- the encodings -----------------------------------------------------------------------------


class Algebraic(QueryKeyEncoding):
    """q~_p = M_1(p) q + ... + M_n(p) q, one component for each equal slice of a head's features.

    A component is "sequence" (positions are integers), "tree<k>" (positions are the int64 codes of
    the nodes of a k-ary tree, ``nodes``) or "cycle<m>" (integers modulo m). All components read
    the same position. With ``grid_width`` W and ``position_grid`` "flat" a sum of two components
    reads the row s // W and the column s mod W. Every head has its own generators, and all layers
    share them. A slice of a sum has even width, and features that fill no slice are unchanged.

    Trap: a score in a tree is not relative under addition of codes, so it is not relative there.
    It is unchanged if all positions are moved below one node (``nodes.concat``).

    Args: components: joined by "+".
    Raises: ChoiceError for an unknown component, slices narrower than 2 features, a tree with the
        canonical generator, or more than two components on a grid.
    """

    Options = APEOptions
    shared = shared_by_stacks = True
    keys_by_head = True
    departures = {
        "ape-half-bands": Departure(
            paper="generators start as RoPE's rotations (APE, Kogkalidis et al. 2024)",
            code="half of RoPE's frequencies, each twice, and turning the other way",
            ours="all frequencies, in closed form",
        ),
        "ape-full-matrix": Departure(
            paper="B = A - A^T with an upper triangular A",
            code="a full matrix A: its two triangles both move, so Adam moves B twice as fast",
            ours="a packed triangle",
        ),
        "ape-equal-branches": Departure(
            paper="operators of a tree start like those of RoPE",
            code="one start for all branches, so siblings have the same encoding at first",
            ours="branches rotate different planes from the start",
        ),
        "ape-shifted-paths": Departure(
            paper="a node of a tree is represented by its path",
            code="node n has the path of node n + 1, so a child is not one step from its parent",
            ours="the path of n",
        ),
        "ape-tree-shared-heads": Departure(
            paper="operators for each head",
            code="one set for all heads in trees; the parameters of the others are not used",
            ours="a set for each head",
        ),
    }

    def __init__(self, spec: EncodingSpec, components: str) -> None:
        super().__init__(spec)
        names = components.split("+")
        self._on_grid = bool(spec.options.grid_width) and len(names) > 1
        if self._on_grid and len(names) > 2:
            raise ChoiceError(
                f"{components!r} has {len(names)} components, but a grid has one row and one "
                "column; name two components or leave --grid-width at 0"
            )
        self.width = spec.head_dim if len(names) == 1 else spec.head_dim // len(names) // 2 * 2
        if self.width < 2:
            raise ChoiceError(
                f"{components!r} needs a head width of at least 2 for each component, got "
                f"{spec.head_dim}"
            )
        self.streams = tuple(map(_stream, range(len(names))))
        self.components = nn.ModuleList(
            _component(name, spec, self.width, number) for number, name in enumerate(names)
        )
        decay = self.options.ape_decay
        self._decays = decay != 1
        self._on_line = len(names) == 1 and self.components[0].on_line
        self.serves_linear = self._on_line or not self._decays
        self.turns = not self._decays
        # positive features that are summed over a whole cycle cancel
        self.denominator_vanishes = all(getattr(c, "period", 0) for c in self.components)
        of_trees = [isinstance(c, Tree) for c in self.components]
        self.reads_nodes = trees = any(of_trees)
        one_tree = all(of_trees) and (self._on_grid or len(set(names)) == 1)
        self.properties = Properties(
            relative="no" if trees else "exact",
            relative_by="the path from one node to the other" if one_tree else "",
            shift_unit=spec.options.grid_width if self._on_grid and not trees else 1,
        )
        self._text = components
        self.card = _card(trees)
        reasons = []
        if trees:
            reasons.append(DEPTH)
        if self.options.ape_learned:
            reasons.append(EIGENBASIS)
        self.host_reads = "; ".join(reasons)

    def share_with(self, owner: "Algebraic") -> None:
        """Use the generators of ``owner``, and its caches of their spectra."""
        self.components = owner.components

    def summary(self) -> str:
        """Name the components of a composed name."""
        text = f"learned orthogonal generators: {self._text.replace('+', ' + ')}"
        return text if type(self) is Algebraic else super().summary()

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode q and k; see :meth:`QueryKeyEncoding.forward`."""

        def encode(x: Tensor, positions: Tensor) -> Tensor:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            *slices, rest = self._slices(wide)
            each = zip(self.components, slices, self._axes(positions), strict=True)
            parts = [component(part, axis) for component, part, axis in each]
            return _joined([*parts, rest]).to(x.dtype)

        return encode_both(encode, q, k, q_positions, k_positions)

    def fold(self) -> Fold | None:
        """Fold P^T of every component; see :meth:`QueryKeyEncoding.fold`."""
        folds = [component.fold() for component in self.components]
        if None in folds:
            return None
        bases, angles = zip(*folds, strict=True)

        def projection(x: Tensor) -> Planes:
            *slices, rest = self._slices(x)
            return (_joined([*map(projected, slices, bases), rest]),)

        def turn_slices(
            q: Planes, k: Planes, q_positions: Tensor, k_positions: Tensor
        ) -> tuple[Tensor, Tensor]:
            *q_slices, q_rest = self._slices(q[0])
            *k_slices, k_rest = self._slices(k[0])
            q_axes = self._axes(q_positions)
            k_axes = self._axes(k_positions)
            q_parts, k_parts = [], []
            for i, component in enumerate(self.components):
                q_part, k_part = rotate_both(
                    q_slices[i],
                    k_slices[i],
                    angles[i],
                    component.wrapped(q_axes[i]),
                    component.wrapped(k_axes[i]),
                )
                q_parts.append(q_part)
                k_parts.append(k_part)
            return _joined([*q_parts, q_rest]), _joined([*k_parts, k_rest])

        return Fold(projection, turn_slices)

    def _slices(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the features of each component, (..., d), and those of none."""
        used = [self.width] * len(self.components)
        return x.split([*used, x.shape[-1] - sum(used)], -1)

    def _axes(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the position that each component reads; the same objects for the same object."""
        if self._on_grid:
            return axes_of(positions, self.spec.options.grid_width)
        return (positions,) * len(self.components)

    def log_decay(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Return log ``ape_decay`` for positions on a line, (H,) float32, or None."""
        if not self._decays or not self._on_line:
            return None
        each = (math.log(self.options.ape_decay),) * self.spec.num_heads
        return constant(each, torch.float32, torch.device(device))

    def form(self, lags: Lags | None, positions: Tensor) -> Form:
        """Return the decay of the score: per token on a line, else per step."""
        if self._decays and not self._on_line:
            return Form(factor=self._factor)
        return Form(score_decay=self.log_decay(positions.device))

    def _factor(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return ``ape_decay`` to the number of steps, float64 (T, S) or (B, T, S)."""
        each = zip(self.components, self._axes(q_positions), self._axes(k_positions), strict=True)
        steps = sum(c.distance(q.unsqueeze(-1), k.unsqueeze(-2)) for c, q, k in each)
        return self.options.ape_decay ** steps.double()


class APE(Algebraic):
    """Learned orthogonal powers: q~_s = W^s q with W = exp(L - L^T) per head, for all layers.

    With the start "rope" it is RoPE at first, and it is always LRPE with a learned orthogonal P and
    learned angles, one set for each head.
    """

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec, "sequence")


class APETree(Algebraic):
    """One learned orthogonal matrix for each branch, multiplied along the path to a tree's node.

    q~_p = W_(w_1) ... W_(w_n) q for the path w_1 ... w_n from the root to node p. Positions are
    int64 codes (``nodes``): the root is 0 and child b of n is k n + b + 1, k = ``ape_branches``.
    Tokens without explicit positions fill the complete tree breadth-first.
    """

    def __init__(self, spec: EncodingSpec) -> None:
        k = spec.options.of(APEOptions).ape_branches
        super().__init__(spec, f"tree{k}")


def _card(trees: bool) -> Card:
    if trees:
        return Card(
            mechanism="tree and grid",
            equation=r"(M_p q_p)^\top M_r k_r,\quad M_{w_1 \ldots w_n} = W_{w_1} \cdots W_{w_n}, "
            r"\quad W_b = \exp(L_b - L_b^\top)",
            cost="O(D^2) per token, head and step of its path",
            beyond="deeper nodes are longer products of the same matrices",
            source=SOURCE,
        )
    return Card(
        mechanism="tree and grid",
        equation=r"q_s^\top W^{t-s} k_t,\quad W = \exp(L - L^\top)",
        cost="O(D) per token and head in softmax attention, and one eigenbasis, O(H D^3)",
        beyond="nothing: the angles grow with the position, as in RoPE",
        source=SOURCE,
    )


def _joined(parts: SequenceOf[Tensor]) -> Tensor:
    parts = [part for part in parts if part.shape[-1]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


# --- components --------------------------------------------------------------------------------


class Component(nn.Module):
    """M(p) on one slice of the features.

    A call encodes x (n, B, H, T, d), float32 or float64, at positions (T,) or (B, T). ``on_line``
    is true if the number of steps between two positions is their difference.
    """

    on_line = False
    period: int = 0
    """Positions are taken modulo it, unless it is 0."""

    def fold(self) -> tuple[Tensor, Tensor] | None:
        """Return P (H, d, d) and theta (H, d / 2) if M(s) = P R(s theta) P^T, else None."""
        return None

    def wrapped(self, positions: Tensor) -> Tensor:
        """Return the positions modulo the period."""
        return positions % self.period if self.period else positions

    def distance(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the number of steps between positions that broadcast, int64."""
        return (one - other).abs()


class Generator(nn.Module):
    """Learned B = L - L^T (..., d, d), stored as the triangle of L or, if ``full``, as L."""

    def __init__(self, start: Tensor, learned: bool, full: bool = False) -> None:
        super().__init__()
        self.width = start.shape[-1]
        self.full = full
        entries = start / 2 if full else start[..., *triangle(self.width)]
        self.entries = undecayed(entries.float().contiguous(), learned)
        self.spectrum = Spectrum()

    def train(self, mode: bool = True) -> "Generator":
        """Set the mode; the next eigenbasis is computed anew."""
        self.spectrum.forget()
        return super().train(mode)

    def eigen(self, skew: Tensor) -> Eigen:
        """Find the eigenbasis of B; see ``generators.Find``."""
        return self.spectrum.entry(skew, self.entries)

    def forward(self) -> Tensor:
        """Return B, float64."""
        wide = self.entries.double()
        return wide - wide.mT if self.full else skew_of_triangle(wide, self.width)


class Sequence(Component):
    """M(s) = W^s, W = exp(B) for each head."""

    on_line = True

    def __init__(self, spec: EncodingSpec, width: int, number: int) -> None:
        super().__init__()
        options = spec.options.of(APEOptions)
        start = _start(spec, width, (spec.num_heads,), number)
        self.generator = Generator(start, options.ape_learned, _full(spec))

    def fold(self) -> tuple[Tensor, Tensor] | None:
        """Return P and theta of B; see :class:`Component`."""
        return canonical(self.generator(), self.generator.eigen)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Encode; see :class:`Component`."""
        skew = self.generator()
        amounts = positions.flatten().double().expand(len(skew), -1)
        turned = turn(to_groups(x, 1, positions.dim() == 2), skew, amounts, self.generator.eigen)
        return from_groups(turned, x.shape, 1)


class Planar(Component):
    """M(s) = P R(s theta) P^T with an orthogonal P = exp(S) for each head.

    P cancels on the left of the score. theta (H, d // 2) is in radians; in a cycle it is fixed, and
    positions are taken modulo its ``period``.
    """

    def __init__(
        self, spec: EncodingSpec, width: int, number: int, theta: Tensor, period: int = 0
    ) -> None:
        super().__init__()
        options = spec.options.of(APEOptions)
        heads = spec.num_heads
        self.period = period
        self.on_line = not period
        theta = theta.expand(heads, -1).clone()
        self.theta = theta if period else undecayed(theta.float(), options.ape_learned)
        start = theta.new_zeros(heads, width, width)
        if options.ape_init == "identity":
            start = _normal(spec, (heads,), width, number)
        self.projection = Orthogonal(Generator(start, options.ape_learned))

    def fold(self) -> tuple[Tensor, Tensor]:
        """Return P and theta; see :class:`Component`."""
        return self.projection(), self.theta

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Encode; see :class:`Component`."""
        p, theta = self.fold()
        at = phases_by_head(self.wrapped(positions), theta, x.dtype)
        return torch.stack([rotate_pairs(projected(y, p), at) for y in x])

    def distance(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the number of steps, the shorter way round a cycle."""
        lag = (one - other).abs()
        if not self.period:
            return lag
        return torch.minimum(lag % self.period, -lag % self.period)


class Orthogonal(nn.Module):
    """P = exp(S), one for each head."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self) -> Tensor:
        """Return P, float64 (H, d, d)."""
        return exponential(self.generator(), self.generator.eigen)


class Tree(Component):
    """M(w_1 ... w_n) = W_(w_1) ... W_(w_n), W_b = exp(B_b) for each branch and head."""

    def __init__(self, spec: EncodingSpec, width: int, number: int, branches: int) -> None:
        super().__init__()
        options = spec.options.of(APEOptions)
        fidelity = spec.options.fidelity
        self.branches = branches
        self.heads = spec.num_heads
        heads = 1 if "ape-tree-shared-heads" in fidelity else spec.num_heads
        start = _start(spec, width, (branches, heads), number)
        if options.ape_init == "rope" and "ape-equal-branches" not in fidelity:
            start = _in_other_planes(start, spec.generator(_stream(number)))
        self.generator = Generator(start, options.ape_learned, _full(spec))
        self._shifts = "ape-shifted-paths" in fidelity
        self._shifted, self._steps = PositionCache(2), PositionCache(2)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Encode; see :class:`Component`."""
        branches = exponential(self.generator(), self.generator.eigen)
        branches = branches.expand(-1, self.heads, -1, -1)
        positions = self._nodes(positions)
        if positions.dim() == 1:
            return tree_turn(x.flatten(0, 1), branches, positions, self._steps).reshape(x.shape)
        return torch.stack([tree_turn(y, branches, positions, self._steps) for y in x])

    def _nodes(self, positions: Tensor) -> Tensor:
        if not self._shifts:
            return positions
        return self._shifted.get(positions, None, lambda: positions + 1)

    def distance(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the number of steps between nodes."""
        return nodes.tree_distance(self._nodes(one), self._nodes(other), self.branches)


def _component(name: str, spec: EncodingSpec, width: int, number: int) -> Component:
    """Build the component ``name``, the one with this ``number`` of an encoding."""
    match = COMPONENT.fullmatch(name)
    if match is None:
        raise ChoiceError(
            f"unknown component {name!r} of an algebraic encoding; choose {COMPONENTS}"
        )
    # a number of more digits than the limits is out of range, and Python may not read it
    branches, period = (int((digits or "0")[:DIGITS]) for digits in match.groups())
    canonical = spec.options.of(APEOptions).ape_generator == "canonical"
    if branches > MOST or period == 1 or period > LONGEST:
        raise ChoiceError(
            f"component {shortened(name)} is out of range: trees have 1 to {MOST} branches, and "
            f"cycles 2 to {LONGEST:,} positions"
        )
    if period:
        return Planar(spec, width, number, _harmonics(width, period), period)
    if branches > 1 and canonical:
        raise ChoiceError(
            "the generators of a tree do not commute, so they have no canonical form; set "
            "--ape-generator exponential"
        )
    if branches > 1:
        return Tree(spec, width, number, branches)
    if canonical:
        return Planar(spec, width, number, _start_angles(spec, width, number))
    return Sequence(spec, width, number)


# --- starts ------------------------------------------------------------------------------------


def _stream(number: int) -> str:
    """Return the name of the random stream of the component with this number."""
    return f"ape-{number}"


def _bands(spec: EncodingSpec, width: int) -> Tensor:
    theta = bands(width)
    if "ape-half-bands" not in spec.options.fidelity:
        return theta
    return -theta[torch.arange(len(theta), device="cpu") // 2 * 2]


def _start(spec: EncodingSpec, width: int, shape: tuple[int, ...], number: int) -> Tensor:
    """Return the start of generators, (*shape, d, d), by ``ape_init``."""
    if spec.options.of(APEOptions).ape_init == "identity":
        return _normal(spec, shape, width, number)
    return generator_of(_bands(spec, width), width).expand(*shape, -1, -1)


def _start_angles(spec: EncodingSpec, width: int, number: int) -> Tensor:
    """Return the start of the canonical theta, by ``ape_init``, (1 or H, d // 2)."""
    if spec.options.of(APEOptions).ape_init == "rope":
        return _bands(spec, width).unsqueeze(0)
    generator = spec.generator(f"ape-angles-{number}")
    shape = spec.num_heads, width // 2
    return START_STD * torch.randn(shape, generator=generator, device="cpu").double()


def _harmonics(width: int, period: int) -> Tensor:
    """Return 2 pi h / m, float64 (1, d // 2), with h = 1, ..., m // 2, 1, ... and m ``period``."""
    number = torch.arange(width // 2, dtype=torch.float64, device="cpu")
    return (2 * math.pi / period * (1 + number % (period // 2))).unsqueeze(0)


def _normal(spec: EncodingSpec, shape: tuple[int, ...], width: int, number: int) -> Tensor:
    """Return skew-symmetric matrices with entries from N(0, 0.02^2), (*shape, d, d)."""
    size = *shape, width * (width - 1) // 2
    draw = torch.randn(size, generator=spec.generator(_stream(number)), device="cpu").double()
    return skew_of_triangle(START_STD * draw, width)


def _in_other_planes(start: Tensor, generator: torch.Generator) -> Tensor:
    """Permute the features of every branch but the first, (k, H, d, d), the same for all heads."""
    permuted = start.clone()
    for branch in range(1, len(start)):
        order = torch.randperm(start.shape[-1], generator=generator, device="cpu")
        permuted[branch] = start[branch][:, order][:, :, order]
    return permuted


def _full(spec: EncodingSpec) -> bool:
    return "ape-full-matrix" in spec.options.fidelity
