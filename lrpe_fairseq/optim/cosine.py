"""``lrpe_cosine``: a cosine schedule counted from the first update, as in timm."""

import math

from fairseq.optim import FairseqOptimizer
from fairseq.optim.lr_scheduler import register_lr_scheduler
from fairseq.optim.lr_scheduler.cosine_lr_scheduler import (
    CosineLRSchedule,
    CosineLRScheduleConfig,
)

from lrpe_fairseq.errors import refuse


@register_lr_scheduler("lrpe_cosine", dataclass=CosineLRScheduleConfig)
class LRPECosine(CosineLRSchedule):
    """A linear warm-up, then the rate of a cosine over all updates, the warm-up included.

    With W warm-up updates of U in total, the rate at an update n >= W is
    min + (max - min) (1 + cos(pi n / U)) / 2, so it falls from the top to that value at n = W.
    fairseq's ``cosine`` has n - W and U - W. timm's, which DeiT uses, changes once per epoch.
    Options are those of ``cosine`` without its restarts; U is ``--max-update`` or
    ``--lr-period-updates``.

    Raises: Refusal for options of restarts.
    """

    def __init__(self, cfg: CosineLRScheduleConfig, optimizer: FairseqOptimizer) -> None:
        for name in ("t_mult", "lr_shrink"):
            value = getattr(cfg, name)
            if value != getattr(CosineLRScheduleConfig, name):
                refuse(f"lrpe_cosine has no restarts: leave out --{name.replace('_', '-')} {value}")
        super().__init__(cfg, optimizer)

    def step_update(self, num_updates: int) -> float:
        """Set the rate of an update and return it."""
        if num_updates < self.cfg.warmup_updates:
            return super().step_update(num_updates)
        period = self.cfg.lr_period_updates
        updates = self.cfg.max_update
        whole = period if period > 0 else updates
        low = self.cfg.min_lr
        # a training may go on after the schedule, at the lowest rate
        part = min(num_updates / whole, 1)
        self.lr = low + 0.5 * (self.max_lr - low) * (1 + math.cos(math.pi * part))
        self.optimizer.set_lr(self.lr)
        return self.lr
