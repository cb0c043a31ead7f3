"""The table of torch releases of docs/speed.md."""

import json

import pytest

from lrpe_fairseq.experiments.report import speed


@pytest.fixture
def root(tmp_path):
    """Rows of two releases: one form spills, one does not compile, one was not tried."""
    row = {"dtype": "float16", "kernels": 2, "spills": {}, "error": None}
    old, new = {"triton": "3.4.0", "torch": "2.8"}, {"triton": "3.5.1", "torch": "2.9"}
    rows = [
        {**old, **row, "family": "flash", "case": "plain", "capability": 80},
        {**old, **row, "family": "flash", "case": "gates", "capability": 80, "spills": {"k": 8}},
        {**new, **row, "family": "flash", "case": "plain", "capability": 80, "error": "E: sorry"},
        {**new, **row, "family": "flash", "case": "plain", "capability": 90, "dtype": "bfloat16"},
    ]
    path = tmp_path / speed.RESULTS / "compiled-versions.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    return tmp_path


def test_the_table_counts_the_forms_that_compile_and_those_that_spill(root):
    found = speed.releases(root)
    assert found["capabilities"] == [80, 90]
    old, new = found["releases"]
    assert (old["torch"], old["triton"], old["family"]) == ("2.8", "3.4.0", "flash")
    assert old["cells"] == ["2 of 2, 1 spill", speed.MISSING]
    assert new["cells"] == ["0 of 1", "1 of 1"]


def test_the_page_says_which_types_were_compiled_where(root):
    assert speed.releases(root)["types"] == "bfloat16 on sm_90, float16 on sm_80"
    path = root / speed.RESULTS / "compiled-versions.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    rows += [{**row, "dtype": "bfloat16"} for row in rows]
    path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    assert speed.releases(root)["types"] == "bfloat16, float16 on sm_80"


def test_a_form_that_does_not_compile_is_named_with_its_error(root):
    assert speed.releases(root)["refused"] == [
        "`plain` of flash in float16 with Triton 3.5.1 for sm_80: `E: sorry`"
    ]


def test_nothing_is_shown_before_a_measurement(tmp_path):
    assert speed.releases(tmp_path)["releases"] == []
