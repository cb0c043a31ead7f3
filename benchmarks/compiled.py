"""``python -m benchmarks.compiled``: compile the Triton kernels for GPUs, without one.

Every kernel of a family is compiled in every form, for every architecture and both half types, as
its launch on such a GPU would compile it. results/bench/compiled.json has a row for each: registers
of a thread, bytes of registers spilled to memory, and bytes of shared memory of a block.

    python -m benchmarks.compiled [FAMILY …] [--capabilities 80 90]

measures the named families and architectures again; other rows stay. To add a family, add an entry
to FAMILIES, and its sources to ``kernel_sources.SOURCES``.
"""

import argparse
import importlib
import inspect
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia

from lrpe_fairseq.experiments.records.kernel_sources import source_hash
from lrpe_fairseq.kernels import tiles_triton
from lrpe_fairseq.kernels.encode import encode, encode_triton
from lrpe_fairseq.kernels.flash import flash_triton, stick_triton
from lrpe_fairseq.kernels.linear import causal_triton, full_triton, sweep_triton
from lrpe_fairseq.kernels.loader import release_of

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "results" / "bench" / "compiled.json"
CAPABILITIES = (90, 80, 89, 86, 120)
"""H100, H200; A100; RTX 40, L40; RTX 30, A40; RTX 50."""
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
"""Shared memory that a block may have, in KiB."""
TYPES = ("bfloat16", "float16")
Case = tuple[str, Callable[[], None]]
LARGE_TILES = "normalized, 64-token tiles, 64/64"


class Family(NamedTuple):
    """Kernels whose figures are made together.

    launchers: the modules whose ``launch`` launches them. cases: for a dtype, names of forms and
    functions that run a forward and backward pass. Figures depend on ``kernel_sources.SOURCES``.
    """

    launchers: tuple[str, ...]
    cases: Callable[[torch.dtype], Iterator[Case]]


def flash_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield every form of flash attention, and widths of complex features and of wide heads."""
    table = torch.zeros(HEADS, 2 * TIME - 1).requires_grad_()
    c, d = (torch.zeros(1, HEADS, TIME, dtype=torch.float64).requires_grad_() for _ in range(2))
    numbers = torch.zeros(1, TIME, dtype=torch.int32)
    lags = {"long": TIME, "short": 32}
    own = {n: torch.zeros(1, HEADS, TIME, x, dtype=dtype).requires_grad_() for n, x in lags.items()}
    terms = {
        "table": {"table": table, "first_lag": 1 - TIME},
        "decay": {"decay": torch.zeros(HEADS)},
        "score-decay": {"score_decay": torch.zeros(HEADS)},
        "gates": {"gates": (c, d)},
        "query": {"by_query": own["long"]},
        "clipped-query": {"by_query": own["short"]},
        "clipped-key": {"by_key": own["short"]},
        "padding": {"padding": torch.zeros(1, TIME, dtype=torch.bool)},
        "documents": {"segments": (numbers, numbers)},
        "window": {"window": 100},
        "dropout": {"dropout": 0.1, "seed": torch.zeros(1, dtype=torch.int64)},
    }
    forms = [("plain", 64, 64), *((name, 64, 64) for name in terms)]
    forms += [("full", 64, 64), ("full gates", 64, 64), ("full table padding dropout", 64, 64)]
    forms += [("full clipped-query clipped-key padding dropout", 64, 64), ("query", 128, 128)]
    every = " ".join(name for name in terms if not name.endswith(("query", "key")))
    forms += [(every, 64, 64), *(("plain", *widths) for widths in WIDTHS)]
    forms += [("table", 128, 128), ("gates", 128, 128), (every, 256, 128)]
    for name, *widths in forms:
        options = {"causal": not name.startswith("full")}
        for term in set(name.split()) & terms.keys():
            options |= terms[term]
        run = partial(_run, flash_triton.flash_attention, dtype, *widths, options)
        yield f"{name}, {widths[0]}/{widths[1]}", run
    options = {"causal": True, **terms["table"], **terms["gates"]}
    run = partial(_run, flash_triton.flash_attention, torch.float32, 64, 64, options)
    yield "table gates, float32", run
    for name, causal in (("far table", True), ("full far table", False)):
        options = {"causal": causal, **terms["table"], "far": 100}
        yield f"{name}, 64/64", partial(_run, flash_triton.flash_attention, dtype, 64, 64, options)


def stick_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield stick-breaking attention with and without masks and dropout, and wide heads."""
    masks = {"padding": torch.zeros(1, TIME, dtype=torch.bool), "window": 100}
    masks["segments"] = (torch.zeros(1, TIME, dtype=torch.int32),) * 2
    dropout = {"dropout": 0.1, "seed": torch.zeros(1, dtype=torch.int64)}
    forms = {"plain": {}, "masks": masks, "dropout": dropout, "all": masks | dropout}
    widths = [(name, 64, 64) for name in forms] + [("plain", 128, 128), ("all", 128, 128)]
    for name, *width in widths:
        run = partial(_run, stick_triton.stick_attention, dtype, *width, forms[name])
        yield f"{name}, {width[0]}/{width[1]}", run


HEADS, TIME = 2, 512
WIDTHS = ((32, 32), (64, 32), (128, 64), (128, 128), (96, 96), (256, 128))


def _run(
    attention: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    keys: int,
    values: int,
    options: dict[str, Any],
) -> None:
    rows = (torch.zeros(1, TIME, HEADS, w, dtype=dtype) for w in (keys, keys, values))
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in rows)
    out = attention(q, k, v, scale=0.1, **options)
    out.backward(out.detach())


def encode_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield every form of Lambda P phi, of the usual width and of wide heads."""

    def angles(*shape: int) -> torch.Tensor:
        return torch.zeros(shape).requires_grad_()

    fixed, v = torch.zeros(32, dtype=torch.float64), angles(64)
    plain, phi = encode.Variant(phi=False), encode.Variant()
    grid = encode.Angles(angles(HEADS, 32), angles(HEADS, 32), 8)
    given = torch.zeros(1, HEADS, TIME, 20, dtype=torch.complex64).requires_grad_()
    forms = {
        "rotation": (64, None, encode.Angles(fixed), plain),
        "reflection, learned rotation": (64, v, encode.Angles(angles(32)), plain),
        "phi, reflection, learned rotation": (64, v, encode.Angles(angles(32)), phi),
        "odd-even, half rotation": (
            64,
            None,
            encode.Angles(angles(16)),
            encode.Variant(halves=True),
        ),
        "reflection, learned unitary": (
            64,
            v,
            encode.Angles(angles(64)),
            encode.Variant(wide=True),
        ),
        "odd-even, unitary": (64, None, encode.Angles(fixed.repeat(2)), plain._replace(wide=True)),
        "rotation on a grid by head": (64, None, grid, phi),
        "given phases": (64, None, None, phi),
        "reflection, learned rotation, wide": (256, angles(256), encode.Angles(angles(128)), phi),
    }
    cycles, one = (torch.ones(4, *n, 64, dtype=torch.int64) for n in ((HEADS,), ()))
    forms |= {
        "reflection, permutation": (64, v, one, plain._replace(permutes=True)),
        "odd-even, permutation": (64, None, one, encode.Variant(halves=True, permutes=True)),
        "permutation by head": (64, None, cycles, phi._replace(permutes=True)),
    }
    for name, (width, *terms) in forms.items():
        yield name, partial(_encode, dtype, width, given, *terms)
    yield "phi alone", partial(_phi, dtype)


def _phi(dtype: torch.dtype) -> None:
    x = torch.zeros(1, HEADS, TIME, 64, dtype=dtype).requires_grad_()
    out = encode_triton.feature_maps(x)[0]
    out.backward(out.detach())


def _encode(dtype: torch.dtype, width: int, given: torch.Tensor, *terms: Any) -> None:
    rows = (torch.zeros(1, TIME, HEADS, width, dtype=dtype) for _ in range(2))
    q, k = (x.transpose(1, 2).requires_grad_() for x in rows)
    normal, angles, variant = terms
    positions = given if angles is None else torch.arange(TIME)
    out = encode_triton.encode(q, k, normal, angles, positions, positions, variant)
    torch.autograd.backward(out, [x.detach() for x in out])


LINEAR = tuple(f"lrpe_fairseq.kernels.linear.{name}_triton" for name in ("causal", "sweep", "full"))


def linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield every form of linear attention, wide states, and float32 in place of ``dtype``."""
    gates = torch.zeros(1, HEADS, TIME).requires_grad_()
    own = {wanted: (wanted, None) for wanted in ("normalized", "sums", "numerator")}
    own["normalized gates"] = "normalized", gates
    own["normalized decay"] = "normalized", gates.detach()
    for name, given in own.items():
        yield f"{name}, 64/64", partial(_sweep, dtype, 1, *given)
    long = partial(_sweep, dtype, 1, "normalized", None, tile=64)
    yield LARGE_TILES, long
    for name in ("normalized", "normalized gates", "normalized decay"):
        yield f"{name} in parts, 64/64", partial(_sweep, dtype, 100, *own[name])
    for keys in (64, 128):
        yield f"full, {keys}/64", partial(_sums, full_triton.full_sums, dtype, (keys, 64))
    widths = ((32, 32), (64, 32), (128, 64), (128, 128))
    others = {f"{keys}/{values}": (dtype, (keys, values)) for keys, values in widths}
    for name, given in {**others, "float32": (torch.float32, (64, 64))}.items():
        yield f"causal, {name}", partial(_sums, causal_triton.causal_sums, *given, None)
    gated = partial(_sums, causal_triton.causal_sums, torch.float32, (64, 64), gates)
    yield "gates, float32", gated


def _sums(form: Callable, dtype: torch.dtype, widths: tuple[int, int], *decay: Any) -> None:
    q, k, v = (_row(dtype, width) for width in (widths[0], *widths))
    out, _ = form(q, k, v, "normalized", *decay, 1e-6)
    out.backward(out.detach())


def _sweep(dtype: torch.dtype, programs: int, wanted: str, gates: Any, tile: int = 32) -> None:
    sweep_triton.PROGRAMS = programs
    os.environ[tiles_triton.TILE] = str(tile)
    tiles_triton.chosen_tile.cache_clear()
    rows = (_row(dtype, 64) for _ in "qkv")
    out, denominator = sweep_triton.causal_sums(*rows, wanted, gates, 1e-6)
    given = [x for x in (out, denominator) if x is not None]
    torch.autograd.backward(given, [x.detach() for x in given])


def _row(dtype: torch.dtype, width: int) -> torch.Tensor:
    return torch.zeros(1, TIME, HEADS, width, dtype=dtype).transpose(1, 2).requires_grad_()


FLASH = ("lrpe_fairseq.kernels.flash.flash_triton",)
FAMILIES = {
    "flash": Family(FLASH, flash_cases),
    "stick": Family(FLASH, stick_cases),
    "encode": Family(("lrpe_fairseq.kernels.encode.encode_triton",), encode_cases),
    "linear": Family(LINEAR, linear_cases),
}


def may_spill(row: dict[str, Any]) -> int:
    """Return the bytes that a kernel may spill; 255 registers are 1,020.

    Zero, except in softmax attention 1,536 with keys of 256, 512 with biases of every query and key
    and in float32; in linear attention 1,280 of the chunked form, and some with states of
    4,096 numbers in registers.
    """
    if row["family"] != "linear":
        some = {"256/128": 1536, "clipped-query clipped-key": 512, "float32": 512}
        return max((limit for part, limit in some.items() if part in row["case"]), default=0)
    large, usual = row["capability"] == 90, row["case"].endswith("64/64")
    if not usual and not (large and row["case"].endswith("128/64")):
        return 1280
    rest = {} if large else {"_query_kernel": 16, "_later_kernel": 48}
    return ({"_key_kernel": 152, "_forward_kernel": 48} | rest).get(row["kernel"], 0)


class _Driver:
    """Replaces Triton's driver, which needs a GPU."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # so that Triton compiles anew for another architecture

    def get_current_stream(self, device: int) -> int:
        return 0


def is_served(case: str, capability: int, dtype: str, release: str = triton.__version__) -> bool:
    """False for large tiles where another form computes what they would; see ``chosen_tile``."""
    if case != LARGE_TILES:
        return True
    compiles = release_of(release) >= tiles_triton.LARGE_TILES_SINCE
    return compiles and dtype == "bfloat16" and capability in (90, 100)


def figures(family: str, capability: int, dtype: str, only: str | None = None) -> list[dict]:
    """Compile the kernels of a family for an architecture, in all forms or in the form ``only``.

    Returns: rows of {family, case, kernel, dtype, capability, registers, spilled_bytes,
        shared_bytes, warps, stages, tile}.
    """
    triton.runtime.driver.set_active(_Driver(capability))
    flash_triton.capability_of = lambda device: divmod(capability, 10)
    for module in (tiles_triton, sweep_triton):
        module.capability = lambda x: 8 if capability == 120 else capability // 10
    rows: dict[tuple[str, str], dict] = {}

    def compile_launch(
        case: str, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any
    ) -> None:
        name = kernel.fn.__name__
        compiled = kernel.warmup(*args, grid=grid, **constants)
        refuse_short_products(compiled.asm["ttgir"])
        registers, spilled = _assembled(compiled.asm["ptx"], capability)
        rows[case, name] = {
            "family": family,
            "case": case,
            "kernel": name,
            "dtype": dtype,
            "capability": capability,
            "tile": [constants[size] for size in ("BM", "BN") if size in constants],
            "warps": compiled.metadata.num_warps,
            "stages": compiled.metadata.num_stages,
            "registers": registers,
            "spilled_bytes": spilled,
            "shared_bytes": compiled.metadata.shared,
        }

    chosen = FAMILIES[family]
    for case, run in chosen.cases(getattr(torch, dtype)):
        if only in (None, case) and is_served(case, capability, dtype):
            for name in chosen.launchers:
                importlib.import_module(name).launch = partial(compile_launch, case)
            run()
    return list(rows.values())


def refuse_short_products(code: str) -> None:
    """Raise RuntimeError for a product over fewer numbers than four threads read at a time.

    Triton 3.6 writes such products for tensor cores, and they are wrong; see
    ``flash_triton.MaskedCall.padding_type``.
    """
    for depth, neighbours in re.findall(r"tt\.dot .*: tensor<\d+x(\d+)x.*?kWidth = (\d+)", code):
        if 4 * int(neighbours) > int(depth):
            raise RuntimeError(f"a product over {depth} numbers, {neighbours} by each thread")


def _assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Return the registers of a thread and the bytes spilled, by NVIDIA's assembler."""
    target = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        # Triton 3.5 and older have one assembler for all
        known = inspect.signature(nvidia.get_ptxas).parameters
        assembler = Path(nvidia.get_ptxas(*[capability][: len(known)]).path)
        told = _output(assembler, "-v", f"--gpu-name={target}", source, "-o", binary).stderr
        if capability == 90:
            code = _output(Path(nvidia.__file__).parent / "bin" / "nvdisasm", "-c", binary).stdout
            refuse_unset_registers(code)
    spills = re.findall(r"(\d+) bytes spill", told)
    return int(re.search(r"Used (\d+) registers", told)[1]), sum(map(int, spills))


def _output(*command: str | Path) -> subprocess.CompletedProcess:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done


def refuse_unset_registers(code: str) -> None:
    """Raise RuntimeError if machine code reads a uniform register that no earlier line writes.

    The assembler of Triton 3.6 (CUDA 12.8) forgets the addresses of some asynchronous products
    (wgmma). Such a kernel computes wrong numbers or reads beyond its memory; see
    ``sweep_triton.tile_of``.
    """
    known: set[int] = set()
    for line in re.findall(r"^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?\s*(.*?) ;", code, re.MULTILINE):
        name, *rest = re.split(r",\s*|\s+", line)
        rest = [x for x in rest if not re.fullmatch(r"!?U?P(T|\d)", x)]
        target = re.fullmatch(r"UR(\d+)", rest[0]) if rest else None
        for operand in rest[bool(target) :]:
            for number in map(int, re.findall(r"UR(\d+)", operand)):
                read = number + 2 * operand.startswith("gdesc")  # the second factor's address
                if read not in known:
                    raise RuntimeError(f"UR{read} has no value before: {line}")
        if target:
            first, double = int(target[1]), ".64" in name or ".WIDE" in name
            known |= {first, first + double}


def main() -> None:
    """Compile, print rows that spill or need too much shared memory, and write all figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.compiled", description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--capabilities", nargs="+", type=int, default=CAPABILITIES)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    jobs = list(product(options.families, options.capabilities, TYPES))
    is_partial = len(jobs) < len(FAMILIES) * len(CAPABILITIES) * len(TYPES)
    note = known().get("note") if is_partial else None
    with ProcessPoolExecutor(options.processes) as pool:
        for rows in pool.map(figures, *zip(*jobs, strict=True)):
            for row in rows:
                many = row["spilled_bytes"] > may_spill(row)
                if many or row["shared_bytes"] > SHARED[row["capability"]] * 1024:
                    print(json.dumps(row))
            write(rows, note)


def known() -> dict[str, Any]:
    """Return results/bench/compiled.json, or an empty dict."""
    return json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}


def write(rows: list[dict], note: str | None = None) -> None:
    """Write the rows of a family, architecture and dtype to results/bench/compiled.json.

    note: what a reader must know about the rows of earlier runs.
    """
    before = known()
    order = itemgetter("family", "capability", "dtype", "case", "kernel")
    made_by = itemgetter("family", "capability", "dtype")
    kept = [row for row in before.get("rows", []) if made_by(row) != made_by(rows[0])]
    family, capability, dtype = made_by(rows[0])
    made_from = {f"{family} sm_{capability} {dtype}": source_hash(family)}
    sources = before.get("sources", {}) | made_from
    lines = ",\n".join(json.dumps(row) for row in sorted(kept + rows, key=order))
    noted = {} if note is None else {"note": note}
    head = json.dumps({**noted, "triton": version("triton"), "sources": sources})[:-1]
    FIGURES.write_text(f'{head}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{len(rows)} rows written to {FIGURES.relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    main()
