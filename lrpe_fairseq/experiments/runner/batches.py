"""Batches of several processes: an update has the size that it has in one process.

The size of an update is batch x gradient accumulation x processes. Accumulation is divided by the
number of processes first, then the batch.
"""

import math
from typing import Any

UNITS = {"max_tokens": "tokens", "batch_size": "samples"}
"""The limits of a batch in the dataset section -> what they count."""
LENGTHS = ("tokens_per_sample", "max_source_positions", "max_target_positions", "max_positions")
FAIRSEQ_LONGEST = 1024
"""fairseq's default of LENGTHS."""
FAIRSEQ_MULTIPLE = 8
"""fairseq's default of ``required_batch_size_multiple``."""


def largest(settings: Any) -> tuple[int, str, str]:
    """Return the largest batch of one process: size, unit, and its key in the dataset section.

    The unit is ``tokens``, or ``samples`` where the configuration limits ``batch_size``.
    """
    key, size = next(iter(_limits(settings).items()))
    return size, UNITS[key], key


def divided(settings: Any, processes: int) -> dict[str, str]:
    """Return the accumulation and the batch with which ``processes`` keep the size of an update.

    With BatchNorm accumulation stays, so that its statistics are over as many samples as before.

    Raises: ValueError if the processes cannot have equal parts.
    """
    if found := _division(settings, processes):
        return found
    raise ValueError(
        f"{processes} processes cannot have equal parts of {described(settings)}: use another "
        f"number of GPUs, or another dataset.{largest(settings)[2]}"
    )


def described(settings: Any) -> str:
    """Return the size of an update in words."""
    size, unit, key = largest(settings)
    inside = f" in samples of up to {_longest(settings.task):,}" if key == "max_tokens" else ""
    return f"an update of {size * _frequency(settings):,} {unit}{inside}"


def can_divide(settings: Any, processes: int) -> bool:
    """True if this many processes can have equal parts of an update."""
    return bool(_division(settings, processes))


def _division(settings: Any, processes: int) -> dict[str, str]:
    """Return the overrides with the largest batches; empty if no parts are equal."""
    frequency, limits = _frequency(settings), _limits(settings)
    with_batch_norm = settings.model.get("norm") == "batch"
    fewest = frequency if with_batch_norm else math.ceil(frequency / processes)
    for each in range(fewest, frequency + 1):
        batches = each * processes
        sizes = {key: size * frequency // batches for key, size in limits.items()}
        if all(_is_equal(settings, key, size, batches) for key, size in sizes.items()):
            smaller = {f"dataset.{k}": str(n) for k, n in sizes.items() if n != limits[k]}
            return {"optimization.update_freq": f"[{each}]", **smaller}
    return {}


def _is_equal(settings: Any, key: str, size: int, batches: int) -> bool:
    """True if ``batches`` batches of ``size`` have the samples of the configuration's update."""
    whole, frequency = _limits(settings)[key], _frequency(settings)
    if size == whole or size * batches != whole * frequency:
        return size == whole
    task = settings.task
    if key == "max_tokens" and not task.get("tokens_per_sample"):
        return size >= _longest(task)
    if size % 2 and (task.get("mixup") or task.get("cutmix")):  # they need pairs
        return False
    samples = _samples(settings, key, whole) * frequency
    return _samples(settings, key, size) * batches == samples


def _samples(settings: Any, key: str, size: int) -> int:
    """Return how many samples, or blocks of a text, fairseq puts into a batch of ``size``."""
    count = size if key == "batch_size" else size // settings.task.tokens_per_sample
    multiple = settings.dataset.get("required_batch_size_multiple", FAIRSEQ_MULTIPLE)
    return count if count < multiple else count // multiple * multiple


def _longest(task: Any) -> int:
    """Return the longest sample that is trained on: fairseq leaves out those above a batch."""
    return max((task[name] for name in LENGTHS if task.get(name)), default=FAIRSEQ_LONGEST)


def _frequency(settings: Any) -> int:
    return int(settings.optimization.update_freq[0])


def _limits(settings: Any) -> dict[str, int]:
    return {key: int(size) for key in UNITS if (size := settings.dataset.get(key))}
