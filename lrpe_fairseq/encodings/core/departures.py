"""What published code does instead of the paper that it implements."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Departure:
    """One departure of published code, as a row of ``docs/fidelity.md``.

    Each text is a phrase without a final period. An encoding declares its departures in
    ``Encoding.departures``; ``spec.options.fidelity`` holds the names of those switched on.
    """

    paper: str
    """What the paper says, with its source; in parentheses if the paper leaves it open."""
    code: str
    """What the published code does."""
    ours: str
    """What this package does by default."""
    named_only: bool = False
    """True if ``published`` leaves it out: it concerns all models of one paper's code, so that it
    would change the published rows of the other papers."""
