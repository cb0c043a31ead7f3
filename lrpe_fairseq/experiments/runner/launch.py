"""Parts of fairseq's command lines: overrides in hydra's grammar, gradient accumulation."""

import re
import sys
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
"""Return the folder of fairseq's scripts."""


def hydra_override(key: str, value: str) -> str:
    """Return ``++key=value`` in hydra's grammar, which sets a key that the YAML may lack."""
    if re.fullmatch(r"[\w./:+-]+|\[[\w.,+-]*\]", value):
        return f"++{key}={value}"
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"++{key}='{escaped}'"


def parse_overrides(overrides: tuple[str, ...]) -> dict[str, str]:
    """Parse ``section.key=value`` words. Raises: ValueError for any other word."""
    found = {}
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals or "." not in key:
            raise ValueError(f"an override is section.key=value, not {word!r}")
        found[key] = value
    return found


def update_freq(settings: Any, processes: int) -> int:
    """Return the gradient accumulation that keeps the size of an update on this many processes.

    Raises: ValueError if the number of batches per update is not divisible.
    """
    frequency = settings.optimization.update_freq[0]
    if frequency % processes:
        size, unit, key = batch(settings)
        raise ValueError(
            f"{frequency} batches of {size} {unit} cannot be shared by "
            f"{processes} processes: use another number of GPUs, or set dataset.{key} and "
            "optimization.update_freq so that their product stays"
        )
    return frequency // processes


def batch(settings: Any) -> tuple[int, str, str]:
    """Return the largest batch of one process: size, unit, and its key in the dataset section.

    The unit is ``tokens``, or ``samples`` where the configuration limits ``batch_size``.
    """
    if settings.dataset.get("max_tokens"):
        return int(settings.dataset.max_tokens), "tokens", "max_tokens"
    return int(settings.dataset.batch_size), "samples", "batch_size"
