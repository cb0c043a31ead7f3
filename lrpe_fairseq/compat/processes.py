"""Several processes: what they gather, what they save, and how they end."""

import atexit
import os
from collections.abc import Callable
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.criterions.sentence_prediction import SentencePredictionCriterion
from fairseq.distributed import utils as distributed_utils

from lrpe_fairseq.compat.patching import replace_once
from lrpe_fairseq.errors import refuse


def gather_predictions() -> None:
    """Validate GLUE tasks by F1, Matthews or Pearson correlation under several processes.

    Break: ``SentencePredictionCriterion`` logs the predictions of a batch as a list, but states
    that its logs can be summed over processes, so that the first validation raises TypeError. The
    fix gathers the logs; ``distributed.utils.all_gather_list`` needs a GPU for that, and torch's
    own function, which processes over gloo call instead, does not.
    """
    if SentencePredictionCriterion.logging_outputs_can_be_summed():
        # the trainer asks the class
        SentencePredictionCriterion.logging_outputs_can_be_summed = staticmethod(lambda: False)
    replace_once(distributed_utils, "all_gather_list", _gather_objects)


def save_the_state_of_every_process() -> None:
    """Let a task collect what its processes know before the first of them saves a checkpoint.

    Break: of several processes fairseq asks the task of the first one only for its part of the
    checkpoint. A task with the method ``before_checkpoint(trainer)`` has it called in all.
    """
    replace_once(checkpoint_utils, "save_checkpoint", _save_of_all_processes)


def leave_the_process_group() -> None:
    """Leave the process group before Python ends, when processes communicate through gloo.

    Break: ``fairseq-train`` never calls ``destroy_process_group``. The threads of gloo then release
    tensors while the interpreter is torn down, and a training that has finished often aborts with
    "terminate called without an active exception" and a non-zero status.
    """
    atexit.register(_destroy_gloo_group)  # runs before the interpreter is torn down


OF_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
"""What torchrun sets in the environment of every process."""


def join_the_processes_of_torchrun() -> None:
    """Let ``torchrun fairseq-train`` start one training in several processes, on CPUs too.

    Break: fairseq reads the group that torchrun describes in the environment only where it sees
    several GPUs, and divides by the number of GPUs. Processes on CPUs, or with one GPU each, train
    unrelated models in one folder. The fix joins the group in every case, and chooses gloo and
    ``legacy_ddp`` without GPUs; the update has the tokens of all processes.
    """
    replace_once(distributed_utils, "infer_init_method", _infer_from_torchrun)


def refuse_unrelated_processes() -> None:
    """Stop if a launcher started several processes without a process group.

    ``torchrun fairseq-train`` starts *independent* trainings, which overwrite each other's
    checkpoints.
    Raises: Refusal, which names the script that starts them together.
    """
    # torchrun sets both; a scheduler may set WORLD_SIZE alone
    started = int(os.environ.get("WORLD_SIZE", "1"))
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    if started > 1 and "RANK" in os.environ and not joined:
        refuse(
            f"{started} processes were started without a process group, so they "
            "would train unrelated models in one folder; start them with scripts/train.sh"
        )


def _gather_objects(
    original: Callable, data: Any, group: Any = None, max_size: int = 16384
) -> list:
    if torch.distributed.get_backend() != "gloo":
        return original(data, group, max_size)
    group = distributed_utils.get_global_group() if group is None else group
    gathered = [None] * distributed_utils.get_world_size(group=group)
    torch.distributed.all_gather_object(gathered, data, group=group)
    return gathered


def _save_of_all_processes(original: Callable, cfg: Any, trainer: Any, *args: Any) -> Any:
    collect = getattr(trainer.task, "before_checkpoint", None)
    # every process comes here, also those that fairseq lets return without saving
    if collect is not None and not cfg.no_save:
        collect(trainer)
    return original(cfg, trainer, *args)


def _destroy_gloo_group() -> None:
    """Destroy the process group of this process, if it has one that uses gloo."""
    distributed = torch.distributed
    grouped = distributed.is_available() and distributed.is_initialized()
    if grouped and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def _infer_from_torchrun(original: Callable, cfg: Any, *args: Any, **kwargs: Any) -> None:
    joined = all(name in os.environ for name in OF_TORCHRUN)
    alone = not joined or int(os.environ["WORLD_SIZE"]) == 1
    if alone or cfg.tpu or cfg.distributed_init_method is not None:
        original(cfg, *args, **kwargs)
        return
    cfg.distributed_init_method = "env://"
    cfg.distributed_world_size = int(os.environ["WORLD_SIZE"])
    cfg.distributed_rank = int(os.environ["RANK"])
    cfg.distributed_no_spawn = True
    cfg.device_id = int(os.environ["LOCAL_RANK"]) if torch.cuda.is_available() else 0
    if not torch.cuda.is_available():
        cfg.distributed_backend, cfg.ddp_backend = "gloo", "legacy_ddp"
