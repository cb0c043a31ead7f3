"""Text of generated pages: Markdown tables, numbers, and parts between markers."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

NOT_RUN = "not run"
DIVERGED = "diverged"
NOT_MEASURED = "not measured"
NO_CELL = "—"


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], numbers: bool = False) -> str:
    """A Markdown table; a ``|`` in a cell is escaped. numbers: align all columns but the first
    to the right."""
    right = ["---:"] * (len(head) - 1) if numbers else ["---"] * (len(head) - 1)
    lines = [_line(map(_escape, head)), _line(["---", *right])]
    return "\n".join([*lines, *(_line(map(_escape, row)) for row in rows)])


def between(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between ``<!-- name -->`` and ``<!-- /name -->``.

    Raises: ValueError if ``text`` has no such markers.
    """
    pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"there is no place marked <!-- {name} --> ... <!-- /{name} -->")
    return pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def read_result(path: Path) -> str | None:
    """The text of a file under ``results/``; None if there is none."""
    return path.read_text(encoding="utf-8") if path.exists() else None


def fixed(value: float, decimals: int) -> str:
    """``value`` with that many decimals; never a negative zero."""
    return f"{round(value, decimals) + 0.0:.{decimals}f}"


def signed(value: float, decimals: int) -> str:
    """:func:`fixed` with a sign."""
    return f"{round(value, decimals) + 0.0:+.{decimals}f}"


def percent(value: float, base: float) -> str:
    """``value`` relative to ``base``; a dash for a base of zero (a Matthews correlation)."""
    return f"{signed(100 * (value / base - 1), 1)} %" if base else NO_CELL


def plain_number(value: Any) -> str:
    """An option as text: integers with thousands separators, anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def wrapped(text: str) -> str:
    """Paragraphs and list items of ``text``, each filled to 100 columns."""
    blocks = re.split(r"\n\s*\n|\n(?=- )", text.strip())
    result, previous = "", ""
    for block in blocks:
        item = block.startswith("- ")
        if result:
            result += "\n" if item and previous.startswith("- ") else "\n\n"
        indent = {"subsequent_indent": "  "} if item else {}
        words = " ".join(block.split())
        result += textwrap.fill(
            words, 100, break_long_words=False, break_on_hyphens=False, **indent
        )
        previous = block
    return result


def listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def machine(hardware: dict[str, Any]) -> str:
    """Processor, cores and GPUs of a run file."""
    gpus = ", ".join(hardware.get("gpus", [])) or "no GPU"
    return f"{hardware.get('cpu', 'unknown CPU')}, {hardware.get('cores', '?')} cores, {gpus}"


def short(commit: str) -> str:
    """The first digits of a commit; ``-dirty`` stays."""
    name, _, dirty = commit.partition("-")
    return name[:10] + (f"-{dirty}" if dirty else "")


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escape(cell: Any) -> str:
    return str(cell).replace("|", "\\|")
