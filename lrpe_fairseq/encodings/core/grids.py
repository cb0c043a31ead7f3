"""Rows and columns of positions on a grid, whose cells are numbered row by row."""

from torch import Tensor

from lrpe_fairseq.encodings.core.positions import PositionCache


def axes_of(positions: Tensor, width: int, grid: str = "axial") -> tuple[Tensor, ...]:
    """Return the row and the column of positions on a grid of ``width``, or for "sum" their sum.

    The same tensors for the same positions object, so that encodings can cache.
    """

    def compute() -> tuple[Tensor, ...]:
        row, column = rows_and_columns(positions, width)
        return (row + column,) if grid == "sum" else (row, column)

    return _cells.get(positions, (width, grid), compute)


_cells = PositionCache(4)  # two streams of tokens, each read in two ways


def rows_and_columns(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the row s // W and the column s mod W of every position s.

    positions: int64, any shape. A negative position is in a row above row 0.
    width: W. 0: the positions are on a line, with row s and column 0.

    >>> rows_and_columns(torch.tensor([0, 5, 7]), 4)
    (tensor([0, 1, 1]), tensor([0, 1, 3]))
    """
    if width == 0:
        return positions, positions.new_zeros(positions.shape)
    return positions // width, positions % width
