"""Runs as a data frame, and the columns that templates read."""

import math

import pytest

from lrpe_fairseq.experiments.records import methods
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.methods import method, public_name
from lrpe_fairseq.experiments.records.runs import write_run
from lrpe_fairseq.experiments.records.tables import load_tables
from lrpe_fairseq.experiments.report import columns, kinds, orders, pages, priors
from lrpe_fairseq.experiments.report.results import Results
from tests.test_results import make_run

TABLE = """
title: Demo
text: A table.
experiments: [demo]
scales: {small: configs/small.yaml}
baseline: Base
better: lower
options: {model.attention_normalizer: rotated}
columns:
  - {key: ppl, title: valid, attention: linear, split: valid, protocol: blocks, metric: ppl,
     paper: {file: demo.csv, split: valid}}
  - {key: acc, title: accuracy, attention: linear, split: valid, protocol: blocks,
     metric: accuracy, better: higher}
  - {key: loss, title: loss, attention: linear, split: valid, protocol: blocks, metric: loss}
headline: [ppl, acc]
rows:
  - {label: Base, encoding: none, attention: [linear], method: Base}
  - {label: RoPE, encoding: rope, attention: [linear], method: RoPE}
  - {label: Type2, encoding: lrpe-tmlr-type2, attention: [linear], method: Type2}
  - {label: PER-LN, encoding: permuteformer, attention: [linear], method: PER,
     overrides: {model.attention_normalizer: layernorm}}
  - {label: SPE, encoding: spe, attention: [linear]}
"""
PAPER = "method,split,value,std,printed,note\n" + "".join(
    f"{name},valid,{value},,{value},\n"
    for name, value in {"Base": 34.0, "RoPE": 33.0, "Type2": 32.0, "PER": 31.0}.items()
)
MEANS = {"none": 60.0, "rope": 50.0, "lrpe-type2": 50.1, "permuteformer": 40.0}
LAYERNORM = {"model.attention_normalizer": "layernorm"}


def measured(value, seed):
    perplexity = value + seed / 10
    loss = math.log2(perplexity)
    numbers = {"ppl": perplexity, "loss": loss, "tokens": 50_000}
    numbers |= {"accuracy": 100 - value, "examples": 400}
    return {"valid": {"blocks": numbers}}


def save(root, encoding, seed, metrics, **changes):
    config = LAYERNORM if encoding == "permuteformer" else {}
    run = make_run(position_encoding=encoding, seed=seed, metrics=metrics, config=config, **changes)
    write_run(root / "results" / "runs" / "demo" / f"{encoding}-{seed}.json", run)


def checkout(root):
    """A root with one table and three seeds of four of its rows."""
    for path, text in {"configs/tables/demo.yaml": TABLE, "results/paper/demo.csv": PAPER}.items():
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text(text)
    for place, (encoding, value) in enumerate(MEANS.items()):
        for seed in (1, 2, 3):  # an effect of the seed, and another one of the pair
            save(root, encoding, seed, measured(value + 0.1 * ((seed + place) % 3), seed))
    return root


@pytest.fixture
def root(tmp_path):
    return checkout(tmp_path)


def column(root, key="ppl"):
    return Results(root).column("demo", key)


def test_a_method_has_the_name_of_the_command_line_and_the_options_of_its_row():
    assert public_name("gated:selective:lrpe:identity:rotation") == "gated:selective:rope"
    assert public_name("lrpe-tmlr-type3") == "lrpe-type4"
    assert method("none", {}, {}) == "none, sinusoidal"
    learned = {"model.*.learned_pos": True}
    assert method("none", learned, {}) == "none, learned positions"
    assert method("rope", learned, {}) == "rope, learned-pos"
    usual = {"model.attention_normalizer": "rotated", "model.fox_bias": 0.0}
    options = {"model.attention_normalizer": "content", "model.fox_bias": 3.0}
    assert method("fox", options, usual) == "fox, content, fox-bias 3.0"
    crossed = {"model.cross.position_encoding": "ape"}
    assert method("ape", crossed, {}) == "ape, with cross-attention"


def test_a_stack_with_a_pattern_fills_the_cell_of_its_row(root):
    table = TABLE.replace("attention: linear, split", "attention: any, split").replace(
        "  - {label: SPE, encoding: spe, attention: [linear]}",
        '  - {label: stack, encoding: "lrpe-type2,none", attention: ["linear,softmax"]}',
    )
    (root / "configs/tables/demo.yaml").write_text(table)
    twice = {"attention_type": "linear,softmax,linear,softmax"}
    encodings = "lrpe-tmlr-type2, none,lrpe-type2,none"
    save(root, encodings, 1, measured(30.0, 1), **twice)
    save(root, "none,lrpe-type2", 1, measured(20.0, 1), **twice)
    found = column(root)
    assert found.names["stack"] == "lrpe-type2,none (linear,softmax)"
    assert found.cells["stack"] == {1: pytest.approx(30.1)}
    assert found.names["RoPE"] == "rope (linear)"
    lines = Results(root).values
    assert set(lines[lines.row == "stack"].attention) == {"linear,softmax"}


def test_no_two_rows_of_a_table_of_this_repository_have_one_name():
    for table in load_tables(ROOT / "configs" / "tables"):
        names = methods.names(table)
        for kind in ("linear", "softmax"):
            own = [names[row.label] for row in table.rows if kind in row.attention]
            assert len(own) == len(set(own)), table.name


def test_a_row_that_is_unstable_against_the_best_is_unbeaten_but_has_no_order(root):
    for seed, factor in ((1, 0.5), (2, 40.0), (3, 900.0)):
        metrics = measured(MEANS["rope"], seed)
        perplexity = factor * MEANS["rope"]
        metrics["valid"]["blocks"] |= {"ppl": perplexity, "loss": math.log2(perplexity)}
        save(root, "rope", seed, metrics)
    view = column(root)
    assert "RoPE" in view.unbeaten
    assert view.unordered == ["RoPE"]
    # The interval reaches from nothing to more than ten times: both means say more.
    assert view.versus("RoPE", "PER-LN") == (
        f"{view.short('RoPE')} against {view.short('PER-LN')}, unstable"
    )
    told = pages.verdict(view.table, [view])
    assert "; seeds differ too much or are too few to order `permuteformer, layernorm` and" in told


def test_a_number_of_parameters_has_neither_deviation_nor_verdict_nor_prior(root):
    size = "  - {key: size, title: size, attention: linear, metric: million_parameters}\n"
    (root / "configs/tables/demo.yaml").write_text(TABLE.replace("headline:", size + "headline:"))
    for encoding, value in MEANS.items():
        for seed in (1, 2, 3):
            save(root, encoding, seed, measured(value, seed), million_parameters=1.5)
    view = column(root, "size")
    assert (view.text("Base"), view.sign("RoPE", "Base")) == ("1.50", "")
    assert view.measurement.prior.strength == 0


def test_a_column_answers_what_a_template_asks(root):
    view = column(root)
    assert view.rows == ["Base", "RoPE", "Type2", "PER-LN"]
    assert view.ranked() == ["PER-LN", "RoPE", "Type2", "Base"]
    assert view.unbeaten == ["PER-LN"]
    found = view.against("RoPE")
    assert (found[orders.BETTER], found[orders.WORSE]) == (["PER-LN"], ["Base"])
    assert found[orders.EQUAL] == ["Type2"]
    assert view.mark("RoPE", "Base") == orders.BETTER
    assert (view.sign("RoPE", "Base"), view.sign("RoPE", "RoPE")) == ("✓", "")
    assert view.sign("RoPE", "Type2") == "="
    assert view.difference("RoPE", "Base").startswith("-17 % [-1")
    assert view.versus("RoPE", "Base").startswith("better (provisional), -17 %")
    assert view.versus("RoPE", "SPE") == "not measured"
    assert view.text("Base") == "60.30±0.10"
    assert view.text("Base", usual=2) == "60.30±0.10 (3)"
    assert (view.seeds_of("Base"), view.unordered) == ("3 seeds", [])
    assert view.named("Type2") == "`lrpe-type2` 50.40"
    assert view.named("PER-LN") == "`permuteformer, layernorm` 40.30"
    assert view.paper["Base"] == 34.0
    assert not view.is_open
    with pytest.raises(KeyError, match="demo, ppl: SPE has no value"):
        view.mean("SPE")


def test_the_number_of_seeds_is_shown_where_it_differs(root):
    (root / "results" / "runs" / "demo" / "rope-3.json").unlink()
    assert column(root).text("RoPE").endswith("(2)")


def test_a_verdict_of_a_measurement_without_a_frozen_prior_is_provisional(root):
    assert column(root).provisional
    assert column(root).versus("RoPE", "Base").startswith("better (provisional), -17 %")
    priors.freeze(root, "0.1")
    assert not column(root).provisional
    assert column(root).versus("RoPE", "Base").startswith("better, -17 %")


def test_a_row_with_fewer_seeds_than_the_others_says_so_in_a_sentence(root):
    (root / "results" / "runs" / "demo" / "rope-3.json").unlink()
    view = column(root)
    assert view.counted("RoPE").endswith(" (2 seeds)")
    assert view.counted("Base") == view.named("Base")


SCALES = [("ppl", "perplexity", 50_000), ("acc", "fraction", 400), ("loss", "loss", 0)]


@pytest.mark.parametrize(("key", "kind", "examples"), SCALES)
def test_a_metric_has_its_scale_of_comparison_and_its_number_of_tests(root, key, kind, examples):
    view = column(root, key)
    assert (view.kind, view.examples) == (kind, examples)
    assert view.ranked()[0] == "PER-LN"  # higher accuracy, lower perplexity


def test_a_row_with_a_seed_that_diverged_is_ordered_with_nothing(root):
    save(root, "permuteformer", 4, {"valid": {"blocks": {"diverged": 1}}})
    view = column(root)
    assert view.broken == {"PER-LN"}
    assert "PER-LN" not in view.unbeaten
    assert view.mark("PER-LN", "Base") == orders.UNSTABLE
    assert view.sign("PER-LN", "Base") == "~"
    assert "PER-LN" not in view.ranked()


def test_a_column_without_runs_is_named(root):
    with pytest.raises(KeyError, match="table demo has no runs at scale paper"):
        Results(root).column("demo", "ppl", "paper")


def test_an_unresolved_sign_has_the_difference_that_would_have_shown(root):
    for seed, value in enumerate((50.0, 53.0, 48.0), start=1):
        save(root, "rope", seed, measured(value, seed))
    view = column(root)
    assert view.mark("RoPE", "Type2") == orders.UNRESOLVED
    visible = columns.size(view.verdict("RoPE", "Type2").visible, view.kind)
    assert view.sign("RoPE", "Type2") == f"? {visible}"
    for run in (root / "results" / "runs" / "demo").glob("*-[23].json"):
        run.unlink()
    alone = column(root)
    assert alone.sign("RoPE", "Type2") == "?"
    assert alone.versus("RoPE", "Type2") == "50.10 against 50.20, one seed"
    assert alone.is_open


@pytest.mark.parametrize(
    ("found", "kind", "text"),
    [
        (("better", -3.51, -7.6, -0.24, "%"), "perplexity", "-3.5 % [-7.6, -0.2]"),
        (("worse", 12.3, 9.96, 15000.0, "%"), "perplexity", "+12 % [+10, over +1000]"),
        (("equal", -0.01, -0.04, 0.03, "BLEU"), "bleu", "0.0 BLEU [0.0, 0.0]"),
        (("better", -0.1, -0.12, -0.08, ""), "loss", "-0.100 [-0.120, -0.080]"),
        (("unresolved", math.nan, -math.inf, math.inf, "%"), "perplexity", "–"),
    ],
)
def test_a_difference_is_text_with_its_interval(found, kind, text):
    assert columns.difference(orders.Verdict(*found), kind) == text


def test_counts_of_tokens_widen_the_interval_of_a_perplexity(root):
    view = column(root)
    assert view.measurement.sampling == orders.sampling("perplexity", 50_000)


def test_the_kind_of_a_column_is_that_of_its_metrics():
    assert kinds.kind_of({"bleu"}) == "bleu"
    assert kinds.kind_of({"matthews", "accuracy"}) == "percent"
    assert kinds.kind_of({"loss-2048"}) == kinds.kind_of({"gain"}) == "loss"
    assert kinds.kind_of({"state"}) == "plain"
