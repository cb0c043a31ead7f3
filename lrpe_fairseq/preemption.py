"""A training that is told to end saves first: on SIGTERM or SIGUSR1 it finishes the update it is
at, writes ``checkpoint_last.pt`` and exits with status :data:`SAVED`.

Clusters send SIGTERM when a job is preempted and a signal of one's choice before its time is up;
stock fairseq dies of either and loses everything since the last periodic checkpoint. Nothing is
validated on the way, so that the resumed training equals an uninterrupted one, its best
checkpoint included.
"""

import functools
import logging
import signal
import sys
import threading
from types import FrameType
from typing import Any

import torch
from fairseq import checkpoint_utils

SAVED = 75
"""Exit status of a training that saved and ended because it was told to (EX_TEMPFAIL)."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

logger = logging.getLogger(__name__)
_told = threading.Event()


def apply() -> None:
    """Have ``fairseq_cli.train`` listen while it trains; a second call changes nothing.

    It is a script that starts logging on import, so it is left alone where it does not run;
    ``python -m`` calls it ``__main__``.
    """
    for script in filter(None, map(sys.modules.get, ("fairseq_cli.train", "__main__"))):
        saves = getattr(script, "validate_and_save", None)
        if saves and not isinstance(saves, functools.partial):
            script.train = functools.partial(_listening, script.train)
            script.validate_and_save = functools.partial(_save_if_told, saves)


def _listening(train: Any, *arguments: Any) -> Any:
    """fairseq's ``train``, one epoch, with handlers for the signals."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, _note)
    return train(*arguments)


def _note(number: int, frame: FrameType | None) -> None:
    _told.set()


def _save_if_told(
    validate_and_save: Any, cfg: Any, trainer: Any, task: Any, epoch_itr: Any, *rest: Any
) -> Any:
    """fairseq's ``validate_and_save``, called after every update."""
    losses, should_stop = validate_and_save(cfg, trainer, task, epoch_itr, *rest)
    if not should_stop and told_anywhere(trainer):
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
        told_anywhere(trainer)  # wait for the process that writes: the end of one ends all
        logger.info(f"told to end: saved at update {trainer.get_num_updates()}")
        raise SystemExit(SAVED)
    return losses, should_stop


def told_anywhere(trainer: Any) -> bool:
    """Whether any process of the training was told; all of them learn it at the same update."""
    if trainer.data_parallel_world_size == 1:
        return _told.is_set()
    told = torch.tensor([float(_told.is_set())], device=trainer.device)
    torch.distributed.all_reduce(told, group=trainer.data_parallel_process_group)
    return bool(told.item())
