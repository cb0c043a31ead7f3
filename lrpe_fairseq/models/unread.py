"""Options in a checkpoint that nothing reads: they are reset, with a warning.

Versions before these checks accepted options of parts that are not built, impossible values of
options that no layer reads, and patterns with more values than layers. The parser refuses them, but
a checkpoint that holds one is a good model.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import Field
from typing import Any

from lrpe_fairseq import patterns
from lrpe_fairseq.encodings import options_of_encodings
from lrpe_fairseq.encodings.core.options import LARGEST_SEED, check_option
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.models.checks import STOCK, has_stock_cross, unread_options
from lrpe_fairseq.models.patches import OF_PIXELS

logger = logging.getLogger(__name__)


def reset_unread(config: Any, usual: Mapping[str, Any]) -> None:
    """Reset the options of a model from a checkpoint that nothing reads and the parser refuses.

    config: of one of our models, over its class; ``lrpe_transformer`` has sections. It is changed.
    usual: the defaults of the options of attention.
    """
    for section, part, layers in _stacks(config):
        resets = {**_cut_patterns(part, layers), **_impossible(part), **_of_pixels(part)}
        # fairseq's own cross-attention reads none of our options
        if section == "cross" and has_stock_cross(config):
            resets |= _of_unbuilt(part, usual)
        for name, value in resets.items():
            logger.warning(
                "the checkpoint says %s=%s, which nothing reads: it is read as %s",
                f"{section}.{name}".removeprefix("."),
                getattr(part, name),
                value,
            )
            setattr(part, name, value)


def _stacks(config: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield the section, the options of attention and the number of layers of every stack."""
    if hasattr(config, "encoder") and hasattr(config, "decoder"):
        sizes = {
            "encoder": config.encoder.layers,
            "decoder": config.decoder.layers,
            "cross": config.decoder.layers,  # one in every layer of the decoder
        }
        for section, layers in sizes.items():
            part = getattr(config, section, None)
            if part is not None:
                yield section, part, layers
    elif hasattr(config, "position_encoding"):
        decodes = hasattr(config, "decoder_layers")
        yield "", config, config.decoder_layers if decodes else config.encoder_layers


def _of_unbuilt(part: Any, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the changed options of a cross-attention that is not built."""
    return {
        name: default
        for name, default in usual.items()
        if name not in STOCK and str(getattr(part, name, default)) != str(default)
    }


def _cut_patterns(part: Any, layers: int) -> dict[str, str]:
    """Return the patterns of a stack without the values that no layer has."""
    pattern_of = {name: patterns.values(getattr(part, name, "0")) for name in patterns.OPTIONS}
    return {
        name: ",".join(each[:layers]) for name, each in pattern_of.items() if len(each) > layers
    }


def _impossible(part: Any) -> dict[str, Any]:
    """Return the defaults of options with values that the parser refuses and nothing reads."""
    known = options_of_encodings()
    unread = {
        name: known[name].default
        for name, value in unread_options(part).items()
        if _fails(known[name], value)
    }
    if getattr(part, "context_length", 0) and not _reads_length(part):
        unread["context_length"] = known["context_length"].default
    if abs(getattr(part, "encoding_seed", 0)) * 1000 > LARGEST_SEED:  # no generator takes it
        unread["encoding_seed"] = 0
    return unread


def _reads_length(part: Any) -> bool:
    """True if a scaling, a spectrum or a floor of angles reads ``context_length``."""
    scaling = str(getattr(part, "context_scaling", "none"))
    floor = str(getattr(part, "angle_floor", "none"))
    spectrum = str(getattr(part, "rotation_spectrum", ""))
    return scaling != "none" or floor != "none" or spectrum == "turns"


def _of_pixels(part: Any) -> dict[str, float]:
    """Return the defaults of the changed options of pixels in a classifier of other inputs."""
    if str(getattr(part, "input", "pixels")) == "pixels":
        return {}
    return {name: usual for name, usual in OF_PIXELS.items() if getattr(part, name) != usual}


def _fails(declared: Field, value: Any) -> bool:
    try:
        check_option(declared, value)
    except ChoiceError:
        return True
    return False
