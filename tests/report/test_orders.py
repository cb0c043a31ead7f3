"""The rule of orders: against an independent computation, and its rate of false orders."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from lrpe_fairseq.experiments.report import orders
from lrpe_fairseq.experiments.report.orders import BETTER, OPEN, TIED, UNSTABLE, WORSE

SEEDS = (1, 2, 3, 4, 5)
MEANS = {"a": 0.0, "b": 0.2, "c": 1.5, "d": 1.7, "e": 9.0}


def drawn(means, seeds=SEEDS, scatter=1.0, draw=None, shift=0.0):
    draw = draw or np.random.default_rng(0)
    effect = {seed: shift * draw.normal() for seed in seeds}
    return {
        r: {s: m + scatter * draw.normal() + effect[s] for s in seeds} for r, m in means.items()
    }


def decided(marks):
    return {pair for pair, mark in marks.items() if mark in (BETTER, WORSE)}


def by_hand(cells):
    """Tukey's comparison in a two-way layout without gaps, from sums of squares."""
    values = np.array([list(own.values()) for own in cells.values()])
    rows, seeds = values.shape
    rest = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    freedom = (rows - 1) * (seeds - 1)
    found = set()
    for i, j in itertools.permutations(range(rows), 2):
        own = (rest[[i, j]] ** 2).sum() / ((2 * seeds - 2) * (1 - 1 / rows))
        variance = max((rest**2).sum() / freedom, own)
        gap = abs(values[i].mean() - values[j].mean()) / math.sqrt(variance / seeds)
        if stats.studentized_range.sf(gap, rows, freedom) < orders.ALPHA:
            found.add((list(cells)[i], list(cells)[j]))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_orders_of_a_full_column_are_those_of_tukey_by_hand(seed):
    cells = drawn(MEANS, draw=np.random.default_rng(seed), shift=20.0)
    marks = orders.orders(cells)
    assert decided(marks) == by_hand(cells)
    assert marks["a", "e"] == BETTER
    assert marks["e", "a"] == WORSE
    assert orders.orders(cells, "higher")["a", "e"] == WORSE
    turned = {BETTER: WORSE, WORSE: BETTER}
    assert all(marks[b, a] == turned.get(mark, mark) for (a, b), mark in marks.items())


def test_the_limit_is_that_of_tables_of_the_studentized_range():
    assert orders.critical(3, 10) * math.sqrt(2) == pytest.approx(3.877, abs=2e-3)
    assert orders.critical(10, 20) * math.sqrt(2) == pytest.approx(5.008, abs=2e-3)


def test_effects_of_seeds_are_removed_and_a_row_of_one_seed_can_be_ordered():
    shift = {1: 0.0, 2: 50.0, 3: -30.0}
    cells = {
        row: {seed: mean + shift[seed] + 0.01 * (seed - 2) * sign for seed in shift}
        for row, mean, sign in [("a", 1.0, 1), ("b", 2.0, -1), ("c", 3.0, 1)]
    }
    cells["one"] = {3: shift[3] + 9.0}
    marks = orders.orders(cells)
    assert marks["a", "b"] == BETTER
    assert marks["one", "c"] == WORSE


def test_a_pair_that_scatters_more_than_the_column_needs_a_larger_gap():
    cells = {r: {s: i + (s % 2) * 0.01 * (-1) ** i for s in SEEDS} for i, r in enumerate("abcde")}
    cells["x"] = {s: 6 + 0.03 * math.sin(9 * s) for s in SEEDS}
    cells["y"] = {s: 6.03 + 0.03 * math.cos(9 * s) for s in SEEDS}
    marks = orders.orders(cells)
    assert marks["x", "y"] == TIED
    assert marks["a", "b"] == BETTER


def test_a_row_that_scatters_eight_times_the_median_is_unstable_and_spoils_no_other():
    cells = drawn(MEANS, scatter=0.01)
    cells["wild"] = {1: -100.0, 2: 100.0, 3: 0.0}
    marks = orders.orders(cells)
    assert {m for pair, m in marks.items() if "wild" in pair} == {UNSTABLE}
    assert marks["c", "e"] == BETTER
    assert orders.unstable({"a": {1: 0, 2: 1}, "b": {1: 0, 2: 99}}) == set()


def test_few_degrees_of_freedom_and_no_common_seed_are_open():
    assert set(orders.orders({"a": {1: 0.0}, "b": {1: 9.0}}).values()) == {OPEN}
    first, second = drawn({"a": 0.0, "b": 5.0}, (1, 2, 3)), drawn({"c": 9.0, "d": 99.0}, (4, 5))
    marks = orders.orders(first | second)
    assert marks["a", "c"] == OPEN
    assert marks["c", "d"] != OPEN
    assert orders.orders({}) == {}


def test_an_accuracy_must_exceed_its_sampling_error_too():
    share = {"a": 0.80, "b": 0.81, "c": 0.90}
    cells = {
        row: {s: orders.compared(v + 1e-6 * s * i, "fraction") for s in SEEDS}
        for i, (row, v) in enumerate(share.items())
    }
    marks = orders.orders(cells, "higher", examples=1000)
    assert (marks["b", "a"], marks["c", "a"]) == (TIED, BETTER)
    assert orders.orders(cells, "higher")["b", "a"] == BETTER  # without the bound


COLUMNS = 200
FEW = [5, 5, 5, 3, 3, 3, 2, 2, 1, 1, 1, 1]


def unequal_seeds(draw):
    effect = draw.normal(size=9)
    return {f"r{i}": {s: draw.normal() + effect[s] for s in range(n)} for i, n in enumerate(FEW)}, 0


def saturated(draw):
    found = {
        f"r{i}": {s: orders.compared(draw.binomial(512, 0.995) / 512, "fraction") for s in range(3)}
        for i in range(12)
    }
    return found, 512


def unequal_variances(draw):
    scatter = np.geomspace(0.5, 2.0, 12)
    return {f"r{i}": {s: scatter[i] * draw.normal() for s in range(5)} for i in range(12)}, 0


LAYOUTS = [(saturated, 0.07), (unequal_variances, 0.15)]


@pytest.mark.parametrize(
    ("layout", "most"),
    [(unequal_seeds, 0.07), *(pytest.param(*x, marks=pytest.mark.exhaustive) for x in LAYOUTS)],
)
def test_columns_of_equal_rows_with_any_order_are_as_rare_as_stated(layout, most):
    draw = np.random.default_rng(7)
    false = sum(
        bool(decided(orders.orders(cells, examples=examples)))
        for cells, examples in (layout(draw) for _ in range(COLUMNS))
    )
    print(f"{layout.__name__}: a false order in {false} of {COLUMNS} columns")
    assert false / COLUMNS <= most
