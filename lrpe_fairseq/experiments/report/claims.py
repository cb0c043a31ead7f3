"""Statements supported by the runs: orders of cells, rank correlations, findings of tables.

A is ahead of B if both have at least two common seeds, A is better for every one of them, and the
difference of the means exceeds twice the pooled deviation, both of the common seeds and of all:
pages show the mean of all. Of perplexities the logarithms are
compared: a seed that explodes must not hide an order in which all seeds agree. The deviation of a
fraction of tested examples is at least its sampling error: seeds that agree by chance do not
enlarge a test set. A row with a diverged seed is ahead of nothing.
"""

import itertools
import math
import statistics

from lrpe_fairseq.experiments.data.correlation import average_ranks, spearman
from lrpe_fairseq.experiments.records.layout import Column, Row
from lrpe_fairseq.experiments.report import cells
from lrpe_fairseq.experiments.report.cells import Scores
from lrpe_fairseq.experiments.report.markdown import NOT_RUN, fixed, listed
from lrpe_fairseq.experiments.report.sheet import Sheet

Pair = tuple[Row, Scores, float]
AHEAD, BEHIND, OPEN = "ahead of", "behind", "not separated from"
FEWEST = 4  # minimum number of rows for a rank correlation
ONE_SEED = "one seed: no order is claimed"
RULE = (
    "An order is stated only where all seeds agree and the difference of the means exceeds twice "
    "the pooled deviation, which is at least the sampling error of an accuracy; of perplexities "
    "the logarithms are compared; rows with one seed are not ordered. If two rows have different "
    "numbers of seeds, this must hold twice: for the seeds that both have, and for all seeds."
)

CHANCE = 18
"""Percentage of pairs of equal methods with two seeds that the rule orders; a test simulates it."""


def pooled_deviation(first: Scores, second: Scores) -> float:
    """Return the pooled sample deviation of two cells with at least two seeds each.

    It is at least the root mean square of their sampling errors, and of perplexities that of their
    logarithms.
    """
    both = (first, second)
    squares = [(len(s) - 1) * statistics.variance(s.compared.values()) for s in both]
    seeds = math.sqrt(math.fsum(squares) / (len(first) + len(second) - 2))
    return max(seeds, math.hypot(first.sampling, second.sampling) / math.sqrt(2))


def ahead(first: Scores, second: Scores, better: str) -> bool:
    """True if ``first`` is ahead of ``second`` by this module's rule."""
    seeds = sorted(set(first) & set(second))
    if len(seeds) < 2 or first.lost:
        return False
    sign = -1 if better == "lower" else 1
    if not all(sign * (first[seed] - second[seed]) > 0 for seed in seeds):
        return False
    both = [(first.at(seeds), second.at(seeds)), (first, second)]
    gaps = [sign * (cells.mean(one.compared) - cells.mean(two.compared)) for one, two in both]
    least = [2 * pooled_deviation(one, two) for one, two in both]
    return all(gap > limit for gap, limit in zip(gaps, least, strict=True))


def stated_order(sheet: Sheet, first: str, others: tuple[str, ...], key: str) -> str:
    """State the order of ``first`` and ``others`` in a column if supported, else the values."""
    column = sheet.table.column(key)
    absent = [x for x in (first, *others) if not sheet.ours(sheet.table.row(x), column)]
    measured = [label for label in others if label not in absent]
    if first in absent or not measured:
        return f"{listed(absent)} {'are' if len(absent) > 1 else 'is'} {NOT_RUN}"
    found: dict[str, list[str]] = {}
    for label in measured:
        place = relation(sheet, first, label, column)
        found.setdefault(place, []).append(valued(sheet, label, column))
    places = [
        f"{place} {listed(found[place])}" for place in (AHEAD, BEHIND, OPEN) if place in found
    ]
    text = f"{valued(sheet, first, column)} is {listed(places)}"
    return f"{text} ({listed(absent)} {NOT_RUN})" if absent else text


def relation(sheet: Sheet, first: str, second: str, column: Column) -> str:
    """Return ``AHEAD``, ``BEHIND`` or ``OPEN``: the place of one row to another in a column."""
    one, two = (sheet.ours(sheet.table.row(label), column) for label in (first, second))
    if ahead(one, two, column.better):
        return AHEAD
    return BEHIND if ahead(two, one, column.better) else OPEN


def valued(sheet: Sheet, label: str, column: Column) -> str:
    """Return a row label with our value in parentheses."""
    values = sheet.ours(sheet.table.row(label), column)
    return f"{label} ({fixed(cells.mean(values), column.decimals) if values else NOT_RUN})"


# --- rank correlation -------------------------------------------------------------------------


def pairs(sheet: Sheet, column: Column) -> list[Pair]:
    """Return (row, ours, published) of the rows that a rank correlation compares.

    In a table that compares columns these are the rows that all headline columns of the attention
    type with enough rows have: correlations over different rows would say nothing about a budget.
    """
    own = sheet.pairs(column)
    if sheet.table.compare != "columns":
        return own
    others = [sheet.pairs(c) for c in sheet.headlines if c.attention == column.attention]
    enough = [found for found in others if len(found) >= FEWEST]
    return [pair for pair in own if all(pair[0] in [row for row, *_ in found] for found in enough)]


def correlation(sheet: Sheet, column: Column) -> float | None:
    """Return Spearman's correlation with the published column; None with too few rows."""
    found = pairs(sheet, column)
    if len(found) < FEWEST:
        return None
    return spearman([cells.mean(ours) for _, ours, _ in found], [value for *_, value in found])


def rank_line(sheet: Sheet, column: Column) -> str:
    """Return the correlation and the rows :func:`far` ranks apart; empty with too few rows."""
    found = pairs(sheet, column)
    if len(found) < FEWEST:
        return ""
    value = correlation(sheet, column)
    shown = "undefined" if value is None else fixed(value, 2)
    return f"{shown} over {len(found)} rows; {_disagreements(column, found)}"


def far(rows: int) -> int:
    """Return the distance in ranks from which a row is named.

    It is smaller below ten rows: of eight, all can be within 2 ranks at a correlation of 0.76.
    """
    return 2 if rows < 10 else 3


def _disagreements(column: Column, found: list[Pair]) -> str:
    sign = 1 if column.better == "lower" else -1  # rank 1 is the best
    ours = average_ranks([sign * cells.mean(values) for _, values, _ in found])
    theirs = average_ranks([sign * value for *_, value in found])
    labels = [row.label for row, *_ in found]
    ranks = zip(labels, ours, theirs, strict=True)
    least = far(len(found))
    away = [(abs(a - b), label, a, b) for label, a, b in ranks if abs(a - b) >= least]
    if not away:
        return f"no row is {least} ranks or more away"
    away.sort(key=lambda entry: (-entry[0], entry[1]))
    named = (f"{label} ({a:g}; paper {b:g})" for _, label, a, b in away)
    return f"{least} ranks or more away: {', '.join(named)}"


# --- the finding ------------------------------------------------------------------------------


def finding(sheet: Sheet) -> str:
    """Return the finding of the headline columns, generated from the runs of a group."""
    if sheet.table.compare == "columns":
        return _columns_finding(sheet)
    parts = [
        f"{_title(sheet, column)}: {rows_finding(sheet, column)}" for column in sheet.headlines
    ]
    return ". ".join(parts) + "." if parts else "The columns of the finding have no runs yet."


def rows_finding(sheet: Sheet, column: Column) -> str:
    """State a column's best row, those not separated from it, and those ahead of the baseline."""
    found = {row.label: sheet.ours(row, column) for row in sheet.table.rows}
    found = {label: values for label, values in found.items() if values}
    ordered = {label: values for label, values in found.items() if len(values) > 1}
    if len(ordered) < 2:
        reason = "too few rows with several seeds" if ordered else ONE_SEED
        return f"{reason} ({value_range(sheet, column, found)})"
    if not any_order(ordered, column.better):
        return f"no order ({value_range(sheet, column, ordered)})"
    among = f"of the {len(ordered)} rows with several seeds, " if len(ordered) < len(found) else ""
    return f"{among}{order(sheet, column, ordered)}"


def order(sheet: Sheet, column: Column, ordered: dict[str, Scores]) -> str:
    """State the place of the best of some rows, and those ahead of and behind the baseline."""
    parts = [leaders(sheet, column, ordered), _against_baseline(sheet, column, ordered)]
    return "; ".join(filter(None, parts))


def any_order(found: dict[str, Scores], better: str) -> bool:
    """True if the runs order at least one pair of rows."""
    return any(
        ahead(one, other, better) for one, other in itertools.permutations(found.values(), 2)
    )


def leaders(sheet: Sheet, column: Column, found: dict[str, Scores]) -> str:
    """Return the best row with the rows that it is ahead of, or that no row is ahead of all."""
    better = column.better
    sign = 1 if better == "lower" else -1
    best = min(found, key=lambda label: sign * cells.mean(found[label]))
    level = [o for o in found if o != best and not ahead(found[best], found[o], better)]
    named, others = valued(sheet, best, column), len(found) - 1
    if not level:
        return f"{named} is ahead of the other {others if others > 1 else 'one'}"
    if len(level) == others:
        return f"no row is ahead of all others ({value_range(sheet, column, found)})"
    return f"{named} is ahead of {others - len(level)}, but not of {_abridged(level)}"


def _against_baseline(sheet: Sheet, column: Column, found: dict[str, Scores]) -> str:
    base, better = sheet.table.baseline, column.better
    if base not in found:
        return ""
    others = [label for label in found if label != base]
    first = [label for label in others if ahead(found[label], found[base], better)]
    last = [label for label in others if ahead(found[base], found[label], better)]
    count = f"{len(first)} of {len(others)} are" if first else "no row is"
    count = "all are" if len(first) == len(others) else count
    text = f"{count} ahead of {valued(sheet, base, column)}"
    return text + (f"; behind {base}: {_abridged(last)}" if last else "")


def _abridged(labels: list[str], most: int = 5) -> str:
    return listed(labels) if len(labels) <= most else f"{len(labels)} rows"


def value_range(sheet: Sheet, column: Column, found: dict[str, Scores]) -> str:
    """Return the lowest and the highest mean of some rows, and their number."""
    shown = span(column, found)
    return f"{shown} over {len(found)} rows" if len(found) > 1 else shown


def span(column: Column, found: dict[str, Scores]) -> str:
    """Return the lowest and the highest mean of some rows, as the column shows them."""
    means = [fixed(cells.mean(values), column.decimals) for values in found.values()]
    low, high = min(means, key=float), max(means, key=float)
    return f"{low} to {high}" if low != high else low


def _columns_finding(sheet: Sheet) -> str:
    """Compare each headline column with the first of the same attention, data and metric."""
    families: dict[tuple[str, ...], list[Column]] = {}
    for c in sheet.headlines:
        families.setdefault((c.attention, c.dataset, c.split, c.metric), []).append(c)
    found = {
        f"{_title(sheet, column)} against {first.title}": _column_against(sheet, first, column)
        for first, *others in families.values()
        for column in others
    }
    spans = ", ".join(_column_span(sheet, column) for column in sheet.headlines)
    if not found:
        return f"{_capital(spans)}."
    if set(found.values()) == {ONE_SEED}:
        return f"{ONE_SEED.capitalize()} ({spans})."
    return ". ".join(f"{place}: {text}" for place, text in found.items()) + "."


def _column_span(sheet: Sheet, column: Column) -> str:
    found = {row.label: sheet.ours(row, column) for row in sheet.table.rows}
    span = value_range(sheet, column, {label: values for label, values in found.items() if values})
    return f"{distinct_title(sheet, column)}: {span.partition(' over ')[0]}"


def distinct_title(sheet: Sheet, column: Column) -> str:
    """Return the title of a headline column, after the attention type if both types have it."""
    same = [c for c in sheet.headlines if c.title == column.title]
    return f"{column.attention} {column.title}" if len(same) > 1 else column.title


def _column_against(sheet: Sheet, first: Column, second: Column) -> str:
    pairs = {r.label: (sheet.ours(r, second), sheet.ours(r, first)) for r in sheet.table.rows}
    pairs = {label: pair for label, pair in pairs.items() if all(pair)}
    several = {label: pair for label, pair in pairs.items() if min(map(len, pair)) > 1}
    if not several:
        return ONE_SEED
    better = second.better
    gains = [label for label, (a, b) in several.items() if ahead(a, b, better)]
    losses = [label for label, (a, b) in several.items() if ahead(b, a, better)]
    parts = [f"ahead for {listed(gains)}"] if gains else []
    parts += [f"behind for {listed(losses)}"] if losses else []
    unsure = [label for label in several if label not in {*gains, *losses}]
    parts += [f"no order for {_abridged(unsure)}"] if unsure else []
    single = [label for label in pairs if label not in several]
    parts += [f"one seed for {_abridged(single)}"] if single else []
    return ", ".join(parts)


def _title(sheet: Sheet, column: Column) -> str:
    """Return ``Linear, valid``, or the title alone if only one attention type was run and the
    headlines have several titles."""
    titles = {c.title for c in sheet.headlines}
    kinds = {c.attention for c in sheet.table.columns if sheet.run(c)}
    parts = [column.attention] if len(kinds) > 1 or len(titles) == 1 else []
    return _capital(", ".join([*parts, column.title])) if parts else column.title


def _capital(text: str) -> str:
    """Return ``text`` with a capital first letter; ``str.capitalize`` would change MQAR too."""
    return text[:1].upper() + text[1:]
