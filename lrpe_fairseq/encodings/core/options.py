"""The argument of every encoding's constructor: widths, seed, and the options of single methods.

Every value is checked in these constructors. The parser, a YAML, the Python API and a checkpoint
all go through them.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from numbers import Integral, Real
from typing import Any, TypeVar

import torch

from lrpe_fairseq.errors import ChoiceError, did_you_mean

POSITION_GRIDS = ("flat", "sum", "axial")
"""Position of the cell at (row, column) of a grid: its number row by row; row + column; or the row
for one half of the features and the column for the other half (``grid.GridEncoding``)."""

LONGEST = 2**31
"""Positions reach this number, so no length, distance or side of a grid is larger."""
MOST_ROWS = 2**20
"""Rows of a learned table, at most: one for each of a million distances."""
LARGEST_SEED = 2**43
"""Of an encoding: a generator multiplies the seed by 1,000,003, which must fit in int64. The seed
of a layer of a model is 1000 ``--encoding-seed`` plus its number."""
LARGEST_FLOAT = torch.finfo(torch.float32).max

OptionsOf = TypeVar("OptionsOf")


def option(
    default: Any,
    help_text: str,
    choices: tuple[str, ...] | None = None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """Return a field of a class of options: default, help text and allowed values.

    choices: the allowed texts. least, most: the smallest and the largest allowed number. above: a
    number that is too small, for an open interval. The default is allowed in any case.
    """
    allowed = {"choices": choices, "least": least, "above": above, "most": most}
    return field(default=default, metadata={"help": help_text, **allowed})


def flag_of(name: str) -> str:
    """Return the name of an option on the command line.

    >>> flag_of("fox_bias")
    '--fox-bias'
    """
    return "--" + name.replace("_", "-")


def check_option(own: Field, value: Any) -> None:
    """Check the value of one option, the field ``own`` of a class of options.

    Raises: ChoiceError for a value of another type, not among its choices or out of its range.
    """
    choices = own.metadata.get("choices")
    if choices:
        if value not in choices:
            known = ", ".join(choices)
            raise ChoiceError(f"unknown {own.name} {_shown(value)}; choose one of {known}")
    elif own.type is bool:
        if not isinstance(value, bool):
            raise ChoiceError(f"{flag_of(own.name)} must be true or false, not {_shown(value)}")
    elif own.type is str:
        if not isinstance(value, str):
            raise ChoiceError(f"{flag_of(own.name)} must be a text, not {_shown(value)}")
    elif value is not None or own.default is not None:
        bounds = {name: own.metadata.get(name) for name in ("least", "above", "most")}
        kind = Real if own.type is float else Integral
        check_number(flag_of(own.name), value, kind, **bounds, usual=own.default)


def check_number(
    name: str,
    value: Any,
    kind: type = Integral,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    usual: float | None = None,
) -> None:
    """Check a number.

    name: of the option, for the sentence. kind: Integral, or Real. usual: a number out of the range
        that is allowed.
    Raises: ChoiceError for another type, for a number that float32 cannot hold, and for one out of
        range.
    """
    whole = kind is Integral
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = "a whole number" if whole else "a number"
        raise ChoiceError(f"{name} must be {wanted}, not {_shown(value)}")
    shown = _shown(value) if whole else f"{value:g}"
    if not whole and not abs(value) <= LARGEST_FLOAT:
        raise ChoiceError(f"{name} must be a finite number, not {shown}")
    limits = {"at least": least, "above": above, "at most": most}
    texts = [f"{word} {bound:,}" for word, bound in limits.items() if bound is not None]
    too_small = (least is not None and value < least) or (above is not None and value <= above)
    too_large = most is not None and value > most
    if value != usual and (too_small or too_large):
        raise ChoiceError(f"{name} must be {' and '.join(texts)}, not {shown}")


def _shown(value: Any) -> str:
    """Return a value for a sentence, cut if it is long."""
    try:
        return shortened(value)
    except ValueError:  # Python does not write an integer of more than 4,300 digits
        return "a number of thousands of digits"


def shortened(value: Any) -> str:
    """Return the first 80 characters of ``repr`` of a value."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


class _Methods:
    """What the constructors below know of the methods: :func:`register_methods` fills it."""

    kinds: Callable[[], Collection[type]]
    parse_departures: Callable[[str | Collection[str]], frozenset[str]]


_METHODS = _Methods()


def register_methods(
    kinds: Callable[[], Collection[type]],
    parse_departures: Callable[[str | Collection[str]], frozenset[str]],
) -> None:
    """Make the options of all methods known; the package calls it once, when it is imported.

    kinds: returns the classes of options. parse_departures: see ``fidelity.parse_departures``.
    """
    _METHODS.kinds = kinds
    _METHODS.parse_departures = parse_departures


@dataclass(frozen=True, init=False)
class EncodingOptions:
    """Options of individual methods, and the departures that are switched on.

    fidelity: departures of the authors' code from the papers: a text as of ``--fidelity`` (such as
        "published"), or a collection of names. Empty means that the papers are followed. It is
        stored as the set of the names.
    grid_width: W of a grid whose cells are numbered row by row: position s is row s // W, column
        s mod W. 0: positions are on a line. Read by the encodings that have two axes.
    position_grid: how the other encodings read a grid, a name in :data:`POSITION_GRIDS`.
    grid_height: number of rows, 0 if as many as columns. Read by encodings whose coordinates are
        fractions of the grid.
    values: the options that differ from their defaults, by name; see each class's ``Options``. All
        are checked, also those of methods that are not built, which are ignored.
    Raises: ChoiceError for an unknown departure or option, and for an impossible value.

    >>> EncodingOptions(t5_max_distance=80).values
    {'t5_max_distance': 80}
    """

    fidelity: frozenset[str]
    grid_width: int
    position_grid: str
    grid_height: int
    values: Mapping[str, Any]

    def __init__(
        self,
        fidelity: str | Collection[str] = frozenset(),
        grid_width: int = 0,
        position_grid: str = "flat",
        grid_height: int = 0,
        **values: Any,
    ) -> None:
        _check_grid(grid_width, position_grid, grid_height)
        object.__setattr__(self, "fidelity", _departures(fidelity))
        object.__setattr__(self, "grid_width", grid_width)
        object.__setattr__(self, "position_grid", position_grid)
        object.__setattr__(self, "grid_height", grid_height)
        plain = {name: str(v) if isinstance(v, Enum) else v for name, v in values.items()}
        object.__setattr__(self, "values", plain)
        if plain:
            self._check_values()

    def _check_values(self) -> None:
        """Check names and values, and the classes of options as wholes."""
        kinds = _METHODS.kinds()
        known = {field.name: field for kind in kinds for field in fields(kind)}
        for name, value in self.values.items():
            if name not in known:
                raise ChoiceError(f"no encoding has the option {name!r}{did_you_mean(name, known)}")
            check_option(known[name], value)
        for kind in kinds:
            self.of(kind)
        self._check_length()

    def _check_length(self) -> None:
        """Refuse a length of training that no scaling, spectrum or floor of angles reads."""
        length = self.values.get("context_length")
        unscaled = self.values.get("context_scaling", "none") == "none"
        unfloored = self.values.get("angle_floor", "none") == "none"
        by_turns = self.values.get("rotation_spectrum") == "turns"
        if length and unscaled and unfloored and not by_turns:
            raise ChoiceError(
                f"--context-length {length} needs --context-scaling yarn, yarn-printed, llama3, "
                "dynamic or longrope, --rotation-spectrum turns, or --angle-floor: choose one of "
                "them, or leave --context-length out"
            )

    def of(self, kind: type[OptionsOf]) -> OptionsOf:
        """Return the options of one method, whose ``Options`` class is ``kind``."""
        chosen = {f.name: self.values[f.name] for f in fields(kind) if f.name in self.values}
        return kind(**chosen)


def _departures(given: str | Collection[str]) -> frozenset[str]:
    """Return the names of departures that are given as to :class:`EncodingOptions`."""
    if isinstance(given, frozenset) and not given:
        return given
    return _METHODS.parse_departures(given)


def _check_grid(grid_width: int, position_grid: str, grid_height: int) -> None:
    check_number("--grid-width", grid_width, least=0, most=LONGEST)
    check_number("--grid-height", grid_height, least=0, most=LONGEST)
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
        permutations, noise in evaluation), at most :data:`LARGEST_SEED` in size. Models that differ
        in their encoding only therefore start from the same weights under one training seed.
    options: options of individual methods.
    width: C, the width of the layer's input, which gates and reflections read; None for H D.
    score_scale: the factor of q k^T in softmax attention; None for D^-0.5.
    Raises: ChoiceError unless all sizes are positive, or for another type of a value.
    """

    head_dim: int
    num_heads: int
    causal: bool = False
    seed: int = 0
    options: EncodingOptions = EncodingOptions()
    width: int | None = None
    score_scale: float | None = None

    def __post_init__(self) -> None:
        check_number("head_dim", self.head_dim, least=1, most=LONGEST)
        check_number("num_heads", self.num_heads, least=1, most=LONGEST)
        if self.width is not None:
            check_number("the width of a layer", self.width, least=1, most=LONGEST)
        if self.score_scale is not None:
            check_number("score_scale", self.score_scale, Real, above=0)
        check_number(
            "the seed of an encoding (1000 --encoding-seed plus the layer)",
            self.seed,
            least=-LARGEST_SEED,
            most=LARGEST_SEED,
        )
        if not isinstance(self.causal, bool):
            raise ChoiceError(f"causal must be True or False, not {_shown(self.causal)}")

    @property
    def input_width(self) -> int:
        """C, the width of the layer's input."""
        return self.num_heads * self.head_dim if self.width is None else self.width

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

    It is ``score_scale`` if that is given, else D^-0.5, or C^-0.5 with the departure
    ``embed-dim-scale``.
    """
    if spec.score_scale is not None:
        return spec.score_scale
    wide = "embed-dim-scale" in spec.options.fidelity
    return (spec.input_width if wide else spec.head_dim) ** -0.5
