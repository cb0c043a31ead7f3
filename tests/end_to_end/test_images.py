"""A vision transformer learns generated images and is evaluated, in the family of Table 3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lrpe_fairseq.experiments.commands import eval_classifier
from lrpe_fairseq.experiments.families.classification import ClassificationRun
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.warm import WarmChildren
from tests.test_images import needs_timm, write_images

pytestmark = pytest.mark.end_to_end

OVERRIDES = {
    "common.bf16": "false",
    "common.log_interval": "4",
    "task.num_classes": "2",
    "task.image_size": "32",
    "model._name": "lrpe_vit_tiny",
    "model.grid_width": "4",
    "model.drop_path": "0.0",
    "optimization.max_update": "24",
    "optimization.lr": "[0.003]",
    "optimization.update_freq": "[3]",
    "lr_scheduler.warmup_updates": "4",
    "dataset.batch_size": "4",
    "dataset.num_workers": "0",
}


def image_run(folder: Path, **changes: str) -> ClassificationRun:
    """A short training with the configuration of ImageNet."""
    write_images(folder / "data")
    return ClassificationRun(
        experiment="trial",
        label="Type2",
        config="vit-imagenet",
        data=folder / "data",
        attention_type="linear",
        position_encoding="lrpe-tmlr-type2",
        seed=1,
        scale="paper",
        folder=folder / "work",
        result=folder / "run.json",
        overrides=tuple(f"{key}={value}" for key, value in {**OVERRIDES, **changes}.items()),
        evaluations=(("valid", "accuracy"),),
    )


def test_generated_images_are_learned_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    made = image_run(tmp_path, **{"task.no_augmentation": "true"})
    made.work(WarmChildren(), Devices(), print)
    found = json.loads(made.result.read_text())
    measured = found["metrics"]["valid"]["accuracy"]
    assert (found["task"], measured["examples"]) == ("lrpe_images", 24)
    assert measured["accuracy"] > 90
    assert made.finished()
    best, out = made.checkpoints / checkpoints.BEST, tmp_path / "out.json"
    given = [str(best), str(made.data), "--splits", "valid", "--out", str(out)]
    assert eval_classifier.main(given) == 0
    assert json.loads(out.read_text())["metrics"] == found["metrics"]
    assert eval_classifier.main([*given[:3], "test"]) == 2
    assert "has no split test" in capsys.readouterr().err


@needs_timm
def test_a_training_with_every_augmentation_ends_and_is_evaluated_without(tmp_path: Path) -> None:
    made = image_run(tmp_path, **{"optimization.max_update": "4"})
    made.work(WarmChildren(), Devices(), print)
    assert json.loads(made.result.read_text())["metrics"]["valid"]["accuracy"]["examples"] == 24
