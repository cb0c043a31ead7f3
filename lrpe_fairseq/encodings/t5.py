"""T5's relative position bias (Raffel et al., 2020, Section 2.1): one scalar per bucket."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.encodings.base import (
    EncodingSpec,
    PositionCache,
    ScoreEncoding,
    check_positions,
    option,
)
from lrpe_fairseq.errors import ChoiceError


class T5Bias(ScoreEncoding):
    """score_st + b_h[bucket(s - t)], a learned table b (H, buckets) per layer.

    Distances up to half the buckets of one direction have a bucket each; the others are
    logarithmic up to ``t5_max_distance``, beyond which all share the last (see
    :func:`bucket_starts`). A causal model gives all buckets to the past, a bidirectional one
    half to each direction. O(T S) like the scores. The table starts from N(0, 1/(H D)), as in
    the public T5 implementation, drawn from the spec's own generator.

    The trap: T5 shares one table among all layers. Here, as in the comparison of LRPE
    (Table 2), each layer has its own unless ``t5_shared`` is set and the model calls
    :func:`lrpe_fairseq.encodings.sharing.share_across_layers`.

    Raises: ChoiceError for numbers of buckets or distances that leave no logarithmic bucket.
    """

    @dataclass(frozen=True)
    class Options:
        """Sizes of the table, and whether layers share it."""

        t5_buckets: int = option(32, "T5: buckets of distances")
        t5_max_distance: int = option(128, "T5: distance from which on all share the last bucket")
        t5_shared: bool = option(False, "T5: one table in all layers")

    departures = {
        "t5-shared-bias": "T5 has one bias for all heads of a layer instead of one per head.",
        "t5-unit-init": (
            "T5's biases start from N(0, 1), nn.Embedding's default, instead of N(0, 1/(H D))."
        ),
    }

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        options, fidelity = self.options, spec.options.fidelity
        self.shared = options.t5_shared
        one_way = options.t5_buckets if spec.causal else options.t5_buckets // 2
        # no buffer: ``to_empty`` would lose it, and no checkpoint holds it
        self._starts = bucket_starts(one_way, options.t5_max_distance)
        heads = 1 if "t5-shared-bias" in fidelity else spec.num_heads
        std = (spec.num_heads * spec.head_dim) ** -0.5
        std = 1.0 if "t5-unit-init" in fidelity else std
        generator = spec.generator(stream=4)
        draw = torch.randn(heads, options.t5_buckets, generator=generator, device="cpu")
        self.table = nn.Parameter(std * draw)
        self._cache = PositionCache()

    def share_with(self, owner: "T5Bias") -> None:
        """Use ``owner``'s table from now on."""
        self.table = owner.table

    def bias(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """(H, T, S), or (B, H, T, S) where positions have a batch axis; the dtype of q."""
        check_positions(q_positions, q), check_positions(k_positions, k)
        table = self.table.t().to(q.dtype)
        return F.embedding(self.buckets(q_positions, k_positions), table).movedim(-1, -3)

    def buckets(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """int64 bucket of every pair, (T, S) or (B, T, S); computed once per pair of tensors."""
        return self._cache.get(
            (q_positions, k_positions),
            None,
            lambda: self.bucket(q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)),
        )

    def bucket(self, distance: Tensor) -> Tensor:
        """Bucket of s - t, int64 of any shape; a key after a causal query has distance 0."""
        starts = torch.tensor(self._starts, device=distance.device)
        if self.spec.causal:
            return torch.bucketize(distance.clamp_min(0), starts, right=True)
        one_way = torch.bucketize(distance.abs(), starts, right=True)
        return one_way + (distance < 0) * (starts.numel() + 1)


def bucket_starts(buckets: int, max_distance: int) -> list[int]:
    """The smallest distance of bucket 1, 2, ..., buckets - 1 of one direction.

    With e = buckets // 2, distance n < e has bucket n and a larger one
    e + floor((buckets - e) log(n/e) / log(max_distance/e)), at most buckets - 1. The
    inequality is solved in integers, so that no rounded logarithm decides at a boundary.
    Raises: ChoiceError unless buckets >= 2 and max_distance > buckets // 2.

    >>> bucket_starts(8, 16)
    [1, 2, 3, 4, 6, 8, 12]
    """
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ChoiceError(
            f"T5 needs at least 2 buckets in one direction and a largest distance above half of "
            f"them, got {buckets} and {max_distance}"
        )
    starts, distance, wide = list(range(1, exact + 1)), exact, buckets - exact
    for step in range(1, wide):  # smallest n with (n/e)^wide >= (max_distance/e)^step
        while distance**wide * exact**step < max_distance**step * exact**wide:
            distance += 1
        starts.append(distance)
    return starts
