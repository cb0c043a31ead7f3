"""The options of encodings in one layer of a stack, read from a model's configuration."""

from dataclasses import fields
from enum import Enum
from typing import Any

from lrpe_fairseq import patterns
from lrpe_fairseq.encodings import (
    DEFAULT,
    EncodingOptions,
    angles_of,
    has_rotations,
    options_of_encodings,
)
from lrpe_fairseq.encodings.rotations.angles import AngleOptions
from lrpe_fairseq.encodings.rotations.scaling import WITH_LENGTH, RotationOptions


def encoding_options(options: Any, layer: int = 0) -> EncodingOptions:
    """Return the options of individual encodings of a layer from a model's configuration.

    An option that a checkpoint does not contain yet has its default, and so have those of rotations
    and of angles in a layer without them, if another layer of the pattern has them. A floor of
    angles, or the spectrum "turns", takes its length from ``tokens_per_sample`` unless
    ``context_length`` is given.
    """
    defaults = {name: field.default for name, field in options_of_encodings().items()}
    defaults |= {"grid_width": 0, "grid_height": 0, "position_grid": "flat"}
    chosen = {name: getattr(options, name, default) for name, default in defaults.items()}
    plain = {name: str(v) if isinstance(v, Enum) else v for name, v in chosen.items()}
    needs_length = plain["angle_floor"] != "none" or plain["rotation_spectrum"] == "turns"
    if needs_length and plain["context_scaling"] not in WITH_LENGTH:
        # they need the length of training even if a longer text is read
        plain["context_length"] = plain["context_length"] or tokens_per_sample(options)
    plain |= _defaults_of_other_layers(options, layer)
    unread = plain["angle_floor"] == "none" and plain["context_scaling"] == "none"
    if needs_length and unread and plain["rotation_spectrum"] != "turns":
        plain["context_length"] = 0  # it is that of other layers, and nothing reads it here
    return EncodingOptions(options.fidelity, **plain)


def sizes_of_heads(options: Any) -> dict[str, Any]:
    """Return the arguments of attention about its heads, from a model's configuration.

    An option that a checkpoint does not contain yet has its default, as has 0.
    """
    return {
        "num_kv_heads": getattr(options, "kv_heads", 0) or None,
        "head_dim": getattr(options, "head_dim", 0) or None,
        "out_bias": getattr(options, "out_bias", True),
        "score_scale": getattr(options, "score_scale", 0.0) or None,
    }


def tokens_per_sample(options: Any) -> int:
    """Return the tokens of a training block in the options of a language model, 0 for others.

    It is 0, too, in options whose reference to the task is not resolved.
    """
    length = getattr(options, "tokens_per_sample", 0) or 0
    return 0 if isinstance(length, str) and not length.isdigit() else int(length)


def _defaults_of_other_layers(options: Any, layer: int) -> dict[str, Any]:
    """Return the defaults of options that other layers of a pattern have, but not ``layer``."""
    names = patterns.values(getattr(options, "position_encoding", DEFAULT))
    name_of_layer = names[layer % len(names)]
    conditions = {
        RotationOptions: has_rotations,
        AngleOptions: lambda name: bool(angles_of(name)),
    }
    unread = {}
    for kind, has in conditions.items():
        if any(map(has, names)) and not has(name_of_layer):
            unread |= {field.name: field.default for field in fields(kind)}
    if angles_of(name_of_layer) != "learned" and any(
        angles_of(name) == "learned" for name in names
    ):
        unread["angle_parameter"] = AngleOptions.angle_parameter
        unread["angle_lr_scale"] = AngleOptions.angle_lr_scale
    return unread
