"""``gated:<name>``: the forget gates of FoX added to any decomposable encoding."""

from collections.abc import Callable

from torch import Tensor, nn

from lrpe_fairseq.encodings.base import Card, Encoding, EncodingSpec, Planes, QueryKeyEncoding
from lrpe_fairseq.encodings.fox import ForgetGate, GateOptions

OF_INNER = (
    "relative",
    "relative_up_to",
    "relative_by",
    "shift_unit",
    "reads_grid",
    "reads_nodes",
    "without_absolute",
    "keeps_norm",
    "before_feature_map",
    "decay_on",
    "foldable",
    "denominator_vanishes",
)
"""Capability fields that a gated encoding takes from the encoding inside."""


class Gated(QueryKeyEncoding):
    """score_st of another encoding + sum_(t<u<=s) log f_u with the forget gates f of FoX.

    Args:
        spec: widths, seed and options.
        inner: constructor of a decomposable encoding without gates. name: its name.

    Each layer has separate gates, also if the encoding inside is shared. A constant decay of the
    encoding inside stays what it is: the gates multiply the weight, and PermuteFormer's decay
    multiplies the score. In linear attention, where both are the same, the exponents are added.
    Causal attention only. With gates of 1 the result is that of the encoding inside.
    """

    Options = GateOptions
    causal_only = True
    contextual = True

    def __init__(
        self, spec: EncodingSpec, inner: Callable[[EncodingSpec], QueryKeyEncoding], name: str
    ) -> None:
        super().__init__(spec)
        self.inner = inner(spec)
        self.inner.name = name
        self.gate = ForgetGate(spec, self.options.fox_bias)
        for field in OF_INNER:
            setattr(self, field, getattr(self.inner, field))
        self.card = Card(
            equation=r"a_{st} + \sum_{u=t+1}^{s} \log f_u,\quad f_u = \sigma(w_h^\top x_u + b_h)",
            cost=f"that of {name}, H C + H parameters, and one bias (B, H, T, S) in softmax",
            beyond=f"As {name}; far keys count as long as the learned gates stay open.",
            source="gates of Lin, Nikishin, He and Courville (2025) on another encoding",
        )

    def summary(self) -> str:
        """Describe the encoding inside."""
        return f"{self.inner.summary()}, with forget gates"

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode q and k with the encoding inside."""
        return self.inner(q, k, q_positions, k_positions)

    @property
    def projection(self) -> nn.Module:
        """P of the encoding inside."""
        return self.inner.projection

    def turn(
        self, q: Planes, k: Planes, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode the planes of P q and P k with the encoding inside."""
        return self.inner.turn(q, k, q_positions, k_positions)

    @property
    def feature_dim(self) -> int:
        """Width of the features of the encoding inside."""
        return self.inner.feature_dim

    def one_pass(
        self, x: Tensor, positions: Tensor, feature_map: str | None
    ) -> Callable[[Tensor], Tensor] | None:
        """Use the kernel of the encoding inside."""
        return self.inner.one_pass(x, positions, feature_map)

    def steps_between(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return the distance of the encoding inside."""
        return self.inner.steps_between(q_positions, k_positions)

    @property
    def steps_are_lags(self) -> bool:
        """As the encoding inside."""
        return self.inner.steps_are_lags

    def log_decay(self) -> Tensor | None:
        """Return the constant decay of the encoding inside; attention adds the gates."""
        return self.inner.log_decay()

    def log_gates(self, x: Tensor) -> Tensor:
        """Return log f; see :meth:`QueryKeyEncoding.log_gates`."""
        return self.gate(x)


def can_be_gated(kind: type[Encoding]) -> bool:
    """True for a class of decomposable encodings that have no gates."""
    return issubclass(kind, QueryKeyEncoding) and kind.log_gates is QueryKeyEncoding.log_gates
