"""Softmax attention with a bias by torch's fused kernels, and its definition.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.forms import masked_softmax
from lrpe_fairseq.kernels.conditions import is_plain, is_transformed
from lrpe_fairseq.kernels.flash.flash import NoSecondDerivative

Rescore = Callable[[Tensor, Tensor | None], Tensor]
"""(scores, visible) -> scores; see ``ScoreEncoding.forward``."""

Weigh = Callable[[Tensor, Tensor | None, torch.dtype], Tensor]
"""(scores, visible, dtype) -> weights; see ``ScoreEncoding.weigh``."""


class Terms(NamedTuple):
    """What is done to the scaled scores of a block: a bias is added, or they are mapped."""

    bias: Tensor | None = None
    rescore: Rescore | None = None
    weigh: Weigh = masked_softmax


def softmax_attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    rescore: Rescore | None = None,
    weigh: Weigh = masked_softmax,
) -> Tensor:
    """Compute the definition, with the score matrix in memory; see :func:`softmax_attention`.

    Additional arguments:
        rescore: maps the scaled scores (B, H, T, S) and the visible keys to new scores, for
            encodings that are not additive.
        weigh: maps scores, visible keys and a dtype to weights, 0 where not visible.
    """
    terms = Terms(bias, rescore, weigh)
    return F.dropout(weighted((q * scale) @ k.mT, visible, v.dtype, terms), dropout) @ v


def weighted(scores: Tensor, visible: Tensor | None, dtype: torch.dtype, terms: Terms) -> Tensor:
    """Return the weights (B, H, T, S) of scaled scores in ``dtype``; see :class:`Terms`."""
    scores = scores if terms.bias is None else scores + terms.bias
    scores = scores if terms.rescore is None else terms.rescore(scores, visible)
    return terms.weigh(scores, visible, dtype)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale q k^T + bias) v with torch's fused kernels (LRPE, Eq. 2).

    Args:
        q, k, v: (B, H, T, D), (B, H, S, D), (B, H, S, E), already encoded.
        scale: D^-0.5 of the *original* head width. Encoded features may be wider.
        visible: bool, broadcastable to (B, H, T, S), true if the query may attend to the key.
        bias: broadcastable to (B, H, T, S), added to the scaled scores.
    Returns: (B, H, T, E). A query without a visible key gets zeros, never NaN.
    Raises: RuntimeError for second derivatives, which fused kernels do not have. Use
        ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` for them.
    """
    options = {"scale": scale, "dropout": dropout}
    if bias is not None and is_transformed():  # torch's fused kernel refuses a learned bias there
        return softmax_attention_naive(q, k, v, visible=visible, bias=bias, **options)
    if visible is None:
        return fused_attention(q, k, v, attn_mask=_like(bias, q), **options)
    # a row without a visible key would be NaN: it sees all keys, and its result is set to zero
    blind = ~visible.any(-1, keepdim=True)
    mask = visible | blind
    if bias is not None:
        mask = torch.where(mask, bias, -torch.inf)
    return fused_attention(q, k, v, attn_mask=_like(mask, q), **options).masked_fill(blind, 0.0)


def _like(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a bias in the dtype of q; a bool mask as it is."""
    return mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *, dropout: float, **options: Any) -> Tensor:
    """Call torch's fused kernel, with v padded with zeros to the width of q and k.

    Complex features make q and k wider than v, which only torch's slow kernel supports.
    """
    missing = q.shape[-1] - v.shape[-1]  # zeros after the values are cut from the result
    v = F.pad(v, (0, missing)) if missing > 0 else v
    options["enable_gqa"] = k.shape[1] != q.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **options)
    if is_plain(out) and out.requires_grad and "ScaledDotProduct" in out.grad_fn.name():
        out.grad_fn.register_hook(_refuse_second_derivatives)
    return out[..., :-missing] if missing > 0 else out


def _refuse_second_derivatives(
    grads: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """Under create_graph, let the derivative of a fused kernel's gradients raise an error."""
    if not torch.is_grad_enabled():
        return None
    return tuple(None if g is None else NoSecondDerivative.apply(g) for g in grads)
