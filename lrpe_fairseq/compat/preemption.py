"""Save a checkpoint and exit on SIGINT (Ctrl-C), SIGTERM or SIGUSR1; leave a finished training as
it is.

The training finishes the current update, writes ``checkpoint_last.pt`` and exits with status
:data:`SAVED`. Clusters send SIGTERM when a job is preempted, and a configurable signal before its
time limit. Stock fairseq exits at once and loses everything since the last periodic checkpoint.
There is no validation before the exit, so a resumed training equals an uninterrupted one,
including its best checkpoint.

A second SIGINT or SIGTERM ends the process at once. Programs often send one signal twice:
``timeout`` to the process and to its group, a terminal and a launcher to every process. Signals
less than :data:`TOGETHER` seconds after the first are therefore the first one.

With several GPUs fairseq starts one process per GPU. A signal ends their parent, and torch would
then interrupt them; Linux is asked to send them SIGUSR1 instead, on which they save. Ctrl-C reaches
the processes that load data, too; they ignore it, because the training still needs them.

Of several processes, those that lose another one end with one sentence, not with an error of the
communication library.

Stock fairseq trains a finished checkpoint for one more update and writes it again.
"""

import ctypes
import functools
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from fairseq import checkpoint_utils

SAVED = 75
"""Exit status of a training that saved a checkpoint after a signal (EX_TEMPFAIL)."""
TOGETHER = 0.5
"""Seconds after the first signal in which further ones do not count."""

STOPPING = (signal.SIGINT, signal.SIGTERM)
SIGNALS = (*STOPPING, signal.SIGUSR1)
LOST = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe", re.IGNORECASE)
"""Errors of torch.distributed whose other processes are gone; they have no type of their own."""
PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends

logger = logging.getLogger(__name__)
_signaled = threading.Event()


class _Handlers:
    """The signal handlers of this process while it trains.

    process: its id; data-loading workers inherit the handlers. speaks: whether it answers a signal
    with a line. first: when the first of STOPPING was received. before: the handlers that were
    replaced.
    """

    def __init__(self) -> None:
        self.process = 0
        self.speaks = True
        self.first: float | None = None
        self.before: dict[signal.Signals, Any] = {}

    def install(self, *, interrupt: bool, speaks: bool) -> None:
        """Record signals from now on. interrupt: also SIGINT.

        A shell lets programs in the background ignore SIGINT; that stays.
        """
        self.process = os.getpid()
        self.speaks = speaks
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        for number in SIGNALS:
            if number == signal.SIGINT and (ignored or not interrupt):
                continue
            known = signal.signal(number, self.record)
            # the first handlers are kept: this is called in every epoch
            if known != self.record:
                self.before.setdefault(number, known)

    def shield_workers(self) -> None:
        """Let processes that are started from now on ignore SIGINT; this one stops at it."""
        self.process = os.getpid()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.before[signal.SIGINT] = signal.default_int_handler
            signal.signal(signal.SIGINT, self.interrupt)

    def restore(self) -> None:
        """Put back the handlers of before, and forget the signals received."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}
        self.first = None
        _signaled.clear()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Stop, before there is anything to save."""
        # a worker that loads data has inherited this handler, and goes on
        if os.getpid() == self.process:
            signal.default_int_handler(number, frame)

    def record(self, number: int, frame: FrameType | None) -> None:
        """Record a first signal; end the process at the second."""
        if os.getpid() != self.process:
            return
        now = time.monotonic()
        again = number in STOPPING and self.first is not None
        if again and now - self.first > TOGETHER:
            # ends as a process that has no handler, so that a shell sees the signal
            signal.signal(number, signal.SIG_DFL)
            os.kill(self.process, number)
        if number in STOPPING and not again:
            self.first = now
            self._answer(number)
        _signaled.set()

    def _answer(self, number: int) -> None:
        """Say what happens. ``print`` may be interrupted by this very handler, and then fails."""
        name = signal.Signals(number).name
        said = f"{name}: saving a checkpoint after this update; a second signal stops at once"
        if self.speaks:  # of several processes only the first
            os.write(2, f"\nlrpe_fairseq: {said}\n".encode())


_handlers = _Handlers()


def apply() -> None:
    """Install the handlers in ``fairseq_cli.train``. A second call does nothing.

    Importing that script starts logging, so it is patched only if it is loaded already, under its
    own name or, with ``python -m``, as ``__main__``.
    """
    for script in filter(None, map(sys.modules.get, ("fairseq_cli.train", "__main__"))):
        saves = getattr(script, "validate_and_save", None)
        if saves and not isinstance(saves, functools.partial):
            # the loop of epochs calls both by these names
            script.train = functools.partial(_train_with_handlers, script.train)
            script.validate_and_save = functools.partial(_save_if_signaled, saves)
    loads = checkpoint_utils.load_checkpoint  # before anything of a training is read
    if getattr(loads, "func", None) is not _load_with_workers_shielded:
        checkpoint_utils.load_checkpoint = functools.partial(_load_with_workers_shielded, loads)


def _load_with_workers_shielded(load: Any, *arguments: Any, **keywords: Any) -> Any:
    """Run fairseq's ``load_checkpoint``; it may start data-loading workers."""
    if threading.current_thread() is threading.main_thread():
        _handlers.shield_workers()
    with lost_processes_in_one_sentence():
        return load(*arguments, **keywords)


@contextmanager
def lost_processes_in_one_sentence() -> Iterator[None]:
    """Turn the error of a collective operation whose other processes are gone into one sentence.

    The exit status is 1, because the input is not to blame.
    Raises: SystemExit with status 1, after the sentence.
    """
    distributed = torch.distributed
    try:
        yield
    except RuntimeError as error:
        several = distributed.is_available() and distributed.is_initialized()
        # some of these errors are plain RuntimeErrors, known by their text
        known = isinstance(error, distributed.DistError) if several else False
        if not several or not (known or LOST.search(str(error))):
            raise
        reason = " ".join(str(error).split("\n")[0].split())
        said = (
            f"another process of this training ended or does not answer ({reason}): its own output "
            "says why; the same command resumes from the last checkpoint"
        )
        print(f"lrpe_fairseq: {said}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _train_with_handlers(
    train: Any, cfg: Any, trainer: Any, task: Any, epoch_itr: Any, *arguments: Any
) -> Any:
    """Run fairseq's ``train`` (one epoch) with signal handlers installed, if updates are left."""
    updates = trainer.get_num_updates()
    most = cfg.optimization.max_update
    if 0 < most <= updates:  # 0: no limit
        logger.info(
            f"nothing to train: the checkpoint has {updates} of {most} updates; raise --max-update "
            "(optimization.max_update), or choose another --save-dir (checkpoint.save_dir)"
        )
        return [None], True  # no loss, and the training stops
    # Python lets only the main thread set handlers
    if threading.current_thread() is not threading.main_thread():
        return train(cfg, trainer, task, epoch_itr, *arguments)
    several = trainer.data_parallel_world_size > 1
    # fairseq ends a process that hangs by SIGINT
    watched = several and cfg.distributed_training.heartbeat_timeout > 0
    _handlers.install(interrupt=not watched, speaks=trainer.data_parallel_rank == 0)
    # of a process that fairseq started: when its parent ends, it saves
    spawned = multiprocessing.parent_process() is not None
    if spawned and torch.distributed.is_initialized():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGUSR1))
    ended = True  # also after an error
    try:
        with lost_processes_in_one_sentence():
            losses, ended = train(cfg, trainer, task, epoch_itr, *arguments)
        ended = ended or 0 < cfg.optimization.max_epoch < epoch_itr.next_epoch_idx
    finally:
        if ended:
            _handlers.restore()
    return losses, ended


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
