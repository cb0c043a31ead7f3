"""The doctor finds what would break a run, and says what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lrpe_fairseq.experiments.commands import doctor

ROOT = Path(__file__).resolve().parents[1]


def test_a_sound_environment_passes_every_check(capsys):
    names = {"plugin", "fairseq commands", "GPU", "Slurm"}
    assert doctor._failed(doctor.basics()) == 0, capsys.readouterr().out
    results = {name: doctor.passed(name, check) for name, check in doctor.checks() if name in names}
    assert results == dict.fromkeys(names, True), capsys.readouterr().out


def test_a_training_step_lowers_the_loss_under_both_attentions():
    for before, after in (doctor._losses("cpu", kind) for kind in ("linear", "softmax")):
        assert after < before


def run_doctor(folder: Path, **modules: str) -> subprocess.CompletedProcess[str]:
    """Run doctor.py as scripts/doctor.sh does, with ``modules`` in place of the real ones."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    path = f"{folder}:{ROOT}"
    return subprocess.run(
        [sys.executable, "lrpe_fairseq/experiments/commands/doctor.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        (
            {"torch": "raise ModuleNotFoundError('No module', name='torch')"},
            "torch: torch is not installed; run make install",
        ),
        (
            {"torch": "raise OSError('libcudart.so.12: cannot open\\nmore')"},
            "torch: torch does not import (OSError: libcudart.so.12: cannot open); run make inst",
        ),
        pytest.param(
            {"fairseq": "raise ImportError('undefined symbol: _ZN3c10')"},
            "fairseq: fairseq does not import (ImportError: undefined symbol: _ZN3c10); run make",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_missing_or_broken_package_is_one_sentence_without_a_traceback(
    tmp_path, modules, sentence
):
    done = run_doctor(tmp_path, **modules)
    assert done.returncode == 1
    assert f"FAIL  {sentence}" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(
        "the other checks depend on these and were not run"
    )


def prepared(root: Path, name: str, content: bytes = b"half of it") -> Path:
    """A data folder whose manifest names another content of its one file."""
    folder = root / "data" / name
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "train.bin").write_bytes(content)
    (folder / "bin" / "dict.txt").write_text("word 1\n")
    steps = {"binarize": {"writes": {"bin/train.bin": "0" * 64}}}
    (folder / "manifest.json").write_text(json.dumps({"steps": steps}))
    return folder


def test_a_damaged_data_file_is_named(tmp_path):
    folder = prepared(tmp_path, "glue-wikitext-2-bpe/RTE")
    assert folder in doctor.data_folders(tmp_path / "data")
    with pytest.raises(
        doctor.CheckFailed, match=r"bin/train.bin is not the file that data-prep wr"
    ):
        doctor.data(folder)


@pytest.mark.parametrize("text", ["[]", '{"steps": 3}', '{"steps": {"a": 1}}', None])
def test_a_missing_or_damaged_manifest_is_one_sentence(tmp_path, text):
    folder = prepared(tmp_path, "pydoc")
    (folder / "manifest.json").unlink()
    if text is not None:
        (folder / "manifest.json").write_text(text)
    with pytest.raises(doctor.CheckFailed, match=r"cannot be read; run .*data-prep/pydoc/prepare"):
        doctor.data(folder)


def test_a_folder_that_cannot_be_written_is_a_clear_failure(tmp_path, capsys):
    (tmp_path / "runs").write_text("a file where the folder should be")
    assert not doctor.passed("disk", lambda: doctor.disk(tmp_path))
    assert "cannot be written" in capsys.readouterr().out


def test_too_little_room_is_said_in_gigabytes(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "FREE_GB", 10**9)
    with pytest.raises(doctor.CheckFailed, match="GB free; a table at paper scale needs"):
        doctor.disk(tmp_path)


def test_a_gpu_without_code_in_this_torch_is_named_with_the_command_that_helps(monkeypatch):
    def no_code(device, attention):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(doctor, "_losses", no_code)
    with pytest.raises(doctor.CheckFailed, match=r"no code for it; run make TORCH=.* up to 6\.2"):
        doctor.training_step("cuda:0")


def test_the_exit_status_counts_failures(monkeypatch, capsys):
    def broken() -> str:
        raise doctor.CheckFailed("do this")

    monkeypatch.setattr(doctor, "basics", lambda: iter([]))
    monkeypatch.setattr(doctor, "checks", lambda: iter([("a", lambda: "fine"), ("b", broken)]))
    assert doctor.main() == 1
    assert capsys.readouterr().out == "ok    a: fine\nFAIL  b: do this\n1 check failed\n"
