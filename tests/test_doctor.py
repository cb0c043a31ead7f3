"""The doctor finds what would break a run, and says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lrpe_fairseq.experiments.commands import doctor

ROOT = Path(__file__).resolve().parents[1]


def test_a_sound_environment_passes_every_check(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "FREE_GB", 0)
    assert doctor.main() == 0, capsys.readouterr().out
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said[:-1]] == [f"ok    {n}" for n in doctor.CHECKS]


def test_a_layer_of_either_attention_must_be_near_float64(monkeypatch):
    assert "softmax attention of gated:lrpe-type2 on cpu: error" in doctor.training()
    monkeypatch.setattr("torch.Tensor.norm", lambda x: x.sum() * float("nan"))
    with pytest.raises(ValueError, match=r"attention of none on cpu: .*; run make test to"):
        doctor.training()


@pytest.mark.parametrize(
    ("module", "text", "said"),
    [
        ("torch", "raise ModuleNotFoundError('No module', name='torch')", "FAIL  versions: Module"),
        ("fairseq", "raise ImportError('undefined symbol: _ZN3c10')", "FAIL  plugin: ImportError"),
    ],
)
def test_a_missing_or_broken_package_is_named_without_a_traceback(tmp_path, module, text, said):
    (tmp_path / f"{module}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONSAFEPATH": "1"}
    given = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "lrpe_fairseq/experiments/commands/doctor.py"], **given)
    assert done.returncode == 1
    assert said in done.stdout
    assert "make install repairs packages" in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stdout + done.stderr


def test_a_folder_that_cannot_be_written_and_too_little_room_are_failures(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(doctor, "FREE_GB", 10**9)
    with pytest.raises(ValueError, match="GB free; a table at paper scale needs"):
        doctor.disk()
    (tmp_path / "runs" / ".doctor").mkdir()
    assert not doctor.passed("disk", doctor.disk)
