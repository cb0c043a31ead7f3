"""Which of two rows of a column is better: Tukey-Kramer at 5 % in a model of rows plus seeds.

Values are compared on a scale where seeds scatter evenly (:func:`compared`). The model value =
row + seed + error is fitted to a column. Two rows are ordered if their difference exceeds the
limit of the studentized range for all rows of the column, with the pooled deviation or the pair's
own if that is larger. An accuracy must also exceed that limit for its sampling error, sqrt(2 / n).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.stats import studentized_range

BETTER, WORSE, TIED, UNSTABLE, OPEN = "better", "worse", "tied", "unstable", "open"
ALPHA = 0.05
UNSTABLE_FROM = 8.0
"""A row is unstable if its deviation exceeds this many times the median of the column."""

Cells = Mapping[str, Mapping[int, float]]
"""row -> seed -> value on the scale of :func:`compared`."""


def compared(value: float, kind: str) -> float:
    """Return a value on the scale of comparisons.

    kind: "perplexity" (its logarithm), "fraction" in [0, 1] (2 arcsin sqrt) or "" (as it is).
    """
    if kind == "perplexity":
        return math.log(value)
    return 2 * math.asin(math.sqrt(value)) if kind == "fraction" else value


@lru_cache(maxsize=1024)
def critical(rows: int, freedom: float) -> float:
    """Return the limit of a difference of two of ``rows`` means, in its standard errors."""
    return float(studentized_range.isf(ALPHA, rows, freedom)) / math.sqrt(2)


def unstable(cells: Cells, examples: int = 0) -> set[str]:
    """Return the rows whose deviation exceeds eight times the column's median.

    examples: size of the test set of an accuracy; its sampling error bounds the median from below.
    """
    own = {row: np.std(list(v.values()), ddof=1) for row, v in cells.items() if len(v) > 1}
    if len(own) < 3:
        return set()
    least = 1 / math.sqrt(examples) if examples else 0.0
    limit = UNSTABLE_FROM * max(float(np.median(list(own.values()))), least)
    return {row for row, deviation in own.items() if deviation > limit > 0}


@dataclass(frozen=True)
class Fit:
    """The model of a column, fitted by least squares.

    owners: the row of every value. inverse: pseudo-inverse of the design (rows + seeds, values).
    estimable: its projection; a difference outside its span cannot be estimated. freedom: degrees
    of freedom of the residuals.
    """

    rows: list[str]
    owners: np.ndarray
    inverse: np.ndarray
    estimable: np.ndarray
    effects: np.ndarray
    squares: np.ndarray
    freedom: int

    @property
    def variance(self) -> float:
        """The pooled variance of the errors; nan without degrees of freedom."""
        return self.squares.sum() / self.freedom if self.freedom else math.nan


def fit(cells: Cells) -> Fit:
    """Fit row + seed effects to the values of a column."""
    rows = [row for row in cells if cells[row]]
    seeds = sorted({seed for row in rows for seed in cells[row]})
    seen = [(i, seeds.index(s), v) for i, row in enumerate(rows) for s, v in cells[row].items()]
    design = np.zeros((len(seen), len(rows) + len(seeds)))
    for n, (row, seed, _) in enumerate(seen):
        design[n, row] = design[n, len(rows) + seed] = 1
    values, inverse = np.array([v for *_, v in seen]), np.linalg.pinv(design)
    effects = inverse @ values
    freedom = len(seen) - int(np.linalg.matrix_rank(design)) if seen else 0
    owners = np.array([row for row, *_ in seen])
    squares = (values - design @ effects) ** 2
    return Fit(rows, owners, inverse, inverse @ design, effects, squares, freedom)


def orders(cells: Cells, better: str = "lower", examples: int = 0) -> dict[tuple[str, str], str]:
    """Return the mark of every pair of rows; that of (a, b) compares a with b.

    better: "lower" or "higher". examples: size of the test set of an accuracy, 0 for other values.
    Marks: better, worse, tied; unstable if either is (:func:`unstable`); open with fewer than
    two degrees of freedom or no seed in common.
    """
    broken = unstable(cells, examples)
    model = fit({row: values for row, values in cells.items() if row not in broken})
    several = sum(len(cells[row]) > 1 for row in model.rows)
    marks = {(a, b): UNSTABLE for a in cells for b in cells if a != b and {a, b} & broken}
    for i, a in enumerate(model.rows):
        for j, b in enumerate(model.rows):
            if i != j:
                marks[a, b] = _mark(model, (i, j), several, better, examples)
    return marks


def _mark(model: Fit, pair: tuple[int, int], several: int, better: str, examples: int) -> str:
    contrast = np.zeros(len(model.effects))
    contrast[pair[0]], contrast[pair[1]] = 1, -1
    if model.freedom < 2 or not np.allclose(contrast @ model.estimable, contrast):
        return OPEN
    own = np.isin(model.owners, pair)
    spare = (own.sum() - 2) * (1 - 1 / several) if several else 0
    pooled = model.variance
    variance = max(pooled, model.squares[own].sum() / spare) if spare > 0 else pooled
    error = math.sqrt(variance * ((contrast @ model.inverse) ** 2).sum())
    least = critical(len(model.rows), model.freedom) * error
    if examples:  # all seeds share the tests: more seeds do not shrink this part
        least = max(least, critical(len(model.rows), math.inf) * math.sqrt(2 / examples))
    gap = contrast @ model.effects * (-1 if better == "lower" else 1)
    return TIED if abs(gap) <= least else BETTER if gap > 0 else WORSE
