"""Positions on a grid of width W, numbered row by row, for any decomposable encoding."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lrpe_fairseq.encodings.core.grids import axes_of
from lrpe_fairseq.encodings.core.options import EncodingOptions, EncodingSpec
from lrpe_fairseq.encodings.core.protocols import Encoding, QueryKeyEncoding
from lrpe_fairseq.errors import ChoiceError

INNER = (
    "angles",
    "card",
    "before_feature_map",
    "content_scale",
    "denominator_vanishes",
    "keys_by_head",
    "scales",
    "turns",
    "without_absolute",
)
"""Fields of a :class:`GridEncoding` that are those of its parts."""

AXES = {"sum": ("cell",), "axial": ("row", "column")}
"""Names of the encodings of a :class:`GridEncoding`, by ``position_grid``."""


class GridEncoding(QueryKeyEncoding):
    """An encoding of sequences on a grid of width W: row s // W, column s mod W of position s.

    ``position_grid`` "axial" splits the features of each head. One encoding of width D/2 encodes
    the first half by the row, another one the second half by the column. They have separate
    parameters and random parts, and the score is the sum of their scores. It depends on the
    differences of rows and of columns.

    "sum" encodes all features at the position row + column. Cells on one anti-diagonal have the
    same position. The image code of TMLR LRPE does this; the paper does not mention it.

    Args:
        spec: of the whole encoding; ``spec.options`` holds the grid.
        name: the name of the encoding. construct: its constructor, called with a spec.
    Raises: ChoiceError for an encoding that needs the score matrix, has a decay or reads the grid
        itself, or for an odd head width under "axial".
    """

    def __init__(
        self, spec: EncodingSpec, name: str, construct: Callable[[EncodingSpec], Encoding]
    ) -> None:
        super().__init__(spec)
        self.grid = spec.options.position_grid
        names = AXES[self.grid]
        if spec.head_dim % len(names):
            raise ChoiceError(
                f"position grid {self.grid!r} halves the features of a head, so the head width "
                f"must be even, got {spec.head_dim}"
            )
        width = spec.head_dim // len(names)
        for number, axis in enumerate(names):
            seed = len(names) * spec.seed + number
            flat = _options_on(axis, spec.options)
            part = construct(replace(spec, head_dim=width, seed=seed, options=flat))
            part.name = part.inner_name = f"{name} ({axis})"
            setattr(self, axis, part)
        _check(part, name, self.grid)
        for field in INNER:
            setattr(self, field, getattr(part, field))
        unit = 1 if part.properties.relative == "no" else spec.options.grid_width
        self.properties = replace(part.properties, shift_unit=unit)

    @property
    def parts(self) -> list[QueryKeyEncoding]:
        """The encoding of row + column, or those of the row and of the column."""
        return [*self.children()]

    @property
    def feature_factors(self) -> tuple[float, ...] | None:
        """The factors of the features of :attr:`parts`, which are alike in all of them."""
        each = [part.feature_factors for part in self.parts]
        return None if None in each else sum(each, ())

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of the random streams of :attr:`parts`."""
        return self.parts[0].streams

    @property
    def feature_dim(self) -> int:
        """The sum of the widths of :attr:`parts`."""
        return sum(part.feature_dim for part in self.parts)

    def summary(self) -> str:
        """Return the summary of the encoding and the kind of the grid."""
        return f"{self.parts[0].summary()}, on a grid ({self.grid})"

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode q and k by rows and columns; see :meth:`QueryKeyEncoding.forward`."""
        each = [part.forward for part in self.parts]
        return self._by_axis(each, q, k, q_positions, k_positions)

    def in_parts(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode by the parts of the fold of each axis, in the basis of :meth:`encode_both`."""
        each = [part.in_parts for part in self.parts]
        return self._by_axis(each, q, k, q_positions, k_positions)

    def encode_both(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor, phi: bool
    ) -> tuple[Tensor, Tensor]:
        """Encode the features of every part, each with its kernel if it has one."""
        each = [partial(part.encode_both, phi=phi) for part in self.parts]
        return self._by_axis(each, q, k, q_positions, k_positions)

    def _by_axis(
        self,
        encoders: Sequence[Callable[..., tuple[Tensor, Tensor]]],
        q: Tensor,
        k: Tensor,
        q_positions: Tensor,
        k_positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Encode the features of every part by its encoder, at the positions of its axis."""
        q_axes, k_axes = self._axes_of_both(q_positions, k_positions)
        each = zip(encoders, self._split(q), self._split(k), q_axes, k_axes, strict=True)
        q_parts, k_parts = [], []
        for encode, q_part, k_part, q_axis, k_axis in each:
            q_encoded, k_encoded = encode(q_part, k_part, q_axis, k_axis)
            q_parts.append(q_encoded)
            k_parts.append(k_encoded)
        return _joined(q_parts), _joined(k_parts)

    def has_one_launch(self, q: Tensor, k: Tensor) -> bool:
        """True if every part has it; see :meth:`QueryKeyEncoding.has_one_launch`."""
        each = zip(self.parts, self._split(q), self._split(k), strict=True)
        return all(part.has_one_launch(*features) for part, *features in each)

    def _axes_of_both(
        self, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the positions of q and of k on each axis; the same tensors if they are equal."""
        q_axes = self._axes(q_positions)
        k_axes = q_axes if k_positions is q_positions else self._axes(k_positions)
        return q_axes, k_axes

    def _axes(self, positions: Tensor) -> tuple[Tensor, ...]:
        return axes_of(positions, self.spec.options.grid_width, self.grid)

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(len(self.parts), -1)


def _options_on(axis: str, options: EncodingOptions) -> EncodingOptions:
    """Return the options of the encoding of an axis, which is a sequence without a grid.

    Its length of training is the number of positions on the axis.
    """
    values = dict(options.values)
    length = values.get("context_length")
    if length:
        rows = math.ceil(length / options.grid_width)
        of_axis = {"row": rows, "column": options.grid_width, "cell": rows + options.grid_width - 1}
        values["context_length"] = of_axis[axis]
    return EncodingOptions(options.fidelity, **values)


def _joined(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)


def _check(part: Encoding, name: str, grid: str) -> None:
    """Refuse an encoding that :class:`GridEncoding` does not support."""
    refused = f"position encoding {name!r} cannot be used with position grid {grid!r}: "
    if not isinstance(part, QueryKeyEncoding):
        raise ChoiceError(refused + "it needs the score matrix, which has no rows and columns")
    if part.reads_grid:
        raise ChoiceError(refused + "it reads rows and columns itself; leave the grid at 'flat'")
    if part.reflections is not None:
        raise ChoiceError(refused + "its reflections follow the order of tokens")
    if part.has_states:
        raise ChoiceError(refused + "its states follow the order of tokens")
    if part.whole_texts:
        raise ChoiceError(refused + "its angles depend on the length of a text")
    if part.increments is not None:
        raise ChoiceError(refused + "its positions are summed from the text, without rows")
    if part.forget_gate is not None or part.log_decay() is not None:
        raise ChoiceError(refused + "its decay counts tokens, not rows and columns")
    if not part.form(None, torch.zeros(1, dtype=torch.int64, device="cpu")).has_only():
        raise ChoiceError(
            refused + "its decay counts the steps between two positions, not rows and columns; "
            "leave --ape-decay at 1"
        )
