"""Powers pi^s of a permutation, and the permutation of features by them.

pi^s(j) is found on the cycle that contains j, so every position up to 2^31 costs the same and no
table of powers is stored.
"""

import torch
from torch import Tensor

from lrpe_fairseq.encodings.base import PositionCache
from lrpe_fairseq.kernels import encode, encode_cpu
from lrpe_fairseq.kernels.dispatch import is_plain


def permute(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """x[..., index[..., j]] for x (..., D), where ``inverse`` undoes ``index``; broadcasts."""
    form = encode.Form(phi=False, permutes=True)
    if encode_cpu.serves(x, form):
        return encode_cpu.encode(x, None, (index, inverse), form)
    if not is_plain(x):
        return x.gather(-1, index.expand_as(x))
    return _Permuted.apply(x, index.expand_as(x), inverse.expand_as(x))


class _Permuted(torch.autograd.Function):
    """A gather whose gradient is the inverse gather, not a slow scatter that adds.

    Differentiable any number of times.
    """

    @staticmethod
    def forward(ctx, x, index, inverse):
        ctx.save_for_backward(index, inverse)
        return x.gather(-1, index)

    @staticmethod
    def backward(ctx, grad):
        index, inverse = ctx.saved_tensors
        return _Permuted.apply(grad, inverse, index), None, None


class CyclicPowers:
    """Powers of permutations by index arithmetic on their cycles.

    The cycles are kept as long as the permutation has the same values. On a GPU, where comparing
    them would wait for the device at every call, the same tensor, version and memory stand for
    the same values: there, an edit in place through ``.data`` goes unnoticed.
    """

    def __init__(self) -> None:
        self._of_positions = PositionCache()
        self._known: tuple | None = None

    def powers(self, permutation: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """pi^s(j) and pi^-s(j) for pi (D,) or (H, D) and s of any shape.

        Both int64, of shape s.shape + pi.shape; the second undoes the first.
        """
        form = self._cycles_of(permutation)
        return self._of_positions.get(
            (positions, *form),
            None,
            lambda: (_along_cycles(form, positions), _along_cycles(form, -positions)),
        )

    def _cycles_of(self, permutation: Tensor) -> tuple[Tensor, ...]:
        known = self._known
        if known is not None and _unchanged(permutation, *known[:2]):
            return known[2]
        with torch.inference_mode(False):  # the form outlives the call
            copy = torch.tensor(permutation.tolist(), device=permutation.device)
            form = cycle_form(copy)
        mark = copy if permutation.device.type == "cpu" else _identity(permutation)
        self._known = permutation, mark, form
        return form

    def __deepcopy__(self, memo: dict) -> "CyclicPowers":
        return CyclicPowers()

    def __reduce__(self) -> tuple:
        return CyclicPowers, ()


def _unchanged(permutation: Tensor, known: Tensor, mark: Tensor | tuple) -> bool:
    """True if ``permutation`` has the values that it had when it was marked."""
    if permutation.device != known.device:
        return False
    if isinstance(mark, Tensor):
        return torch.equal(permutation, mark)
    return permutation is known and _identity(permutation) == mark


def _identity(tensor: Tensor) -> tuple[int, int]:
    """Version (inference tensors have none) and memory."""
    return -1 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def cycle_form(permutation: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cycle decomposition of pi (..., D): start, step, length of each j's cycle, and members.

    ``members`` lists the elements cycle after cycle; j stands at start[j] + step[j], and
    pi^s(j) = members[start[j] + (step[j] + s) mod length[j]]. Tensor operations only, so that it
    works on any device, fake tensors and under torch.compile.
    """
    width = permutation.shape[-1]
    own = torch.arange(width, device=permutation.device).expand_as(permutation)
    powers = own.unsqueeze(0)  # pi^n for n = 0, 1, ..., at least width
    jump = permutation  # pi^(number of rows of powers)
    while powers.shape[0] <= width:
        powers = torch.cat([powers, jump.expand_as(powers).gather(-1, powers)])
        jump = jump.gather(-1, jump)
    first = powers.amin(0)  # the smallest element of each cycle
    length = 1 + (powers[1:] == own).int().argmax(0)
    step = (-(powers == first).int().argmax(0)) % length
    heads = (first == own).long() * length  # the length, once for each cycle
    start = (heads.cumsum(-1) - heads).gather(-1, first)
    members = torch.empty_like(permutation).scatter(-1, start + step, own)
    return start, step, length, members


def _along_cycles(form: tuple[Tensor, Tensor, Tensor, Tensor], positions: Tensor) -> Tensor:
    start, step, length, members = form
    s = positions.reshape(positions.shape + (1,) * start.dim())
    place = start + (step + s) % length
    return members.expand(place.shape).gather(-1, place)
