"""The generated parts of README.md: tables of encodings and options, the quickstart's numbers."""

from dataclasses import fields
from pathlib import Path

from lrpe_fairseq.encodings import (
    ENCODINGS,
    Encoding,
    QueryKeyEncoding,
    build_encoding,
    encoding_class,
)
from lrpe_fairseq.encodings.lrpe import CORES, PROJECTIONS
from lrpe_fairseq.experiments.report import markdown, quickstart

PAGE = "README.md"


def pages(root: Path) -> dict[str, str]:
    """Return README.md with every generated part regenerated."""
    text = (root / PAGE).read_text(encoding="utf-8")
    text = markdown.between(text, "encodings", f"{encodings_table()}\n\n{options_table()}")
    return {PAGE: markdown.between(text, "quickstart", quickstart_numbers(root))}


def encodings_table() -> str:
    """Return one row per name of ENCODINGS, read from the built encoding."""
    rows = []
    for name in ENCODINGS:
        encoding = build_encoding(name, head_dim=64, num_heads=8, causal=True)
        linear = "yes" if encoding.serves_linear else "–"
        learned = sum(p.numel() for p in encoding.parameters() if p.requires_grad)
        rows.append([f"`{name}`", describe(encoding), linear, "yes", f"{learned:,}"])
    free = f"P in {{{', '.join(PROJECTIONS)}}}, Lambda in {{{', '.join(CORES)}}}"
    rows.append(["`lrpe:<P>:<Lambda>`", f"the free form: {free}", "yes", "yes", ""])
    head = ["`--position-encoding`", "description", "linear", "softmax", "learned parameters"]
    return markdown.table(head, rows)


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


def quickstart_numbers(root: Path) -> str:
    """Return the quickstart's table and the order supported by its committed runs."""
    return quickstart.numbers(quickstart.rows(quickstart.published(root / quickstart.RUNS)))
