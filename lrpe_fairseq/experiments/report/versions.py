"""Which versions of Python and torch are tested: the table of docs/installing.md.

``scripts/test_versions.sh`` runs the tests and calls this file: ``claimed`` lists the pairs,
``record`` writes ``results/versions/*.json`` from pytest's XML files, ``render`` (``--check``)
writes the table. The file imports this package inside functions only, so that ``claimed`` works
without torch.
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
PAGE = ROOT / "docs" / "installing.md"
RESULTS = ROOT / "results" / "versions"
CLAIMED = (
    ("3.11", "2.6.0"),
    ("3.11", "2.10.0"),
    ("3.11", "2.13.0"),
    ("3.12", "2.6.0"),
    ("3.12", "2.13.0"),
)
"""Pairs of Python and torch: both ends of each range, and the last torch with code for a V100."""

COUNTS = ("passed", "failed", "skipped")
HEAD = ("Python", "torch", "numpy", "triton", "tests", *COUNTS, "commit")
NOT_RUN = "not run"
Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Do one of the three commands; returns the exit status."""
    options = _parse(arguments)
    if options.command == "claimed":
        print("\n".join(":".join(pair) for pair in CLAIMED))
    elif options.command == "record":
        record(options.python, options.torch, options.xml, options.not_run)
    else:
        return render(options.check)
    return 0


def record(python: str, torch: str, files: Sequence[Path], not_run: str = "") -> Path:
    """Write the result of one pair: the counts of each of pytest's XML ``files``, or why not."""
    from lrpe_fairseq.experiments.records.runs import environment, write_whole

    result: Result = {"python": python, "torch": torch}
    if not_run:
        result["not_run"] = not_run
    else:
        result |= environment() | {"suites": {path.stem: counts(path) for path in files}}
        result["versions"]["triton"] = _version("triton")
    target = RESULTS / f"py{python}-torch{torch}.json"
    write_whole(target, result)
    return target


def counts(path: Path) -> Result:
    """Passed, failed (errors included) and skipped tests of a JUnit XML file, with skip reasons.

    A run that left no readable file, or ran no test, counts as one failure.
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


def render(check: bool = False) -> int:
    """Write the table into the page, or with ``check`` say whether it is stale."""
    from lrpe_fairseq.experiments.report.readme import between

    text = PAGE.read_text(encoding="utf-8")
    fresh = between(text, "versions", table(results()))
    if not check:
        PAGE.write_text(fresh, encoding="utf-8")
    elif fresh != text:
        print(f"{PAGE.relative_to(ROOT)} is stale: run {Path(__file__).name} render")
        return 1
    return 0


def results() -> list[Result]:
    """The claimed pairs, then other recorded ones; a pair without a file is not run."""
    recorded = {}
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        recorded[found["python"], found["torch"]] = found
    pairs = dict.fromkeys([*CLAIMED, *recorded])
    missing = {"not_run": "no result"}
    return [recorded.get(p, {"python": p[0], "torch": p[1], **missing}) for p in pairs]


def table(found: Sequence[Result]) -> str:
    """One row for each suite of each pair, and under the table why tests were skipped."""
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
    """Every reason for which tests were skipped, with the pairs and their numbers of tests."""
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
    made.add_argument("--not-run", default="", help="why nothing was run")
    shown = commands.add_parser("render", help="write the table of docs/installing.md")
    shown.add_argument("--check", action="store_true", help="fail if the table is stale")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
