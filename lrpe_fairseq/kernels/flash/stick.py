"""Stick-breaking attention (Tan et al., 2025).

    weight_ij = b_ij prod_(j < u < slot of i) (1 - b_iu),   b_ij = sigmoid(scale q_i . k_j)

over the visible keys before the query's own; then dropout. :func:`definition` computes this with
all weights in memory. The kernel is ``stick_triton.stick_attention``, with the same arguments.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.kernels.flash import flash


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    padding: Tensor | None = None,
    segments: flash.Pair | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """Compute the attention of this module in differentiable operations.

    The arguments are those of :func:`flash.definition`. Attention is causal, and a hidden key
    takes nothing. Returns: (B, H, T, E); a query without a visible key before it gets zeros.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    lag = flash.lags(q, k, True)
    seen = flash.visible(lag, True, padding, segments, window) & (lag > 0)
    scores = q.to(wide) @ k.to(wide).mT * scale
    # the lowest score: b is 0, and log(1 - b) too
    scores = scores.masked_fill(~seen, torch.finfo(wide).min)
    left = F.pad(F.softplus(scores), (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)
    shares = (F.logsigmoid(scores) - left).exp()
    return flash.dropped(shares, dropout, seed).to(v.dtype) @ v
