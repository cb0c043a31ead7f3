"""Where the code behind the published numbers departs from the papers it compares.

Each departure has a name; ``EncodingOptions.fidelity`` holds the names that are switched on. None
is on by default. A method declares its departures (``Encoding.departures``) and reads their names;
the two below belong to attention itself.
"""

from collections.abc import Iterable

from lrpe_fairseq.encodings import ENCODINGS, encoding_class
from lrpe_fairseq.errors import ChoiceError

OF_ATTENTION: dict[str, str] = {
    "embed-dim-scale": (
        "Softmax attention with any relative encoding scales by (H D)^-0.5 instead of D^-0.5; "
        "Base alone, stock attention in the language model, keeps D^-0.5."
    ),
    "padding-ignored": (
        "Both attentions see padding as tokens, and positions count it, from the left."
    ),
}
"""Departures of attention under any encoding."""

DEPARTURES: dict[str, str] = {
    departure: sentence
    for name in ENCODINGS
    for departure, sentence in encoding_class(name).departures.items()
} | OF_ATTENTION
"""Name -> what the published code does, in one sentence; each method declares its own."""


def parse_departures(text: str) -> frozenset[str]:
    """The departures that ``--fidelity TEXT`` names.

    ``correct`` is none, ``published`` is all, else a comma-separated list of their names.
    Raises: ChoiceError, listing the known ones, if one is unknown.

    >>> sorted(parse_departures("t5-unit-init,t5-shared-bias"))
    ['t5-shared-bias', 't5-unit-init']
    """
    if text in ("correct", "published"):
        return frozenset(DEPARTURES if text == "published" else ())
    return check_departures(name.strip() for name in text.split(","))


def check_departures(names: Iterable[str]) -> frozenset[str]:
    """``names`` as a set; ChoiceError, listing the known ones, if one is unknown.

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
