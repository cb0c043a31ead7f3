"""Departures of the code behind the published numbers from the papers that it compares.

A method declares its departures in ``Encoding.departures``. Those below concern attention under any
encoding, and whole models.
"""

from collections.abc import Collection

from lrpe_fairseq.encodings import ENCODINGS, encoding_class
from lrpe_fairseq.encodings.core.departures import Departure
from lrpe_fairseq.errors import ChoiceError

OF_ATTENTION: dict[str, Departure] = {
    "embed-dim-scale": Departure(
        paper="softmax(QK^T / sqrt(d)) with d the head width (LRPE, Eq. 2)",
        code="(H d)^-0.5 for every relative encoding, while the language model's Base is stock "
        "attention with d^-0.5: with 8 heads, 2.8 times the temperature between Base and the rest",
        ours="d^-0.5 for all",
    ),
}
"""Departures of attention under any encoding."""

UNIT_EMBEDDINGS = "ape-unit-embeddings"
OF_MODELS: dict[str, Departure] = {
    UNIT_EMBEDDINGS: Departure(
        paper="(not stated by APE, Kogkalidis et al. 2024)",
        code="embeddings from N(0, 1), multiplied by the root of the width: positions that are "
        "added to them are small beside a token",
        ours="N(0, 1 / width), multiplied by the root of the width (`lrpe_transformer`: "
        "`--encoder-fidelity` and `--decoder-fidelity`)",
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

PUBLISHED = frozenset(name for name, departure in DEPARTURES.items() if not departure.named_only)
"""The departures that ``published`` switches on."""


def parse_departures(departures: str | Collection[str]) -> frozenset[str]:
    """Return the departures that ``--fidelity TEXT`` or a collection of names switches on.

    TEXT is ``correct`` (none) or a comma-separated list, which may contain ``published``; so may a
    collection. Raises: ChoiceError, listing the known names, if one is unknown.

    >>> sorted(parse_departures("t5-unit-init,t5-shared-bias"))
    ['t5-shared-bias', 't5-unit-init']
    """
    if departures == "correct":
        return frozenset()
    if not isinstance(departures, Collection) or not all(
        isinstance(name, str) for name in departures
    ):
        raise ChoiceError(
            f"fidelity is a text or a collection of names, not {departures!r}: choose correct, "
            "published, or names of departures"
        )
    names = {
        name.strip()
        for name in (departures.split(",") if isinstance(departures, str) else departures)
    }
    chosen = frozenset(names - {"published"})
    unknown = sorted(chosen - DEPARTURES.keys())
    if unknown:
        raise ChoiceError(
            f"unknown departures {', '.join(unknown)}; choose correct, published, or a list of "
            f"{', '.join(DEPARTURES)}"
        )
    return chosen | PUBLISHED if "published" in names else chosen
