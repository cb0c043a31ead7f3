"""Trainings of different lengths with a common trunk: which checkpoint a run goes on from."""

import json
from dataclasses import replace

import pytest

from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.files import write_json
from lrpe_fairseq.experiments.records.provenance import USAGE
from lrpe_fairseq.experiments.runner import branches
from tests.trial import checkpoint, saved_config, trial

LONG, SHORT, PART = 9760, 4880, 3904
"""Updates of two scales of the table medium, and of what they share."""


def medium(folder, updates, **changes):
    """A run of the configuration medium, beside others of its experiment."""
    own = {"config": "medium", "overrides": (f"optimization.max_update={updates}",), **changes}
    return replace(trial(folder, **own), folder=folder / f"run-{updates}")


def left_by(run, *updates):
    """Write what a training of ``run`` leaves at these updates: checkpoints, log, and usage."""
    for seen in updates:
        path = run.checkpoints / f"checkpoint_1_{seen}.pt"
        checkpoint(path, seen, cfg=saved_config(run))
    write_json(run.checkpoints / checkpoints.DICTIONARIES, {})
    write_json(run.folder / USAGE, {"commits": ["0" * 40], "data": {}})
    lines = [f"train_inner | {json.dumps({'num_updates': str(n)})}\n" for n in updates]
    run.log.write_text("starts\n" + "".join(lines))
    return run


def test_a_longer_training_goes_on_from_the_last_checkpoint_before_the_shorter_decays(tmp_path):
    short, long = (medium(tmp_path, updates) for updates in (SHORT, LONG))
    left_by(short, 976, PART, SHORT)
    said = []
    assert long.from_trunk(said.append) == PART
    assert "until update 3904 it is this training" in said[0]
    for name in (checkpoints.LAST, checkpoints.BEST):
        assert checkpoints.updates(checkpoints.load(long.checkpoints / name)) == PART
    assert '"4880"' in short.log.read_text()
    assert long.log.read_text().splitlines()[-1] == 'train_inner | {"num_updates": "3904"}'
    assert long.ready_to_resume(said.append) == PART
    assert len(said) == 1  # nothing started over


def test_a_shorter_training_does_not_go_on_from_after_its_decay(tmp_path):
    short, long = (medium(tmp_path, updates) for updates in (SHORT, LONG))
    left_by(long, PART, 2 * PART)
    assert short.from_trunk(lambda text: None) == PART


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2},
        {"position_encoding": "rope"},
        {"config": "contrast"},
        {"overrides": (f"optimization.max_update={SHORT}", "optimization.lr=[0.002]")},
        {"overrides": (f"optimization.max_update={SHORT}", "lr_scheduler.decay_share=0.5")},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_training_with_other_settings_is_no_trunk(tmp_path, changes):
    other = left_by(replace(medium(tmp_path, SHORT), **changes), 976)
    assert other.folder != medium(tmp_path, LONG).folder
    assert medium(tmp_path, LONG).from_trunk(lambda text: None) == 0


def test_a_training_on_other_data_is_no_trunk(tmp_path, monkeypatch):
    left_by(medium(tmp_path, SHORT), 976)
    monkeypatch.setattr(type(medium(tmp_path, LONG)), "other_data", lambda run, known: ["train"])
    assert medium(tmp_path, LONG).from_trunk(lambda text: None) == 0


@pytest.mark.parametrize("fault", ["truncated", "without usage", "without a log"])
def test_a_damaged_trunk_is_passed_over_for_a_sound_one(tmp_path, fault):
    left_by(medium(tmp_path, SHORT), PART)
    other = left_by(medium(tmp_path, LONG + 1), 4880)
    if fault == "truncated":
        path = other.checkpoints / "checkpoint_1_4880.pt"
        path.write_bytes(path.read_bytes()[:500])
    else:
        {"without usage": other.folder / USAGE, "without a log": other.log}[fault].unlink()
    said = []
    assert medium(tmp_path, LONG).from_trunk(said.append) == PART
    assert "not going on from" in said[0]
    assert "until update 3904 it is this training" in said[1]


def test_a_checkpoint_that_is_worse_than_an_earlier_one_is_no_trunk(tmp_path):
    short = left_by(medium(tmp_path, SHORT), 976)
    for seen, loss in ((976, 5.0), (PART, 6.0)):
        extra = {"extra_state": {"val_loss": loss, "best": 5.0}}
        checkpoint(
            short.checkpoints / f"checkpoint_1_{seen}.pt", seen, cfg=saved_config(short), **extra
        )
    assert medium(tmp_path, LONG).from_trunk(lambda text: None) == 976


def test_a_finished_run_keeps_only_what_others_may_go_on_from(tmp_path):
    run = left_by(medium(tmp_path, LONG), 976, PART, 4880, 2 * PART)
    run._remove_periodic()
    assert list(checkpoints.periodic(run.checkpoints)) == [PART, 2 * PART]
    plain = left_by(replace(medium(tmp_path, LONG), config="contrast"), 976, PART)
    plain._remove_periodic()
    assert not checkpoints.periodic(plain.checkpoints)


def test_an_own_checkpoint_after_the_decay_of_another_length_starts_over(tmp_path):
    run = medium(tmp_path, LONG)
    for seen, resumed in ((PART, PART), (PART + 976, 0)):
        before = medium(tmp_path, SHORT)
        left_by(replace(before, folder=run.folder), seen)
        assert run.ready_to_resume(lambda text: None) == resumed
        checkpoints.remove(run.checkpoints)


def test_trainings_with_another_schedule_share_nothing():
    assert branches.common_updates({"lr_scheduler._name": "cosine"}, 100) == 0
