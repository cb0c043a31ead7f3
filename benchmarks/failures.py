"""``python -m benchmarks.failures``: what a training does where a Triton kernel fails.

Failures are injected into linear attention in Triton's interpreter, each in a process of its own,
and two updates of a layer are compared with those without kernels. results/bench/cpu/failures.json
has a row for each failure: the warning, what served, and if the parameters are equal. docs/speed.md
shows them.
"""

import ast
import hashlib
import logging
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.run import RESULTS
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.experiments.records.files import write_json
from lrpe_fairseq.experiments.records.machine import environment
from lrpe_fairseq.kernels import loader, proof

FILE = RESULTS / "cpu" / "failures.json"
UPDATES = 2
KERNELS = "lrpe_fairseq.kernels.linear.full_triton"
"""Those that fail."""
BACKWARD = "_query_kernel"
"""The kernel that computes the gradient of q."""
Launch = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]


def _sound(kernel: Any, grid: tuple[int, ...], args: tuple, constants: dict) -> None:
    kernel[grid](*args, **constants)


def _not_compiled(kernel: Any, grid: tuple[int, ...], args: tuple, constants: dict) -> None:
    """What the compiler of Triton 3.3 says of the kernels of flash attention."""
    from triton.compiler.errors import UnsupportedLanguageConstruct

    source = "ok = a or b or c"
    raise UnsupportedLanguageConstruct(
        source, ast.parse(source).body[0], "chained boolean operators are not supported"
    )


def _refused(kernel: Any, grid: tuple[int, ...], args: tuple, constants: dict) -> None:
    from triton.runtime.errors import OutOfResources

    raise OutOfResources(270336, 232448, "shared memory")


def _refused_later(kernel: Any, grid: tuple[int, ...], args: tuple, constants: dict) -> None:
    proves = threading.current_thread() is not threading.main_thread()
    launch = _refused if _name(kernel) == BACKWARD and not proves else _sound
    launch(kernel, grid, args, constants)


def _wrong(kernel: Any, grid: tuple[int, ...], args: tuple, constants: dict) -> None:
    _sound(kernel, grid, args, constants)
    if _name(kernel) == BACKWARD:
        args[kernel.arg_names.index("dq_ptr")][0, 0, 0, 5] += 1


def _launch(launch: Launch, kernel: Any, *given: Any) -> None:
    """Launch kernels of KERNELS by ``launch``, and others as they are."""
    (launch if kernel.fn.__module__ == KERNELS else _sound)(kernel, *given)


def _name(kernel: Any) -> str:
    return kernel.fn.__name__


FAILURES: dict[str, tuple[Launch, ...]] = {
    "a kernel does not compile": (_not_compiled,),
    "a kernel cannot be launched": (_refused,),
    "a kernel of a backward pass cannot be launched, after its proof": (_refused_later,),
    "one number of a gradient is wrong": (_wrong,),
    "a kernel cannot be launched on another rank": (_sound, _refused),
}
"""What fails, and how every rank launches its kernels; the warning is that of the first."""


class _Warnings(logging.Handler):
    """Keeps the warnings of a process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def trained(launch: Launch | None, rank: int = 0, ranks: int = 1, store: str = "") -> dict:
    """Train a layer for UPDATES updates; None: without kernels.

    Returns: {warnings, served, parameters}, the last as a hash.
    """
    heard = _Warnings()
    logging.getLogger("lrpe_fairseq").addHandler(heard)
    torch.set_num_threads(1)
    if ranks > 1:
        where = f"file://{store}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    if launch is None:
        os.environ[loader.VARIABLE] = "0"
    else:
        loader.interpret()
        loader.has_triton_kernels(KERNELS)  # after a sound probe
        loader._launch = partial(_launch, launch)
    numbers = _parameters()
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    found = {"warnings": heard.texts, "served": dict(loader.SERVED)}
    return {**found, "parameters": hashlib.sha256(numbers).hexdigest()}


def _parameters() -> bytes:
    """Return the parameters of a layer after UPDATES updates."""
    torch.manual_seed(0)
    choices = {"attention_type": "linear", "position_encoding": "none", "causal": False}
    layer = MultiheadAttention(32, 2, **choices).half()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    x = torch.randn(1, 9, 32).half()
    for _ in range(UPDATES):
        optimizer.zero_grad()
        layer.attend(x)[0].float().square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in layer.parameters()]).numpy().tobytes()


def measure() -> list[dict[str, Any]]:
    """Return a row for each failure: {failure, warning, kernel, served, equal}.

    Raises: ValueError unless there is one warning, and sound kernels none.
    """
    os.environ["TRITON_INTERPRET"] = "1"  # for the processes
    (wanted,) = in_processes((None,))
    (sound,) = in_processes((_sound,))
    if sound["warnings"] or "triton" not in str(sound["served"]):
        raise ValueError(f"sound kernels do not serve: {sound}")
    rows = []
    for name, launches in FAILURES.items():
        found, *_ = in_processes(launches)
        (warning,) = found["warnings"]
        ((kernel, (served,)),) = (
            x for x in found["served"].items() if x[0].startswith("kernel of ")
        )
        equal = found["parameters"] == wanted["parameters"]
        row = {"failure": name, "warning": warning, "kernel": kernel, "served": served}
        rows.append({**row, "equal": equal})
    return rows


def in_processes(launches: tuple[Launch | None, ...]) -> list[dict[str, Any]]:
    """Return what :func:`trained` returns on each rank of a group that launches so."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(len(launches)) as pool:
        group = len(launches), str(Path(folder, "store"))
        return pool.starmap(trained, [(x, n, *group) for n, x in enumerate(launches)], 1)


def main() -> None:
    """Inject every failure, print its warning and write the file."""
    stated = environment()
    stated["versions"]["triton"] = proof.triton_version()
    rows = measure()
    for row in rows:
        print(f"{row['failure']} (equal: {row['equal']}):\n  {row['warning']}")
    about = {"part": "failures", **stated, "threads": 1, "dtype": "float16"}
    write_json(FILE, {**about, "rows": rows}, sort_keys=True)


if __name__ == "__main__":
    main()
