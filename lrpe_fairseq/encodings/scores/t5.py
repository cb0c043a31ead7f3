"""T5's relative position bias (Raffel et al., 2020, Section 2.1): one scalar per bucket."""

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.departures import Departure
from lrpe_fairseq.encodings.core.options import LONGEST, EncodingSpec, option
from lrpe_fairseq.encodings.core.positions import constant
from lrpe_fairseq.encodings.core.protocols import Card
from lrpe_fairseq.encodings.scores.biases import LagBias
from lrpe_fairseq.errors import ChoiceError


class T5Bias(LagBias):
    """score_st + b_h[bucket(s - t)], a learned table b (H, buckets) per layer.

    Buckets: :func:`bucket_starts`. A causal model uses all of them for earlier keys, a
    bidirectional model half of them for each direction. The table is initialized from
    N(0, 1/(H D)), as in the public T5 implementation.

    Trap: T5 shares one table between all layers. Here, as in the comparison of LRPE (Table 2), each
    layer has a separate table unless ``t5_shared`` is set.

    Raises: ChoiceError if there are too few buckets, or too small distances, for a logarithmic one.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of T5: the largest distance, and True if all layers share the table."""

        t5_max_distance: int = option(
            128, "T5: all distances from this on share the last bucket", least=2, most=LONGEST
        )
        t5_shared: bool = option(False, "T5: one table in all layers")

    card = Card(
        mechanism="bias",
        equation=r"\frac{q_s^\top k_t}{\sqrt D} + b_{h,\,\mathrm{bucket}(s - t)}",
        cost="O(T S) per head: a lookup",
        beyond="all distances from t5_max_distance on share one bias",
        source="[Raffel et al. (2020)](https://arxiv.org/abs/1910.10683), Section 2.1",
    )
    departures = {
        "t5-shared-bias": Departure(
            paper="a bias per head (T5, Raffel et al. 2020)",
            code="one for all heads of a layer",
            ours="one per head",
        ),
        "t5-unit-init": Departure(
            paper="(T5 initializes by N(0, 1/width))",
            code="N(0, 1), the default of nn.Embedding",
            ours="N(0, 1/(H D))",
        ),
    }

    def __init__(self, spec: EncodingSpec, buckets: int = 32) -> None:
        super().__init__(spec)
        options = self.options
        fidelity = spec.options.fidelity
        self.shared = options.t5_shared
        one_way = buckets if spec.causal else buckets // 2
        # not a buffer: ``to_empty`` would discard it, and no checkpoint restores it
        self._starts = tuple(bucket_starts(one_way, options.t5_max_distance))
        self.far = self._starts[-1]  # where the last bucket begins
        heads = 1 if "t5-shared-bias" in fidelity else spec.num_heads
        std = 1.0 if "t5-unit-init" in fidelity else (spec.num_heads * spec.head_dim) ** -0.5
        draw = torch.randn(heads, buckets, generator=spec.generator("t5"), device="cpu")
        self.table = nn.Parameter(std * draw)

    def share_with(self, owner: "T5Bias") -> None:
        """Use the table of ``owner``."""
        self.table = owner.table

    def of_lag(self, lag: Tensor) -> Tensor:
        """Return b of every bucket, (..., heads)."""
        return F.embedding(lag, self.table.t())

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of s - t, int64 of any shape.

        In a causal model a key after the query is treated as distance 0; attention masks it.
        """
        starts = constant(self._starts, torch.int64, distance.device)
        if self.spec.causal:
            return torch.bucketize(distance.clamp_min(0), starts, right=True)
        one_way = torch.bucketize(distance.abs(), starts, right=True)
        return one_way + (distance < 0) * (starts.numel() + 1)

    fixed = bucket


def bucket_starts(buckets: int, max_distance: int) -> list[int]:
    """Return the smallest distances of the buckets 1, 2, ..., buckets - 1 of one direction.

    With e = buckets // 2, a distance n < e has bucket n, and a larger one has bucket
    e + floor((buckets - e) log(n/e) / log(max_distance/e)), at most buckets - 1, in integers.
    Raises: ChoiceError unless buckets >= 2 and max_distance > buckets // 2.

    >>> bucket_starts(8, 16)
    [1, 2, 3, 4, 6, 8, 12]
    """
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ChoiceError(
            f"T5 needs at least 2 buckets in one direction and a largest distance above half of "
            f"them, got {buckets} and {max_distance}: raise buckets or --t5-max-distance"
        )
    starts = list(range(1, exact + 1))
    distance = exact
    wide = buckets - exact
    for step in range(1, wide):  # smallest n with (n/e)^wide >= (max_distance/e)^step
        bound = max_distance**step * exact**wide
        distance = bisect_left(
            range(max_distance), bound, lo=distance, key=lambda n, step=step: n**wide * exact**step
        )
        starts.append(distance)
    return starts
