"""The generated parts of README.md, and the picture of the quickstart."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby
from pathlib import Path

from lrpe_fairseq.encodings import ENCODINGS, FAMILIES, encoding_class
from lrpe_fairseq.experiments.report import choosing, markdown, plots, quickstart

PAGE = "README.md"
PICTURE = "results/figures/quickstart.png"


def pages(root: Path) -> dict[str, str]:
    """README.md with every generated part rendered anew."""
    text = (root / PAGE).read_text(encoding="utf-8")
    text = markdown.between(text, "encodings", names_table())
    text = markdown.between(text, "answer", choosing.answer(root))
    return {PAGE: markdown.between(text, "quickstart", quickstart_numbers(root))}


def pictures(root: Path) -> dict[str, Callable[[Path], None]]:
    """The quickstart's test perplexities as dots; none without its run files."""
    found = quickstart.rows(quickstart.published(root / quickstart.RUNS))
    return {PICTURE: partial(_dots, found=found)} if found else {}


def _dots(path: Path, found: list[quickstart.Row]) -> None:
    kinds = dict.fromkeys(row.attention for row in found)
    panels = {
        f"{kind} attention": {
            row.encoding: list(row.ppl.values()) for row in found if row.attention == kind
        }
        for kind in kinds
    }
    plots.seeds(path, panels, "test perplexity per character, lower is better")


def names_table() -> str:
    """The names of ENCODINGS by the attention types that they serve."""
    linear = {name: encoding_class(name).serves_linear for name in ENCODINGS}
    both = [*numbered(name for name in ENCODINGS if linear[name])]
    both += [f"`{family.form}`" for family in FAMILIES.values()]
    softmax = numbered(name for name in ENCODINGS if not linear[name])
    rows = [["linear, softmax", ", ".join(both)], ["softmax", ", ".join(softmax)]]
    return markdown.table(["attention", "`--position-encoding`"], rows)


def numbered(names: Iterable[str]) -> list[str]:
    """The names in code marks; neighbors whose final numbers count up by 1 become a range.

    >>> numbered(["rope", "x1", "x2", "x3"])
    ['`rope`', '`x1` to `x3`']
    """
    found = []
    for _, group in groupby(enumerate(names), key=_series):
        first, *_, last = [name for _, name in group] * 2
        found.append(f"`{first}`" if first == last else f"`{first}` to `{last}`")
    return found


def _series(place: tuple[int, str]) -> tuple[str, int]:
    """Equal for neighbors whose final numbers count up; different for any other two."""
    index, name = place
    stem, number = re.fullmatch(r"(.*?)(\d*)", name).groups()
    return (stem, int(number) - index) if number else (f"{name} ", index)


def quickstart_numbers(root: Path) -> str:
    """Return the quickstart's table and the order supported by its committed runs."""
    return quickstart.numbers(quickstart.rows(quickstart.published(root / quickstart.RUNS)))
