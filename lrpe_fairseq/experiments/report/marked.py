"""The generated parts of hand-written pages: README.md and docs/.

A part stands between ``<!-- name -->`` and ``<!-- /name -->``. The tables of encodings and options
and the gallery are read from the classes of ENCODINGS.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lrpe_fairseq.encodings import (
    ENCODINGS,
    FAMILIES,
    Encoding,
    EncodingOptions,
    build_encoding,
    options_of_encodings,
)
from lrpe_fairseq.encodings.fidelity import DEPARTURES
from lrpe_fairseq.experiments.report import choosing, frame, markdown
from lrpe_fairseq.experiments.report.pages import verdict

VERSIONS = "results/versions"
POSITION = {
    "exact": "s - t only",
    "in expectation": "s - t only, on average over the random code",
    "no": "more than s - t",
}
"""Relative -> on what a score depends."""
YES = {True: "yes", False: "–"}


def pages(root: Path) -> dict[str, str]:
    """Return path -> text of every page with its marked parts rendered anew."""
    found = {}
    for path, parts in MARKED.items():
        text = (root / path).read_text(encoding="utf-8")
        for name, part in parts.items():
            text = markdown.between(text, name, part(root))
        found[path] = text
    return found


def pictures(root: Path) -> dict[str, Callable[[Path], None]]:
    """Return no pictures."""
    return {}


# --- docs/fidelity.md and docs/installing.md -----------------------------------------------------


def departures_table() -> str:
    """Return a table with one row per departure that ``--fidelity`` accepts."""
    head = ("name", "the paper says", "the authors' code did", "ours does")
    rows = [(f"`{name}`", own.paper, own.code, own.ours) for name, own in DEPARTURES.items()]
    return markdown.table(head, rows)


def departures_measured(root: Path) -> str:
    """Return the finding of the table ``fidelity`` at every scale with runs."""
    results = frame.results(root)
    found = [verdict(s.table, results.headlines(s)) for s in results.sheets_of("fidelity")]
    return "\n".join(found) or "Not measured."


def versions_table(root: Path) -> str:
    """Return a row per tested pair of Python and torch, then why tests were skipped."""
    head = ("Python", "torch", "numpy", "triton", "passed", "failed", "skipped", "commit")
    files = sorted((root / VERSIONS).glob("*.json"), key=_by_version)
    results = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    table = markdown.table(head, map(_version_row, results))
    reasons = [_skipped(result) for result in results]
    return "\n".join([table, "", *filter(None, reasons)]).strip()


def _by_version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.stem)]


def _version_row(result: Mapping[str, Any]) -> list[Any]:
    if "not_run" in result:
        return [result["python"], result["torch"], *["–"] * 5, f"not run: {result['not_run']}"]
    names = ("python", "torch", "numpy", "triton")
    suites = result["suites"].values()
    counts = [sum(suite[c] for suite in suites) for c in ("passed", "failed", "skipped")]
    return [*(result["versions"][name] for name in names), *counts, result["commit"][:8]]


def _skipped(result: Mapping[str, Any]) -> str:
    pair = f"Python {result['python']}, torch {result['torch']}"
    reasons = [item for s in result.get("suites", {}).values() for item in s["reasons"].items()]
    return "\n".join(f"- {pair}: {count} skipped: {why}" for why, count in reasons)


# --- docs/encodings.md ---------------------------------------------------------------------------


def built(name: str, grid_width: int = 0) -> Encoding:
    """Return the encoding of one causal layer with 8 heads of 64."""
    options = EncodingOptions(grid_width=grid_width)
    return build_encoding(name, head_dim=64, num_heads=8, causal=True, options=options)


def encodings_table() -> str:
    """Return one row per name of ENCODINGS, read from the built encoding."""
    rows = []
    for name in ENCODINGS:
        encoding = built(name)
        linear, both = encoding.serves_linear, not encoding.causal_only
        learned = sum(p.numel() for p in encoding.parameters() if p.requires_grad)
        row = [f"[`{name}`](#{name})", encoding.summary(), YES[linear], YES[both], f"{learned:,}"]
        rows.append([*row, encoding.scales or "–"])
    for family in FAMILIES.values():
        text = f"the free form {family.rest}"
        rows.append([f"`{family.form}`", text, YES[True], YES[not family.causal_only], "", ""])
    head = ["name", "description", "linear", "bidirectional", "learned parameters"]
    head += ["`--context-scaling` scales"]
    return markdown.table(head, rows)


def entry(name: str) -> str:
    """Return the entry of one encoding: equation and properties.

    Trap: in a block between $$ GitHub applies Markdown first, which turns "\\," into a comma.
    """
    same = frame.public_name(name)
    if same != name:
        return f"### `{name}`\n\nThe same method as [`{same}`](#{same})."
    encoding = built(name)
    lines, card = [f"### `{name}`", ""], encoding.card
    if card is not None:
        lines += ["```math", card.equation, "```", ""]
    lines += [f"- Position: {_position(encoding)}"]
    if card is not None:
        lines += [f"- Cost: {card.cost}", f"- Beyond training: {card.beyond}"]
        lines += [f"- Source: {card.source}"]
    return "\n".join(lines)


def _position(encoding: Encoding) -> str:
    """Say on what the score depends, from the capability fields."""
    promised = encoding.properties
    if promised.contextual:
        said = "counted in context, from the tokens in between"
    else:
        own = promised.relative_by
        said = f"{own} only" if own else POSITION[promised.relative]
    if promised.relative_up_to is not None:
        said += f", up to position {promised.relative_up_to:,}"
    if encoding.reads_grid:
        on_grid = built(encoding.name, grid_width=8).properties
        more = "" if on_grid.relative == "exact" else "more than "
        said += f"; on a grid (`--grid-width`) {more}the differences of rows and columns"
    return said + ("; for models without absolute positions" if encoding.without_absolute else "")


def options_table() -> str:
    """Return one row per option of an encoding, from the classes of ENCODINGS."""
    rows = []
    for own in options_of_encodings().values():
        choices = own.metadata["choices"]
        flag = "--" + own.name.replace("_", "-")
        flag += f" {{{','.join(choices)}}}" if choices else ""
        rows.append([f"`{flag}`", own.default, own.metadata["help"]])
    return markdown.table(["option of an encoding", "default", "description"], rows)


MARKED: dict[str, dict[str, Callable[[Path], str]]] = {
    "README.md": {"answer": choosing.answer},
    "docs/encodings.md": {
        "encodings": lambda root: encodings_table(),
        "gallery": lambda root: "\n\n".join(entry(name) for name in ENCODINGS),
        "options": lambda root: options_table(),
    },
    "docs/fidelity.md": {
        "departures": lambda root: departures_table(),
        "measured": departures_measured,
    },
    "docs/installing.md": {"versions": versions_table},
}
"""Page -> name of a part -> function that renders it."""
