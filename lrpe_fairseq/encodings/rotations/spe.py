"""Stochastic positional encoding, SPE (Liutkus et al., 2021): gated SineSPE.

A filter sums the features of q_s against a random code for position s. A code is a pair of random
signals qbar and kbar for every head and feature, in R independent realizations, with
cross-covariance E[qbar(s) kbar(t)] = c(s - t).

Axes: H heads, T or N positions, D key width, K sines, R realizations.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lrpe_fairseq.encodings.core.departures import Departure
from lrpe_fairseq.encodings.core.options import EncodingSpec, option
from lrpe_fairseq.encodings.core.parameters import undecayed
from lrpe_fairseq.encodings.core.positions import (
    PositionCache,
    check_positions,
    counted,
    known_range,
)
from lrpe_fairseq.encodings.core.protocols import Card, Properties, QueryKeyEncoding
from lrpe_fairseq.encodings.core.randomness import noise_rank
from lrpe_fairseq.kernels.conditions import may_read_values

MOST = 2**16
"""Sines, and realizations, at most."""
GATHERED = 2**24
"""Maximum number of gathered code entries if positions have a batch axis (64 MB)."""


@dataclass(frozen=True)
class SPEOptions:
    """Options of SPE."""

    spe_realizations: Optional[int] = option(
        None, "SPE: realizations R (default: the head width)", least=1, most=MOST
    )
    spe_sines: int = option(10, "SPE: sines per feature", least=1, most=MOST)
    spe_gated: bool = option(True, "SPE: learned gates add a position-independent part")
    spe_shared: bool = option(False, "SPE: one code in all layers")


class SineCode(nn.Module):
    """qbar, kbar = weighted sums of sines with common noise (SPE, Section 3.1; SineSPE).

    c(n) = 1/(2K) sum_k g_k^2 cos(2 pi f_k n + o_k) per head and feature, with f = sigmoid(a) / 2
    and g = softplus(b). The learned a, b and offsets o are drawn from N(0, 1). As in the authors'
    code, 4 is then subtracted from a (long waves), and b is divided by sqrt(|b|) / 2, where |b| is
    its norm over k.
    """

    def __init__(self, spec: EncodingSpec, realizations: int) -> None:
        super().__init__()
        one = "spe-one-sine" in spec.options.fidelity
        sines = 1 if one else spec.options.of(SPEOptions).spe_sines
        generator = spec.generator("spe-code")
        shape = (spec.num_heads, spec.head_dim, sines)
        frequency, offset, gain = torch.randn(3, *shape, generator=generator, device="cpu")
        self.frequency = undecayed(frequency - 4.0)
        self.offset = undecayed(offset)
        self.gain = nn.Parameter(gain * 2.0 / gain.norm(dim=-1, keepdim=True).sqrt())
        noise = torch.randn(*shape[:2], 2 * sines, realizations, generator=generator, device="cpu")
        self.register_buffer("noise", noise)
        self.drawn: Tensor | None = None

    def draw(self) -> None:
        """Draw the noise of the next forward pass in training; see :func:`noise_like`."""
        self.drawn = noise_like(self.noise)

    def forward(
        self, q_positions: Tensor, k_positions: Tensor, fixed: bool
    ) -> tuple[Tensor, Tensor]:
        """Return qbar (H, T, D, R) at int64 positions (T,) and kbar (H, S, D, R) at (S,).

        fixed: True for the fixed noise of evaluation, False for the noise drawn last.
        """
        z_q, z_k = self._weights(self.noise if fixed else self.drawn)
        q_waves = self.waves(q_positions)
        k_waves = q_waves if k_positions is q_positions else self.waves(k_positions)
        code = "htdj,hdjr->htdr"
        return torch.einsum(code, q_waves, z_q), torch.einsum(code, k_waves, z_k)

    def waves(self, positions: Tensor) -> Tensor:
        """Return [cos, sin](2 pi f s) at int64 positions s (T,): (H, T, D, 2K).

        The number of turns f s is computed in float64.
        """
        turns = torch.frac(positions[:, None, None].double() * self._frequency().unsqueeze(1))
        angle = 2.0 * math.pi * turns.to(self.frequency.dtype)
        return torch.cat([angle.cos(), angle.sin()], dim=-1)

    def template(self, lags: Tensor) -> Tensor:
        """Return c(n) for int64 lags n (N,): (H, D, N) float64."""
        turns = lags[:, None].double() * self._frequency().unsqueeze(-2)  # H D N K
        waves = torch.cos(2.0 * math.pi * turns + self.offset.double().unsqueeze(-2))
        return (F.softplus(self.gain.double()).square().unsqueeze(-2) * waves).mean(-1) / 2.0

    def _frequency(self) -> Tensor:
        """Return the frequencies (H, D, K) in turns per token, float64, between 0 and 1/2."""
        return torch.sigmoid(self.frequency.double()) / 2.0

    def _weights(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Convert noise (H, D, 2K, R) into the weights of the waves for qbar and for kbar.

        The noise is rotated by the offset o, so that qbar and kbar use the same waves.
        """
        gain = F.softplus(self.gain).unsqueeze(-1) / math.sqrt(z.shape[-2])
        cos_part, sin_part = (gain * half for half in z.chunk(2, dim=-2))
        cos, sin = self.offset.cos().unsqueeze(-1), self.offset.sin().unsqueeze(-1)
        rotated = [cos * cos_part + sin * sin_part, cos * sin_part - sin * cos_part]
        return torch.cat(rotated, dim=-2), torch.cat([cos_part, sin_part], dim=-2)


class SPE(QueryKeyEncoding):
    """q~_s[r] = sum_d qbar_dr(s) q_s[d], k~_t[r] = sum_d kbar_dr(t) k_t[d], r = 1..R.

    With a gate g = sigmoid(.) for every head and feature (learned, initialized from N(0, 1)), a
    code is replaced by sqrt(1-g) times the code plus sqrt(g) eps. eps is standard normal noise
    that does not depend on the position and is common to q and k. Codes are divided by sqrt(R),
    hence

        E[q~_s . k~_t] = sum_d q_s[d] k_t[d] ((1 - g_d) c_d(s - t) + g_d).

    This is the plain score with a template, so the caller's factor D^-0.5 is unchanged. For R = D,
    the default, the scaling equals SPE's (R D)^(-1/4). Otherwise SPE's features are (R/D)^(1/4)
    times these, and its softmax compensates for the factor.

    The noise is common to the batch and to q and k of one call. In training each forward pass draws
    new noise, and each process of a group its own (:func:`noise_like`), so that a training in N
    processes equals one in a single process in distribution only. Evaluation uses fixed noise, a
    function of the position, so that decoding token by token gives the same features as the
    parallel form. It is saved in the checkpoint.

    A code takes H T D R numbers of memory, independently of the batch size; also for positions
    (B, T) if all rows have the same positions in any order (padding).

    Trap: with ``spe_shared`` the layer that owns the code draws the noise for the later layers, so
    it must run first. Where it may not run, or a layer is computed again, the caller sets
    ``code.drawn`` (``models.layers``).
    """

    Options = SPEOptions
    keys_by_head = True
    card = Card(
        mechanism="rotation",
        equation=r"\mathbb{E}[\tilde q_s^\top \tilde k_t] ="
        r" \sum_d q_{s,d}\, k_{t,d}\, \big((1 - g_d)\, c_d(s - t) + g_d\big)",
        cost="O(D R) per token and head; a random code of H T D R numbers",
        beyond="the learned templates continue as sums of sinusoids",
        source="[Liutkus et al. (2021)](https://arxiv.org/abs/2105.08399)",
    )
    departures = {
        "spe-along-batch": Departure(
            paper="SPE's code is a function of the position (SPE, Liutkus et al. 2021)",
            code="passes (length, batch) for (batch, length): the code varies over the batch and "
            'is constant along the sequence, so the "SPE" rows contain no position',
            ours="the code runs along the sequence and is shared by the batch",
        ),
        "spe-after-feature-map": Departure(
            paper="q and k are filtered by the code, then mapped by phi",
            code="phi first, so that the features which linear attention sums are signed",
            ours="filter first",
        ),
        "spe-noise-at-eval": Departure(
            paper="(not stated)",
            code="draws new noise in every forward, in evaluation too: scores are random",
            ours="noise is fixed in evaluation, so that decoding token by token equals the "
            "parallel form",
        ),
        "spe-one-sine": Departure(
            paper="5 to 10 sines per feature in SPE's own experiments",
            code="1",
            ours=f"{SPEOptions.spe_sines} (`--spe-sines`)",
        ),
    }

    properties = Properties(relative="in expectation", keeps_norm=False)

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        options = self.options
        self.shared = options.spe_shared
        self.realizations = options.spe_realizations
        if self.realizations is None:
            self.realizations = spec.head_dim
        self.code = SineCode(spec, self.realizations)
        self.gate = None
        if options.spe_gated:
            generator = spec.generator("spe-gate")
            shape = (spec.num_heads, spec.head_dim)
            self.gate = nn.Parameter(torch.randn(shape, generator=generator, device="cpu"))
            eps = torch.randn(*shape, self.realizations, generator=generator, device="cpu")
            self.register_buffer("gate_noise", eps)
        self.before_feature_map = "spe-after-feature-map" not in spec.options.fidelity
        self._draws = True  # False if another layer owns the code and draws its noise
        self._rows = PositionCache()

    @property
    def feature_dim(self) -> int:
        """R, the number of realizations."""
        return self.realizations

    def share_with(self, owner: "SPE") -> None:
        """Use the code and noise of ``owner``. Each layer keeps a separate gate."""
        self.code = owner.code
        self._draws = False

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Filter q and k; see :meth:`QueryKeyEncoding.forward`. The encoded width is R."""
        check_positions(q_positions, q)
        check_positions(k_positions, k)
        if "spe-along-batch" not in self.spec.options.fidelity:
            return self._filter(q, k, q_positions, k_positions)
        places = torch.arange(q.shape[0], device=q.device)
        q, k = self._filter(q.transpose(0, 2), k.transpose(0, 2), places, places)
        return q.transpose(0, 2), k.transpose(0, 2)

    def template(self, lags: Tensor) -> Tensor:
        """Return (1 - g) c(n) + g for int64 lags n (N,): (H, D, N) float64."""
        c = self.code.template(lags)
        if self.gate is None:
            return c
        gate = torch.sigmoid(self.gate.double()).unsqueeze(-1)
        return (1.0 - gate) * c + gate

    def _filter(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        fixed = not (self.training or "spe-noise-at-eval" in self.spec.options.fidelity)
        if not fixed and (self._draws or self.code.drawn is None):
            self.code.draw()
        q_distinct, q_rows = self._distinct(q_positions)
        same = k_positions is q_positions
        k_distinct, k_rows = (q_distinct, q_rows) if same else self._distinct(k_positions)
        qbar, kbar = self.code(q_distinct, k_distinct, fixed)
        through = self._through_gate(fixed)
        q = self._apply_code(q, qbar, q_rows, through)
        return q, self._apply_code(k, kbar, k_rows, through)

    def _distinct(self, positions: Tensor) -> tuple[Tensor, "Rows | None"]:
        """Return positions (T,) unchanged, or the distinct ones (N,) of (B, T) and their rows."""
        if positions.dim() == 1:
            return positions, None
        return self._rows.get(positions, None, lambda: distinct_of_rows(positions))

    def _through_gate(self, fixed: bool) -> tuple[Tensor, Tensor] | None:
        """Return sqrt(1-g) (H, 1, D) and sqrt(g) eps (H, D, R), or None without gates."""
        if self.gate is None:
            return None
        eps = self.gate_noise if fixed else noise_like(self.gate_noise)
        gate = torch.sigmoid(self.gate)
        return (1.0 - gate).sqrt().unsqueeze(1), gate.sqrt().unsqueeze(-1) * eps

    def _apply_code(
        self, x: Tensor, code: Tensor, rows: "Rows | None", through: tuple[Tensor, ...] | None
    ) -> Tensor:
        """Apply code (H, N, D, R) and gate to x (B, H, T, D): (B, H, T, R).

        sqrt(1-g) multiplies x, so that no second tensor of the code's size is allocated.
        """
        scale = self.realizations**-0.5
        if through is None:
            return filter_features(x * scale, code.to(x.dtype), rows)
        keep, constant = (scale * part for part in through)
        coded = filter_features(x * keep.to(x.dtype), code.to(x.dtype), rows)
        return coded + x @ constant.to(x.dtype)


def noise_like(x: Tensor) -> Tensor:
    """Return N(0, 1) in the shape of x from torch's global generator, other noise in every process.

    fairseq seeds the global generators of all processes alike at every update. So only the first
    process draws from them, as one alone does. Every other process seeds a generator of its own
    with a number drawn from them plus its rank, so that a resumed training draws the same again.
    Processes that hold parts of one text draw the same.
    """
    rank = noise_rank()
    if rank == 0:
        return torch.randn_like(x)
    seed = int(torch.randint(2**62, (), device="cpu")) + rank
    generator = torch.Generator(x.device).manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)


class Rows(NamedTuple):
    """Indices of the tokens' positions (B, T) into N distinct positions.

    index: int64 (B, T), the index of each token's position. order: int64 (B, N), the token with
    each position, if every row has every position exactly once; else None.
    """

    index: Tensor
    order: Tensor | None


def distinct_of_rows(positions: Tensor) -> tuple[Tensor, Rows]:
    """Return distinct positions (N,) that include all of int64 (B, T), and their indices."""
    known = known_range(positions)
    device = positions.device
    if known is not None:  # some of them may be absent
        index = positions - known[0]
        count = known[1] - known[0] + 1
        order = index.argsort(1) if count == positions.shape[1] else None
        return counted(known[1] + 1, device, known[0]), Rows(index, order)
    if not may_read_values(positions):
        every = positions.flatten()
        return every, Rows(torch.arange(len(every), device=device).view_as(positions), None)
    distinct, index = positions.unique(return_inverse=True)
    if len(distinct) != index.shape[1]:
        return distinct, Rows(index, None)
    order = index.argsort(1)
    every = torch.arange(len(distinct), device=index.device).expand_as(index)
    return distinct, Rows(index, order if torch.equal(index.gather(1, order), every) else None)


def filter_features(x: Tensor, code: Tensor, rows: Rows | None) -> Tensor:
    """Compute sum_d x[b,h,t,d] code[h,n,d,r], n = t or rows.index[b,t]: (B, H, T, R).

    If every row has every position once (a padded batch), the tokens are sorted by position first.
    Otherwise the code is gathered per row, for at most :data:`GATHERED` entries at once, and again
    in the backward pass.
    """
    if rows is None:
        return torch.einsum("bhtd,htdr->bhtr", x, code)
    if rows.order is not None:
        return _gathered(filter_features(_gathered(x, rows.order), code, None), rows.index)
    entries = code.shape[0] * code.shape[2] * code.shape[3]  # of one position; there may be none
    per_row = entries * max(1, rows.index.shape[-1])
    count = max(1, GATHERED // per_row)
    parts = zip(x.split(count), rows.index.split(count), strict=True)
    settings = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(_filter_rows, x, code, own, **settings) for x, own in parts])


def _gathered(x: Tensor, places: Tensor) -> Tensor:
    """Gather x (B, H, T, D) at indices ``places`` (B, T) of its third axis."""
    return x.gather(2, places[:, None, :, None].expand_as(x))


def _filter_rows(x: Tensor, code: Tensor, index: Tensor) -> Tensor:
    own = code.index_select(1, index.flatten())  # H bT D R
    filtered = x.transpose(0, 1).flatten(1, 2).unsqueeze(-2) @ own  # H bT 1 R
    return filtered.squeeze(-2).unflatten(1, index.shape).transpose(0, 1)
