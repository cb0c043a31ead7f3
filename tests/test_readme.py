"""README and docs: generated parts are fresh, and no number stands there without a run."""

import shutil
from pathlib import Path

import pytest

from lrpe_fairseq.experiments.report import (
    docs,
    markdown,
    speed,
)

ROOT = Path(__file__).resolve().parents[1]


def test_every_generated_page_is_fresh():
    assert docs.stale(ROOT, list(docs.PARTS)) == [], "run make docs"


def test_the_check_names_what_is_stale_and_the_pages_are_written_by_the_same_command(
    tmp_path, capsys
):
    page = "results/quickstart/README.md"
    shutil.copytree(ROOT / "results/quickstart/runs", tmp_path / "results/quickstart/runs")
    (tmp_path / page).write_text((ROOT / page).read_text("utf-8").replace("rope", "r0pe"))
    arguments = ["quickstart", "--root", str(tmp_path)]
    assert docs.main([*arguments, "--check"]) == 1
    assert f"docs: stale: {page}, " in capsys.readouterr().err
    assert docs.main(arguments) == 0
    assert docs.main([*arguments, "--check"]) == 0


def test_a_bar_in_a_cell_does_not_break_the_table():
    table = markdown.table(["a", "b"], [["P(s | t)", "|s - t| < 2"]])
    assert table.splitlines()[2] == r"| P(s \| t) | \|s - t\| < 2 |"


def test_a_part_without_its_place_is_refused():
    with pytest.raises(ValueError, match="the markers <!-- encodings -->"):
        markdown.between("text", "encodings", "content")


# --- the encodings -----------------------------------------------------------------------------


# --- the benchmarks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speed_ups", "first"),
    [
        ({128: 0.7, 256: 0.9, 512: 1.5, 1024: 2.0}, 512),
        ({128: 1.1, 256: 0.9, 512: 1.5}, 512),
        ({128: 1.1, 256: 1.9}, 128),
        ({128: 1.1, 256: 0.9}, None),
    ],
)
def test_the_crossover_is_the_shortest_length_from_which_on_linear_wins(
    monkeypatch, speed_ups, first
):
    rows = [{"length": n, "contestant": "sdpa", "speed_up": s} for n, s in speed_ups.items()]
    monkeypatch.setattr(speed, "measured", lambda *_: rows)
    assert speed.crossover(ROOT, "cpu") == first


def test_a_speed_that_was_not_measured_is_a_dash(monkeypatch):
    row = {"attention": "linear", "encoding": "lrpe-type3", "relative_speed": 0.985}
    monkeypatch.setattr(speed, "measured", lambda part, device, root: [row] * (device == "cpu"))
    assert speed.speed(ROOT, "cpu", "linear", "lrpe-type3") == "0.98"
    assert speed.speed(ROOT, "cuda", "linear", "lrpe-type3") == "–"
