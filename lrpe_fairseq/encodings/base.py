"""The two protocols of relative positional encoding and their capability fields.

A relative encoding is *decomposable* when the score of (s, t) is an inner product of a
query that knows only s and a key that knows only t (LRPE, Definition 3.1, Eq. 13). Those
implement :class:`QueryKeyEncoding` and serve linear and softmax attention alike. The others
need the score matrix, implement :class:`ScoreEncoding` and serve softmax attention only.

Axes: B batch, H heads, T query time, S key time, D key width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class EncodingOptions:
    """Knobs of single methods, and the published departures to switch on.

    fidelity: names of departures of the authors' code from the paper; empty is correct.
    spe_code: "sine" or "convolution". spe_realizations: R, None for the head width.
    spe_sines: K of the sine code, 10 as in SPE's Long-Range Arena runs. spe_kernel: taps P of
    the convolution. spe_gated: whether features may pass without position. spe_shared: one
    code in all layers. t5_buckets, t5_max_distance: as in T5. t5_shared: one table in all
    layers. Sharing takes a call of :func:`lrpe_fairseq.encodings.sharing.share_across_layers`.
    """

    fidelity: frozenset[str] = frozenset()
    spe_code: str = "sine"
    spe_realizations: int | None = None
    spe_sines: int = 10
    spe_kernel: int = 128
    spe_gated: bool = True
    spe_shared: bool = False
    t5_buckets: int = 32
    t5_max_distance: int = 128
    t5_shared: bool = False


@dataclass(frozen=True)
class EncodingSpec:
    """What every encoding is built from; each constructor takes exactly this.

    head_dim: width D of one head. num_heads: H. causal: whether s only sees t <= s.
    seed: seeds the encoding's own generator of fixed random parts (Householder vectors,
    permutations, noise at evaluation), so that two encodings under one training seed start
    from the same weights everywhere else. options: knobs of single methods.
    """

    head_dim: int
    num_heads: int
    causal: bool = False
    seed: int = 0
    options: EncodingOptions = EncodingOptions()

    def __post_init__(self) -> None:
        if self.head_dim < 1 or self.num_heads < 1:
            raise ValueError(
                f"head_dim and num_heads must be positive, got {self.head_dim} and {self.num_heads}"
            )

    def generator(self, stream: int = 0) -> torch.Generator:
        """A CPU generator of this encoding's own; ``stream`` separates independent draws."""
        return torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + stream)


class Encoding(nn.Module):
    """What both protocols share: capability fields and parameters that stay float32.

    A capability field is an exception to a property that the test-suite demands of every
    encoding; the suite reads the field, it never skips.
    """

    serves_linear: ClassVar[bool] = False
    """Whether linear attention can use it (only decomposable encodings can)."""
    relative: ClassVar[str] = "exact"
    """How the score depends on t - s only: "exact", or "in expectation" (random codes)."""
    keeps_norm: ClassVar[bool] = True
    """Whether an encoded query or key has the norm of the original."""

    denominator_vanishes: bool = False
    """Whether Eq. 39's denominator is often near or below zero, so that linear attention with
    normalizer "rotated" divides by the clamp: finite in float32 and bfloat16, but float16
    gradients overflow. Use normalizer "layernorm" or "content" instead."""

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        self.spec = spec

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Encoding":
        """Move with ``.to(device)`` but never round below float32.

        fairseq's trainer calls ``.half()`` or ``.to(bfloat16)`` on the whole model; a learned
        frequency rounded to half precision is off by whole turns at position 10,000.
        """
        exact = {name: t.detach() for name, t in self.named_tensors() if t.is_floating_point()}
        super()._apply(fn, recurse)
        for name, tensor in self.named_tensors():
            if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
                tensor.data = exact[name].to(tensor.device)
        return self

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """All parameters and buffers, this module's and its children's."""
        return [*self.named_parameters(), *self.named_buffers()]


class QueryKeyEncoding(Encoding):
    """(q, k, positions) -> (q~, k~); the score is the plain inner product of q~ and k~.

    Widths may grow: complex features become [Re, Im], so that the real inner product is
    Re(q~^H k~). Softmax attention still scales by the *original* width's D^-0.5.
    """

    serves_linear = True
    foldable: bool = False
    """Whether it is ``turn(projection(q), projection(k), ...)`` with a linear ``projection``,
    which softmax attention folds into its weights at no cost per token."""
    before_feature_map: ClassVar[bool] = False
    """In linear attention: encode before phi (SPE filters q and k themselves), not after."""

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode queries and keys.

        Args:
            q, k: (B, H, T, D) and (B, H, S, D), any floating dtype; kept in the result.
            q_positions, k_positions: int64, (T,) or (B, T), and (S,) or (B, S).
        Returns: q~ (B, H, T, D') and k~ (B, H, S, D') with D' = :attr:`feature_dim`.
        """
        raise NotImplementedError

    @property
    def feature_dim(self) -> int:
        """Width D' of the encoded features."""
        return self.spec.head_dim

    def one_pass(self, x: Tensor, positions: Tensor) -> Callable[[Tensor], Tensor] | None:
        """The encoding of 1 + elu(x) in one pass over memory; None where there is none."""
        return None

    def log_decay(self) -> Tensor | None:
        """(H,) float32 natural log of a per-token decay of the score, or None.

        A causal score is multiplied by exp(log_decay * (s - t)). It is applied relatively by
        the attention, because r^s and r^-t on their own overflow.
        """
        return None


class ScoreEncoding(Encoding):
    """(scores, q, k, positions) -> scores, for encodings that need the score matrix."""

    def forward(
        self, scores: Tensor, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> Tensor:
        """Add position to ``scores`` (B, H, T, S) = q k^T, before masking and softmax.

        ``q`` (B, H, T, D) is already scaled by D^-0.5, ``k`` is (B, H, S, D); positions as in
        :meth:`QueryKeyEncoding.forward`.
        """
        return scores + self.bias(q, k, q_positions, k_positions)

    def bias(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """The additive part, broadcastable to (B, H, T, S); fused kernels take it as a mask."""
        raise NotImplementedError


def check_positions(positions: Tensor) -> Tensor:
    """Return ``positions`` if it is int64 of one or two axes, else raise ValueError.

    Floating positions are refused: float32 cannot count beyond 2^24.
    """
    if positions.dtype != torch.int64 or positions.dim() not in (1, 2):
        raise ValueError(
            "positions must be an int64 tensor of shape (T,) or (B, T), got "
            f"{positions.dtype} of shape {tuple(positions.shape)}"
        )
    return positions


def over_heads(per_position: Tensor, positions: Tensor) -> Tensor:
    """(T, X) stays; (B, T, X) becomes (B, 1, T, X), to broadcast over (B, H, T, X)."""
    return per_position if positions.dim() == 1 else per_position.unsqueeze(1)


class PositionCache:
    """Remembers what was last computed for one positions tensor, outside the state dict.

    Attention hands the *same* tensor object to every layer and step of one length, so identity
    is the key: no comparison of values, no synchronization with a device.
    """

    def __init__(self) -> None:
        self._positions: Tensor | None = None
        self._version = -1
        self._key: Any = None
        self._value: Any = None

    def get(self, positions: Tensor, key: Any, compute: Callable[[], Any]) -> Any:
        """``compute()`` once per (positions object, key); ``key`` names dtype and the like."""
        if torch.compiler.is_compiling():
            return compute()  # the compiler traces what is computed, and cannot compare identities
        if torch.is_inference_mode_enabled() or positions.is_inference():
            return compute()  # inference tensors have no version and must not reach training
        fresh = positions is self._positions and positions._version == self._version
        if not (fresh and key == self._key):
            self._positions, self._version, self._key = positions, positions._version, key
            self._value = compute()
        return self._value

    def __deepcopy__(self, memo: dict) -> "PositionCache":
        return PositionCache()

    def __reduce__(self) -> tuple:
        return PositionCache, ()
