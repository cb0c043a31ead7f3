"""The seconds of a training."""

import time
from types import SimpleNamespace

from fairseq import trainer


def measure_training_time_monotonically() -> None:
    """Measure the seconds of a training by a clock that is never set back.

    Break: ``Trainer`` subtracts times of day. After the clock was set back, the training time in
    a checkpoint is negative or too short, and after it was set forward, too long.
    """
    # the module reads no other name of ``time``
    if trainer.time is time:
        trainer.time = SimpleNamespace(time=time.monotonic)
