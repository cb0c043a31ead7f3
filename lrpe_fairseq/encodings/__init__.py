"""Relative positional encodings by name. Pure PyTorch; fairseq is not needed.

Command-line choices, tests, benchmark rows and the tables of docs/encodings.md are derived
from :data:`ENCODINGS`. To add an encoding, write one file and add one line here.
"""

from collections.abc import Callable, Collection
from dataclasses import Field, fields
from functools import cache, partial
from typing import Any, NamedTuple

from lrpe_fairseq.encodings.core.options import LONGEST as LONGEST
from lrpe_fairseq.encodings.core.options import (
    EncodingOptions,
    EncodingSpec,
    OptionsOf,
    flag_of,
    register_methods,
    shortened,
)
from lrpe_fairseq.encodings.core.options import check_number as check_number
from lrpe_fairseq.encodings.core.protocols import Encoding
from lrpe_fairseq.encodings.core.protocols import QueryKeyEncoding as QueryKeyEncoding
from lrpe_fairseq.encodings.core.protocols import ScoreEncoding as ScoreEncoding
from lrpe_fairseq.encodings.none import NoEncoding
from lrpe_fairseq.encodings.rotations.angles import AngleOptions
from lrpe_fairseq.encodings.rotations.cores import CORES
from lrpe_fairseq.encodings.rotations.cosformer import CosFormer
from lrpe_fairseq.encodings.rotations.fope import FoPE
from lrpe_fairseq.encodings.rotations.lie import ComRoPEAP, ComRoPELD, LieRE
from lrpe_fairseq.encodings.rotations.lrpe import LRPE
from lrpe_fairseq.encodings.rotations.permuteformer import PermuteFormer
from lrpe_fairseq.encodings.rotations.projections import PROJECTIONS
from lrpe_fairseq.encodings.rotations.rope_2d import RoPE2D, RoPE2DMixed
from lrpe_fairseq.encodings.rotations.scaling import RotationOptions
from lrpe_fairseq.encodings.rotations.spe import SPE
from lrpe_fairseq.encodings.rotations.tape import TAPE
from lrpe_fairseq.encodings.scores.alibi import ALiBi
from lrpe_fairseq.encodings.scores.cape import CAPEFIRE, CAPEALiBi, CAPEKerple
from lrpe_fairseq.encodings.scores.cope import CoPE
from lrpe_fairseq.encodings.scores.deberta import DeBERTa
from lrpe_fairseq.encodings.scores.fire import FIRE
from lrpe_fairseq.encodings.scores.grape_a import GrapeA
from lrpe_fairseq.encodings.scores.grape_ap import GrapeAP
from lrpe_fairseq.encodings.scores.kerple import KerpleLog, KerplePower
from lrpe_fairseq.encodings.scores.sandwich import Sandwich
from lrpe_fairseq.encodings.scores.shaw import Shaw
from lrpe_fairseq.encodings.scores.stick_breaking import StickBreaking
from lrpe_fairseq.encodings.scores.t5 import T5Bias
from lrpe_fairseq.encodings.scores.transformer_xl import TransformerXL
from lrpe_fairseq.encodings.trees.algebraic import APE, COMPONENT, COMPONENTS, Algebraic, APETree
from lrpe_fairseq.encodings.wrappers.channel import can_be_gated_by_channel, gated_channel
from lrpe_fairseq.encodings.wrappers.delta import Delta
from lrpe_fairseq.encodings.wrappers.fox import FoX, can_be_gated, gated
from lrpe_fairseq.encodings.wrappers.grid import GridEncoding
from lrpe_fairseq.encodings.wrappers.path import Path, can_be_carried, path
from lrpe_fairseq.encodings.wrappers.selective import SelectiveOptions, can_be_selective, selective
from lrpe_fairseq.errors import ChoiceError, did_you_mean

Constructor = type[Encoding] | partial[Encoding]
"""An encoding class, or one with some arguments bound; called with an :class:`EncodingSpec`."""


def _lrpe(projection: str, core: str) -> partial[Encoding]:
    """Return a constructor of one member of the LRPE family."""
    return partial(LRPE, projection=projection, core=core)


ENCODINGS: dict[str, Constructor] = {
    "none": NoEncoding,
    "rope": _lrpe("identity", "rotation"),
    "permuteformer": PermuteFormer,
    "spe": SPE,
    "t5": T5Bias,
    "transformer-xl": TransformerXL,
    "lrpe-type1": _lrpe("householder", "rotation-half"),
    "lrpe-type2": _lrpe("householder", "rotation-learned"),
    "lrpe-type3": _lrpe("householder-learned", "rotation-learned"),
    "lrpe-type4": _lrpe("householder", "permutation"),
    "lrpe-type5": _lrpe("odd-even", "rotation-half"),
    "lrpe-type6": _lrpe("odd-even", "rotation-learned"),
    "lrpe-type7": _lrpe("odd-even", "permutation"),
    "lrpe-type8": _lrpe("fourier", "unitary"),
    "lrpe-tmlr-type1": _lrpe("householder", "unitary-learned"),
    "lrpe-tmlr-type2": _lrpe("householder", "rotation-learned"),
    "lrpe-tmlr-type3": _lrpe("householder", "permutation"),
    "alibi": ALiBi,
    "fox": FoX,
    "path": Path,
    "cosformer": CosFormer,
    "rope-2d": RoPE2D,
    "rope-2d-mixed": RoPE2DMixed,
    "liere": LieRE,
    "comrope-ap": ComRoPEAP,
    "comrope-ld": ComRoPELD,
    "fope": FoPE,
    "ape": APE,
    "ape-tree": APETree,
    "kerple-log": KerpleLog,
    "kerple-power": KerplePower,
    "sandwich": Sandwich,
    "fire": FIRE,
    "cape-alibi": CAPEALiBi,
    "cape-kerple": CAPEKerple,
    "cape-fire": CAPEFIRE,
    "shaw": Shaw,
    "deberta": DeBERTa,
    "cope": CoPE,
    "stick-breaking": StickBreaking,
    "grape-a": GrapeA,
    "grape-ap": GrapeAP,
    "tape": TAPE,
    "delta": Delta,
}
"""Name on the command line -> constructor, of every encoding with an entry of its own."""

WRAPPERS = ("gated", "gated-channel", "path", "selective")
"""The prefixes of composed names whose rest is a name."""

GATES = ("gated", "gated-channel")
"""Those that add gates; an encoding has one kind of gates."""

DEFAULT = "lrpe-type2"
"""The encoding of a model whose configuration does not name one."""


class Family(NamedTuple):
    """A family of names ``<prefix>:<rest>``, which have no entries of their own in ENCODINGS.

    rest: the allowed rests, in words. names: examples, or all names if there are few. build: maps
    a rest to a constructor; it returns None for an invalid rest, or raises ChoiceError with a
    reason. causal_only: True if all encodings of the family are for causal attention only.
    """

    pattern: str
    rest: str
    names: tuple[str, ...]
    build: Callable[[str], Constructor | None]
    causal_only: bool = False


def _free_lrpe(rest: str) -> Constructor | None:
    """Return the constructor of ``lrpe:<P>:<Lambda>``."""
    projection, _, core = rest.partition(":")
    return _lrpe(projection, core) if projection in PROJECTIONS and core in CORES else None


def _free_algebraic(rest: str) -> Constructor | None:
    """Return the constructor of ``ape:<component>(+<component>)*``."""
    known = all(COMPONENT.fullmatch(name) for name in rest.split("+"))
    return partial(Algebraic, components=rest) if known else None


def _wrapper(
    prefix: str,
    wrap: Callable,
    accepts: Callable[[str], bool],
    inner: str,
    why: str,
    causal_only: bool = False,
) -> Family:
    """Return the family ``<prefix>:<name>``, which wraps the encodings that ``accepts`` allows.

    inner: describes these encodings. why: error for any other; {} stands for their names.
    """
    names = list(filter(accepts, ENCODINGS))

    def build(name: str) -> Constructor:
        """Return the constructor of the wrapped encoding of this name.

        Raises: ChoiceError for an encoding that cannot be wrapped.
        """
        if not accepts(name):
            raise ChoiceError(f"{prefix}:{name}: {why.format(', '.join(names))}")
        return partial(wrap, inner=constructor_of(name))

    examples = tuple(f"{prefix}:{name}" for name in names)
    return Family(f"{prefix}:<name>", f"with the name of {inner}", examples, build, causal_only)


def constructor_of(name: str) -> Constructor:
    """Return the constructor of ``name``. Raises: ChoiceError, listing the names, if unknown."""
    if not isinstance(name, str):
        raise ChoiceError(f"the name of a position encoding is a text, not {name!r}")
    prefix, _, rest = name.partition(":")
    if name in ENCODINGS:
        return ENCODINGS[name]
    constructor = FAMILIES[prefix].build(rest) if prefix in FAMILIES else None
    if constructor is None:
        raise ChoiceError(f"unknown position encoding {shortened(name)}{_names_near(name)}")
    return constructor


def _names_near(name: str) -> str:
    """Return the end of the error of an unknown name: the nearest name, or all of them."""
    hint = did_you_mean(name, ENCODINGS)
    if hint:
        return f"{hint} docs/encodings.md has all names"
    families = ", ".join(f"or {family.pattern} {family.rest}" for family in FAMILIES.values())
    return f"; the names are {', '.join(ENCODINGS)}, {families}"


def canonical_name(name: str) -> str:
    """Return the one name of an encoding that has several, so that equal methods share runs.

    Names without another one, also unknown ones, are returned unchanged.

    >>> canonical_name("lrpe-tmlr-type3"), canonical_name("gated:rope")
    ('lrpe:householder:permutation', 'gated:lrpe:identity:rotation')
    """
    prefix, _, rest = name.partition(":")
    if rest and prefix in WRAPPERS:
        return f"{prefix}:{canonical_name(rest)}"
    constructor = ENCODINGS.get(name)
    if isinstance(constructor, partial) and constructor.func is LRPE:
        return "lrpe:{projection}:{core}".format(**constructor.keywords)
    return "ape:sequence" if constructor is APE else name


def unwrapped(encoding: str) -> tuple[list[str], str]:
    """Return the wrappers of an encoding, the outer one first, and what they wrap.

    >>> unwrapped("gated:path:lrpe-type2"), unwrapped("lrpe:identity:rotation")
    ((['gated', 'path'], 'lrpe-type2'), ([], 'lrpe:identity:rotation'))
    """
    wrappers = []
    prefix, _, rest = encoding.partition(":")
    while rest and prefix in WRAPPERS:
        wrappers.append(prefix)
        encoding = rest
        prefix, _, rest = encoding.partition(":")
    return wrappers, encoding


def encoding_class(name: str) -> type[Encoding]:
    """Return the class of the encoding ``name``; for ``gated:<name>`` and others that of <name>.

    Raises: ChoiceError if it is unknown.
    """
    constructor = constructor_of(name)
    while isinstance(constructor, partial):
        constructor = constructor.keywords.get("inner", constructor.func)
    return constructor


def is_causal_only(name: str) -> bool:
    """True if the encoding ``name`` is defined for causal attention only."""
    if encoding_class(name).causal_only:
        return True
    family = FAMILIES.get(name.partition(":")[0])
    return family is not None and family.causal_only


FAMILIES: dict[str, Family] = {
    "lrpe": Family(
        "lrpe:<P>:<Lambda>",
        f"with P in {{{', '.join(PROJECTIONS)}}} and Lambda in {{{', '.join(CORES)}}}",
        tuple(f"lrpe:{p}:{core}" for p in PROJECTIONS for core in CORES),
        _free_lrpe,
    ),
    "ape": Family(
        "ape:<component>(+<component>)*",
        f"with each component {COMPONENTS}",
        ("ape:sequence", "ape:cycle7", "ape:sequence+cycle7", "ape:tree3+sequence"),
        _free_algebraic,
    ),
    "gated": _wrapper(
        "gated",
        gated,
        lambda name: name.partition(":")[0] not in GATES and can_be_gated(encoding_class(name)),
        "a decomposable encoding without gates",
        "gates can be added to decomposable encodings without gates; choose one of {}, or "
        "lrpe:<P>:<Lambda>",
        causal_only=True,
    ),
    "gated-channel": _wrapper(
        "gated-channel",
        gated_channel,
        lambda name: can_be_gated_by_channel(constructor_of(name)),
        "none, or an encoding that turns pairs of features",
        "decays of single features commute with rotations of pairs only; choose one of {}, or "
        "lrpe:<P>:<Lambda> without a permutation",
        causal_only=True,
    ),
    "path": _wrapper(
        "path",
        path,
        lambda name: (
            name.partition(":")[0] not in WRAPPERS and can_be_carried(encoding_class(name))
        ),
        "a decomposable encoding that keeps norms",
        "reflections can be added to encodings that keep norms; choose path, or path:<name> with "
        "one of {}, or lrpe:<P>:<Lambda>; gates stand before them, gated:path:<name>",
        causal_only=True,
    ),
    "selective": _wrapper(
        "selective",
        selective,
        lambda name: can_be_selective(constructor_of(name)),
        "an encoding with one angle per pair of features",
        "angles from the text need rotations by one angle per pair; choose one of {}, or "
        "lrpe:<P>:<Lambda> without a permutation",
    ),
}
"""The families of composed names by prefix."""

COMPOSED_NAMES: tuple[str, ...] = tuple(
    name for family in FAMILIES.values() for name in family.names
)
"""Names of all families, or examples."""


class _ReadOptions(EncodingOptions):
    """Default options that remember which classes of options are read."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "kinds", set())

    def of(self, kind: type[OptionsOf]) -> OptionsOf:
        """Return the options of one method, and remember their class."""
        self.kinds.add(kind)
        return super().of(kind)


@cache
def options_read_by(name: str) -> frozenset[str]:
    """Return the names of the options that the encoding ``name`` reads; others change nothing.

    Raises: ChoiceError if the name is unknown.
    """
    options = _ReadOptions()
    slices = name.count("+") + 1
    encoding = build_encoding(name, max(8, 2 * slices), 1, causal=True, options=options)
    ignored = set() if encoding.scales else {RotationOptions}
    ignored |= set() if encoding.angles else {AngleOptions}  # every constructor reads both
    return frozenset(field.name for kind in options.kinds - ignored for field in fields(kind))


def has_rotations(name: str) -> bool:
    """True if the encoding ``name`` takes ``RotationOptions``. Raises: ChoiceError if unknown."""
    return "rotation_base" in options_read_by(name)


def kinds_of_options() -> list[type]:
    """Return the classes of options of all encodings: of ENCODINGS in order, then others."""
    kinds = [encoding_class(name).Options for name in ENCODINGS]
    return list(dict.fromkeys([*kinds, RotationOptions, AngleOptions, SelectiveOptions]))


@cache
def angles_of(name: str) -> str:
    """Return "fixed" or "learned" if the encoding ``name`` takes ``AngleOptions``, else "".

    Raises: ChoiceError if it is unknown.
    """
    return build_encoding(name, 8, 1, causal=True).angles


def options_of_encodings() -> dict[str, Field]:
    """Return the options of all encodings as {name: field}, in the order of their classes.

    Raises: TypeError for two options of one name, or one without a help text. This is a bug.
    """
    options: dict[str, Field] = {}
    for kind in kinds_of_options():
        for field in fields(kind):
            if field.name in options or not field.metadata.get("help"):
                raise TypeError(
                    f"{kind.__qualname__}.{field.name} needs a new name and a help text"
                )
            options[field.name] = field
    return options


def _parse_departures(names: str | Collection[str]) -> frozenset[str]:
    """Return the departures that are named; see ``fidelity``, which reads :data:`ENCODINGS`."""
    from lrpe_fairseq.encodings.fidelity import parse_departures

    return parse_departures(names)


register_methods(kinds_of_options, _parse_departures)


def build_encoding(
    name: str,
    head_dim: int,
    num_heads: int,
    *,
    causal: bool = False,
    seed: int = 0,
    options: EncodingOptions | None = None,
    width: int | None = None,
    score_scale: float | None = None,
    **encoding_options: Any,
) -> Encoding:
    """Build the encoding ``name``.

    Args:
        name: a key of :data:`ENCODINGS` or a composed name of :data:`FAMILIES`.
        head_dim, num_heads, causal, seed, width, score_scale: see :class:`EncodingSpec`.
        options: options of individual methods, with checked values; those of other methods are
            ignored.
        encoding_options: the same by keyword, named as on the command line (``fox_bias``).
    Raises: ChoiceError for an unknown name (listing the names), options of rotations or of angles
        for a method without them, a width, a seed or a grid that the method does not support, or a
        causal method without ``causal``. ValueError for options given in both ways, or for
        ``options`` of another type.

    >>> enc = build_encoding("lrpe-type1", head_dim=64, num_heads=8)
    >>> q2, k2 = enc(q, k, positions, positions)  # q, k: (B, H, T, D)
    """
    if options is not None and encoding_options:
        raise ValueError("give the options of an encoding by keyword or as options, not both")
    options = EncodingOptions(**encoding_options) if options is None else options
    if not isinstance(options, EncodingOptions):
        raise ValueError(
            f"options must be an EncodingOptions, not {shortened(options)}: give single options by "
            "keyword, such as fox_bias=3.0"
        )
    if is_causal_only(name) and not causal:
        raise ChoiceError(
            f"position encoding {name!r} is defined for causal attention only; choose another one "
            "for an encoder or cross-attention, or build it with causal=True for a decoder"
        )
    spec = EncodingSpec(head_dim, num_heads, causal, seed, options, width, score_scale)
    construct = constructor_of(name)
    flat = options.position_grid == "flat"
    encoding = construct(spec) if flat else GridEncoding(spec, name, construct)
    _check_angles(encoding, name, options)
    encoding.name = name
    _, encoding.inner_name = unwrapped(name)
    return encoding


def _check_angles(encoding: Encoding, name: str, options: EncodingOptions) -> None:
    """Raise a ChoiceError for options of angles or rotations if the encoding has none."""
    supported = {AngleOptions: encoding.angles, RotationOptions: encoding.scales}
    given = []
    for kind, has in supported.items():
        if not has:
            given += _changed(options.of(kind))
    if given:
        raise ChoiceError(
            f"position encoding {name!r} does not support {' and '.join(given)}: leave "
            f"{'it' if len(given) == 1 else 'them'} out, or choose rope or an LRPE type with "
            "rotations"
        )


def _changed(own: Any) -> list[str]:
    """Return the flags of the options of one class that differ from their defaults.

    Without ``context_length``: the others need it, and models add it to them.
    """
    changed = (f.name for f in fields(own) if getattr(own, f.name) != f.default)
    return [flag_of(name) for name in changed if name != "context_length"]
