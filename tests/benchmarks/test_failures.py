"""The failures of kernels on docs/speed.md are those that a training survives today."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

from benchmarks import failures
from lrpe_fairseq.kernels import loader, proof
from tests import triton_probe


def test_every_failure_left_one_warning_and_the_parameters_without_kernels():
    rows = json.loads(failures.FILE.read_text(encoding="utf-8"))["rows"]
    assert [row["failure"] for row in rows] == list(failures.FAILURES)
    for row in rows:
        assert row["equal"]
        assert f"{loader.VARIABLE}=0 switches all kernels off" in row["warning"]


@pytest.mark.skipif(bool(triton_probe.why_not()), reason=triton_probe.why_not())
@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_the_recorded_warning_is_that_of_the_present_version(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    file = json.loads(failures.FILE.read_text(encoding="utf-8"))
    name = "one number of a gradient is wrong"
    (recorded,) = (row["warning"] for row in file["rows"] if row["failure"] == name)
    (found,) = failures.in_processes(failures.FAILURES[name])
    (said,) = found["warnings"]
    versions = "torch {}, Triton {}".format
    before = versions(file["versions"]["torch"], file["versions"]["triton"])
    assert said == recorded.replace(before, versions(torch.__version__, proof.triton_version()))
