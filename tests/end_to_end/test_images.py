"""A vision transformer learns generated images and is evaluated, in the family of Table 3."""

import json
from dataclasses import replace

import pytest

from lrpe_fairseq.experiments import families
from lrpe_fairseq.experiments.commands import eval_classifier
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.runs import read_run
from lrpe_fairseq.experiments.runner.devices import Devices
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


def image_run(data, folder, **changes):
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
    assert eval_classifier.main(given) == 0
    assert json.loads(out.read_text())["metrics"] == found["metrics"]
    assert eval_classifier.main([*given, "--image-size", "40x24"]) == 0
    both = json.loads(out.read_text())["metrics"]["valid"]
    assert both.pop("accuracy") == measured
    assert both["accuracy-at-40x24"]["examples"] == 24
    assert both["accuracy-at-40x24"]["accuracy"] > 75
    assert eval_classifier.main([*given[:3], "test"]) == 2
    assert "has no split test" in capsys.readouterr().err


@needs_timm
def test_a_training_with_every_augmentation_ends_and_is_evaluated_without(prepared, tmp_path):
    made = image_run(prepared, tmp_path, **{"optimization.max_update": "4"})
    made.work(ForkedChildren(), Devices(), print)
    assert read_run(made.result)["metrics"]["valid"]["accuracy"]["examples"] == 24
