"""Cross-entropy of a linear output layer in blocks of the vocabulary, without the logits.

For features x_i (D,), a weight W (V, D) and a bias b (V,), with logits z_i = W x_i + b and the
target t_i,

    nll_i    = logsumexp(z_i) - z_i[t_i]          the negative log likelihood
    smooth_i = V logsumexp(z_i) - sum_c z_i[c]    the sum of -log p over the vocabulary

:func:`losses_naive` stores the N x V logits, several times with their gradients. :func:`losses`
computes blocks of columns, keeps one number per token, and computes the blocks again in the
backward pass: four products of matrices instead of three, and memory for one block.

Blocks are columns, not rows: then each block of the gradient of W is written once.

Axes: N tokens, D width, V words.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

BLOCK = 2**24
"""Maximum number of logits N x columns of a block: 64 MB in float32."""


def losses_naive(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the definition; see :func:`losses`."""
    log_probs = F.linear(x, weight, bias).float().log_softmax(-1)
    nll = -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return nll, -log_probs.sum(-1)


def losses(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor]:
    """Return the negative log likelihood and the sum of -log p over the vocabulary, (N,) each.

    Logits are rounded to the dtype of ``x``, as by ``nn.Linear``; everything after is float32 or
    wider. Under autocast ``x`` and ``weight`` are cast as for ``nn.Linear``.

    Args:
        x: (N, D) features. weight: (V, D). bias: (V,) or None.
        target: int64 (N,), words from 0 to V - 1.
        block: maximum number of logits in memory; at least one column is computed.
    Second derivatives are not supported.
    """
    if torch.is_autocast_enabled(x.device.type):
        half = torch.get_autocast_dtype(x.device.type)
        x = x.to(half)
        weight = weight.to(half)
        bias = None if bias is None else bias.to(half)
    columns = max(1, block // max(1, len(x)))
    return _Losses.apply(x, weight, target, bias, columns)


def _blocks(words: int, columns: int) -> list[slice]:
    return [slice(first, min(first + columns, words)) for first in range(0, words, columns)]


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, block: slice) -> Tensor:
    """Return the logits (N, columns) of a block, float32 or wider."""
    logits = F.linear(x, weight[block], None if bias is None else bias[block])
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _in_block(target: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Return whether each target is in the block (N, 1), and its column there, or 0."""
    inside = (target >= block.start) & (target < block.stop)
    column = (target - block.start).where(inside, 0)
    return inside.unsqueeze(-1), column.unsqueeze(-1)


class _Losses(torch.autograd.Function):
    """The losses of :func:`losses`. Saved for the backward pass: the inputs and logsumexp (N,)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, columns: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        # N 1: sums over the blocks so far; the logsumexp of no words is -inf
        log_sum = x.new_full((len(x), 1), -torch.inf, dtype=wide)
        of_target = torch.zeros_like(log_sum)
        total = torch.zeros_like(log_sum)
        for block in _blocks(len(weight), columns):
            logits = _logits(x, weight, bias, block)
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(-1, keepdim=True))
            inside, column = _in_block(target, block)
            of_target += logits.gather(-1, column).where(inside, 0)
            total += logits.sum(-1, keepdim=True)
        ctx.save_for_backward(x, weight, target, bias, log_sum)
        ctx.columns = columns
        return (log_sum - of_target).squeeze(-1), (len(weight) * log_sum - total).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_nll: Tensor, of_smooth: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, Tensor | None, None]:
        x, weight, target, bias, log_sum = ctx.saved_tensors
        needs_x, needs_weight, _, needs_bias, _ = ctx.needs_input_grad
        grad_x = torch.zeros_like(x, dtype=log_sum.dtype) if needs_x else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        of_nll = of_nll.unsqueeze(-1)
        of_smooth = of_smooth.unsqueeze(-1)
        # both losses have softmax(z) in their gradient, with these factors
        of_softmax = of_nll + len(weight) * of_smooth
        for block in _blocks(len(weight), ctx.columns):
            # d nll / d z = softmax(z) - 1[t], d smooth / d z = V softmax(z) - 1
            grad = _logits(x, weight, bias, block).sub_(log_sum).exp_()
            grad = grad.mul_(of_softmax).sub_(of_smooth)
            inside, column = _in_block(target, block)
            grad.scatter_add_(-1, column, -of_nll.where(inside, 0))
            grad = grad.to(x.dtype)  # the products run in the dtype of the model
            if needs_x:
                grad_x += grad @ weight[block]  # summed over blocks in float32 or wider
            if needs_weight:
                torch.mm(grad.mT, x, out=grad_weight[block])  # every row is of one block
            if needs_bias:
                grad_bias[block] = grad.sum(0)
        grad_x = None if grad_x is None else grad_x.to(x.dtype)
        return grad_x, grad_weight, None, grad_bias, None
