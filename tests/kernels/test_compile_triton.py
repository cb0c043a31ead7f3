"""The Triton kernels of linear attention become machine code for real GPUs, without one: what the
interpreter, in which their results are tested, cannot show."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

SHARED = {80: 163, 86: 99, 89: 99, 90: 227}  # KiB that one block may have
SPILLED = 1280  # bytes; 255 registers are 1,020
STATES_IN_REGISTERS = {"sweep_triton", "full_triton"}
"""Modules whose kernels spill nothing, but for the gradients of keys and values on GPUs of
capability 8: at most 160 bytes, 40 numbers of a state of 4,096."""


@pytest.mark.exhaustive  # two minutes each
@pytest.mark.parametrize("capability", [80, 86, 89, 90])
def test_every_kernel_compiles_and_keeps_its_work_in_registers(capability):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_triton", str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    # sweeps: 3 kernels, with parts 6, over all keys 4; the scan: states and their gradients,
    # outputs, two gradients
    assert len(found) == 2 * (3 + 6 + 1 + 4) + 5 * 5
    for kernel in found:
        spilled = SPILLED
        if kernel["module"] in STATES_IN_REGISTERS:
            spilled = 160 if kernel["kernel"] == "_key_kernel" and capability < 90 else 0
        assert kernel["spilled_bytes"] <= spilled, kernel
        assert kernel["shared_bytes"] <= SHARED[capability] * 1024, kernel
