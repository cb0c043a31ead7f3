"""How fairseq is launched on a share of the machine, with updates of the size of one process.

The size of an update is batch x gradient accumulation x processes. Accumulation is divided by the
number of processes first, then the batch.
"""

import math
import os
import re
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

BIN = Path(sys.executable).parent
"""The folder of fairseq's scripts."""
UNITS = {"max_tokens": "tokens", "batch_size": "samples"}
"""The limits of a batch in the dataset section -> what they count."""
LENGTHS = ("tokens_per_sample", "max_source_positions", "max_target_positions", "max_positions")
FAIRSEQ_LONGEST = 1024
"""fairseq's default of LENGTHS."""
FAIRSEQ_MULTIPLE = 8
"""fairseq's default of ``required_batch_size_multiple``."""


@dataclass(frozen=True)
class Devices:
    """The resources of one run: cores, GPUs (None: all), and Slurm nodes like this one."""

    threads: int = 1
    gpus: tuple[int, ...] | None = None
    nodes: int = 1

    @property
    def processes(self) -> int:
        """Number of processes that fairseq starts: one per GPU."""
        return self._of_a_node * self.nodes

    @property
    def _of_a_node(self) -> int:
        visible = torch.cuda.device_count()
        mine = visible if self.gpus is None else min(visible, len(self.gpus))
        # Without a GPU there is one process.
        return max(1, mine)

    @property
    def environment(self) -> dict[str, str]:
        """Return environment variables for the child processes.

        Processes share the cores. Waiting threads sleep instead of spinning: with other work on the
        machine, spinning makes a training with two threads several times slower, and on an idle
        machine it gains nothing.
        torch keeps large tensors in huge pages, if Linux permits it: every update allocates the
        logits anew; on a virtual machine their page faults are a large part of a small training.
        """
        each = max(1, self.threads // self._of_a_node)
        variables = {"OMP_NUM_THREADS": str(each), "PYTHONUNBUFFERED": "1"}
        for name, value in {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}.items():
            # What the user has set stays.
            variables[name] = os.environ.get(name, value)
        return variables | self.visible

    @property
    def visible(self) -> dict[str, str]:
        """Return the variable that restricts a process to these GPUs; empty for all GPUs.

        Indices count the GPUs that this process sees, which may be restricted already.
        """
        if self.gpus is None:
            return {}
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = dict(enumerate(seen.split(",") if seen else []))
        mine = [names.get(index, str(index)) for index in self.gpus]
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}

    def parts(self) -> list["Devices"]:
        """Return these devices, and on a single node also those with fewer and fewer of the GPUs.

        Nodes are not left out: fairseq counts the processes of all nodes of a job.
        """
        gpus = self.gpus or tuple(range(torch.cuda.device_count()))
        fewer = range(len(gpus) - 1, 0, -1) if self.nodes == 1 else ()
        return [self, *(replace(self, gpus=gpus[:count]) for count in fewer)]

    def launch(self, command: list[str]) -> list[str]:
        """Return the command that runs the training ``command``, of all processes, on every node.

        With GPUs, fairseq forms the process group from Slurm's variables. Without GPUs it counts
        no processes, so the rank of each process is passed on the command line.
        """
        if self.nodes == 1:
            return command
        port = 20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000
        # Every job of a node needs a port of its own.
        group: dict[str, Any] = {"distributed_port": port}
        if not torch.cuda.is_available():
            group = {
                "distributed_init_method": f"tcp://{socket.gethostname()}:{port}",
                "distributed_no_spawn": True,
                "distributed_backend": "gloo",
                "ddp_backend": "legacy_ddp",
            }
            ranked = 'exec "$@" ++distributed_training.distributed_rank=$SLURM_PROCID'
            command = ["bash", "-c", ranked, "rank", *command]
        return [
            *("srun", f"--nodes={self.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"),
            f"--cpus-per-task={self.threads}",  # srun does not take it from the job
            *command,
            *(f"++distributed_training.{key}={value}" for key, value in group.items()),
        ]


def hydra_override(key: str, value: str) -> str:
    """Return ``++key=value`` in hydra's grammar, which sets a key that the YAML may lack."""
    # Plain words need no quotes, and commands that are printed stay readable.
    if re.fullmatch(r"[\w./:+-]+|\[[\w.,+-]*\]", value):
        return f"++{key}={value}"
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"++{key}='{escaped}'"


def parse_overrides(overrides: tuple[str, ...]) -> dict[str, str]:
    """Parse ``section.key=value`` words. Raises: ValueError for any other word."""
    values = {}
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals or "." not in key:
            raise ValueError(f"an override is section.key=value, not {word!r}")
        values[key] = value
    return values


def divided(settings: Any, processes: int) -> dict[str, str]:
    """Return the accumulation and the batch with which ``processes`` keep the size of an update.

    With BatchNorm accumulation stays, so that its statistics are over as many samples as before.

    Raises: ValueError if the processes cannot have equal parts.
    """
    if sizes := division(settings, processes):
        return sizes
    raise ValueError(
        f"{processes} processes cannot have equal parts of {described(settings)}: use another "
        "number of GPUs, or another batch"
    )


def described(settings: Any) -> str:
    """Return the size of an update in words."""
    key, size = next(iter(_limits(settings).items()))
    return f"an update of {size * _frequency(settings):,} {UNITS[key]}"


def division(settings: Any, processes: int) -> dict[str, str]:
    """Return what :func:`divided` does; empty if the processes cannot have equal parts."""
    frequency = _frequency(settings)
    limits = _limits(settings)
    with_batch_norm = settings.model.get("norm") == "batch"
    fewest = frequency if with_batch_norm else math.ceil(frequency / processes)
    for each in range(fewest, frequency + 1):
        batches = each * processes
        sizes = {key: size * frequency // batches for key, size in limits.items()}
        # The first that fits has the fewest, largest batches.
        if all(_is_equal(settings, key, size, batches) for key, size in sizes.items()):
            smaller = {f"dataset.{k}": str(n) for k, n in sizes.items() if n != limits[k]}
            return {"optimization.update_freq": f"[{each}]", **smaller}
    return {}


def _is_equal(settings: Any, key: str, size: int, batches: int) -> bool:
    """True if ``batches`` batches of ``size`` have the samples of the configuration's update."""
    whole = _limits(settings)[key]
    frequency = _frequency(settings)
    if size == whole or size * batches != whole * frequency:
        return size == whole
    task = settings.task
    if key == "max_tokens" and not task.get("tokens_per_sample"):
        return size >= _longest(task)
    if size % 2 and (task.get("mixup") or task.get("cutmix")):  # they need pairs
        return False
    samples = _samples(settings, key, whole) * frequency
    return _samples(settings, key, size) * batches == samples


def _samples(settings: Any, key: str, size: int) -> int:
    """Return how many samples, or blocks of a text, fairseq puts into a batch of ``size``."""
    count = size if key == "batch_size" else size // settings.task.tokens_per_sample
    multiple = settings.dataset.get("required_batch_size_multiple", FAIRSEQ_MULTIPLE)
    # fairseq rounds a batch down to a multiple, so halves of a batch may lose samples.
    return count if count < multiple else count // multiple * multiple


def _longest(task: Any) -> int:
    """Return the longest sample that is trained on: fairseq leaves out those above a batch."""
    return max((task[name] for name in LENGTHS if task.get(name)), default=FAIRSEQ_LONGEST)


def _frequency(settings: Any) -> int:
    return int(settings.optimization.update_freq[0])


def _limits(settings: Any) -> dict[str, int]:
    return {key: int(size) for key in UNITS if (size := settings.dataset.get(key))}
