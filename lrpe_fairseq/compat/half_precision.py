"""Resuming a training in half precision."""

from collections.abc import Callable
from typing import Any

import torch
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin, _MemoryEfficientFP16OptimizerMixin

from lrpe_fairseq.compat.patching import replace_method


def save_what_half_precision_rounds() -> None:
    """Let a training with ``--fp16`` or ``--bf16`` that is resumed equal an uninterrupted one.

    Break: a checkpoint has the rounded weights, but neither the float32 weights that the optimizer
    updates nor the counters of the loss scaler. The fix adds both to the state of the optimizer,
    where stock fairseq ignores them. Float32 weights that do not round to those of the model, such
    as after averaging checkpoints, are not used; checkpoints without them load as before.
    """
    for mixin in (_FP16OptimizerMixin, _MemoryEfficientFP16OptimizerMixin):
        replace_method(mixin, "state_dict", _state_with_masters)
        replace_method(mixin, "load_state_dict", _load_with_masters)


def _state_with_masters(original: Callable, self: Any) -> dict:
    state = original(self)
    state["fp32_params"] = [master.detach() for master in masters(self)]
    if self.scaler is not None:
        # the counters of a loss scaler are its attributes with an underscore
        counters = {name: n for name, n in vars(self.scaler).items() if name.startswith("_")}
        state["loss_scaler"] = counters
    return state


def _load_with_masters(
    original: Callable, self: Any, state_dict: dict, optimizer_overrides: dict | None = None
) -> None:
    original(self, state_dict, optimizer_overrides)
    if self.scaler is not None:
        vars(self.scaler).update(state_dict.get("loss_scaler", {}))
    built = masters(self)
    stored = state_dict.get("fp32_params", [])
    if not built or [x.shape for x in built] != [x.shape for x in stored]:
        return
    # copies: setting the masters writes into the tensors themselves
    rounded = [weight.detach().clone() for weight in self.fp16_params]
    before = [master.detach().clone() for master in built]
    _set_masters(self, stored)
    # the weights were replaced after the training, by averaging checkpoints for example
    if not all(map(torch.equal, self.fp16_params, rounded)):
        _set_masters(self, before)


def masters(optimizer: Any) -> list[torch.Tensor]:
    """Return the float32 weights of an optimizer: one for each parameter, or joined."""
    held = getattr(optimizer, "fp32_params", [])
    return list(held.values() if isinstance(held, dict) else held)


def _set_masters(optimizer: Any, values: list[torch.Tensor]) -> None:
    for master, value in zip(masters(optimizer), values, strict=True):
        master.data.copy_(value)
    optimizer._sync_fp32_params_to_fp16()
