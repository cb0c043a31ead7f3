"""The Triton kernels become machine code for real GPUs, without one: what the interpreter, in which
their results are tested, cannot show."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that one block may have
SPILLED = 1280  # bytes; 255 registers are 1,020


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles_and_keeps_its_work_in_registers(capability):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_triton", str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    # states and their gradients, outputs, two gradients; encoding and gradient
    assert len(found) == 5 * 5 + 5 * 2
    for kernel in found:
        assert kernel["spilled_bytes"] <= SPILLED, kernel
        assert kernel["shared_bytes"] <= SHARED[capability], kernel
