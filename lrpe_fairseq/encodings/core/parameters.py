"""Parameters of encodings: initialization, exemption from weight decay, float32 storage."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

START_STD = 0.02
"""Standard deviation of the weights of gates, reflections and states at the start, as in the codes
of FoX, PaTH and TAPE."""


def drawn(generator: torch.Generator, *shape: int) -> nn.Parameter:
    """Return weights from N(0, START_STD^2), float32 on the CPU.

    Not in an ``nn.Linear``, which fairseq's BERT models would initialize again.
    """
    return nn.Parameter(START_STD * torch.randn(shape, generator=generator, device="cpu"))


def undecayed(start: Tensor, learned: bool = True, by_any_adam: bool = False) -> nn.Parameter:
    """Return a parameter without weight decay: an angle, a frequency or a generator of rotations.

    start: its initial value. learned: False for a parameter without gradients.
    by_any_adam: False if only ``lrpe_adam`` leaves it undecayed, True if ``adam`` does, too.

    The mark is fairseq's own attribute, which fairseq copies to the float32 copies of half types.
    """
    parameter = nn.Parameter(start, requires_grad=learned)
    parameter.optim_overrides = {"optimizer": {"weight_decay_scale": 0, "any_adam": by_any_adam}}
    return parameter


class Float32Module(nn.Module):
    """A module whose floating-point parameters and buffers stay in float32 or wider.

    fairseq's trainer calls ``.half()`` or ``.to(bfloat16)`` on the whole model. A learned frequency
    in half precision would give a phase that is wrong by several full rotations at position
    10,000, and running statistics in half precision would stop changing.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float32Module":
        """Follow ``.to(device)``, but keep float tensors and gradients in float32 or wider."""
        floating = [(n, t) for n, t in self.named_tensors() if t.is_floating_point()]
        # the base class casts in place: what was exact is kept to be restored
        exact = {name: t.detach() for name, t in floating}
        gradients = {name: t.grad.detach() for name, t in floating if t.grad is not None}
        super()._apply(fn, recurse)
        for name, tensor in self.named_tensors():
            if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
                tensor.data = exact[name].to(tensor.device)
                tensor.grad = gradients[name].to(tensor.device) if name in gradients else None
        return self

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return all parameters and buffers of this module and its children, with their names."""
        return [*self.named_parameters(), *self.named_buffers()]
