"""Compile the Triton kernels of linear attention for a GPU, without one; print a line per kernel.

    .venv/bin/python -m tests.kernels.compile_triton 90

The kernels are launched as in training, but every launch ends at the machine code: registers,
bytes of registers spilled to memory and shared memory of a block are printed. The argument is the
compute capability (80: A100, 90: H100). ``benchmarks.compiled`` has those of flash attention.
"""

import json
import sys

import torch
import triton

from benchmarks.compiled import _assembled, _Driver
from lrpe_fairseq.kernels import causal_triton as attention
from lrpe_fairseq.kernels import full_triton, sweep_triton, tiles_triton
from tests.triton_probe import launched


class Compiled:
    """Replaces a kernel: ``self[grid](*args, **constants)`` compiles it and prints a line."""

    case = ""  # what is being launched, for the line

    def __init__(self, kernel, capability):
        self.kernel, self.capability = kernel, capability

    def __getitem__(self, grid):
        return lambda *args, **constants: self.launch(grid, *args, **constants)

    def launch(self, grid, *args, **constants):
        compiled = self.kernel.warmup(*args, grid=grid, **constants)
        registers, spilled = _assembled(compiled.asm["ptx"], self.capability)
        found = {
            "case": self.case,
            "module": self.kernel.fn.__module__.split(".")[-1],
            "kernel": self.kernel.fn.__name__,
            "registers": registers,
            "spilled_bytes": spilled,
            "shared_bytes": compiled.metadata.shared,
        }
        print(json.dumps(found), flush=True)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def sweeps(dtype, keys):
    """Causal attention without and with gates, documents and parts, and attention to all keys."""
    for decays in (False, True):
        Compiled.case = f"sweep, {dtype}, {keys} by 64, {decays=}"
        q, k, v = (random(1, 2, 256, width, dtype=dtype) for width in (keys, keys, 64))
        gates, segments = None, None
        if decays:
            gates = torch.zeros(1, 2, 256).requires_grad_()
            segments = torch.zeros(1, 256, dtype=torch.int32)
        sweep_triton.PROGRAMS = 100 if decays else 1
        assert tiles_triton.fits_registers(q, v)
        out, _ = sweep_triton.causal_sums(q, k, v, "normalized", gates, 1e-6, segments)
        out.sum().backward()
    attention.full_sums(q, k, v, "normalized", 1e-6)[0].sum().backward()


def main(capability):
    triton.runtime.driver.set_active(_Driver(capability))
    tiles_triton.capability = sweep_triton.capability = lambda x: capability // 10
    for module in (attention, full_triton, sweep_triton):
        for name, kernel in vars(module).copy().items():
            if isinstance(kernel, triton.JITFunction) and launched(name):
                setattr(module, name, Compiled(kernel, capability))
    sweeps(torch.float16, 64)
    sweeps(torch.bfloat16, 64 if capability < 90 else 128)
    for dtype, width in ((torch.bfloat16, 128), (torch.float32, 64)):
        Compiled.case = f"attention, {dtype}, {width} wide"
        q, k, v = (random(1, 2, 256, width, dtype=dtype) for _ in "qkv")
        attention.causal_sums(q, k, v, "normalized", None, 1e-6)[0].sum().backward()
        Compiled.case = f"attention to all keys, {dtype}, {width} wide"
        attention.full_sums(q, k, v, "normalized", 1e-6)[0].sum().backward()
    Compiled.case = "attention, decay per token"
    gates = torch.zeros(1, 2, 256).requires_grad_()
    attention.causal_sums(q, k, v, "normalized", gates, 1e-6)[0].sum().backward()


if __name__ == "__main__":
    main(int(sys.argv[1]))
