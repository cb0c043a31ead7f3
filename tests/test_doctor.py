"""The doctor finds what would break a run, and says what to do."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lrpe_fairseq.experiments.commands import doctor
from lrpe_fairseq.experiments.report import speed
from lrpe_fairseq.experiments.runner import kernel_checks
from lrpe_fairseq.experiments.runner.kernel_checks import Finding
from lrpe_fairseq.kernels import loader, proof

ROOT = Path(__file__).resolve().parents[1]
PROVE = proof._prove  # tests/conftest.py replaces it


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


RIGHT = Finding("triton", {"output": 1e-3, "gradient of q": 2e-3}, 1e-2, 0.5, 2.0)
WRONG = Finding("triton", {"output": 1e-3, "gradient of q": float("nan")}, 1e-2, 0.5, 2.0)
GIVEN_UP = Finding("definition", {"output": 1e-3}, 1e-2, None, None, "_encode: out of resource")


@pytest.mark.parametrize(
    ("found", "status", "line"),
    [
        (RIGHT, 0, "0.50      2.00  output 1e-03, gradient of q 2e-03 (bound 1e-02)"),
        (WRONG, 1, "gradient of q nan"),
        (GIVEN_UP, 1, "(bound 1e-02); _encode: out of resource"),
        ("its process ended with status -11", 1, "status -11"),
    ],
)
def test_checks_of_kernels_fail_for_a_wrong_number_a_kernel_given_up_and_a_lost_process(
    found, status, line, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(kernel_checks, "why_not", lambda: "")
    monkeypatch.setattr(kernel_checks, "findings", lambda: iter([("linear, full", found)]))
    out = tmp_path / speed.RESULTS / "cuda" / "doctor.json"
    assert doctor.main(["--kernels", "--out", str(out)]) == status
    written = json.loads(out.read_text())
    assert written["versions"]["torch"] == torch.__version__
    (row,) = written["rows"]
    assert (row["check"], row["passed"]) == ("linear, full", not status)
    assert row.get("served", "") in ("triton", "definition", "")
    speed.run_file.cache_clear()
    assert speed.csv_of(tmp_path, "doctor").startswith("device,torch,dtype,commit,")
    shown = speed.doctor(tmp_path)
    assert shown.get("passed") == (not status if row.get("served") == "triton" else None)
    _, said, summary, versions = capsys.readouterr().out.splitlines()
    assert said.startswith("FAIL  linear, full" if status else "ok    linear, full")
    assert line in said
    assert ("report this whole output" in summary) == bool(status)
    assert f"torch {torch.__version__}, Triton " in versions
    assert versions.endswith("scripts/doctor.sh --kernels")


def test_where_kernels_cannot_be_checked_one_sentence_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(kernel_checks.importlib.util, "find_spec", lambda name: None)
    assert doctor.main(["--kernels"]) == 1
    assert "Triton is not installed: pip install triton" in capsys.readouterr().out
    monkeypatch.setenv(loader.VARIABLE, "0")
    assert kernel_checks.why_not() == "LRPE_FAIRSEQ_KERNELS=0 switches the kernels off: unset it"


def hangs(sizes, dtype, device):
    time.sleep(600)


def crashes(sizes, dtype, device):
    os.kill(os.getpid(), signal.SIGKILL)


def raises(sizes, dtype, device):
    raise RuntimeError("CUDA error: an illegal memory access\nfor debugging")


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (hangs, "no result after 2 s"),
        (crashes, "its process ended with status -9"),
        (raises, "RuntimeError: CUDA error: an illegal memory access"),
    ],
)
def test_a_check_that_hangs_or_crashes_ends_alone(check, said, monkeypatch):
    monkeypatch.setitem(kernel_checks.CHECKS, "broken", check)
    context = multiprocessing.get_context("fork")
    seconds = 2 if check is hangs else 60
    found = dict(kernel_checks._side_by_side(context, ["broken", "encode rope"], seconds))
    assert found["broken"] == said


def answers(name):
    return Finding("triton", {"output": 1e-3}, 1e-2)


def test_checks_that_have_compared_are_timed_in_turn(monkeypatch):
    monkeypatch.setattr(kernel_checks, "find", answers)
    monkeypatch.setattr(kernel_checks, "times", lambda name: (0.5, len(name)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    context = multiprocessing.get_context("fork")
    found = dict(kernel_checks._side_by_side(context, ["a", "bb"], 60))
    assert [(x.milliseconds, x.pytorch) for x in found.values()] == [(0.5, 1), (0.5, 2)]
    monkeypatch.setattr(kernel_checks, "times", lambda name: os.kill(os.getpid(), signal.SIGKILL))
    found = dict(kernel_checks._side_by_side(context, ["a"], 60))
    assert found == {"a": "its process ended with status -9"}


def test_a_check_in_the_interpreter_says_what_served_and_how_far_it_is_off(monkeypatch):
    triton_probe = pytest.importorskip("tests.triton_probe", reason="the kernels need triton")
    if torch.cuda.is_available() or triton_probe.why_not():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(proof, "_prove", PROVE)
    context = multiprocessing.get_context("fork")
    ((_, found),) = kernel_checks._side_by_side(context, ["encode lrpe-type3"], 200)
    assert found.passed, found
    assert found.served == "triton"
    assert found.milliseconds is None
    names = ("output", "q", "k", "projection.v", "core.theta")
    assert [name.removeprefix("gradient of ") for name in found.errors] == list(names)
    assert 0 < max(found.errors.values()) < 2e-3


def test_a_check_that_no_kernel_serves_fails(monkeypatch):
    monkeypatch.setattr(kernel_checks.loader, "triton_kernels", lambda name: None)
    monkeypatch.setattr(kernel_checks.loader, "interpret", lambda: None)
    found = kernel_checks.find("linear, gates")
    assert not found.passed
    assert found.reason == "no Triton kernel serves this call, so nothing was checked"


def test_checks_cover_every_kernel_that_attention_chooses():
    """Rotations, permutations and reflections; terms and masks of softmax attention."""
    families = {name.split()[0].strip(",") for name in kernel_checks.CHECKS}
    assert families == {"linear", "encode", "softmax", "stick-breaking"}
    assert len(kernel_checks.CHECKS) == 27
