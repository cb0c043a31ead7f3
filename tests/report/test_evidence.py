"""N-grams beside columns, and the questions over several tables."""

import math

import pytest
import yaml

from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.runs import read_run, write_run
from lrpe_fairseq.experiments.records.tables import load_tables
from lrpe_fairseq.experiments.report import evidence, pages, selection
from lrpe_fairseq.experiments.report.evidence import Rung
from lrpe_fairseq.experiments.report.results import Results, results_of
from tests.report.test_columns import LAYERNORM, MEANS, TABLE, checkout, measured, save
from tests.test_results import make_run

CONFIG = {
    "model._name": "lrpe_lm",
    "optimization.max_update": 10,
    "dataset.max_tokens": 100,
    "task.tokens_per_sample": 8,
}


@pytest.fixture
def root(tmp_path):
    """The small checkout, whose models are language models that have read 1,000 tokens."""
    checkout(tmp_path)
    for place, (encoding, value) in enumerate(MEANS.items()):
        for seed in (1, 2, 3):
            found = measured(value + 0.1 * ((seed + place) % 3), seed)
            config = {**CONFIG, **(LAYERNORM if encoding == "permuteformer" else {})}
            run = make_run(position_encoding=encoding, seed=seed, metrics=found, config=config)
            write_run(tmp_path / "results" / "runs" / "demo" / f"{encoding}-{seed}.json", run)
    return tmp_path


def ngrams(root, ppl, tokens=1000, corpus=5000, **changes):
    """Write the run file of n-grams on ``tokens`` of a corpus."""
    numbers = {"ppl": ppl, "cache-ppl": ppl - 5, "order": 6, "cache-window": 8, "tokens": 50_000}
    config = {"ngrams.tokens": tokens, "ngrams.corpus": corpus, "task.tokens_per_sample": 8}
    run = make_run(experiment="ngrams", metrics={"valid": {"blocks": numbers}}, config=config)
    path = root / "results" / "runs" / "ngrams" / f"n{tokens}.json"
    write_run(path, {**run, **changes})


def text(root):
    results_of.cache_clear()
    return " ".join(pages.pages(root)["results/demo.md"].split())


def test_a_column_of_a_language_model_has_n_grams_of_as_many_tokens(root):
    ngrams(root, 45.0)
    ngrams(root, 30.0, tokens=5000)
    view = Results(root).column("demo", "ppl")
    assert view.yardstick == {"ppl": 45.0, "cache-ppl": 40.0, "order": 6, "cache-window": 8}
    assert Results(root).column("demo", "acc").yardstick == {}


def test_a_model_that_has_read_a_text_more_than_once_has_n_grams_of_the_whole_text(root):
    ngrams(root, 45.0, tokens=700, corpus=700)
    assert Results(root).column("demo", "ppl").yardstick["ppl"] == 45.0


def test_a_page_says_where_no_row_is_better_than_n_grams(root):
    names = "6-grams, modified Kneser-Ney | {} | | |"
    assert "N-grams" not in text(root)
    ngrams(root, 39.0)
    found = text(root)
    assert (
        "**N-grams.** No row is better than 6-grams of the tokens that the models have read"
        in found
    )
    assert "models have read (39.00): its order shows how fast models learn n-grams." in found
    assert f"| {names.format('39.00')}" in found
    assert "| the same with a cache of the context | 34.00 | | |" in found
    ngrams(root, 41.0)
    found = text(root)
    assert "**N-grams.** `valid`: 1 of 4 rows are better than 6-grams of the tokens" in found
    assert f"| {names.format('41.00')}" in found
    ngrams(root, 70.0)
    assert "**N-grams.**" not in text(root)


def test_models_that_have_learned_and_fail_elsewhere_have_no_order_of_learning_n_grams(root):
    path = root / "configs" / "tables" / "demo.yaml"
    column = "  - {key: far, title: far, attention: linear, split: valid, protocol: blocks-64,"
    changed = TABLE.replace("headline: [ppl, acc]", f"{column} metric: ppl}}\nheadline: [ppl, far]")
    path.write_text(changed)
    for run in (root / "results" / "runs" / "demo").glob("*-?.json"):
        found = read_run(run)
        near = found["metrics"]["valid"]["blocks"]
        far = {"ppl": 2 * near["ppl"], "loss": near["loss"] + 1, "tokens": near["tokens"]}
        protocol = {"blocks": "Blocks.", "blocks-64": "Longer blocks."}
        write_run(run, {**found, "metrics": {"valid": {"blocks": near, "blocks-64": far}},
                        "protocol": protocol})  # fmt: skip
    ngrams(root, 41.0)
    path = root / "results" / "runs" / "ngrams" / "n1000.json"
    known = read_run(path)
    both = dict.fromkeys(("blocks", "blocks-64"), known["metrics"]["valid"]["blocks"])
    described = dict.fromkeys(both, "One.")
    write_run(path, {**known, "metrics": {"valid": both}, "protocol": described})
    found = text(root)
    assert (
        "No row in `far` is better than 6-grams of the tokens that the models have read (41.00)."
        in found
    )
    assert "learn n-grams" not in found


def test_n_grams_of_another_test_set_are_refused(root):
    for run in (root / "results" / "runs" / "demo").glob("*.json"):
        if not run.name.startswith("base"):
            run.unlink()
    found = measured(50.0, 1)
    save(root, "rope", 1, found)
    run = make_run(position_encoding="rope", seed=1, metrics=found, config=CONFIG)
    write_run(root / "results/runs/demo/rope-1.json", {**run, "data": {"valid": "a" * 64}})
    ngrams(root, 45.0, data={"valid": "b" * 64})
    with pytest.raises(ValueError, match="was evaluated on another split valid than its n-grams"):
        Results(root).column("demo", "ppl")


def test_other_models_have_no_n_grams(root):
    ngrams(root, 45.0)
    for encoding in MEANS:
        for seed in (1, 2, 3):
            found = measured(50.0, seed)
            config = {**CONFIG, "model._name": "lrpe_roberta"}
            run = make_run(position_encoding=encoding, seed=seed, metrics=found, config=config)
            write_run(root / "results" / "runs" / "demo" / f"{encoding}-{seed}.json", run)
    assert Results(root).column("demo", "ppl").yardstick == {}


# --- ladders -------------------------------------------------------------------------------------


def rungs(*gaps, half=0.01):
    return [Rung(10**n, "", gap, half, "") for n, gap in enumerate(gaps)]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (rungs(-0.2, -0.2, -0.2), "no"),
        (rungs(-0.1, -0.15, -0.2), "no"),
        (rungs(-0.3, -0.2, -0.1), "yes"),  # on the way to zero
        (rungs(-0.2, -0.2, -0.2, half=0.15), "yes"),  # the prolonged interval holds zero
        (rungs(-0.005, -0.005, -0.005), "yes"),  # the last difference is unresolved
        (rungs(-0.2, -0.2, -0.2, half=math.inf), "unknown, one seed at an end"),
    ],
)
def test_an_order_may_turn_unless_its_sign_is_sure_for_ten_times_the_tokens(own, said):
    assert evidence.may_turn(own) == said


def test_a_row_is_compared_with_rope_of_its_normalizer_and_floor():
    assert evidence._rope_of("lrpe-type2, content") == "rope, content"
    assert evidence._rope_of("gated:lrpe-type2, layernorm, fox-bias 3.0") == "rope, layernorm"
    assert evidence._rope_of("lrpe-type2, bounded") == "rope, bounded"
    assert evidence._rope_of("lrpe-type2, angle-floor turn") == "rope, angle-floor turn"
    assert evidence._rope_of("none, sinusoidal") == "rope"


def test_the_places_of_lrpe_against_rope_exist():
    tables = {table.name: table for table in load_tables(ROOT / "configs" / "tables")}
    for place in evidence.PLACES:
        table = tables[place.table].at(place.scale)
        for pair in place.pairs:
            for key in filter(None, place.columns):
                column = table.column(f"{pair.attention}-{key}")
                assert table.row(pair.lrpe).has(column)
                assert table.row(pair.rope).has(column)


def test_the_columns_of_the_ladders_exist():
    tables = {table.name: table for table in load_tables(ROOT / "configs" / "tables")}
    for budgets in evidence.LADDERS.values():
        for budget in budgets:
            table = tables[budget.table].at(budget.scale)
            for attention in ("linear", "softmax"):
                assert table.column(budget.column.format(attention=attention))


# --- selections ----------------------------------------------------------------------------------

SELECTION = """
title: Rates
text: A table.
experiments: [rates]
scales: {small: configs/small.yaml}
seeds: [0]
compare: columns
baseline: RoPE
better: lower
options: {model.attention_normalizer: rotated, optimization.lr: 0.004}
columns:
  - {for: {rate: [0.002, 0.004]}, key: "linear-{rate}", title: "{rate}", attention: linear,
     split: valid, protocol: blocks, metric: ppl, overrides: {optimization.lr: "{rate}"}}
rows:
  - {label: RoPE, encoding: rope, attention: [linear]}
"""


def rate(root, lr, ppl):
    """Write the run of a rate."""
    run = make_run(experiment="rates", position_encoding="rope", seed=0, metrics=measured(ppl, 0),
                   config={"optimization.lr": [lr]})  # fmt: skip
    write_run(root / "results" / "runs" / "rates" / f"{lr}.json", run)


def selected(root, lr=0.004):
    """Results of a table whose row RoPE has a rate that the table `rates` selects."""
    path = root / "configs" / "tables" / "demo.yaml"
    table = yaml.safe_load(TABLE)
    table["options"]["optimization.lr"] = 0.004
    table |= {"selected_by": "rates", "selects": ["optimization.lr"]}
    table["rows"] = [{**row, "overrides": {"optimization.lr": lr}} for row in table["rows"][1:2]]
    table |= {"baseline": "RoPE", "columns": table["columns"][1:], "headline": ["acc"]}
    path.write_text(yaml.safe_dump(table))
    (root / "configs" / "tables" / "rates.yaml").write_text(SELECTION)
    for path in (root / "results" / "runs" / "demo").glob("*.json"):
        path.unlink()
    config = {"optimization.lr": [lr]}
    run = make_run(position_encoding="rope", seed=1, metrics=measured(50.0, 1), config=config)
    write_run(root / "results" / "runs" / "demo" / "rope.json", run)
    return Results(root)


def test_a_row_has_the_rate_that_its_selection_has_found(root):
    rate(root, 0.002, 60.0)
    rate(root, 0.004, 55.0)
    results = selected(root)
    selection.require(results, results.tables["demo"])
    rate(root, 0.002, 54.5)  # better by less than 1 %, which one seed cannot tell
    results = Results(root)
    selection.require(results, results.tables["demo"])
    rate(root, 0.002, 50.0)
    said = (
        r"row RoPE of table demo \(linear attention\) has optimization.lr 0.004, but rates finds 0."
    )
    results = Results(root)
    with pytest.raises(ValueError, match=said):
        selection.require(results, results.tables["demo"])
    results = selected(root, 0.002)
    selection.require(results, results.tables["demo"])


def test_a_page_names_the_rows_with_another_rate(root):
    rate(root, 0.004, 55.0)
    results = selected(root, 0.002)
    said = "Rows with another rate than 0.004: `rope` 0.002."
    assert selection.other_rates(results, results.tables["demo"]) == said
    results = selected(root)
    assert selection.other_rates(results, results.tables["demo"]) == ""
    assert selection.other_rates(results, results.tables["rates"]) == ""


def test_a_row_that_was_trained_before_its_selection_is_refused(root):
    rate(root, 0.002, 60.0)
    results = selected(root)
    with pytest.raises(ValueError, match="was trained before its selection: run scripts/run_table"):
        selection.require(results, results.tables["demo"])


def test_a_rate_that_diverged_is_not_chosen(root):
    rate(root, 0.004, 55.0)
    lost = {"valid": {"blocks": {"diverged": 1}}}
    run = make_run(experiment="rates", position_encoding="rope", seed=0, metrics=lost,
                   config={"optimization.lr": [0.002]})  # fmt: skip
    write_run(root / "results" / "runs" / "rates" / "0.002.json", run)
    results = selected(root)
    selection.require(results, results.tables["demo"])
    run["config"] = {"optimization.lr": [0.004]}
    write_run(root / "results" / "runs" / "rates" / "0.004.json", run)
    results = selected(root)
    with pytest.raises(ValueError, match="every value of rates diverged; try others"):
        selection.require(results, results.tables["demo"])


@pytest.mark.parametrize("name", ["contrast", "medium"])
def test_every_row_of_this_repository_with_a_selection_has_candidates(name):
    results = results_of(ROOT)
    table = results.tables[name]
    rates = {0.002, 0.004, 0.008}
    for row in table.rows:
        for attention in row.attention:
            tried = selection.candidates(results, table, row, attention)
            assert {options[0] for options in tried} == rates
            gated = name == "contrast" and ("fox" in row.encoding or "gated" in row.encoding)
            assert len(tried) == (6 if gated else 3)
            assert selection.chosen(table, {**table.options, **row.overrides}) in tried


def test_the_advice_is_shown_at_the_larger_scales_that_trained_both_methods():
    results = results_of(ROOT)
    head, _, *lines = evidence.at_larger_scales(results).splitlines()
    assert "6 x 512, 49 M tokens" in head
    view = results.column("books", "softmax-test", "books")
    (line,) = [line for line in lines if line.startswith("| softmax | `lrpe-type2` | `rope` |")]
    assert line.endswith(f" {view.versus('Type2', 'RoPE')} |")


def test_advice_that_no_larger_scale_has_trained_keeps_its_line():
    results = results_of(ROOT)
    _, _, *lines = evidence.at_larger_scales(results).splitlines()
    pairs = [tuple(line.split("|")[1:4]) for line in lines]
    expected = [(kind, f"`{one}`", f"`{other}`") for kind, one, other in evidence.RECOMMENDED]
    assert [tuple(word.strip() for word in pair) for pair in pairs] == expected


def test_a_method_is_untested_until_it_is_trained_where_a_model_is_better_than_n_grams(
    monkeypatch, root
):
    path = root / "configs" / "tables" / "demo.yaml"
    path.write_text(path.read_text().replace("key: ppl", "key: linear-ppl"))
    path.write_text(path.read_text().replace("headline: [ppl, acc]", "headline: [linear-ppl]"))
    monkeypatch.setattr(evidence, "LARGER", (("demo", "demo", "small", "{attention}-ppl"),))
    advice = (("linear", "rope"), ("linear", "spe"), ("softmax", "rope"))
    ngrams(root, 1000.0)
    assert evidence.untested(Results(root), advice) == "`spe` (linear) and `rope` (softmax)"
    ngrams(root, 10.0)  # better than every model
    assert evidence.untested(Results(root), advice).startswith("`rope` (linear), `spe` (linear)")


def test_the_table_of_what_was_trained_has_the_seeds_of_the_columns():
    results = results_of(ROOT)
    lines = [line.split(" | ") for line in evidence.coverage(results).splitlines()[2:]]
    *methods, learned = lines
    assert [cells[1].strip("`") for cells in methods] == [name for _, name in evidence.COVERED]
    # A method that no place knows by this name would have dashes only.
    assert all(any(cell.strip(" |").isdigit() for cell in cells[2:]) for cells in methods)
    near = results.column("extrapolation", "softmax-paired-128")
    [rope] = [cells for cells in methods if cells[0] == "| softmax" and cells[1] == "`rope`"]
    assert int(rope[2]) == len(near.cells["RoPE"])
    assert learned[2:3] == ["no"]
    assert {cell.strip(" |") for cell in learned[3:]} == {"yes"}
