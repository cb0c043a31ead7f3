"""Text of generated pages: Markdown tables, numbers, and sections between markers."""

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@functools.cache
def _environment() -> Environment:
    """Return jinja's environment, in which an undefined name is an error."""
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    return Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True)


def rendered(template: str, **values: Any) -> str:
    """Return a page: the template with ``values``, without runs of empty lines."""
    text = _environment().get_template(template).render(**values)
    text = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], numbers: bool = False) -> str:
    """Return a Markdown table; ``|`` is escaped. numbers: right-align all columns but the first."""
    right = ["---:"] * (len(head) - 1) if numbers else ["---"] * (len(head) - 1)
    # A bar within a cell would begin another cell.
    escaped = [[str(cell).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    lines = [escaped[0], ["---", *right], *escaped[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def between(text: str, name: str, content: str) -> str:
    """Return ``text`` with ``content`` between two markers. Raises: ValueError without them."""
    pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the markers <!-- {name} --> ... <!-- /{name} --> are missing")
    # A function, because a backslash in the content is no escape.
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


def fixed(value: float, decimals: int) -> str:
    """Return ``value`` with that many decimals, none from 1,000 on, without a negative zero.

    >>> fixed(41100.48, 2), fixed(-0.001, 2)
    ('41100', '0.00')
    """
    # Decimals of a model that fails say nothing.
    decimals = 0 if abs(value) >= 1000 else decimals
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{round(value, decimals) + 0.0:.{decimals}f}"


def listed(words: Sequence[str]) -> str:
    """Join words: ``a``, ``a and b``, ``a, b and c``; nothing without words."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def processors(hardware: dict[str, Any]) -> str:
    """Return the GPUs of a run file, or its processor without them."""
    return ", ".join(hardware.get("gpus", [])) or str(hardware.get("cpu", "unknown CPU"))
