"""FoX, the Forgetting Transformer (Lin, Nikishin, He and Courville, 2025): forget gates."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.encodings.base import (
    Card,
    EncodingSpec,
    QueryKeyEncoding,
    check_positions,
    option,
)

START_STD = 0.02
"""Standard deviation of the initial weights of the gates, as in the authors' code."""


@dataclass(frozen=True)
class GateOptions:
    """Options of forget gates, in FoX and in ``gated:<name>``."""

    fox_bias: float = option(0.0, "FoX: initial bias of the gates; 0 is a gate of 1/2 per token")


class ForgetGate(nn.Module):
    """f_t = sigmoid(W x_t + b), one gate for each head and token.

    W (H, C) starts from N(0, 0.02^2), drawn with the spec's generator, and b (H,) from ``bias``.
    """

    def __init__(self, spec: EncodingSpec, bias: float) -> None:
        super().__init__()
        shape = (spec.num_heads, spec.num_heads * spec.head_dim)
        draw = torch.randn(shape, generator=spec.generator(stream=8), device="cpu")
        # no nn.Linear: fairseq's BERT models would initialize it again
        self.weight = nn.Parameter(START_STD * draw)
        self.bias = nn.Parameter(torch.full(shape[:1], float(bias), device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """Return log f, (B, H, T) float32 or wider, of x (B, T, C). Never log(sigmoid)."""
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(wide), self.weight.to(wide), self.bias.to(wide))
            return F.logsigmoid(logits).transpose(1, 2)


class FoX(QueryKeyEncoding):
    """score_st + sum_(t<u<=s) log f_u with forget gates f_u = sigmoid(w_h x_u + b_h).

    x_u is the input of the layer. q and k are unchanged, and so is the score at lag 0. In softmax
    attention the sum of the log gates is added to the scaled score; linear attention multiplies the
    score of its kernel by the product of the gates. Each layer has separate gates. Costs O(H C) per
    token. Causal attention only.

    Trap: with ``fox_bias`` 0, the authors' start, a gate is about 1/2 and training starts with a
    window of a few tokens. With normalizer "content" of linear attention the denominator is not
    decayed.
    """

    Options = GateOptions
    causal_only = True
    contextual = True
    without_absolute = True
    card = Card(
        equation=r"z_{st} + \sum_{u=t+1}^{s} \log f_u,\quad f_u = \sigma(w_h^\top x_u + b_h)",
        cost="H C + H parameters; one bias (B, H, T, S) in softmax attention",
        beyond="The gates depend on content only, so nothing changes with the position; far keys "
        "count as long as the learned gates stay open.",
        source="Lin, Nikishin, He and Courville (2025), Section 3",
    )

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        self.gate = ForgetGate(spec, self.options.fox_bias)

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return q and k unchanged."""
        check_positions(q_positions, q), check_positions(k_positions, k)
        return q, k

    def log_gates(self, x: Tensor) -> Tensor:
        """Return log f; see :meth:`QueryKeyEncoding.log_gates`."""
        return self.gate(x)
