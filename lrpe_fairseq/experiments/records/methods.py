"""The names of methods on pages: those of the command line. Commands find rows by them."""

from collections.abc import Mapping
from typing import Any

from lrpe_fairseq import patterns
from lrpe_fairseq.encodings import ENCODINGS, canonical_name, unwrapped
from lrpe_fairseq.errors import did_you_mean
from lrpe_fairseq.experiments.records.tables import ANY, Row, Table, short

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
        parts.append(_absolute_positions(options))
    for part in ("", "encoder.", "decoder."):
        normalizer = options.get(f"model.{part}attention_normalizer", "rotated")
        parts += [normalizer] if normalizer != "rotated" else []
    cross = "model.cross.position_encoding"
    parts += ["with cross-attention"] if options.get(cross) != usual.get(cross) else []
    # What all rows have is said once, above the table.
    changed = {k: v for k, v in options.items() if k not in UNNAMED and v != usual.get(k)}
    if encoding == "none":
        changed = {k: v for k, v in changed.items() if not k.endswith("learned_pos")}
    parts += [short(k) if v is True else f"{short(k)} {v}" for k, v in changed.items()]
    return ", ".join(parts)


def _absolute_positions(options: Mapping[str, Any]) -> str:
    """Return how a model without an encoding marks positions: learned ones, sinusoids or none."""
    if options.get("model.no_token_positional_embeddings", False):
        return "no positions"
    learned = any(value for key, value in options.items() if key.endswith("learned_pos"))
    return "learned positions" if learned else "sinusoidal"


def names(table: Table) -> dict[str, str]:
    """Return the method of every row of a table, and its attention if that is its own."""
    has_attention = any(column.attention == ANY for column in table.columns)
    return {
        row.label: method(row.encoding, {**table.options, **row.overrides}, table.options)
        + (f" ({row.attention[0]})" if has_attention else "")
        for row in table.rows
    }


def rows_named(table: Table, name: str) -> list[Row]:
    """Return the rows of a table that a user means by ``name``.

    It is a label in any case (``RoPE``, ``rope``), the name of a method on pages (``lrpe-type2,
    layernorm``) or that of an encoding, which stands for all of its rows. The first of these that
    the table has decides. Raises: ValueError, with the nearest name or all labels, for any other.
    """
    shown = names(table)
    readings = (
        [row for row in table.rows if row.label == name],
        [row for row in table.rows if row.label.casefold() == name.casefold()],
        [row for row in table.rows if shown[row.label] == name],
        [row for row in table.rows if _same_encoding(row.encoding, name)],
    )
    if found := next(filter(None, readings), []):
        return found
    known = [row.label for row in table.rows]
    near = did_you_mean(name, [*known, *shown.values()])
    raise ValueError(
        f"table {table.name} has no row {name!r}{near or '; it has ' + '; '.join(known)}"
    )


def row_named(table: Table, name: str) -> Row:
    """Return the row that a user means by ``name``; see :func:`rows_named`.

    Raises: ValueError if there is none, or several of them.
    """
    found = rows_named(table, name)
    if len(found) > 1:
        labels = "; ".join(row.label for row in found)
        raise ValueError(f"table {table.name} has several rows of {name}: choose one of {labels}")
    return found[0]


def _same_encoding(encoding: str, name: str) -> bool:
    """True if ``name`` is an encoding, or a pattern over layers, that equals ``encoding``."""
    if not all(value.strip() for value in name.split(",")):
        return False
    wanted = patterns.canonical(name, canonical_name)
    return patterns.canonical(encoding, canonical_name) == wanted
