"""The doctor finds what would break a run, and says what to do."""

import json

import pytest

from lrpe_fairseq.experiments.commands import doctor


def test_a_sound_environment_passes_every_check(capsys):
    names = {"python", "torch", "fairseq", "plugin", "fairseq commands", "GPU", "Slurm"}
    results = {name: doctor.passed(name, check) for name, check in doctor.checks() if name in names}
    assert results == dict.fromkeys(names, True), capsys.readouterr().out


def test_a_training_step_lowers_the_loss_under_both_attentions():
    for before, after in (doctor._losses("cpu", kind) for kind in ("linear", "softmax")):
        assert after < before


def test_a_damaged_data_file_is_named_with_the_command_that_restores_it(tmp_path, monkeypatch):
    folder = tmp_path / "data" / "pydoc"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "train.bin").write_bytes(b"half of it")
    steps = {"binarize": {"writes": {"bin/train.bin": "0" * 64}}}
    (folder / "manifest.json").write_text(json.dumps({"steps": steps}))
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    with pytest.raises(doctor.Ailment, match=r"bin/train.bin differs.*data-prep/pydoc/prepare.py"):
        doctor.data(folder)


def test_a_folder_that_cannot_be_written_is_a_clear_failure(tmp_path, capsys):
    (tmp_path / "runs").write_text("a file where the folder should be")
    assert not doctor.passed("disk", lambda: doctor.disk(tmp_path))
    assert "cannot be written" in capsys.readouterr().out


def test_too_little_room_is_said_in_gigabytes(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "FREE_GB", 10**9)
    with pytest.raises(doctor.Ailment, match="GB free; a table at paper scale needs"):
        doctor.disk(tmp_path)


def test_the_exit_status_counts_failures(monkeypatch, capsys):
    def broken() -> str:
        raise doctor.Ailment("do this")

    monkeypatch.setattr(doctor, "checks", lambda: iter([("a", lambda: "fine"), ("b", broken)]))
    assert doctor.main() == 1
    assert capsys.readouterr().out == "ok    a: fine\nFAIL  b: do this\n1 checks failed\n"
