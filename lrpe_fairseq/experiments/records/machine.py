"""What a run file says of the machine: commit, versions, hardware and kernels."""

import importlib.metadata
import os
import platform
import re
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
    process. ``machines`` has all of them and this one, if they differ.
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
    first = machines[0]
    found = {"commit": commit(), **first, "kernels": {**first["kernels"], "served": served}}
    return found | ({"machines": machines} if len(machines) > 1 else {})


def machine() -> dict[str, Any]:
    """Return ``versions``, ``hardware`` and the available ``kernels`` of this process."""
    from torch import cuda  # slow to import

    from lrpe_fairseq.kernels import loader

    # Those whose versions change results.
    packages = {"torch": "torch", "numpy": "numpy", "fairseq": "fairseq-fixed"}
    versions = {name: _version(distribution) for name, distribution in packages.items()}
    gpus = [cuda.get_device_name(index) for index in range(cuda.device_count())]
    return {
        "versions": {"python": platform.python_version(), **versions},
        # The cores of this process, not of the machine: a container may have fewer.
        "hardware": {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0)), "gpus": gpus},
        "kernels": loader.kernels_in_use(),
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    match = re.search(r"^model name\s*:(.*)", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()
