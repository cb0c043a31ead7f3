"""The table of tested versions: counts from pytest's files, rendered from the results."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lrpe_fairseq.experiments.report import versions

ROOT = Path(__file__).resolve().parents[1]
XML = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure message="x"/></testcase>
<testcase name="c"><error message="x"/></testcase>
<testcase name="d"><skipped message="no GPU"/></testcase>
<testcase name="e"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_errors_count_as_failures_and_skips_keep_their_reason(tmp_path):
    path = tmp_path / "unit.xml"
    path.write_text(XML)
    reasons = {"no GPU": 2}
    assert versions.counts(path) == {"passed": 1, "failed": 2, "skipped": 2, "reasons": reasons}


@pytest.mark.parametrize("text", [None, "", "<testsuites/>"])
def test_a_run_without_a_result_or_a_test_is_a_failure(tmp_path, text):
    path = tmp_path / "unit.xml"
    if text is not None:
        path.write_text(text)
    assert versions.counts(path)["failed"] == 1


def test_a_recorded_pair_has_a_row_for_each_suite_and_others_are_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    (tmp_path / "unit.xml").write_text(XML)
    versions.main(["record", "3.11", "2.6.0", str(tmp_path / "unit.xml")])
    versions.main(["record", "3.12", "2.6.0", "--not-run", "no such Python"])
    lines = versions.table(versions.results(tmp_path)).splitlines()
    assert sum("| unit | 1 | 2 | 2 |" in line for line in lines) == 1
    assert "not run: no such Python" in next(line for line in lines if "| 3.12 | 2.6.0" in line)
    assert sum("not run: no result" in line for line in lines) == len(versions.CLAIMED) - 2
    assert lines[-1].startswith("- no GPU: 2 under 3.1")


def test_the_claimed_pairs_are_listed_without_importing_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError")
    command = [sys.executable, "-S", ROOT / versions.__file__, "claimed"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.split() == [":".join(pair) for pair in versions.CLAIMED]


def test_every_test_that_the_script_names_exists():
    script = (ROOT / "scripts" / "test_versions.sh").read_text(encoding="utf-8")
    for path, _, name in re.findall(r"(tests/[\w/.]+)(::(\w+))?", script):
        assert (ROOT / path).exists(), path
        assert f"def {name}(" in (ROOT / path).read_text() if name else True, name


def test_every_result_is_named_by_its_pair():
    for path in (ROOT / versions.RESULTS).glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        assert path.stem == f"py{found['python']}-torch{found['torch']}"
