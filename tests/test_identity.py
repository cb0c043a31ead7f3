"""What a run was trained on, and by which commit; data that differ never pass for the same."""

import json
import time
from dataclasses import replace

import fairseq.trainer
import pytest
from fairseq.trainer import Trainer

from lrpe_fairseq import compat
from lrpe_fairseq.experiments import families
from lrpe_fairseq.experiments.data import folders
from lrpe_fairseq.experiments.data.corpus import SPLITS, digest
from lrpe_fairseq.experiments.families import lm
from lrpe_fairseq.experiments.records import checkpoints, files, machine, provenance, runs
from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.runs import write_run
from lrpe_fairseq.experiments.report.sheets import require_same
from lrpe_fairseq.experiments.runner.processes import Children, RunFailed
from tests.test_experiments import one_run  # noqa: F401  (a fixture)
from tests.trial import a_record, checkpoint, saved_config, trained

FILES = ["dict.txt", *(f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx"))]


@pytest.fixture
def prepared(one_run):  # noqa: F811
    """A run whose data are prepared, with the manifest of data-prep."""
    folder = one_run.data / "bin"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(f"content of {name}")
    writes = {f"bin/{name}": digest(folder / name) for name in FILES}
    manifest = {"splits": {}, "steps": {"binarize": {"reads": {}, "writes": writes}}}
    (one_run.data / "manifest.json").write_text(json.dumps(manifest))
    one_run.folder.mkdir()
    return one_run


def replace_file(run, name):
    (run.data / "bin" / name).write_text("another corpus")


def test_a_run_file_has_one_checksum_for_each_split_and_the_dictionary(prepared):
    found = prepared.data_checksums()
    assert set(found) == {"train", "valid", "test", "dictionary"}
    assert len(set(found.values())) == 4
    only_valid = replace(prepared, evaluations=(("valid", lm.BLOCKS),))
    assert only_valid.data_checksums() == {k: v for k, v in found.items() if k != "test"}
    replace_file(prepared, "valid.idx")
    assert folders.changed(found, prepared.data_checksums()) == ["valid"]


@pytest.mark.parametrize("name", FILES)
def test_damaged_or_replaced_data_are_refused_before_training(prepared, name):
    folders.verify(prepared.data)
    replace_file(prepared, name)
    with pytest.raises(UserError, match=f"bin/{name} is not the file that data-prep wrote"):
        prepared.begin(pytest.fail)
    assert not provenance.usage(prepared.folder)


def test_a_run_on_other_data_is_not_finished(prepared):
    write_run(prepared.result, a_record(config=trained(prepared)))
    assert prepared.finished()  # a run file without checksums counts as before
    record = a_record(config=trained(prepared), data=prepared.data_checksums())
    write_run(prepared.result, record)
    assert prepared.finished()
    replace_file(prepared, "train.bin")
    assert not prepared.finished()


def test_checkpoints_of_other_data_are_not_resumed(prepared):
    checkpoint(prepared.checkpoints / checkpoints.LAST, 30, cfg=saved_config(prepared))
    provenance.begin_part(prepared.folder, prepared.data_checksums(), resumed=False)
    assert prepared.ready_to_resume(pytest.fail) == 30
    replace_file(prepared, "train.bin")
    said = []
    assert prepared.ready_to_resume(said.append) == 0
    assert said == ["data (train) changed, so training starts over"]


def test_data_that_change_during_the_training_are_not_recorded(prepared):
    provenance.begin_part(prepared.folder, prepared.data_checksums(), resumed=False)
    replace_file(prepared, "test.bin")
    with pytest.raises(RunFailed, match=r"has changed since the training began \(test\)"):
        prepared.record({}, threads=1)


def test_runs_on_different_data_of_one_name_do_not_share_a_table():
    table = replace(families.load_named("table2"), same=[])
    old, one = a_record(), a_record(data={"train": "1", "dictionary": "2"})
    elsewhere = a_record(dataset="other", data={"train": "3"})
    require_same(table, {"old": old, "one": one, "again": one, "elsewhere": elsewhere})
    other = a_record(data={"train": "3", "dictionary": "2"})
    with pytest.raises(ValueError, match=r"^one and b cannot .* differ in the data toy \(train\)"):
        require_same(table, {"old": old, "one": one, "b": other})


def test_the_commits_of_all_parts_of_a_training_are_named(tmp_path, monkeypatch):
    def at(commit, *, resumed):
        monkeypatch.setattr(provenance, "commit", lambda: commit)
        provenance.begin_part(tmp_path, {}, resumed=resumed)
        return provenance.provenance(tmp_path)

    assert provenance.commit is files.commit
    assert provenance.provenance(tmp_path) == {}  # begun by an older version
    assert at("a", resumed=False) == {"commit": "a"}
    assert at("a", resumed=True) == {"commit": "a"}
    assert at("b", resumed=True) == {"commit": "a", "commits": ["a", "b"]}
    assert at("c", resumed=False) == {"commit": "c"}


def test_a_run_file_names_the_machine_that_trained_and_the_others(tmp_path, monkeypatch):
    here = machine.machine()
    gpu = {**here, "hardware": {"cpu": "x", "cores": 16, "gpus": ["H200"]}}
    provenance.write_json(tmp_path / provenance.USAGE, {"commits": ["a"]})
    provenance.begin_part(tmp_path, {}, resumed=True)  # an older version stored no machine
    assert provenance.machines(tmp_path)[0]["hardware"]["cpu"] == "unknown"
    for each, resumed in ((gpu, False), (gpu, True), (here, True)):
        monkeypatch.setattr(provenance, "machine", lambda each=each: each)
        provenance.begin_part(tmp_path, {}, resumed=resumed)
    assert provenance.machines(tmp_path) == [gpu, here]
    found = machine.environment((), [gpu])  # trained there, evaluated here
    assert found["hardware"] == gpu["hardware"]
    assert found["machines"] == [gpu, here]
    assert "machines" not in machine.environment((), [here])
    later = runs.with_machines(found, [here])
    assert later == {}  # it is known
    assert runs.with_machines(here, [gpu, here]) == {"machines": [here, gpu]}
    assert found["kernels"].keys() == {"served"}  # those that were available are of this machine
    assert machine.environment()["hardware"] == here["hardware"]


def test_a_clock_that_is_set_back_leaves_the_training_time_as_it_is(monkeypatch):
    compat.apply()
    trainer = Trainer.__new__(Trainer)
    trainer._previous_training_time = 100.0
    trainer._start_time = fairseq.trainer.time.time()
    monkeypatch.setattr(time, "time", lambda: 0.0)  # 1970
    assert 100.0 <= trainer._local_cumulative_training_time() < 110.0


@pytest.mark.parametrize(
    ("command", "status"),
    [(["sh", "-c", "echo before; exit 3"], 3), (["sh", "-c", "kill -9 $$"], -9)],
)
def test_a_command_that_fails_or_dies_keeps_its_status(tmp_path, command, status):
    with pytest.raises(RunFailed, match=rf"\(exit status {status}, .*log\)"):
        Children().run(command, tmp_path / "log", environment={})


@pytest.mark.parametrize("speaker", ["score_lm", "lrpe_fairseq"])
def test_a_refusal_is_told_without_the_command_that_was_started(tmp_path, speaker):
    command = ["sh", "-c", f"echo '{speaker}: choose 64: it is long'; exit 2"]
    with pytest.raises(RunFailed, match=r"^choose 64: it is long$"):
        Children().run(command, tmp_path / "log", environment={})


def test_another_error_with_status_2_keeps_its_log(tmp_path):
    command = ["sh", "-c", "echo 'fairseq-train: error: bad'; exit 2"]
    with pytest.raises(RunFailed, match=r"^fairseq-train: error: bad \(exit status 2, .*log\)$"):
        Children().run(command, tmp_path / "log", environment={})
