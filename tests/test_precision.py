"""``scripts/run_table.sh TABLE --precision P``: a scale in another precision is one of its own."""

import shlex
from dataclasses import replace

import pytest
import torch

from lrpe_fairseq.experiments.commands import run_table
from lrpe_fairseq.experiments.families import load_named, runs
from lrpe_fairseq.experiments.families.float16 import divides_by_almost_zero
from lrpe_fairseq.experiments.records import precision
from lrpe_fairseq.experiments.report.sheets import sheets
from tests.trial import a_record, trained

PAPER = ["table2", "--scale", "paper", "--seeds", "1", "--dry-run"]


def commands(capsys, *arguments):
    """The training commands that a call prints, as words."""
    assert run_table.main([*PAPER, *arguments]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def refused(capsys, *arguments):
    assert run_table.main(list(arguments)) != 0
    return capsys.readouterr().err


def of_table(name, scale, **selected):
    table = load_named(name).with_scales([scale])
    found = runs(table.at(scale), scale, [1])
    return [run for run in found if all(getattr(run, k) == v for k, v in selected.items())]


def test_every_training_has_the_precision_in_its_options_and_its_name(capsys):
    usual = commands(capsys, "--rows", "RoPE", "XL", "Type1")
    found = commands(capsys, "--rows", "RoPE", "XL", "Type1", "--precision", "fp16")
    for before, command in zip(usual, found, strict=True):
        more = {word for word in command if word not in before}
        own = {word.replace("/paper-", "/paper-fp16-") for word in before if "/paper-" in word}
        assert more == {"++common.fp16=true", "++common.bf16=false", *own}
        assert len(own) == 2


def test_the_precision_of_the_configuration_changes_nothing(capsys):
    assert commands(capsys, "--precision", "fp32") == commands(capsys)


def test_a_configuration_in_bfloat16_is_trained_in_float32():
    run = of_table("table2", "books-fp32", label="RoPE", attention_type="linear")[0]
    assert run.yaml().common.bf16
    assert not run.settings().common.bf16
    assert run.folder.name == "books-fp32-RoPE-linear-seed1"


def test_an_optimizer_with_groups_keeps_its_gradients_apart_in_half_precision():
    given = {"optimizer": {"_name": "lrpe_adam"}}
    assert "common.fp16_no_flatten_grads=true" in precision.overrides("small-bf16", given)
    assert "common.fp16_no_flatten_grads=true" not in precision.overrides("small-fp32", given)
    assert precision.overrides("small", given) == ()


@pytest.mark.parametrize(
    ("name", "scale"), [("table3", "paper"), ("table4", "paper"), ("synthetic", "small")]
)
def test_data_and_rates_are_those_of_the_scale(name, scale):
    usual, found = of_table(name, scale), of_table(name, f"{scale}-bf16")
    assert [run.data for run in found] == [run.data for run in usual]
    assert [run.config for run in found] == [run.config for run in usual]
    assert all("common.bf16=true" in run.overrides for run in found)
    assert not {run.result for run in found} & {run.result for run in usual}


def test_a_table_never_mixes_runs_of_two_precisions():
    table = load_named("table2").with_scales(["paper-bf16"])
    found = {}
    for scale in ("paper", "paper-bf16"):
        run = of_table("table2", scale, label="RoPE", attention_type="linear")[0]
        fields = {"experiment": "table2", "scale": scale, "position_encoding": "rope"}
        found[scale] = a_record(config=trained(run), attention_type="linear", **fields)
    own = sheets(table, found)
    assert [(sheet.scale, list(sheet.runs)) for sheet in own] == [
        ("paper", ["paper"]),
        ("paper-bf16", ["paper-bf16"]),
    ]


def test_float16_is_refused_for_denominators_that_are_often_near_zero(capsys):
    said = refused(capsys, *PAPER, "--precision", "fp16")
    assert "linear attention of Type8 divides by a denominator that is often near zero" in said
    assert commands(capsys, "--precision", "fp16", "--attention", "softmax")
    assert commands(capsys, "--precision", "bf16", "--rows", "Type8")


def test_with_a_layer_norm_instead_of_the_denominator_float16_trains_the_row():
    run = of_table("table2", "paper-fp16", label="Type8", attention_type="linear")[0]
    assert divides_by_almost_zero(run)
    words = (*run.overrides, "model.attention_normalizer=layernorm")
    assert not divides_by_almost_zero(replace(run, overrides=words))


def test_a_table_of_precisions_has_no_other_precision(capsys):
    said = refused(capsys, "precision", "--precision", "bf16", "--dry-run")
    assert "the columns of table precision differ in precision" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="float16 trains on a GPU")
def test_float16_on_a_cpu_is_refused_before_any_data_are_prepared(capsys):
    said = refused(capsys, *PAPER[:-1], "--rows", "RoPE", "--precision", "fp16")
    assert "--precision fp16 needs a GPU: use bf16 or fp32 on a CPU" in said
