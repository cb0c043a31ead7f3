"""Record the result of one pair of Python and torch for ``scripts/test_versions.sh``.

    python scripts/record_versions.py PYTHON TORCH XML...
    python scripts/record_versions.py PYTHON TORCH --not-run REASON

Writes ``results/versions/py<PYTHON>-torch<TORCH>.json`` from pytest's XML files, one per suite.
"""

import argparse
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from lrpe_fairseq.experiments.records.files import write_json
from lrpe_fairseq.experiments.records.machine import environment

RESULTS = Path(__file__).resolve().parents[1] / "results" / "versions"


def main(arguments: list[str] | None = None) -> int:
    """Write the file of one pair; return 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python")
    parser.add_argument("torch")
    parser.add_argument("xml", nargs="*", type=Path)
    parser.add_argument("--not-run", default="", help="reason why nothing was run")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"python": options.python, "torch": options.torch}
    if options.not_run:
        result["not_run"] = options.not_run
    else:
        result |= environment() | {"suites": {path.stem: counts(path) for path in options.xml}}
        result["versions"]["triton"] = _version("triton")
    write_json(RESULTS / f"py{options.python}-torch{options.torch}.json", result, sort_keys=True)
    return 0


def counts(path: Path) -> dict[str, Any]:
    """Count passed, failed (including errors) and skipped tests, and the reasons of the skipped.

    A missing or unreadable file, or one without tests, counts as one failure.
    """
    try:
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        cases = []
    skips = [case.find("skipped") for case in cases if case.find("skipped") is not None]
    # an error is one of a fixture; a test may have both
    failed = sum(bool({"failure", "error"} & {part.tag for part in case}) for case in cases)
    reasons = Counter(skip.get("message", "") for skip in skips)
    return {
        "passed": len(cases) - failed - len(skips),
        "failed": failed if cases else 1,
        "skipped": len(skips),
        "reasons": dict(sorted(reasons.items())),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
