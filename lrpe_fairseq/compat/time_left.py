"""What a training says first: how much work there is, how fast it goes, how long it takes."""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from fairseq.trainer import Trainer

from lrpe_fairseq.compat.patching import replace_method

LOG = logging.getLogger("lrpe_fairseq")
FIRST, LAST = 3, 10
"""Updates between which the speed is measured; the first ones build caches and kernels."""


def say_how_long_a_training_takes() -> None:
    """Log an estimate of the hours after ten updates, and warn where a GPU is expected.

    Break: fairseq logs updates per second, but not how long they take together. With bf16 or
    fp16 and no GPU it trains slowly without a word.
    """
    replace_method(Trainer, "__init__", _started)
    replace_method(Trainer, "train_step", _trained)


def _started(original: Callable, trainer: Trainer, cfg: Any, *rest: Any, **keywords: Any) -> None:
    half = next((name for name in ("bf16", "fp16") if cfg.common[name]), None)
    if half and not torch.cuda.is_available():
        LOG.warning(
            "this configuration is for a GPU (common.%s), and there is none: it will be slow; "
            "on a CPU choose smaller models, as --config-name text does",
            half,
        )
    original(trainer, cfg, *rest, **keywords)


def _trained(original: Callable, trainer: Trainer, *arguments: Any, **keywords: Any) -> Any:
    started = trainer.__dict__.setdefault("lrpe_first_update", trainer.get_num_updates())
    log = original(trainer, *arguments, **keywords)
    done = trainer.get_num_updates() - started
    if done == FIRST:
        trainer.lrpe_clock = time.monotonic()
    elif done == LAST and trainer.is_data_parallel_master:
        per_update = (time.monotonic() - trainer.lrpe_clock) / (LAST - FIRST)
        LOG.info(estimate(trainer, per_update))
    return log


def estimate(trainer: Trainer, per_update: float) -> str:
    """Return one sentence on what is trained, how fast, and how long the rest takes.

    per_update: seconds.
    """
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    rate = 1 / per_update if per_update else float("inf")
    speed = f"{rate:.1f} updates per second" if rate >= 1 else f"{per_update:.1f} s per update"
    updates, last = trainer.get_num_updates(), trainer.cfg.optimization.max_update
    if not last:
        return f"{parameters / 1e6:.1f} M parameters; {speed}; no last update is set (max_update)"
    left = duration((last - updates) * per_update)
    return f"{parameters / 1e6:.1f} M parameters; update {updates} of {last}; {speed}; {left} left"


def duration(seconds: float) -> str:
    """Return a time as a reader says it.

    >>> duration(40), duration(400), duration(9000), duration(400_000)
    ('about 40 seconds', 'about 7 minutes', 'about 2.5 hours', 'about 4.6 days')
    """
    if seconds < 100:
        return f"about {seconds:.0f} seconds"
    if seconds < 100 * 60:
        return f"about {seconds / 60:.0f} minutes"
    if seconds < 48 * 3600:
        return f"about {seconds / 3600:.1f} hours"
    return f"about {seconds / 86400:.1f} days"
