"""Classifiers of images: they learn, resume where they were killed, and are evaluated exactly."""

import functools
import json
import shlex
import shutil
from dataclasses import replace

import pytest
import torch
from numpy.random import RandomState

from lrpe_fairseq.experiments.commands import eval_classifier
from lrpe_fairseq.experiments.data import corpus, examples
from lrpe_fairseq.experiments.data.examples import BYTES, Examples
from lrpe_fairseq.experiments.families.classification import ClassificationRun
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.runs import read_run
from lrpe_fairseq.experiments.runner.training import Devices
from tests.end_to_end.commands import PLUGIN, last_loss, run, saved, side_by_side
from tests.end_to_end.forked import ForkedChildren
from tests.trial import trial

pytestmark = pytest.mark.end_to_end

UPDATES = 136  # four epochs


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    dest = tmp_path_factory.mktemp("data") / "digits"
    examples.prepare_images(dest, examples.DIGITS, 8)
    return dest


def classification_run(data, folder, **changes):
    """A short training of digits, with batch norm."""
    chosen = (
        f"optimization.max_update={UPDATES}",
        "lr_scheduler.warmup_updates=20",
        "optimization.lr=[0.005]",
        "model.norm=batch",
        "dataset.validate_interval=2",
    )
    given = {"config": "digits-small", "position_encoding": "rope", "overrides": chosen, **changes}
    return trial(folder, ClassificationRun, data=data, **given)


def work(made):
    made.work(ForkedChildren(), Devices(), print)
    return read_run(made.result)


@pytest.fixture(scope="module")
def finished(digits, tmp_path_factory):
    made = classification_run(digits, tmp_path_factory.mktemp("finished"))
    work(made)
    return made


def test_digits_are_learned_and_the_run_file_says_how_they_were_measured(finished):
    found = read_run(finished.result)
    assert finished.finished()
    assert (found["dataset"], found["task"]) == ("digits-8x8", "lrpe_classification")
    test = found["metrics"]["test"]["accuracy"]
    assert test["accuracy"] > 30
    assert test["examples"] == 540
    assert found["metrics"]["valid"]["accuracy"]["examples"] == 180
    best = max(point["valid_accuracy"] for point in found["curve"])
    assert found["metrics"]["valid"]["accuracy"]["accuracy"] == pytest.approx(best, abs=1e-3)
    assert found["curve"][-1]["updates"] == UPDATES
    model = checkpoints.load(finished.checkpoints / checkpoints.LAST)["model"]
    stored = sum(value.numel() for value in model.values())  # with the buffers
    assert 0.9 * stored < 1e6 * found["million_parameters"] <= stored
    said = found["protocol"]["accuracy"]
    assert "train 1,077, valid 180, test 540" in said
    assert "best validation accuracy" in said
    split, measured = next(iter(found["metrics"].items()))
    value = measured["accuracy"]["accuracy"]
    assert finished.outcome() == f"{split} accuracy accuracy {value:.2f}"


def test_a_training_whose_gradients_are_not_finite_has_a_run_file_that_says_so(digits, tmp_path):
    made = classification_run(digits, tmp_path)
    wild = "optimization.lr=[1e30]"
    made, said = replace(made, overrides=(*made.overrides, wild)), []
    made.work(ForkedChildren(), Devices(), said.append)
    found = read_run(made.result)
    assert found["metrics"] == {split: {"accuracy": {"diverged": 1}} for split in ("valid", "test")}
    assert 0 < found["diverged_at"] < UPDATES
    assert said == [
        f"diverged after update {found['diverged_at']}: gradients are not finite; the run file "
        "says so"
    ]
    assert {"evaluated_update", "tokens_per_second"}.isdisjoint(found)  # nothing was logged before
    assert made.finished()
    assert made.outcome().endswith("accuracy diverged")
    assert not made.work(ForkedChildren(), Devices(), print)


def test_a_checkpoint_is_evaluated_by_hand_on_any_data_with_its_dictionaries(
    finished, tmp_path, capsys
):
    best, out = finished.checkpoints / checkpoints.BEST, tmp_path / "out.json"
    given = [str(best), str(finished.data), "--splits", "test", "--out", str(out)]
    assert eval_classifier.main(given) == 0
    measured = json.loads(out.read_text())
    expected = read_run(finished.result)
    assert measured["metrics"]["test"] == expected["metrics"]["test"]
    assert "test, accuracy: accuracy" in capsys.readouterr().out
    assert eval_classifier.main([*given, "--max-positions", "100"]) == 0  # longer sinusoids
    assert json.loads(out.read_text())["metrics"] == measured["metrics"]
    assert eval_classifier.main([*given[:2], "--splits", "valid", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["metrics"] == expected["metrics"]
    assert eval_classifier.main([*given, "--max-positions", "32"]) == 0
    cut = json.loads(out.read_text())
    assert "540 inputs are cut at 32 tokens" in cut["protocol"]["accuracy"]
    assert cut["metrics"]["test"]["accuracy"] != measured["metrics"]["test"]["accuracy"]
    other = tmp_path / "other"
    shutil.copytree(finished.data / "bin", other / "bin")
    lines = (other / "bin" / "input0" / "dict.txt").read_text().splitlines()
    (other / "bin" / "input0" / "dict.txt").write_text("\n".join(reversed(lines)) + "\n")
    assert eval_classifier.main([str(best), str(other)]) == 2
    assert "is not the dictionary that" in capsys.readouterr().err
    assert eval_classifier.main([*given[:3], "train7"]) == 2
    assert "has no split train7" in capsys.readouterr().err


ALONE_OR_TOGETHER = (
    f"--user-dir {shlex.quote(str(PLUGIN))} --task lrpe_classification --num-classes 2 "
    "--criterion lrpe_classification --arch lrpe_classifier_tiny --attention-type linear "
    "--position-encoding rope --norm layer --encoder-embed-dim 32 --encoder-ffn-embed-dim 32 "
    "--dropout 0 --batch-size 8 --batch-size-valid 4 --required-batch-size-multiple 1 "
    "--optimizer sgd --lr 0.1 --clip-norm 1.0 --max-epoch 2 --cpu "
    "--num-workers 0 --save-interval-updates 1 --log-format simple"
)
UPDATED = [
    *(f"checkpoint_1_{number}.pt" for number in (1, 2, 3)),
    "checkpoint1.pt",
    *(f"checkpoint_2_{number}.pt" for number in (5, 6, 7)),
    "checkpoint2.pt",
]
"""Checkpoints of every update of two epochs, each of seven batches, one of two examples.

Two batches of an update thus have unequal sizes, and the last update of an epoch has one batch.
"""


@pytest.fixture
def letters(tmp_path):
    """Bytes of two ranges, which are the classes, in rows of several lengths."""
    rng, splits = RandomState(0), {}
    for split, count in {"train": 50, "valid": 10, "test": 2}.items():
        labels = rng.randint(0, 2, count).tolist()
        rows = [rng.randint(8 * own, 8 * own + 12, rng.randint(3, 20)).tolist() for own in labels]
        splits[split] = Examples(rows, labels)
    steps = corpus.Steps(tmp_path / "letters", "test", "bytes")
    examples.prepare(steps, {}, lambda: splits, symbols=BYTES, classes=2)
    return steps.dest / "bin"


@pytest.mark.exhaustive
def test_two_processes_train_a_classifier_as_one_with_twice_the_update_frequency(letters, tmp_path):
    train = [letters, ALONE_OR_TOGETHER, "--save-dir"]
    run("fairseq_cli.train", *train, tmp_path / "alone", "--update-freq 2")
    group = (
        "--distributed-world-size 2 --distributed-no-spawn --distributed-backend gloo "
        f"--ddp-backend legacy_ddp --distributed-init-method file://{tmp_path}/group"
    )
    ranked = functools.partial(run, "fairseq_cli.train", *train, tmp_path / "together", group)
    side_by_side(*(functools.partial(ranked, f"--distributed-rank {n}") for n in range(2)))
    alone, together = ([tmp_path / w / name for name in UPDATED] for w in ("alone", "together"))
    losses = [last_loss(checkpoint) for checkpoint in alone]
    assert [last_loss(checkpoint) for checkpoint in together] == pytest.approx(losses, rel=1e-5)
    one, two = (saved(folder[-1]) for folder in (alone, together))
    torch.testing.assert_close(two["model"], one["model"], rtol=1e-5, atol=1e-6)
    first, validated = saved(alone[0]), one["extra_state"]["val_loss"]
    assert two["extra_state"]["val_loss"] == pytest.approx(validated, rel=1e-5)
    assert validated < 0.9 * first["extra_state"]["val_loss"]
