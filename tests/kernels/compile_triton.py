"""Compile every Triton kernel for a GPU, without one; print one line of JSON per kernel.

    .venv/bin/python -m tests.kernels.compile_triton 90

The kernels are launched as in training, but every launch ends at the machine code: registers,
bytes of registers spilled to memory and shared memory of a block are printed. The argument is the
compute capability (80: A100, 90: H100).
"""

import json
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends import compiler as backends
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from lrpe_fairseq.kernels import causal_triton as attention
from lrpe_fairseq.kernels import encode_triton as encodings
from lrpe_fairseq.kernels import full_triton, sweep_triton, tiles_triton

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
TYPES |= {torch.float64: "*fp64", torch.int32: "*i32"}


class Compiled:
    """Replaces a kernel: ``self[grid](*args, **constants)`` compiles it and prints a line."""

    case = ""  # what is being launched, for the line

    def __init__(self, kernel, capability):
        self.kernel, self.capability = kernel, capability

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps, **constants):
        names = self.kernel.arg_names
        given = dict(zip((n for n in names if n not in constants), args, strict=True))
        kinds = {n: kind(given[n]) if n in given else "constexpr" for n in names}
        free = {p.name for p in self.kernel.params if p.do_not_specialize}
        seen = given.keys() - free
        aligned = [i for i, n in enumerate(names) if n in seen and is_aligned(given[n])]
        compiled = triton.compile(
            source(self.kernel, kinds, constants, aligned),
            target=GPUTarget("cuda", self.capability, 32),
            options={"num_warps": num_warps},
        )
        registers, spilled = assembled(compiled.asm["ptx"], self.capability)
        found = {
            "case": self.case,
            "module": self.kernel.fn.__module__.split(".")[-1],
            "kernel": self.kernel.fn.__name__,
            "registers": registers,
            "spilled_bytes": spilled,
            "shared_bytes": compiled.metadata.shared,
        }
        print(json.dumps(found), flush=True)


def source(kernel, kinds, constants, aligned):
    """The input of Triton's compiler; triton < 3.3 has another form of it."""
    if hasattr(backends, "AttrsDescriptor"):
        kinds = {name: kind for name, kind in kinds.items() if kind != "constexpr"}
        hints = backends.AttrsDescriptor.from_hints(dict.fromkeys(aligned, 16))
    else:
        hints = {(i,): [["tt.divisibility", 16]] for i in aligned}
    return ASTSource(kernel, kinds, constants, hints)


def ptxas(capability):
    """The path of NVIDIA's assembler, which comes with Triton."""
    if hasattr(nvidia, "get_ptxas"):
        return nvidia.get_ptxas(capability).path
    return nvidia._path_to_binary("ptxas")[0]


def kind(argument):
    """Triton's name of the type of a kernel's argument."""
    if isinstance(argument, torch.Tensor):
        return TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


def is_aligned(argument):
    """True if Triton treats the argument as a multiple of 16: tensors, and such numbers."""
    return isinstance(argument, torch.Tensor) or argument % 16 == 0


def assembled(ptx, capability):
    """(registers of a thread, bytes spilled), by NVIDIA's assembler."""
    target = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas(capability), "-v", f"--gpu-name={target}", file.name]
        done = subprocess.run([*command, "-o", "/dev/null"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    spills = re.findall(r"(\d+) bytes spill", done.stderr)
    return int(re.search(r"Used (\d+) registers", done.stderr)[1]), sum(map(int, spills))


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
    tiles_triton.capability = sweep_triton.capability = lambda x: capability // 10
    for module in (attention, encodings, full_triton, sweep_triton):
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
    Compiled.case = "feature map"
    encodings.feature_map(random(1, 2, 256, 64, dtype=torch.bfloat16)).sum().backward()
    forms = [encodings.Form(phi=phi) for phi in (True, False)]
    forms += [encodings.Form(wide=True, halves=halves) for halves in (True, False)]
    for width, form in zip((64, 64, 128, 128), forms, strict=True):
        Compiled.case = f"encoding, {width} wide, {form}"
        x = random(1, 2, 256, width, dtype=torch.bfloat16)
        turn = random(256, width if form.wide else width // 2, dtype=torch.complex64)
        encodings.encode(x, random(width), turn, form).sum().backward()


def launched(name):
    """True if a function of a module is launched by itself, not called by a kernel."""
    return name.endswith("_kernel") or name.startswith("_encode")


if __name__ == "__main__":
    main(int(sys.argv[1]))
