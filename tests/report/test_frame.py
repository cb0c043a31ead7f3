"""Runs as a data frame, and the columns that templates read."""

import math

import pytest

from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.layout import load_tables
from lrpe_fairseq.experiments.records.runs import write_run
from lrpe_fairseq.experiments.report import frame, orders
from lrpe_fairseq.experiments.report.frame import Results, method, public_name
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
    numbers = {"ppl": perplexity, "loss": loss, "accuracy": 100 - value, "examples": 400}
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
    lines = Results(root).frame
    assert set(lines[lines.row == "stack"].attention) == {"linear,softmax"}


def test_no_two_rows_of_a_table_of_this_repository_have_one_name():
    for table in load_tables(ROOT / "configs" / "tables"):
        names = frame.names(table)
        for kind in ("linear", "softmax"):
            own = [names[row.label] for row in table.rows if kind in row.attention]
            assert len(own) == len(set(own)), table.name


def test_a_column_answers_what_a_template_asks(root):
    view = column(root)
    assert view.rows == ["Base", "RoPE", "Type2", "PER-LN"]
    assert view.first() == "PER-LN"
    assert view.tied_with("RoPE") == ["Type2"]
    assert view.better_than("RoPE") == ["PER-LN"]
    assert view.mark("RoPE", "Base") == orders.BETTER
    assert (view.sign("RoPE", "Base"), view.sign("RoPE", "RoPE")) == ("✓", "")
    assert view.sign("RoPE", "Type2") == "≈"
    assert view.text("Base") == "60.30±0.10"
    assert view.named("Type2") == "`lrpe-type2` 50.40"
    assert view.named("PER-LN") == "`permuteformer, layernorm` 40.30"
    assert view.paper["Base"] == 34.0
    assert not view.is_open
    with pytest.raises(KeyError, match="demo, ppl: SPE has no value"):
        view.mean("SPE")


def test_the_number_of_seeds_is_shown_where_it_differs(root):
    (root / "results" / "runs" / "demo" / "rope-3.json").unlink()
    assert column(root).text("RoPE").endswith("(2)")


SCALES = [("ppl", "perplexity", 0), ("acc", "fraction", 400), ("loss", "", 0)]


@pytest.mark.parametrize(("key", "kind", "examples"), SCALES)
def test_a_metric_has_its_scale_of_comparison_and_its_number_of_tests(root, key, kind, examples):
    view = column(root, key)
    assert (view.kind, view.examples) == (kind, examples)
    assert view.first() == "PER-LN"  # higher accuracy, lower perplexity


def test_a_row_with_a_seed_that_diverged_is_ordered_with_nothing(root):
    save(root, "permuteformer", 4, {"valid": {"blocks": {"diverged": 1}}})
    view = column(root)
    assert view.broken == {"PER-LN"}
    assert view.first() in ("RoPE", "Type2")
    assert view.mark("PER-LN", "Base") == orders.UNSTABLE
    assert "PER-LN" not in view.ranked()


def test_a_column_without_runs_is_named(root):
    with pytest.raises(KeyError, match="table demo has no runs at scale paper"):
        Results(root).column("demo", "ppl", "paper")
