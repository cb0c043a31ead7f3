"""The names of methods on pages: those of the command line."""

from collections.abc import Mapping
from typing import Any

from lrpe_fairseq import patterns
from lrpe_fairseq.encodings import ENCODINGS, canonical_name, unwrapped
from lrpe_fairseq.experiments.records.tables import ANY, Table, short

UNNAMED = {
    "model.attention_normalizer", "model.encoder.attention_normalizer",
    "model.decoder.attention_normalizer", "model.no_token_positional_embeddings",
    "optimization.clip_norm", "optimization.lr", "model.cross.position_encoding",
    "task.node_positions", "task._name",
}  # fmt: skip
"""Options that :func:`method` names in its own way, or that follow from the method."""


def public_name(encoding: str) -> str:
    """Return the first public name of an encoding with several.

    >>> public_name("lrpe:identity:rotation"), public_name("lrpe-tmlr-type2")
    ('rope', 'lrpe-type2')
    """
    wrappers, inner = unwrapped(canonical_name(encoding))
    public = next((name for name in ENCODINGS if canonical_name(name) == inner), inner)
    return ":".join([*wrappers, public])


def method(encoding: str, options: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return the name of a row: its encoding on the command line, and the options it sets.

    options: of the row. usual: those of the table.

    >>> method("none", {"model.no_token_positional_embeddings": True}, {})
    'none, no positions'
    """
    parts = [patterns.canonical(encoding, public_name)]
    if encoding == "none":
        bare = options.get("model.no_token_positional_embeddings", False)
        parts.append("no positions" if bare else "sinusoidal")
    for part in ("", "encoder.", "decoder."):
        normalizer = options.get(f"model.{part}attention_normalizer", "rotated")
        parts += [normalizer] if normalizer != "rotated" else []
    cross = "model.cross.position_encoding"
    parts += ["with cross-attention"] if options.get(cross) != usual.get(cross) else []
    # What all rows have is said once, above the table.
    changed = {k: v for k, v in options.items() if k not in UNNAMED and v != usual.get(k)}
    parts += [short(k) if v is True else f"{short(k)} {v}" for k, v in changed.items()]
    return ", ".join(parts)


def names(table: Table) -> dict[str, str]:
    """Return the method of every row of a table, and its attention if that is its own."""
    has_attention = any(column.attention == ANY for column in table.columns)
    return {
        row.label: method(row.encoding, {**table.options, **row.overrides}, table.options)
        + (f" ({row.attention[0]})" if has_attention else "")
        for row in table.rows
    }
