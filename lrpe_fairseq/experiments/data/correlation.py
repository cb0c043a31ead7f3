"""Pearson and Spearman correlation of two columns of numbers; ties get average ranks."""

import math
from collections.abc import Sequence

import numpy as np


def average_ranks(values: Sequence[float]) -> np.ndarray:
    """Return ranks (n,), 1 for the smallest; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    shared = np.cumsum(counts) - (counts - 1) / 2
    return shared[inverse]


def pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Pearson's correlation; None if a side is constant.

    Raises: ValueError for lists of different lengths.
    """
    a, b = (np.asarray(side, dtype=float) for side in (first, second))
    if len(a) != len(b):
        raise ValueError(f"cannot correlate {len(a)} values with {len(b)}")
    a, b = a - a.mean(), b - b.mean()
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norm if norm else None


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation with average ranks for ties; None if a side is constant.

    Raises: ValueError for lists of different lengths.
    """
    return pearson(average_ranks(first), average_ranks(second))
