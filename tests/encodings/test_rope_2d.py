"""Two-dimensional RoPE against dense rotations, built from the equations."""

import math

import pytest
import torch

from lrpe_fairseq.encodings import EncodingOptions, build_encoding

NAMES = ("rope-2d", "rope-2d-mixed")
HEADS = 3


def encoding_of(name, width=8, grid=0, seed=0):
    options = EncodingOptions(grid_width=grid)
    return build_encoding(name, width, HEADS, seed=seed, options=options)


def example(width):
    generator = torch.Generator().manual_seed(width)
    return torch.randn(2, 2, HEADS, 12, width, generator=generator, dtype=torch.float64)


def angles(encoding, head, row, column):
    """The angle of every pair of one head at one cell, from the equations."""
    width = encoding.spec.head_dim
    quarter = width // 4
    if encoding.name == "rope-2d":
        theta = [100 ** (-i / quarter) for i in range(quarter)]
        return [row * t for t in theta] + [column * t for t in theta]
    alpha, beta = (p[head].tolist() for p in (encoding.core.row, encoding.core.column))
    return [row * a + column * b for a, b in zip(alpha, beta, strict=True)]


def dense(encoding, x, cells):
    """Rotate the pairs (2i, 2i+1) of x (B, H, T, D) at [(row, column)] by :func:`angles`."""
    out = x.clone()
    for head in range(HEADS):
        for t, (row, column) in enumerate(cells):
            for i, angle in enumerate(angles(encoding, head, row, column)):
                c, s = math.cos(angle), math.sin(angle)
                a, b = x[:, head, t, 2 * i], x[:, head, t, 2 * i + 1]
                out[:, head, t, 2 * i] = a * c - b * s
                out[:, head, t, 2 * i + 1] = a * s + b * c
    return out


@pytest.mark.parametrize(("width", "grid"), [(8, 4), (8, 0), (10, 5), (7, 1), (4, 100)])
@pytest.mark.parametrize("name", NAMES)
def test_features_are_turned_by_row_and_column(name, width, grid):
    encoding, (q, k) = encoding_of(name, width, grid), example(width)
    at = torch.tensor([*range(10), 523, 100_003])
    cells = [(s // grid, s % grid) if grid else (s, 0) for s in at.tolist()]
    for x, found in zip((q, k), encoding(q, k, at, at), strict=True):
        torch.testing.assert_close(found, dense(encoding, x, cells), rtol=0, atol=1e-9)


def test_mixed_frequencies_start_in_one_direction_per_head_and_in_the_orthogonal_one():
    core = encoding_of("rope-2d-mixed", 16).core
    frequency = torch.complex(core.column, core.row).detach()
    magnitude = torch.tensor([10 ** (-i / 4) for i in range(4)])
    torch.testing.assert_close(frequency.abs(), magnitude.repeat(2).expand(HEADS, -1))
    first, second = frequency.chunk(2, -1)
    torch.testing.assert_close(second / first, torch.full_like(first, 1j))
    directions = first.angle()
    torch.testing.assert_close(directions, directions[:, :1].expand_as(directions))
    assert len(directions[:, 0].unique()) == HEADS
