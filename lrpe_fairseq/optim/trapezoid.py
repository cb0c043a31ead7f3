"""``lrpe_trapezoid``: a warm-up, a constant rate, and a linear decay to zero at the end."""

from dataclasses import dataclass, field

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from lrpe_fairseq.errors import refuse

NAME = "lrpe_trapezoid"


@dataclass
class TrapezoidConfig(FairseqDataclass):
    """Options of the schedule."""

    warmup_updates: int = field(
        default=0, metadata={"help": "updates over which the rate rises linearly"}
    )
    warmup_init_lr: float = field(
        default=0.0, metadata={"help": "rate before the first update of the warm-up"}
    )
    decay_share: float = field(
        default=0.2, metadata={"help": "share of all updates, the last ones, that lower the rate"}
    )
    max_update: int = II("optimization.max_update")
    lr: list[float] = II("optimization.lr")


def decay_start(updates: float, share: float) -> float:
    """Return the update after which the rate falls: until then, ``updates`` changes nothing."""
    return updates * (1 - share)


@register_lr_scheduler(NAME, dataclass=TrapezoidConfig)
class Trapezoid(FairseqLRScheduler):
    """The rate rises linearly, stays constant, and falls linearly to zero at ``--max-update``.

    With W warm-up updates of U in total and the share s, the update after n others has the top rate
    times min((n + 1) / W, 1, (U - n) / (s U)), if the warm-up begins at zero. Trainings with
    different U are equal until the first decays, so the longer one can go on from a checkpoint of
    the shorter. fairseq's ``tri_stage`` decays exponentially.

    Raises: Refusal without a number of updates, for several rates, for a share outside (0, 1], or
        for a warm-up that reaches into the decay.
    """

    def __init__(self, cfg: TrapezoidConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(cfg, optimizer)
        if cfg.max_update <= 0:
            refuse(f"--lr-scheduler {NAME} needs the number of updates: pass --max-update")
        if len(cfg.lr) != 1:
            refuse(f"--lr-scheduler {NAME} reads one --lr, not {[*cfg.lr]}")
        if not 0 < cfg.decay_share <= 1:
            refuse(f"--decay-share must be above 0 and at most 1, not {cfg.decay_share}")
        start = decay_start(cfg.max_update, cfg.decay_share)
        # the rate would fall before it has reached the top
        if not 0 <= cfg.warmup_updates <= start:
            refuse(
                f"--warmup-updates {cfg.warmup_updates} does not end before the decay, which "
                f"begins at update {start:g}: use fewer"
            )
        self.step_update(0)

    def step_update(self, num_updates: int) -> float:
        """Set the rate of the update after this many others and return it."""
        cfg = self.cfg
        first = cfg.warmup_init_lr
        top = cfg.lr[0]
        # n + 1: the first update has the first rate above zero
        rise = min(1.0, (num_updates + 1) / cfg.warmup_updates) if cfg.warmup_updates else 1.0
        fall = (cfg.max_update - num_updates) / (cfg.decay_share * cfg.max_update)
        self.optimizer.set_lr((first + (top - first) * rise) * max(0.0, min(1.0, fall)))
        return self.optimizer.get_lr()
