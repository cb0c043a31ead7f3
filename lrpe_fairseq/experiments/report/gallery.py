"""The gallery of encodings, docs/encodings.md: a table, an entry with a picture each, options."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

from lrpe_fairseq.encodings import (
    ENCODINGS,
    FAMILIES,
    Encoding,
    EncodingOptions,
    QueryKeyEncoding,
    build_encoding,
    encoding_class,
)
from lrpe_fairseq.experiments.report import markdown, portraits

PAGE = "docs/encodings.md"
PICTURES = "docs/figures/encodings"
RELATIVE = {
    "exact": "the score depends on s - t only",
    "in expectation": "the score depends on s - t only on average over the random code",
    "no": "the score depends on more than s - t",
}


def pages(root: Path) -> dict[str, str]:
    """docs/encodings.md with every generated part rendered anew."""
    text = (root / PAGE).read_text(encoding="utf-8")
    text = markdown.between(text, "encodings", encodings_table())
    text = markdown.between(text, "gallery", "\n\n".join(entry(name) for name in ENCODINGS))
    return {PAGE: markdown.between(text, "options", options_table())}


def pictures(root: Path) -> dict[str, Callable[[Path], None]]:
    """A picture for every name of ENCODINGS."""
    return {f"{PICTURES}/{name}.png": partial(portraits.draw, name) for name in ENCODINGS}


def built(name: str, grid_width: int = 0) -> Encoding:
    """Return the encoding of one causal layer with 8 heads of 64."""
    options = EncodingOptions(grid_width=grid_width)
    return build_encoding(name, head_dim=64, num_heads=8, causal=True, options=options)


def encodings_table() -> str:
    """Return one row per name of ENCODINGS, read from the built encoding."""
    rows = []
    for name in ENCODINGS:
        encoding = built(name)
        linear = "yes" if encoding.serves_linear else "–"
        both = "–" if encoding.causal_only else "yes"
        learned = f"{_learned(encoding):,}"
        rows.append([f"[`{name}`](#{name})", describe(encoding), linear, "yes", both, learned])
    for family in FAMILIES.values():
        row = [f"`{family.form}`", f"the free form {family.rest}", "yes", "yes"]
        rows.append([*row, "–" if family.causal_only else "yes", ""])
    head = ["name", "description", "linear", "softmax", "bidirectional", "learned parameters"]
    return markdown.table(head, rows)


def entry(name: str) -> str:
    """Return the entry of one encoding: equation, properties and picture.

    Trap: in a block between $$ GitHub applies Markdown first, which turns "\\," into a comma.
    """
    encoding = built(name)
    lines = [f"### `{name}`", ""]
    card = encoding.card
    if card is not None:
        lines += ["```math", card.equation, "```", ""]
    lines += [f"- Attention: {_attention(encoding)}", f"- Position: {_position(encoding)}"]
    lines += [f"- Learned parameters: {_learned(encoding):,}"]
    if card is not None:
        lines += [f"- Cost: {card.cost}", f"- Beyond the training length: {card.beyond}"]
        lines += [f"- Source: {card.source}"]
    lines += ["", f"![{name}]({Path(PICTURES).relative_to('docs').as_posix()}/{name}.png)"]
    return "\n".join(lines)


def _attention(encoding: Encoding) -> str:
    kinds = "linear and softmax" if encoding.serves_linear else "softmax"
    return f"{kinds}, " + ("causal only" if encoding.causal_only else "causal and bidirectional")


def _position(encoding: Encoding) -> str:
    """Say on what the score depends, from the capability fields."""
    if encoding.contextual:
        said = "distances are counted in context, from the tokens in between"
    elif encoding.relative_by:
        said = f"the score depends on {encoding.relative_by} only"
    else:
        said = RELATIVE[encoding.relative]
    if encoding.relative_up_to is not None:
        said += f", up to position {encoding.relative_up_to:,}"
    if encoding.reads_grid:
        more = "" if built(encoding.name, grid_width=8).relative == "exact" else "more than "
        said += f"; on a grid (`--grid-width`) on {more}the differences of rows and columns"
    if encoding.without_absolute:
        said += "; defined for models without absolute positions"
    return said


def _learned(encoding: Encoding) -> int:
    return sum(p.numel() for p in encoding.parameters() if p.requires_grad)


def options_table() -> str:
    """Return one row per option of an encoding, from the classes of ENCODINGS."""
    rows = []
    for kind in dict.fromkeys(encoding_class(name).Options for name in ENCODINGS):
        for own in fields(kind):
            choices = own.metadata["choices"]
            flag = "--" + own.name.replace("_", "-")
            flag += f" {{{','.join(choices)}}}" if choices else ""
            rows.append([f"`{flag}`", own.default, own.metadata["help"]])
    return markdown.table(["option of an encoding", "default", "description"], rows)


def describe(encoding: Encoding) -> str:
    """Describe the encoding, and note if it needs the score matrix."""
    kind = "" if isinstance(encoding, QueryKeyEncoding) else " (needs the score matrix)"
    return encoding.summary() + kind
