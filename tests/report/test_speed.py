"""Pages show figures of a GPU only while the kernels that were measured are the present ones."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import slot
from lrpe_fairseq.experiments.records import kernel_sources
from lrpe_fairseq.experiments.report import speed

ROOT = Path(__file__).resolve().parents[2]
FLASH = "lrpe_fairseq/kernels/flash/flash_tiles.py"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A copy of what docs/speed.md is rendered from, and of the kernels."""
    for folder in ("results/bench", "results/paper", "lrpe_fairseq/kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.setattr(kernel_sources, "ROOT", tmp_path)
    kernel_sources.source_hash.cache_clear()
    yield tmp_path
    speed.run_file.cache_clear()
    kernel_sources.source_hash.cache_clear()


def state(root, sources, device="cuda"):
    """Let every file of a device say that it was measured with kernels of these sources."""
    for path in (root / speed.RESULTS / device).glob("*.json"):
        file = json.loads(path.read_text(encoding="utf-8"))
        file["rows"] = [{k: v for k, v in row.items() if k != "sources"} for row in file["rows"]]
        path.write_text(json.dumps({**file, "sources": sources}), encoding="utf-8")
    speed.run_file.cache_clear()


def change(root, path, old, new):
    text = (root / path).read_text(encoding="utf-8")
    assert old in text
    (root / path).write_text(text.replace(old, new, 1), encoding="utf-8")
    kernel_sources.source_hash.cache_clear()


def forms(root):
    return {row["contestant"] for row in speed.measured("attention", "cuda", root)}


def test_a_row_leaves_with_the_kernels_that_it_measures(root):
    state(root, kernel_sources.hashes())
    assert {"linear", "flash, gates", "fla fused_chunk_simple_gla"} <= forms(root)
    assert speed.measured("steps", "cuda", root)
    change(root, FLASH, "LOG2E = tl.constexpr(", "LOG2E = tl.constexpr(0.0 + ")
    assert not any(name.startswith("flash") for name in forms(root))
    assert {"linear", "linear, gates", "fla fused_chunk_simple_gla"} <= forms(root)
    assert not speed.measured("steps", "cuda", root)  # of every kernel


def test_comments_and_docstrings_do_not_count(root):
    before = kernel_sources.hashes()
    change(root, FLASH, '"""Triton functions', '# a comment\n"""Functions')
    assert kernel_sources.hashes() == before


def test_a_file_that_does_not_say_which_kernels_it_measured_is_of_earlier_ones(root):
    state(root, {})
    assert forms(root).isdisjoint({"linear", "flash"})
    assert speed.measured("table9", "cpu", root)  # the rule is for GPUs


def test_a_page_without_present_kernels_has_no_figure_of_a_gpu(root):
    state(root, {})
    text = speed.pages(root)[speed.PAGE]
    assert "On a GPU the present kernels are not measured" in text
    assert "`python -m benchmarks.slot" in text
    assert "| `flash, gates` |" not in text
    section = text.partition("## Training speed of every encoding")[2].partition("\n## ")[0]
    assert "thousands of tokens" not in section
    (line,) = (x for x in section.splitlines() if x.startswith("| RoPE, `rope` |"))
    assert line.count(speed.MISSING) == 2
    commits = {row.get("commit", "")[:8] for row in speed.stored("attention", "cuda", root)} - {""}
    assert commits
    assert all(commit in text for commit in commits)  # where the earlier rows are


def test_a_page_with_present_kernels_has_their_figures(root):
    state(root, kernel_sources.hashes())
    text = speed.pages(root)[speed.PAGE]
    for name, rows in (("attention", "| `flash, gates` |"), ("steps", "thousands of tokens")):
        assert speed.measured(name, "cuda", root)
        assert rows in text
    assert "not measured with" not in text
    assert speed.rate(root, "linear", "fox", 512) > 0


def test_csv_files_keep_every_row_and_say_which_are_of_earlier_kernels(root):
    state(root, kernel_sources.hashes())
    change(root, FLASH, "LOG2E = tl.constexpr(", "LOG2E = tl.constexpr(0.0 + ")
    head, *lines = speed.csv_of(root, "attention").splitlines()
    assert len(lines) == len(speed.run_file("attention", "cuda", root)["rows"])
    place = head.split(",").index("kernels")
    found = {line.split(",")[place] for line in lines if ",flash," in line}
    assert found == {"earlier"}
    assert {line.split(",")[place] for line in lines if ",linear,0" in line} == {"present"}
    assert ",kernels" not in speed.csv_of(root, "table9").splitlines()[0]


def test_a_page_says_what_an_earlier_check_of_the_kernels_has_found(root):
    state(root, {})
    text = speed.pages(root)[speed.PAGE]
    assert "all 27 checks passed" in text
    assert "The kernels have changed since" in text
    assert "| softmax, table | " not in text.partition("Proof at first use")[2]
    state(root, kernel_sources.hashes())
    assert "| softmax, table | 1.92 " in speed.pages(root)[speed.PAGE]


def test_the_checks_in_the_interpreter_leave_with_the_kernels(root):
    state(root, kernel_sources.hashes(), "cpu")
    said = "in Triton's interpreter on a CPU"
    file = speed.run_file("doctor", "cpu", root)
    passed = sum(row["passed"] for row in file["rows"])
    text = speed.pages(root)[speed.PAGE]
    assert f"{passed} of {len(file['rows'])} checks of the present kernels passed" in text
    change(root, FLASH, "LOG2E = tl.constexpr(", "LOG2E = tl.constexpr(0.0 + ")
    assert said in text
    assert said not in speed.pages(root)[speed.PAGE]


def test_injected_failures_are_shown_and_one_warning_in_full(root):
    text = speed.pages(root)[speed.PAGE]
    rows = speed.run_file("failures", "cpu", root)["rows"]
    assert all(f"| {row['failure']} | " in text for row in rows)
    assert rows[0]["warning"] in text
    assert "bit for bit" in text


def test_rows_of_earlier_kernels_are_measured_again(tmp_path):
    setting = slot.Setting("cuda", slot.torch.bfloat16, 1, **slot.TINY)
    row = slot.Row("attention", {"contestant": "flash", "length": 64}, dict)
    files = slot.Files(tmp_path, setting, resume=False)
    files.add(row, {"seconds": 1.0})
    assert slot.Files(tmp_path, setting, resume=True).has(row)
    path = tmp_path / "attention.json"
    file = json.loads(path.read_text(encoding="utf-8"))
    assert file["sources"] == kernel_sources.hashes()
    path.write_text(json.dumps({**file, "sources": {}}), encoding="utf-8")
    later = slot.Files(tmp_path, setting, resume=True)
    assert not later.has(row)
    later.add(row, {"seconds": 2.0})
    (found,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert found == {**row.key, "seconds": 2.0}
