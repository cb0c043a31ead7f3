"""Maps of a table, validation curves, and columns that only some rows have."""

import pytest
from PIL import Image

from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.tables import load_table
from lrpe_fairseq.experiments.report import curves, maps, plots
from lrpe_fairseq.experiments.report.published import read_paper
from lrpe_fairseq.experiments.report.results import Results
from lrpe_fairseq.experiments.report.speed import against_table9

TABLE = """
title: Demo
text: Demo.
experiments: [demo]
scales: {small: configs/lm/wikitext2.yaml}
baseline: RoPE
better: higher
headline: [at-1x-0]
curves: true
columns:
  - {for: {length: [1, 4], depth: [0, 100]}, key: "at-{length}x-{depth}",
     title: "{length}x, {depth}", attention: any, split: "test{length}-{depth}", protocol: whole,
     metric: answer_accuracy}
  - {for: {depth: [0, 100]}, key: "at-4x-yarn-{depth}", title: "4x, yarn, {depth}",
     attention: any,
     rows: [RoPE], split: "test4-{depth}", protocol: whole+yarn-4, metric: answer_accuracy}
  - {key: far-1x, title: 1x, attention: any, mean_of: [at-1x-0, at-1x-100]}
maps:
  - {name: far, cells: {"": "at-{x}-{y}", yarn: "at-{x}-yarn-{y}"}, x: [1x, 4x], y: [0, 100]}
rows:
  - {label: RoPE, encoding: rope, attention: [softmax]}
  - {label: FoX, encoding: fox, attention: [softmax]}
  - {label: PaTH, encoding: path, attention: [softmax]}
"""


def run(name, seed, accuracy, curve=((100, 9.0), (200, 5.0))):
    metrics = {
        f"test{length}-{depth}": {
            protocol: {"answer_accuracy": accuracy / (length + depth / 100), "samples": 10}
            for protocol in ("whole", "whole+yarn-4")
        }
        for length in (1, 4)
        for depth in (0, 100)
    }
    return {
        "experiment": "demo", "dataset": "d", "task": "t", "scale": "small", "seed": seed,
        "attention_type": "softmax", "position_encoding": name, "config": {}, "metrics": metrics,
        "curve": [{"updates": u, "tokens": 1, "valid_ppl": ppl} for u, ppl in curve],
    }  # fmt: skip


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "configs" / "tables" / "demo.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(TABLE)
    runs = {
        "demo/a": run("rope", 1, 1.0), "demo/b": run("rope", 2, 0.5, ((200, 7.0), (300, 4.0))),
        "demo/c": run("fox", 1, 0.8),
    }  # fmt: skip
    return Results(tmp_path, runs)


def test_a_map_has_a_panel_per_trained_row_and_variant_with_means_over_seeds(results):
    [sheet] = results.sheets
    [shown] = sheet.table.maps
    found = {panel.title: panel.values for panel in maps.panels(results, sheet, shown)}
    assert list(found) == ["rope (softmax)", "rope (softmax), yarn", "fox (softmax)"]
    assert found["rope (softmax)"][0] == [pytest.approx(0.75), pytest.approx(0.75 / 4)]
    assert found["rope (softmax)"][1][0] == pytest.approx(0.75 / 2)
    # rotations are not scaled at the training length
    assert found["rope (softmax), yarn"][0] == [None, pytest.approx(0.75 / 4)]


def test_a_column_with_rows_is_that_of_these_rows_only(results):
    [sheet] = results.sheets
    assert results.view(sheet, "at-4x-yarn-0").rows == ["RoPE"]
    assert set(results.view(sheet, "at-4x-0").rows) == {"RoPE", "FoX"}


def test_an_unknown_row_of_a_column_is_refused(tmp_path):
    path = tmp_path / "demo.yaml"
    path.write_text(TABLE.replace("rows: [RoPE]", "rows: [Rope]"))
    with pytest.raises(ValueError, match="has no row 'Rope'"):
        load_table(path)


def test_a_curve_has_the_updates_that_all_seeds_share(results):
    [sheet] = results.sheets
    [panel] = curves.panels(results, sheet)
    assert panel.rows["rope (softmax)"] == [(200, 6.0, 5.0, 7.0)]
    assert panel.rows["fox (softmax)"] == [(100, 9.0, 9.0, 9.0), (200, 5.0, 5.0, 5.0)]


def test_maps_and_curves_are_drawn(results, tmp_path):
    [sheet] = results.sheets
    drawn = maps.pictures(results, sheet, "results") | curves.pictures(results, sheet, "results")
    assert set(drawn) == {
        "results/figures/demo-d-small-far.png", "results/figures/demo-d-small-curves.png",
    }  # fmt: skip
    for path, draw in drawn.items():
        draw(tmp_path / path)
        with Image.open(tmp_path / path) as image:
            assert min(image.size) > 200


def test_a_cell_of_a_map_without_a_value_is_left_empty(tmp_path):
    heat = plots.Heat("a", [[0.0, None], [1.0, 0.5]])
    plots.maps(tmp_path / "map.png", [heat] * 5, ["x", "1", "4"], ["y", "0", "100"])
    with Image.open(tmp_path / "map.png") as image:
        assert image.width > image.height


def test_table_9_stands_beside_measured_speeds():
    lines = [line.split(" | ") for line in against_table9(ROOT).splitlines()]
    rows = {line[0].strip("| "): line[1:] for line in lines[2:]}
    assert list(rows)[-1] == "LRPE, `lrpe-type2`"
    assert rows["T5, `t5`"][:3] == ["–", "–", "–"]
    assert rows["Base, `none`"][0] == "1.00"
    assert len({len(line) for line in lines}) == 1


def test_a_training_that_rose_again_is_named_with_its_best_and_its_last_validation(results):
    [sheet] = results.sheets_of("demo")
    assert curves.ends(results, sheet) == ""
    results.runs["demo/b"]["curve"][-1]["valid_ppl"] = 8.0
    assert curves.ends(results, sheet).endswith(
        "by more than 10 % after it with `rope (softmax)` (seed 2) "
        "from 7.00 at update 200 to 8.00 at update 300."
    )


def test_a_map_says_how_many_samples_a_cell_has(results):
    [sheet] = results.sheets_of("demo")
    assert maps.tests(results, sheet) == "A cell of a map has 10 samples in each seed."


def test_table_6_has_every_printed_row_beside_ours():
    text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    section = text.partition("**TMLR LRPE, Table 6**")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    printed = read_paper(ROOT / "results" / "paper" / "tmlr-table6.csv")
    assert [line.split(" | ")[1] for line in rows] == [cell["printed"] for cell in printed]
