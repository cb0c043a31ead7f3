"""Departures of the code behind the published numbers from the papers that it compares.

Each departure has a name. ``EncodingOptions.fidelity`` holds the names that are switched on, by
default none. A method declares its departures in ``Encoding.departures``. The two below concern
attention under any encoding.
"""

from collections.abc import Iterable

from lrpe_fairseq.encodings import ENCODINGS, encoding_class
from lrpe_fairseq.errors import ChoiceError

OF_ATTENTION: dict[str, str] = {
    "embed-dim-scale": (
        "Softmax attention with any relative encoding scales by (H D)^-0.5 instead of D^-0.5; "
        "only Base, stock attention in the language model, uses D^-0.5."
    ),
    "padding-ignored": (
        "Both attentions treat padding as tokens, and positions count it from the left."
    ),
}
"""Departures of attention under any encoding: name -> one sentence."""

DEPARTURES: dict[str, str] = {
    departure: sentence
    for name in ENCODINGS
    for departure, sentence in encoding_class(name).departures.items()
} | OF_ATTENTION
"""All departures: name -> what the published code does, in one sentence."""


def parse_departures(text: str) -> frozenset[str]:
    """Return the departures that ``--fidelity TEXT`` names.

    TEXT is ``correct`` (none), ``published`` (all), or a comma-separated list of names.
    Raises: ChoiceError, listing the known names, if one is unknown.

    >>> sorted(parse_departures("t5-unit-init,t5-shared-bias"))
    ['t5-shared-bias', 't5-unit-init']
    """
    if text in ("correct", "published"):
        return frozenset(DEPARTURES if text == "published" else ())
    return check_departures(name.strip() for name in text.split(","))


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
