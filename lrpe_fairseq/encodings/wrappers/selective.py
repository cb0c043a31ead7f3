"""Selective RoPE (Movahedi et al., 2026), and ``selective:<name>`` on any LRPE type with angles.

Axes: B batch, H heads, T time, C width of the layer, E angles of a head.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.history import Earlier, causal_filter
from lrpe_fairseq.encodings.core.options import EncodingSpec, option
from lrpe_fairseq.encodings.core.parameters import undecayed
from lrpe_fairseq.encodings.core.positions import exact_type
from lrpe_fairseq.encodings.core.protocols import Card
from lrpe_fairseq.encodings.rotations.cores import CORES, Rotation
from lrpe_fairseq.encodings.rotations.lrpe import LRPE
from lrpe_fairseq.encodings.rotations.scaling import RotationOptions
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels.conditions import without_autocast

RANK, TAPS = 16, 4
"""Rank of the map from the text, and width of the causal filter, as in the authors' code."""


@dataclass(frozen=True)
class SelectiveOptions:
    """Options of ``selective:<name>``."""

    selective_silu: bool = option(False, "selective: a SiLU after the filter of the increments")
    selective_gate: bool = option(
        False, "selective: a gate 2 sigmoid(w_h x + b_h), 1 at the start, of a head's increments"
    )


class Increments(nn.Module):
    """delta_u = g_u (filter(W_2 W_1 x^_u) + exp(b)), the distance of a token from the last.

    x^ are the slices of x of each head, with norm 1. The filter is causal, of width 4 and per
    feature; b is per head and angle; g_u is 1 without ``selective_gate``. W_2, b and the weights of
    the gate start at 0, so that every increment starts at 1: the encoding starts at the inner one.
    """

    def __init__(self, spec: EncodingSpec, angles: int) -> None:
        super().__init__()
        self.heads = spec.num_heads
        width = spec.input_width
        if width % self.heads:
            raise ChoiceError(
                f"selective encodings slice the input of width {width} into {self.heads} heads of "
                "equal width: change the number of heads"
            )
        self.options = spec.options.of(SelectiveOptions)
        draw = partial(torch.rand, generator=spec.generator("selective"), device="cpu")
        zeros = partial(torch.zeros, device="cpu")
        # no nn.Linear: fairseq's BERT models would initialize it again
        self.down = nn.Parameter((2 * draw(RANK, width) - 1) / math.sqrt(width))
        self.up = nn.Parameter(zeros(self.heads * angles, RANK))
        self.filter = nn.Parameter((2 * draw(TAPS, self.heads * angles) - 1) / math.sqrt(TAPS))
        self.bias = undecayed(zeros(self.heads * angles))
        if self.options.selective_gate:
            self.gate = nn.Parameter(zeros(self.heads, width))
            self.gate_bias = nn.Parameter(zeros(self.heads))

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None,
        starts: Tensor | None,
        history: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sums of the increments up to each token; see ``Encoding.phases``."""
        wide = torch.promote_types(x.dtype, self.down.dtype)
        with without_autocast(x):
            steps, tail = self._steps(x.to(wide), padding, starts, history.get("tail"))
        if padding is not None:
            steps = steps.masked_fill(padding[:, None, :, None], 0.0)
        # float64: a phase of a long text has no bits to lose
        phases = steps.to(exact_type(x.device), memory_format=torch.contiguous_format).cumsum(2)
        before = history.get("phases")
        if isinstance(before, Earlier):
            before = before.total(phases[:, :, -1])
        if before is not None:
            phases = phases + before.unsqueeze(2)
        last = phases[:, :, -1] if x.shape[1] else history.get("phases", phases.sum(2))
        return phases, {"tail": tail, "phases": last}

    def _steps(
        self, x: Tensor, padding: Tensor | None, starts: Tensor | None, tail: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the increments (B, H, T, E) of x (B, T, C), and the tail of the filter."""
        unit = F.normalize(x.unflatten(-1, (self.heads, -1)), dim=-1).flatten(-2)
        low = F.linear(F.linear(unit, self.down.to(x)), self.up.to(x))
        taps = self.filter.to(x)
        steps, tail = causal_filter(low, taps, padding=padding, starts=starts, tail=tail)
        steps = F.silu(steps) if self.options.selective_silu else steps
        steps = (steps + self.bias.to(x).exp()).unflatten(-1, (self.heads, -1))
        if self.options.selective_gate:
            logits = F.linear(unit, self.gate.to(x), self.gate_bias.to(x))
            steps = 2 * torch.sigmoid(logits).unsqueeze(-1) * steps
        return steps.transpose(1, 2), tail


def selective(spec: EncodingSpec, inner: Callable[[EncodingSpec], LRPE]) -> LRPE:
    """Build a type of LRPE with angles theta, and turn by sums of increments: theta sum_u delta_u.

    Called with positions, without a text, it is the inner encoding: tokens are one apart. Trap:
    attention sums increments also if it is given explicit positions, which are not read then.
    """
    encoding = inner(spec)
    encoding.keys_by_head = True
    if encoding.whole_texts:
        scaling = spec.options.of(RotationOptions).context_scaling
        raise ChoiceError(
            f"selective:<name> sums its positions from the text, whose length --context-scaling "
            f"{scaling} does not know: use linear, ntk, yarn or llama3"
        )
    encoding.increments = Increments(spec, encoding.core.angles.shape[-1])
    encoding.properties = replace(encoding.properties, contextual=True, reach=TAPS - 1)
    encoding.card = Card(
        mechanism="rotation",
        equation=r"\mathrm{Re}\big[(\Lambda^{(\Phi_s)} P q_s)^{\mathsf H} \Lambda^{(\Phi_t)} P k_t"
        r"\big],\quad \Phi_s = \sum_{u \le s} \big[(f * W_2 W_1 \hat x)_u + e^{b}\big]",
        cost="16 (C + H E) + 5 H E parameters, E angles of a head; O(C) per token, and phases "
        "(B, H, T, E)",
        beyond="As the encoding: nothing for phases that training has not seen; the text sets how "
        "fast they grow.",
        source="[Movahedi et al. (2026)](https://openreview.net/forum?id=AQo1SEElNb), on another "
        "encoding",
    )
    return encoding


def can_be_selective(constructor: Callable) -> bool:
    """True for the constructor of a type of LRPE whose Lambda is a power of angles."""
    if getattr(constructor, "func", None) is not LRPE:
        return False
    return issubclass(CORES[constructor.keywords["core"]], Rotation)
