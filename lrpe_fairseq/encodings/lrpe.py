"""The LRPE family: W_s = P^H Lambda^(s) P with P unitary (LRPE ICLR, Eq. 23-25, Table 1, C.7).

The encoded query is q~_s = Lambda^(s) P q_s, the key likewise; P^H on the left cancels in
the score (Eq. 76) and is never computed. P and Lambda are chosen by name and combine freely.

A complex vector travels as its *planes*, the tuple (re, im); a real one as (re,). Real maps
act on each plane alone. At the very end the planes are concatenated, so that the plain inner
product of two results is Re(q~^H k~).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.base import (
    ELU_PLUS_ONE,
    EncodingSpec,
    Planes,
    PositionCache,
    QueryKeyEncoding,
    check_positions,
    option,
    over_heads,
)
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels import encode, encode_cpu, loader
from lrpe_fairseq.kernels.dispatch import has_values, is_plain, is_transformed

KERNELS = "lrpe_fairseq.kernels.encode_triton"

BASE = 10000.0
"""Base of the frequencies alpha_t = 10000^(-2t/d) (C.7)."""

EPS = 1e-6
"""Smallest norm that a learned Householder vector is divided by."""


@dataclass(frozen=True)
class LRPEOptions:
    """Options of the learned Householder map."""

    lrpe_householder_start: str = option(
        "normal",
        "LRPE, learned Householder vector: start from N(0, I), as in the paper, or at norm 1, "
        "where it turns faster",
        choices=("normal", "unit"),
    )


# --- P: the fixed unitary map, on the last axis ------------------------------------------------


class Identity(nn.Module):
    """P = I."""

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Planes:
        """(..., D) -> one plane (..., D)."""
        return (x,)


class Householder(nn.Module):
    """P = I - 2 v v^T / (v^T v) with v drawn from a standard normal, fixed (Eq. 74)."""

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        v = _householder_vector(spec)
        self.register_buffer("v", v / v.norm())

    def forward(self, x: Tensor) -> Planes:
        """(..., D) -> one plane (..., D), the mirror image of x."""
        return (reflect(x, self.unit(x.dtype)),)

    def unit(self, dtype: torch.dtype) -> Tensor:
        """v of length 1."""
        return _unit(self.v.to(dtype))


class LearnedHouseholder(Householder):
    """The Householder map whose v is a parameter, started from N(0, I) (Type 3's pseudo-code).

    The map depends on the direction of v only, but learning depends on its length: the gradient
    is orthogonal to v and inversely proportional to its norm, and a step of an adaptive optimizer
    turns v by an angle inversely proportional to it. N(0, I) has norm sqrt(D) or so; a start at
    norm 1 (``lrpe_householder_start="unit"``) turns about sqrt(D) times as fast.
    """

    def __init__(self, spec: EncodingSpec) -> None:
        nn.Module.__init__(self)
        v = _householder_vector(spec)
        unit = spec.options.of(LRPEOptions).lrpe_householder_start == "unit"
        self.v = nn.Parameter(v / v.norm() if unit else v)


class OddEven(nn.Module):
    """P = the permutation y[2k] = x[k], y[2k+1] = x[ceil(d/2) + k] (Eq. 75 and pseudo-code).

    Eq. 75 prints floor(d/2) + 1 for the odd case, a misprint: it would not be a permutation.
    """

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Planes:
        """(..., D) -> one plane (..., D), in the order of memory that x has."""
        if x.stride(-1) != 1 and x.dim() > 1:
            return (_shuffled(x.mT, -2).mT,)
        return (_shuffled(x, -1),)


def _shuffled(x: Tensor, axis: int) -> Tensor:
    """Eq. 75 on an axis counted from the end, by one copy, and by one for the gradient."""
    pairs, odd = divmod(x.shape[axis], 2)
    if odd:
        first, middle, last = x.split([pairs, 1, pairs], axis)
        return torch.cat([_shuffled(torch.cat([first, last], axis), axis), middle], axis)
    return x.unflatten(axis, (2, pairs)).transpose(axis - 1, axis).flatten(axis - 1, axis)


class Fourier(nn.Module):
    """P = the unitary discrete Fourier matrix F_jk = exp(-2 pi i jk / d) / sqrt(d)."""

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        index = torch.arange(spec.head_dim, dtype=torch.int64, device="cpu")
        turn = torch.outer(index, index) % spec.head_dim
        angle = turn.double() * (2 * math.pi / spec.head_dim)
        self.exact = torch.cat([angle.cos(), -angle.sin()], dim=1) / math.sqrt(spec.head_dim)
        self.copies: dict[tuple, Tensor] = {}

    def forward(self, x: Tensor) -> Planes:
        """(..., D) -> the planes (re, im), each (..., D)."""
        return (x @ self.matrix(x.dtype, x.device)).chunk(2, dim=-1)

    def matrix(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[Re F, Im F], (D, 2D); one copy per dtype and device, outside the state dict."""
        if (dtype, device) not in self.copies:
            with torch.inference_mode(False):
                self.copies[dtype, device] = self.exact.to(dtype=dtype, device=device)
        return self.copies[dtype, device]


def reflect(x: Tensor, unit: Tensor) -> Tensor:
    """x - 2 u (u^T x) for every row of x (..., D) and one vector u (D,) of length 1."""
    if not is_plain(x, unit):
        return x - 2.0 * (x @ unit).unsqueeze(-1) * unit
    return _Reflection.apply(x, unit)


def _unit(v: Tensor) -> Tensor:
    return v / v.norm().clamp_min(EPS)


class _Reflection(torch.autograd.Function):
    """The mirror image of x in the plane normal to a unit vector u; its own transpose.

    Hence the gradient of x is the mirror image of the gradient: two passes over memory where
    automatic differentiation takes six. Differentiable any number of times.
    """

    @staticmethod
    def forward(ctx, x, unit):
        ctx.save_for_backward(unit, x if ctx.needs_input_grad[1] else None)
        return _mirror(x, unit)

    @staticmethod
    def backward(ctx, grad):
        unit, x = ctx.saved_tensors
        grad_x = reflect(grad, unit) if ctx.needs_input_grad[0] else None
        if x is None:
            return grad_x, None
        g, x = grad.reshape(-1, unit.numel()), x.reshape(-1, unit.numel())
        return grad_x, -2 * (x.T @ (g @ unit) + g.T @ (x @ unit))


def _mirror(x: Tensor, unit: Tensor) -> Tensor:
    along = (x.transpose(1, 2) @ unit).transpose(1, 2) if _heads_inside(x) else x @ unit
    return torch.addcmul(x, along.unsqueeze(-1), unit, value=-2)


def _heads_inside(x: Tensor) -> bool:
    """True if x (B, H, T, D) lies in memory as (B, T, H, D), which ``@`` would copy."""
    return x.dim() == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous()


def _householder_vector(spec: EncodingSpec) -> Tensor:
    """(D,) from N(0, I)."""
    return torch.randn(spec.head_dim, generator=spec.generator(stream=1), device="cpu")


# --- Lambda^(s): the one-parameter group, on the last axis of every plane ----------------------


class Rotation(nn.Module):
    """Lambda^(s) turns the pair (2i, 2i+1) by s alpha_i, alpha_i = 10000^(-2i/e) (Eq. 24).

    e is the width made even; an odd width leaves its last feature alone (q = 1 in Eq. 24).
    """

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        width = self.turned(spec.head_dim)
        exponent = torch.arange(width // 2, dtype=torch.float64, device="cpu") * (-2.0 / width)
        self.register_frequencies(BASE**exponent)

    @staticmethod
    def turned(head_dim: int) -> int:
        """How many leading features turn; ChoiceError if none can."""
        if head_dim < 2:
            raise ChoiceError(f"a rotation needs a head width of at least 2, got {head_dim}")
        return head_dim - head_dim % 2

    def register_frequencies(self, theta: Tensor) -> None:
        """Keep ``theta`` (float64, radians per token) fixed.

        Not a buffer: nothing that casts or broadcasts a model's buffers may touch it.
        """
        self.theta = theta
        self.cache = PositionCache()

    def at(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """exp(i s theta) for every position: (T, E) or (B, 1, T, E), complex."""
        if self.cache is None:
            return phases(positions, self.theta, dtype)
        sources = positions, self.theta
        return self.cache.get(sources, dtype, lambda: phases(positions, self.theta, dtype))

    def forward(self, planes: Planes, turn: Tensor) -> Planes:
        """Turn every plane (..., T, D) by what :meth:`at` gave."""
        return tuple(rotate_pairs(x, turn) for x in planes)


class LearnedRotation(Rotation):
    """The rotation whose angles are parameters, started at those of :class:`Rotation`."""

    def register_frequencies(self, theta: Tensor) -> None:
        """Make ``theta`` a float32 parameter.

        Phases are not cached, frozen or not: nothing tells an edit through ``.data``.
        """
        self.theta = nn.Parameter(theta.float())
        self.cache = None


class HalfRotation(Rotation):
    """The rotation of the first e = d // 2 features (made even), identity on the rest (C.7)."""

    @staticmethod
    def turned(head_dim: int) -> int:
        """d // 2 made even; ChoiceError below width 3, where every feature would turn."""
        if head_dim < 3:
            raise ChoiceError(f"rotation-half needs a head width of at least 3, got {head_dim}")
        return head_dim // 2 + (head_dim // 2) % 2


class Unitary(Rotation):
    """Lambda^(s) = diag(exp(i s alpha_t)), alpha_t = 10000^(-2t/d), t = 0..d-1 (Eq. 23).

    A real input becomes complex, so the encoded width doubles.
    """

    def __init__(self, spec: EncodingSpec) -> None:
        nn.Module.__init__(self)
        exponent = torch.arange(spec.head_dim, dtype=torch.float64, device="cpu")
        self.register_frequencies(BASE ** (exponent * (-2.0 / spec.head_dim)))

    def forward(self, planes: Planes, turn: Tensor) -> Planes:
        """One or two planes (..., T, D) -> the planes (re, im)."""
        if len(planes) == 1:
            return planes[0] * turn.real, planes[0] * turn.imag
        re, im = planes
        return re * turn.real - im * turn.imag, re * turn.imag + im * turn.real


class LearnedUnitary(Unitary):
    """The unitary diagonal whose angles are parameters (TMLR Type 1)."""

    register_frequencies = LearnedRotation.register_frequencies


class Permutation(nn.Module):
    """Lambda^(s) = (I)_{pi^s}: feature j at position s is feature pi^s(j) (Eq. 25, 59).

    pi is drawn once and kept. pi^s comes from pi's cycles: step s along j's cycle, modulo its
    length, so any position up to 2^31 costs the same and no table is kept.
    """

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        draw = torch.randperm(spec.head_dim, generator=spec.generator(stream=2), device="cpu")
        self.register_buffer("permutation", draw)
        self.cycles = CyclicPowers()

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Indices of pi^s and of its inverse, (T, D) or (B, 1, T, D) each."""
        powers = self.cycles.powers(self.permutation, positions)
        return tuple(over_heads(index, positions) for index in powers)

    def forward(self, planes: Planes, powers: tuple[Tensor, ...]) -> Planes:
        """Permute the last axis of every plane (..., T, D) by what :meth:`at` gave."""
        return tuple(permute(x, *powers) for x in planes)


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
        if not has_values(permutation):
            return cycle_form(permutation)
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


def phases(positions: Tensor, theta: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(i s theta), complex, shape (T, E) or (B, 1, T, E), for (T,) or (B, T) positions.

    The angle is a float64 product: one float32 angle is off by 6e-3 rad at position 100,000.
    Cosine and sine are cast last, to ``dtype``.
    """
    form = _phases if is_transformed() else _Phases.apply
    return over_heads(form(theta, positions, dtype), positions)


def _phases(theta: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(i s theta), (..., E), in differentiable operations."""
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    angle = positions.unsqueeze(-1).to(exact) * theta.to(exact).to(positions.device)
    return torch.complex(angle.cos().to(dtype), angle.sin().to(dtype))


class _Phases(torch.autograd.Function):
    """exp(i s theta); the gradient of theta is sum_s s Im(conj(phase) gradient).

    Differentiable any number of times: the saved phase is the result, which autograd knows.
    """

    @staticmethod
    def forward(ctx, theta, positions, dtype):
        phase = _phases(theta, positions, dtype)
        ctx.save_for_backward(positions, phase, theta)
        return phase

    @staticmethod
    def backward(ctx, grad):
        positions, phase, theta = ctx.saved_tensors
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        s, turned = positions.unsqueeze(-1).to(exact), (phase.conj() * grad).imag.to(exact)
        return (s * turned).flatten(0, -2).sum(0).to(theta), None, None


def rotate_pairs(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i+1) of the leading features of x (..., T, D) by ``turn`` (..., T, E).

    The first 2E features are multiplied as complex numbers x[2i] + i x[2i+1]; the rest stay.
    """
    form = encode.Form(phi=False)
    if encode_cpu.serves(x, form):
        return encode_cpu.encode(x, None, turn, form)
    if x.shape[-1] % 2 or not is_plain(x, turn):
        # an odd width splits complex numbers in memory, and compilers do without them
        return encode.rotated(x, turn)
    width = 2 * turn.shape[-1]
    turned = torch.view_as_real(_pairs(x[..., :width]) * turn).flatten(-2)
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], dim=-1)


def _pairs(x: Tensor) -> Tensor:
    """(..., 2E) real -> (..., E) complex; copies where a view would split a pair."""
    x = x.contiguous()
    x = x.clone() if x.storage_offset() % 2 else x
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


# --- the family --------------------------------------------------------------------------------

PROJECTIONS = {
    "identity": Identity,
    "householder": Householder,
    "householder-learned": LearnedHouseholder,
    "odd-even": OddEven,
    "fourier": Fourier,
}
"""P by name."""

CORES = {
    "rotation": Rotation,
    "rotation-learned": LearnedRotation,
    "rotation-half": HalfRotation,
    "unitary": Unitary,
    "unitary-learned": LearnedUnitary,
    "permutation": Permutation,
}
"""Lambda by name."""


class LRPE(QueryKeyEncoding):
    """q~_s = Lambda^(s) P q_s, k~_t = Lambda^(t) P k_t (Eq. 76), shared by all heads.

    Args:
        spec: widths and seed.
        projection: a name of :data:`PROJECTIONS`. core: a name of :data:`CORES`.
    Raises: ChoiceError for an unknown name or a width the core cannot turn.

    Costs O(D) per token and head (O(D^2) with fourier). Any position up to 2^31.
    """

    Options = LRPEOptions

    def __init__(self, spec: EncodingSpec, projection: str, core: str) -> None:
        super().__init__(spec)
        self._parts = projection, core
        self.projection = _named(PROJECTIONS, projection, "P")(spec)
        self.core = _named(CORES, core, "Lambda")(spec)
        self._planes = 2 if projection == "fourier" or core.startswith("unitary") else 1
        self.foldable = projection != "identity"
        # the transform of a positive vector has its mass in bin 0, which turns fastest
        self.denominator_vanishes = projection == "fourier"

    def summary(self) -> str:
        """P x Lambda, by their names."""
        return " x ".join(self._parts)

    @property
    def feature_dim(self) -> int:
        """D, or 2D where features are complex."""
        return self._planes * self.spec.head_dim

    def forward(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode; see :meth:`QueryKeyEncoding.forward`.

        Half types are widened to float32 for the whole map and rounded once.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        planes = (self.projection(x.to(wide)) for x in (q, k))
        turned = self.turn(*planes, q_positions, k_positions)
        return tuple(x.to(q.dtype) for x in turned)

    def turn(
        self, q: Planes, k: Planes, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Lambda^(s) on the planes of P q and P k; what a folded projection leaves to do."""
        wide = torch.promote_types(q[0].dtype, torch.float32)
        check_positions(q_positions, q[0]), check_positions(k_positions, k[0])
        at_q = self.core.at(q_positions, wide)
        at_k = at_q if k_positions is q_positions else self.core.at(k_positions, wide)
        return self._turned(q, at_q, wide), self._turned(k, at_k, wide)

    def one_pass(
        self, x: Tensor, positions: Tensor, feature_map: str | None
    ) -> Callable[[Tensor], Tensor] | None:
        """By a kernel; see :meth:`QueryKeyEncoding.one_pass`.

        None if no kernel serves x (B, H, T, D), or if P is a Fourier matrix and Lambda not unitary.
        """
        fourier = isinstance(self.projection, Fourier)
        if fourier and not isinstance(self.core, Unitary):
            return None
        if feature_map not in (None, ELU_PLUS_ONE):
            return None
        form = encode.Form(
            phi=feature_map is not None,
            halves=isinstance(self.projection, OddEven),
            wide=isinstance(self.core, Unitary),
            permutes=isinstance(self.core, Permutation),
            fourier=fourier,
        )
        triton = (
            loader.triton_kernels(KERNELS) if form.phi else None
        )  # which always begins with phi
        forms = (triton, encode_cpu)
        fast = next((m for m in forms if m is not None and m.serves(x, form)), None)
        if fast is None:
            return None
        wide = torch.promote_types(x.dtype, torch.float32)
        projection = None
        if isinstance(self.projection, Householder):
            projection = self.projection.unit(wide)
        elif fourier:
            projection = self.projection.matrix(wide, x.device)
        at = self.core.at(check_positions(positions, x), wide)
        return lambda x: fast.encode(x, projection, at, form)

    def _turned(self, planes: Planes, at: object, wide: torch.dtype) -> Tensor:
        turned = self.core(tuple(x.to(wide) for x in planes), at)
        turned = turned[0] if len(turned) == 1 else torch.cat(turned, dim=-1)
        return turned.to(planes[0].dtype)


def _named(table: dict[str, type], name: str, role: str) -> type:
    if name not in table:
        raise ChoiceError(f"unknown {role} {name!r}; choose one of {', '.join(table)}")
    return table[name]
