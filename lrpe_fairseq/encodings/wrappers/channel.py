"""``gated-channel:<name>``: gates of single features in linear attention (Yang et al., 2024)."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.networks import as_stored, log_sigmoid
from lrpe_fairseq.encodings.core.options import EncodingSpec
from lrpe_fairseq.encodings.core.parameters import drawn
from lrpe_fairseq.encodings.core.positions import constant
from lrpe_fairseq.encodings.core.protocols import Card, QueryKeyEncoding
from lrpe_fairseq.encodings.none import NoEncoding
from lrpe_fairseq.encodings.rotations.cores import Unitary
from lrpe_fairseq.encodings.rotations.lrpe import LRPE
from lrpe_fairseq.encodings.wrappers.selective import can_be_selective
from lrpe_fairseq.kernels.conditions import without_autocast

RANK, TEMPERATURE = 16, 16.0
"""Rank of the map from the text, and the root that is taken of a sigmoid, as in the authors' code
(fla-org/flash-linear-attention bc3b101d, ``fla/layers/gla.py``: ``gate_low_rank_dim`` and
``gate_logit_normalizer``)."""


class ChannelGate(nn.Module):
    """log f_u = log sigmoid(W_2 W_1 x_u + b) / 16, one gate for each head, channel and token.

    W_1 (16, C) and W_2 (H G, 16) start from N(0, 0.02^2), and b from 0, so that a gate starts near
    0.958. channels: (D',), the channel 0..G-1 of every encoded feature.
    """

    def __init__(self, spec: EncodingSpec, channels: Tensor) -> None:
        super().__init__()
        self.heads = spec.num_heads
        count = self.heads * (int(channels.max()) + 1)
        generator = spec.generator("channel-gate")
        self.down, self.up = drawn(generator, RANK, spec.input_width), drawn(generator, count, RANK)
        self.bias = nn.Parameter(torch.zeros(count, device="cpu"))
        self.channels = tuple(channels.tolist())  # no buffer: transformers would not load it

    def forward(self, x: Tensor) -> Tensor:
        """Return log f of every encoded feature, (B, H, T, D') float32 or wider, of x (B, T, C)."""
        wide = torch.promote_types(x.dtype, self.down.dtype)
        with without_autocast(x):
            down, up, bias = (p.to(wide) for p in (self.down, self.up, self.bias))
            logits = as_stored(lambda x: F.linear(F.linear(x, down), up, bias), x.to(wide))
            logs = log_sigmoid(logits) / TEMPERATURE
        channels = constant(self.channels, torch.int64, x.device)
        return logs.unflatten(-1, (self.heads, -1)).transpose(1, 2)[..., channels]


def gated_channel(
    spec: EncodingSpec, inner: Callable[[EncodingSpec], QueryKeyEncoding]
) -> QueryKeyEncoding:
    """Build an encoding and gate each of its features: sum_j q~_sj k~_tj prod_(t<u<=s) f_uj.

    A decay of single features commutes with a rotation of pairs if both features of a pair have
    one gate, and a complex feature has one for both of its parts. A fixed P comes first: the gates
    act on the encoded features. Linear attention only, because a factor per feature is no bias of a
    score. On a GPU it runs in PyTorch.
    """
    encoding = inner(spec)
    encoding.forget_gate = ChannelGate(spec, channels_of(encoding))
    encoding.causal_only = True
    encoding.no_softmax = "decays every feature by a factor of its own, which is no bias of a score"
    encoding.unsplit = (
        "gates of single features cannot be split over processes: choose gated:<name>, or train "
        "in one process"
    )
    encoding.properties = replace(encoding.properties, contextual=True)
    encoding.card = Card(
        mechanism="gate",
        equation=r"\sum_j \tilde q_{sj}\, \tilde k_{tj} \prod_{u=t+1}^{s} f_{uj},\quad "
        r"f_u = \sigma(W_2 W_1 x_u + b)^{1/16}",
        cost="16 (C + H G) + H G parameters with G gates of a head; O(16 D) factors per token and "
        "head; linear attention only",
        beyond="As the encoding; each channel forgets at its own rate.",
        source="[Yang et al. (2024)](https://arxiv.org/abs/2312.06635), on another encoding",
    )
    return encoding


def channels_of(encoding: QueryKeyEncoding) -> Tensor:
    """Return the channel of every encoded feature, int64 (D',).

    Features that do not turn have channels of their own.
    """
    width = encoding.spec.head_dim
    if not isinstance(encoding, LRPE) or isinstance(encoding.core, Unitary):
        own = torch.arange(width, device="cpu")
    else:
        turned = encoding.core.turned
        pairs = torch.arange(turned, device="cpu") // 2
        still = turned // 2 + torch.arange(width - turned, device="cpu")
        own = torch.cat([pairs, still])
    return own.repeat(encoding.feature_dim // width)


def can_be_gated_by_channel(constructor: Callable) -> bool:
    """True for "none" and for types of LRPE whose Lambda turns pairs or complex features."""
    return constructor is NoEncoding or can_be_selective(constructor)
