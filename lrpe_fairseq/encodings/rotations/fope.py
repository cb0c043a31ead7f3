"""FoPE, Fourier position embedding (Hua et al., 2025): RoPE with a Fourier series per pair."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.options import LONGEST, EncodingSpec, option
from lrpe_fairseq.encodings.core.positions import exact_type
from lrpe_fairseq.encodings.core.protocols import Card, Properties
from lrpe_fairseq.encodings.rotations.cores import Rotation
from lrpe_fairseq.encodings.rotations.lrpe import LRPE
from lrpe_fairseq.encodings.rotations.scaling import scaled
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels.encode.encode import complex_of


@dataclass(frozen=True)
class FoPEOptions:
    """Options of FoPE."""

    fope_length: int = option(
        512,
        "FoPE: N; frequencies below 2 pi / N are set to 0. Set it to the length of the training "
        "texts",
        least=7,
        most=LONGEST,
    )


class FoPE(LRPE):
    """RoPE whose cosines and sines are Fourier series, with slow frequencies set to 0.

    RoPE's frequencies are w_i = 10000^(-2i/D). Those below 2 pi / N, N = ``fope_length``, do not
    complete a period in training and are set to 0: their pairs of features are unchanged. For the M
    other pairs j of head h (Hua et al., 2025, Eq. 13, and the listing of Appendix B)

        C_hj(s) = sum_i a_hij cos(w_i s),   S_hj(s) = sum_i b_hij sin(w_i s),
        (x, y) -> (x C - y S, x S + y C) for queries and keys,

    with a and b the identity plus N(0, 2 sigma^2 / (M (M + H))), fixed and saved in the checkpoint.
    This is the Xavier initialization of the authors' code with gain ``sigma``: torch's fans of its
    (H, M, M) tensor are M M and H M. Their listing also divides the coefficients by their sum over
    i, which Eq. 13 does not contain, and keeps at most D/4 pairs.

    The encoding is not relative: the score contains products of two series, so it changes with
    both positions at one distance. With sigma = 0 it is RoPE with clipped frequencies.

    Trap: ``fope_length`` must be the length of the training texts. Context scaling clips more
    frequencies unless ``fope_length`` is multiplied by f too.

    Raises: ChoiceError if no frequency remains, or for a negative sigma.
    """

    Options = FoPEOptions
    keys_by_head = True
    card = Card(
        mechanism="rotation",
        equation=(
            r"\mathrm{Re}\sum_j \bar q_j \bar F_{hj}(s)\, F_{hj}(t) k_j, \quad "
            r"F_{hj}(s) = \sum_i a_{hij} \cos \omega_i s + \mathrm{i}\, b_{hij} \sin \omega_i s"
            r" \text{ for } j < M, \text{ else } 1"
        ),
        cost="O(D) per token and head, and O(H T M^2)",
        beyond=(
            "Training has seen a whole period of every frequency if N is its length. The score is "
            "not relative."
        ),
        source="[Hua et al. (2025)](https://arxiv.org/abs/2412.17739), Eq. 13 and Appendix B",
    )
    properties = Properties(relative="no", keeps_norm=False)

    def __init__(self, spec: EncodingSpec, sigma: float = 0.3) -> None:
        super().__init__(spec, "identity", FourierSeries(spec, sigma))


class FourierSeries(Rotation):
    """Multiplies the pairs of every head, as complex numbers, by series of the frequencies.

    With context scaling fewer frequencies may remain. The coefficients of a checkpoint without it
    are then cut to these.
    """

    scales = "frequencies, before they are clipped"
    reads_length = False

    def __init__(self, spec: EncodingSpec, sigma: float) -> None:
        super().__init__(spec)
        self.register_buffer("coefficients", _draw(spec, len(self.theta), sigma))
        if self.options.context_scaling != "none":
            self.register_load_state_dict_pre_hook(_cut)

    def frequencies(self, spec: EncodingSpec) -> Tensor:
        """Return RoPE's scaled frequencies that are at least 2 pi / N, (M,) float64.

        Raises: ChoiceError if none remains.
        """
        every = scaled(super().frequencies(spec), self.options)
        length = spec.options.of(FoPEOptions).fope_length
        theta = every[every >= 2 * math.pi / length]
        if not len(theta):
            enough = math.ceil(2 * math.pi / every.max().item())
            raise ChoiceError(
                f"no frequency of fope remains at --fope-length {length}: set it to at least "
                f"{enough}, or lower --context-factor"
            )
        return theta

    def in_kernel(self, device: torch.device) -> None:
        """Return None: the phases are sums over angles."""
        return None

    def angles_in(self, length: int | None) -> Tensor:
        """Return the frequencies, which are scaled already."""
        return self.theta

    def powers(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return C + i S of every head and position: (H, T, E) or (B, H, T, E), complex.

        The series is summed in float64 and then cast.
        """
        exact = exact_type(positions.device)
        basis = super().powers(positions, exact)
        a, b = self.coefficients.to(exact)
        return complex_of((basis.real @ a).to(dtype), (basis.imag @ b).to(dtype))


def _cut(module: nn.Module, state: dict, prefix: str, *rest: object) -> None:
    """Leave out the coefficients of frequencies that context scaling clips: the slowest."""
    name = f"{prefix}coefficients"
    if name in state:
        count = len(module.theta)
        state[name] = state[name][..., :count, :count]


def _draw(spec: EncodingSpec, count: int, sigma: float) -> Tensor:
    """Return the coefficients a and b, (2, H, M, M) float32, of input i and output j."""
    if sigma < 0:
        raise ChoiceError(f"sigma of fope cannot be negative, got {sigma}")
    generator = spec.generator("fope")
    shape = (2, spec.num_heads, count, count)
    noise = torch.randn(shape, generator=generator, device="cpu")
    deviation = sigma * math.sqrt(2 / (count * (count + spec.num_heads)))
    return torch.eye(count, device="cpu") + noise * deviation
