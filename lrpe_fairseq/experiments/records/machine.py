"""What a run file says of the machine: commit, versions, hardware and kernels."""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records import fairseq_log
from lrpe_fairseq.experiments.records.files import commit


def environment(
    logs: Iterable[Path] = (), trained_on: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return the fields ``commit``, ``versions``, ``hardware`` and ``kernels`` of a run file.

    logs: of child processes. ``kernels`` says which kernels computed their attention, and that of
    this process. trained_on: :func:`machine` of every part of the training; without it this
    process. ``machines`` has all of them and this one, if they differ. The kernels that were
    available are those of this process, so they are left out if another one trained.
    """
    from lrpe_fairseq.kernels import loader

    served: dict[str, list[str]] = {}
    for by_operation in (loader.SERVED, *map(fairseq_log.served, logs)):
        for operation, kernels in by_operation.items():
            served[operation] = sorted({*served.get(operation, ()), *kernels})
    machines: list[dict[str, Any]] = []
    for each in (*trained_on, machine()):
        if each not in machines:
            machines.append(each)
    alone = len(machines) == 1
    kernels = {**(loader.kernels_in_use() if alone else {}), "served": served}
    found = {"commit": commit(), **machines[0], "kernels": kernels}
    return found if alone else {**found, "machines": machines}


def machine() -> dict[str, Any]:
    """Return ``versions`` and ``hardware`` of this process. It uses no GPU for that."""
    # Those whose versions change results.
    packages = {"torch": "torch", "numpy": "numpy", "fairseq": "fairseq-fixed"}
    versions = {name: _version(distribution) for name, distribution in packages.items()}
    return {
        "versions": {"python": platform.python_version(), **versions},
        # The cores of this process, not of the machine: a container may have fewer.
        "hardware": {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0)), "gpus": _gpus()},
    }


UNKNOWN = {"versions": {}, "hardware": {"cpu": "unknown", "cores": 0, "gpus": []}}
"""The machine of a part of a training of which an older version stored none."""

_NAMES = (
    "import json; from torch import cuda; "
    "print(json.dumps([cuda.get_device_name(n) for n in range(cuda.device_count())]))"
)


def _gpus() -> list[str]:
    """Return the names of the GPUs that this process may use."""
    from torch import cuda  # slow to import

    if not cuda.device_count():
        return []
    if cuda.is_initialized():
        return [cuda.get_device_name(index) for index in range(cuda.device_count())]
    # Another process asks for them: a context of this one would take memory from the training.
    asked = subprocess.run([sys.executable, "-c", _NAMES], capture_output=True, text=True)
    return json.loads(asked.stdout) if asked.returncode == 0 else ["unknown"] * cuda.device_count()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    match = re.search(r"^model name\s*:(.*)", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()
