"""The table of tested versions: counts from pytest's files, rendered from the results."""

import re
import runpy
from pathlib import Path

import pytest

from lrpe_fairseq.experiments.report import marked

ROOT = Path(__file__).resolve().parents[1]
XML = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure message="x"/></testcase>
<testcase name="c"><error message="x"/></testcase>
<testcase name="d"><skipped message="no GPU"/></testcase>
<testcase name="e"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def script():
    return runpy.run_path(str(ROOT / "scripts" / "record_versions.py"))


@pytest.mark.parametrize("text", [None, "", "<testsuites/>"])
def test_a_run_without_a_result_or_a_test_is_a_failure(script, tmp_path, text):
    path = tmp_path / "unit.xml"
    if text is not None:
        path.write_text(text)
    assert script["counts"](path)["failed"] == 1


def test_a_recorded_pair_has_a_row_with_errors_as_failures_and_the_reasons_of_skips(
    script, tmp_path, monkeypatch
):
    folder = tmp_path / marked.VERSIONS
    folder.mkdir(parents=True)
    monkeypatch.setitem(script["main"].__globals__, "RESULTS", folder)
    (tmp_path / "unit.xml").write_text(XML)
    script["main"](["3.11", "2.6.0", str(tmp_path / "unit.xml"), str(tmp_path / "unit.xml")])
    script["main"](["3.12", "2.10.0", "--not-run", "no such Python"])
    first, second, _, reason = marked.versions_table(tmp_path).splitlines()[2:]
    assert "| 1 | 2 | 2 |" in first
    assert second.startswith("| 3.12 | 2.10.0 |")
    assert "not run: no such Python" in second
    assert reason == "- Python 3.11, torch 2.6.0: 2 skipped: no GPU"


def test_every_test_that_the_script_names_exists():
    script = (ROOT / "scripts" / "test_versions.sh").read_text(encoding="utf-8")
    for path, _, name in re.findall(r"(tests/[\w/.]+)(::(\w+))?", script):
        assert (ROOT / path).exists(), path
        assert f"def {name}(" in (ROOT / path).read_text() if name else True, name
