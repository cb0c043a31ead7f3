"""The published numbers, the run file, and the pages of results/."""

import itertools
import json
import math
import random
import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from lrpe_fairseq.experiments.data.correlation import average_ranks, spearman
from lrpe_fairseq.experiments.families import plan
from lrpe_fairseq.experiments.records import notes, recipes
from lrpe_fairseq.experiments.records.layout import Column, Row, Table, load_table, load_tables
from lrpe_fairseq.experiments.records.runs import (
    FIELDS,
    environment,
    read_run,
    read_runs,
    validate,
    write_run,
)
from lrpe_fairseq.experiments.report import (
    cells,
    claims,
    labels,
    markdown,
    pages,
    paper,
    scatter,
    tables,
)
from lrpe_fairseq.experiments.report.cells import Group, Scores
from lrpe_fairseq.experiments.report.curves import (
    axis_label,
    mean_curve,
    panels,
    validation_curves,
)
from lrpe_fairseq.experiments.report.sheet import Sheet, sheets

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "results" / "paper"
SETTINGS = {"iclr-table1", "iclr-table7", "tmlr-table8", "tmlr-table9", "ape-table3"}  # no results
NUMBERS = ("value", "std", "ci95", "printed", "note")  # columns that do not name a cell
CELLS = {
    "ape-table2a": 7 * 4,
    "ape-table2b": 10 * 8,
    "ape-table2c": 6 * 2,
    "ape-table3": 10 * 3,
    "extrapolation": 5 + 5 * 6,
    "iclr-table1": 16,
    "iclr-table2": 14 * 2 * 2,
    "iclr-table3": 10 * 6,
    "iclr-table4": 13 * 2 * 2,
    "iclr-table5": 3 * 2 * 2,
    "iclr-table7": 24 * 3,
    "iclr-table8": 13 * 2 * 2,
    "iclr-table9": 6 * 2,
    "tmlr-table1": 7 * 10,
    "tmlr-table2": 8 * 4,
    "tmlr-table3": 6 * 2,
    "tmlr-table4": 6 * 6,
    "tmlr-table5": 3 * 4,
    "tmlr-table6": 7,
    "tmlr-table8": 19 * 3,
    "tmlr-table9": 5 * 6,
}
ENCODING = re.compile(
    r"|none|rope|permuteformer|spe|t5|transformer-xl|shaw|ape|ape-tree"
    r"|alibi|fox|cosformer|rope-2d|rope-2d-mixed|liere|comrope-(ap|ld)|fope|kerple-(log|power)"
    r"|sandwich|fire|cape-(alibi|kerple|fire)|deberta|cope|stick-breaking"
    r"|(gated:)?(rope|lrpe-type[1-8])|lrpe-tmlr-type[1-3]"
    r"|lrpe:(identity|householder|householder-learned|odd-even|fourier)"
    r":(rotation|rotation-learned|rotation-half|unitary|unitary-learned|permutation)"
)
OURS = re.compile(r"\d+\.\d+(?: ± \d+\.\d+)? \(\d+\)")


# --- the published numbers --------------------------------------------------------------------


def published(name):
    return paper.read_table(PAPER / f"{name}.csv")


def values(name, *keys):
    return {
        tuple(cell[key] for key in keys): float(cell["value"])
        for cell in published(name)
        if cell["value"]
    }


def test_every_published_table_has_all_its_cells_and_none_twice():
    assert {path.stem for path in PAPER.glob("*.csv")} == set(CELLS)
    for name, count in CELLS.items():
        found = published(name)
        assert len(found) == count, name
        places = {tuple(v for k, v in cell.items() if k not in NUMBERS) for cell in found}
        if name != "iclr-table1":  # there the encoding is the cell
            assert len(places) == count, name


@pytest.mark.parametrize("name", sorted(set(CELLS) - SETTINGS))
def test_value_and_deviation_are_the_numbers_of_the_printed_text(name):
    for cell in published(name):
        numbers = [] if cell["printed"] == "-" else re.split(r"\s*±\s*", cell["printed"])
        spread = cell["ci95"] if name.startswith("ape-") else cell["std"]
        assert [n for n in (cell["value"], spread) if n] == numbers, cell
        form = r"\d+(\.\d+)?" if name == "extrapolation" else r"\d+\.\d+"
        assert all(re.fullmatch(form, n) for n in numbers), cell


@pytest.mark.parametrize("name", sorted(set(CELLS) - SETTINGS))
def test_every_published_method_names_one_of_our_encodings_or_none(name):
    for cell in published(name):
        assert ENCODING.fullmatch(cell["encoding"]), cell
        assert cell["attention"] in ("linear", "softmax"), cell


def test_only_t5_and_xl_lack_linear_numbers_in_table_2():
    dashes = {(c["method"], c["attention"]) for c in published("iclr-table2") if not c["value"]}
    assert dashes == {("T5", "linear"), ("XL", "linear")}


def test_table_8_perplexity_is_two_to_the_loss_within_its_rounding():
    found = values("iclr-table8", "method", "attention", "metric")
    pairs = [(v, found[m, a, "PPL"]) for (m, a, metric), v in found.items() if metric == "Loss"]
    assert len(pairs) == 26 - 3
    for loss, ppl in pairs:
        assert 2 ** (loss - 0.005) - 0.005 <= ppl <= 2 ** (loss + 0.005) + 0.005


def test_table_3_averages_leave_mnli_mismatched_out_in_every_row_but_linear_base():
    found = values("iclr-table3", "attention", "method", "dataset")
    odd = set()
    for attention, method, dataset in found:
        row = [found[attention, method, d] for d in ("MNLI-m", "QNLI", "QQP", "SST-2")]
        five = [*row, found[attention, method, "MNLI-mm"]]
        if dataset == "AVG" and abs(found[attention, method, "AVG"] - sum(row) / 4) > 0.0051:
            odd.add((attention, method))
            assert found[attention, method, "AVG"] == pytest.approx(sum(five) / 5, abs=0.0051)
            assert sum(row) / 4 == pytest.approx(83.225)
            assert sum(row) / 4 > found["linear", "Type5", "AVG"]
    assert odd == {("linear", "Base")}


def test_table_5_repeats_type_2_and_type_6_of_table_2():
    ablation = values("iclr-table5", "encoding", "attention", "split")
    whole = values("iclr-table2", "encoding", "attention", "split")
    assert {k: v for k, v in ablation.items() if k in whole} == {
        k: v for k, v in whole.items() if k[0] in ("lrpe-type2", "lrpe-type6")
    }


def test_long_range_arena_averages_are_the_mean_of_five_tasks():
    rows = defaultdict(dict)
    for (method, dataset), value in values("tmlr-table4", "method", "dataset").items():
        rows[method][dataset] = value
    for row in rows.values():
        assert row.pop("AVG") == pytest.approx(sum(row.values()) / 5, abs=0.0051)


def test_one_average_of_the_second_papers_ablation_is_off_by_a_hundredth():
    rows = defaultdict(dict)
    for (method, core), value in values("tmlr-table5", "method", "lambda").items():
        rows[method][core] = value
    gaps = {method: row.pop("Avg.") - sum(row.values()) / 3 for method, row in rows.items()}
    assert {method for method, gap in gaps.items() if abs(gap) > 0.0051} == {"Identity"}


def by_column(name, column="dataset"):
    """Column -> method -> value."""
    found = defaultdict(dict)
    for (where, method), value in values(name, column, "method").items():
        found[where][method] = value
    return found


def test_the_oddities_of_the_second_papers_tables_are_arithmetic():
    glue = by_column("tmlr-table1")
    assert glue["WikiBook"]["RoPE"] < min(glue["WikiBook"][t] for t in ("Type1", "Type3"))
    for task, beaten in {"RTE": "Type1", "SST-2": "Type1", "CoLA": "Type3"}.items():
        assert glue[task]["RoPE"] > glue[task][beaten]
    assert glue["SST-2"]["RoPE"] > glue["SST-2"]["Type3"]
    assert (glue["CoLA"]["RoPE"], glue["CoLA"]["Type3"]) == (39.23, 36.71)

    images = by_column("tmlr-table3", "metric")
    accuracy, parameters = images["Accuracy"], images["Params (M)"]
    assert accuracy["Base"] > max(accuracy["Type3"], accuracy["PER"])
    assert accuracy["RoPE"] > max(accuracy["Type1"], accuracy["Type3"])
    assert {m for m, v in parameters.items() if v == 22.05} == {"Type1", "Type2", "Type3"}
    assert {m for m, v in parameters.items() if v == 22.04} == {"Base", "RoPE", "PER"}

    perplexity = values("tmlr-table2", "dataset", "method", "split")
    for (dataset, _, _), value in perplexity.items():
        assert 8 < value < 12 if dataset == "Books" else 31 < value < 44


def test_the_gain_of_the_second_papers_arena_is_that_of_one_task():
    arena = by_column("tmlr-table4")
    best = {task: max(rows, key=rows.get) for task, rows in arena.items()}
    assert (best["Retrieval"], best["ListOps"]) == ("Base", "RoPE")
    for task in ("Text", "Pathfinder"):
        assert arena[task]["Type3"] < arena[task]["Base"]
    assert (min(arena["ListOps"].values()), max(arena["ListOps"].values())) == (39.14, 40.74)
    assert arena["Image"]["Type1"] - arena["Image"]["Base"] == pytest.approx(22.38)
    four = [task for task in arena if task not in ("Image", "AVG")]
    for method, mean in {"Type1": 65.81, "Base": 65.21, "RoPE": 64.54}.items():
        assert sum(arena[task][method] for task in four) / 4 == pytest.approx(mean, abs=0.0051)


# --- the run file -----------------------------------------------------------------------------


UPDATES = {"optimization.max_update": 900}
RATE, CLIPPING = "optimization.lr", "optimization.clip_norm"


def make_run(**changes):
    run = {
        "experiment": "demo",
        "dataset": "wikitext-2",
        "task": "language_modeling",
        "attention_type": "linear",
        "position_encoding": "none",
        "seed": 1,
        "scale": "small",
        "metrics": {"valid": {"blocks": {"ppl": 60.0}}},
        "protocol": {"blocks": "non-overlapping blocks of 256 tokens"},
        "config": {**UPDATES, CLIPPING: 0.0},
        "commit": "0123456789abcdef",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "hardware": {"cpu": "A CPU", "cores": 2, "gpus": []},
        "tokens_per_second": 1000.0,
        "wall_seconds": 10.0,
    }
    return {**run, **changes}


def ppl(value, split="valid"):
    return {split: {"blocks": {"ppl": value}}}


BAD = {
    "a metric that is not a number": {"metrics": ppl(float("nan"))},
    "an infinite metric": {"metrics": ppl(float("inf"))},
    "a metric that is text": {"metrics": ppl("60.0")},
    "a metric without protocol": {"metrics": {"valid": {"ppl": 60.0}}},
    "no metric": {"metrics": {}},
    "a protocol that is not described": {"protocol": {"sliding": "with context"}},
    "a seed that is text": {"seed": "1"},
    "a seed that is a truth value": {"seed": True},
    "an empty encoding": {"position_encoding": ""},
    "an encoder without decoder": {"position_encoding": {"encoder": "rope"}},
    "no speed": {"tokens_per_second": 0},
    "a config that is a list": {"config": []},
    "an infinite option": {"config": {RATE: [float("inf")]}},
    "a curve point without tokens": {"curve": [{"updates": 1, "valid_ppl": 2.0}]},
    "a curve that runs backwards": {
        "curve": [{"updates": u, "tokens": u, "valid_ppl": 2.0} for u in (2, 1)]
    },
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_a_bad_run_is_refused_in_one_sentence_and_leaves_nothing_behind(tmp_path, change):
    with pytest.raises(ValueError, match=r"^[^\n]*\brun\b[^\n]*$"):
        write_run(tmp_path / "demo" / "a.json", make_run(**change))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", FIELDS)
def test_a_run_that_lacks_a_field_is_refused_by_its_name(tmp_path, field):
    run = make_run()
    del run[field]
    with pytest.raises(ValueError, match=f"lacks the field '{field}'"):
        write_run(tmp_path / "a.json", run)
    assert list(tmp_path.iterdir()) == []


def test_a_written_run_is_read_back_as_it_was(tmp_path):
    run = make_run(curve=[{"updates": 10, "tokens": 20480, "valid_ppl": 99.5}], notes="kept")
    write_run(tmp_path / "demo" / "a.json", run)
    assert read_runs(tmp_path) == {"demo/a.json": run}


def test_encoder_and_decoder_may_differ():
    sides = {"encoder": "rope", "decoder": "none"}
    validate(make_run(position_encoding=sides, attention_type=dict.fromkeys(sides, "linear")))


@pytest.mark.parametrize("call", ["os.fsync", "os.replace"])
def test_a_failing_disk_leaves_the_old_run_whole_and_says_which_file(tmp_path, monkeypatch, call):
    path = tmp_path / "demo" / "a.json"
    write_run(path, make_run(seed=1))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(call, full)
    with pytest.raises(OSError, match=r"cannot write this result: No space.*a\.json"):
        write_run(path, make_run(seed=2))
    assert read_run(path)["seed"] == 1
    assert {p.name for p in path.parent.iterdir()} == {"a.json", "base-small.json"}
    with pytest.raises(OSError, match=r"cannot write this result: No space.*b\.json"):
        write_run(tmp_path / "new" / "b.json", make_run())
    assert not list((tmp_path / "new").iterdir())


def test_a_run_killed_while_writing_is_no_run(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    monkeypatch.setattr("os.replace", kill)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process cleans nothing
    with pytest.raises(Killed):
        write_run(tmp_path / "demo" / "a.json", make_run())
    assert [p.suffix for p in (tmp_path / "demo").iterdir()] == [".tmp"]
    assert read_runs(tmp_path) == {}


def test_a_truncated_or_misplaced_run_file_is_refused_by_name(tmp_path):
    path = tmp_path / "demo" / "a.json"
    write_run(path, make_run())
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=r"a\.json is not a run file"):
        read_runs(tmp_path)
    write_run(path, make_run(experiment="other"))
    with pytest.raises(ValueError, match=r"demo/a\.json says that its experiment is 'other'"):
        read_runs(tmp_path)


def test_the_environment_completes_a_run_and_does_not_name_the_host():
    import platform

    found = environment()
    validate(make_run(**found))
    assert set(found["versions"]) == {"python", "torch", "numpy", "fairseq"}
    assert set(found["hardware"]) == {"cpu", "cores", "gpus"}
    host = platform.node()
    assert not host or host not in json.dumps(found["hardware"])


# --- which run fills which cell ---------------------------------------------------------------


TABLE = """
title: Demo
text: A table.
experiments: [demo]
scales: {small: configs/small.yaml, paper: configs/paper.yaml}
baseline: Base
better: lower
options: {optimization.clip_norm: 0.0, model.fidelity: correct}
same: [optimization.max_update]
columns:
  - {key: valid, title: valid, attention: linear, split: valid, protocol: blocks, metric: ppl,
     paper: {file: demo.csv, split: valid}}
  - {key: test, title: test, attention: linear, split: test, protocol: blocks, metric: ppl}
rows:
  - {label: Base, encoding: none, attention: [linear], method: Base}
  - {label: RoPE, encoding: rope, attention: [linear], method: RoPE}
  - {label: SPE, encoding: spe, attention: [linear], method: SPE}
  - {label: PER, encoding: permuteformer, attention: [linear], method: PER}
  - {label: T5, encoding: t5, attention: [softmax]}
  - {label: Type8, encoding: lrpe-type8, attention: [linear],
     overrides: {optimization.clip_norm: 1.0}}
curves: [Base, RoPE]
"""
SAME = "same: [optimization.max_update]"
DEMO_CSV = """method,split,value,std,printed,note
Base,valid,30.0,,30.0,
RoPE,valid,20.0,,20.0,
SPE,valid,40.0,,40.0,
PER,valid,10.0,,10.0,
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "configs" / "tables").mkdir(parents=True)
    (tmp_path / "results" / "paper").mkdir(parents=True)
    (tmp_path / "configs" / "tables" / "demo.yaml").write_text(TABLE)
    (tmp_path / "results" / "paper" / "demo.csv").write_text(DEMO_CSV)
    return tmp_path


def save(root, name, **changes):
    run = make_run(**changes)
    write_run(root / "results" / "runs" / run["experiment"] / f"{name}.json", run)


def edit_table(root, old, new):
    path = root / "configs" / "tables" / "demo.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return path


def scores(root, row, column):
    table = load_table(root / "configs" / "tables" / "demo.yaml")
    runs = read_runs(root / "results" / "runs")
    return cells.scores(table, table.row(row), table.column(column), runs)


def page(root):
    return pages.pages(root)["results/demo.md"]


def index(root):
    return pages.pages(root)["results/README.md"]


def sheet(root):
    table = load_table(root / "configs" / "tables" / "demo.yaml")
    (found,) = sheets(root, table, read_runs(root / "results" / "runs"))
    return found


def line_of(text, label):
    return next(line for line in text.splitlines() if line.startswith(f"| {label} | `"))


def test_a_row_may_lack_columns_and_then_has_neither_cell_nor_training(root):
    path = edit_table(root, "encoding: rope,", "encoding: rope, without: [test],")
    edit_table(
        root,
        "split: test, protocol",
        "overrides: {optimization.clip_norm: 2.0}, split: test, protocol",
    )
    named = [cell.name for cell in recipes.cells(load_table(path))]
    assert named[:3] == ["Base-linear", "Base-linear-clip-norm=2.0", "RoPE-linear"]
    assert "RoPE-linear-clip-norm=2.0" not in named
    config = {**UPDATES, CLIPPING: 2.0}
    for encoding in ("none", "rope"):
        metrics = ppl(60.0, "test")
        save(root, encoding, position_encoding=encoding, metrics=metrics, config=config)
    assert scores(root, "Base", "test") == {1: 60.0}
    assert scores(root, "RoPE", "test") == {}
    text = page(root).partition("## Scale paper")[0]
    assert "| RoPE |" not in text
    absent = [line for line in text.splitlines() if line.startswith("Rows not run:")]
    assert absent == ["Rows not run: SPE; PER; Type8."]


def test_a_row_names_the_further_columns_of_its_published_cell(root):
    cells_of = (root / "results" / "paper" / "demo.csv").read_text()
    wider = [f"{line},{n % 2}" for n, line in enumerate(cells_of.splitlines()[1:])]
    text = "\n".join([f"{cells_of.splitlines()[0]},lambda", *wider, "RoPE,valid,77.0,,77.0,,7", ""])
    (root / "results" / "paper" / "demo.csv").write_text(text)
    edit_table(root, "method: RoPE}", "method: RoPE, paper: {lambda: '7'}}")
    save(root, "a", position_encoding="rope", metrics=ppl(60.0))
    assert "77.0" in line_of(page(root), "RoPE")


def test_a_run_fills_a_cell_only_with_the_options_of_that_cell(root):
    save(root, "a", seed=1, metrics=ppl(50.0))
    save(root, "b", seed=2, metrics=ppl(51.0), config={**UPDATES, "model.fidelity": "published"})
    save(root, "c", seed=3, metrics=ppl(52.0), attention_type="softmax")
    save(root, "d", seed=4, metrics=ppl(53.0), position_encoding="lrpe-type8")
    clipped = {**UPDATES, CLIPPING: 1}
    save(root, "e", seed=5, metrics=ppl(54.0), position_encoding="lrpe-type8", config=clipped)
    assert scores(root, "Base", "valid") == {1: 50.0}
    assert scores(root, "Type8", "valid") == {5: 54.0}
    leftovers = index(root).partition("Runs that are in no table")[2]
    assert re.findall(r"runs/demo/(\w)\.json", leftovers) == ["b", "c", "d"]


def test_equal_methods_of_other_names_fill_one_cell(root):
    edit_table(root, "options: {", "options: {model.attention_normalizer: rotated, ")
    row = "{label: Type3, encoding: lrpe-tmlr-type3, attention: [linear], overrides: "
    edit_table(root, "curves:", f"  - {row}{{model.attention_normalizer: layernorm}}}}\ncurves:")
    config = {**UPDATES, "model.attention_normalizer": "layernorm"}
    save(root, "a", seed=1, metrics=ppl(50.0), position_encoding="lrpe-type4", config=config)
    save(root, "b", seed=2, metrics=ppl(51.0), position_encoding="lrpe-type4")  # another normalizer
    save(root, "c", seed=3, metrics=ppl(52.0), position_encoding="lrpe-type2", config=config)
    assert scores(root, "Type3", "valid") == {1: 50.0}


def test_two_runs_of_one_seed_in_one_cell_are_refused_by_name(root):
    save(root, "a", seed=1)
    save(root, "b", seed=1)
    with pytest.raises(ValueError, match=r"a\.json and demo/b\.json both fill seed 1 of row Base"):
        page(root)


def test_runs_with_unequal_budgets_do_not_share_a_table(root):
    save(root, "a", seed=1)
    save(root, "b", seed=2, position_encoding="rope", config={"optimization.max_update": 901})
    with pytest.raises(
        ValueError, match=r"a\.json and .*b\.json .* differ in optimization.max_update: 900"
    ):
        page(root)


def test_a_column_of_one_scale_is_not_shown_at_another(root):
    edit_table(root, "key: test, title: test,", "key: test, title: test, scales: [small],")
    save(root, "a", metrics=ppl(60.0))
    save(root, "b", metrics=ppl(50.0), scale="paper")
    small, large = page(root).split("\n## ")[1:]
    assert "Not run: test." in small
    assert "test" not in large
    assert "| valid |" in large


@pytest.mark.parametrize("by_dataset", ["true", "false"])
def test_data_sets_without_runs_are_named_instead_of_their_columns(root, by_dataset):
    edit_table(root, SAME, f"{SAME}\nby_dataset: {by_dataset}")
    edit_table(root, "key: valid, title: valid,", "key: valid, title: valid, dataset: letters,")
    more = "- {key: rest, title: rest, attention: linear, split: valid, metric: loss, dataset: ink,"
    edit_table(root, "rows:", f"  {more} protocol: blocks}}\nrows:")
    save(root, "a", dataset="letters")
    assert f"Not run: test; {'ink' if by_dataset == 'true' else 'rest'}." in page(root)


def test_the_grid_of_a_data_set_has_the_rows_that_were_run_on_it(root):
    edit_table(root, SAME, f"{SAME}\nbrief: true\nby_dataset: true")
    edit_table(root, ",\n     paper: {file: demo.csv, split: valid}}", ", dataset: letters}")
    edit_table(root, "title: test, ", "title: test, dataset: ink, ")
    save(root, "a", dataset="letters", metrics=ppl(50.0))
    save(root, "b", dataset="letters", metrics=ppl(40.0), position_encoding="rope")
    save(root, "c", dataset="ink", metrics=ppl(30.0, "test"), position_encoding="spe")
    letters, ink = page(root).split("| row |")[1:3]
    assert re.findall(r"^\| (\w+) \| `", letters, re.M) == ["Base", "RoPE"]
    assert "Rows not run: SPE; PER; Type8.\n" in letters
    assert re.findall(r"^\| (\w+) \| `", ink, re.M) == ["SPE"]
    assert "Rows not run: Base; RoPE; PER; Type8.\n" in ink


def test_a_scale_may_have_some_rows_only(root):
    edit_table(root, "curves:", "rows_of: {paper: [Base, SPE]}\ncurves:")
    save(root, "a", metrics=ppl(60.0), curve=CURVE)
    save(root, "b", metrics=ppl(50.0), curve=CURVE, scale="paper")
    small, large = page(root).split("\n## ")[1:]
    assert "| RoPE | `rope` | not run |" in small
    assert "| SPE | `spe` | not run" in large
    assert "RoPE" not in large


def test_scales_and_data_sets_are_shown_apart(root):
    save(root, "a", metrics=ppl(11.0))
    save(root, "b", metrics=ppl(22.0), scale="paper")
    save(root, "c", metrics=ppl(33.0), dataset="wikitext-103")
    shown = re.findall(r"^## (.*)|^\| Base \| `none` \| ([\d.]+)", page(root), re.M)
    assert [a or b for a, b in shown] == [
        "Scale small (wikitext-103)", "33.00",
        "Scale small (wikitext-2)", "11.00",
        "Scale paper (wikitext-2)", "22.00",
    ]  # fmt: skip


def test_columns_may_be_data_sets(root):
    edit_table(root, "title: valid, ", "title: valid, dataset: rte, ")
    edit_table(root, "split: test, protocol", "dataset: cola, split: valid, protocol")
    save(root, "a", dataset="rte", metrics=ppl(1.0))
    save(root, "b", dataset="cola", metrics=ppl(2.0))
    save(root, "c", dataset="mrpc", metrics=ppl(3.0))
    assert scores(root, "Base", "valid") == {1: 1.0}
    assert scores(root, "Base", "test") == {1: 2.0}
    assert page(root).count("\n## ") == 1
    assert re.findall(r"runs/demo/(\w)\.json", index(root)) == ["c"]


def test_only_the_best_of_a_seeds_learning_rates_counts_where_the_column_says_so(root):
    edit_table(root, "title: test, ", "title: test, best_over: optimization.lr, ")
    values = [(1, 1e-5, 9.0), (1, 3e-5, 7.0), (2, 1e-5, 8.0), (2, 3e-5, 8.5)]
    for name, (seed, lr, value) in enumerate(values):
        save(root, name, seed=seed, metrics=ppl(value, "test"), config={RATE: lr})
    assert scores(root, "Base", "test") == {1: 7.0, 2: 8.0}
    edit_table(root, "better: lower", "better: lower\nrates: {small: [1.0e-5, 3.0e-5]}")
    assert "Chosen optimization.lr: 1e-05 in 1 and 3e-05 in 1 of 2 trainings." in page(root)


def test_a_seed_is_left_out_until_every_rate_of_the_table_has_a_run(root):
    edit_table(root, "title: test, ", "title: test, best_over: optimization.lr, ")
    lost = {"test": {"blocks": {"diverged": 1}}}
    save(root, "a", seed=1, metrics=ppl(9.0, "test"), config={RATE: [1e-5]})
    save(root, "b", seed=1, metrics=lost, config={RATE: [3e-5]})  # a diverged run counts
    save(root, "c", seed=2, metrics=ppl(8.0, "test"), config={RATE: [1e-5]})
    save(root, "d", seed=3, metrics=lost, config={RATE: [1e-5]})
    assert scores(root, "Base", "test") == {1: 9.0, 2: 8.0}  # no rates are named
    edit_table(root, "better: lower", "better: lower\nrates: {small: [1.0e-5, 3.0e-5]}")
    assert scores(root, "Base", "test") == {1: 9.0}
    assert scores(root, "Base", "test").lost == set()  # the sweep of seed 3 may yet find a value
    save(root, "e", seed=2, metrics=ppl(7.0, "test"), config={RATE: [3e-5]})
    assert scores(root, "Base", "test") == {1: 9.0, 2: 7.0}


def test_a_mean_column_averages_columns_over_the_seeds_they_share(root):
    extra = "  - {key: mean, title: mean, attention: linear, mean_of: [valid, test]}\nrows:"
    edit_table(root, "rows:", extra)
    both = {**ppl(10.0), **ppl(20.0, "test")}
    save(root, "a", seed=1, metrics=both)
    save(root, "b", seed=2, metrics=ppl(10.0))
    assert scores(root, "Base", "mean") == {1: 15.0}


def test_a_mean_of_published_columns_is_computed_and_what_was_printed_stands_beside_it():
    table = load_table(ROOT / "configs" / "tables" / "table3.yaml")

    whole = Sheet(ROOT, table, cells.Group("small", "", {}))

    def shown(row, column):
        return whole.printed(table.row(row), table.column(column))

    assert shown("Base", "linear-avg4") == "83.23 (printed: 81.65)"  # which is the mean of five
    assert shown("Base", "linear-avg5") == "81.65"
    assert shown("Type5", "linear-avg4") == "83.01"
    assert shown("T5", "linear-avg4") == markdown.NO_CELL
    assert shown("Base", "linear-rte") == markdown.NO_CELL


def test_a_relative_column_divides_by_the_mean_of_the_baseline_row(root):
    extra = (
        "  - {key: speed, title: speed, attention: linear, metric: tokens_per_second,"
        " relative: true}\nrows:"
    )
    edit_table(root, "rows:", extra)
    save(root, "a", seed=1, tokens_per_second=900)
    save(root, "b", seed=2, tokens_per_second=1100)
    save(root, "c", seed=1, tokens_per_second=500, position_encoding="rope")
    assert scores(root, "RoPE", "speed") == {1: 0.5}


@pytest.mark.parametrize(("side", "other"), [("decoder", "encoder"), ("encoder", "decoder")])
def test_rows_of_encoder_decoder_models_want_the_fixed_half_as_stated(root, side, other):
    fixed = f"fixed: {{side: {side}, encoding: none, attention: softmax}}"
    edit_table(root, "baseline:", f"{fixed}\nbaseline:")
    attention = {other: "linear", side: "softmax"}
    for name, seed, stated in [("a", 1, "none"), ("b", 2, "rope")]:
        encoding = {other: "rope", side: stated}
        save(root, name, seed=seed, attention_type=attention, position_encoding=encoding)
    save(root, "c", seed=3, position_encoding="rope")
    assert set(scores(root, "RoPE", "valid")) == {1}


def test_a_model_with_equal_halves_fills_a_row_if_all_parts_have_the_options(root):
    edit_table(root, "model.fidelity", "model.*.fidelity")
    alike = {"position_encoding": "rope", "attention_type": "linear"}
    both = {name: dict.fromkeys(("encoder", "decoder"), value) for name, value in alike.items()}
    parts = {f"model.{part}.fidelity": "correct" for part in ("encoder", "decoder", "cross")}
    for seed, changed in enumerate(
        [{}, {"model.decoder.fidelity": "published"}, {"model.cross.fidelity": "x"}]
    ):
        save(root, f"run{seed}", seed=seed, **both, config={**UPDATES, **parts, **changed})
    assert set(scores(root, "RoPE", "valid")) == {0}


def test_a_column_of_a_data_set_shows_it_in_the_size_of_the_scale(root):
    edit_table(root, "key: valid, title: valid,", "key: valid, title: valid, dataset: reverse,")
    for seed, dataset in enumerate(["reverse-small", "reverse", "reverse-paper", "copy-small"]):
        save(root, dataset, seed=seed, dataset=dataset)
    assert set(scores(root, "Base", "valid")) == {0, 1}


def test_a_column_with_for_stands_for_every_combination(root):
    path = edit_table(
        root,
        "columns:\n",
        """columns:
  - for: {attention: [linear, softmax], split: {valid: "", test: " (test)"}}
    key: "loss-{attention}-{split}"
    title: "loss{split title}"
    attention: "{attention}"
    split: "{split}"
    protocol: blocks
    metric: loss
    overrides: {optimization.clip_norm: 1.0}
""",
    )
    same = {"protocol": "blocks", "metric": "loss", "overrides": {CLIPPING: 1.0}}
    same["better"] = "lower"
    columns = load_table(path).columns
    assert [column for column in columns if column.metric == "loss"] == [
        Column("loss-linear-valid", "loss", "linear", split="valid", **same),
        Column("loss-linear-test", "loss (test)", "linear", split="test", **same),
        Column("loss-softmax-valid", "loss", "softmax", split="valid", **same),
        Column("loss-softmax-test", "loss (test)", "softmax", split="test", **same),
    ]


def test_the_runs_of_a_table_change_the_half_that_is_not_fixed():
    for name, own, fixed in [("table4", "encoder", "decoder"), ("decoders", "decoder", "encoder")]:
        table = load_table(ROOT / "configs" / "tables" / f"{name}.yaml")
        for run in plan.runs(table, "small", [1]):
            chosen = run.encoding_choices()
            assert chosen[f"model.{own}.position_encoding"] == run.position_encoding
            assert chosen[f"model.{own}.attention_type"] == run.attention_type
            assert chosen[f"model.{fixed}.position_encoding"] == "none"
            assert chosen[f"model.{fixed}.attention_type"] == "softmax"


HIGHER = {"accuracy", "bleu", "exact_match", "f1", "matthews", "pearson", "spearman", "holds-to",
          "answer_accuracy", "token_accuracy", "beyond-window"}  # fmt: skip
LOWER = {"ppl", "word_ppl", "loss", "delta"}


def test_a_column_has_the_direction_of_its_metric_in_every_table():
    for table in load_tables(ROOT / "configs" / "tables"):
        for column in table.columns:
            for metric, better in [
                (column.metric, column.better),
                (column.best_by.get("metric"), column.best_by.get("better")),
            ]:
                name = (metric or "").removesuffix("-2048")
                expected = "higher" if name in HIGHER else "lower" if name in LOWER else better
                assert better == expected, f"{table.name}, {column.key}"


def test_an_order_is_that_of_the_column_where_it_differs_from_the_table(root):
    edit_table(root, "split: test, protocol: blocks, metric: ppl",
               "split: test, protocol: blocks, metric: accuracy, better: higher")  # fmt: skip
    for encoding, value in {"none": 80.0, "rope": 90.0}.items():
        for seed in (1, 2):
            found = {"test": {"blocks": {"accuracy": value + seed, "examples": 9000}}}
            save(root, f"{encoding}{seed}", position_encoding=encoding, seed=seed, metrics=found)
    table = load_table(root / "configs" / "tables" / "demo.yaml")
    (sheet,) = sheets(root, table, read_runs(root / "results" / "runs"))
    assert claims.relation(sheet, "RoPE", "Base", sheet.table.column("test")) == claims.AHEAD


WRONG_TABLES = {
    "an unknown key": ("better: lower", "beter: lower", "has no key beter"),
    "a missing key": ("better: lower\n", "", "lacks the key better"),
    "a wrong direction": ("better: lower", "better: low", "better must be lower or higher"),
    "an override without usual value": (
        "optimization.clip_norm: 0.0, ",
        "",
        "override optimization.clip_norm",
    ),
    "a row twice": ("label: SPE", "label: RoPE", "RoPE stands there twice"),
    "no such baseline": ("baseline: Base", "baseline: Bass", "has no row 'Bass'"),
    "an unknown attention": ("[softmax]", "[vanilla]", "row T5 needs attention types"),
    "a lack of no column": (
        "encoding: spe,",
        "encoding: spe, without: [vaild],",
        "has no column 'vaild'",
    ),
    "a split without protocol": ("protocol: blocks, ", "", "split and protocol together"),
    "a column of no scale": ("title: test,", "title: test, scales: [huge],", "no scale huge"),
    "rows of no scale": ("curves:", "rows_of: {huge: [Base]}\ncurves:", "no scale huge"),
    "no such row": ("curves:", "rows_of: {small: [Base, X]}\ncurves:", "has no row 'X'"),
    "no baseline": ("curves:", "rows_of: {small: [T5]}\ncurves:", "lacks the baseline"),
    "half a fixed half": ("baseline:", "fixed: {side: decoder}\nbaseline:", "fixed needs side"),
    "no such headline": ("curves:", "headline: [vaild]\ncurves:", "has no column 'vaild'"),
    "a wrong comparison": ("curves:", "compare: cells\ncurves:", "compare must be rows or columns"),
    "a number in a note": ("curves:", "notes: {small: it is 5.5}\ncurves:", "states 5.5 itself"),
    "an integer in a note": ("curves:", "notes: {small: 12 rows}\ncurves:", "states 12 itself"),
    "a multiple in a note": ("curves:", "notes: {small: 16x longer}\ncurves:", "states 16 itself"),
    "a number word in a note": (
        "curves:",
        "notes: {small: two rows}\ncurves:",
        "states two itself",
    ),
    "tens in words": ("curves:", "notes: {small: it took twenty}\ncurves:", "states twenty itself"),
    "an order in other words": ("curves:", "notes: {small: A wins}\ncurves:", "says 'wins'"),
    "a number in the text": ("text: A table.", "text: A table of 7.", "states 7 itself"),
    "an order in a note": (
        "curves:",
        "notes: {small: PER is ahead}\ncurves:",
        "says 'ahead' itself",
    ),
    "a name without values": (
        "title: test,",
        'for: {kind: [a]}, title: "{knd}",',
        "'{knd}' has a name that `for` lacks",
    ),
    "a single value": ("title: test,", "for: {kind: a}, title: test,", "needs a list of values"),
    "half a reference": ("curves:", "notes: {small: '[[Base]]'}\ncurves:", "[[Base]] is neither"),
    "a reference to no row": (
        "curves:",
        "notes: {small: '[[X | valid]]'}\ncurves:",
        "has no row 'X'",
    ),
    "a reference to no scale": (
        "curves:",
        "notes: {small: '[[option optimization.lr at huge]]'}\ncurves:",
        "there is no scale huge",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_TABLES.values(), ids=WRONG_TABLES.keys())
def test_a_wrong_table_file_gets_one_sentence_that_names_it(root, wrong, capsys):
    old, new, sentence = wrong
    edit_table(root, old, new)
    assert tables.main(["--root", str(root)]) == 2
    message = capsys.readouterr().err
    assert "demo.yaml" in message
    assert sentence in message
    assert message.count("\n") == 1


def test_a_reference_to_a_published_cell_that_is_not_there_is_refused(root):
    edit_table(root, "method: SPE", "method: SPF")
    with pytest.raises(ValueError, match=r"0 cells with .*SPF"):
        index(root)


# --- rank correlation -------------------------------------------------------------------------


def test_equal_values_share_the_mean_of_their_ranks():
    assert average_ranks([30.0, 10.0, 20.0, 20.0]).tolist() == [4.0, 1.0, 2.5, 2.5]
    assert average_ranks([5.0, 5.0, 5.0, 1.0]).tolist() == [3.0, 3.0, 3.0, 1.0]


def test_spearman_equals_examples_worked_by_hand():
    assert spearman([1, 2, 3], [10, 20, 99]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    # no ties: 1 - 6 * 4 / (4 * 15)
    assert spearman([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)
    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5)
    assert spearman([1, 2, 2, 4], [10, 20, 30, 40]) == pytest.approx(4.5 / 22.5**0.5)
    # ties on both sides, ranks 1.5, 1.5, 3 against 1, 2.5, 2.5: 0.75 / 1.5
    assert spearman([7, 7, 9], [1, 4, 4]) == pytest.approx(0.5)


def test_spearman_of_a_constant_column_is_undefined():
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_spearman_refuses_columns_of_different_lengths():
    with pytest.raises(ValueError, match="2 values with 3"):
        spearman([1, 2], [1, 2, 3])


# --- the rendered text ------------------------------------------------------------------------


FOUR = {"none": 50.0, "rope": 60.0, "spe": 55.0, "permuteformer": 65.0}


def save_four(root):
    for encoding, value in FOUR.items():
        save(root, encoding, position_encoding=encoding, metrics=ppl(value))


def test_a_cell_shows_mean_deviation_seeds_paper_and_distance_from_baseline(root):
    save(root, "a", seed=1, metrics=ppl(50.0))
    save(root, "b", seed=2, metrics=ppl(50.0))
    save(root, "c", seed=1, metrics=ppl(44.0), position_encoding="rope", tokens_per_second=900)
    save(root, "d", seed=2, metrics=ppl(46.0), position_encoding="rope", peak_memory_mb=77)
    text = page(root)
    assert line_of(text, "RoPE") == (
        "| RoPE | `rope` | 45.00 ± 1.41 (2) | 20.0 | -10.0 % / -33.3 % |"
    )
    assert line_of(text, "SPE") == "| SPE | `spe` | not run | 40.0 | — / +33.3 % |"
    assert "| T5 |" not in text.partition("Memory")[0]  # no cell under linear attention
    assert "Not run: test." in text
    assert "| RoPE | 77 |" in text


def test_memory_of_models_with_different_configurations_is_not_compared(tmp_path):
    words, pixels = (
        Column(
            name, f"The {name}", "linear", split="valid", protocol="blocks", metric="ppl",
            dataset=name, config=f"configs/lm/{name}.yaml", better="lower",
        )
        for name in ("words", "pixels")
    )  # fmt: skip
    table = Table(
        name="demo", title="", text="", experiments=["demo"], scales={"small": "x"},
        rows=[Row(label, kind, ["linear"]) for label, kind in (("Base", "none"), ("RoPE", "rope"))],
        columns=[words, pixels], baseline="Base", better="lower",
    )  # fmt: skip
    measured = [("none", "words", 500), ("rope", "words", 600), ("none", "pixels", 900)]
    runs = {
        f"demo/{name}-{data}.json": make_run(
            dataset=data, position_encoding=name, attention_type="linear", peak_memory_mb=memory
        )
        for name, data, memory in measured
    }
    (shown,) = pages._memory(Sheet(tmp_path, table, Group("small", "", runs)))
    assert "| peak memory, MB | linear: The words | linear: The pixels |" in shown
    assert "| Base | 500 | 900 |" in shown
    assert "| RoPE | 600 | — |" in shown


@pytest.mark.parametrize(
    ("scale", "dataset", "shown"),
    [
        ("paper", "wikitext-103", True),
        ("paper", "wikitext-103-word", True),
        ("paper", "wikitext-10", False),
        ("small", "wikitext-103", False),
    ],
)
def test_a_difference_is_shown_only_where_data_and_scale_are_the_papers(
    root, scale, dataset, shown
):
    edit_table(root, "baseline: Base", "baseline: Base\npaper_dataset: wikitext-103")
    save(root, "a", metrics=ppl(32.0), scale=scale, dataset=dataset)
    assert ("| difference |" in page(root)) == shown
    assert ("| +2.00 |" in page(root)) == shown


def test_shared_options_are_those_of_the_columns_with_runs(root):
    edit_table(root, "metric: ppl}", "metric: ppl, config: configs/b.yaml, dataset: b}")
    edit_table(root, "blocks, metric: ppl,\n", "blocks, metric: ppl, dataset: a,\n")
    first = {"config": {"optimization.max_update": 10}}
    save(root, "a", metrics=ppl(50.0), dataset="a", **first)
    assert "Shared by all runs: optimization.max_update 10, `configs/small.yaml`.\n" in page(root)
    save(root, "b", metrics=ppl(50.0, "test"), dataset="b", config={"optimization.max_update": 20})
    text = page(root)
    assert "Shared by all runs" not in text
    assert "Configurations: `configs/small.yaml`, `configs/b.yaml`.\n" in text


def test_a_published_number_of_another_measure_is_shown_and_not_compared(root):
    path = edit_table(root, "split: valid}}", "split: valid}, comparable: false}")
    for encoding, value in FOUR.items():
        save(root, encoding, position_encoding=encoding, metrics=ppl(value), scale="paper")
    text = page(root)
    assert line_of(text, "RoPE") == "| RoPE | `rope` | 60.00 (1) | 20.0 | +20.0 % |"
    assert "difference" not in text.partition("Linear attention:")[2].partition("\n|---")[0]
    assert "Spearman" not in text
    assert not any("-paper" in picture for picture in pages.pictures(root))
    path.write_text(TABLE.replace("metric: ppl}", "metric: ppl, comparable: false}"))
    with pytest.raises(ValueError, match="column test has no published number: leave out"):
        load_table(path)


def test_no_table_is_wider_than_eight_columns_and_the_index_is_one_screen():
    texts = pages.pages(ROOT)
    for path, text in texts.items():
        for line in text.splitlines():
            assert line.count(" | ") < pages.WIDEST, path
    assert texts["results/README.md"].count("\n") <= 60


def test_columns_are_split_in_order_and_evenly():
    widths = dict(zip("abcdefgh", (3, 3, 2, 1, 1, 1, 1, 1), strict=True))
    assert pages.split(list("abc"), widths.get, 6) == [["a"], ["b", "c"]]
    assert pages.split(list("abcdefgh"), widths.get, 6) == [["a"], ["b", "c"], list("defgh")]
    assert pages.split([], widths.get, 6) == []


def test_a_table_that_names_its_rates_shows_no_others(root):
    save(root, "a", metrics=ppl(45.0), config={RATE: [0.001]})
    assert "| 45.00 (1) |" in line_of(page(root), "Base")
    edit_table(root, "baseline: Base", "baseline: Base\nrates: {small: [0.002]}")
    assert "Runs that are in no table: `runs/demo/a.json`" in index(root)


def test_a_column_may_have_rates_of_its_own(root):
    edit_table(root, "baseline: Base", "baseline: Base\nrates: {small: [0.002]}")
    edit_table(root, "title: test, ", "title: test, rates: [0.001], ")
    save(root, "a", metrics={**ppl(45.0), **ppl(50.0, "test")}, config={RATE: [0.001]})
    save(root, "b", metrics={**ppl(46.0), **ppl(51.0, "test")}, config={RATE: [0.002]})
    assert (scores(root, "Base", "valid"), scores(root, "Base", "test")) == ({1: 46.0}, {1: 50.0})


def test_a_text_may_state_the_option_of_a_column(root):
    save(root, "a", metrics=ppl(45.0))
    edit_table(
        root, "text: A table.", "text: '[[option optimization.max_update in test]] updates.'"
    )
    with pytest.raises(ValueError, match=r"table demo has no option optimization\.max_update"):
        page(root)
    edit_table(root, "options: {", "options: {optimization.max_update: 1000, ")
    edit_table(root, "title: test, ", "title: test, overrides: {optimization.max_update: 2000}, ")
    assert "2,000 updates." in page(root)


def test_a_brief_table_shows_our_number_and_the_papers_alone(root):
    edit_table(root, "baseline: Base", "baseline: Base\nbrief: true")
    save(root, "a", metrics=ppl(45.0), position_encoding="rope")
    text = page(root)
    assert "| row | encoding | valid | paper |" in text.splitlines()
    assert line_of(text, "RoPE") == "| RoPE | `rope` | 45.00 (1) | 20.0 |"


def test_nothing_is_relative_to_a_baseline_of_zero(root):
    save(root, "a", metrics=ppl(0.0, "test"))
    save(root, "b", metrics=ppl(5.0, "test"), position_encoding="rope")
    assert "| 5.00 (1) | — |" in line_of(page(root), "RoPE")


def test_rank_correlation_and_the_rows_far_off_are_stated(root):
    save_four(root)
    line = next(line for line in page(root).splitlines() if "linear, valid:" in line)
    # ours 1, 3, 2, 4 against 3, 2, 4, 1: sum of squares 4 + 1 + 4 + 9
    assert line == (
        "- linear, valid: -0.80 over 4 rows; 2 ranks or more away: PER (4; paper 1), "
        "Base (1; paper 3), SPE (2; paper 4)."
    )
    assert "| linear -0.80 (4) |" in index(root)


def test_among_few_rows_a_smaller_distance_in_ranks_is_named():
    ours, theirs = [1, 2, 3, 4, 5, 6, 7, 8], [3, 2, 1, 6, 5, 4, 7, 8]  # 1, 3, 4 and 6 are 2 away
    assert spearman(ours, theirs) == pytest.approx(0.81, abs=0.005)
    assert [claims.far(rows) for rows in (claims.FEWEST, 8, 9, 10, 14)] == [2, 2, 2, 3, 3]


def test_rank_one_is_the_best_also_where_higher_is_better(root):
    edit_table(root, "better: lower", "better: higher")
    save_four(root)
    assert "PER (1; paper 4)" in page(root)


def add_note(root, note):
    edit_table(root, "curves:", f'notes: {{small: "{note}"}}\ncurves:')


def test_a_note_takes_its_numbers_from_runs_papers_and_options(root):
    add_note(root, "RoPE: [[RoPE | valid]] ([[paper RoPE|valid]]), SPE: [[SPE|valid]].")
    edit_table(
        root, "text: A table.", "text: '[[option optimization.max_update at paper]] updates.'"
    )
    edit_table(root, "SPE: [[SPE|valid]].", "SPE: [[SPE|valid]], [[option dataset.max_tokens]].")
    (root / "configs" / "paper.yaml").write_text("optimization: {max_update: 50000}")
    config = {**UPDATES, "dataset.max_tokens": 1024, "optimization.update_freq": [2]}
    save(root, "a", position_encoding="rope", metrics=ppl(44.4), config=config)
    assert "RoPE: 44.40 (20.0), SPE: not run, 2,048." in page(root)
    assert "50,000 updates." in page(root)


def test_runs_of_one_and_of_several_processes_have_one_size_of_an_update(root):
    edit_table(root, SAME, SAME.replace("]", ", dataset.batch_size]"))
    edit_table(root, "text: A table.", "text: '[[option dataset.batch_size at paper]] samples.'")
    (root / "configs" / "paper.yaml").write_text(
        "{optimization: {update_freq: [2]}, dataset: {batch_size: 800}}"
    )
    one = {
        **UPDATES,
        "dataset.batch_size": 256,
        "optimization.update_freq": [1],
        "distributed_training.distributed_world_size": 1,
    }
    save(root, "a", seed=1, metrics=ppl(50.0), config=one)
    four = {**one, "dataset.batch_size": 64, "distributed_training.distributed_world_size": 4}
    save(root, "b", seed=2, metrics=ppl(52.0), config=four)
    text = page(root)
    assert "Shared by all runs: optimization.max_update 900, dataset.batch_size 256" in text
    assert "1,600 samples." in text
    assert "51.00 ± 1.41 (2)" in line_of(text, "Base")
    save(root, "b", seed=2, metrics=ppl(52.0), config={**one, "dataset.batch_size": 64})
    with pytest.raises(ValueError, match=r"differ in dataset\.batch_size: 256 and 64"):
        page(root)


def test_an_option_in_which_runs_differ_is_refused(root):
    add_note(root, "[[option optimization.lr]]")
    save(root, "a", seed=1, config={**UPDATES, RATE: [0.1]})
    save(root, "b", seed=2, config={**UPDATES, RATE: [0.2]})
    with pytest.raises(ValueError, match=r"do not share one value of optimization\.lr"):
        page(root)


@pytest.mark.parametrize(
    "text",
    [
        "Types 1, 2 and 5 of Table 2, Eq. 39, WikiText-103, test2016, T5, RoPE-2D and `lrpe-type2`",
        "[[Base | valid]] after [[option optimization.max_update]] updates, see [x](table2.md)",
    ],
)
def test_names_and_references_are_no_bare_numbers(text):
    notes.check_note(text)


@pytest.mark.parametrize(
    "text",
    [
        "RoPE is twice as good as [[Base | valid]]",
        "one third",
        "a tenth of a nat",
        "three quarters",
        "hundreds of tests",
        "it doubles",
    ],
)
def test_a_number_in_words_is_a_bare_number(text):
    with pytest.raises(ValueError, match=r"a text states \w+ itself"):
        notes.check_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "zero of them",
        "half of the tokens",
        "RoPE leads",
        "RoPE breaks and FoX does not",
        "only FoX solves it",
        "RoPE solved it",
        "FoX ranks first",
        "smaller than RoPE",
        "a smaller loss",
        "Base has more than RoPE",
        "FoX has the lowest loss",
        "RoPE won",
    ],
)
def test_an_outcome_in_a_note_is_a_reference(text):
    with pytest.raises(ValueError, match=r"a note says '[\w ]+' itself"):
        notes.check_note(text)
    notes.check_text(text)


def test_words_of_definitions_stay_possible():
    notes.check_text("lower is better; the rate falls to zero; half of a head; only late tokens")
    notes.check_note("rotation depth-first; ranks are noise; longer blocks than those of training")
    notes.check_note("in the last half of the longest blocks")


def test_an_order_in_a_note_is_stated_only_where_the_runs_support_it(root):
    add_note(root, "[[RoPE ahead of Base; SPE; PER | valid]].")
    for name, (one, two) in {
        "rope": (40.0, 41.0),
        "none": (50.0, 51.0),
        "spe": (41.0, 40.5),  # better in one seed only
        "permuteformer": (41.1, 42.1),  # better in both, by less than twice the deviation
    }.items():
        save(root, f"{name}1", position_encoding=name, metrics=ppl(one), seed=1)
        save(root, f"{name}2", position_encoding=name, metrics=ppl(two), seed=2)
    text = page(root).replace("\n", " ")
    assert (
        "RoPE (40.50) is ahead of Base (50.50) and not separated from SPE (40.75) and PER" in text
    )
    (root / "results" / "runs" / "demo" / "none2.json").unlink()
    assert "RoPE (40.50) is not separated from Base (50.00), SPE (40.75) and" in page(root)


def test_the_label_of_a_row_in_a_note_may_have_a_comma():
    found = notes.parse("FoX ahead of Type2, gated; Type2 | valid")
    assert found == notes.Order("FoX", ("Type2, gated", "Type2"), "valid")


def test_a_note_says_that_a_row_is_behind_and_does_not_call_that_open(root):
    add_note(root, "[[Base ahead of RoPE; SPE | valid]].")
    for name, value in {"none": 50.0, "rope": 40.0, "spe": 60.0}.items():
        for seed in (1, 2):
            changes = {"seed": seed, "metrics": ppl(value + seed / 10)}
            save(root, f"{name}{seed}", position_encoding=name, **changes)
    assert "Base (50.15) is ahead of SPE (60.15) and behind RoPE (40.15)." in page(root)


def test_published_numbers_without_runs_stand_on_a_page(root):
    text = page(root)
    assert "Not run; the published numbers are:" in text
    assert "| Base | `none` | not run |" in text
    assert "| difference |" not in text
    assert "Published columns that were not run: [Demo](demo.md)." in index(root)


def test_an_order_leaves_out_rows_without_runs_and_says_so(root):
    add_note(root, "[[Base ahead of RoPE; SPE | valid]]; [[SPE ahead of Base | valid]].")
    for name, value in {"none": 50.0, "rope": 60.0}.items():
        for seed in (1, 2):
            changes = {"seed": seed, "metrics": ppl(value + seed / 10)}
            save(root, f"{name}{seed}", position_encoding=name, **changes)
    assert "Base (50.15) is ahead of RoPE (60.15) (SPE not run); SPE is not run." in page(root)


def test_one_cell_is_ahead_where_seeds_agree_and_the_gap_is_twice_the_pooled_deviation():
    low, high = Scores({1: 1.0, 2: 2.0}), Scores({1: 3.0, 2: 4.0})
    assert claims.pooled_deviation(low, high) == pytest.approx(0.5**0.5)
    assert claims.ahead(low, high, "lower")
    assert not claims.ahead(low, high, "higher")
    assert claims.ahead(high, low, "higher")
    assert not claims.ahead(low, Scores({1: 2.4, 2: 3.4}), "lower")  # 1.4 < 2 * 0.71
    assert not claims.ahead(low, Scores({1: 30.0}), "lower")  # one shared seed
    more = Scores({1: 10.0, 2: 10.4} | dict.fromkeys(range(3, 13), 8.0))
    assert not claims.ahead(more, Scores({1: 10.1, 2: 10.5}), "lower")  # 0.1 on the shared ones
    assert not claims.ahead(Scores({1: 1.0, 2: 9.0}), Scores({1: 20.0, 2: 8.9}), "lower")
    more = Scores({1: 1.0, 2: 2.0} | dict.fromkeys(range(3, 6), 3.5))
    assert not claims.ahead(more, Scores({1: 3.0, 2: 4.0}), "lower")  # 0.8 with all of them


def test_perplexities_are_compared_as_losses_so_that_an_exploding_seed_hides_no_order(root):
    for name, values in {"none": (79.0, 80.0), "rope": (1000.0, 20000.0)}.items():
        for seed, value in enumerate(values, 1):
            save(root, f"{name}{seed}", position_encoding=name, seed=seed, metrics=ppl(value))
    good, bad = (scores(root, row, "valid") for row in ("Base", "RoPE"))
    assert good.compared[1] == pytest.approx(math.log(79.0))
    assert claims.ahead(good, bad, "lower")
    assert not claims.ahead(Scores(good), Scores(bad), "lower")  # of the plain values


def test_two_equal_methods_with_two_seeds_are_ordered_as_often_as_the_pages_say():
    draw = random.Random(0)
    pairs = [[Scores({k: draw.gauss(0, 1) for k in (1, 2)}) for _ in range(2)] for _ in range(4000)]
    found = [claims.ahead(one, two, "lower") or claims.ahead(two, one, "lower")
             for one, two in pairs]  # fmt: skip
    assert 100 * sum(found) / len(found) == pytest.approx(claims.CHANCE, abs=1.5)


def test_a_row_with_a_diverged_seed_is_ahead_of_nothing(root):
    lost = {"valid": {"blocks": {"diverged": 1, "tokens": 1000}}}
    for name, value in {"none": 40.0, "rope": 50.0}.items():
        for seed in (1, 2):
            changes = {"seed": seed, "metrics": ppl(value + seed / 10)}
            save(root, f"{name}{seed}", position_encoding=name, **changes)
    save(root, "none3", position_encoding="none", seed=3, metrics=lost)
    one, two = (scores(root, row, "valid") for row in ("Base", "RoPE"))
    assert (one.lost, two.lost) == ({3}, set())
    assert not claims.ahead(one, two, "lower")
    assert claims.ahead(Scores(one, logarithmic=True), two, "lower")  # without that seed


def test_tokens_of_one_sample_do_not_shrink_the_sampling_error(root):
    edit_table(root, "split: test, protocol: blocks, metric: ppl",
               "split: test, protocol: blocks, metric: token_accuracy")  # fmt: skip
    found = {"test": {"blocks": {"token_accuracy": 0.8, "samples": 256, "answers": 65536}}}
    save(root, "none1", position_encoding="none", metrics=found)
    assert scores(root, "Base", "test").sampling == pytest.approx((0.8 * 0.2 / 256) ** 0.5)


@pytest.mark.parametrize(("other", "ordered"), [(80.5, False), (85.0, True)])
def test_the_sampling_error_of_an_accuracy_is_the_least_deviation(root, other, ordered):
    edit_table(root, "better: lower", "better: higher")
    edit_table(root, "split: test, protocol: blocks, metric: ppl",
               "split: test, protocol: blocks, metric: accuracy")  # fmt: skip
    for encoding, value in {"none": 80.0, "rope": other}.items():
        for seed in (1, 2):  # equal seeds: their deviation is 0
            found = {"test": {"blocks": {"accuracy": value, "examples": 900, "loss": 1.0}}}
            save(root, f"{encoding}{seed}", position_encoding=encoding, seed=seed, metrics=found)
    one, two = (scores(root, row, "test") for row in ("RoPE", "Base"))
    assert two.sampling == pytest.approx(100 * (0.8 * 0.2 / 900) ** 0.5)
    assert claims.ahead(one, two, "higher") is ordered


@pytest.mark.parametrize(("gap", "ordered"), [(1.9, False), (2.1, True)])
def test_seeds_that_only_one_row_has_do_not_change_the_sampling_error(gap, ordered):
    five = Scores(dict.fromkeys(range(1, 6), 80.0 + gap), sampling=1.0)
    assert claims.ahead(five, Scores({1: 80.0, 2: 80.0}, sampling=1.0), "higher") is ordered


def test_the_sampling_error_of_a_mean_of_columns_is_that_of_independent_tests(root):
    parts = [Scores({1: 0.5, 2: 0.7}, sampling=0.03), Scores({1: 0.1}, sampling=0.04)]
    mean = cells._mean_scores(parts)
    assert mean == {1: pytest.approx(0.3)}
    assert mean.sampling == pytest.approx(0.025)


def test_the_finding_names_the_leaders_and_the_rows_ahead_of_the_baseline(root):
    for name, value in {**FOUR, "permuteformer": 40.0}.items():
        for seed in (1, 2):
            save(root, f"{name}{seed}", position_encoding=name, seed=seed,
                 metrics=ppl(value + seed / 10))  # fmt: skip
    assert claims.finding(sheet(root)) == (
        "Linear, valid: PER (40.15) is ahead of the other 3; 1 of 3 are ahead of Base (50.15); "
        "behind Base: RoPE and SPE."
    )
    for name in ("spe", "permuteformer"):
        (root / "results" / "runs" / "demo" / f"{name}2.json").unlink()
    assert claims.finding(sheet(root)) == (
        "Linear, valid: of the 2 rows with several seeds, Base (50.15) is ahead of the other one; "
        "no row is ahead of Base (50.15); behind Base: RoPE."
    )


def test_with_one_seed_no_order_is_claimed(root):
    save_four(root)
    assert claims.finding(sheet(root)) == (
        "Linear, valid: one seed: no order is claimed (50.00 to 65.00 over 4 rows)."
    )


def test_a_finding_keeps_the_capital_letters_of_a_title(root):
    edit_table(root, "title: valid,", "title: MQAR tokens,")
    save_four(root)
    assert claims.finding(sheet(root)).startswith("Linear, MQAR tokens: one seed")


def test_columns_are_compared_row_by_row(root):
    edit_table(root, "curves:", "compare: columns\nheadline: [valid, test]\ncurves:")
    edit_table(root, "split: test,", "split: valid, overrides: {model.fidelity: published},")
    for seed in (1, 2):
        save(root, f"a{seed}", seed=seed, metrics=ppl(50.0 + seed / 10))
        config = {**UPDATES, "model.fidelity": "published"}
        save(root, f"b{seed}", seed=seed, metrics=ppl(40.0 + seed / 10), config=config)
    save(root, "c", position_encoding="rope")
    save(root, "d", position_encoding="rope", config=config)
    assert claims.finding(sheet(root)) == ("test against valid: ahead for Base, one seed for RoPE.")


def test_a_group_has_one_line_of_provenance_and_an_unrun_scale_a_command(root):
    save(root, "a", commit="fedcba9876543210-dirty")
    (line,) = (line for line in page(root).splitlines() if line.startswith("Provenance"))
    assert line == (
        "Provenance: 1 training, 1 seed, 0.0 hours in total; commit `fedcba9876-dirty`; "
        "A CPU, 2 cores, no GPU; python 3.11.7, torch 2.13.0; "
        "`scripts/run_table.sh demo --scale small`."
    )
    assert "Not run at scale paper: `scripts/run_table.sh demo --scale paper`." in page(root)
    assert "Not run: scale `paper` of demo." in index(root)


def test_a_table_without_runs_and_published_numbers_is_one_line_of_the_index(root):
    edit_table(root, "metric: ppl,\n     paper: {file: demo.csv, split: valid}}", "metric: ppl}")
    assert list(pages.pages(root)) == ["results/README.md"]
    assert "Not run: scale `small` of demo; scale `paper` of demo." in index(root)


def test_the_text_is_the_same_in_whatever_order_the_runs_were_written(root):
    save_four(root)
    first = page(root)
    shutil.rmtree(root / "results" / "runs")
    for encoding in reversed(FOUR):
        save(root, encoding, position_encoding=encoding, metrics=ppl(FOUR[encoding]))
    assert page(root) == first


def test_a_stale_text_fails_the_check_in_one_sentence(root, capsys):
    save(root, "a", metrics=ppl(50.0))
    assert tables.main(["--root", str(root), "--check"]) == 1
    assert tables.main(["--root", str(root)]) == 0
    assert tables.main(["--root", str(root), "--check"]) == 0
    save(root, "b", seed=2, metrics=ppl(50.5))
    capsys.readouterr()
    assert tables.main(["--root", str(root), "--check"]) == 1
    message = capsys.readouterr().err
    assert message == "docs: stale: results/README.md, results/demo.md; run 'make docs'\n"


def test_no_number_of_ours_stands_without_its_run(root):
    save_four(root)
    found = OURS.findall(page(root))
    assert found == [f"{value:.2f} (1)" for value in FOUR.values()]
    (root / "results" / "runs" / "demo" / "spe.json").unlink()
    assert OURS.findall(page(root)) == [v for v in found if v != "55.00 (1)"]


# --- figures ----------------------------------------------------------------------------------


CURVE = [{"updates": u, "tokens": 2048 * u, "valid_ppl": 100.0 - u} for u in (10, 20, 30)]


def test_a_mean_curve_stands_where_all_seeds_were_validated():
    higher = [{**point, "valid_ppl": point["valid_ppl"] + 2} for point in CURVE[1:]]
    runs = [make_run(curve=CURVE), make_run(seed=2, curve=higher)]
    assert mean_curve(runs) == [(20, 81.0), (30, 71.0)]


def test_the_axis_of_the_curves_is_labeled_by_their_metric():
    accuracy = [{"updates": 10, "tokens": 20, "valid_accuracy": 0.5}]
    runs = [make_run(curve=CURVE), make_run(curve=accuracy), make_run()]
    assert axis_label(runs[::2]) == "validation perplexity"
    assert axis_label(runs[1:]) == "validation accuracy"
    with pytest.raises(ValueError, match="cannot show curves of valid_accuracy and valid_ppl"):
        axis_label(runs)


def test_trainings_of_different_columns_have_curves_of_their_own(root):
    clipped = "  - {key: clipped, title: clipped, attention: linear, split: valid, metric: ppl,"
    clipped += " protocol: blocks, overrides: {optimization.clip_norm: 1.0}}"
    edit_table(root, "columns:\n", f"columns:\n{clipped}\n")
    other = [{**point, "valid_ppl": point["valid_ppl"] + 2} for point in CURVE]
    save(root, "plain", curve=CURVE)
    save(root, "clipped", curve=other, config={**UPDATES, CLIPPING: 1.0})
    shown = sheet(root)
    assert panels(shown.table, shown.group) == {
        "linear attention, 1.0": {"Base": [(10, 92.0), (20, 82.0), (30, 72.0)]},
        "linear attention": {"Base": [(10, 90.0), (20, 80.0), (30, 70.0)]},
    }


def test_the_same_curves_give_the_same_picture(tmp_path):
    pytest.importorskip("matplotlib")
    curves = {"linear": {"Base": [(1, 9.0), (2, 8.0)]}, "softmax": {"Base": [(1, 9.0), (2, 7.0)]}}
    validation_curves(tmp_path / "a.png", curves)
    validation_curves(tmp_path / "b.png", curves)
    picture = (tmp_path / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert b"Software" not in picture
    assert picture == (tmp_path / "b.png").read_bytes()


def test_a_missing_figure_fails_the_check(root, capsys):
    pytest.importorskip("matplotlib")
    save(root, "a", curve=CURVE)
    assert tables.main(["--root", str(root)]) == 0
    picture = root / "results" / "figures" / "demo-wikitext-2-small.png"
    assert "](figures/demo-wikitext-2-small.png)" in (root / "results/demo.md").read_text()
    assert tables.main(["--root", str(root), "--check"]) == 0
    picture.unlink()
    assert tables.main(["--root", str(root), "--check"]) == 1
    assert "demo-wikitext-2-small.png (missing)" in capsys.readouterr().err


def test_without_matplotlib_the_text_is_the_same_and_one_sentence_says_so(
    root, monkeypatch, capsys
):
    save(root, "a", curve=CURVE)
    text = page(root)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert tables.main(["--root", str(root)]) == 0
    assert capsys.readouterr().out.count("matplotlib") == 1
    assert (root / "results" / "demo.md").read_text() == text
    assert not (root / "results" / "figures").exists()


def test_the_same_points_give_the_same_picture_and_a_far_one_stays_at_the_edge(tmp_path):
    pytest.importorskip("matplotlib")
    points = [scatter.Point(f"R{i}", 30.0 + i, 90.0 + i, 0.5) for i in range(6)]
    points.append(scatter.Point("far", 31.0, 900.0, None))
    panel = scatter.Panel("linear attention, valid", "linear", "lower", tuple(points))
    for name in "ab":
        scatter.draw(tmp_path / f"{name}.png", [panel])
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert scatter.limits([p.ours for p in points], [0.0] * 7)[1] < 100


@pytest.mark.parametrize("seed", [0, 3])
def test_lines_to_the_labels_of_a_dense_cluster_do_not_cross(tmp_path, monkeypatch, seed):
    text_class = pytest.importorskip("matplotlib.text").Text
    drawn, draw = [], random.Random(seed).random
    monkeypatch.setattr(scatter.pictures, "save", lambda figure, path: drawn.append(figure))
    points = [scatter.Point(f"wide-{n}", 20.0 + 3 * n, 80.0 + 3 * n, None) for n in range(9)]
    dense = [(30 + 3 * draw(), 90 + 3 * draw()) for _ in range(12)]
    points += [scatter.Point(f"dense-{n}", x, y, 0.5) for n, (x, y) in enumerate(dense)]
    scatter.draw(tmp_path / "a.png", [scatter.Panel("one", "softmax", "lower", tuple(points))])
    drawn[0].canvas.draw()
    [axes] = drawn[0].axes
    boxes = {t: text_class.get_window_extent(t) for t in axes.texts}  # without the line
    lines = [
        (*axes.transData.transform(text.xy), (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
        for text, box in boxes.items()
        if text.arrow_patch is not None
    ]
    assert len(lines) > 3
    assert not any(labels.cross(a, b) for a, b in itertools.combinations(lines, 2))
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes.values(), 2))


def test_lines_cross_where_each_parts_the_ends_of_the_other():
    assert labels.cross((0, 0, 2, 2), (0, 2, 2, 0))
    assert not labels.cross((0, 0, 2, 2), (0, 2, 0.9, 1))
    assert not labels.cross((0, 0, 1, 1), (2, 0, 2, 5))


def test_a_label_beside_its_point_moves_when_a_later_one_needs_its_place():
    """The first label could be left or right of its point, the second one only to the right."""
    left, right = (labels.Place(labels.around(x, 0, 9, 5), (0, 0, x, 0), False) for x in (-8, 8))
    frame = (-50, -50, 50, 50)
    assert labels.arrange([[right, left], [right]], [], frame) == [left, right]
    wall = labels.Obstacle(labels.around(-8, 0, 9, 5), 100.0)
    assert labels.arrange([[left, right]], [wall], frame) == [right]


def test_a_row_is_a_point_where_both_numbers_are_there(root):
    save_four(root)
    (panel,) = scatter.panels(sheet(root))
    assert [(p.label, p.paper, p.ours) for p in panel.points] == [
        ("Base", 30.0, 50.0), ("RoPE", 20.0, 60.0), ("SPE", 40.0, 55.0), ("PER", 10.0, 65.0),
    ]  # fmt: skip
    assert "![Ours against the paper](figures/demo-wikitext-2-small-paper.png)" in page(root)


# --- this repository --------------------------------------------------------------------------


def test_the_results_of_this_repository_are_up_to_date():
    assert tables.main(["--check"]) == 0


def test_the_tables_of_this_repository_show_no_number_of_ours_without_runs(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copytree(PAPER, tmp_path / "results" / "paper")
    texts = pages.pages(tmp_path)
    assert len(texts) > 5
    assert {path: OURS.findall(text) for path, text in texts.items() if OURS.search(text)} == {}


def test_table_2_lists_all_fourteen_methods_and_the_cells_the_paper_has():
    table = load_table(ROOT / "configs" / "tables" / "table2.yaml")
    ours = {(row.method, row.encoding, kind) for row in table.rows for kind in row.attention}
    paper = {
        (c["method"], c["encoding"], c["attention"]) for c in published("iclr-table2") if c["value"]
    }
    assert len(table.rows) == 14
    assert ours == paper


def test_every_row_of_our_tables_names_a_public_encoding():
    found = load_tables(ROOT / "configs" / "tables")
    names = [table.name for table in found]
    assert names[:5] == [
        "table2",
        "table3",
        "table4",
        "table5",
        "table8",
    ]  # by number, then the others
    for row in (row for table in found for row in table.rows):
        assert row.encoding
        assert ENCODING.fullmatch(row.encoding)
