"""Parts of an attention layer beside its encoding (FoX Pro; Lin et al. 2025).

For the input x_t, per head, in this order:

    k'_t = a_t k_(t-1) + (1 - a_t) k_t, v'_t likewise    kv-shift; a_t = sigmoid(A x_t)
    q^_t = RMS(q_t), k^_t = RMS(k'_t)                    qk-norm: before feature map and encoding
    y_t = W_o (sigmoid(W_g x_t) * RMS(o_t))              output-gate, output-norm

Axes: B batch, H heads, T time, D head width, C = H D.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.attention.tokens import Tokens
from lrpe_fairseq.encodings import EncodingSpec
from lrpe_fairseq.encodings.core.history import history
from lrpe_fairseq.encodings.core.options import shortened
from lrpe_fairseq.encodings.core.parameters import drawn
from lrpe_fairseq.encodings.core.protocols import Encoding
from lrpe_fairseq.errors import ChoiceError

PARTS = ("qk-norm", "output-norm", "output-gate", "kv-shift")
"""Names of all parts."""


def parse_parts(text: str) -> frozenset[str]:
    """Return the parts that ``--attention-parts TEXT`` names: a list with commas, or ``none``.

    Raises: ChoiceError, listing the known names, if one is unknown, or for anything but a text.

    >>> sorted(parse_parts("qk-norm,output-gate"))
    ['output-gate', 'qk-norm']
    """
    if not isinstance(text, str):
        raise ChoiceError(
            f"the parts of attention are a text, 'none' or such as 'qk-norm,output-gate', not "
            f"{shortened(text)}"
        )
    names = [name.strip() for name in text.split(",")]
    if names == ["none"]:
        return frozenset()
    for name in names:
        if name not in PARTS:
            raise ChoiceError(
                f"unknown attention part {name!r}; choose none, or a list of {', '.join(PARTS)}"
            )
    return frozenset(names) - {"none"}


class HeadNorm(nn.Module):
    """x / sqrt(mean x^2 + eps) over the D features of each head, times a weight (H D,), 1 at first.

    Computed in float32 or wider. heads: the number of heads, if they are not those of the queries;
    1 for one weight (D,) of all heads.
    """

    def __init__(self, spec: EncodingSpec, eps: float, heads: int | None = None) -> None:
        super().__init__()
        self.heads = spec.num_heads if heads is None else heads
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(self.heads * spec.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (B, H, T, D), in its dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.to(wide).view(self.heads, 1, -1)).to(x.dtype)


class Gate(nn.Module):
    """sigmoid(W x) with W (N, C) from N(0, 0.02^2), without a bias: near 1/2 at the start.

    The draw comes from the encoding's seed, so that all other weights of a model are those without
    the gate.

    Args: encoding: of the layer. size: N. stream: the name of its random stream.
    """

    def __init__(self, encoding: Encoding, size: int, stream: str) -> None:
        super().__init__()
        spec = encoding.spec
        generator = spec.generator(stream, encoding.streams)
        self.weight = drawn(generator, size, spec.input_width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gates (B, T, N) of x (B, T, C), in float32 or wider."""
        logits = F.linear(x, self.weight)
        return logits.to(torch.promote_types(x.dtype, torch.float32)).sigmoid()


class KVShift(Gate):
    """Mix keys and values with those of the real token before, 0 at the start of a document.

    heads: the number of heads of keys and values.
    """

    def __init__(self, encoding: Encoding, heads: int) -> None:
        super().__init__(encoding, 2 * heads, "kv-shift")

    def shifted(self, x: Tensor, kv: Tensor, tokens: Tokens) -> Tensor:
        """Return keys and values of x (B, T, C) after the shift.

        kv: (B, T, 2 K D), the projections to K heads, keys first. Those of the last real token are
        kept for the next call in ``tokens.history``.
        """
        past = {} if tokens.history is None else tokens.history
        (before,), past["kv-shift"] = history(
            kv, 1, padding=tokens.padding, starts=tokens.starts, tail=past.get("kv-shift")
        )
        share = self(x).repeat_interleave(kv.shape[-1] // len(self.weight), -1)
        return (share * before + (1 - share) * kv).to(kv.dtype)
