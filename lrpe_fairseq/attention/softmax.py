"""Softmax attention through torch's scaled_dot_product_attention, and its naive reference.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Rescore = Callable[[Tensor], Tensor]


def softmax_attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    key_padding_mask: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    rescore: Rescore | None = None,
) -> Tensor:
    """The definition, with the score matrix in memory; see :func:`softmax_attention`.

    Args (beyond those): rescore: maps the scaled scores (B, H, T, S) to new ones before
        masking, for encodings that are not additive.
    """
    scores = (q * scale) @ k.transpose(-1, -2)
    scores = scores if bias is None else scores + bias
    scores = scores if rescore is None else rescore(scores)
    allowed = visible_keys(q, k, causal, key_padding_mask)
    if allowed is None:
        return F.dropout(_softmax(scores, v), dropout) @ v
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = F.dropout(_softmax(scores, v), dropout)
    return weights.masked_fill(~allowed, 0.0) @ v


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    key_padding_mask: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T + bias) v by torch's fused kernels (LRPE, Eq. 2).

    Args:
        q, k, v: (B, H, T, D), (B, H, S, D), (B, H, S, E), already encoded.
        causal: query i of T sees keys 0 .. S - T + i, so that a block may follow a cache.
        scale: D^-0.5 of the *original* head width; encoded features may be wider.
        key_padding_mask: (B, S), true where a key is padding; or (B, T, S), where a query must
            not see it.
        dropout: on the attention weights, as in the paper (softmax only).
        bias: broadcastable to (B, H, T, S), added to the scaled scores.
    Returns: (B, H, T, E). A query that sees no key gets zeros, never NaN.
    """
    square = q.shape[-2] == k.shape[-2]
    if bias is None and key_padding_mask is None and (square or not causal):
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal, scale=scale
        )
    allowed = visible_keys(q, k, causal, key_padding_mask)
    if allowed is None:
        return _attend(q, k, v, bias, dropout, scale)
    blind = ~allowed.any(-1, keepdim=True)
    mask = allowed | blind
    if bias is not None:
        mask = (bias + bias.new_zeros(mask.shape)).masked_fill(~mask, -torch.inf)
    return _attend(q, k, v, mask, dropout, scale).masked_fill(blind, 0.0)


def visible_keys(
    q: Tensor, k: Tensor, causal: bool, key_padding_mask: Tensor | None
) -> Tensor | None:
    """Boolean (B or 1, 1, T, S), true where query may see key; None if everywhere."""
    rows, columns = q.shape[-2], k.shape[-2]
    allowed = None
    if causal and rows > 1:
        full = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
        allowed = full.tril(columns - rows)[None, None]
    if key_padding_mask is not None:
        hidden = key_padding_mask.bool()
        alive = ~(hidden if hidden.dim() == 3 else hidden.unsqueeze(1)).unsqueeze(1)
        allowed = alive if allowed is None else allowed & alive
    return allowed


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float
) -> Tensor:
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)


def _softmax(scores: Tensor, like: Tensor) -> Tensor:
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(like.dtype)
