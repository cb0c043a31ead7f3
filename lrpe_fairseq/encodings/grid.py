"""Positions on a grid of width W, numbered row by row."""

from torch import Tensor


def rows_and_columns(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the row s // W and the column s mod W of every position s.

    Args:
        positions: int64, any shape. A negative position is in a row above row 0.
        width: W. 0: the positions are on a line, with row s and column 0.
    Returns: row and column, int64, in the shape of ``positions``.

    >>> rows_and_columns(torch.tensor([0, 5, 7]), 4)
    (tensor([0, 1, 1]), tensor([0, 1, 3]))
    """
    if width == 0:
        return positions, positions.new_zeros(positions.shape)
    return positions // width, positions % width
