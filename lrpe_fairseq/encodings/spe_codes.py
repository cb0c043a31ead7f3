"""The codes of SPE (Liutkus et al., 2021): random signals whose covariance depends on the distance.

A *code* is a pair of random signals qbar and kbar for every head and feature, in R independent
realizations, with cross-covariance E[qbar(s) kbar(t)] = c(s - t).

Axes: H heads, T or N positions, D key width, K sines, P taps, R realizations.
"""

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.encodings.base import undecayed
from lrpe_fairseq.encodings.options import EncodingSpec, option

BLOCK = 256
"""Positions for which the convolutional code draws noise at once."""


@dataclass(frozen=True)
class SPEOptions:
    """Options of SPE: the kind of code and its sizes."""

    spe_code: str = option("sine", "SPE: kind of code", choices=("sine", "convolution"))
    spe_realizations: Optional[int] = option(None, "SPE: realizations R (default: the head width)")
    spe_sines: int = option(10, "SPE: sines per feature")
    spe_gated: bool = option(True, "SPE: learned gates add a position-independent part")
    spe_shared: bool = option(False, "SPE: one code in all layers")


class SineCode(nn.Module):
    """qbar, kbar = weighted sums of sines with common noise (SPE, Section 3.1; SineSPE).

    c(n) = 1/(2K) sum_k g_k^2 cos(2 pi f_k n + o_k) per head and feature, with learned frequencies
    f = sigmoid(.)/2, gains g = softplus(.) and offsets o, from N(0, 1). Then, as in the authors'
    code, 4 is subtracted from f (long waves), and g is divided by sqrt(norm over k) / 2.
    """

    def __init__(self, spec: EncodingSpec, realizations: int) -> None:
        super().__init__()
        one = "spe-one-sine" in spec.options.fidelity
        sines = 1 if one else spec.options.of(SPEOptions).spe_sines
        generator = spec.generator(stream=6)
        shape = (spec.num_heads, spec.head_dim, sines)
        frequency, offset, gain = torch.randn(3, *shape, generator=generator, device="cpu")
        self.frequency = undecayed(frequency - 4.0)
        self.offset = undecayed(offset)
        self.gain = nn.Parameter(gain * 2.0 / gain.norm(dim=-1, keepdim=True).sqrt())
        noise = torch.randn(*shape[:2], 2 * sines, realizations, generator=generator, device="cpu")
        self.register_buffer("noise", noise)
        self.drawn: Tensor | None = None

    def draw(self) -> None:
        """Draw the noise of the next forward pass in training from torch's global generator."""
        self.drawn = torch.randn_like(self.noise)

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


class ConvCode(nn.Module):
    """qbar, kbar = white noise under two learned filters of P taps (SPE, Section 3.2; ConvSPE).

    qbar(s) = sum_p a_p z(s + p) and kbar(t) = sum_p b_p z(t + p), hence
    c(n) = sum_p a_p b_(p+n), which is zero for distances of at least P. Taps are initialized from
    U(0, 1) / sqrt(P/2). The noise z is a function of (seed, position), generated in blocks of
    :data:`BLOCK` positions, so overlapping windows of any length agree.
    """

    def __init__(self, spec: EncodingSpec, realizations: int, taps: int = 128) -> None:
        super().__init__()
        self.shape = (spec.num_heads, spec.head_dim, realizations)
        generator = spec.generator(stream=6)
        draw = torch.rand(2, *self.shape[:2], taps, generator=generator, device="cpu")
        self.kernels = nn.Parameter(draw / math.sqrt(taps / 2.0))  # of qbar, of kbar
        self.register_buffer("seed", torch.tensor(spec.seed, device="cpu"))  # of evaluation
        self.drawn: int | None = None
        self._blocks: dict[tuple, Tensor] = {}

    def draw(self) -> None:
        """Draw the seed of the next forward pass in training from torch's global generator."""
        self.drawn = int(torch.randint(2**31, ()))

    def forward(
        self, q_positions: Tensor, k_positions: Tensor, fixed: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the codes; see :meth:`SineCode.forward`."""
        q_kernel, k_kernel = self.kernels
        qbar = self._code(q_kernel, q_positions, fixed)
        return qbar, self._code(k_kernel, k_positions, fixed)

    def template(self, lags: Tensor) -> Tensor:
        """Return c(n) for int64 lags n (N,): (H, D, N) float64."""
        q_kernel, k_kernel = self.kernels.double()
        taps = q_kernel.shape[-1]
        index = torch.arange(taps, device=lags.device) + lags.clamp(-taps, taps).unsqueeze(-1)
        shifted = F.pad(k_kernel, (taps, taps))[..., index + taps]  # H D N P
        return (q_kernel.unsqueeze(-2) * shifted).sum(-1)

    def _code(self, kernel: Tensor, positions: Tensor, fixed: bool) -> Tensor:
        """Return the code of one filter at int64 positions (T,): (H, T, D, R)."""
        runs, index = contiguous_runs(positions, gap=kernel.shape[-1])
        parts = [self._correlate(kernel, first, last, fixed) for first, last in runs]
        code = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return code if index is None else code.index_select(1, index)

    def _correlate(self, kernel: Tensor, first: int, last: int, fixed: bool) -> Tensor:
        """Return sum_p kernel_p z(s + p) for s = first..last: (H, last - first + 1, D, R)."""
        window = last - first + kernel.shape[-1]
        z = self._noise(first, first + window, fixed)  # H D R W
        spectrum = torch.fft.rfft(kernel.unsqueeze(-2), n=window).conj()
        signal = torch.fft.irfft(torch.fft.rfft(z) * spectrum, n=window)
        return signal[..., : last - first + 1].movedim(-1, 1)

    def _noise(self, first: int, stop: int, fixed: bool) -> Tensor:
        """Return white noise at positions first..stop-1: (H, D, R, stop - first).

        The blocks of the last window are cached, so decoding token by token draws each block once.
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
        where = torch.device("cpu") if fixed else device  # evaluation is equal on all devices
        generator = torch.Generator(where).manual_seed(seed * 1_000_003 + 1_000 + block)
        draw = torch.randn(*self.shape, BLOCK, generator=generator, device=where)
        return draw.to(device)


def contiguous_runs(positions: Tensor, gap: int) -> tuple[list[tuple[int, int]], Tensor | None]:
    """Return runs [(first, last), ...] that cover int64 ``positions`` (T,), and an index (T,).

    Neighboring positions less than ``gap`` apart are in the same run. The index locates each
    position in the concatenation of all runs; None if it is 0, 1, ..., T-1 and nothing else.
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


CODES = {"sine": SineCode, "convolution": ConvCode}
"""Codes by their ``spe_code`` names."""
