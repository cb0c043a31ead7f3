"""What is compiled into the Triton kernels of Lambda P phi, and a tiny call with the same; see
``kernels.proof``."""

from functools import partial

import torch
from torch import Tensor

from lrpe_fairseq.kernels.encode import encode as defined
from lrpe_fairseq.kernels.encode import encode_triton
from lrpe_fairseq.kernels.encode.encode import Angles, Variant
from lrpe_fairseq.kernels.encode.encode_triton import Arguments
from lrpe_fairseq.kernels.proof import Example, Key, Numbers, Tensors, alignment
from lrpe_fairseq.kernels.proof import key_of as proof_key

FAMILY = "encodings of queries and keys"
BATCH, HEADS, TIME = 2, 2, 37
"""Sizes of an example: more than a program's rows, and no multiple of them."""


def key_of(*arguments: *Arguments) -> Key:
    """Return the family, the device and the constants of ``encode_triton.encode(*arguments)``."""
    q, k, normal, angles, q_positions, _, variant = arguments
    theta, column, _ = angles if isinstance(angles, Angles) else (angles, None, 0)
    parameters = normal, theta, column, q_positions
    phase_axes = q_positions.dim() if q_positions.is_complex() else 0
    constants = (
        q.dtype,
        q.shape[3],
        min(alignment(q), alignment(k)),
        *variant,
        *(None if x is None else (x.dtype, x.requires_grad) for x in parameters),
        q.requires_grad or k.requires_grad,
        _by_head(theta, variant),
        _width(theta, q_positions),
        phase_axes,
        q_positions.numel() > 0,
    )
    # other phases are copied
    places = [x if x.is_contiguous() or not phase_axes else None for x in arguments[4:6]]
    return proof_key(FAMILY, q.device, constants, (q, k, normal, theta, column, *places))


def _by_head(theta: Tensor | None, variant: Variant) -> bool:
    return theta is not None and theta.dim() == (3 if variant.permutes else 2)


def _width(theta: Tensor | None, phases: Tensor) -> int:
    if theta is not None:
        return theta.shape[-1]
    return phases.shape[-1] if phases.is_complex() else 0


def example_of(*arguments: *Arguments) -> Example:
    """Return a tiny call with the constants of ``encode_triton.encode(*arguments)``."""
    q, k, normal, angles, q_positions, _, variant = arguments
    theta, column, grid = angles if isinstance(angles, Angles) else (angles, None, 0)
    heads = HEADS
    if _by_head(theta, variant):
        heads = theta.shape[1 if variant.permutes else 0]
    numbers = Numbers(q.device)
    learns = q.requires_grad or k.requires_grad
    rows = [numbers.rows(q, BATCH, heads, TIME).detach() for _ in range(2)]
    inputs: Tensors = {"q": rows[0].requires_grad_(learns), "k": rows[1].requires_grad_(learns)}
    inputs["normal"] = None if normal is None else _like(normal, numbers.normal(*normal.shape))
    inputs["theta"] = theta.detach() if variant.permutes else _angles(theta, numbers)
    inputs["column"] = _angles(column, numbers)
    places = _positions(q_positions, heads, numbers)
    inputs["positions of q"] = inputs["positions of k"] = places
    if places.requires_grad:  # two leaves
        inputs["positions of k"] = places.detach().clone().requires_grad_()
    exact = {"positions of q", "positions of k"} if not places.is_complex() else set()
    return Example(
        encode_triton._Encoded,
        inputs,
        (grid, variant),
        partial(_definition, grid=grid, variant=variant),
        frozenset(exact | ({"theta"} if variant.permutes else set())),
    )


def _like(x: Tensor, values: Tensor) -> Tensor:
    return values.to(x.dtype).requires_grad_(x.requires_grad)


def _angles(x: Tensor | None, numbers: Numbers) -> Tensor | None:
    """Return angles of the shape of x between 0 and 1 radians."""
    return None if x is None else _like(x, numbers.uniform(*x.shape, dtype=x.dtype))


def _positions(like: Tensor, heads: int, numbers: Numbers) -> Tensor:
    """Return positions (T,) that begin late, none if ``like`` has none, or phases (B, H, T, E)."""
    if not like.is_complex():
        return torch.arange(TIME if like.numel() else 0, device=like.device) + 1000
    shape = (heads, TIME, like.shape[-1])
    if like.dim() == 4:
        shape = (BATCH, *shape)
    angles = numbers.uniform(*shape) * 6.0
    return torch.polar(torch.ones_like(angles), angles).requires_grad_(like.requires_grad)


def _definition(inputs: Tensors, grid: int, variant: Variant) -> tuple[Tensor, Tensor]:
    q, k, normal, theta, column, q_positions, k_positions = inputs.values()
    angles = theta if theta is None or variant.permutes else Angles(theta, column, grid)
    places = [q_positions, k_positions]
    if q_positions.is_complex():  # the kernels' gradient is that of phases of absolute value 1
        places = [x / x.abs() for x in places]
    return defined.both(q, k, normal, angles, *places, variant)
