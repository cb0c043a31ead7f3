"""On a GPU, fairseq's ``adam`` and the norm of the gradients are a few launches per update.

Without NVIDIA's apex, fairseq computes both one parameter after the other: about ten launches
for each, for which a GPU that trains a small model may wait. torch's operators on lists of
tensors compute the same in about a dozen launches for all parameters. They need the memory of one
more copy of the parameters during an update. On a CPU fairseq's loop stays.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fairseq import utils
from fairseq.optim.adam import Adam
from torch import Tensor

from lrpe_fairseq.compat.patching import replace_method, replace_once


def update_in_few_launches() -> None:
    """Let fairseq's Adam and its gradient norm work on all parameters at once, on a GPU."""
    replace_method(Adam, "step", _step)
    if not utils.multi_tensor_l2norm_available:
        replace_once(utils, "clip_grad_norm_", _clip)


def _clip(original: Callable, *arguments: Any, **keywords: Any) -> Tensor:
    """Clip as fairseq does, with the norm of all gradients at once as soon as a GPU is in use."""
    # Not on import: asking for a GPU there would break programs that fork later.
    if torch.cuda.is_initialized():
        utils.multi_tensor_l2norm_available = True
        utils.multi_tensor_total_norm = total_norm
    return original(*arguments, **keywords)


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all gradients together, as fairseq's function of this name."""
    by_device = defaultdict(list)
    for grad in grads:
        by_device[grad.device].append(grad)
    target = torch.cuda.current_device() if torch.cuda.is_initialized() else "cpu"
    norms = [
        norm.to(target)
        for same in by_device.values()
        for norm in torch._foreach_norm(same, 2, dtype=torch.float32)
    ]
    return torch.norm(torch.stack(norms))


def _step(original: Callable, self: Adam, closure: Callable | None = None) -> Any:
    """Do an update: at once if every parameter and gradient is float32 on a GPU."""
    learning = [p for group in self.param_groups for p in _learning(group)]
    usual = closure is None and not any(group.get("amsgrad") for group in self.param_groups)
    if not (usual and learning and all(map(_on_gpu, learning))):
        return original(self, closure)
    for group in self.param_groups:
        step_at_once(group, self.state)
    return None


def _on_gpu(parameter: Tensor) -> bool:
    both = (parameter, parameter.grad)
    return all(x.is_cuda and x.dtype == torch.float32 and not x.is_sparse for x in both)


def _learning(group: dict[str, Any]) -> list[Tensor]:
    """Return the parameters of a group that have a gradient."""
    return [p for p in group["params"] if p.grad is not None]


@torch.no_grad()
def step_at_once(group: dict[str, Any], state: dict[Tensor, dict[str, Any]]) -> None:
    """Update a group of parameters as fairseq's ``Adam.step`` does, operation by operation.

    group: of the optimizer. state: of all its parameters; it has the keys of fairseq's.
    """
    alike = defaultdict(list)
    for p in _learning(group):
        known = state[p]
        if not known:
            known |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        known["step"] += 1
        for name in ("exp_avg", "exp_avg_sq"):  # a checkpoint may have them on another device
            known[name] = known[name].to(p)
        alike[known["step"]].append(p)
    for step, parameters in alike.items():
        _update(group, step, parameters, [state[p] for p in parameters])


def _update(
    group: dict[str, Any], step: int, parameters: list[Tensor], states: list[dict[str, Any]]
) -> None:
    """Do update number ``step`` of some parameters of a group."""
    beta1, beta2 = group["betas"]
    grads = [p.grad for p in parameters]
    means, squares = ([known[x] for known in states] for x in ("exp_avg", "exp_avg_sq"))
    torch._foreach_mul_(means, beta1)
    torch._foreach_add_(means, grads, alpha=1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, group["eps"])
    size = group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    if group["weight_decay"] != 0:
        torch._foreach_add_(parameters, parameters, alpha=-group["weight_decay"] * group["lr"])
    torch._foreach_addcdiv_(parameters, means, roots, value=-size)
