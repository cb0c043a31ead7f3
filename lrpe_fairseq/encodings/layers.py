"""The options of encodings in one layer of a stack, read from a model's configuration."""

from dataclasses import fields
from enum import Enum
from typing import Any

from lrpe_fairseq import patterns
from lrpe_fairseq.encodings import DEFAULT, EncodingOptions, has_rotations, options_of_encodings
from lrpe_fairseq.encodings.fidelity import parse_departures
from lrpe_fairseq.encodings.scaling import RotationOptions


def encoding_options(options: Any, layer: int = 0) -> EncodingOptions:
    """Return the options of individual encodings of a layer from a model's configuration.

    An option that a checkpoint does not contain yet has its default, and so have those of rotations
    in a layer without them, if another layer of the pattern has rotations.
    """
    defaults = {name: own.default for name, own in options_of_encodings().items()}
    defaults |= {"grid_width": 0, "grid_height": 0, "position_grid": "flat"}
    given = {name: getattr(options, name, default) for name, default in defaults.items()}
    plain = {name: str(v) if isinstance(v, Enum) else v for name, v in given.items()}
    names = patterns.values(getattr(options, "position_encoding", DEFAULT))
    if any(map(has_rotations, names)) and not has_rotations(names[layer % len(names)]):
        plain |= {own.name: own.default for own in fields(RotationOptions)}
    return EncodingOptions(parse_departures(options.fidelity), **plain)
