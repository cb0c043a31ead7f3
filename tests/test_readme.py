"""README and docs: generated parts are fresh, and no number stands there without a run."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from lrpe_fairseq.encodings import ENCODINGS
from lrpe_fairseq.encodings.fidelity import DEPARTURES
from lrpe_fairseq.experiments.records.runs import read_runs
from lrpe_fairseq.experiments.records.sweeps import read_sweeps
from lrpe_fairseq.experiments.report import cost, readme, speed
from lrpe_fairseq.experiments.report.readme import (
    README,
    between,
    encodings_table,
    quickstart_numbers,
    render,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def committed_results(monkeypatch):
    """Results as committed: the README speaks of those, not of a run made here since."""

    def committed(path):
        name = f"HEAD:{path.relative_to(ROOT).as_posix()}"
        shown = subprocess.run(["git", "show", name], cwd=ROOT, capture_output=True, text=True)
        return shown.stdout if shown.returncode == 0 else as_it_lies(path)

    as_it_lies = readme.read_result
    monkeypatch.setattr(readme, "read_result", committed)


def test_the_generated_parts_of_the_readme_are_fresh():
    text = README.read_text(encoding="utf-8")
    assert render(text) == text, "run python -m lrpe_fairseq.experiments.report.readme"


def test_the_encodings_table_has_a_row_for_every_name():
    rows = encodings_table().splitlines()[2:-1]
    assert [row.split("`")[1] for row in rows] == list(ENCODINGS)


def test_the_quickstart_numbers_are_those_of_the_committed_runs():
    assert quickstart_numbers() in README.read_text(encoding="utf-8")


def test_a_part_without_its_place_is_refused():
    with pytest.raises(ValueError, match="no place marked"):
        between("text", "encodings", "content")


def test_every_make_target_that_the_readme_names_exists():
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {w.split()[1].strip("`.,") for w in README.read_text().split("\n") if "make " in w[:6]}
    assert all(f"\n{target}:" in targets for target in named)


@pytest.mark.parametrize("package", ["encodings", "attention"])
def test_encodings_and_attention_import_nothing_of_fairseq_nor_of_the_rooms_above(package):
    above = {"encodings": ("attention", "models", "experiments"), "attention": ("models",)}
    for path in (ROOT / "lrpe_fairseq" / package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [a.name for a in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            )
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert not name.startswith("fairseq"), path
                assert not any(name.startswith(f"lrpe_fairseq.{room}") for room in above[package])


def test_encodings_work_where_fairseq_is_not_installed():
    code = (
        "import sys; sys.modules['fairseq'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'fairseq' else find(name, *a)\n"
        "import torch\n"
        "from lrpe_fairseq.encodings import build_encoding\n"
        "from lrpe_fairseq.attention.multihead import MultiheadAttention\n"
        "enc = build_encoding('lrpe-type2', head_dim=64, num_heads=8)\n"
        "q = torch.rand(2, 8, 10, 64); p = torch.arange(10)\n"
        "print(enc(q, q, p, p)[0].shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "2, 8, 10, 64" in done.stdout


def test_every_departure_has_its_row_on_the_page():
    page = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    assert rows == set(DEPARTURES)


def test_the_cost_page_is_that_of_the_configurations_and_run_files():
    page = cost.PAGE.read_text(encoding="utf-8")
    runs = read_runs(ROOT / "results" / "runs")
    assert cost.paper_table(runs) in page, "run make tables"
    sweeps = read_sweeps(ROOT / "results" / "sweeps")
    assert cost.measured_table(sweeps) in page, "run make tables"


def test_the_cost_of_a_table_is_trainings_times_updates_times_tokens():
    runs = {
        "x": {"experiment": "table2", "scale": "paper", "tokens_per_second": 1e6},
        "y": {"experiment": "table2", "scale": "small", "tokens_per_second": 1.0},
    }
    row = next(line for line in cost.paper_table(runs).splitlines() if line.startswith("| table2"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == ["26", "50,000 x 65,536"]
    assert cells[3] == f"{26 * 50_000 * 65_536 / 1e9:.1f} G"
    assert cells[4:] == ["1,000,000", f"{26 * 50_000 * 65_536 / 1e6 / 3600:.0f}"]
    assert "not measured | not measured" in cost.paper_table({})


def test_docs_speed_is_that_of_the_committed_clocks():
    text = speed.PAGE.read_text(encoding="utf-8")
    assert speed.render(text) == text, "run python -m lrpe_fairseq.experiments.report.speed"


def test_a_part_that_was_not_measured_says_so(monkeypatch):
    monkeypatch.setattr(readme, "read_result", lambda path: None)
    said = "On a CPU: not measured.\n\nOn a GPU: not measured."
    assert speed.section("causal", speed.causal) == said
    assert speed.measured("lengths", "cpu") == []


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


def test_the_figure_of_lengths_is_drawn(tmp_path):
    rows = [
        {"length": n, "contestant": c, "seconds_per_token": 1e-6, "speed_up": n / 300, "peak_mb": n}
        for n in (128, 512)
        for c in ("linear", "sdpa")
    ]
    speed.draw(tmp_path / "lengths.png", rows)
    assert (tmp_path / "lengths.png").stat().st_size > 10_000


def test_table_9_has_a_row_for_every_encoding_and_the_printed_speeds():
    row = {"model": "lm", "attention": "linear", "encoding": "lrpe-type3", "relative_speed": 0.985}
    lines = {line.split("`")[1]: line for line in speed.table9([row]).splitlines()[2:]}
    assert list(lines) == list(ENCODINGS)
    assert lines["lrpe-type3"] == "| `lrpe-type3` | 0.98 | – | – | – | 0.91 | 0.95 | – |"
    assert lines["t5"].endswith("| – | 0.70 | – |")
    assert lines["lrpe-tmlr-type1"].endswith("| – | – | 0.82 |")
