"""The share of the machine that one run may use, and how fairseq is launched on it."""

import os
import socket
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Devices:
    """The resources of one run.

    threads: CPU threads. gpus: indices; all GPUs if None. nodes: Slurm nodes, all like this one.
    """

    threads: int = 1
    gpus: tuple[int, ...] | None = None
    nodes: int = 1

    @property
    def processes(self) -> int:
        """Number of processes that fairseq starts: one per GPU."""
        visible = torch.cuda.device_count()
        mine = visible if self.gpus is None else min(visible, len(self.gpus))
        return max(1, mine) * self.nodes

    @property
    def environment(self) -> dict[str, str]:
        """Return environment variables for the child processes.

        Waiting threads sleep instead of spinning: with other work on the machine, spinning makes a
        training with two threads several times slower, and on an idle machine it gains nothing.
        torch keeps large tensors in huge pages, if Linux permits it: every update allocates the
        logits anew; on a virtual machine their page faults are a large part of a small training.
        """
        found = {"OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}
        for name, value in {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}.items():
            found[name] = os.environ.get(name, value)
        return found | self.visible

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
            *command,
            *(f"++distributed_training.{key}={value}" for key, value in group.items()),
        ]
