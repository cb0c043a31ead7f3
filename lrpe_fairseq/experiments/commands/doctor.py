"""Check this environment before a long run: ``scripts/doctor.sh``, and ``--kernels`` on a GPU.

Prints one line per check. The exit status is 1 if any check fails. torch, fairseq and this package
are imported only by the checks that need them, so that the script also runs where one of them is
missing or broken.
"""

import importlib
import importlib.metadata
import logging
import math
import platform
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

SUMMARY = "Check this environment before a long run."
REPAIR = "make install repairs packages; docs/installing.md says which torch has code for which GPU"
ROOT = Path(__file__).resolve().parents[3]
FAIRSEQ = "0.12.3.1"
FORMS = ("linear", "none"), ("linear", "fox"), ("softmax", "gated:lrpe-type2")
FREE_GB = 20
"""Minimum disk space in GB for the checkpoints of one table at paper scale."""


def main(arguments: Sequence[str] = ()) -> int:
    """Run and print every check; return the exit status."""
    parser = ArgumentParser(prog="scripts/doctor.sh", description=SUMMARY)
    parser.add_argument("--kernels", action="store_true", help="check every Triton kernel instead")
    parser.add_argument("--out", type=Path, help="with --kernels: a JSON file of what was found")
    options = parser.parse_args(arguments)
    if options.out and not options.kernels:
        parser.error("--out needs --kernels")
    if options.kernels:
        return kernels(options.out)
    failed = sum(not passed(name, check) for name, check in CHECKS.items())
    print(f"{failed} failed: {REPAIR}" if failed else "all checks passed")
    return 1 if failed else 0


def passed(name: str, check: Callable[[], str]) -> bool:
    """Run one check and print its line. Returns True if it passed."""
    try:
        print(f"ok    {name}: {check()}", flush=True)
    except Exception as error:  # any exception here would also break a run
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"FAIL  {name}: {reason}", flush=True)
        return False
    return True


def versions() -> str:
    """Require Python 3.11 or 3.12, a torch that loads checkpoints safely, and our fairseq."""
    import torch

    installed = {"Python": platform.python_version(), "torch": torch.__version__}
    installed["fairseq"] = importlib.metadata.version("fairseq-fixed")
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        raise ValueError(f"Python {installed['Python']}; 3.11 or 3.12 is needed")
    if tuple(map(int, installed["torch"].split(".")[:2])) < (2, 6):
        raise ValueError(f"torch {installed['torch']}; 2.6 or later is needed")
    if installed["fairseq"] != FAIRSEQ:
        raise ValueError(f"fairseq-fixed {installed['fairseq']}; {FAIRSEQ} is needed")
    return ", ".join(f"{name} {version}" for name, version in installed.items())


def plugin() -> str:
    """Require fairseq's compiled modules and commands, our models and the checkout."""
    # its speech task prints a request for tensorboardX on import, which is not needed
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    importlib.import_module("fairseq.data.data_utils_fast")
    importlib.import_module("lrpe_fairseq")
    from fairseq.models import ARCH_MODEL_REGISTRY

    from lrpe_fairseq.experiments.records.files import require_checkout

    require_checkout(ROOT)
    if not (Path(sys.executable).parent / "fairseq-hydra-train").exists():
        raise ValueError(f"there is no fairseq-hydra-train beside {sys.executable}")
    return ", ".join(sorted(name for name in ARCH_MODEL_REGISTRY if name.startswith("lrpe_")))


def disk() -> str:
    """Require free space for checkpoints, and write permission."""
    probe = ROOT / "runs" / ".doctor"
    probe.parent.mkdir(exist_ok=True)
    # Free space alone does not say that the folder can be written.
    probe.write_text("")
    probe.unlink()
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < FREE_GB:
        raise ValueError(f"{free:.0f} GB free; a table at paper scale needs {FREE_GB}")
    return f"{free:.0f} GB free"


def training() -> str:
    """Compare the gradients of a layer, on a GPU in half precision, with float64 on the CPU.

    Raises: ValueError for a wrong gradient, or for several GPUs without NCCL.
    """
    import torch

    from lrpe_fairseq.attention.multihead import MultiheadAttention

    count = torch.cuda.device_count()
    findings = []
    if count > 1 and not torch.distributed.is_nccl_available():
        raise ValueError(f"{count} GPUs, but this torch has no NCCL")
    # float16 overflows in sums that bfloat16 holds; older GPUs have only the former.
    half = torch.bfloat16 if count and torch.cuda.get_device_capability() >= (8,) else torch.float16
    for device, dtype in (("cpu", torch.float32), *((f"cuda:{n}", half) for n in range(count))):
        for attention, name in FORMS:
            choices = {"attention_type": attention, "position_encoding": name}
            layer = MultiheadAttention(128, 2, causal=True, **choices)
            grads = []
            # 100 is no multiple of a block: the ends of kernels are tested too.
            x = torch.randn(2, 100, 128, dtype=dtype)
            for at, kind in ((device, dtype), ("cpu", torch.float64)):
                layer.to(at, kind).zero_grad()
                layer.attend(x.to(at, kind))[0].square().sum().backward()
                grads.append(torch.cat([p.grad.flatten().cpu() for p in layer.parameters()]))
            error = ((grads[0] - grads[1]).norm() / grads[1].norm()).item()
            findings.append(f"{attention} attention of {name} on {device}: error {error:.1e}")
            # "not <" also fails for nan.
            if not error < 0.1:
                raise ValueError(f"{findings[-1]}; run make test to find the defect")
    return "; ".join(findings)


def kernels(out: Path | None = None) -> int:
    """Check every family of Triton kernels; return 1 if one is wrong, or none can be checked.

    out: a JSON file for what was found, with the machine and the versions.
    """
    from lrpe_fairseq.experiments.records.files import require_writable, write_json
    from lrpe_fairseq.experiments.runner import kernel_checks

    lacking = kernel_checks.why_not()
    if lacking:
        print(f"FAIL  the Triton kernels cannot be checked: {lacking}")
        return 1
    if out:
        require_writable(out.absolute().parent, "--out", out)
        stated = _stated()
    print(HEADER, flush=True)
    failed, rows = 0, []
    for name, found in kernel_checks.findings():
        wrong = isinstance(found, str) or not found.passed
        failed += wrong
        rows.append({"check": name, "passed": not wrong, **_row(found)})
        if out:  # after every check: a later one may end this process
            write_json(out, {**stated, "rows": rows}, sort_keys=True)
        print(f"{'FAIL' if wrong else 'ok':5} {name:22} {_line(found)}", flush=True)
    print(_to_report(failed, len(kernel_checks.CHECKS)))
    return 1 if failed else 0


def _stated() -> dict[str, Any]:
    """Return what a file of checks says of the machine."""
    import torch

    from lrpe_fairseq.experiments.records import kernel_sources
    from lrpe_fairseq.experiments.records.machine import environment
    from lrpe_fairseq.kernels import proof

    found = {**environment(), "sources": kernel_sources.hashes()}
    found["versions"]["triton"] = proof.triton_version()
    dtype = "bfloat16" if torch.cuda.is_available() else "float16"
    return {"part": "doctor", **found, "dtype": dtype, "threads": torch.get_num_threads()}


def _row(found: Any) -> dict[str, Any]:
    """Return what a check has found as JSON, which knows no nan."""
    if isinstance(found, str):
        return {"reason": found}
    errors = {name: x if math.isfinite(x) else str(x) for name, x in found.errors.items()}
    return {**asdict(found), "errors": errors}


HEADER = f"{'':5} {'check':22} {'served':18} {'ms':>9} {'PyTorch':>9}  relative errors"
REPORT = "report this whole output, with the following line and what changed since it passed"


def _line(found: Any) -> str:
    """Return what a check has found, or why it found nothing, on one line."""
    if isinstance(found, str):
        return found
    errors = ", ".join(f"{name} {error:.0e}" for name, error in found.errors.items())
    times = f"{_time(found.milliseconds)} {_time(found.pytorch)}"
    reason = f"; {found.reason}" if found.reason else ""
    return f"{found.served:18} {times}  {errors} (bound {found.bound:.0e}){reason}"


def _time(x: float | None) -> str:
    text = "–" if x is None else f"{x:.2f}"
    return f"{text:>9}"


def _to_report(failed: int, count: int) -> str:
    """Return the last lines: how many checks failed, and on what."""
    import torch

    from lrpe_fairseq.kernels import proof

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    versions = f"torch {torch.__version__}, Triton {proof.triton_version()}"
    python = f"Python {platform.python_version()}"
    said = f"{failed} of {count} failed: {REPORT}" if failed else f"all {count} checks passed"
    return f"{said}\n{proof.card(device)}, {versions}, {python}; scripts/doctor.sh --kernels"


CHECKS: dict[str, Callable[[], str]] = {
    "versions": versions,
    "plugin": plugin,
    "disk": disk,
    "training steps": training,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
