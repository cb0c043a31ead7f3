"""A training of fairseq leaves nothing to the next one in its process, and returns its best value.

``fairseq-hydra-train -m`` trains several models in one process. fairseq and this package keep state
in module globals, which belongs to one training; :func:`run` puts it back at both ends of each.
"""

import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics, progress_bar

from lrpe_fairseq import safe_loading
from lrpe_fairseq.attention import projected
from lrpe_fairseq.compat.patching import replace_once
from lrpe_fairseq.kernels import loader

LOGGERS = ("fairseq_cli.train", progress_bar.__name__)
"""The loggers to which fairseq adds a handler for ``common.log_file``."""
VALUES = "valid"
"""The aggregator that fairseq-hydra-train reads for a sweeper: means over all validations."""
SAID_ONCE = ((projected.__name__, "_warn_once"), ("lrpe_fairseq.models.checks", "_warn_once"))
"""Cached functions of this package that log or warn; a cache makes them do so once per text."""


def give_every_run_a_state_of_its_own() -> None:
    """Let a training in a sweep leave what it leaves alone, and return its best value.

    Break: ``fairseq-hydra-train -m`` trains one model after another in a process, and fairseq keeps
    the state of a training in module globals. The second model writes no best checkpoint before it
    is better than the first, may stop early because of it, and its curves in TensorBoard and its
    ``common.log_file`` go to the first one's. The value of a training for a sweeper such as Optuna
    is the mean of all its validations, the first ones included.

    fairseq's function that hydra calls drops the value, too; ``hydra_plugins`` repairs that.
    """
    replace_once(distributed_utils, "call_main", run)


def run(call_main: Callable, cfg: Any, main: Callable, **named: Any) -> None:
    """Run a command as ``distributed.utils.call_main`` does, in a state of its own.

    After a training its :func:`best_value` is the metric ``checkpoint.best_checkpoint_metric`` of
    the aggregator :data:`VALUES`, where fairseq-hydra-train reads what it returns. A training that
    fails has the worst value.
    """
    forget(main)  # the process may have run a command before this package was imported
    failed = True
    try:
        with _handlers_of_one_run():
            call_main(cfg, main, **named)
        failed = False
    finally:
        # other commands have no value
        if main.__module__ == "fairseq_cli.train":
            value = _worst(cfg.checkpoint) if failed else best_value(cfg)
            _record(value, cfg.checkpoint.best_checkpoint_metric)
            _close_trackers(failed=failed)
        forget(main)


def forget(main: Callable) -> None:
    """Remove what an earlier run has left in module globals of fairseq and of this package.

    - The score of the best checkpoint: the next training would write no ``checkpoint_best.pt``
      before it is better, and store the score in its checkpoints.
    - The best score and the count of early stopping (``checkpoint.patience``).
    - The writers of TensorBoard: the next curves would go to the first folder.
    - What was said once, by this package and by Python's ``warnings``, and which kernels served:
      the next log would lack it. A warning that kernels do not compile on this machine stays.

    main: fairseq's function that makes the run.
    """
    # fairseq keeps these two as attributes of its functions
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    stopping = getattr(sys.modules.get(main.__module__), "should_stop_early", None)
    for name in ("best", "num_runs"):
        if hasattr(stopping, name):
            delattr(stopping, name)
    progress_bar._close_writers()
    progress_bar._tensorboard_writers.clear()
    loader.SERVED.clear()
    for module, name in SAID_ONCE:
        if module in sys.modules:
            getattr(sys.modules[module], name).cache_clear()
    with warnings.catch_warnings():
        pass  # a change of the filters lets Python show every warning again


@contextmanager
def _handlers_of_one_run() -> Iterator[None]:
    """Remove the handlers that fairseq adds for ``common.log_file``, at the start and per epoch."""
    before = {name: list(logging.getLogger(name).handlers) for name in LOGGERS}
    try:
        yield
    finally:
        for name, handlers in before.items():
            logger = logging.getLogger(name)
            # a file that stays open would get the lines of the next training
            for handler in set(logger.handlers) - set(handlers):
                logger.removeHandler(handler)
                handler.close()


def _close_trackers(*, failed: bool) -> None:
    """End the run of wandb and forget that of aim: fairseq would use them for the next run too."""
    if progress_bar.wandb is not None:
        progress_bar.wandb.finish(exit_code=int(failed))  # uploads what is left
    if progress_bar.get_aim_run is not None:
        progress_bar.get_aim_run.cache_clear()


def best_value(cfg: Any) -> float:
    """Return the best value of ``checkpoint.best_checkpoint_metric`` at the saved checkpoints.

    It is the score of ``checkpoint_best.pt``, also if an earlier part of a resumed training wrote
    that. If fairseq started a process per GPU, only these know it, and the last checkpoint is read.

    cfg: fairseq's configuration.
    Returns: inf without a value, or -inf if greater values are better.
    """
    value = getattr(checkpoint_utils.save_checkpoint, "best", None)
    last = Path(cfg.checkpoint.save_dir) / "checkpoint_last.pt"
    if value is None and _has_spawned(cfg.distributed_training) and last.is_file():
        with safe_loading.allowed():
            # memory-mapped: the weights are not read
            state = torch.load(last, map_location="cpu", mmap=True)
        value = state["extra_state"].get("best")
    return _worst(cfg.checkpoint) if value is None or math.isnan(value) else float(value)


def _worst(options: Any) -> float:
    """Return the number that a sweeper prefers least."""
    return -math.inf if options.maximize_best_checkpoint_metric else math.inf


def _has_spawned(options: Any) -> bool:
    """True if fairseq has trained in processes that it started; see ``call_main``."""
    return options.distributed_init_method is not None and not options.distributed_no_spawn


def _record(value: float, name: str) -> None:
    """Let ``value`` be the metric ``name`` of :data:`VALUES`, and of no other aggregator."""
    before = metrics.get_meters(VALUES)
    if before is not None:  # a metric that is computed from others takes no value
        before.clear()
        before.priorities.clear()
    with metrics.aggregate(VALUES, new_root=True):
        metrics.log_scalar(name, value)
