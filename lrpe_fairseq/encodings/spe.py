"""Stochastic positional encoding, SPE (Liutkus et al., 2021): sine and convolutional, gated.

A *code* is a pair of random signals qbar and kbar for every head and feature, in R independent
realizations, whose cross-covariance E[qbar(s) kbar(t)] = c(s - t) depends on the distance
alone. A filter sums features against the code, so that R numbers carry q_s and its place s.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lrpe_fairseq.encodings.base import (
    EncodingSpec,
    PositionCache,
    QueryKeyEncoding,
    check_positions,
    option,
)
from lrpe_fairseq.errors import ChoiceError

BLOCK = 256
"""Positions whose noise is drawn at once in the convolutional code."""

GATHERED = 2**24
"""Code entries that are gathered at once where positions have a batch axis (64 MB)."""


@dataclass(frozen=True)
class SPEOptions:
    """The kind of code and its sizes."""

    spe_code: str = option("sine", "SPE: kind of code", choices=("sine", "convolution"))
    spe_realizations: Optional[int] = option(None, "SPE: realizations R (default: the head width)")
    spe_sines: int = option(10, "SPE: sines per feature")
    spe_kernel: int = option(128, "SPE: taps of the convolution")
    spe_gated: bool = option(True, "SPE: let features pass without position")
    spe_shared: bool = option(False, "SPE: one code in all layers")


# --- codes: positions -> random signals with a covariance of the distance alone ----------------


class SineCode(nn.Module):
    """qbar, kbar = gained sums of sines under common noise (SPE, Section 3.1; SineSPE).

    c(n) = 1/(2K) sum_k g_k^2 cos(2 pi f_k n + o_k) per head and feature, with frequencies
    f = sigmoid(.)/2 and gains g = softplus(.), all learned. They start at N(0, 1), frequencies
    4 lower (long waves), gains divided by sqrt(norm over k) / 2, as in the authors' code.
    """

    def __init__(self, spec: EncodingSpec, realizations: int) -> None:
        super().__init__()
        one = "spe-one-sine" in spec.options.fidelity
        sines = 1 if one else spec.options.of(SPEOptions).spe_sines
        generator = spec.generator(stream=6)
        shape = (spec.num_heads, spec.head_dim, sines)
        frequency, offset, gain = torch.randn(3, *shape, generator=generator, device="cpu")
        self.frequency = nn.Parameter(frequency - 4.0)
        self.offset = nn.Parameter(offset)
        self.gain = nn.Parameter(gain * 2.0 / gain.norm(dim=-1, keepdim=True).sqrt())
        noise = torch.randn(*shape[:2], 2 * sines, realizations, generator=generator, device="cpu")
        self.register_buffer("noise", noise)
        self.drawn: Tensor | None = None

    def draw(self) -> None:
        """Draw the noise of the next training forward from torch's global generator."""
        self.drawn = torch.randn_like(self.noise)

    def forward(
        self, q_positions: Tensor, k_positions: Tensor, fixed: bool
    ) -> tuple[Tensor, Tensor]:
        """qbar (H, T, D, R) at int64 (T,) and kbar (H, S, D, R) at (S,).

        ``fixed``: use the noise of evaluation, not the one drawn last.
        """
        z_q, z_k = self._weights(self.noise if fixed else self.drawn)
        q_waves = self.waves(q_positions)
        k_waves = q_waves if k_positions is q_positions else self.waves(k_positions)
        code = "htdj,hdjr->htdr"
        return torch.einsum(code, q_waves, z_q), torch.einsum(code, k_waves, z_k)

    def waves(self, positions: Tensor) -> Tensor:
        """[cos, sin](2 pi f s) at int64 (T,): (H, T, D, 2K), counted in float64 turns."""
        turns = torch.frac(positions[:, None, None].double() * self._frequency().unsqueeze(1))
        angle = 2.0 * math.pi * turns.to(self.frequency.dtype)
        return torch.cat([angle.cos(), angle.sin()], dim=-1)

    def template(self, lags: Tensor) -> Tensor:
        """c(n) for int64 lags (N,): (H, D, N) float64."""
        turns = lags[:, None].double() * self._frequency().unsqueeze(-2)  # H D N K
        waves = torch.cos(2.0 * math.pi * turns + self.offset.double().unsqueeze(-2))
        return (F.softplus(self.gain.double()).square().unsqueeze(-2) * waves).mean(-1) / 2.0

    def _frequency(self) -> Tensor:
        """(H, D, K) float64 turns per token, between 0 and 1/2."""
        return torch.sigmoid(self.frequency.double()) / 2.0

    def _weights(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Noise (H, D, 2K, R) as weights of the waves, for qbar and kbar.

        cos(a + o) and sin(a + o) are turned cos(a) and sin(a): turning the noise by the offset
        once spares qbar waves of its own.
        """
        gain = F.softplus(self.gain).unsqueeze(-1) / math.sqrt(z.shape[-2])
        cos_part, sin_part = (gain * half for half in z.chunk(2, dim=-2))
        cos, sin = self.offset.cos().unsqueeze(-1), self.offset.sin().unsqueeze(-1)
        turned = [cos * cos_part + sin * sin_part, cos * sin_part - sin * cos_part]
        return torch.cat(turned, dim=-2), torch.cat([cos_part, sin_part], dim=-2)


class ConvCode(nn.Module):
    """qbar, kbar = white noise under two learned filters of P taps (SPE, Section 3.2; ConvSPE).

    qbar(s) = sum_p a_p z(s + p) and kbar(t) = sum_p b_p z(t + p), hence
    c(n) = sum_p a_p b_(p+n), zero from distance P on. Taps start at U(0, 1) / sqrt(P/2).
    The noise z is a function of (seed, position), made in blocks: a forward draws a seed, and
    any window of it, even one token, agrees with any other. Costs O(log) of an FFT per token.
    """

    def __init__(self, spec: EncodingSpec, realizations: int) -> None:
        super().__init__()
        taps = spec.options.of(SPEOptions).spe_kernel
        self.shape = (spec.num_heads, spec.head_dim, realizations)
        generator = spec.generator(stream=6)
        draw = torch.rand(2, *self.shape[:2], taps, generator=generator, device="cpu")
        self.kernels = nn.Parameter(draw / math.sqrt(taps / 2.0))  # of qbar, of kbar
        self.register_buffer("seed", torch.tensor(spec.seed, device="cpu"))  # of evaluation
        self.drawn: int | None = None
        self._blocks: dict[tuple, Tensor] = {}

    def draw(self) -> None:
        """Draw the seed of the next training forward from torch's global generator."""
        self.drawn = int(torch.randint(2**31, ()))

    def forward(
        self, q_positions: Tensor, k_positions: Tensor, fixed: bool
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`SineCode.forward`."""
        q_kernel, k_kernel = self.kernels
        qbar = self._code(q_kernel, q_positions, fixed)
        return qbar, self._code(k_kernel, k_positions, fixed)

    def template(self, lags: Tensor) -> Tensor:
        """c(n) for int64 lags (N,): (H, D, N) float64."""
        q_kernel, k_kernel = self.kernels.double()
        taps = q_kernel.shape[-1]
        index = torch.arange(taps, device=lags.device) + lags.clamp(-taps, taps).unsqueeze(-1)
        shifted = F.pad(k_kernel, (taps, taps))[..., index + taps]  # H D N P
        return (q_kernel.unsqueeze(-2) * shifted).sum(-1)

    def _code(self, kernel: Tensor, positions: Tensor, fixed: bool) -> Tensor:
        """(H, T, D, R) of one filter at int64 (T,)."""
        runs, index = contiguous_runs(positions, gap=kernel.shape[-1])
        parts = [self._correlate(kernel, first, last, fixed) for first, last in runs]
        code = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return code if index is None else code.index_select(1, index)

    def _correlate(self, kernel: Tensor, first: int, last: int, fixed: bool) -> Tensor:
        """sum_p kernel_p z(s + p) for s = first..last: (H, last - first + 1, D, R)."""
        window = last - first + kernel.shape[-1]
        z = self._noise(first, first + window, fixed)  # H D R W
        spectrum = torch.fft.rfft(kernel.unsqueeze(-2), n=window).conj()
        signal = torch.fft.irfft(torch.fft.rfft(z) * spectrum, n=window)
        return signal[..., : last - first + 1].movedim(-1, 1)

    def _noise(self, first: int, stop: int, fixed: bool) -> Tensor:
        """White noise at positions first..stop-1: (H, D, R, stop - first).

        The blocks of the last window are kept, so that a token at a time draws nothing twice.
        """
        seed = int(self.seed) if fixed else self.drawn
        start = first // BLOCK
        keys = [(seed, fixed, block) for block in range(start, (stop - 1) // BLOCK + 1)]
        blocks = {key: self._block(key) for key in keys}
        self._blocks = blocks
        z = torch.cat([*blocks.values()], dim=-1)
        return z[..., first - start * BLOCK : stop - start * BLOCK].to(self.kernels.dtype)

    def _block(self, key: tuple[int, bool, int]) -> Tensor:
        device, known = self.kernels.device, self._blocks.get(key)
        if known is not None and known.device == device:
            return known
        seed, fixed, block = key
        where = torch.device("cpu") if fixed else device  # evaluation is alike on all devices
        generator = torch.Generator(where).manual_seed(seed * 1_000_003 + 1_000 + block)
        draw = torch.randn(*self.shape, BLOCK, generator=generator, device=where)
        return draw.to(device)


def contiguous_runs(positions: Tensor, gap: int) -> tuple[list[tuple[int, int]], Tensor | None]:
    """Runs [(first, last), ...] that cover int64 ``positions`` (T,), and each one's index.

    Positions less than ``gap`` apart stand in one run. The index (T,) counts through all runs
    and is None where it would be 0, 1, ..., T-1 and nothing else is covered.
    """
    distinct = positions.unique()
    breaks = distinct.diff() >= gap
    edge = breaks.new_ones(1)
    first, last = distinct[torch.cat([edge, breaks])], distinct[torch.cat([breaks, edge])]
    length = last - first + 1
    run = torch.bucketize(positions, first, right=True) - 1
    index = ((length.cumsum(0) - length) - first)[run] + positions
    trivial = torch.equal(index, torch.arange(int(length.sum()), device=index.device))
    runs = list(zip(first.tolist(), last.tolist(), strict=True))
    return runs, None if trivial else index


# --- the encoding ------------------------------------------------------------------------------

CODES = {"sine": SineCode, "convolution": ConvCode}
"""Codes by the name that ``spe_code`` takes."""


class SPE(QueryKeyEncoding):
    """q~_s[r] = sum_d qbar_dr(s) q_s[d], k~_t[r] = sum_d kbar_dr(t) k_t[d], r = 1..R.

    With the gate g = sigmoid(.) of a head's feature (learned, from N(0, 1)) a code becomes
    sqrt(1-g) times itself plus sqrt(g) eps, eps standard normal noise that is constant in
    position and common to q and k. Codes are divided by sqrt(R), hence

        E[q~_s . k~_t] = sum_d q_s[d] k_t[d] ((1 - g_d) c_d(s - t) + g_d),

    the plain score with a template; the caller's D^-0.5 is right as it is. Where R = D, the
    default, that is SPE's own (R D)^(-1/4); elsewhere SPE's features are (R/D)^(1/4) times
    these, which its softmax scores take back. The filter acts before the feature map.

    Noise is common to the batch, and to q and k of one call. In training every forward draws
    its own; evaluation has fixed noise, a function of the position, so that decoding token by
    token gives the features of the parallel form. The sine's is saved in the checkpoint, the
    convolution's by its seed.

    Costs O(D R) per token and head, and H T D R numbers of memory for a code, whatever the
    batch. Positions (B, T) cost the same where every row has the same ones in some order (padding);
    else they gather the code row by row and recompute that in the backward pass.

    The trap: with ``spe_shared`` (:func:`lrpe_fairseq.encodings.sharing.share_across_layers`)
    the layer that owns the code draws the noise for those after it, so it must run first.

    Raises: ChoiceError for an unknown ``spe_code`` or a count below 1.
    """

    Options = SPEOptions
    departures = {
        "spe-along-batch": (
            "SPE's codes are indexed by the place in the batch and constant along the sequence, "
            "so that they carry no position at all."
        ),
        "spe-after-feature-map": (
            "SPE filters phi(q) and phi(k), so that the features which linear attention sums are "
            "signed, instead of filtering q and k and applying phi to the result."
        ),
        "spe-noise-at-eval": (
            "SPE draws new noise at every forward in evaluation too, so that scores are random "
            "and decoding token by token disagrees with the parallel form."
        ),
        "spe-one-sine": (
            "SineSPE has one sine per feature where SPE's own experiments have 5 to 10."
        ),
    }

    relative = "in expectation"
    keeps_norm = False
    before_feature_map = True

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        options = self.options
        self.shared = options.spe_shared
        given = options.spe_realizations
        self.realizations = spec.head_dim if given is None else given
        if min(self.realizations, options.spe_sines, options.spe_kernel) < 1:
            raise ChoiceError("spe_realizations, spe_sines and spe_kernel must be positive")
        self.code = CODES[options.spe_code](spec, self.realizations)
        self.gate = self._make_gate() if options.spe_gated else None
        self.before_feature_map = "spe-after-feature-map" not in spec.options.fidelity
        self._draws = True  # a layer that shares another's code leaves drawing to it
        self._rows = PositionCache()

    def _make_gate(self) -> nn.Parameter:
        generator = self.spec.generator(stream=7)
        shape = (self.spec.num_heads, self.spec.head_dim)
        draw = torch.randn(shape, generator=generator, device="cpu")
        eps = torch.randn(*shape, self.realizations, generator=generator, device="cpu")
        self.register_buffer("gate_noise", eps)
        return nn.Parameter(draw)

    @property
    def feature_dim(self) -> int:
        """R, the number of realizations."""
        return self.realizations

    def share_with(self, owner: "SPE") -> None:
        """Use ``owner``'s code and noise from now on; the gate stays this layer's own."""
        self.code, self._draws = owner.code, False

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Filter; see :meth:`QueryKeyEncoding.forward`. Widths become R."""
        check_positions(q_positions, q), check_positions(k_positions, k)
        if "spe-along-batch" not in self.spec.options.fidelity:
            return self._filter(q, k, q_positions, k_positions)
        places = torch.arange(q.shape[0], device=q.device)
        q, k = self._filter(q.transpose(0, 2), k.transpose(0, 2), places, places)
        return q.transpose(0, 2), k.transpose(0, 2)

    def template(self, lags: Tensor) -> Tensor:
        """(1 - g) c(n) + g for int64 lags (N,): (H, D, N) float64."""
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
        """(T,) as it is; (B, T) as its distinct positions (N,) and where each row has them."""
        if positions.dim() == 1:
            return positions, None
        return self._rows.get(positions, None, lambda: distinct_of_rows(positions))

    def _through_gate(self, fixed: bool) -> tuple[Tensor, Tensor] | None:
        """sqrt(1-g) (H, 1, D) and sqrt(g) eps (H, D, R)."""
        if self.gate is None:
            return None
        eps = self.gate_noise if fixed else torch.randn_like(self.gate_noise)
        gate = torch.sigmoid(self.gate)
        return (1.0 - gate).sqrt().unsqueeze(1), gate.sqrt().unsqueeze(-1) * eps

    def _apply_code(
        self,
        x: Tensor,
        code: Tensor,
        rows: "Rows | None",
        through: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """x (B, H, T, D) through code (H, N, D, R) and the gate: (B, H, T, R).

        The gate's constant part is a product of its own, and its sqrt(1-g) multiplies x: no
        second tensor of the code's size is made.
        """
        scale = self.realizations**-0.5
        if through is None:
            return filter_features(x * scale, code.to(x.dtype), rows)
        keep, constant = (scale * part for part in through)
        coded = filter_features(x * keep.to(x.dtype), code.to(x.dtype), rows)
        return coded + x @ constant.to(x.dtype)


class Rows(NamedTuple):
    """Which of N distinct positions the tokens of a batch have.

    index: int64 (B, T), the place of each token among the N. order: int64 (B, N), the token at
    each place, where every row has every place once; else None.
    """

    index: Tensor
    order: Tensor | None


def distinct_of_rows(positions: Tensor) -> tuple[Tensor, Rows]:
    """The distinct positions (N,) of int64 (B, T), and where each row has them."""
    distinct, index = positions.unique(return_inverse=True)
    if len(distinct) != index.shape[1]:
        return distinct, Rows(index, None)
    order = index.argsort(1)
    every = torch.arange(len(distinct), device=index.device).expand_as(index)
    return distinct, Rows(index, order if torch.equal(index.gather(1, order), every) else None)


def filter_features(x: Tensor, code: Tensor, rows: Rows | None) -> Tensor:
    """sum_d x[b,h,t,d] code[h,n,d,r] with n = t, or n = rows.index[b,t]: (B, H, T, R).

    Rows that have every position once (a padded batch) are filtered in the order of the code.
    Elsewhere a code of each row's own would be B times as large; it is gathered for as many rows
    at a time as :data:`GATHERED` allows, and again in the backward pass.
    """
    if rows is None:
        return torch.einsum("bhtd,htdr->bhtr", x, code)
    if rows.order is not None:
        return _taken(filter_features(_taken(x, rows.order), code, None), rows.index)
    per_row = code[:, 0].numel() * max(1, rows.index.shape[-1])
    count = max(1, GATHERED // per_row)
    parts = zip(x.split(count), rows.index.split(count), strict=True)
    settings = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(_filter_rows, x, code, own, **settings) for x, own in parts])


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """x (B, H, T, D) at places (B, T) of its third axis."""
    return x.gather(2, places[:, None, :, None].expand_as(x))


def _filter_rows(x: Tensor, code: Tensor, index: Tensor) -> Tensor:
    own = code.index_select(1, index.flatten())  # H bT D R
    filtered = x.transpose(0, 1).flatten(1, 2).unsqueeze(-2) @ own  # H bT 1 R
    return filtered.squeeze(-2).unflatten(1, index.shape).transpose(0, 1)
