"""Parameters that layers share are saved once: safetensors holds no aliases."""

from typing import Any

from torch import Tensor, nn


def hold_once(body: nn.Module) -> None:
    """Leave out the shared tensors of a body but for the first when its state is saved.

    They are added again when a state is loaded. Call it after parameters were shared.
    """
    first = dict(_named_tensors(body, remove_duplicate=True))
    every = dict(_named_tensors(body, remove_duplicate=False))
    names = {id(tensor): name for name, tensor in first.items()}
    known = hasattr(body, "_aliases")
    body._aliases = {n: names[id(t)] for n, t in every.items() if n not in first}
    if not known:
        body.register_state_dict_post_hook(_without_aliases)
        body.register_load_state_dict_pre_hook(_with_aliases)


def _named_tensors(body: nn.Module, **options: bool) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers with their names. options: ``remove_duplicate``."""
    return [*body.named_parameters(**options), *body.named_buffers(**options)]


def _without_aliases(body: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    """Remove shared tensors from a state dict but for the first."""
    for alias in body._aliases:
        state.pop(prefix + alias, None)


def _with_aliases(body: nn.Module, state: dict, prefix: str, *more: Any) -> None:
    """Add shared tensors to a state dict under all their names."""
    for alias, name in body._aliases.items():
        if prefix + name in state:
            state.setdefault(prefix + alias, state[prefix + name])
