"""Check this environment before a long run: ``scripts/doctor.sh``.

Prints one line per check and, for a failed check, what to do. The exit status is 1 if any check
fails. torch, fairseq and this package are imported only by the checks that need them, so that the
script also runs where one of them is missing or broken.
"""

import importlib
import importlib.metadata
import logging
import math
import platform
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

SUMMARY = "Check this environment before a long run; name what to do for every failed check."
ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
FAIRSEQ = "0.12.3.1"
FREE_GB = 20
"""Minimum disk space in GB for the checkpoints of one table at paper scale."""

DEFAULT_TORCH = "make TORCH=torch==2.13.0 install"
OLDER_GPUS = "torch==2.10.0 for a compute capability up to 7.2, torch==2.6.0 up to 6.2"
NO_CODE = "no kernel image is available"  # the error of a torch without code for a GPU

Check = Callable[[], str]
Named = Iterator[tuple[str, Check]]


class CheckFailed(Exception):
    """A failed check; the message says what is wrong and what to do."""


def main(arguments: Sequence[str] = ()) -> int:
    """Run and print every check; return the exit status."""
    parser = ArgumentParser(prog="scripts/doctor.sh", description=SUMMARY)
    parser.parse_args(arguments)
    failed = _failed(basics())
    if failed:
        print(f"{failed} failed; the other checks depend on these and were not run")
        return 1
    failed = _failed(checks())
    print(f"{failed} failed" if failed else "all checks passed")
    return 1 if failed else 0


def passed(name: str, check: Check) -> bool:
    """Run one check and print its line. Returns True if it passed."""
    try:
        found = check()
    except Exception as error:  # any exception here would also break a run
        reason = str(error) if isinstance(error, CheckFailed) else _first_line(error)
        print(f"FAIL  {name}: {reason}", flush=True)
        return False
    print(f"ok    {name}: {found}", flush=True)
    return True


def basics() -> Named:
    """Yield name and function of the checks that all others depend on."""
    yield "python", python
    yield "torch", torch_version
    yield "fairseq", fairseq_version
    yield "checkout", checkout


def checks() -> Named:
    """Yield name and function of the other checks, in order."""
    yield "plugin", plugin
    yield "fairseq commands", commands
    yield "disk", lambda: disk(ROOT)
    yield "GPU", gpus
    for device in devices():
        yield f"a training step on {device}", lambda device=device: training_step(device)


def python() -> str:
    """Require Python 3.11 or 3.12."""
    found = platform.python_version()
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        raise CheckFailed(f"{found}; install with make PYTHON=python3.11 install")
    return found


def torch_version() -> str:
    """Require torch 2.6 or later, which loads checkpoints safely by default."""
    found = _import("torch").__version__
    if tuple(map(int, found.split(".")[:2])) < (2, 6):
        raise CheckFailed(f"{found} loads checkpoints unsafely; 2.6 or later is needed")
    return found


def fairseq_version() -> str:
    """Require the version that compat.py supports, with its compiled modules."""
    try:
        found = importlib.metadata.version("fairseq-fixed")
    except importlib.metadata.PackageNotFoundError:
        raise CheckFailed("fairseq-fixed is not installed; run make install") from None
    if found != FAIRSEQ:
        raise CheckFailed(f"fairseq-fixed {found}; run make install for {FAIRSEQ}")
    # its speech task prints a request for tensorboardX on import, which is not needed
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    _import("fairseq.data.data_utils_fast")
    return found


def checkout() -> str:
    """Require the configurations and scripts, which a wheel does not contain."""
    from lrpe_fairseq.experiments.records.files import require_checkout

    try:
        require_checkout(ROOT)
    except ValueError as error:
        raise CheckFailed(str(error)) from None
    return str(ROOT)


def plugin() -> str:
    """Require that the models are registered with fairseq."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    importlib.import_module("lrpe_fairseq")
    ours = sorted(name for name in ARCH_MODEL_REGISTRY if name.startswith("lrpe_"))
    if not ours:
        raise CheckFailed("no lrpe_ arch is registered; run make install")
    return ", ".join(ours)


def commands() -> str:
    """Require fairseq's scripts in the folder of this Python."""
    if not (BIN / "fairseq-hydra-train").exists():
        raise CheckFailed(f"{BIN} has no fairseq-hydra-train; run make install, then use {BIN}")
    return str(BIN)


def disk(folder: Path) -> str:
    """Require free space for checkpoints, and write permission."""
    probe = folder / "runs" / ".doctor"
    try:
        probe.parent.mkdir(exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise CheckFailed(f"{probe.parent} cannot be written: {error.strerror}") from None
    free = shutil.disk_usage(folder).free / 1e9
    if free < FREE_GB:
        raise CheckFailed(f"{free:.0f} GB free; a table at paper scale needs {FREE_GB}")
    return f"{free:.0f} GB free"


def gpus() -> str:
    """List the GPUs; require NCCL for several."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        return "none; runs use the CPU"
    if count > 1 and not torch.distributed.is_nccl_available():
        raise CheckFailed(f"this torch has no NCCL; install a CUDA build: {DEFAULT_TORCH}")
    return ", ".join(torch.cuda.get_device_name(index) for index in range(count))


def devices() -> list[str]:
    """Return the devices that a training can use."""
    import torch

    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def training_step(device: str) -> str:
    """Train one layer for one update per attention type; losses must be finite."""
    try:
        losses = [_losses(device, attention) for attention in ("linear", "softmax")]
    except RuntimeError as error:
        if NO_CODE in str(error):
            raise CheckFailed(
                f"this torch has no code for it; run {DEFAULT_TORCH}, with {OLDER_GPUS}"
            ) from None
        raise
    if not all(math.isfinite(loss) for pair in losses for loss in pair):
        raise CheckFailed(f"losses {losses}; run make test to find the defect")
    return "; ".join(f"loss {before:.3f} -> {after:.3f}" for before, after in losses)


def _failed(named: Named) -> int:
    return sum(not passed(name, check) for name, check in named)


def _import(name: str) -> ModuleType:
    """Import a module. Raises: CheckFailed if it is missing or broken."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken binary raises OSError, RuntimeError and others
        package = name.split(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        problem = "is not installed" if missing else f"does not import ({_first_line(error)})"
        raise CheckFailed(f"{package} {problem}; run make install") from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _losses(device: str, attention: str) -> tuple[float, float]:
    """Return the squared error of one layer before and after one step of SGD."""
    import torch

    from lrpe_fairseq.attention.multihead import MultiheadAttention

    torch.manual_seed(0)
    choices = {"attention_type": attention, "position_encoding": "lrpe-type2"}
    layer = MultiheadAttention(64, 2, causal=True, **choices).to(device)
    x, wanted = torch.randn(2, 2, 64, 64, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = (layer.attend(x)[0] - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
