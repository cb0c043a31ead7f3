"""Powers pi^s of a permutation, and the permutation of features by them.

pi^s(j) is found on the cycle that contains j, so every position up to 2^31 costs the same.
"""

from functools import partial

import torch
from torch import Tensor

from lrpe_fairseq.encodings.core.positions import PositionCache
from lrpe_fairseq.kernels import dispatch
from lrpe_fairseq.kernels.conditions import may_read_values
from lrpe_fairseq.kernels.encode.encode import Variant, along_cycles

PERMUTATION = Variant(phi=False, permutes=True)


def permute(x: Tensor, index: Tensor) -> Tensor:
    """Return x[..., index[..., j]] for x (..., D) and int64 indices that broadcast to its shape."""
    permuted = dispatch.applied(x, index, PERMUTATION)
    return x.gather(-1, index.expand_as(x)) if permuted is None else permuted


class CyclicPowers:
    """Powers of permutations by index arithmetic on their cycles.

    The cycles are cached by identity, version and memory address of the permutation, since a
    comparison of values would synchronize a GPU. Trap: an edit through ``.data`` is not detected.
    """

    def __init__(self) -> None:
        self._of_positions = PositionCache()
        self._known: tuple | None = None

    def powers(self, permutation: Tensor, positions: Tensor) -> Tensor:
        """Return pi^s(j), int64 of shape s.shape + pi.shape, for pi (D,) or (H, D) and any s."""
        cycles = self.cycles(permutation)
        compute = partial(along_cycles, cycles, positions)
        return self._of_positions.get((positions, cycles), None, compute)

    def cycles(self, permutation: Tensor) -> Tensor:
        """Return :func:`cycles_of` pi."""
        if not may_read_values(permutation):
            return cycles_of(permutation)
        version = -1 if permutation.is_inference() else permutation._version  # none in inference
        known = self._known
        mark = (version, permutation.data_ptr())
        if known is not None and known[0] is permutation and known[1] == mark:
            return known[2]
        with torch.inference_mode(False):  # cached cycles must be usable in training
            cycles = cycles_of(torch.tensor(permutation.tolist(), device=permutation.device))
        self._known = permutation, mark, cycles
        return cycles


def cycles_of(permutation: Tensor) -> Tensor:
    """Return the cycles of pi (..., D): start, step, length and members, int64 (4, ..., D).

    ``members`` lists the elements cycle by cycle, with j at start[j] + step[j], hence
    pi^s(j) = members[start[j] + (step[j] + s) mod length[j]]. Only tensor operations are used, so
    this works on any device, with fake tensors and under torch.compile.
    """
    width = permutation.shape[-1]
    features = torch.arange(width, device=permutation.device).expand_as(permutation)
    powers = features.unsqueeze(0)  # pi^n for n = 0, 1, ..., at least width
    jump = permutation  # pi^(number of rows of powers)
    while powers.shape[0] <= width:
        powers = torch.cat([powers, jump.expand_as(powers).gather(-1, powers)])
        jump = jump.gather(-1, jump)
    first = powers.amin(0)  # the smallest element of each cycle
    length = 1 + (powers[1:] == features).int().argmax(0)
    step = (-(powers == first).int().argmax(0)) % length
    lengths = (first == features).long() * length  # at the first element of each cycle, else 0
    start = (lengths.cumsum(-1) - lengths).gather(-1, first)
    members = torch.empty_like(permutation).scatter(-1, start + step, features)
    return torch.stack([start, step, length, members])
