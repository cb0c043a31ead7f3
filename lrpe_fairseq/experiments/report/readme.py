"""The generated parts of README.md and docs/encodings.md, and the picture of the quickstart."""

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from itertools import groupby
from pathlib import Path

from lrpe_fairseq.encodings import (
    ENCODINGS,
    Encoding,
    QueryKeyEncoding,
    build_encoding,
    encoding_class,
)
from lrpe_fairseq.encodings.lrpe import CORES, PROJECTIONS
from lrpe_fairseq.experiments.report import dots, markdown, quickstart

PAGE = "README.md"
ENCODINGS_PAGE = "docs/encodings.md"
PICTURE = "results/figures/quickstart.png"


def pages(root: Path) -> dict[str, str]:
    """README.md and docs/encodings.md with every generated part rendered anew."""
    text = (root / PAGE).read_text(encoding="utf-8")
    text = markdown.between(text, "encodings", names_table())
    own = (root / ENCODINGS_PAGE).read_text(encoding="utf-8")
    own = markdown.between(own, "encodings", encodings_table())
    return {
        PAGE: markdown.between(text, "quickstart", quickstart_numbers(root)),
        ENCODINGS_PAGE: markdown.between(own, "options", options_table()),
    }


def pictures(root: Path) -> dict[str, Callable[[Path], None]]:
    """The quickstart's test perplexities as dots; none without its run files."""
    found = quickstart.rows(quickstart.published(root / quickstart.RUNS))
    return {PICTURE: partial(dots.draw, found=found)} if found else {}


def names_table() -> str:
    """The names of ENCODINGS by the attention types that they serve."""
    linear = {name: encoding_class(name).serves_linear for name in ENCODINGS}
    both = [*numbered(name for name in ENCODINGS if linear[name]), "`lrpe:<P>:<Lambda>`"]
    softmax = numbered(name for name in ENCODINGS if not linear[name])
    rows = [["linear, softmax", ", ".join(both)], ["softmax", ", ".join(softmax)]]
    return markdown.table(["attention", "`--position-encoding`"], rows)


def numbered(names: Iterable[str]) -> list[str]:
    """The names in code marks; neighbours whose final numbers count up by 1 become a range.

    >>> numbered(["rope", "x1", "x2", "x3"])
    ['`rope`', '`x1` to `x3`']
    """
    found = []
    for _, group in groupby(enumerate(names), key=_series):
        first, *_, last = [name for _, name in group] * 2
        found.append(f"`{first}`" if first == last else f"`{first}` to `{last}`")
    return found


def _series(place: tuple[int, str]) -> tuple[str, int]:
    """Equal for neighbours whose final numbers count up; different for any other two."""
    index, name = place
    stem, number = re.fullmatch(r"(.*?)(\d*)", name).groups()
    return (stem, int(number) - index) if number else (f"{name} ", index)


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
