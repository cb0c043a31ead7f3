"""The generated parts of README.md: the encodings' table and the quickstart's numbers.

``python -m lrpe_fairseq.experiments.readme`` rewrites them, ``--check`` fails when they are stale.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lrpe_fairseq.encodings import ENCODINGS, Encoding, QueryKeyEncoding, build_encoding
from lrpe_fairseq.encodings.lrpe import CORES, LRPE, PROJECTIONS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
QUICKSTART = ROOT / "results" / "quickstart" / "README.md"
BENCH = ROOT / "results" / "bench" / "cpu.json"


def main() -> None:
    """Rewrite README.md, or with ``--check`` say whether it is stale."""
    text = README.read_text(encoding="utf-8")
    fresh = render(text)
    if "--check" not in sys.argv:
        README.write_text(fresh, encoding="utf-8")
    elif fresh != text:
        sys.exit("README.md is stale: run python -m lrpe_fairseq.experiments.readme")


def render(text: str) -> str:
    """``text`` with every generated part rendered anew."""
    parts: dict[str, Callable[[], str]] = {
        "encodings": encodings_table,
        "quickstart": quickstart,
        "bench": bench,
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


def describe(encoding: Encoding) -> str:
    """What the encoding is: P x Lambda, or the first sentence of its class."""
    if isinstance(encoding, LRPE):
        names = [_name_of(PROJECTIONS, encoding.projection), _name_of(CORES, encoding.core)]
        return " x ".join(names)
    sentence = (inspect.getdoc(type(encoding)) or "").split(". ")[0].split("\n\n")[0]
    kind = "" if isinstance(encoding, QueryKeyEncoding) else " (needs the score matrix)"
    return " ".join(sentence.split()).rstrip(".") + kind


def quickstart() -> str:
    """The table that the last quickstart printed."""
    lines = (read_result(QUICKSTART) or "").splitlines()
    return "\n".join(line for line in lines if line.startswith("|")) or "not run"


def bench() -> str:
    """What the last ``make bench`` on a CPU found, as ratios."""
    measured = read_result(BENCH)
    if measured is None:
        return "not run"
    figures = json.loads(measured)
    parts = [
        _speed_ups(figures["attention"], ("naive", "sdpa")),
        _flatness(figures["flatness"]),
        _bidirectional(figures.get("bidirectional", [])),
        _decoding(figures.get("decoding", [])),
        _training(figures["training"]),
    ]
    machine = f"{figures['hardware']['cores']} cores, {figures['hardware']['cpu']}"
    parts.append(f"({machine}; commit {figures['commit'][:8]}.)")
    return "\n\n".join(filter(None, parts))


def _speed_ups(rows: list[dict[str, Any]], against: tuple[str, str]) -> str:
    found = _by(rows, "length", "contestant")
    lines = ["| T | chunked linear against the naive form | against torch SDPA |"]
    lines += ["|---:|---:|---:|"]
    for length in sorted({row["length"] for row in rows}):
        pair = [found[length, form]["speed_up"] for form in against]
        lines.append(f"| {length} | {pair[0]:.1f} x | {pair[1]:.1f} x |")
    return "\n".join(lines)


def _flatness(rows: list[dict[str, Any]]) -> str:
    flat = max(rows, key=lambda row: row["length"])
    return f"Cost per token at T = {flat['length']}: {flat['speed_up']:.2f} of that at 512."


def _bidirectional(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    lines = ["| T | bidirectional linear against torch SDPA |", "|---:|---:|"]
    rows = [row for row in rows if row["contestant"] == "sdpa"]
    return "\n".join([*lines, *(f"| {row['length']} | {row['speed_up']:.2f} x |" for row in rows)])


def _decoding(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    found = _by(rows, "length", "contestant")
    lines = ["| tokens put out | linear decoder against softmax | its state | softmax's |"]
    lines += ["|---:|---:|---:|---:|"]
    for length in sorted({row["length"] for row in rows}):
        linear, softmax = found[length, "linear"], found[length, "softmax"]
        sizes = " | ".join(f"{row['state_mb']:.2f} MB" for row in (linear, softmax))
        lines.append(f"| {length} | {softmax['speed_up']:.2f} x | {sizes} |")
    return "\n".join(lines)


def _training(rows: list[dict[str, Any]]) -> str:
    speed = _by(rows, "encoding", "attention")
    lines = ["| training speed relative to Base | linear | softmax |", "|---|---:|---:|"]
    for name in filter(lambda name: name != "none", ENCODINGS):
        both = [speed.get((name, kind)) for kind in ("linear", "softmax")]
        shown = [f"{row['relative_speed']:.2f}" if row else "–" for row in both]
        lines.append(f"| `{name}` | {shown[0]} | {shown[1]} |")
    return "\n".join(lines)


def _by(rows: list[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(row[key] for key in keys): row for row in rows}


def read_result(path: Path) -> str | None:
    """The text of a result in this folder, None if there is none."""
    return path.read_text(encoding="utf-8") if path.exists() else None


def _name_of(table: dict[str, type], module: object) -> str:
    return next(name for name, kind in table.items() if type(module) is kind)


if __name__ == "__main__":
    main()
