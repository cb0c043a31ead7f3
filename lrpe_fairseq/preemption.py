"""Save a checkpoint and exit on SIGTERM or SIGUSR1; leave a finished training as it is.

The training finishes the current update, writes ``checkpoint_last.pt`` and exits with status
:data:`SAVED`. Clusters send SIGTERM when a job is preempted, and a configurable signal before its
time limit. Stock fairseq exits at once and loses everything since the last periodic checkpoint.
There is no validation before the exit, so a resumed training equals an uninterrupted one,
including its best checkpoint.

With several GPUs fairseq starts one process per GPU. A signal ends their parent, and torch would
then interrupt them; Linux is asked to send them SIGUSR1 instead, on which they save.

Stock fairseq trains a finished checkpoint for one more update and writes it again.
"""

import ctypes
import functools
import logging
import multiprocessing
import signal
import sys
import threading
from types import FrameType
from typing import Any

import torch
from fairseq import checkpoint_utils

SAVED = 75
"""Exit status of a training that saved a checkpoint after a signal (EX_TEMPFAIL)."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends

logger = logging.getLogger(__name__)
_signaled = threading.Event()


def apply() -> None:
    """Install the handlers in ``fairseq_cli.train``. A second call does nothing.

    Importing that script starts logging, so it is patched only if it is loaded already, under its
    own name or, with ``python -m``, as ``__main__``.
    """
    for script in filter(None, map(sys.modules.get, ("fairseq_cli.train", "__main__"))):
        saves = getattr(script, "validate_and_save", None)
        if saves and not isinstance(saves, functools.partial):
            script.train = functools.partial(_train_with_handlers, script.train)
            script.validate_and_save = functools.partial(_save_if_signaled, saves)


def _train_with_handlers(train: Any, cfg: Any, trainer: Any, *arguments: Any) -> Any:
    """Run fairseq's ``train`` (one epoch) with signal handlers installed, if updates are left."""
    updates, most = trainer.get_num_updates(), cfg.optimization.max_update
    if 0 < most <= updates:
        logger.info(
            f"nothing to train: the checkpoint has {updates} of {most} updates; raise --max-update "
            "(optimization.max_update), or choose another --save-dir (checkpoint.save_dir)"
        )
        return [None], True
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, _record)
        spawned = multiprocessing.parent_process() is not None
        if spawned and torch.distributed.is_initialized():
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGUSR1))
    return train(cfg, trainer, *arguments)


def _record(number: int, frame: FrameType | None) -> None:
    _signaled.set()


def _save_if_signaled(
    validate_and_save: Any, cfg: Any, trainer: Any, task: Any, epoch_itr: Any, *rest: Any
) -> Any:
    """Run fairseq's ``validate_and_save``, then save and exit if a signal was received.

    fairseq calls it after every update.
    """
    losses, should_stop = validate_and_save(cfg, trainer, task, epoch_itr, *rest)
    if not should_stop and signaled_anywhere(trainer):
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
        signaled_anywhere(trainer)  # wait for the writing process: the first exit ends all
        logger.info(f"received a signal: saved at update {trainer.get_num_updates()}")
        raise SystemExit(SAVED)
    return losses, should_stop


def signaled_anywhere(trainer: Any) -> bool:
    """True in every process if any of them received a signal, at the same update."""
    if trainer.data_parallel_world_size == 1:
        return _signaled.is_set()
    signals = torch.tensor([float(_signaled.is_set())], device=trainer.device)
    torch.distributed.all_reduce(signals, group=trainer.data_parallel_process_group)
    return bool(signals.item())
