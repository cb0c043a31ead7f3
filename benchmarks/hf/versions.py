"""``python -m benchmarks.hf.versions 5.0.0 5.24.0``: tests under versions of transformers.

Every version is installed in a folder of its own, which shadows that of the environment, and runs
the tests of exports, conversions and generation. The result is results/bench/hf-versions.json, with
the number of tests that passed, failed and were skipped.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.hf import common
from lrpe_fairseq.experiments.records.files import ROOT, write_json

PROGRAM = "benchmarks.hf.versions"
TARGET = common.RESULTS / "hf-versions.json"
TESTS = ("convert", "convert_exported", "fold_back", "generation", "options", "every_encoding")
COUNTS = ("passed", "failed", "errors", "skipped")


def row_of(version: str, tests: list[str]) -> dict[str, Any]:
    """Install a version and run the tests. Raises: SystemExit if pytest did not run them."""
    with tempfile.TemporaryDirectory(prefix="lrpe-transformers-") as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder]
        subprocess.run([*pip, f"transformers=={version}"], check=True)
        path = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
        files = [str(Path("tests", "hf", f"test_{name}.py")) for name in tests]
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
    last = done.stdout.strip().splitlines()[-1]
    print(f"transformers {version}: {last}", flush=True)
    counts = {name: count_of(last, name) for name in COUNTS}
    if not sum(counts.values()):
        raise SystemExit(f"{PROGRAM}: no test ran:\n{done.stdout}")
    return {"transformers": version, **counts, "seconds": time.perf_counter() - begin}


def count_of(line: str, name: str) -> int:
    """Return a number of pytest's last line.

    >>> count_of("3 failed, 25 passed in 2.0s", "passed")
    25
    """
    found = re.search(rf"(\d+) {name.removesuffix('s')}", line)
    return int(found[1]) if found else 0


def main(arguments: list[str] | None = None) -> None:
    """Test every version and write the file."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}")
    parser.add_argument("versions", nargs="+", help="of transformers, such as 5.0.0 5.24.0")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help=f"default: {TESTS}")
    options = parser.parse_args(arguments)
    rows = [row_of(version, options.tests) for version in options.versions]
    settings = {"tests": options.tests}
    write_json(TARGET, {**common.stated(), "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
