"""Forget gates (Lin, Nikishin, He and Courville, 2025): FoX, and ``gated:<name>``."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.networks import as_stored, log_sigmoid
from lrpe_fairseq.encodings.core.options import EncodingSpec, option
from lrpe_fairseq.encodings.core.parameters import drawn
from lrpe_fairseq.encodings.core.protocols import Card, Encoding, Properties, QueryKeyEncoding
from lrpe_fairseq.encodings.none import Unchanged
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels.conditions import without_autocast


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
        shape = (spec.num_heads, spec.input_width)
        self.weight = drawn(spec.generator("forget-gate"), *shape)
        self.bias = nn.Parameter(torch.full(shape[:1], float(bias), device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """Return log f, (B, H, T) float32 or wider, of x (B, T, C). Never log(sigmoid)."""
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        with without_autocast(x):
            weight, bias = self.weight.to(wide), self.bias.to(wide)
            logits = as_stored(lambda x: F.linear(x, weight, bias), x.to(wide))
            return log_sigmoid(logits).transpose(1, 2)


class FoX(Unchanged):
    """score_st + sum_(t<u<=s) log f_u with forget gates f_u = sigmoid(w_h x_u + b_h).

    x_u is the input of the layer. In softmax attention the sum of the log gates is added to the
    scaled score; linear attention multiplies the score of its kernel by the product of the gates.
    Each layer has separate gates.

    Trap: with ``fox_bias`` 0, the authors' start, a gate is about 1/2 and training starts with a
    window of a few tokens. With normalizer "content" of linear attention the denominator is not
    decayed.
    """

    Options = GateOptions
    causal_only = True
    properties = Properties(contextual=True)
    without_absolute = True
    card = Card(
        mechanism="gate",
        equation=r"z_{st} + \sum_{u=t+1}^{s} \log f_u,\quad f_u = \sigma(w_h^\top x_u + b_h)",
        cost="H C + H parameters; sums (B, H, T) of gates, and without a kernel one bias "
        "(B, H, T, S) in softmax attention",
        beyond="The gates depend on content only, so nothing changes with the position; far keys "
        "count as long as the learned gates stay open.",
        source="[Lin et al. (2025)](https://arxiv.org/abs/2503.02130), Section 3",
    )

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        add_gate(self)


def gated(spec: EncodingSpec, inner: Callable[[EncodingSpec], QueryKeyEncoding]) -> Encoding:
    """Build a decomposable encoding and add forget gates: score_st + sum_(t<u<=s) log f_u.

    Each layer has separate gates, also if the encoding shares its parameters. A constant decay
    stays what it is: gates multiply the weight, and PermuteFormer's decay multiplies the score.
    """
    encoding = inner(spec)
    add_gate(encoding)
    encoding.causal_only = True
    encoding.properties = replace(encoding.properties, contextual=True)
    encoding.card = Card(
        mechanism="gate",
        equation=r"a_{st} + \sum_{u=t+1}^{s} \log f_u,\quad f_u = \sigma(w_h^\top x_u + b_h)",
        cost="that of the encoding, H C + H parameters, and one bias (B, H, T, S) in softmax",
        beyond="As the encoding; far keys count as long as the learned gates stay open.",
        source="[Lin et al. (2025)](https://arxiv.org/abs/2503.02130), on another encoding",
    )
    return encoding


def add_gate(encoding: Encoding) -> None:
    """Add forget gates to an encoding. Raises: ChoiceError if it has gates already."""
    if encoding.forget_gate is not None:
        raise ChoiceError("an encoding has one kind of gates: choose one prefix that adds them")
    spec = encoding.spec
    encoding.forget_gate = ForgetGate(spec, spec.options.of(GateOptions).fox_bias)
    encoding.register_load_state_dict_pre_hook(_rename_old)


def _rename_old(module: nn.Module, state: dict, prefix: str, *rest: object) -> None:
    """Rename the parameters of version 0.1: ``gate.<name>``, and ``inner.<name>`` under gates."""
    for old, new in ((f"{prefix}gate.", f"{prefix}forget_gate."), (f"{prefix}inner.", prefix)):
        for name in [name for name in state if name.startswith(old)]:  # a copy: the state changes
            state[new + name.removeprefix(old)] = state.pop(name)


def can_be_gated(kind: type[Encoding]) -> bool:
    """True for a class of decomposable encodings that have neither gates nor states."""
    return issubclass(kind, QueryKeyEncoding) and kind is not FoX and not kind.has_states
