"""Operators of compiled graphs whose gradient computes the call once more.

The gradient is another operator, which computes the function once more and then its gradients. So
an operator needs no list of what its function keeps, at the price of a second forward pass. There
are no second derivatives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lrpe_fairseq.kernels.operators import named, with_autograd


class RecomputedOperator:
    """An operator and its gradient, which computes the function once more.

    name: of the operator. arguments: their schema. function: of these arguments, in eager
    execution. fake: (arguments) -> results without numbers, of the shapes, dtypes and strides of
    the operator's results, to which those of the function are copied if they lie otherwise.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        function: Callable[..., Sequence[Tensor]],
        fake: Callable[..., Sequence[Tensor]],
    ) -> None:
        self._function, self._fake = function, fake
        self._forward = self._defined(name, f"({arguments}) -> Tensor[]", self._compute, fake)
        self._backward = self._defined(
            f"{name}_backward",
            f"(Tensor[] grads, {arguments}, bool[] needed) -> Tensor[]",
            self._gradients,
            self._like_needed,
        )
        self._forward.register_autograd(self._gradient, setup_context=self._keep)

    def __call__(self, *arguments: Any) -> list[Tensor]:
        """Return the results of the function, in an operator of the graph."""
        return self._forward(*arguments)

    @staticmethod
    def _defined(name: str, schema: str, function: Callable, fake: Callable) -> Any:
        operator = torch.library.custom_op(named(name), function, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        return operator

    def _compute(self, *arguments: Any) -> list[Tensor]:
        with torch.no_grad():
            results = self._function(*arguments)
            return [_laid_out(*pair) for pair in zip(results, self._fake(*arguments), strict=True)]

    def _gradients(self, grads: list[Tensor], *given: Any) -> list[Tensor]:
        *arguments, needed = given
        with with_autograd(), torch.enable_grad():
            leaves = [
                x.detach().requires_grad_() if need else x
                for x, need in zip(arguments, needed, strict=True)
            ]
            results = self._function(*leaves)
            pairs = [(x, g) for x, g in zip(results, grads, strict=True) if x.requires_grad]
            wanted = [x for x, need in zip(leaves, needed, strict=True) if need]
            found = torch.autograd.grad(
                [x for x, _ in pairs],
                wanted,
                [g.to(x.dtype) for x, g in pairs],
                allow_unused=True,
                materialize_grads=True,
            )
        return [_laid_out(g, torch.empty_like(x)) for g, x in zip(found, wanted, strict=True)]

    @staticmethod
    def _like_needed(grads: list[Tensor], *given: Any) -> list[Tensor]:
        *arguments, needed = given
        return [torch.empty_like(x) for x, need in zip(arguments, needed, strict=True) if need]

    @staticmethod
    def _keep(ctx, inputs, output):
        ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))

    def _gradient(self, ctx, grads):
        saved = iter(ctx.saved_tensors)
        arguments = [
            next(saved) if is_tensor else other
            for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
        ]
        needed = [bool(need) for need in ctx.needs_input_grad[: len(arguments)]]
        found = iter(self._backward(grads, *arguments, needed))
        return tuple(next(found) if need else None for need in needed)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """Return x if its strides are those of ``like``; else copy it into the memory of ``like``."""
    return x if x.stride() == like.stride() else like.copy_(x)
