"""The rule of orders: against an independent computation, on made-up values, and its errors."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats

from benchmarks import false_orders
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.report import orders
from lrpe_fairseq.experiments.report.orders import (
    BETTER,
    EQUAL,
    UNRESOLVED,
    UNSTABLE,
    WORSE,
    Measurement,
    Prior,
    compared,
)
from lrpe_fairseq.experiments.report.results import results_of

SEEDS = range(8)


def made_up():
    """Twelve rows a few percent apart, whose seeds differ by 2 % together and 0.4 % alone."""
    draw = np.random.default_rng(0)
    true = {f"r{i}": math.log(80 + 4 * i) for i in range(12)}
    shift = draw.normal(0, 0.02, 8)
    cells = {
        row: {s: mean + shift[s] + draw.normal(0, 0.004) for s in SEEDS}
        for row, mean in true.items()
    }
    cells["twin"] = {s: value + draw.normal(0, 0.001) for s, value in cells["r0"].items()}
    cells["once"], cells["apart"] = {0: cells["r11"][0]}, {99: 4.5}
    cells["wild"] = {s: 5 + draw.normal(0, 0.8) for s in SEEDS}
    return cells


@pytest.fixture(scope="module")
def measured():
    return Measurement(made_up())


def name(measurement, a, b):
    return measurement.verdict(a, b).name


def test_the_place_of_an_interval_is_the_verdict(measured):
    assert (name(measured, "r0", "r5"), name(measured, "r5", "r0")) == (BETTER, WORSE)
    assert name(measured, "twin", "r0") == EQUAL
    assert name(measured, "apart", "r0") == UNRESOLVED
    assert name(measured, "wild", "r11") == UNSTABLE
    higher = Measurement(made_up(), better="higher")
    assert name(higher, "r0", "r5") == WORSE


def test_verdicts_are_antisymmetric(measured):
    turned = {BETTER: WORSE, WORSE: BETTER}
    for a, b in itertools.combinations(measured.cells, 2):
        there, back = measured.verdict(a, b), measured.verdict(b, a)
        assert back.name == turned.get(there.name, there.name)
        assert measured.interval(a, b).gap == pytest.approx(
            -measured.interval(b, a).gap, nan_ok=True
        )


def test_a_difference_that_is_not_resolved_is_smaller_than_one_that_would_have_shown():
    draw, seen = np.random.default_rng(0), 0
    for kind, spread in (("perplexity", 0.3), ("fraction", 0.3), ("bleu", 2.0)):
        for _ in range(40):
            cells = {row: dict(enumerate(1.5 + draw.normal(0, spread, 3))) for row in "abcd"}
            measured = Measurement(cells, kind=kind)
            for a, b in itertools.permutations(cells, 2):
                verdict = measured.verdict(a, b)
                if verdict.known and verdict.name in (UNRESOLVED, UNSTABLE):
                    assert abs(verdict.size) <= verdict.visible
                    seen += 1
    assert seen > 500


def test_without_a_prior_an_interval_is_that_of_a_paired_t_test():
    cells = {row: made_up()[row] for row in ("r0", "r1")}
    pair = Measurement(cells)
    assert pair.prior.strength == 0
    gaps = [cells["r0"][s] - cells["r1"][s] for s in SEEDS]
    expected = stats.ttest_1samp(gaps, 0).confidence_interval(1 - orders.EXPLORATORY)
    gap, half, deviation = pair.interval("r0", "r1")
    assert (gap - half, gap + half) == pytest.approx(tuple(expected))
    assert deviation == pytest.approx(np.std(gaps, ddof=1))


def test_a_prior_pools_the_variances_by_their_degrees_of_freedom():
    cells = {row: made_up()[row] for row in ("r0", "r1")}
    expected = 0.01**2
    prior = Prior(3.0, 0.0, math.log(expected / 2), 4.0)
    pair = Measurement(cells, prior=prior)
    gaps = np.array([cells["r0"][s] - cells["r1"][s] for s in SEEDS])
    variance = (3 * expected + 7 * gaps.var(ddof=1)) / 10
    assert pair.interval("r0", "r1").deviation == pytest.approx(math.sqrt(variance))
    half = stats.t.isf(orders.EXPLORATORY / 2, 10) * math.sqrt(variance / 8)
    assert pair.interval("r0", "r1").half == pytest.approx(half)


def test_the_deviation_of_a_prior_grows_with_the_excess_over_the_best():
    prior = Prior(4.0, 8.0, math.log(0.01**2 / 2), 4.0)
    cells = {"best": {0: 4.0, 1: 4.0}, "far": {0: 5.0, 1: 5.0}, "near": {0: 4.0, 1: 4.0}}
    found = Measurement(cells, prior=prior)
    near, far = found._expected("best", "near"), found._expected("best", "far")
    assert near == pytest.approx(0.01**2)
    assert far == pytest.approx(0.01**2 / 2 * (1 + 1 + 64))


def test_effects_of_seeds_cancel():
    cells = {row: values for row, values in made_up().items() if row not in ("once", "apart")}
    moved = {r: {s: x + 3 * (s == 1) for s, x in values.items()} for r, values in cells.items()}
    gaps = [Measurement(own).interval("r0", "r5").gap for own in (cells, moved)]
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-9)


def test_fewer_seeds_and_fewer_tests_have_wider_intervals(measured):
    half = measured.interval("r0", "r5").half
    assert measured.interval("once", "r0").half > measured.interval("r11", "r0").half
    two = {r: {s: v[s] for s in (0, 1)} for r, v in made_up().items() if len(v) > 1}
    assert Measurement(two).interval("r0", "r5").half > half
    tested = Measurement(made_up(), sampling=orders.sampling("perplexity", 20608))
    assert tested.interval("r0", "r5").half > half
    assert orders.sampling("perplexity", 20608) == pytest.approx(0.0024**2)


@pytest.mark.parametrize(("tests", "freedom"), [(1e-5, 7 * 1.0), (0.01, 7 * 2.0)])
def test_the_known_variance_of_the_tests_at_most_doubles_the_degrees_of_freedom(tests, freedom):
    cells = {row: made_up()[row] for row in ("r0", "r1")}
    found = Measurement(cells, sampling=tests**2).interval("r0", "r1")
    alone = Measurement(cells).interval("r0", "r1")
    assert found.deviation == alone.deviation
    total = alone.deviation**2 / 8 + tests**2
    raised = 7 * min((total * 8 / alone.deviation**2) ** 2, 2)
    assert raised == pytest.approx(freedom, rel=0.02)
    limit = stats.t.isf(orders.EXPLORATORY / 2, raised)
    assert found.half == pytest.approx(limit * math.sqrt(total))


def test_a_frozen_prior_gives_a_pair_its_verdict_without_the_other_rows(measured):
    alone = {row: made_up()[row] for row in ("r0", "r5")}
    frozen = Measurement(alone, prior=measured.prior)
    assert frozen.interval("r0", "r5") == measured.interval("r0", "r5")
    assert frozen.verdict("r0", "r5") == measured.verdict("r0", "r5")


def test_a_named_contrast_has_a_narrower_interval_and_moves_no_other(measured):
    named = Measurement(made_up(), primary=[("r5", "r0")])
    assert named.interval("r0", "r5").half < measured.interval("r0", "r5").half
    assert named.interval("r0", "r6") == measured.interval("r0", "r6")


def test_equal_accuracies_are_equal_only_with_enough_tests():
    full = {row: dict.fromkeys(range(3), compared(1.0, "fraction")) for row in "abcd"}
    for examples, verdict in ((1000, EQUAL), (100, UNRESOLVED)):
        sampling = orders.sampling("fraction", examples)
        found = Measurement(full, "fraction", "higher", sampling)
        assert name(found, "a", "b") == verdict


def test_a_seed_without_a_prior_and_no_common_seed_say_nothing():
    lone = Measurement({"a": {1: 4.0}, "b": {1: 5.0}})
    found = lone.verdict("a", "b")
    assert (found.name, found.known) == (UNRESOLVED, False)
    assert not Measurement(made_up()).verdict("apart", "r0").known
    assert Measurement({}).unbeaten() == []


def test_unbeaten_rows_are_those_that_no_row_is_better_than(measured):
    found = measured.unbeaten()
    assert {"r0", "twin"} <= set(found)
    assert "r5" not in found
    for row in measured.cells:
        beaten = any(
            name(measured, other, row) == BETTER for other in measured.cells if other != row
        )
        assert beaten == (row not in found)


@pytest.mark.parametrize(
    ("kind", "a", "b", "shown"),
    [("perplexity", 110.0, 100.0, 10.0), ("fraction", 0.9, 0.8, 10.0), ("fraction", 0.02, 0.0, 2.0),
     ("bleu", 31.5, 30.0, 1.5), ("percent", 50.0, 47.0, 3.0), ("loss", 4.1, 4.0, 0.1)],
)  # fmt: skip
def test_a_difference_is_shown_in_the_units_of_the_reader(kind, a, b, shown):
    x, y = compared(a, kind), compared(b, kind)
    assert orders.effect(kind, (x + y) / 2, x - y) == pytest.approx(shown)
    assert orders.effect(kind, (x + y) / 2, y - x) == pytest.approx(
        -shown / 1.1 if kind == "perplexity" else -shown
    )


def test_the_margin_of_equality_is_in_the_units_of_the_reader():
    for kind, base, inside, outside in [
        ("perplexity", 100.0, 101.5, 103.0),
        ("bleu", 30.0, 30.4, 30.7),
        ("fraction", 0.5, 0.515, 0.53),
    ]:
        rows = {"base": base, "inside": inside, "outside": outside}
        cells = {
            row: {s: compared(value, kind) + 1e-6 * s * i for s in SEEDS}
            for i, (row, value) in enumerate(rows.items())
        }
        found = Measurement(cells, kind)
        assert name(found, "inside", "base") == EQUAL
        assert name(found, "outside", "base") == WORSE


# --- rank correlations ---------------------------------------------------------------------------


def test_a_rank_correlation_has_an_interval_over_rows_and_needs_ten_of_them():
    draw = np.random.default_rng(1)
    x = np.arange(12.0)
    y = x + draw.normal(0, 3, 12)
    found = orders.correlation(x, y)
    assert found.value == pytest.approx(stats.spearmanr(x, y).statistic)
    assert -1 <= found.low < found.value < found.high <= 1
    assert found.rows == 12
    assert orders.correlation(x, y) == found
    assert orders.correlation(x[:9], y[:9]) is None
    assert orders.correlation(x, np.zeros(12)) is None
    ties = np.repeat([1.0, 2.0, 3.0], 4)
    assert orders.spearman(ties, y) == pytest.approx(stats.spearmanr(ties, y).statistic)


# --- errors --------------------------------------------------------------------------------------


def test_columns_with_a_false_order_are_rare():
    """30 rows that do not differ, with deviations of 0.3 to 3 % and 2 to 4 seeds."""
    draw, false = np.random.default_rng(0), 0
    for _ in range(100):
        size = np.exp(draw.normal(math.log(0.006), 0.6, 30))
        counts = draw.integers(2, 5, 30)
        cells = {str(i): dict(enumerate(draw.normal(0, size[i], counts[i]))) for i in range(30)}
        found = Measurement(cells)
        false += any(name(found, row, "0") in (BETTER, WORSE) for row in cells if row != "0")
    print(f"a false order in {false} of 100 columns")
    assert false / 100 <= 0.05


@pytest.fixture(scope="module")
def layouts():
    return false_orders.layouts(results_of(ROOT))


def test_wrong_verdicts_on_the_measured_layouts_are_rare(layouts):
    """One draw of every column in each of four simulations; the benchmark has twenty."""
    found = dict(false_orders.shares(layouts, draws=1))
    for kind, shares in found.items():
        print(f"{kind}: {np.mean(shares):.3f} of {len(shares)} columns")
    assert np.mean(list(found.values())) <= 0.05


def test_the_stated_shares_are_of_the_measured_columns(layouts):
    stated = json.loads(false_orders.TARGET.read_text(encoding="utf-8"))
    assert stated["worst"] == max(stated["shares"].values()) <= 0.05
    assert len(stated["shares"]) == 4
    assert stated["columns"] <= len(layouts)


def test_a_simulation_finds_the_wrong_verdicts_that_it_counts(layouts):
    one = next(own for own in layouts if len(own.seeds) > 2 and own.kind == "perplexity")
    true = false_orders.truth(one, "equal")
    exact = {r: {s: true[r] + 1e-5 * s for s in range(8)} for r in one.seeds}
    other = next(row for row in exact if row != one.base)
    assert not false_orders.wrong(one, true, exact)
    for move, better in ((-0.5, "lower"), (0.5, "lower")):
        moved = {**exact, other: {s: x + move + 1e-5 * s for s, x in exact[other].items()}}
        assert false_orders.wrong(one, true, moved), better
    far = {**true, other: true[other] + 0.5}  # the rows are equal in the draw, but not in truth
    assert false_orders.wrong(one, far, exact)
