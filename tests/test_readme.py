"""README and docs: generated parts are fresh, and no number stands there without a run."""

import re
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from lrpe_fairseq.encodings import ENCODINGS, FAMILIES, build_encoding
from lrpe_fairseq.encodings.base import EncodingSpec
from lrpe_fairseq.encodings.fidelity import DEPARTURES
from lrpe_fairseq.experiments.report import (
    cost,
    denominators,
    docs,
    fidelity,
    gallery,
    markdown,
    portraits,
    readme,
    speed,
)
from lrpe_fairseq.experiments.report.gallery import encodings_table
from lrpe_fairseq.experiments.report.readme import quickstart_numbers

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def committed_results(monkeypatch):
    """Results as committed: the README speaks of those, not of a run made here since."""

    def committed(path):
        name = f"HEAD:{path.relative_to(ROOT).as_posix()}"
        shown = subprocess.run(["git", "show", name], cwd=ROOT, capture_output=True, text=True)
        return shown.stdout if shown.returncode == 0 else as_it_lies(path)

    as_it_lies = markdown.read_result
    monkeypatch.setattr(markdown, "read_result", committed)


def test_every_generated_page_is_fresh():
    assert docs.stale(ROOT, list(docs.PARTS)) == [], "run make docs"


def test_the_check_names_what_is_stale_and_the_pages_are_written_by_the_same_command(
    tmp_path, capsys
):
    text = (ROOT / "docs" / "cost.md").read_text(encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "cost.md").write_text(text.replace("table2", "table1"))
    arguments = ["cost", "--root", str(tmp_path)]
    assert docs.main([*arguments, "--check"]) == 1
    assert capsys.readouterr().err == "docs: stale: docs/cost.md; run 'make docs'\n"
    assert docs.main(arguments) == 0
    assert docs.main([*arguments, "--check"]) == 0


def test_contributing_names_every_generated_page():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    own = [module.PAGE for module in docs.PARTS.values() if hasattr(module, "PAGE")]
    assert len(own) == len(docs.PARTS) - 1  # the part `results` makes a page for every table
    for path in [*own, "results/README.md", "results/<table>.md"]:
        assert f"`{path}`" in page, path


def test_a_bar_in_a_cell_does_not_break_the_table(monkeypatch):
    class Barred(type(build_encoding("none", head_dim=64, num_heads=8))):
        """P(s | t) for |s - t| < 2."""

    monkeypatch.setattr(gallery, "ENCODINGS", ["barred"])
    spec = EncodingSpec(head_dim=64, num_heads=8)
    monkeypatch.setattr(gallery, "build_encoding", lambda *_, **__: Barred(spec))
    head, _, row, *_ = encodings_table().splitlines()
    assert len(re.findall(r"(?<!\\)\|", row)) == head.count("|")
    assert r"P(s \| t) for \|s - t\| < 2" in row


def test_the_encodings_table_has_a_row_for_every_name():
    rows = encodings_table().splitlines()[2:]
    forms = [family.form for family in FAMILIES.values()]
    assert [row.split("`")[1] for row in rows] == [*ENCODINGS, *forms]


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_description_is_a_whole_sentence_that_fits_a_table(name):
    said = gallery.built(name).summary()
    assert 0 < len(gallery.describe(gallery.built(name))) <= 120
    assert re.search(r"[\w)\]]$", said)
    assert all(said.count(left) == said.count(right) for left, right in ("()", "[]"))


def test_a_method_with_rows_and_columns_is_described_and_drawn_on_a_grid(tmp_path):
    two_axes = {name for name in ENCODINGS if gallery.built(name).reads_grid}
    assert two_axes == {"rope-2d", "rope-2d-mixed", "liere", "comrope-ap", "comrope-ld"}
    for name in two_axes:
        more = "on more than the differences" if name == "liere" else "on the differences"
        assert f"{more} of rows and columns" in gallery.entry(name)
    with mock.patch.object(portraits, "_maps", wraps=portraits._maps) as maps:
        portraits.draw("rope-2d", tmp_path / "grid.png", 8, 2, grid_width=4)
    assert maps.call_args.args[1].shape == (2, 4, 4)


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_has_an_entry_with_equation_and_source(name):
    text, card = gallery.entry(name), gallery.built(name).card
    assert card.equation.count("{") == card.equation.count("}")
    assert f"```math\n{card.equation}\n```" in text
    assert not re.search(r"\\(operatorname|mbox|phantom|def|newcommand)\b", card.equation)
    for part in (card.cost, card.beyond, card.source):
        assert part
        assert part in text


def test_every_kind_of_picture_is_drawn_and_reproducible(tmp_path):
    for name in ("rope", "t5"):
        for turn in ("first", "second"):
            portraits.draw(name, tmp_path / f"{turn}.png", head_dim=8, num_heads=2, length=32)
        first = (tmp_path / "first.png").read_bytes()
        assert first == (tmp_path / "second.png").read_bytes()
        assert len(first) > 5_000


def test_the_readme_names_every_encoding_once():
    text = readme.names_table()
    shown = re.findall(r"`([^`]+)`", text)[1:]
    assert len(shown) == len(set(shown))
    assert text.index("`rope`") < text.index("\n| softmax |") < text.index("`t5`")
    ranges = re.findall(r"`([a-z-]+?)(\d+)` to `\1(\d+)`", text)
    within = {f"{s}{n}" for s, a, b in ranges for n in range(int(a), int(b) + 1)}
    assert set(ENCODINGS) == {name for name in shown if "<" not in name} | within


def test_only_neighbors_that_count_up_become_a_range():
    assert readme.numbered(["x1", "x2", "x3"]) == ["`x1` to `x3`"]
    assert readme.numbered(["x1", "x2", "y", "x4"]) == ["`x1` to `x2`", "`y`", "`x4`"]
    assert readme.numbered(["x1", "x3", "x4"]) == ["`x1`", "`x3` to `x4`"]
    assert readme.numbered(["rope", "t5"]) == ["`rope`", "`t5`"]


def test_the_picture_of_the_quickstart_is_drawn_from_the_committed_runs(tmp_path):
    [(path, draw)] = readme.pictures(ROOT).items()
    draw(tmp_path / "first.png")
    draw(tmp_path / "second.png")
    first = (tmp_path / "first.png").read_bytes()
    assert first == (tmp_path / "second.png").read_bytes()
    assert len(first) > 10_000
    assert f"]({path})" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.pictures(tmp_path) == {}


def test_the_quickstart_numbers_are_those_of_the_committed_runs():
    assert quickstart_numbers(ROOT) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_part_without_its_place_is_refused():
    with pytest.raises(ValueError, match="the markers <!-- encodings -->"):
        markdown.between("text", "encodings", "content")


def test_the_table_of_departures_is_generated_from_the_classes():
    rows = [line.split("`")[1] for line in fidelity.departures_table().splitlines()[2:]]
    assert rows == list(DEPARTURES)


def test_the_cost_of_a_table_is_trainings_times_updates_times_tokens():
    runs = {
        "x": {"experiment": "table2", "scale": "paper", "tokens_per_second": 1e6},
        "y": {"experiment": "table2", "scale": "small", "tokens_per_second": 1.0},
    }
    row = next(line for line in cost.paper_table(runs).splitlines() if line.startswith("| table2"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == ["26", "50,000 x 65,536"]
    assert cells[3] == f"{26 * 50_000 * 65_536 / 1e9:.1f} G tokens"
    assert cells[4:] == ["1,000,000", f"{26 * 50_000 * 65_536 / 1e6 / 3600:.0f}"]
    assert "not measured | not measured" in cost.paper_table({})


def test_a_part_that_was_not_measured_says_so(monkeypatch):
    monkeypatch.setattr(markdown, "read_result", lambda path: None)
    assert denominators.section() == "Not measured."
    said = "On a CPU: not measured.\n\nOn a GPU: not measured."
    assert speed.section("causal", speed.causal) == said
    assert speed.measured("lengths", "cpu") == []


def test_a_trained_column_appears_only_where_trained_models_were_measured():
    random = {"rope": {"under_eps": 0.0, "smallest_share": 0.19}}
    trained = {"rope": {"under_eps": 1e-5, "smallest_share": 0.0}}
    assert "| `rope` | 0.00% | 0.19 |" in denominators.table(random, None).splitlines()
    assert "trained" not in denominators.table(random, None)
    assert "| `rope` | 0.00% | 0.19 | < 0.01% |" in denominators.table(random, trained)
    assert "| `none` | not measured | not measured | not measured |" in (
        denominators.table(random, trained)
    )


def length_rows(speed_ups):
    return [{"length": n, "contestant": "sdpa", "speed_up": s} for n, s in speed_ups.items()]


@pytest.mark.parametrize(
    ("speed_ups", "first"),
    [
        ({128: 0.7, 256: 0.9, 512: 1.5, 1024: 2.0}, 512),
        ({128: 1.1, 256: 0.9, 512: 1.5}, 512),
        ({128: 1.1, 256: 1.9}, 128),
        ({128: 1.1, 256: 0.9}, None),
    ],
)
def test_the_crossover_is_the_shortest_length_from_which_on_linear_wins(speed_ups, first):
    assert speed.crossover(length_rows(speed_ups)) == first


@pytest.mark.parametrize(
    ("sdpa", "at"),
    [
        ((1.0, 4.0, 8.0), 256),
        ((1.0, 2.0, 8.0), 512),
        ((3.0, 6.0, 8.0), None),
        ((0.5, 1.0, 1.5), None),
    ],
)
def test_the_figure_of_lengths_marks_where_its_curves_cross(tmp_path, monkeypatch, sdpa, at):
    """SDPA takes ``sdpa`` seconds per token at T = 128, 512 and 2048, linear attention 2."""
    drawn = []
    monkeypatch.setattr(speed.plots, "save", lambda figure, path: drawn.append(figure))
    rows = [
        {"length": n, "contestant": c, "seconds_per_token": s, "speed_up": s / 2, "peak_mb": n}
        for n, t in zip((128, 512, 2048), sdpa, strict=True)
        for c, s in (("linear", 2.0), ("sdpa", t))
    ]
    speed.draw(tmp_path / "lengths.png", rows)
    time = drawn[0].axes[0]
    marks = [line.get_xdata()[0] for line in time.get_lines() if line.get_linestyle() == ":"]
    assert marks == ([] if at is None else [pytest.approx(at)])
    assert ("T ≈" in time.get_title()) == (at is not None)


def test_table_9_has_a_row_for_every_encoding_and_the_printed_speeds():
    row = {"model": "lm", "attention": "linear", "encoding": "lrpe-type3", "relative_speed": 0.985}
    lines = {line.split("`")[1]: line for line in speed.table9([row]).splitlines()[2:]}
    assert list(lines) == list(ENCODINGS)
    assert lines["lrpe-type3"] == ("| `lrpe-type3` | 0.98 | not measured | 0.91 | 0.95 |")
    assert lines["kerple-log"].startswith("| `kerple-log` | – | not measured |")
    assert lines["t5"].endswith("| – | 0.70 |")
    assert lines["lrpe-tmlr-type1"].endswith("| not measured | – | – |")


def test_speeds_against_rope_and_of_variants_are_shown_where_they_were_measured():
    row = {"attention": "softmax", "encoding": "ape (canonical)", "relative_speed": 0.9}
    text = speed.table9([row])
    assert "| `ape (canonical)` | not measured | 0.90 | – | – |" in text
    assert "relative to RoPE" not in text
    text = speed.table9([{**row, "relative_to_rope": 0.95}])
    assert "| speed relative to RoPE | linear | softmax |" in text
    assert text.endswith("| `ape (canonical)` | not measured | 0.95 |")
