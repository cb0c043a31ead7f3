"""Averages of weights (``--store-ema``)."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.models.ema.ema import EMA

from lrpe_fairseq.compat.patching import replace_method


def copy_buffers_to_the_average() -> None:
    """Train with ``--store-ema`` when a model has integer buffers, such as permutations.

    Break: ``EMA._step_internal`` multiplies every entry of the state dict by the decay, which
    raises RuntimeError for integers. It also adds a rounding error to constant buffers at every
    update. The fix copies buffers instead of averaging them, as ``torch.optim.swa_utils`` does by
    default. ``EMA`` also leaves the ``version`` of a decoder out of the state that it loads, so
    that the averaged model is loaded as a legacy one and loses its final LayerNorm; the fix keeps
    the version.
    """
    model = torch.nn.Module()
    model.register_buffer("permutation", torch.arange(2))
    config = SimpleNamespace(ema_decay=0.5, ema_seed_model=None, ema_fp32=False, ema_update_freq=1)
    try:
        EMA(model, config).step(model)
    except RuntimeError:
        replace_method(EMA, "__init__", _start_average)
        replace_method(EMA, "restore", _restore_average)


def _start_average(
    original: Callable,
    self: Any,
    model: torch.nn.Module,
    config: Any,
    device: Any = None,
    skip_keys: Any = None,
) -> None:
    buffers = {name for name, _ in model.named_buffers()}
    # what EMA skips when it averages, it copies
    original(self, model, config, device, buffers | set(skip_keys or ()))


def _restore_average(
    original: Callable, self: Any, state_dict: dict, *rest: Any, **named: Any
) -> None:
    """Load ``state_dict`` with the versions of the averaged model, which EMA leaves out."""
    averaged = self.model.state_dict()
    versions = {name: value for name, value in averaged.items() if "version" in name}
    original(self, versions | dict(state_dict), *rest, **named)
