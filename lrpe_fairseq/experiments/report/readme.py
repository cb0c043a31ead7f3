"""The generated parts of README.md: the encodings' table and the quickstart's numbers."""

import inspect
from pathlib import Path

from lrpe_fairseq.encodings import ENCODINGS, Encoding, QueryKeyEncoding, build_encoding
from lrpe_fairseq.encodings.lrpe import CORES, LRPE, PROJECTIONS
from lrpe_fairseq.experiments.report import markdown

PAGE = "README.md"
QUICKSTART = "results/quickstart/README.md"


def pages(root: Path) -> dict[str, str]:
    """README.md with every generated part rendered anew."""
    text = (root / PAGE).read_text(encoding="utf-8")
    text = markdown.between(text, "encodings", encodings_table())
    return {PAGE: markdown.between(text, "quickstart", quickstart(root))}


def encodings_table() -> str:
    """One row for every name of ENCODINGS, from the built encoding itself."""
    rows = []
    for name in ENCODINGS:
        encoding = build_encoding(name, head_dim=64, num_heads=8, causal=True)
        linear = "yes" if encoding.serves_linear else "–"
        learned = sum(p.numel() for p in encoding.parameters() if p.requires_grad)
        rows.append([f"`{name}`", describe(encoding), linear, "yes", f"{learned:,}"])
    free = f"P in {{{', '.join(PROJECTIONS)}}}, Lambda in {{{', '.join(CORES)}}}"
    rows.append(["`lrpe:<P>:<Lambda>`", f"the free form: {free}", "yes", "yes", ""])
    head = ["`--position-encoding`", "what it is", "linear", "softmax", "learned parameters"]
    return markdown.table(head, rows)


def describe(encoding: Encoding) -> str:
    """What the encoding is: P x Lambda, or the first sentence of its class."""
    if isinstance(encoding, LRPE):
        names = [_name_of(PROJECTIONS, encoding.projection), _name_of(CORES, encoding.core)]
        return " x ".join(names)
    sentence = (inspect.getdoc(type(encoding)) or "").split(". ")[0].split("\n\n")[0]
    kind = "" if isinstance(encoding, QueryKeyEncoding) else " (needs the score matrix)"
    return " ".join(sentence.split()).rstrip(".") + kind


def quickstart(root: Path) -> str:
    """The table that the last quickstart printed."""
    lines = (markdown.read_result(root / QUICKSTART) or "").splitlines()
    return "\n".join(line for line in lines if line.startswith("|")) or markdown.NOT_RUN


def _name_of(table: dict[str, type], module: object) -> str:
    return next(name for name, kind in table.items() if type(module) is kind)
