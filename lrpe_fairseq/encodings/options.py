"""The argument of every encoding's constructor: widths, seed, and the options of single methods."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch

from lrpe_fairseq.errors import ChoiceError

POSITION_GRIDS = ("flat", "sum", "axial")
"""Position of the cell at (row, column) of a grid: its number row by row; row + column; or the row
for one half of the features and the column for the other half (``grid.GridEncoding``)."""

OptionsOf = TypeVar("OptionsOf")


def option(default: Any, help_text: str, choices: tuple[str, ...] | None = None) -> Any:
    """Return a field of a class of options: default, help text and allowed values."""
    return field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True, init=False)
class EncodingOptions:
    """Options of individual methods, and the departures that are switched on.

    fidelity: names of departures of the authors' code from the papers. Empty means that the papers
        are followed.
    grid_width: W of a grid whose cells are numbered row by row: position s is row s // W, column
        s mod W. 0: positions are on a line. Read by the encodings that have two axes.
    position_grid: how the other encodings read a grid, a name in :data:`POSITION_GRIDS`.
    grid_height: number of rows, 0 if as many as columns. Read by encodings whose coordinates are
        fractions of the grid.
    values: the options that differ from their defaults, by name; see each class's ``Options``.

    >>> EncodingOptions(toy_size=3).values
    {'toy_size': 3}
    """

    fidelity: frozenset[str]
    grid_width: int
    position_grid: str
    grid_height: int
    values: Mapping[str, Any]

    def __init__(
        self,
        fidelity: frozenset[str] = frozenset(),
        grid_width: int = 0,
        position_grid: str = "flat",
        grid_height: int = 0,
        **values: Any,
    ) -> None:
        _check_grid(grid_width, position_grid, grid_height)
        object.__setattr__(self, "fidelity", fidelity)
        object.__setattr__(self, "grid_width", grid_width)
        object.__setattr__(self, "position_grid", position_grid)
        object.__setattr__(self, "grid_height", grid_height)
        object.__setattr__(self, "values", values)

    def of(self, kind: type[OptionsOf]) -> OptionsOf:
        """Return the options of one method, whose ``Options`` class is ``kind``.

        Raises: ChoiceError for a value that is not among an option's choices.
        """
        own = {f.name: self.values[f.name] for f in fields(kind) if f.name in self.values}
        for f in fields(kind):
            choices = f.metadata.get("choices")
            if choices and own.get(f.name, f.default) not in choices:
                raise ChoiceError(
                    f"unknown {f.name} {own[f.name]!r}; choose one of {', '.join(choices)}"
                )
        return kind(**own)


def _check_grid(grid_width: int, position_grid: str, grid_height: int) -> None:
    if min(grid_width, grid_height) < 0:
        raise ChoiceError(
            "width and height of a grid cannot be negative, got "
            f"--grid-width {grid_width} and --grid-height {grid_height}"
        )
    if grid_height and not grid_width:
        raise ChoiceError("--grid-height needs --grid-width, the number of columns of the grid")
    if position_grid not in POSITION_GRIDS:
        raise ChoiceError(
            f"unknown position grid {position_grid!r}; choose one of {', '.join(POSITION_GRIDS)}"
        )
    if position_grid != "flat" and not grid_width:
        raise ChoiceError(
            f"position grid {position_grid!r} needs the number of columns of the grid; set "
            "--grid-width"
        )


NUMBERS = {
    "householder": 1,
    "permutation": 2,
    "permuteformer": 3,
    "t5": 4,
    "transformer-xl": 5,
    "spe-code": 6,
    "spe-gate": 7,
    "forget-gate": 8,
    "kerple-log": 20,
    "kerple-power": 21,
    "rope-2d-mixed": 21,
    "fire": 22,
    "fope": 22,
    "cape": 23,
    "selective": 30,
    "liere": 31,
    "shaw": 31,
    "comrope": 32,
    "deberta": 32,
    "comrope-axes": 33,
    "output-gate": 41,
    "kv-shift": 42,
    "path": 43,
    "tape": 50,
    **{f"ape-{number}": 41 + number for number in range(20)},
    **{f"ape-angles-{number}": 61 + number for number in range(20)},
}
"""Numbers of random streams. A new stream needs none: these have one because models started from
them before streams were derived from names, and keep their start. Two streams of one number must
not be in one layer, or one of them is drawn ``beside`` the other (:meth:`EncodingSpec.generator`).
"""


@dataclass(frozen=True)
class EncodingSpec:
    """The argument of every encoding's constructor.

    head_dim: width D of one head. num_heads: H. causal: True if s attends to t <= s only.
    seed: seed of a separate generator for the encoding's fixed random parts (Householder vectors,
        permutations, noise in evaluation). Models that differ in their encoding only therefore
        start from the same weights under one training seed.
    options: options of individual methods.
    Raises: ChoiceError unless both sizes are positive.
    """

    head_dim: int
    num_heads: int
    causal: bool = False
    seed: int = 0
    options: EncodingOptions = EncodingOptions()

    def __post_init__(self) -> None:
        if self.head_dim < 1 or self.num_heads < 1:
            raise ChoiceError(
                f"head_dim and num_heads must be positive, got {self.head_dim} and {self.num_heads}"
            )

    def generator(self, stream: str = "", beside: Collection[str] = ()) -> torch.Generator:
        """Return a CPU generator for this encoding; streams of different names are independent.

        stream: its name. A name of :data:`NUMBERS` has the stream of this number, unless one of
            the names ``beside`` has the number, too; any other stream follows from seed and name.
        beside: names of streams that belong to the same layer.
        """
        number = NUMBERS.get(stream)
        taken = [NUMBERS.get(other) for other in beside if other != stream]
        if number is not None and number not in taken:
            return torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + number)
        digest = hashlib.blake2b(f"{self.seed} {stream}".encode(), digest_size=7).digest()
        return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big"))


def query_scale(spec: EncodingSpec) -> float:
    """Return the factor of q in softmax attention, without a ``content_scale``.

    It is D^-0.5, or (H D)^-0.5 with the departure ``embed-dim-scale``.
    """
    wide = "embed-dim-scale" in spec.options.fidelity
    return (spec.num_heads * spec.head_dim if wide else spec.head_dim) ** -0.5
