"""The check of tensors that belong to another one: positions, masks, starts and states of x.

It reads shapes, dtypes and devices, and no value, so that no device is waited for. Without it a
wrong tensor ends in an internal error, is broadcast without a word, or is read by a C++ kernel at
an address of another device.

Axes: B batch, H heads, T query time, S key time, D key width, E value width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

Shape = tuple[int | None, ...]
"""A shape; None stands for any number."""


class Kind(NamedTuple):
    """What the numbers of a tensor may be. dtypes: None for every floating dtype."""

    words: str
    dtypes: tuple[torch.dtype, ...] | None


POSITIONS = Kind("an int64 tensor", (torch.int64,))
NUMBERS = Kind("an integer tensor", (torch.int64, torch.int32, torch.int16, torch.uint8))
FLAGS = Kind("a bool tensor", (torch.bool,))
PADDING = Kind("a bool tensor, true at padding,", (torch.bool, torch.uint8))
"""uint8, as of fairseq's older masks, is read as bool. Other numbers are refused: in some programs
1 stands for a real token, and in masks that are added -inf for padding."""
REAL = Kind("a floating-point tensor", None)


def check_companion(
    name: str, tensor: Tensor, kind: Kind, axes: str, shapes: tuple[Shape, ...], x: Tensor
) -> Tensor:
    """Return ``tensor`` if it has one of the ``shapes`` and is of a ``kind`` on the device of x.

    Args: name: of the argument, for the error. axes: the shapes in letters, such as "(B, T)".
    Raises: ValueError, in one sentence.
    """
    if isinstance(tensor, Tensor):
        shape = tensor.shape
        dtypes = kind.dtypes
        # most shapes are without None, and equal to one of them
        fits = shape in shapes or _fits(shape, shapes)
        known = tensor.is_floating_point() if dtypes is None else tensor.dtype in dtypes
        if fits and known and tensor.device == x.device:
            return tensor
        got = f"{tensor.dtype} of shape {tuple(shape)} on {tensor.device}"
    else:
        got = f"an object of type {type(tensor).__name__}"
    wanted = " or ".join(map(_words, dict.fromkeys(shapes)))
    raise ValueError(
        f"{name} must be {kind.words} of shape {axes}, here {wanted} on {x.device}, got {got}"
    )


def _fits(shape: torch.Size, shapes: tuple[Shape, ...]) -> bool:
    """True if a shape is one of ``shapes``."""
    # loops: generators would take twice as long, in every call of attention
    for wanted in shapes:
        if len(shape) != len(wanted):
            continue
        for size, n in zip(shape, wanted, strict=True):
            if n is not None and size != n:
                break
        else:
            return True
    return False


def _words(shape: Shape) -> str:
    """Return a shape as Python writes a tuple, with "any" for None.

    >>> _words((2, None)), _words((3,))
    ('(2, any)', '(3,)')
    """
    sizes = ["any" if size is None else str(size) for size in shape]
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"


def check_by_token(name: str, tensor: Tensor, kind: Kind, x: Tensor) -> Tensor:
    """Return ``tensor`` if it has a number for every token of x (B, T, C), (B, T).

    Raises: as :func:`check_companion`.
    """
    return check_companion(name, tensor, kind, "(B, T)", (tuple(x.shape[:2]),), x)
