"""The doctor finds what would break a run, and says what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
        (
            {"fairseq": "raise ImportError('undefined symbol: _ZN3c10')"},
            "fairseq: fairseq does not import (ImportError: undefined symbol: _ZN3c10); run make",
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
    steps = {"binarize": {"writes": {"bin/train.bin": "0" * 64}}}
    (folder / "manifest.json").write_text(json.dumps({"steps": steps}))
    return folder


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("pydoc", "data-prep/pydoc/prepare.py --dest"),
        ("glue-wikitext-2-bpe/RTE", "data-prep/glue/prepare.py RTE --tokens-of"),
    ],
)
def test_a_damaged_data_file_is_named_with_the_command_that_restores_it(tmp_path, name, script):
    folder = prepared(tmp_path, name)
    assert folder in doctor.data_folders(tmp_path / "data")
    with pytest.raises(doctor.CheckFailed, match=rf"bin/train.bin differs.*{script}"):
        doctor.data(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"steps": 3}', '{"steps": {"a": 1}}', None])
def test_a_missing_or_damaged_manifest_is_one_sentence(tmp_path, text):
    folder = prepared(tmp_path, "pydoc")
    (folder / "manifest.json").unlink()
    if text is not None:
        (folder / "manifest.json").write_text(text)
    with pytest.raises(doctor.CheckFailed, match=r"(cannot be read|unfinished); run .*prepare.py"):
        doctor.data(folder)


def test_a_folder_that_cannot_be_written_is_a_clear_failure(tmp_path, capsys):
    (tmp_path / "runs").write_text("a file where the folder should be")
    assert not doctor.passed("disk", lambda: doctor.disk(tmp_path))
    assert "cannot be written" in capsys.readouterr().out


def test_too_little_room_is_said_in_gigabytes(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "FREE_GB", 10**9)
    with pytest.raises(doctor.CheckFailed, match="GB free; a table at paper scale needs"):
        doctor.disk(tmp_path)


@pytest.mark.parametrize(
    ("capability", "compiled", "runs"),
    [
        ((7, 0), ["sm_70", "sm_80"], True),
        ((7, 0), ["sm_75", "sm_80", "compute_90"], False),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["compute_80"], True),
        ((12, 0), ["sm_100", "sm_120"], True),
        ((9, 1), ["sm_90a"], False),
        ((8, 0), [], False),
    ],
)
def test_code_runs_on_later_minor_versions_and_intermediate_code_on_all_later_ones(
    capability, compiled, runs
):
    assert doctor.runs_on(capability, compiled) is runs


@pytest.mark.parametrize(
    ("name", "capability", "compiled", "command"),
    [
        ("P100", (6, 0), ["sm_75", "sm_80"], r"P100 is sm_60.*torch==2.6.0 install"),
        ("V100", (7, 0), ["sm_75", "sm_80"], r"V100 is sm_70.*torch==2.10.0 install"),
        ("B200", (10, 0), ["sm_70", "sm_90"], r"B200 is sm_100.*torch==2.13.0 install"),
    ],
)
def test_a_gpu_without_code_in_this_torch_is_named_with_the_command_that_helps(
    monkeypatch, name, capability, compiled, command
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: compiled)
    with pytest.raises(doctor.CheckFailed, match=command):
        doctor.gpus()


def test_the_exit_status_counts_failures(monkeypatch, capsys):
    def broken() -> str:
        raise doctor.CheckFailed("do this")

    monkeypatch.setattr(doctor, "basics", lambda: iter([]))
    monkeypatch.setattr(doctor, "checks", lambda: iter([("a", lambda: "fine"), ("b", broken)]))
    assert doctor.main() == 1
    assert capsys.readouterr().out == "ok    a: fine\nFAIL  b: do this\n1 check failed\n"
