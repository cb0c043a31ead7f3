"""The tested versions of Python and torch: the table of docs/installing.md.

``scripts/test_versions.sh`` runs the tests and calls this file: ``claimed`` lists the pairs, and
``record`` writes ``results/versions/*.json`` from pytest's XML files. ``make docs`` renders the
table. This package is imported only inside functions, so that ``claimed`` works without torch.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[3]
PAGE = "docs/installing.md"
RESULTS = "results/versions"
CLAIMED = (
    ("3.11", "2.6.0"),
    ("3.11", "2.10.0"),
    ("3.11", "2.13.0"),
    ("3.12", "2.6.0"),
    ("3.12", "2.10.0"),
    ("3.12", "2.13.0"),
)
"""Supported pairs: both ends of each range, and the last torch with code for a V100."""

COUNTS = ("passed", "failed", "skipped")
HEAD = ("Python", "torch", "numpy", "triton", "tests", *COUNTS, "commit")
NOT_RUN = "not run"
Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """List the pairs or record a result; return the exit status."""
    options = _parse(arguments)
    if options.command == "claimed":
        print("\n".join(":".join(pair) for pair in CLAIMED))
    else:
        record(options.python, options.torch, options.xml, options.not_run)
    return 0


def record(python: str, torch: str, files: Sequence[Path], not_run: str = "") -> Path:
    """Write the result of one pair: the counts of pytest's XML ``files``, or why nothing ran."""
    from lrpe_fairseq.experiments.records.runs import environment, write_whole

    result: Result = {"python": python, "torch": torch}
    if not_run:
        result["not_run"] = not_run
    else:
        result |= environment() | {"suites": {path.stem: counts(path) for path in files}}
        result["versions"]["triton"] = _version("triton")
    target = ROOT / RESULTS / f"py{python}-torch{torch}.json"
    write_whole(target, result)
    return target


def counts(path: Path) -> Result:
    """Count passed, failed (including errors) and skipped tests of a JUnit XML file.

    The skip reasons are counted too. A missing or unreadable file, or one without tests, counts as
    one failure.
    """
    try:
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        cases = []
    if not cases:
        return {"passed": 0, "failed": 1, "skipped": 0, "reasons": {}}
    found = Counter(map(_outcome, cases))
    skips = [case.find("skipped") for case in cases]
    reasons = Counter(skip.get("message", "") for skip in skips if skip is not None)
    return {**{name: found[name] for name in COUNTS}, "reasons": dict(sorted(reasons.items()))}


def pages(root: Path) -> dict[str, str]:
    """Return the page with its table regenerated."""
    from lrpe_fairseq.experiments.report import markdown

    text = (root / PAGE).read_text(encoding="utf-8")
    return {PAGE: markdown.between(text, "versions", table(results(root)))}


def results(root: Path) -> list[Result]:
    """Return the claimed pairs, then other recorded ones; a pair without a file is not run."""
    recorded = {}
    for path in sorted((root / RESULTS).glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        recorded[found["python"], found["torch"]] = found
    pairs = dict.fromkeys([*CLAIMED, *recorded])
    missing = {"not_run": "no result"}
    return [recorded.get(p, {"python": p[0], "torch": p[1], **missing}) for p in pairs]


def table(found: Sequence[Result]) -> str:
    """Return a table with one row per pair and suite, followed by the skip reasons."""
    rows = [row for result in found for row in _rows(result)]
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
    reasons = _reasons(found)
    return f"{text}\n\nSkipped:\n\n{reasons}" if reasons else text


def _rows(result: Result) -> list[list[Any]]:
    if "not_run" in result:
        blank = ["–"] * (len(HEAD) - 3)
        return [[result["python"], result["torch"], *blank, f"{NOT_RUN}: {result['not_run']}"]]
    versions = result["versions"]
    label = [versions[name] for name in ("python", "torch", "numpy", "triton")]
    return [
        [*label, name, *(suite[count] for count in COUNTS), result["commit"][:8]]
        for name, suite in result["suites"].items()
    ]


def _reasons(found: Sequence[Result]) -> str:
    """Return every skip reason with its pairs and numbers of tests."""
    skipped: dict[str, list[str]] = {}
    for result in found:
        total: Counter[str] = Counter()
        for suite in result.get("suites", {}).values():
            total.update(suite["reasons"])
        for reason, number in total.items():
            pair = f"{number} under {result['python']} and {result['torch']}"
            skipped.setdefault(reason, []).append(pair)
    return "\n".join(f"- {reason}: {', '.join(pairs)}" for reason, pairs in sorted(skipped.items()))


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def _version(distribution: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("claimed", help="list the pairs, PYTHON:TORCH")
    made = commands.add_parser("record", help="write the result of one pair")
    made.add_argument("python")
    made.add_argument("torch")
    made.add_argument("xml", nargs="*", type=Path)
    made.add_argument("--not-run", default="", help="reason why nothing was run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
