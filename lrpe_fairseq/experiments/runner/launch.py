"""Parts of fairseq's command lines: overrides in hydra's grammar."""

import re
import sys
from pathlib import Path

WORLD_SIZE = "distributed_training.distributed_world_size"
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
