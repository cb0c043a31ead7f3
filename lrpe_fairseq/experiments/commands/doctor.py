"""Check this environment before a long run: ``scripts/doctor.sh``.

One line for each check; a failed one says what to do. Exit status 1 if any check failed.
"""

import importlib
import importlib.metadata
import math
import platform
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lrpe_fairseq.experiments.data.corpus import has_checksum
from lrpe_fairseq.experiments.data.folders import manifest
from lrpe_fairseq.experiments.families import known_data, preparation_of
from lrpe_fairseq.experiments.records.console import FAILED, command
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.runner.launch import BIN

FREE_GB = 20
"""Disk space that the checkpoints of one table at paper scale need at least."""

Check = Callable[[], str]


class Ailment(Exception):
    """A failed check; the text says what is wrong and what to do."""


@command("doctor")
def main() -> int:
    """Print every check; returns the exit status."""
    failed = sum(not passed(name, check) for name, check in checks())
    print(f"{failed} checks failed" if failed else "everything is in order")
    return FAILED if failed else 0


def passed(name: str, check: Check) -> bool:
    """Run one check and print its line."""
    try:
        found = check()
    except Exception as error:  # whatever breaks here would break a run
        reason = str(error) if isinstance(error, Ailment) else f"{type(error).__name__}: {error}"
        print(f"FAIL  {name}: {reason}", flush=True)
        return False
    print(f"ok    {name}: {found}", flush=True)
    return True


def checks() -> Iterator[tuple[str, Check]]:
    """Name and function of every check, in order."""
    yield "python", python
    yield "torch", torch_version
    yield "fairseq", fairseq_version
    yield "plugin", plugin
    yield "fairseq commands", commands
    yield "disk", lambda: disk(ROOT)
    for folder in known_data():
        if folder.exists():
            yield f"data/{folder.name}", lambda folder=folder: data(folder)
    yield "GPU", gpus
    for device in devices():
        yield f"a training step on {device}", lambda device=device: training_step(device)
    yield "Slurm", slurm


def python() -> str:
    """3.11 or 3.12."""
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        raise Ailment(f"{platform.python_version()}; install with make PYTHON=python3.11 install")
    return platform.python_version()


def torch_version() -> str:
    """2.6 or later, where safe loading of checkpoints is the default."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        raise Ailment(f"{torch.__version__} loads checkpoints unsafely; 2.6 or later is needed")
    return torch.__version__


def fairseq_version() -> str:
    """The version that compat.py was written for."""
    found = importlib.metadata.version("fairseq-fixed")
    if found != "0.12.3.1":
        raise Ailment(f"fairseq-fixed {found}; run make install for 0.12.3.1")
    importlib.import_module("fairseq")
    return found


def plugin() -> str:
    """Our models are known to fairseq."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    importlib.import_module("lrpe_fairseq")
    ours = sorted(name for name in ARCH_MODEL_REGISTRY if name.startswith("lrpe_"))
    if not ours:
        raise Ailment("no lrpe_ arch is registered; run make install")
    return ", ".join(ours)


def commands() -> str:
    """fairseq's scripts are installed beside this Python."""
    if not (BIN / "fairseq-hydra-train").exists():
        raise Ailment(f"{BIN} has no fairseq-hydra-train; run make install, then use {BIN}")
    return str(BIN)


def disk(folder: Path) -> str:
    """runs/ can be written, and there is space for checkpoints."""
    probe = folder / "runs" / ".doctor"
    try:
        probe.parent.mkdir(exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise Ailment(f"{probe.parent} cannot be written: {error.strerror}") from None
    free = shutil.disk_usage(folder).free / 1e9
    if free < FREE_GB:
        raise Ailment(f"{free:.0f} GB free; a table at paper scale needs {FREE_GB}")
    return f"{free:.0f} GB free"


def data(folder: Path) -> str:
    """The binarized files have the checksums of those that data-prep wrote."""
    steps = manifest(folder).get("steps", {})
    written = {f: s for step in steps.values() for f, s in step.get("writes", {}).items()}
    binary = {f: s for f, s in written.items() if f.startswith("bin/")}
    damaged = [f for f, s in binary.items() if not _intact(folder / f, s)]
    if damaged or not binary:
        what = f"{', '.join(damaged)} differs from what was written" if damaged else "unfinished"
        raise Ailment(f"{what}; run {shlex.join(preparation_of(folder))} again")
    return f"{len(binary)} files intact"


def gpus() -> str:
    """Every GPU by name; with several GPUs, NCCL must be available."""
    count = torch.cuda.device_count()
    if not count:
        return "none; runs use the CPU"
    if count > 1 and not torch.distributed.is_nccl_available():
        raise Ailment("this torch has no NCCL; install a CUDA build: make TORCH=... install")
    return ", ".join(torch.cuda.get_device_name(index) for index in range(count))


def devices() -> list[str]:
    """The devices that a training can use."""
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def training_step(device: str) -> str:
    """One update of ``lrpe_lm_tiny`` under each attention; its loss is finite before and after."""
    losses = [_losses(device, attention) for attention in ("linear", "softmax")]
    if not all(math.isfinite(loss) for pair in losses for loss in pair):
        raise Ailment(f"losses {losses}; run make test to see what is broken")
    return "; ".join(f"loss {before:.3f} -> {after:.3f}" for before, after in losses)


def slurm() -> str:
    """Is --slurm available? It is optional."""
    if not shutil.which("sbatch"):
        return "not here; --slurm is not available"
    done = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True)
    if done.returncode:
        return "installed, but no cluster answers; --slurm is not available from here"
    return f"{len(done.stdout.splitlines())} partitions and states; see sinfo"


def _intact(path: Path, checksum: str) -> bool:
    return path.exists() and has_checksum(path, checksum)


def _losses(device: str, attention: str) -> tuple[float, float]:
    """Cross entropy of 2 x 64 random tokens before and after one step of SGD."""
    from fairseq.data import Dictionary

    from lrpe_fairseq.models.language_model import LRPELanguageModelTiny as Tiny
    from lrpe_fairseq.models.language_model import LRPELanguageModelTinyConfig as Config

    words = Dictionary()
    for index in range(100):
        words.add_symbol(str(index))
    torch.manual_seed(0)
    length = {"tokens_per_sample": 64, "max_target_positions": 64}
    options = Config(attention_type=attention, dropout=0.0, **length)
    task = Namespace(source_dictionary=words, target_dictionary=words, output_dictionary=words)
    model = Tiny.build_model(options, task).to(device)
    tokens = torch.randint(4, len(words), (2, 65), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        scores = model(tokens[:, :-1])[0].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(scores, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[1]


if __name__ == "__main__":
    sys.exit(main())
