"""Text of generated pages: Markdown tables, numbers, and sections between markers."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

NOT_MEASURED = "not measured"


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], numbers: bool = False) -> str:
    """Return a Markdown table; ``|`` in cells is escaped.

    numbers: right-align all columns but the first.
    """
    right = ["---:"] * (len(head) - 1) if numbers else ["---"] * (len(head) - 1)
    lines = [_line(map(_escape, head)), _line(["---", *right])]
    return "\n".join([*lines, *(_line(map(_escape, row)) for row in rows)])


def between(text: str, name: str, content: str) -> str:
    """Return ``text`` with ``content`` between ``<!-- name -->`` and ``<!-- /name -->``.

    Raises: ValueError if ``text`` lacks these markers.
    """
    pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the markers <!-- {name} --> ... <!-- /{name} --> are missing")
    return pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def read_result(path: Path) -> str | None:
    """Return the text of a file under ``results/``; None if it does not exist."""
    return path.read_text(encoding="utf-8") if path.exists() else None


def fixed(value: float, decimals: int) -> str:
    """Return ``value`` with that many decimals, none from 1,000 on, without a negative zero.

    >>> fixed(41100.48, 2), fixed(-0.001, 2)
    ('41100', '0.00')
    """
    decimals = 0 if abs(value) >= 1000 else decimals
    return f"{round(value, decimals) + 0.0:.{decimals}f}"


def wrapped(text: str) -> str:
    """Fill paragraphs and list items to 100 columns; headings, tables and pictures stay."""
    found: list[str] = []
    part: list[str] = []
    for line in [*text.split("\n"), ""]:
        kept = re.match(r"#|\||!\[|\s*$", line) is not None
        if part and (kept or line.startswith("- ")):
            found.append(_filled(" ".join(part)))
            part = []
        (found if kept else part).append(line)
    return "\n".join(found[:-1])


def _filled(words: str) -> str:
    indent = "  " if words.startswith("- ") else ""
    whole = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(" ".join(words.split()), 100, subsequent_indent=indent, **whole)


def listed(words: Sequence[str]) -> str:
    """Join words: ``a``, ``a and b``, ``a, b and c``."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def processors(hardware: dict[str, Any]) -> str:
    """Return the GPUs of a run file, or its processor without them."""
    return ", ".join(hardware.get("gpus", [])) or str(hardware.get("cpu", "unknown CPU"))


def short(commit: str) -> str:
    """Return the first digits of a commit; a suffix ``-dirty`` is kept."""
    name, _, dirty = commit.partition("-")
    return name[:10] + (f"-{dirty}" if dirty else "")


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escape(cell: Any) -> str:
    return str(cell).replace("|", "\\|")
