"""The generated parts of README.md: the tables of encodings and their options, and the
quickstart's numbers.

``python -m lrpe_fairseq.experiments.report.readme`` rewrites them; ``--check`` fails if they are
stale.
"""

import re
import sys
from collections.abc import Callable
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

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
QUICKSTART = ROOT / "results" / "quickstart" / "README.md"


def main() -> None:
    """Rewrite README.md, or with ``--check`` fail if it is stale."""
    text = README.read_text(encoding="utf-8")
    fresh = render(text)
    if "--check" not in sys.argv:
        README.write_text(fresh, encoding="utf-8")
    elif fresh != text:
        sys.exit("README.md is stale: run python -m lrpe_fairseq.experiments.report.readme")


def render(text: str) -> str:
    """``text`` with every generated part rendered anew."""
    parts: dict[str, Callable[[], str]] = {
        "encodings": lambda: f"{encodings_table()}\n\n{options_table()}",
        "quickstart": quickstart,
    }
    for name, part in parts.items():
        text = between(text, name, part())
    return text


def between(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between ``<!-- name -->`` and ``<!-- /name -->``."""
    pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"there is no place marked <!-- {name} --> ... <!-- /{name} -->")
    return pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def replace_between(path: Path, name: str, content: str) -> None:
    """:func:`between` on a file."""
    path.write_text(between(path.read_text(encoding="utf-8"), name, content), encoding="utf-8")


def encodings_table() -> str:
    """One row for every name of ENCODINGS, from the built encoding itself."""
    rows = ["| `--position-encoding` | what it is | linear | softmax | learned parameters |"]
    rows += ["|---|---|:-:|:-:|---:|"]
    for name in ENCODINGS:
        encoding = build_encoding(name, head_dim=64, num_heads=8, causal=True)
        linear = "yes" if encoding.serves_linear else "–"
        learned = sum(p.numel() for p in encoding.parameters() if p.requires_grad)
        rows.append(f"| `{name}` | {describe(encoding)} | {linear} | yes | {learned:,} |")
    free = f"P in {{{', '.join(PROJECTIONS)}}}, Lambda in {{{', '.join(CORES)}}}"
    rows.append(f"| `lrpe:<P>:<Lambda>` | the free form: {free} | yes | yes | |")
    return "\n".join(rows)


def options_table() -> str:
    """One row for every option of an encoding, from the classes of ENCODINGS."""
    rows = ["| option of an encoding | default | what it sets |", "|---|---|---|"]
    for kind in dict.fromkeys(encoding_class(name).Options for name in ENCODINGS):
        for own in fields(kind):
            flag = "--" + own.name.replace("_", "-")
            choices = own.metadata["choices"]
            flag += f" {{{','.join(choices)}}}" if choices else ""
            rows.append(f"| `{flag}` | {own.default} | {cell(own.metadata['help'])} |")
    return "\n".join(rows)


def describe(encoding: Encoding) -> str:
    """What the encoding is, and whether it needs the score matrix."""
    kind = "" if isinstance(encoding, QueryKeyEncoding) else " (needs the score matrix)"
    return cell(encoding.summary() + kind)


def cell(text: str) -> str:
    """``text`` as it may stand in a cell of a table."""
    return text.replace("|", "\\|")


def quickstart() -> str:
    """The table that the last quickstart printed."""
    lines = (read_result(QUICKSTART) or "").splitlines()
    return "\n".join(line for line in lines if line.startswith("|")) or "not run"


def read_result(path: Path) -> str | None:
    """The text of a result in this folder, None if there is none."""
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    main()
