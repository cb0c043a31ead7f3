"""PermuteFormer (Chen, 2021): features permuted by position, and a decay in causal attention."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.departures import Departure
from lrpe_fairseq.encodings.core.forms import Form
from lrpe_fairseq.encodings.core.options import EncodingSpec
from lrpe_fairseq.encodings.core.positions import Lags, check_positions, constant
from lrpe_fairseq.encodings.core.protocols import Card, QueryKeyEncoding
from lrpe_fairseq.encodings.rotations.permutations import CyclicPowers, permute
from lrpe_fairseq.kernels.encode.encode import Transform, Variant

PUBLISHED_SEED = 0xDEADBEEFDEADBEEF
"""Seed of the one permutation of the departure ``permuteformer-shared-permutation``."""


class PermuteFormer(QueryKeyEncoding):
    """x~_s[j] = x_s[pi_h^s(j)] with a separate permutation pi_h for each head; norms are preserved.

    In causal attention the score of (s, t) is multiplied by r_h^(s-t) with
    r_h = sigmoid(2 + 3h/H), h = 0..H-1 (PermuteFormer's language model). A bidirectional model has
    no factor, since r^(s-t) grows without bound for t > s. pi is int64 (H, D) and saved in the
    checkpoint.
    """

    keys_by_head = True
    card = Card(
        mechanism="rotation",
        equation=r"r_h^{\,n}\, (\pi_h^s q_s)^\top (\pi_h^t k_t), \qquad "
        r"r_h = \sigma(2 + 3h/H) \text{ in causal attention, } r_h = 1 \text{ else}",
        cost="O(D) per token and head: a gather",
        beyond="the permutation repeats after its period; the decay of causal attention stays",
        source="[Chen (2021)](https://arxiv.org/abs/2109.02377)",
    )
    departures = {
        "permuteformer-shared-permutation": Departure(
            paper="a permutation per head (PermuteFormer, Chen 2021)",
            code="one for all heads and layers, drawn from the seed 0xdeadbeefdeadbeef",
            ours="one per head and layer",
        ),
    }

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        shared = "permuteformer-shared-permutation" in spec.options.fidelity
        self.register_buffer("permutation", _draw(spec, shared))
        self.cycles = CyclicPowers()
        self._log_ratios = log_ratios(spec.num_heads) if spec.causal else None

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Permute the features of q and k; see :meth:`QueryKeyEncoding.forward`."""
        return tuple(
            permute(x, self._order(check_positions(positions, x)))
            for x, positions in ((q, q_positions), (k, k_positions))
        )

    def transform(self, phi: bool) -> Transform:
        """Return the permutations as data; see :meth:`QueryKeyEncoding.transform`."""
        variant = Variant(phi=phi, permutes=True)
        return Transform(variant, powers=self._powers, angles=self._cycles)

    def _powers(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        return self._order(positions)

    def _cycles(self, device: torch.device) -> Tensor:
        return self.cycles.cycles(self.permutation)

    def _order(self, positions: Tensor) -> Tensor:
        """Return the indices of pi_h^s, (H, T, D) or (B, H, T, D)."""
        return self.cycles.powers(self.permutation, positions).transpose(-3, -2)

    def log_decay(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Return log r_h, (H,) float32, all negative; None in a bidirectional model."""
        if self._log_ratios is None:
            return None
        return constant(self._log_ratios, torch.float32, torch.device(device))

    def form(self, lags: Lags | None, positions: Tensor) -> Form:
        """Return the decay of the score; see :meth:`Encoding.form`."""
        return Form(score_decay=self.log_decay(positions.device))


@cache
def log_ratios(heads: int) -> tuple[float, ...]:
    """Return log sigmoid(2 + 3h/H) for every head: -0.127 for the first, at most -0.007."""
    head = torch.arange(heads, device="cpu")
    return tuple(F.logsigmoid(2.0 + 3.0 * head / heads).tolist())


def _draw(spec: EncodingSpec, shared: bool) -> Tensor:
    """Return the permutations (H, D), one of all heads if ``shared``."""
    generator = (
        torch.Generator().manual_seed(PUBLISHED_SEED) if shared else spec.generator("permuteformer")
    )
    draws = [
        torch.randperm(spec.head_dim, generator=generator, device="cpu")
        for _ in range(1 if shared else spec.num_heads)
    ]
    return torch.stack(draws).expand(spec.num_heads, -1).clone()
