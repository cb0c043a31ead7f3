"""The published numbers, the run file, and the pages of results/."""

import json
import platform
import re
from collections import defaultdict
from pathlib import Path

import pytest

from lrpe_fairseq.encodings import encoding_class
from lrpe_fairseq.experiments.records import keys
from lrpe_fairseq.experiments.records.machine import environment
from lrpe_fairseq.experiments.records.runs import FIELDS, read_run, read_runs, validate, write_run
from lrpe_fairseq.experiments.records.tables import load_table
from lrpe_fairseq.experiments.report import docs, pages, sheets
from lrpe_fairseq.experiments.report.published import read_paper
from lrpe_fairseq.experiments.report.results import Results, results_of
from tests.trial import a_record

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "results" / "paper"
SETTINGS = {"iclr-table1", "iclr-table7", "tmlr-table8", "tmlr-table9", "ape-table3"}  # no results
NUMBERS = ("value", "std", "ci95", "printed", "note")  # columns that do not name a cell
RESULTS = sorted({path.stem for path in PAPER.glob("*.csv")} - SETTINGS)


def published(name):
    return read_paper(PAPER / f"{name}.csv")


def values(name, *keys):
    return {
        tuple(cell[key] for key in keys): float(cell["value"])
        for cell in published(name)
        if cell["value"]
    }


@pytest.mark.parametrize("name", RESULTS)
def test_published_cells_are_unique_have_the_printed_numbers_and_name_our_encodings(name):
    cells = published(name)
    assert len({tuple(v for k, v in c.items() if k not in NUMBERS) for c in cells}) == len(cells)
    form = r"\d+(\.\d+)?" if name == "extrapolation" else r"\d+\.\d+"
    for cell in cells:
        numbers = [] if cell["printed"] == "-" else re.split(r"\s*±\s*", cell["printed"])
        spread = cell["ci95"] if name.startswith("ape-") else cell["std"]
        assert [n for n in (cell["value"], spread) if n] == numbers, cell
        assert all(re.fullmatch(form, n) for n in numbers), cell
        assert not cell["encoding"] or encoding_class(cell["encoding"]), cell
        assert cell["attention"] in ("linear", "softmax"), cell


def test_table_8_perplexity_is_two_to_the_loss_within_its_rounding():
    found = values("iclr-table8", "method", "attention", "metric")
    pairs = [(v, found[m, a, "PPL"]) for (m, a, metric), v in found.items() if metric == "Loss"]
    assert len(pairs) == 26 - 3
    for loss, ppl in pairs:
        assert 2 ** (loss - 0.005) - 0.005 <= ppl <= 2 ** (loss + 0.005) + 0.005


def test_long_range_arena_averages_are_the_mean_of_five_tasks():
    rows = defaultdict(dict)
    for (method, dataset), value in values("tmlr-table4", "method", "dataset").items():
        rows[method][dataset] = value
    for row in rows.values():
        assert row.pop("AVG") == pytest.approx(sum(row.values()) / 5, abs=0.0051)


UPDATES = {"optimization.max_update": 900}
RATE, CLIPPING = "optimization.lr", "optimization.clip_norm"


def make_run(**changes):
    own = {"experiment": "demo", "metrics": ppl(60.0), "config": {**UPDATES, CLIPPING: 0.0}}
    return a_record(**{**own, "dataset": "wikitext-2", **changes})


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
    "a config that is a list": {"config": []},
    "an infinite option": {"config": {RATE: [float("inf")]}},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_a_bad_run_is_refused_in_one_sentence_and_leaves_nothing_behind(tmp_path, change):
    with pytest.raises(ValueError, match=r"^[^\n]*\brun\b[^\n]*$"):
        write_run(tmp_path / "demo" / "a.json", make_run(**change))
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_lacks_a_field_is_refused_by_its_name():
    for field in FIELDS:
        with pytest.raises(ValueError, match=f"lacks the field '{field}'"):
            validate({name: value for name, value in make_run().items() if name != field})


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
    found = environment()
    validate(make_run(**found))
    assert set(found["versions"]) == {"python", "torch", "numpy", "fairseq"}
    assert set(found["hardware"]) == {"cpu", "cores", "gpus"}
    host = platform.node()
    assert not host or host not in json.dumps(found["hardware"])


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
compare: rows
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
    sheet = sheets.Sheet(table, "small", "", runs)
    return sheet.scores(table.row(row), table.column(column))


def page(root):
    results_of.cache_clear()
    return pages.pages(root)["results/demo.md"]


def test_a_row_may_lack_columns_and_then_has_neither_cell_nor_training(root):
    edit_table(root, "encoding: rope,", "encoding: rope, without: [test],")
    changed = "overrides: {optimization.clip_norm: 2.0}, split: test, protocol"
    path = edit_table(root, "split: test, protocol", changed)
    named = [cell.name for cell in keys.cells(load_table(path))]
    assert named[:3] == ["Base-linear", "Base-linear-clip-norm=2.0", "RoPE-linear"]
    assert "RoPE-linear-clip-norm=2.0" not in named
    config = {**UPDATES, CLIPPING: 2.0}
    for encoding in ("none", "rope"):
        metrics = ppl(60.0, "test")
        save(root, encoding, position_encoding=encoding, metrics=metrics, config=config)
    assert scores(root, "Base", "test") == {1: 60.0}
    assert scores(root, "RoPE", "test") == {}


def test_a_row_names_the_further_columns_of_its_published_cell(root):
    cells_of = (root / "results" / "paper" / "demo.csv").read_text()
    wider = [f"{line},{n % 2}" for n, line in enumerate(cells_of.splitlines()[1:])]
    text = "\n".join([f"{cells_of.splitlines()[0]},lambda", *wider, "RoPE,valid,77.0,,77.0,,7", ""])
    (root / "results" / "paper" / "demo.csv").write_text(text)
    edit_table(root, "method: RoPE}", "method: RoPE, paper: {lambda: '7'}}")
    save(root, "a")
    view = Results(root).column("demo", "valid")
    assert (view.paper["RoPE"], view.paper["Base"]) == (77.0, 30.0)


def test_a_run_fills_a_cell_only_with_the_options_of_that_cell(root):
    save(root, "a", seed=1, metrics=ppl(50.0))
    save(root, "b", seed=2, metrics=ppl(51.0), config={**UPDATES, "model.fidelity": "published"})
    save(root, "c", seed=3, metrics=ppl(52.0), attention_type="softmax")
    save(root, "d", seed=4, metrics=ppl(53.0), position_encoding="lrpe-type8")
    clipped = {**UPDATES, CLIPPING: 1}
    save(root, "e", seed=5, metrics=ppl(54.0), position_encoding="lrpe-type8", config=clipped)
    assert scores(root, "Base", "valid") == {1: 50.0}
    assert scores(root, "Type8", "valid") == {5: 54.0}


def test_equal_methods_of_other_names_fill_one_cell(root):
    edit_table(root, "options: {", "options: {model.attention_normalizer: rotated, ")
    row = "{label: Type3, encoding: lrpe-tmlr-type3, attention: [linear], overrides: "
    edit_table(root, "compare:", f"  - {row}{{model.attention_normalizer: layernorm}}}}\ncompare:")
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
    said = r"a\.json and .*b\.json .* differ in optimization.max_update: 900"
    with pytest.raises(ValueError, match=said):
        page(root)


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
    others = [{}, {"model.decoder.fidelity": "published"}, {"model.cross.fidelity": "x"}]
    for seed, changed in enumerate(others):
        save(root, f"run{seed}", seed=seed, **both, config={**UPDATES, **parts, **changed})
    assert set(scores(root, "RoPE", "valid")) == {0}


def test_a_column_of_a_data_set_shows_it_in_the_size_of_the_scale(root):
    edit_table(root, "key: valid, title: valid,", "key: valid, title: valid, dataset: reverse,")
    for seed, dataset in enumerate(["reverse-small", "reverse", "reverse-paper", "copy-small"]):
        save(root, dataset, seed=seed, dataset=dataset)
    assert set(scores(root, "Base", "valid")) == {0, 1}


WRONG_TABLES = [  # what is replaced, by what, and a part of the sentence
    ("better: lower", "beter: lower", "unexpected keyword argument 'beter'"),
    ("better: lower", "better: low", "better must be lower or higher"),
    ("optimization.clip_norm: 0.0, ", "", "override optimization.clip_norm"),
    ("label: SPE,", "label: A b, encoding: x, attention: [linear]}\n  - {label: A/b,", "name A_b"),
    ("baseline: Base", "baseline: Bass", "has no row 'Bass'"),
    ("[softmax]", "[vanilla]", "linear or softmax, not 'vanilla'"),
    ("encoding: spe,", "encoding: spe, without: [vaild],", "has no column 'vaild'"),
    ("title: test,", "title: test, scales: [huge],", "no scale huge"),
    ("compare:", "rows_of: {small: [Base, X]}\ncompare:", "has no row 'X'"),
]


@pytest.mark.parametrize(("old", "new", "sentence"), WRONG_TABLES)
def test_a_wrong_table_file_gets_one_sentence_that_names_it(root, old, new, sentence, capsys):
    edit_table(root, old, new)
    assert docs.main(["results", "--root", str(root)]) == 2
    message = capsys.readouterr().err
    assert "demo.yaml" in message
    assert sentence in message
    assert message.count("\n") == 1


def test_a_reference_to_a_published_cell_that_is_not_there_is_refused(root):
    edit_table(root, "method: SPE", "method: SPF")
    save(root, "a")
    with pytest.raises(ValueError, match=r"0 cells with .*SPF"):
        page(root)


def test_a_column_may_have_rates_of_its_own(root):
    edit_table(root, "baseline: Base", "baseline: Base\nrates: {small: [0.002]}")
    edit_table(root, "title: test, ", "title: test, rates: [0.001], ")
    save(root, "a", metrics={**ppl(45.0), **ppl(50.0, "test")}, config={RATE: [0.001]})
    save(root, "b", metrics={**ppl(46.0), **ppl(51.0, "test")}, config={RATE: [0.002]})
    assert (scores(root, "Base", "valid"), scores(root, "Base", "test")) == ({1: 46.0}, {1: 50.0})


def test_runs_of_one_and_of_several_processes_have_one_size_of_an_update(root):
    edit_table(root, SAME, SAME.replace("]", ", dataset.batch_size]"))
    one = {**UPDATES, keys.LIMITS[1]: 256, keys.FREQUENCY: [1], keys.WORLD: 1}
    save(root, "a", seed=1, metrics=ppl(50.0), config=one)
    four = {**one, keys.LIMITS[1]: 64, keys.WORLD: 4}
    save(root, "b", seed=2, metrics=ppl(52.0), config=four)
    assert "51.00±1.41" in page(root)
    save(root, "b", seed=2, metrics=ppl(52.0), config={**one, "dataset.batch_size": 64})
    with pytest.raises(ValueError, match=r"differ in dataset\.batch_size: 256 and 64"):
        page(root)
