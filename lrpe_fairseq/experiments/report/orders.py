"""Which of two rows is better: one verdict for a pair, wherever it is shown.

A :class:`Measurement` is what was measured (scale, data, attention, split, protocol, metric) with
all its rows, on whatever pages they stand. Two rows are compared seed by seed: the mean of their
differences has a t interval, and the place of that interval is the verdict.

The variance of a pair's difference is its own, drawn towards that of all pairs of the measurement
at the pair's level (an inverse chi-square prior, :class:`Prior`). The error of an interval is a
constant, and the priors of a release are frozen (:mod:`.priors`), so no other row, and no other
page, changes a verdict.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from scipy import special, stats

BETTER, WORSE, EQUAL = "better", "worse", "equal"
UNRESOLVED, UNSTABLE = "unresolved", "unstable"
VERDICTS = (BETTER, WORSE, EQUAL, UNRESOLVED, UNSTABLE)

PRIMARY, EXPLORATORY = 0.05 / 10, 0.05 / 50
"""Error of an interval: of ten contrasts named before their runs, of all other pairs."""
STRENGTHS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
SLOPES = (0.0, 4.0, 8.0, 16.0, 32.0)
SCALES = np.linspace(-1.5, 1.5, 16)
"""What is tried for a prior; scales are relative to the median, in logarithms of variances."""
WITHIN = 0.5
"""A prior fits almost as well as the best within this difference of log likelihoods."""
LEAST = 1e-4
"""The smallest deviation: that of rounded digits. Two equal values are a coincidence."""
MOST = 2.0
"""By how much the known variance of the tests may raise the degrees of freedom.

Without this bound about 6 % of the measured columns have a wrong verdict in the worst simulation of
benchmarks/false_orders.py (equal means, deviations as measured), with it about 3 %.
"""
SLOPED_FROM = 10
"""The smallest number of rows for which the growth of deviations with the level is fitted."""
PAIRED_SAMPLING = 0.0024**2 * 20608
"""Variance of the log ratio of two perplexities due to the choice of tests, times the tests.

It is measured on WikiText-2, on two sets of test tokens of one kind. Seeds share it, so more of
them do not lower it.
"""

Cells = Mapping[str, Mapping[int, float]]
"""row -> seed -> value on the scale of :func:`compared`."""


@dataclass(frozen=True)
class Unit:
    """How values of a kind are compared and shown.

    margin: rows are equal if they differ by less, in the reader's units. broken: the deviation of a
    row between seeds that more seeds will not mend, on the scale of :func:`compared`. name: of the
    reader's unit.
    """

    margin: float
    broken: float
    name: str


UNITS = {
    "perplexity": Unit(2.0, 0.10, "%"),
    "fraction": Unit(2.0, 0.30, "points"),
    "percent": Unit(2.0, 10.0, "points"),
    "bleu": Unit(0.5, 3.0, "BLEU"),
    "loss": Unit(0.02, 0.10, ""),
    "plain": Unit(0.0, math.inf, ""),
}
"""Kinds of values: a perplexity, a fraction in [0, 1], a coefficient in percent, BLEU, a loss in
bits or nats, and anything else, which is never equal within a margin."""


def compared(value: float, kind: str) -> float:
    """Return a value on the scale of comparisons, where seeds scatter evenly.

    The logarithm of a perplexity, 2 arcsin sqrt of a fraction, other values as they are.
    """
    if kind == "perplexity":
        return math.log(value)
    return 2 * math.asin(math.sqrt(value)) if kind == "fraction" else value


def effect(kind: str, middle: float, gap: float) -> float:
    """Return a difference of compared values in the reader's units: percent, points, or as it is.

    middle: the mean of the two compared values; a difference of fractions depends on it.
    """
    if kind == "perplexity":
        return 100 * math.expm1(min(gap, 50.0))
    if kind != "fraction":
        return gap
    # The arcsine scale ends at pi: no difference of fractions is larger.
    size = min(abs(gap), math.pi)
    low = min(max(middle - size / 2, 0.0), math.pi - size)  # both within 0 to 100 %
    points = math.sin((low + size) / 2) ** 2 - math.sin(low / 2) ** 2
    return math.copysign(100 * points, gap)


def sampling(kind: str, examples: int) -> float:
    """Return the variance of a difference that is due to the choice of the tests.

    examples: tested examples, or tokens of a perplexity; 0 if unknown.
    """
    if not examples:
        return 0.0
    return {"fraction": 2.0, "perplexity": PAIRED_SAMPLING}.get(kind, 0.0) / examples


class Prior(NamedTuple):
    """What the variances of a measurement's pairs have in common.

    strength: the weight of the prior in degrees of freedom; 0: there is none. slope: how a row's
    deviation grows with its excess over the best. scale: log variance of a pair of best rows,
    halved. best: the compared value from which the excess is counted.
    """

    strength: float
    slope: float
    scale: float
    best: float


class Interval(NamedTuple):
    """The mean difference of two rows, its half width, and the deviation between seeds."""

    gap: float
    half: float
    deviation: float


class Verdict(NamedTuple):
    """The verdict on one row against another, and the interval in the reader's units.

    visible: the smallest difference, in the direction of ``size``, that would have shown.
    """

    name: str
    size: float
    low: float
    high: float
    unit: str
    visible: float = math.inf

    @property
    def known(self) -> bool:
        """True if there is an interval at all."""
        return math.isfinite(self.size) and math.isfinite(self.high - self.low)


NOTHING = Interval(math.nan, math.inf, math.nan)


@lru_cache(maxsize=65536)
def _limit(error: float, freedom: float) -> float:
    """Return the two-sided limit of Student's t."""
    return float(stats.t.isf(error / 2, freedom))


def log_shape(slope: float, *levels: np.ndarray | float) -> np.ndarray:
    """Return the log of a pair's variance relative to that of two best rows, halved."""
    return np.log(sum(1 + (slope * np.asarray(level)) ** 2 for level in levels))


class Measurement:
    """Everything that was measured in one way.

    cells: see :data:`Cells`; rows without a value are left out. kind: of :data:`UNITS`. better:
    ``lower`` or ``higher``. sampling: see :func:`sampling`. prior: as a release has frozen it; it
    is fitted if absent. primary: pairs of rows whose contrasts were named before their runs.
    """

    def __init__(
        self,
        cells: Cells,
        kind: str = "perplexity",
        better: str = "lower",
        sampling: float = 0.0,
        prior: Prior | None = None,
        primary: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.cells = {row: dict(values) for row, values in cells.items() if values}
        self.kind = kind
        self.better = better
        self.sampling = sampling
        self._means = {
            row: float(np.mean(list(of_seeds.values()))) for row, of_seeds in self.cells.items()
        }
        self._primary = {frozenset(pair) for pair in primary}
        self._frozen = prior
        self._known: dict[tuple[str, str], Verdict] = {}

    @property
    def frozen(self) -> bool:
        """True if a release has frozen the prior: further rows then move no verdict."""
        return self._frozen is not None

    @property
    def repeated(self) -> int:
        """The number of rows with several seeds."""
        return sum(len(of_seeds) > 1 for of_seeds in self.cells.values())

    @cached_property
    def prior(self) -> Prior:
        """The frozen prior, or the fitted one."""
        if self._frozen is not None:
            return self._frozen
        best = min(self._means.values(), default=0.0)
        return fitted_prior(self.cells, self._levels(best), best, self.kind)

    def _levels(self, best: float) -> dict[str, float]:
        """Return by how much each row exceeds the best; failing perplexities scatter more."""
        # Accuracies that fail do not scatter more; they are bounded.
        sloped = self.kind == "perplexity"
        return {row: max(mean - best, 0.0) * sloped for row, mean in self._means.items()}

    @cached_property
    def _level(self) -> dict[str, float]:
        return self._levels(self.prior.best)

    def error(self, a: str, b: str) -> float:
        """Return the error of a pair's interval."""
        return PRIMARY if frozenset((a, b)) in self._primary else EXPLORATORY

    def interval(self, a: str, b: str) -> Interval:
        """Return the difference a - b on the scale of :func:`compared`.

        Its variance is that of the seeds, over their number, plus that of the choice of tests,
        which more seeds do not shrink. The degrees of freedom are Satterthwaite's, because the
        second part is known, but at most :data:`MOST` times those of the seeds: where the seeds of
        a pair happen to agree, the approximation would trust the first part too much.

        :data:`NOTHING` without a common seed, or for one seed without a prior.
        """
        first, second = self.cells.get(a, {}), self.cells.get(b, {})
        seeds = sorted(first.keys() & second.keys())
        strength = self.prior.strength
        # One seed needs a prior to have an interval.
        if not seeds or strength + len(seeds) < 2:
            return NOTHING
        gaps = np.array([first[seed] - second[seed] for seed in seeds])
        count = len(gaps)
        freedom = strength + len(gaps) - 1
        # Two seeds may agree by chance, or because digits were rounded.
        squares = max(float(((gaps - gaps.mean()) ** 2).sum()), LEAST**2 * (count - 1))
        variance = (strength * self._expected(a, b) + squares) / freedom
        total = variance / count + self.sampling
        # Satterthwaite: the variance of the tests is known and adds freedom.
        freedom *= min((total * count / variance) ** 2, MOST)
        half = _limit(self.error(a, b), freedom) * math.sqrt(total)
        return Interval(float(gaps.mean()), half, math.sqrt(variance))

    def _expected(self, a: str, b: str) -> float:
        """Return the variance of a pair's difference by the prior."""
        strength, slope, scale, _ = self.prior
        if not strength:
            return 0.0
        shape = log_shape(slope, self._level[a], self._level[b])
        return math.exp(min(scale + float(shape), 50.0))

    def verdict(self, a: str, b: str) -> Verdict:
        """Return the verdict on row ``a`` against row ``b``."""
        # Pages ask for a pair many times, and a t quantile is slow.
        if (a, b) not in self._known:
            self._known[a, b] = self._verdict(a, b)
        return self._known[a, b]

    def _verdict(self, a: str, b: str) -> Verdict:
        unit = UNITS[self.kind]
        gap, half, deviation = self.interval(a, b)
        if math.isnan(gap):
            return Verdict(UNRESOLVED, gap, -math.inf, math.inf, unit.name)
        middle = (self._means[a] + self._means[b]) / 2
        # Both ends in the reader's units: intervals of percent and points are not symmetric.
        size, low, high = (effect(self.kind, middle, gap + s * half) for s in (0, -1, 1))
        # Equality is tested first: a difference may be certain and still not matter.
        if max(-low, high) <= unit.margin:
            name = EQUAL
        elif abs(gap) > half:
            name = BETTER if (gap < 0) == (self.better == "lower") else WORSE
        else:
            name = UNSTABLE if deviation > unit.broken * math.sqrt(2) else UNRESOLVED
        # Not half of the interval's width: a rise of 35 % and a fall of 26 % are equally far.
        visible = abs(effect(self.kind, middle, math.copysign(half, gap)))
        return Verdict(name, size, low, high, unit.name, visible)

    def unbeaten(self) -> list[str]:
        """Return the rows that no row is better than; the best one is among them (Hsu 1981)."""
        beaten = {
            b for a, b in itertools.permutations(self.cells, 2) if self.verdict(a, b).name == BETTER
        }
        return [row for row in self.cells if row not in beaten]


# --- the prior -----------------------------------------------------------------------------------


def fitted_prior(cells: Cells, level: Mapping[str, float], best: float, kind: str) -> Prior:
    """Fit variance ~ scale x shape x strength / chi-square(strength) to the pairs of repeated rows.

    The weakest strength is taken that fits almost as well as the best. Without three repeated rows,
    and for numbers that have no verdict, there is no prior: its strength is 0.
    """
    none = Prior(0.0, 0.0, 0.0, best)
    rows = [row for row in cells if len(cells[row]) > 1]
    # Two rows make one pair, from which no strength can be fitted.
    if len(rows) < 3 or kind == "plain":
        return none
    first, second, logs, freedom = _variances(cells, rows)
    if not len(logs):
        return none
    levels = np.array([level[row] for row in rows])
    # A slope that is fitted to few rows follows one that failed.
    sloped = len(rows) >= SLOPED_FROM and kind == "perplexity"
    likelihood: dict[tuple[float, float, float], float] = {}
    for slope in SLOPES if sloped else SLOPES[:1]:
        rest = logs - log_shape(slope, levels[first], levels[second])
        for strength in STRENGTHS:
            # Around the median, which a few failing pairs do not move.
            scales = np.median(rest) + SCALES
            # n rows have n (n - 1) / 2 pairs, but only n - 1 independent ones.
            likelihoods = _likelihoods(rest, scales, freedom, strength) * 2 / len(rows)
            tried = ((strength, slope, float(scale)) for scale in scales)
            likelihood |= dict(zip(tried, map(float, likelihoods), strict=True))
    # Fitted at its maximum the strength is too high: simulated errors were above 5 %.
    enough = max(likelihood.values()) - WITHIN
    weakest = min(parameters[0] for parameters, value in likelihood.items() if value >= enough)
    best_fit: Callable = likelihood.__getitem__
    candidates = [parameters for parameters in likelihood if parameters[0] == weakest]
    strength, slope, scale = max(candidates, key=best_fit)
    return Prior(strength=strength, slope=slope, scale=scale, best=best)


def _variances(
    cells: Cells, rows: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return of every pair with two common seeds: both places, log variance, degrees of freedom."""
    seeds = sorted({seed for row in rows for seed in cells[row]})
    values = np.array([[cells[row].get(seed, np.nan) for seed in seeds] for row in rows])
    first, second = np.triu_indices(len(rows), 1)
    gaps = values[first] - values[second]
    count = (~np.isnan(gaps)).sum(1)
    # One common seed has no variance.
    several = count > 1
    first = first[several]
    second = second[several]
    gaps = gaps[several]
    freedom = count[several] - 1.0
    if not len(gaps):
        return first, second, np.array([]), freedom
    # nan where a row lacks a seed.
    rest = gaps - np.nanmean(gaps, axis=1, keepdims=True)
    variances = np.nansum(rest**2, axis=1) / freedom
    # Equal rows would have a logarithm of minus infinity.
    return first, second, np.log(np.maximum(variances, LEAST**2)), freedom


def _likelihoods(
    logs: np.ndarray, scales: np.ndarray, freedom: np.ndarray, strength: float
) -> np.ndarray:
    """Return the log likelihood of log variances for every scale: log F with a shift."""
    ratio = np.exp(np.minimum(logs - scales[:, None], 50)) * freedom / strength
    logs_of_f = special.gammaln((freedom + strength) / 2) - special.gammaln(strength / 2)
    logs_of_f = logs_of_f + freedom / 2 * np.log(ratio) - (freedom + strength) / 2 * np.log1p(ratio)
    return logs_of_f.sum(1)


# --- rank correlations ---------------------------------------------------------------------------

FEWEST_RANKED = 10
"""The smallest number of rows of a rank correlation."""
DRAWS = 2000


class Correlation(NamedTuple):
    """Spearman's correlation of two columns over rows, with a 95 % bootstrap interval over rows."""

    value: float
    low: float
    high: float
    rows: int


def correlation(ours: Sequence[float], theirs: Sequence[float]) -> Correlation | None:
    """Return the rank correlation of two columns; None with fewer than ten rows, or equal values.

    The interval draws rows with replacement, by a fixed generator. It says how much the value
    depends on which rows there are.
    """
    pairs = np.array([ours, theirs])
    if len(ours) < FEWEST_RANKED or (np.ptp(pairs, axis=1) == 0).any():
        return None
    # A fixed generator: pages must not change from call to call.
    draw = np.random.default_rng(0)
    drawn = []
    while len(drawn) < DRAWS:
        sample = pairs[:, draw.integers(0, len(ours), len(ours))]
        # A draw of one row many times has no ranks.
        if (np.ptp(sample, axis=1) > 0).all():
            drawn.append(spearman(*sample))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Correlation(spearman(*pairs), float(low), float(high), len(ours))


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Return the correlation of ranks; equal values have their mean rank."""
    return float(np.corrcoef(stats.rankdata(x), stats.rankdata(y))[0, 1])
