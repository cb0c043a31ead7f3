"""The generated parts of hand-written pages: README.md and docs/.

A part stands between ``<!-- name -->`` and ``<!-- /name -->``.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lrpe_fairseq.encodings.fidelity import DEPARTURES
from lrpe_fairseq.experiments.report import choosing, frame, gallery, markdown
from lrpe_fairseq.experiments.report.pages import verdict

VERSIONS = "results/versions"


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
    """Return the contact sheet of the encodings."""
    return {gallery.SHEET: gallery.contact_sheet}


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


MARKED: dict[str, dict[str, Callable[[Path], str]]] = {
    "README.md": {"answer": choosing.answer},
    "docs/encodings.md": {
        "encodings": lambda root: gallery.encodings_table(),
        "gallery": lambda root: gallery.entries(),
        "options": lambda root: gallery.options_table(),
    },
    "docs/fidelity.md": {
        "departures": lambda root: departures_table(),
        "measured": departures_measured,
    },
    "docs/installing.md": {"versions": versions_table},
}
"""Page -> name of a part -> function that renders it."""
