"""Departures of the code behind the published numbers from the papers that it compares.

Each departure has a name. ``EncodingOptions.fidelity`` holds the names that are switched on, by
default none. A method declares its departures in ``Encoding.departures``. Those below concern
attention under any encoding, and whole models.
"""

from collections.abc import Iterable

from lrpe_fairseq.encodings import ENCODINGS, encoding_class
from lrpe_fairseq.encodings.departures import DROPPED_SCORES, Departure
from lrpe_fairseq.errors import ChoiceError

OF_ATTENTION: dict[str, Departure] = {
    "embed-dim-scale": Departure(
        paper="softmax(QK^T / sqrt(d)) with d the head width (LRPE, Eq. 2)",
        code="(H d)^-0.5 for every relative encoding, while the language model's Base is stock "
        "attention with d^-0.5: with 8 heads, 2.8 times the temperature between Base and the rest",
        ours="d^-0.5 for all",
    ),
    "padding-ignored": Departure(
        paper="(not stated)",
        code="neither attention reads the padding mask, and positions count padding from the left",
        ours="padded keys are masked after phi; positions count real tokens",
    ),
    DROPPED_SCORES: Departure(
        paper="dropout of attention (APE, Kogkalidis et al. 2024)",
        code="sets random scores to -1e8 before the softmax, above the -1e10 of masked keys: a "
        "query whose visible keys are all dropped attends to dropped keys that it must not see",
        ours="dropout of the weights (`--attention-dropout`)",
        named_only=True,
    ),
}
"""Departures of attention under any encoding."""

PADDING_SEEN = "classification-padding-seen"
UNIT_EMBEDDINGS = "ape-unit-embeddings"
UNIT_POSITIONS = "image-unit-positions"
OF_MODELS: dict[str, Departure] = {
    PADDING_SEEN: Departure(
        paper="BatchNorm in the Long-Range Arena (TMLR LRPE, Table 9)",
        code="the code of S4, in whose terms that table is written, lets padding into the "
        "statistics",
        ours="statistics of real tokens only (`lrpe_classifier`; attention: `padding-ignored`)",
        named_only=True,
    ),
    UNIT_EMBEDDINGS: Departure(
        paper="(not stated by APE, Kogkalidis et al. 2024)",
        code="embeddings from N(0, 1), multiplied by the root of the width: positions that are "
        "added to them are small beside a token",
        ours="N(0, 1 / width), multiplied by the root of the width (`lrpe_transformer`: "
        "`--encoder-fidelity` and `--decoder-fidelity`)",
        named_only=True,
    ),
    UNIT_POSITIONS: Departure(
        paper="(not stated by TMLR LRPE)",
        code="learned absolute positions of images from N(0, 1), 196 of 197 rows used",
        ours="N(0, 0.02), truncated at two deviations, as in DeiT (`lrpe_vit`)",
        named_only=True,
    ),
}
"""Departures of a whole model, which :mod:`lrpe_fairseq.models` applies."""

DEPARTURES: dict[str, Departure] = (
    {
        name: departure
        for encoding in ENCODINGS
        for name, departure in encoding_class(encoding).departures.items()
    }
    | OF_ATTENTION
    | OF_MODELS
)
"""All departures by name, in the order of ``docs/fidelity.md``."""

PUBLISHED = frozenset(name for name, own in DEPARTURES.items() if not own.named_only)
"""The departures that ``published`` switches on."""


def parse_departures(text: str) -> frozenset[str]:
    """Return the departures that ``--fidelity TEXT`` names.

    TEXT is ``correct`` (none) or a comma-separated list of names, which may contain ``published``
    (all that are not ``named_only``).
    Raises: ChoiceError, listing the known names, if one is unknown.

    >>> sorted(parse_departures("t5-unit-init,t5-shared-bias"))
    ['t5-shared-bias', 't5-unit-init']
    """
    if text == "correct":
        return frozenset()
    names = {name.strip() for name in text.split(",")}
    return check_departures(names - {"published"}) | (PUBLISHED if "published" in names else set())


def check_departures(names: Iterable[str]) -> frozenset[str]:
    """Return ``names`` as a set.

    Raises: ChoiceError, listing the known names, if one is unknown.

    >>> sorted(check_departures(["t5-unit-init"]))
    ['t5-unit-init']
    """
    chosen = frozenset(names)
    unknown = sorted(chosen - DEPARTURES.keys())
    if unknown:
        raise ChoiceError(
            f"unknown departures {', '.join(unknown)}; choose correct, published, or a list of "
            f"{', '.join(DEPARTURES)}"
        )
    return chosen
