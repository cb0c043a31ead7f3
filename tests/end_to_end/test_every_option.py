"""Every option of attention has the same allowed values at every door.

The cases are made of the classes of options: each value is given to the constructor of the Python
API, as text on the command line, and as a value in a YAML, for every part of every model.
"""

import argparse
import contextlib
import functools
import io
from dataclasses import fields
from enum import Enum
from functools import partial
from typing import get_args

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY, merge_with_parent
from fairseq.models.transformer import TransformerConfig
from omegaconf import OmegaConf

from lrpe_fairseq.attention.linear import NORMALIZERS
from lrpe_fairseq.attention.multihead import ATTENTION_TYPES, MultiheadAttention
from lrpe_fairseq.attention.parts import PARTS as PARTS_OF_ATTENTION
from lrpe_fairseq.encodings import (
    ENCODINGS,
    EncodingOptions,
    build_encoding,
    options_of_encodings,
    options_read_by,
)
from lrpe_fairseq.encodings.core.options import LONGEST, POSITION_GRIDS
from lrpe_fairseq.encodings.fidelity import DEPARTURES
from lrpe_fairseq.errors import ChoiceError, Refusal, one_sentence_errors
from lrpe_fairseq.models.attention import build_attention
from lrpe_fairseq.models.options import AttentionOptions
from tests.end_to_end.cases import computes

PARTS = [
    *(("lrpe_lm", ""), ("lrpe_roberta", ""), ("lrpe_classifier", ""), ("lrpe_vit", "")),
    *(("lrpe_transformer", part) for part in ("encoder", "decoder", "cross")),
]
OWN = options_of_encodings()
NAMES = [own.name for own in fields(AttentionOptions) if own.name != "_name"]
SWITCHED_ON = {name for name, own in OWN.items() if own.default is True} | {"out_bias"}
BEYOND = 2**63
MODEL = {"attention_type": "softmax", "position_encoding": "none"}
OTHERS = {  # the options of attention that no class of an encoding has: allowed and refused values
    "attention_type": (ATTENTION_TYPES, ("", "quadratic", "linear,,softmax")),
    "position_encoding": (
        ("none", "rope", "lrpe:identity:rotation", "ape:cycle7", "gated:rope"),
        ("", "rop", "lrpe:identity", "gated:t5", f"ape:cycle{BEYOND}", "ape:cycle" + "9" * 5000),
    ),
    "attention_normalizer": (NORMALIZERS, ("", "norm")),
    "attention_window": (("0", "1", "7", str(LONGEST)), ("-1", "1.5", "x", str(BEYOND))),
    "attention_parts": (("none", *PARTS_OF_ATTENTION, "qk-norm,kv-shift"), ("", "gate", "none,x")),
    "kv_heads": ((0, 1, 2), (-1, 3, 4, BEYOND, 10**30, 1.5, "x")),
    "head_dim": ((0, 1, 5, 8), (-1, LONGEST + 1, BEYOND, 10**30, 1.5, "x")),
    "out_bias": ((True, False), ("", "maybe")),
    "score_scale": ((0.0, 0.5, 3.0), (-1.0, float("nan"), float("inf"), 1e300, "x")),
    "grid_width": ((0, 1, 5, LONGEST), (-1, LONGEST + 1, BEYOND, 10**30, 1.5, "x")),
    "grid_height": ((0, 1, 5, LONGEST), (-1, LONGEST + 1, BEYOND, 10**30, 1.5, "x")),
    "position_grid": (POSITION_GRIDS, ("", "both")),
    "encoding_seed": ((0, 1, -1, 2**31, -(2**31)), (BEYOND, -BEYOND, 10**30, 1.5, "x")),
    "fidelity": (
        ("correct", "published", *DEPARTURES, ", ".join(DEPARTURES)),
        ("", "nonsense", "published,nonsense", "correct,published"),
    ),
}
NEEDED = {  # options without which another one is refused
    "context_factor": {"context_scaling": "linear"},
    "context_length": {"context_scaling": "yarn"},
    "yarn": {"context_length": 9},
    "yarn-printed": {"context_length": 9},
    "llama3": {"context_length": 9},
    "dynamic": {"context_length": 9},
    "longrope": {"context_length": 9, "longrope_factors": "1,1,1,1,2,2,2,2"},
    "longrope_factors": {"context_scaling": "longrope", "context_length": 9},
    "proportional": {"rotation_fraction": 0.5},
    "turns": {"context_length": 9},
    "turn": {"context_length": 9},
    "clip": {"context_length": 9},
    "log": {"position_encoding": "lrpe-type2"},
    "angle_lr_scale": {"position_encoding": "lrpe-type2"},
    "grid_height": {"grid_width": 2},
    "position_grid": {"grid_width": 2, "position_encoding": "rope"},
}
SMALLEST = {
    "t5_max_distance": 17
}  # in a causal model, whose first 16 buckets are one distance each
RENAMED = {
    "attention_normalizer": "normalizer",
    "attention_parts": "parts",
    "attention_window": "window",
    "encoding_seed": "seed",
    "kv_heads": "num_kv_heads",
}
ZERO_IS_NONE = ("window", "num_kv_heads", "head_dim", "score_scale")
"""Arguments of attention that are None where an option is 0."""


def kind_of(own):
    """The type of a field, without Optional."""
    return next((kind for kind in get_args(own.type) if kind is not type(None)), own.type)


def allowed(own):
    """Values of an option of an encoding that are allowed, the bounds too."""
    if own.metadata["choices"]:
        return own.metadata["choices"]
    if kind_of(own) is bool:
        return (True, False)
    if kind_of(own) is str:
        return ("1,1,1,1,2,2,2,2", "1.0,1.5,2,3,4,5,6,7.25")
    low, above, high = (own.metadata[bound] for bound in ("least", "above", "most"))
    one = 1 if kind_of(own) is int else 0.5
    low = above + one if low is None and above is not None else low
    middle = 3 if kind_of(own) is int else 1.5
    found = [own.default, low, high, middle if high != 1 else 0.75]
    return [kind_of(own)(v) for v in found if v is not None and (low is None or v >= low)]


def refused(own):
    """Values of an option of an encoding that are refused: of another type, or out of range."""
    if own.metadata["choices"]:
        return ("", "nonsense", 3)
    if kind_of(own) is bool:
        return ("", "maybe")
    if kind_of(own) is str:
        return ("1,2", "nonsense", "0,1,1,1,2,2,2,2", "-1,1,1,1,2,2,2,2", "nan" + ",1" * 7)
    low, above, high = (own.metadata[bound] for bound in ("least", "above", "most"))
    if kind_of(own) is int:
        assert low is not None
        assert high is not None
        below = [low - 1] if low - 1 != own.default else [low - 2]
        return [*below, -5, high + 1, BEYOND, -BEYOND, 10**30, 1.5, float("nan"), "x"]
    found = [float("nan"), float("inf"), -float("inf"), 1e300, "x"]
    found += [float(low) - 0.5] if low is not None else []
    found += [float(above) - 0.5] if above is not None else []
    return found + ([float(high) + 0.5] if high is not None else [])


def cases(name):
    """The allowed and the refused values of an option of attention."""
    return (allowed(OWN[name]), refused(OWN[name])) if name in OWN else OTHERS[name]


def needed_by(name, value):
    """The options without which ``value`` of an option is refused."""
    by_value = name in ("context_scaling", "rotation_spectrum", "angle_floor", "angle_parameter")
    return NEEDED.get(value if by_value else name, {})


def given_with(name, value):
    """The options of a model that has ``name`` with ``value``: the encoding that reads it, too."""
    readers = [known for known in ENCODINGS if name in options_read_by(known)]
    encoding = {"position_encoding": readers[0]} if readers else {}
    if readers and not computes("softmax", readers[0]):
        encoding["attention_type"] = "linear"
    return {**MODEL, **encoding, **needed_by(name, value), name: value}


def outcome(build):
    """The encoding that is built: its options. Or "refused", after one sentence."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), one_sentence_errors():
            return build().encoding.spec.options
    except SystemExit as ended:
        end = ended
    assert end.code == 2
    if isinstance(end, Refusal):  # argparse writes its usage first
        assert str(end).startswith("lrpe_fairseq: ")
        assert "\n" not in str(end)
    return "refused"


def through_constructor(options):
    """Build attention by keywords."""
    given = {RENAMED.get(name, name): value for name, value in options.items()}
    if "window" in given and isinstance(given["window"], str):
        text = given["window"]
        given["window"] = int(text) if text.isdecimal() else text
    given |= {name: given[name] or None for name in ZERO_IS_NONE if name in given}
    if isinstance(given.get("seed"), int):
        given["seed"] *= 1000
    return MultiheadAttention(16, 2, causal=True, **given)


def attention(options):
    """Build the attention of a layer as models do."""
    return build_attention(options, TransformerConfig(), 16, 2, causal=True, layer=0)


def through_parser(model, part, options):
    """Read the options from a command line."""
    config = MODEL_DATACLASS_REGISTRY[model]()
    section = getattr(config, part)() if part else config
    prefix = f"{part}_".removeprefix("_")
    line = [word for option in options.items() for word in words_of(prefix, *option)]
    read = vars(parser_of(model).parse_args(line))
    for name in options:
        if read.get(prefix + name) is not None:
            setattr(section, name, read[prefix + name])
    return attention(section)


@functools.cache
def parser_of(model):
    """The parser of the options of a model."""
    parser = argparse.ArgumentParser()
    MODEL_REGISTRY[model].add_args(parser)
    return parser


def words_of(prefix, name, value):
    """The words of a command line that give an option a value; a flag has none."""
    flag = (prefix + name).replace("_", "-")
    if not isinstance(value, bool):
        return [f"--{flag}={value}"]
    return [f"--{flag}"] if value else [f"--no-{flag}"] * (name in SWITCHED_ON)


def through_yaml(model, part, options):
    """Read the options from a configuration of hydra."""
    given = {part: options} if part else options
    config = OmegaConf.create({"_name": model, **given})
    merged = merge_with_parent(MODEL_DATACLASS_REGISTRY[model](), config)
    return attention(merged[part] if part else merged)


def plain(options):
    """The options of an encoding in a form that is the same for every door."""
    if options == "refused":
        return options
    values = {name: str(v) if isinstance(v, Enum) else v for name, v in options.values.items()}
    values = {name: v for name, v in values.items() if v != OWN[name].default}
    grid = options.grid_width, options.grid_height, str(options.position_grid)
    return options.fidelity, grid, values


def values_for(model, part, name):
    """Values of an option, and True for those that are allowed; fewer for parts with equal code."""
    accepted, impossible = cases(name)
    # tables of a million rows are not built
    small = [v for v in accepted if not (isinstance(v, int) and 2**12 < v < LONGEST)]
    small = [v for v in small if name not in SMALLEST or v >= SMALLEST[name]]
    if (model, part) not in (PARTS[0], PARTS[-1]):
        small, impossible = small[:2], impossible[:2]
    return [(value, True) for value in small] + [(value, False) for value in impossible]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("model", "part"), PARTS, ids=lambda part: part)
def test_a_value_is_accepted_or_refused_alike_at_every_door(model, part, name):
    for value, is_allowed in values_for(model, part, name):
        options = given_with(name, value)
        doors = {
            "constructor": partial(through_constructor, options),
            "parser": partial(through_parser, model, part, options),
            "yaml": partial(through_yaml, model, part, options),
        }
        found = {door: plain(outcome(build)) for door, build in doors.items()}
        assert found["constructor"] == found["parser"] == found["yaml"], (value, found)
        assert (found["constructor"] != "refused") is is_allowed, (value, found)


@pytest.mark.parametrize("name", OWN)
def test_a_value_is_checked_if_no_layer_reads_it_too(name):
    """And the bounds, which would be tables of gigabytes, are allowed."""
    others = [known for known in ENCODINGS if name not in options_read_by(known)]
    accepted, impossible = cases(name)
    for value in accepted:
        own = {n: v for n, v in needed_by(name, value).items() if n in OWN}
        EncodingOptions(**own, **{name: value})
    for value in impossible:
        with pytest.raises(ChoiceError) as error:
            build_encoding(others[0], 8, 2, causal=True, options=EncodingOptions(**{name: value}))
        assert "\n" not in str(error.value)


def test_the_cases_are_of_every_option():
    assert set(NAMES) == OWN.keys() | OTHERS.keys()


@pytest.mark.parametrize("given", ["published", ["published"], {"published"}])
def test_a_name_of_departures_means_the_same_in_the_api_as_on_the_command_line(given):
    published = EncodingOptions(given).fidelity
    assert published == {name for name, own in DEPARTURES.items() if not own.named_only}
    torch.manual_seed(0)
    correct, built = (
        MultiheadAttention(
            16, 2, attention_type="softmax", position_encoding="t5", causal=True, fidelity=fidelity
        )
        for fidelity in ("correct", given)
    )
    assert built.encoding.table.shape != correct.encoding.table.shape  # t5-shared-bias
    assert EncodingOptions("correct") == EncodingOptions()
