"""Options of attention and of all encodings, which every model has."""

from dataclasses import dataclass

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from lrpe_fairseq.attention.linear import NORMALIZERS
from lrpe_fairseq.attention.parts import PARTS
from lrpe_fairseq.encodings import DEFAULT, ENCODINGS, FAMILIES, options_of_encodings
from lrpe_fairseq.encodings.core.options import POSITION_GRIDS, option
from lrpe_fairseq.encodings.fidelity import DEPARTURES
from lrpe_fairseq.encodings.layers import encoding_options
from lrpe_fairseq.errors import one_sentence_errors
from lrpe_fairseq.models.attention import build_attention

# code outside of this package imports these three from here
__all__ = ["AttentionOptions", "build_attention", "encoding_options", "one_sentence_errors"]

IN_TURN = "; several, separated by commas, are those of the layers in turn"


def with_encoding_options(cls: type) -> type:
    """Class decorator that adds the options of all encodings; apply it before ``dataclass``."""
    # before dataclass(), which reads annotations and class attributes
    for name, declared in options_of_encodings().items():
        choices = declared.metadata["choices"]  # fairseq's parser needs an enumeration
        cls.__annotations__[name] = ChoiceEnum(list(choices)) if choices else declared.type
        setattr(cls, name, option(declared.default, declared.metadata["help"]))
    return cls


@dataclass
@with_encoding_options
class AttentionOptions(FairseqDataclass):
    """Options of attention and of all encodings, part of every model's configuration."""

    attention_type: str = option("linear", f"attention: linear (1+elu kernel) or softmax{IN_TURN}")
    position_encoding: str = option(
        DEFAULT,
        f"relative position encoding: {', '.join(ENCODINGS)}, or a free form: "
        + ", ".join(family.pattern for family in FAMILIES.values())
        + IN_TURN,
    )
    attention_normalizer: str = option(
        "rotated",
        f"denominator of linear attention: {', '.join(NORMALIZERS)} (rotated is Eq. 39 of LRPE)"
        + IN_TURN,
    )
    attention_window: str = option(
        "0",
        "number of last tokens that a token attends to, itself included; needs causal attention; "
        "0: all" + IN_TURN,
    )
    attention_parts: str = option(
        "none",
        f"parts of each layer's attention beside its encoding (FoX Pro): none, {', '.join(PARTS)}",
    )
    kv_heads: int = option(
        0,
        "heads of keys and values, each of which serves equally many attention heads (grouped "
        "queries); 0: as many as attention heads",
    )
    head_dim: int = option(0, "width of a head; 0: embedding dimension / attention heads")
    out_bias: bool = option(True, "bias of the output projection of attention")
    score_scale: float = option(
        0.0, "factor of all scores; 0: head width to the power of -0.5 in softmax attention, else 1"
    )
    grid_width: int = option(
        0,
        "columns W of a grid whose cells are numbered row by row: position s is row s // W, column "
        "s mod W; 0: a sequence",
    )
    grid_height: int = option(
        0,
        "rows of the grid, for encodings whose coordinates are fractions of it; 0: as many as "
        "columns",
    )
    position_grid: ChoiceEnum(list(POSITION_GRIDS)) = option(
        "flat",
        "how an encoding of sequences reads a grid: flat (the number of the cell), axial (one half "
        "of each head's features by row, the other half by column) or sum (row + column, as the "
        "image code of TMLR LRPE does)",
    )
    encoding_seed: int = option(
        0, "seed of the encoding's fixed random parts (vectors, permutations)"
    )
    fidelity: str = option(
        "correct",
        "departures of the authors' code to switch on: correct (none) or a comma-separated list of "
        "published (all that concern one method or attention), " + ", ".join(DEPARTURES),
    )
