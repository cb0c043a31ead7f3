"""A vision transformer learns generated images and is evaluated, in the family of Table 3."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lrpe_fairseq.experiments import families
from lrpe_fairseq.experiments.commands import evaluate
from lrpe_fairseq.experiments.families.classification import ClassificationRun
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.runs import read_run
from lrpe_fairseq.experiments.runner.devices import Devices
from tests.end_to_end.commands import run, saved
from tests.end_to_end.forked import ForkedChildren
from tests.test_data_prep import load
from tests.test_images import needs_timm, write_class_folders

pytestmark = pytest.mark.end_to_end
prepare = load("imagenet")

OVERRIDES = {
    "common.bf16": "false",
    "common.log_interval": "4",
    "task.num_classes": "2",
    "task.image_size": "32",
    "model._name": "lrpe_vit_tiny",
    "model.drop_path": "0.0",
    "optimization.max_update": "24",
    "optimization.lr": "[0.003]",
    "optimization.update_freq": "[3]",
    "lr_scheduler.warmup_updates": "4",
    "dataset.batch_size": "4",
    "dataset.num_workers": "0",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Class folders of generated images, as data-prep/imagenet prepares them."""
    folder = tmp_path_factory.mktemp("imagenet")
    write_class_folders(folder / "given")
    given = ["--dest", str(folder / "data"), "--from", str(folder / "given"), "--any-images"]
    assert prepare.main(given) == 0
    return folder / "data"


def image_run(data: Path, folder: Path, **changes: str) -> ClassificationRun:
    """A short training of the row Type2 of TMLR Table 3, column ``sum``."""
    every = families.runs(families.load_named("tmlr-table3"), "paper", [1])
    chosen = next(run for run in every if run.label == "Type2")
    short = tuple(f"{key}={value}" for key, value in {**OVERRIDES, **changes}.items())
    return replace(
        chosen,
        data=data,
        folder=folder / "work",
        result=folder / "run.json",
        overrides=(*chosen.overrides, *short),
    )


def test_prepared_images_are_learned_and_evaluated(prepared, tmp_path, capsys):
    made = image_run(prepared, tmp_path, **{"task.no_augmentation": "true"})
    made.work(ForkedChildren(), Devices(), print)
    found = read_run(made.result)
    measured = found["metrics"]["valid"]["accuracy"]
    assert (found["task"], found["dataset"]) == ("lrpe_images", "images-folders")
    assert (found["config"]["model.position_grid"], measured["examples"]) == ("sum", 24)
    assert measured["accuracy"] > 90
    assert made.finished()
    best, out = made.checkpoints / checkpoints.BEST, tmp_path / "out.json"
    given = [str(best), str(made.data), "--splits", "valid", "--out", str(out)]
    assert evaluate.classifier(given) == 0
    assert json.loads(out.read_text())["metrics"] == found["metrics"]
    assert evaluate.classifier([*given, "--image-size", "40x24"]) == 0
    both = json.loads(out.read_text())["metrics"]["valid"]
    assert both.pop("accuracy") == measured
    assert both["accuracy-at-40x24"]["examples"] == 24
    assert both["accuracy-at-40x24"]["accuracy"] > 75
    assert evaluate.classifier([*given[:3], "test"]) == 2
    assert "has no split test" in capsys.readouterr().err


@needs_timm
def test_a_training_with_every_augmentation_ends_and_is_evaluated_without(prepared, tmp_path):
    made = image_run(prepared, tmp_path, **{"optimization.max_update": "4"})
    made.work(ForkedChildren(), Devices(), print)
    assert read_run(made.result)["metrics"]["valid"]["accuracy"]["examples"] == 24


# --- weight decay, and a training that resumes -------------------------------------------------

ONE_PATCH = {  # at position 0, where no angle has a gradient
    "task.image_size": "8",
    "task.no_augmentation": "true",
    "optimizer.weight_decay": "1.0",
    "lr_scheduler.lr_period_updates": "8",  # the rates do not depend on max_update
    "dataset.disable_validation": "true",
}


def trained(data: Path, folder: Path, updates: int, bf16: bool = False) -> dict[str, Any]:
    """The last checkpoint of a training on one patch, which resumes what ``folder`` has."""
    precision = {"common.bf16": str(bf16).lower()}
    ends = {**ONE_PATCH, **precision, "optimization.max_update": str(updates)}
    made = image_run(data, folder, **ends)
    run("fairseq_cli.hydra_train", *map(shlex.quote, made.command()[1:]))
    return saved(made.checkpoints / checkpoints.LAST)


def test_weight_decay_leaves_angles_without_a_gradient_where_they_were(prepared, tmp_path):
    weights = trained(prepared, tmp_path, 3, bf16=True)["model"]
    angles = [weights[name] for name in weights if name.endswith("theta")]
    start = 10000.0 ** (-torch.arange(16) / 16)
    assert len(angles) == 2
    for angle in angles:
        torch.testing.assert_close(angle, start, rtol=1e-6, atol=0)


def test_a_resumed_training_with_two_groups_is_the_uninterrupted_one(prepared, tmp_path):
    whole = trained(prepared, tmp_path / "whole", 5)
    trained(prepared, tmp_path / "resumed", 3)
    resumed = trained(prepared, tmp_path / "resumed", 5)
    for name, weight in whole["model"].items():
        assert torch.equal(resumed["model"][name], weight), name
    state, expected = (training["last_optimizer_state"] for training in (resumed, whole))
    assert state["param_groups"] == expected["param_groups"]
    assert [group["weight_decay"] for group in state["param_groups"]] == [1.0, 0.0]
    for index, moments in expected["state"].items():
        assert torch.equal(state["state"][index]["exp_avg_sq"], moments["exp_avg_sq"])
