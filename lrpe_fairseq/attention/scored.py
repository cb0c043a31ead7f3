"""Softmax attention with any encoding, in blocks of queries where pairs must be stored.

An encoding that changes q and k only uses the fused kernel for all queries at once. Biases, decays
and other functions of a pair are computed for blocks of query rows, so that their memory does not
grow with the product of the lengths.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.attention.softmax import (
    Rescore,
    Weigh,
    query_blocks,
    softmax_attention,
    softmax_attention_naive,
    softmax_weights,
)
from lrpe_fairseq.encodings.base import Encoding, QueryKeyEncoding, ScoreEncoding, masked_softmax
from lrpe_fairseq.encodings.biases import LOWEST
from lrpe_fairseq.kernels.dispatch import is_transformed

BLOCK = 2**24
"""Maximum number of scores B H R S of a block of R queries: 64 MB in float32."""


class Tokens(NamedTuple):
    """What a score depends on besides the content of queries or keys, of N tokens each."""

    positions: Tensor  # N or B N, int64
    sums: Tensor | None = None  # B H N, float64: sum of the log gates up to each token
    counts: Tensor | None = None  # N or B N, int64: number of real tokens up to each token
    first: int | None = None  # positions are first, first + 1, ...; None if that is not known
    limit: int | None = None  # positions are 0 or larger, and smaller than this; None if not known

    def of(self, part: slice) -> "Tokens":
        """Return the tokens of a slice."""
        own = (x if x is None else x[..., part] for x in self[:3])
        tokens = Tokens(*own, limit=self.limit)
        if self.first is None:
            return tokens
        first, last, _ = part.indices(self.positions.shape[-1])
        positions = counted(self.first + last, self.positions.device, self.first + first)
        return tokens._replace(positions=positions, first=self.first + first)

    @property
    def ends(self) -> tuple[int, int] | None:
        """The smallest and largest position they may have; None if that is not known."""
        if self.first is not None:
            return self.first, self.first + self.positions.shape[-1] - 1
        return None if self.limit is None else (0, self.limit - 1)


def counted(length: int, device: torch.device, first: int = 0) -> Tensor:
    """Return first, ..., length - 1 (int64); the same tensor object for the same arguments."""
    if is_transformed():  # a traced or fake tensor must not be cached
        return torch.arange(first, length, device=device)
    return _cached_count(length, device, first)


@lru_cache(maxsize=256)
def _cached_count(length: int, device: torch.device, first: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(first, length, device=device)


class Settings(NamedTuple):
    """What all blocks share: arguments of :func:`softmax_attention`, and a decay of the score."""

    causal: bool
    scale: float
    dropout: float = 0.0
    score_decay: float = 1.0
    """c in (0, 1]: the score of (s, t) is multiplied by c^n, n their ``Encoding.steps_between``."""
    drops_scores: bool = False
    """True if dropout acts on scores: the departure ``ape-logit-dropout``."""

    @property
    def is_plain(self) -> bool:
        """True if nothing but the encoding changes the scores."""
        return self.score_decay == 1 and not self.drops_scores

    def of_softmax(self) -> dict:
        """Return the arguments of :func:`softmax_attention`."""
        return {"causal": self.causal, "scale": self.scale, "dropout": self.dropout}


class Terms(NamedTuple):
    """What an encoding does to the scaled scores of a block: adds a bias, or maps them."""

    bias: Tensor | None = None
    rescore: Rescore | None = None
    weigh: Weigh = masked_softmax


def scored_attention(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tokens,
    keys: Tokens,
    key_padding_mask: Tensor | None,
    settings: Settings,
) -> Tensor:
    """Compute softmax attention with ``encoding``.

    A decay, constant or from gates, counts real tokens: the weight exp(score) of (s, t), or the
    score itself for ``decay_on`` "score", is multiplied by exp(sum of log decays of the tokens in
    t+1..s), in a bidirectional model by the sum between the two. ``settings.score_decay`` counts
    steps between positions, and multiplies the encoded score before decays of the weight.

    Args:
        q, k, v: (B, H, T, D), (B, H, S, D), (B, H, S, E), encoded by a :class:`QueryKeyEncoding`.
            In self-attention the queries are the last T keys.
        queries, keys: positions, and sums of log gates if the encoding has gates. Counts are
            computed here if they are not given; queries of another sequence need them.
        key_padding_mask: (B, S), true where a key is padding; (B, T, S), true for hidden pairs.
    Returns: (B, H, T, E).
    """
    plain = encoding.serves_linear and encoding.log_decay() is None and queries.sums is None
    if plain and settings.is_plain:
        return softmax_attention(
            q, k, v, key_padding_mask=key_padding_mask, **settings.of_softmax()
        )
    queries, keys = _with_counts(encoding, q, k, queries, keys, key_padding_mask)
    blocks = list(query_blocks(q, k, settings.causal, BLOCK))
    if len(blocks) == 1 or settings.drops_scores:  # dropped scores need all keys of a query
        return _block(encoding, q, k, v, queries, keys, key_padding_mask, settings)
    parts = (
        _block(
            encoding,
            *(q[:, :, rows], k[:, :, columns], v[:, :, columns]),
            *(queries.of(rows), keys.of(columns)),
            _cut_mask(key_padding_mask, rows, columns),
            settings,
        )
        for rows, columns in blocks
    )
    return torch.cat(list(parts), 2)


def scored_weights(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    queries: Tokens,
    keys: Tokens,
    key_padding_mask: Tensor | None,
    settings: Settings,
) -> Tensor:
    """Return the weights of :func:`scored_attention` before dropout, (B, H, T, S) in q's dtype."""
    queries, keys = _with_counts(encoding, q, k, queries, keys, key_padding_mask)
    terms = _terms(encoding, q, k, queries, keys, settings)._asdict()
    masks = {"causal": settings.causal, "key_padding_mask": key_padding_mask}
    return softmax_weights(q, k, scale=settings.scale, dtype=q.dtype, **masks, **terms)


def _with_counts(
    encoding: Encoding, q: Tensor, k: Tensor, queries: Tokens, keys: Tokens, mask: Tensor | None
) -> tuple[Tokens, Tokens]:
    """Count the real tokens that a constant decay needs, where the queries are the last T keys."""
    if encoding.log_decay() is None or queries.counts is not None:
        return queries, keys
    counts = real_tokens(k.shape[2], mask, k.device)
    own = counts[..., k.shape[2] - q.shape[2] :]
    return queries._replace(counts=own), keys._replace(counts=counts)


def real_tokens(length: int, key_padding_mask: Tensor | None, device: torch.device) -> Tensor:
    """Return the number of real tokens up to each of S keys, int64 (S,) or (B, S).

    Differences of these numbers are the lags n that a decay counts. A mask (B, T, S) of hidden
    pairs has no padding between real tokens.
    """
    if key_padding_mask is None or key_padding_mask.dim() == 3:
        return torch.arange(length, device=device)
    return (~key_padding_mask.bool()).cumsum(-1)


def decay_exponent(log_decay: Tensor, queries: Tokens, keys: Tokens, causal: bool) -> Tensor:
    """Return log_decay n, (H, T, S) or (B, H, T, S), for log_decay (H,) in its dtype.

    n is the number of real tokens in t+1..s. For a key after the query it is 0 in a causal model,
    and the number of real tokens in s+1..t in a bidirectional one.
    """
    lag = queries.counts.unsqueeze(-1) - keys.counts.unsqueeze(-2)
    lag = lag.clamp_min(0) if causal else lag.abs()
    return log_decay.view(-1, 1, 1) * lag.unsqueeze(-3).to(log_decay.dtype)


def _cut_mask(key_padding_mask: Tensor | None, rows: slice, columns: slice) -> Tensor | None:
    if key_padding_mask is None or key_padding_mask.dim() == 2:
        return key_padding_mask if key_padding_mask is None else key_padding_mask[:, columns]
    return key_padding_mask[:, rows, columns]


def _block(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tokens,
    keys: Tokens,
    key_padding_mask: Tensor | None,
    settings: Settings,
) -> Tensor:
    """Compute :func:`scored_attention` of one block. In a causal model its last keys are its
    queries.
    """
    options: dict[str, Any] = {"key_padding_mask": key_padding_mask, **settings.of_softmax()}
    terms = _terms(encoding, q, k, queries, keys, settings)
    if settings.drops_scores and settings.dropout and terms.weigh is masked_softmax:
        given = terms._replace(weigh=partial(_softmax_of_kept, settings.dropout))._asdict()
        return softmax_attention_naive(q, k, v, **given, **{**options, "dropout": 0.0})
    if terms.rescore is None:
        return softmax_attention(q, k, v, bias=terms.bias, **options)
    own = {"rescore": terms.rescore, "weigh": terms.weigh}
    return softmax_attention_naive(q, k, v, **own, **options)


def _softmax_of_kept(
    p: float, scores: Tensor, visible: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Compute a softmax after setting scores to -1e8 with probability ``p``, in float32 or wider.

    As in the published code of Algebraic Positional Encodings, hidden keys have -1e10 and may be
    dropped too. A query whose visible keys are all dropped attends to all dropped keys.
    """
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    wide = wide if visible is None else wide.masked_fill(~visible, -1e10)
    dropped = torch.rand(wide.shape, device=wide.device) < p
    return wide.masked_fill(dropped, -1e8).softmax(-1).to(dtype)


def _terms(
    encoding: Encoding, q: Tensor, k: Tensor, queries: Tokens, keys: Tokens, settings: Settings
) -> Terms:
    """Return what ``encoding`` and the score decay do to the scores of a block.

    A score encoding runs without autocast, which would round what it computes in float32.
    """
    factor = _score_factor(encoding, queries, keys, settings.score_decay, q.dtype)
    if encoding.serves_linear:
        return _decay_terms(encoding, q.dtype, queries, keys, factor, settings.causal)
    given = q * settings.scale, k, queries.positions, keys.positions
    exact = partial(torch.autocast, q.device.type, enabled=False)
    if encoding.additive and factor is None:
        with exact():
            bias = _bias_of_lags(encoding, queries, keys, q.dtype)
            return Terms(encoding.bias(*given) if bias is None else bias)

    def rescore(scores: Tensor, visible: Tensor | None) -> Tensor:
        with exact():
            encoded = encoding(scores, *given, visible)
        return encoded if factor is None else encoded * factor

    own = type(encoding).weigh is not ScoreEncoding.weigh
    return Terms(None, rescore, encoding.weigh if own else masked_softmax)


def _bias_of_lags(
    encoding: ScoreEncoding, queries: Tokens, keys: Tokens, dtype: torch.dtype
) -> Tensor | None:
    """Return a bias that is a function of the lag, (H, T, S) or (B, H, T, S), without reading it.

    None if the encoding has no such bias, or the range of the positions is not known.
    """
    of_q, of_k = queries.ends, keys.ends
    if of_q is None or of_k is None or not keys.positions.numel():
        return None
    first, last = of_q[0] - of_k[1], of_q[1] - of_k[0]
    table = encoding.bias_by_lag(first, last, keys.positions.device)
    if table is None:
        return None
    table = table.to(torch.promote_types(dtype, torch.float32))  # its gradient sums over pairs
    if queries.first is not None and keys.first is not None:
        return by_diagonals(table, queries.positions.shape[-1]).to(dtype)
    lag = queries.positions.unsqueeze(-1) - keys.positions.unsqueeze(-2)
    bias = table[:, lag - first].to(dtype)
    return bias if lag.dim() == 2 else bias.transpose(0, 1)


def by_diagonals(table: Tensor, rows: int) -> Tensor:
    """Return the pairs (H, T, S) of a function of the lag, T = ``rows``.

    table: (H, T + S - 1), the values of the lags from those of the first query and the last key on.
    """
    columns = table.shape[-1] - rows + 1
    return table.flip(-1).unfold(-1, columns, 1).flip(-2)


def _score_factor(
    encoding: Encoding, queries: Tokens, keys: Tokens, decay: float, dtype: torch.dtype
) -> Tensor | None:
    """Return c^n, (1, T, S) or (B, 1, T, S), n the distance; None for c = 1."""
    if decay == 1:
        return None
    steps = encoding.steps_between(queries.positions, keys.positions)
    return (math.log(decay) * steps.double()).exp().to(dtype).unsqueeze(-3)


def _decay_terms(
    encoding: QueryKeyEncoding,
    dtype: torch.dtype,
    queries: Tokens,
    keys: Tokens,
    factor: Tensor | None,
    causal: bool,
) -> Terms:
    """Return gates, a constant decay, or both, as terms in ``dtype``.

    factor: (H or 1, T, S) or (B, 1, T, S), by which scores are multiplied; None for 1.
    """
    log_decay = encoding.log_decay()
    exponents, on_score = [], factor
    if queries.sums is not None:
        exponents.append(queries.sums.unsqueeze(-1) - keys.sums.unsqueeze(-2))
    if log_decay is not None and encoding.decay_on == "score":
        own = torch.exp(decay_exponent(log_decay, queries, keys, causal))
        on_score = own if factor is None else own * factor
    elif log_decay is not None:
        wide = log_decay.to(torch.promote_types(log_decay.dtype, dtype))
        exponents.append(decay_exponent(wide, queries, keys, causal))
    bias = sum(exponents).clamp(LOWEST, 0.0).to(dtype) if exponents else None
    if on_score is None:
        return Terms(bias)

    def rescore(scores: Tensor, visible: Tensor | None) -> Tensor:
        return scores * on_score if bias is None else scores * on_score + bias

    return Terms(None, rescore)
