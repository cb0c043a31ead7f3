"""The precision of a table's trainings: ``scripts/run_table.sh TABLE --precision fp16``.

A scale in another precision than that of its configuration is a scale of its own, ``paper-fp16``:
it is part of the name of a run and of the field ``scale`` of its file, so that no table mixes runs
of two precisions.
"""

from collections.abc import Mapping
from typing import Any

FP32 = "fp32"
FLAGS: dict[str, dict[str, bool]] = {
    FP32: {"common.fp16": False, "common.bf16": False},
    "fp16": {"common.fp16": True, "common.bf16": False},
    "bf16": {"common.fp16": False, "common.bf16": True},
}
"""Precision -> fairseq's options. float16 has fairseq's loss scaling, which starts at 2^7, doubles
after 2^14 / N updates of N processes without an overflow, and halves at an overflow."""
UNFLAT = "common.fp16_no_flatten_grads"
GROUPED = "lrpe_"
"""Beginning of the optimizers with groups of parameters, whose gradients cannot be one vector."""


def in_precision(scale: str, precision: str | None) -> str:
    """Return the name of a scale in a precision; None: that of its configuration.

    >>> in_precision("paper", "fp16"), in_precision("paper", None)
    ('paper-fp16', 'paper')
    """
    return scale if precision is None else f"{scale}-{precision}"


def parted(scale: str) -> tuple[str, str | None]:
    """Return the scale of a configuration, and the precision if it is another one.

    >>> parted("paper-fp16"), parted("paper"), parted("lra-small")
    (('paper', 'fp16'), ('paper', None), ('lra-small', None))
    """
    base, _, last = scale.rpartition("-")
    return (base, last) if base and last in FLAGS else (scale, None)


def of_config(settings: Mapping[str, Any]) -> str:
    """Return the precision of a configuration."""
    common = settings.get("common") or {}
    return next((name for name in ("fp16", "bf16") if common.get(name)), FP32)


def overrides(scale: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return ``section.key=value`` words for a scale; none in the precision of its configuration.

    settings: the configuration.
    """
    _, precision = parted(scale)
    if precision is None:
        return ()
    flags = dict(FLAGS[precision])
    optimizer = (settings.get("optimizer") or {}).get("_name") or ""
    if precision != FP32 and optimizer.startswith(GROUPED):
        flags[UNFLAT] = True
    return tuple(f"{key}={str(value).lower()}" for key, value in flags.items())
