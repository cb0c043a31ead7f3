"""Rotations exp(u A) with skew-symmetric generators A, and their gradients.

The eigenbasis of the Hermitian matrix i A gives every power, at any position up to 2^31. The
gradient is written by hand, because that of torch.linalg.eigh is not defined for equal eigenvalues.

Axes: B batch, H heads, T time, J blocks, b width of a block, G = H J, K vectors that share the
positions, M positions, c eigenvalues.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.encodings.core.forms import Fold
from lrpe_fairseq.encodings.core.positions import check_positions
from lrpe_fairseq.kernels.conditions import (
    gradients_of,
    gradients_without_autocast,
    is_plain,
    reads_are_free,
    without_autocast,
)

# --- generators --------------------------------------------------------------------------------


def triangle(block: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return rows and columns of the entries below the diagonal of a matrix of width ``block``."""
    rows, columns = torch.tril_indices(block, block, offset=-1, device=device)
    return rows, columns


def skew_of_triangle(lower: Tensor, block: int) -> Tensor:
    """Return L - L^T (..., b, b) for the entries of L below the diagonal, (..., b (b - 1) / 2)."""
    rows, columns = triangle(block, lower.device)
    number = torch.arange(len(rows), device=lower.device)
    entry = torch.zeros(block, block, dtype=torch.int64, device=lower.device)
    entry[rows, columns], entry[columns, rows] = number, number
    one = torch.ones(block, block, dtype=lower.dtype, device=lower.device)
    return lower[..., entry] * (one.tril(-1) - one.triu(1))


# --- the layout --------------------------------------------------------------------------------


def to_groups(x: Tensor, blocks: int, batched: bool) -> Tensor:
    """(n, B, H, T, J b) -> (G, K, M, b): K = n B and M = T, or K = n and M = B T if ``batched``."""
    x = x.unflatten(-1, (blocks, x.shape[-1] // blocks)).permute(2, 4, 0, 1, 3, 5).flatten(0, 1)
    return x.flatten(2, 3) if batched else x.flatten(1, 2)


def from_groups(x: Tensor, shape: torch.Size, blocks: int) -> Tensor:
    """Invert :func:`to_groups`; ``shape`` is (n, B, H, T, J b)."""
    n, batch, heads, length, width = shape
    x = x.reshape(heads, blocks, n, batch, length, width // blocks)
    return x.permute(2, 3, 0, 4, 1, 5).flatten(-2)


def encode_both(
    encode: Callable[[Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return ``encode`` of q and of k, in one call if they have the same positions.

    encode: a function of x (n, B, H, T, D) and positions (T,) or (B, T). It runs without autocast.
    """
    check_positions(q_positions, q)
    check_positions(k_positions, k)
    with without_autocast(q):
        if q_positions is k_positions and q.dtype == k.dtype:
            q, k = encode(torch.stack([q, k]), q_positions).unbind(0)
            return q, k
        q = encode(q.unsqueeze(0), q_positions).squeeze(0)
        return q, encode(k.unsqueeze(0), k_positions).squeeze(0)


def folded(p: Tensor, turn: Callable[..., tuple[Tensor, Tensor]]) -> Fold:
    """Return the fold that projects by P^T, given in blocks (H, J, b, b) of each head.

    turn: a function of q and k (B, H, T, D) after P^T and of their positions.
    """
    whole = torch.diag_embed(p.permute(0, 2, 3, 1)).permute(0, 3, 1, 4, 2)  # H J b J b
    whole = whole.flatten(3).flatten(1, 2)
    return Fold(lambda x: (projected(x, whole),), lambda q, k, *at: turn(q[0], k[0], *at))


def projected(x: Tensor, p: Tensor) -> Tensor:
    """Return P^T x for x (..., H, T, D) and P (H, D, D), without autocast, in the dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with without_autocast(x):
        return (x.to(wide) @ p.to(wide)).to(x.dtype)


EIGENBASIS = (
    "the eigenbasis of learned generators is computed after every update, and torch.linalg.eigh "
    "reads whether it has converged"
)
"""Why encodings that use an eigenbasis read values; see ``Encoding.host_reads``."""

# --- the exponential ---------------------------------------------------------------------------


def turn(x: Tensor, skew: Tensor, amounts: Tensor, find: "Find | None" = None) -> Tensor:
    """Compute exp(u A) x for skew-symmetric A, through the eigenbasis of the Hermitian i A.

    With i A = U diag(lambda) U^H, exp(u A) x = Re U e^(-i u lambda) U^H x.

    Args:
        x: (G, K, M, b), float32 or float64. skew: A, float64 (G, b, b).
        amounts: u, float64 (G, M). Exact to the rounding of u lambda in float64.
        find: finds the eigenbasis of A, see :data:`Find`; None to compute it in every call.
    Returns: (G, K, M, b) in the dtype of x.
    """
    if not is_plain(x, skew, amounts):
        return definition(x, skew, amounts)
    eigen = (find or Spectrum().entry)(skew)
    return _Turn.apply(x, skew, amounts, (eigen.values, eigen.basis))


def exponential(skew: Tensor, find: "Find | None" = None) -> Tensor:
    """Return exp(A), float64 (..., b, b), for skew-symmetric A, float64 (..., b, b)."""
    flat = skew.flatten(0, -3)
    eye = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    ones = flat.new_ones(len(flat), 1)
    columns = turn(eye.expand(len(flat), -1, -1).unsqueeze(2), flat, ones, find)
    return columns.squeeze(2).transpose(-1, -2).reshape(skew.shape)


def definition(x: Tensor, skew: Tensor, amounts: Tensor) -> Tensor:
    """Compute :func:`turn` in differentiable operations, one matrix exponential per amount.

    Its error grows with u; second derivatives are meant for u below about 10^5.
    """
    powers = amounts[..., None, None] * skew.unsqueeze(1)  # G M b b
    # as one list of matrices, because inductor would choose strides that matrix_exp does not take
    rotation = torch.matrix_exp(powers.flatten(0, 1)).view_as(powers)
    return torch.einsum("gmij,gkmj->gkmi", rotation.to(x.dtype), x)


def canonical(skew: Tensor, find: "Find") -> tuple[Tensor, Tensor] | None:
    """Return an orthogonal P (G, b, b) and angles theta (G, b / 2) with A = P generator(theta) P^T.

    Then exp(u A) = P R(u theta) P^T with RoPE's rotation R of pairs, and P cancels on the left of
    a score. None for an odd b and for eigenvalues that are not distinct, whose vectors have no
    gradient. Trap: a loss must not depend on the phases of the eigenvectors; scores do not.

    skew: A, float64 (G, b, b). find: see :data:`Find`. Differentiable any number of times.
    """
    if skew.shape[-1] % 2 or not is_plain(skew):
        return None
    eigen = find(skew)
    return _Canonical.apply(skew, eigen.values, eigen.basis) if eigen.distinct else None


class _Canonical(torch.autograd.Function):
    """:func:`canonical`, from half of the spectrum. The gradient is a function of the outputs."""

    @staticmethod
    def forward(ctx, skew, values, basis):
        p = as_real_map(basis, skew.dtype)
        theta = -values
        ctx.save_for_backward(p, theta)
        return p, theta

    @staticmethod
    @gradients_without_autocast
    def backward(ctx, grad_p, grad_theta):
        p, theta = ctx.saved_tensors
        half, grad = _as_complex(p).conj(), _as_complex(grad_p)  # half: vectors times sqrt 2
        whole = torch.cat([half, half.conj()], -1) / math.sqrt(2)
        gap = torch.cat([theta, -theta], -1).unsqueeze(-1) - theta.unsqueeze(-2)  # G b c
        same = torch.eye(*gap.shape[-2:], dtype=torch.bool, device=gap.device)
        turned = (whole.mT @ grad / gap.masked_fill(same, 1.0)).masked_fill(same, 0.0)
        of_theta = torch.diag_embed(grad_theta / math.sqrt(2))
        turned = turned - torch.cat([of_theta, torch.zeros_like(of_theta)], -2)
        return (whole.conj() @ (1j * turned) @ half.mT).real, None, None


class Eigen(NamedTuple):
    """The eigenbasis of i A, and what it was computed from."""

    skew: Tensor
    """A copy of A, float64 (..., b, b)."""
    values: Tensor
    """lambda of :func:`halved`."""
    basis: Tensor
    """U of :func:`halved`."""
    distinct: bool
    """True if the eigenvalues are distinct."""
    source: Tensor | None = None
    """The parameter of which A is a function."""
    version: tuple[int, int] | None = None
    """Its :func:`_version` in inference; None if it may have been changed since."""


Find = Callable[[Tensor], Eigen]
"""A function that finds the eigenbasis of i A for A, float64 (..., b, b), a plain tensor."""


class Spectrum:
    """A cache of the eigenbasis of i A for the last value of A.

    An optimizer may change a parameter through ``.data``, which leaves its version as it was. So
    values are compared wherever that costs little beside the rest: on a CPU, and in training, where
    A is new in every update and torch.linalg.eigh reads anyway. In inference on a GPU nothing is
    read: an entry of inference belongs to a parameter and its version, up to the next call of
    training. Values are compared on the device; if they differ, all results are NaN and never those
    of old values. That happens after an edit through ``.data`` between two calls of inference;
    ``train()`` or ``eval()`` of the module, which call :meth:`forget`, make it seen.

    Threads may share a cache: the entry is one tuple, replaced whole.
    """

    def __init__(self) -> None:
        self._entry: Eigen | None = None

    def forget(self) -> None:
        """Compute the next eigenbasis anew."""
        self._entry = None

    def entry(self, skew: Tensor, source: Tensor | None = None) -> Eigen:
        """Return the eigenbasis for A; see :data:`Find`. source: the parameter of which A is a
        function; None if there is none."""
        entry = self._entry
        version = None if skew.requires_grad else _version(source)
        if entry is not None and entry.skew.device == skew.device:
            if version is None or reads_are_free(skew):
                if torch.equal(entry.skew, skew):
                    self._entry = entry._replace(source=source, version=version)
                    return entry
            elif entry.source is source and entry.version == version:
                same = (entry.skew == skew).all()
                return entry._replace(values=entry.values * torch.where(same, 1.0, torch.nan))
        with torch.inference_mode(False), torch.no_grad():
            copy = skew.detach().clone()
            values_and_basis = halved(*eigenbasis(copy))
            self._entry = entry = Eigen(copy, *values_and_basis, source, version)
        return entry

    def __deepcopy__(self, memo: dict) -> "Spectrum":
        return Spectrum()

    def __reduce__(self) -> tuple:
        return Spectrum, ()


def _version(source: Tensor | None) -> tuple[int, int] | None:
    """Return what changes with a parameter, unless through ``.data``; None if nothing does."""
    if source is None or source.is_inference():
        return None
    return source.data_ptr(), source._version


class _Turn(torch.autograd.Function):
    """:func:`turn` with a gradient that is exact at equal and zero eigenvalues."""

    @staticmethod
    def forward(ctx, x, skew, amounts, eigen):
        ctx.save_for_backward(x, skew, amounts, *eigen)
        values, basis = eigen
        weight = as_real_map(basis, x.dtype)
        return _out_of(_phases(values, amounts, x.dtype) * _into(x, weight), weight)

    @staticmethod
    @gradients_without_autocast
    def backward(ctx, grad):
        x, skew, amounts, values, basis = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return *gradients_of(definition, (x, skew, amounts), needs[:3], (grad,)), None
        weight = as_real_map(basis, x.dtype)
        phase = _phases(values, amounts, x.dtype)
        h = _into(grad.contiguous(), weight)
        b = phase.conj() * h
        grad_x = _out_of(b, weight) if needs[0] else None
        if not any(needs[1:]):
            return grad_x, None, None, None
        y = _into(x, weight)
        parts = b, y, h, phase * y
        grad_skew = _gradient_of_skew(parts, values, basis, amounts) if needs[1] else None
        grad_amounts = _gradient_of_amounts(b, y, values) if needs[2] else None
        return grad_x, grad_skew, grad_amounts, None


def eigenbasis(skew: Tensor) -> tuple[Tensor, Tensor]:
    """Return lambda (..., b), ascending, and U (..., b, b) with i A = U diag(lambda) U^H.

    lambda is made exactly antisymmetric: rounding would change norms by 1e-11 at position 2^31.
    For a matrix that is not finite, for which torch.linalg.eigh raises, lambda is NaN.
    """
    not_finite = (skew * 0).sum((-2, -1)).unsqueeze(-1)  # 0, or NaN
    finite = skew.nan_to_num(0.0, 0.0, 0.0)
    values, basis = torch.linalg.eigh(torch.complex(torch.zeros_like(finite), finite))
    return (values - values.flip(-1)) / 2 + not_finite, basis


SEPARATE = 1e-5
"""Smallest eigenvalue, relative to the largest, whose vector is orthogonal to its conjugate, and
smallest difference of eigenvalues whose vectors have a useful gradient."""


def halved(values: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return the eigenvalues from 0 on and their vectors, those above 0 times sqrt 2.

    The third result is True if the eigenvalues are distinct and are the half.

    A is real, so the other half is conjugate, and Re U z is the same sum. c is b / 2, and for an
    odd b (b + 1) / 2; the vector of eigenvalue 0 is then made real. All b are returned if another
    eigenvalue is so close to 0 that its vector is not exactly orthogonal to the conjugate one.
    """
    pairs, odd = divmod(values.shape[-1], 2)
    upper = values[..., -pairs:]
    vectors = basis[..., -pairs:] * math.sqrt(2)
    far = torch.cat([upper[..., :1], upper.diff()], -1) > SEPARATE * upper[..., -1:]
    separate, distinct = torch.stack([far[..., :1].all(), far.all()]).tolist()  # one host read
    if not separate:
        return values, basis, False
    if odd:
        null = basis[..., pairs : pairs + 1]
        null = null * null.square().sum(-2, keepdim=True).conj().sqrt()  # real up to its sign
        vectors = torch.cat([null.real.to(basis.dtype), vectors], -1)
    return values[..., pairs:], vectors, distinct


def _as_complex(x: Tensor) -> Tensor:
    """Return real (re, im) pairs (..., 2c) as complex (..., c)."""
    return torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))


def as_real_map(basis: Tensor, dtype: torch.dtype) -> Tensor:
    """Return W (G, b, 2c), real: x W is U^H x as (re, im) pairs, and z W^T is Re U z."""
    return torch.view_as_real(basis.conj().resolve_conj()).flatten(-2).to(dtype)


def _into(x: Tensor, weight: Tensor) -> Tensor:
    """Return U^H x, complex (G, K, M, c), for x (G, K, M, b)."""
    out = x.flatten(1, 2) @ weight
    return torch.view_as_complex(out.unflatten(-1, (-1, 2))).unflatten(1, x.shape[1:3])


def _out_of(z: Tensor, weight: Tensor) -> Tensor:
    """Return Re U z, real (G, K, M, b), for complex z (G, K, M, c)."""
    flat = _as_real(z).flatten(1, 2)
    return (flat @ weight.transpose(-1, -2)).unflatten(1, z.shape[1:3])


def _phases(values: Tensor, amounts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return e^(-i u lambda), complex (G, 1, M, c); the angles are float64."""
    angle = (-amounts.unsqueeze(-1) * values.unsqueeze(-2)).unsqueeze(1)
    return torch.complex(angle.cos().to(dtype), angle.sin().to(dtype))


def _gradient_of_skew(
    parts: tuple[Tensor, ...], values: Tensor, basis: Tensor, amounts: Tensor
) -> Tensor:
    """Return dA, float64 (G, b, b): Re conj(U) C U^T with divided differences C.

    C_jl = sum_u conj(h_j) y_l (e_j - e_l) / (-i (lambda_j - lambda_l)), e = e^(-i u lambda)
    (Daleckii and Krein). Where eigenvalues are so close that it would cancel, its limit is used.
    A half of the spectrum has two blocks of C: l with eigenvalue lambda_l, and its conjugate.

    Args: parts: b, y, h, z, complex (G, K, M, c) each: h = U^H g and y = U^H x for the incoming
        gradient g, b = conj(e) h and z = e y.
    """
    b, y, h, z = (_as_real(part).flatten(1, 2) for part in parts)  # G KM 2c
    times = amounts.to(b.dtype).repeat(1, parts[0].shape[1]).unsqueeze(-1)  # G KM 1
    row, column = values.unsqueeze(-1), values.unsqueeze(-2)
    gap = torch.stack([row - column, row + column])
    largest = amounts.abs().amax(-1)[:, None, None] if amounts.shape[-1] else 0.0
    near = ~(gap.abs() * largest >= (12 * torch.finfo(b.dtype).eps) ** (1 / 3))
    limit = _products((b * times).mT @ y + (h * times).mT @ z).to(basis.dtype) / 2
    difference = _products(b.mT @ y - h.mT @ z).to(basis.dtype)
    c = torch.where(near, limit, difference / (-1j * gap.masked_fill(near, 1.0)))
    if values.shape[-1] == basis.shape[-2]:  # the whole spectrum
        return (basis.conj() @ c[0] @ basis.mT).real
    return (basis.conj() @ (c[0] @ basis.mT + c[1] @ basis.mH)).real / 2


def _as_real(z: Tensor) -> Tensor:
    """Return complex z (..., c) as real (re, im) pairs, (..., 2c)."""
    return torch.view_as_real(z.resolve_conj()).flatten(-2)


def _products(x: Tensor) -> Tensor:
    """Return B^H Y and B^H conj(Y), complex (2, G, c, c), for x = B^T Y of (re, im) pairs.

    x: real (G, 2c, 2c), of B and Y (G, N, 2c).
    """
    by_part = x.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))  # G c 2 c 2
    of_real, of_imag = by_part.unbind(-3)
    rr, ri = of_real.unbind(-1)
    ir, ii = of_imag.unbind(-1)
    return torch.stack([torch.complex(rr + ii, ri - ir), torch.complex(rr - ii, -ri - ir)])


def _gradient_of_amounts(b: Tensor, y: Tensor, values: Tensor) -> Tensor:
    """Return du, float64 (G, M): sum_j lambda_j Im(conj(b_j) y_j). b, y: complex (G, K, M, c)."""
    return ((b.conj() * y).imag.sum(1).to(values.dtype) @ values.unsqueeze(-1)).squeeze(-1)


def generator_of(theta: Tensor, width: int) -> Tensor:
    """Return A (..., b, b) with exp(u A) = R(u theta), RoPE's rotation of the pairs (2i, 2i + 1).

    theta: (..., b // 2), radians. A is 0 but for theta_i at (2i + 1, 2i) and -theta_i at
        (2i, 2i + 1).
    """
    even = 2 * torch.arange(theta.shape[-1], device=theta.device)
    lower = theta.new_zeros(*theta.shape[:-1], width, width)
    lower[..., even + 1, even] = theta
    return lower - lower.mT
