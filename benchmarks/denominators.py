"""How often Eq. 39's denominator is below eps, for every encoding of linear attention.

    python -m benchmarks.denominators

Features are phi(x), x ~ N(0, 1), 8 heads of 64, 512 tokens, causal. The result is
results/bench/cpu/denominators.json; ``make docs`` renders results/settings.md from it. For trained
models see ``scripts/eval_lm.sh --protocols positions-L``.
"""

import torch
from torch import Tensor

from benchmarks.run import show, write
from lrpe_fairseq.attention.linear import EPS
from lrpe_fairseq.attention.multihead import feature_map
from lrpe_fairseq.encodings import ENCODINGS, QueryKeyEncoding, build_encoding, encoding_class
from lrpe_fairseq.experiments.records.machine import environment

PART = "denominators"
HEADS, WIDTH, LENGTH, DRAWS = 8, 64, 512, 20


def main() -> None:
    """Measure, print and write one run file."""
    linear = [name for name in ENCODINGS if encoding_class(name).serves_linear]
    rows = [{"encoding": name, **summary(random_shares(name))} for name in linear]
    show(PART, rows)
    settings = {"threads": torch.get_num_threads(), "dtype": "float32"}
    write("cpu", PART, {"part": PART, **environment(), **settings, "rows": rows})


def summary(found: Tensor) -> dict[str, float]:
    """Return the fraction of clamped denominators and the smallest share (see :func:`shares`)."""
    return {
        "under_eps": (found <= 0).double().mean().item(),
        "smallest_share": found.min().item(),
        "denominators": found.numel(),
    }


def random_shares(name: str) -> Tensor:
    """Return the shares (see :func:`shares`) of ``DRAWS`` draws of random features."""
    encoding = build_encoding(name, WIDTH, HEADS, causal=True).eval()
    generator = torch.Generator().manual_seed(0)
    shape = (2, 1, HEADS, LENGTH, WIDTH)
    draws = (torch.randn(shape, generator=generator) for _ in range(DRAWS))
    return torch.cat([shares(encoding, q, k).flatten() for q, k in draws])


def shares(encoding: QueryKeyEncoding, q: Tensor, k: Tensor) -> Tensor:
    """Return the denominator of Eq. 39 over that of the un-encoded features, (B, H, T).

    At most 0 where the denominator is below eps. q, k (B, H, T, D) are projections before phi.
    """
    positions = torch.arange(q.shape[2])
    plain = (feature_map(q) * feature_map(k).cumsum(2)).sum(-1)
    if encoding.before_feature_map:
        q, k = (feature_map(x) for x in encoding(q, k, positions, positions))
    else:
        q, k = encoding(feature_map(q), feature_map(k), positions, positions)
    log_decay = encoding.log_decay()
    if log_decay is None:
        denominator = (q * k.cumsum(2)).sum(-1)
    else:
        lag = (positions[:, None] - positions).clamp_min(0)
        weights = q @ k.transpose(-1, -2) * torch.exp(log_decay[:, None, None] * lag)
        denominator = weights.tril().sum(-1)
    return torch.where(denominator <= EPS, torch.zeros(()), denominator / plain)


if __name__ == "__main__":
    main()
