"""The size of an update of a training: the batches of all processes and accumulated steps together.

Every function takes the options of a run file.
"""

from collections.abc import Mapping
from typing import Any

LIMITS = ("dataset.max_tokens", "dataset.batch_size")
"""Options that limit a batch; one of them may be None."""
FREQUENCY = "optimization.update_freq"
WORLD = "distributed_training.distributed_world_size"


def steps(config: Mapping[str, Any]) -> list[float]:
    """Return the batches of an update in one process, by epoch."""
    return [float(frequency) for frequency in config.get(FREQUENCY) or [1]]


def batches(config: Mapping[str, Any]) -> list[float]:
    """Return the batches of an update over all processes, by epoch."""
    return [count * (config.get(WORLD) or 1) for count in steps(config)]


def sizes(config: Mapping[str, Any], name: str) -> list[float]:
    """Return the largest update by epoch, as the option ``name`` of LIMITS counts it.

    Empty if that option does not limit batches.
    """
    limit = config.get(name)
    return [float(limit) * count for count in batches(config)] if limit else []
