"""Questions over several tables: LRPE against RoPE, budgets, and agreement with the papers.

What a table lacks is left out, so the sections grow with the runs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lrpe_fairseq.attention.linear import NORMALIZERS
from lrpe_fairseq.experiments.records.keys import sizes
from lrpe_fairseq.experiments.report import markdown, orders
from lrpe_fairseq.experiments.report.columns import ColumnView, difference
from lrpe_fairseq.experiments.report.results import Results

# --- LRPE against RoPE ---------------------------------------------------------------------------


class Pair(NamedTuple):
    """Rows of LRPE and of RoPE with the same attention and normalizer (empty in softmax)."""

    attention: str
    normalizer: str
    lrpe: str
    rope: str

    @property
    def title(self) -> str:
        """The attention type and the normalizer."""
        return f"{self.attention}, {self.normalizer}" if self.normalizer else self.attention


class Place(NamedTuple):
    """Where pairs were measured.

    name: of the scale, for readers. columns: key of the column at the training length, and at 4 and
    16 times that, without the attention; empty where there is none.
    """

    name: str
    table: str
    scale: str
    columns: tuple[str, str, str]
    pairs: tuple[Pair, ...]


ROTATED = Pair("linear", "rotated", "Type2", "RoPE")
CONTENT = Pair("linear", "content", "Type2, content", "RoPE, content")
LAYERNORM = Pair("linear", "layernorm", "Type2-LN", "RoPE-LN")
BARE = Pair("linear", "none", "Type2, none", "RoPE, none")
SOFTMAX = Pair("softmax", "", "Type2", "RoPE")
BOUNDED = Pair("linear", "bounded", "Type2, bounded", "RoPE, bounded")
BOUNDED_FLOORED = Pair("linear", "bounded, floor", "Type2, floor, bounded", "RoPE, floor, bounded")
FLOORED = Pair("linear", "rotated, floor", "Type2, floor", "RoPE, floor")
FLOORED_CONTENT = Pair("linear", "content, floor", "Type2, content, floor", "RoPE, content, floor")
FLOORED_LAYERNORM = Pair("linear", "layernorm, floor", "Type2-LN, floor", "RoPE-LN, floor")
FLOORED_SOFTMAX = Pair("softmax", "floor", "Type2, floor", "RoPE, floor")
PLACES = (
    Place(
        name="WikiText-2, 1,800 updates",
        table="extrapolation",
        scale="small",
        columns=("paired-128", "paired-512", "paired-2048"),
        pairs=(SOFTMAX, ROTATED, CONTENT, LAYERNORM, BARE),
    ),
    Place(
        name="WikiText-2, 1,800 updates, with a floor",
        table="angles",
        scale="small",
        columns=("paired-128", "paired-512", "paired-2048"),
        pairs=(FLOORED_SOFTMAX, FLOORED, FLOORED_CONTENT, FLOORED_LAYERNORM),
    ),
    Place(
        name="WikiText-2, 1,800 updates, bounded",
        table="bounded",
        scale="small",
        columns=("paired-128", "paired-512", "paired-2048"),
        pairs=(BOUNDED, BOUNDED_FLOORED),
    ),
    Place(
        name="WikiText-2, 1,800 updates, sinusoidal positions too",
        table="table2",
        scale="small",
        columns=("test", "", ""),
        pairs=(SOFTMAX, ROTATED),
    ),
    Place(
        name="WikiText-2, 16,200 updates, sinusoidal positions too",
        table="budget",
        scale="annealed",
        columns=("16200", "", ""),
        pairs=(SOFTMAX, ROTATED),
    ),
    Place(
        name="WikiText-2, 16,200 updates",
        table="bounded",
        scale="long",
        columns=("paired-128", "paired-512", "paired-2048"),
        pairs=(ROTATED, BOUNDED, FLOORED),
    ),
    Place(
        name="WikiText-2, 16,200 updates, rates of each row",
        table="contrast",
        scale="long",
        columns=("blocks-128", "paired-512", "paired-2048"),
        pairs=(SOFTMAX, LAYERNORM),
    ),
    Place(
        name="medium: books, 5 M tokens",
        table="medium",
        scale="medium-5m",
        columns=("test", "paired-2048", "paired-8192"),
        pairs=(SOFTMAX, LAYERNORM, BOUNDED, FLOORED),
    ),
    Place(
        name="medium: books, 20 M tokens",
        table="medium",
        scale="medium",
        columns=("test", "paired-2048", "paired-8192"),
        pairs=(SOFTMAX, LAYERNORM, BOUNDED, FLOORED),
    ),
    Place(
        name="books: 6 x 512, 49 M tokens",
        table="books",
        scale="books",
        columns=("paired-512", "paired-2048", "paired-8192"),
        pairs=(SOFTMAX, ROTATED, CONTENT, LAYERNORM),
    ),
)
"""Where LRPE and RoPE were trained alike."""


def lrpe_against_rope(results: Results) -> str:
    """Return a table of the differences in perplexity, with intervals and verdicts.

    Below it stands which pairs were not trained.
    """
    head = ["scale", "attention", "seeds", "n-grams", "training length", "4 times", "16 times"]
    # What was not trained is said too: an absent line could be taken for a tie.
    rows = []
    missing = []
    for place in PLACES:
        pairs = {pair.title: _of_pair(results, place, pair) for pair in place.pairs}
        rows += [row for row in pairs.values() if row]
        if lacking := [name for name, row in pairs.items() if not row]:
            missing.append(f"{place.name}: {'; '.join(lacking)}.")
    text = markdown.table(head, rows)
    if not missing:
        return text
    return "\n".join(
        [text, "", "Pairs that were not trained:", "", *(f"- {words}" for words in missing)]
    )


def _of_pair(results: Results, place: Place, pair: Pair) -> list[str]:
    """Return the line of a pair at a place; empty without its runs."""
    views = [
        column_of(results, place.table, place.scale, f"{pair.attention}-{key}") if key else None
        for key in place.columns
    ]
    first = views[0]
    # A row that lost a seed at the training length has no difference.
    if first is None or not {pair.lrpe, pair.rope} <= set(first.ranked()):
        return []
    seeds = str(len(first.cells[pair.lrpe].keys() & first.cells[pair.rope].keys()))
    link = f"[{place.name}](../results/{place.table}.md)"
    cells = [view.versus(pair.lrpe, pair.rope) if view else "" for view in views]
    return [link, pair.title, seeds, learned(first, [pair.lrpe, pair.rope]), *cells]


def column_of(results: Results, table: str, scale: str, key: str) -> ColumnView | None:
    """Return a column of a table; None if the table lacks it or has no runs at the scale."""
    try:
        return results.column(table, key, scale)
    except (KeyError, ValueError):
        return None


def column_for(
    results: Results, attention: str, table: str, scale: str, key: str
) -> ColumnView | None:
    """Return ``column_of`` for an attention type; None for a key of the other one."""
    key = key.format(attention=attention)
    return column_of(results, table, scale, key) if key.startswith(attention) else None


def learned(view: ColumnView, rows: Sequence[str]) -> str:
    """Return whether the better of some rows has a lower perplexity than n-grams, with both."""
    if not view.yardstick:
        return "–"
    best = min(view.mean(row) for row in rows)
    ngrams = view.yardstick["ppl"]
    word = "lower" if best < ngrams else "not lower"
    return f"{word}, {best:.1f} against {ngrams:.1f}"


LARGER = (
    ("16,200 updates on WikiText-2", "contrast", "long", "{attention}-blocks-128"),
    ("16,200 updates on WikiText-2", "bounded", "long", "linear-paired-128"),
    ("4 x 192, 5 M tokens of books", "medium", "medium-5m", "{attention}-test"),
    ("4 x 192, 10 M tokens", "medium", "medium-10m", "{attention}-test"),
    ("4 x 192, 20 M tokens", "medium", "medium", "{attention}-test"),
    ("6 x 512, 49 M tokens", "books", "books", "{attention}-test"),
)
"""Longer trainings and larger language models, without absolute positions: heading, table, scale
and column, with ``{attention}`` where the table has it for both. Places with one heading share
a column."""
RECOMMENDED = (
    ("linear", "fox, fox-bias 3.0", "rope, layernorm"),
    ("linear", "fox, layernorm, fox-bias 3.0", "rope, layernorm"),
    ("linear", "gated:lrpe-type2, layernorm, fox-bias 3.0", "fox, fox-bias 3.0"),
    ("linear", "gated:lrpe-type2, layernorm, fox-bias 3.0", "fox, layernorm, fox-bias 3.0"),
    ("linear", "gated:path:lrpe-type2, layernorm, fox-bias 3.0", "fox, fox-bias 3.0"),
    ("linear", "gated:path:lrpe-type2, layernorm, fox-bias 3.0", "fox, layernorm, fox-bias 3.0"),
    ("linear", "permuteformer", "rope"),
    ("linear", "lrpe-type2", "rope"),
    ("linear", "lrpe-type2, bounded", "rope, bounded"),
    ("linear", "lrpe-type2, layernorm", "rope, layernorm"),
    ("linear", "lrpe-type2, layernorm", "fox, layernorm, fox-bias 3.0"),
    ("linear", "lrpe-type2, bounded", "lrpe-type2, layernorm"),
    ("softmax", "stick-breaking", "rope"),
    ("softmax", "fox, fox-bias 3.0", "rope"),
    ("softmax", "lrpe-type2", "rope"),
)
"""Attention and two methods: the comparisons behind the advice of README and docs/choosing.md."""
ANSWERS = (
    ("linear", "fox, fox-bias 3.0"),
    ("linear", "gated:lrpe-type2, layernorm, fox-bias 3.0"),
    ("linear", "lrpe-type2, bounded"),
    ("softmax", "stick-breaking"),
    ("softmax", "rope"),
)
"""Attention and method: what README advises for language models."""
ADVICE = (
    *ANSWERS,
    ("linear", "gated:path:lrpe-type2, layernorm, fox-bias 3.0"),
    ("linear", "permuteformer"),
)
"""The same of docs/choosing.md."""


def at_larger_scales(results: Results) -> str:
    """Return the comparisons behind the advice at every larger scale that trained one of them.

    A comparison that was trained nowhere keeps its line: the advice has no larger evidence.
    """
    columns: dict[str, list[str]] = {}
    for heading, *place in LARGER:
        cells = [_compared(results, place, *pair) for pair in RECOMMENDED]
        known = columns.get(heading, [""] * len(cells))
        columns[heading] = [one or other for one, other in zip(known, cells, strict=True)]
    trained = {heading: cells for heading, cells in columns.items() if any(cells)}
    rows = [
        [kind, f"`{one}`", f"`{other}`", *cells]
        for (kind, one, other), *cells in zip(RECOMMENDED, *trained.values(), strict=True)
    ]
    return markdown.table(["attention", "method", "against", *trained], rows)


COVERED = (
    ("linear", "fox, fox-bias 3.0"),
    ("linear", "rope, layernorm"),
    ("linear", "lrpe-type2, layernorm"),
    ("linear", "lrpe-type2, bounded"),
    ("linear", "lrpe-type2, angle-floor turn"),
    ("linear", "fox, layernorm"),
    ("linear", "fox, layernorm, fox-bias 3.0"),
    ("linear", "gated:lrpe-type2, layernorm"),
    ("linear", "gated:lrpe-type2, layernorm, fox-bias 3.0"),
    ("linear", "gated:path:lrpe-type2, layernorm"),
    ("linear", "gated:path:lrpe-type2, layernorm, fox-bias 3.0"),
    ("linear", "permuteformer"),
    ("softmax", "rope"),
    ("softmax", "lrpe-type2"),
    ("softmax", "fox, fox-bias 3.0"),
    ("softmax", "stick-breaking"),
)
"""Attention and method of the lines of :func:`coverage`."""
SMALL = (
    ("WikiText-2, 1.8 M tokens, 3 x 128", "extrapolation", "small", "{attention}-paired-128"),
    ("WikiText-2, 1.8 M tokens, 3 x 128", "angles", "small", "{attention}-paired-128"),
    ("WikiText-2, 1.8 M tokens, 3 x 128", "bounded", "small", "linear-paired-128"),
    ("WikiText-2, 1.8 M tokens, 3 x 128", "dependent", "small", "{attention}-paired-128"),
)
"""The places of small language models, as :data:`LARGER` has the others."""


def coverage(results: Results) -> str:
    """Return a table of the seeds of the compared methods, at every scale of language models."""
    seeds: dict[str, dict[tuple[str, str], int]] = {}
    learned_: dict[str, bool] = {}
    for heading, *place in (*SMALL, *LARGER):
        for kind, method in COVERED:
            view = column_for(results, kind, *place)
            if view is None:
                continue
            learned_[heading] = learned_.get(heading, False) or bool(view.beats_ngrams)
            if row := _row_of(view, method):
                counts = seeds.setdefault(heading, {})
                known = counts.get((kind, method), 0)
                counts[kind, method] = max(known, len(view.cells[row]))
    rows = [
        [kind, f"`{method}`", *(str(found.get((kind, method), "–")) for found in seeds.values())]
        for kind, method in COVERED
    ]
    better = ["", "better than n-grams", *("yes" if learned_[name] else "no" for name in seeds)]
    return markdown.table(["attention", "method", *seeds], [*rows, better])


def largest_model(results: Results) -> float:
    """Return the parameters, in millions, of the largest language model that was trained."""
    return max(run.get("million_parameters", 0.0) for run in results.runs.values())


def untested(results: Results, advice: Sequence[tuple[str, str]] = ADVICE) -> str:
    """Name the advised methods that were trained nowhere where models are better than n-grams.

    A method with another normalizer or ``fox-bias`` is another method.
    """
    lacking = [
        f"`{method}` ({kind})"
        for kind, method in advice
        if not any(_row_of(view, method) for view in _learned(results, kind))
    ]
    return markdown.listed(lacking)


def _learned(results: Results, attention: str) -> list[ColumnView]:
    """Return the columns of larger scales whose best model is better than its n-grams."""
    views = (column_for(results, attention, *place) for _, *place in LARGER)
    return [view for view in views if view is not None and view.beats_ngrams]


def _compared(results: Results, place: Sequence[str], attention: str, one: str, other: str) -> str:
    """Return how ``one`` differs from ``other`` in a column; empty if it was not trained there."""
    view = column_for(results, attention, *place)
    if view is None:
        return ""
    rows = _row_of(view, one), _row_of(view, other)
    return "" if None in rows else view.versus(*rows)


def _row_of(view: ColumnView, method: str) -> str | None:
    """Return the row of a method, or None. Another ``fox-bias`` is another method."""
    return next((row for row in view.ranked() if view.names[row] == method), None)


# --- sentences -----------------------------------------------------------------------------------


def of_ngrams(views: Sequence[ColumnView]) -> str:
    """Say whether the best rows of columns are better than n-grams; empty without n-grams."""
    known = [view for view in views if view.yardstick and view.ranked()]
    if not known:
        return ""
    value = known[0].yardstick["ppl"]
    best = min(view.mean(view.ranked()[0]) for view in known)
    # The order that is best on valid, as for the lines of a table.
    order = f"{known[0].yardstick['order']:.0f}-grams (modified Kneser-Ney)"
    cache = f"{known[0].yardstick['cache-ppl']:.1f} with a cache of the context"
    both = f"the best has a perplexity of {best:.1f}, the n-grams have {value:.1f} ({cache})"
    if any(view.beats_ngrams for view in known):
        than_cache = "also" if best < known[0].yardstick["cache-ppl"] else "but not"
        return (
            f"The best model has a perplexity of {best:.1f}. It is better than {order} of the "
            f"tokens that it has read ({value:.1f}), {than_cache} than these with a cache of the "
            f"context ({known[0].yardstick['cache-ppl']:.1f})."
        )
    return (
        f"No language model among them is better than {order} of the tokens that it has read: "
        f"{both}. "
        "So their orders show how fast models learn n-grams."
    )


def most_gained(results: Results) -> str:
    """Return the most that distances beyond training are worth at 2,048 tokens, in nats."""
    views = [results.column("extrapolation", f"{kind}-beyond") for kind in ("linear", "softmax")]
    return f"{max(view.mean(row) for view in views for row in view.ranked()):.3f}"


# --- the ladder ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rung:
    """The difference of a row from RoPE at one budget.

    tokens: of training. size: of the model, layers x width. gap, half: of the difference of
    log perplexities, half infinite for one seed. text: the difference for readers.
    """

    tokens: int
    size: str
    gap: float
    half: float
    text: str


class Budget(NamedTuple):
    """A column of a ladder: where models of one size were trained on one number of tokens.

    column: its key, with ``{attention}`` where the table has it for both. size: layers x width.
    """

    table: str
    scale: str
    column: str
    size: str


LADDERS = {
    "WikiText-2 in blocks of 256, validation, with sinusoidal positions, rates annealed to zero": (
        Budget("budget", "annealed", "{attention}-1800", "3 x 128"),
        Budget("budget", "annealed", "{attention}-5400", "3 x 128"),
        Budget("budget", "annealed", "{attention}-16200", "3 x 128"),
    ),
    "WikiText-2 in blocks of 128, then books in blocks of 512, without absolute positions": (
        Budget("extrapolation", "small", "softmax-paired-128", "3 x 128"),
        Budget("bounded", "small", "linear-paired-128", "3 x 128"),
        Budget("medium", "medium-5m", "{attention}-test", "4 x 192"),
        Budget("contrast", "long", "{attention}-blocks-128", "3 x 128"),
        Budget("bounded", "long", "linear-paired-128", "3 x 128"),
        Budget("medium", "medium-10m", "{attention}-test", "4 x 192"),
        Budget("medium", "medium", "{attention}-test", "4 x 192"),
        Budget("books", "books", "{attention}-test", "6 x 512"),
    ),
}
"""Title of a ladder -> its budgets, in any order."""
RUNGS = 3
"""The smallest number of budgets of a row in a ladder."""


class Climb(NamedTuple):
    """A row of a ladder: the differences of a method from RoPE, from few tokens to many."""

    attention: str
    method: str
    rungs: list[Rung]


def ladder(results: Results) -> list[tuple[str, str]]:
    """Return title and table of every ladder with a row that has enough budgets."""
    ladders = []
    for title, budgets in LADDERS.items():
        climbs = [
            climb for kind in ("linear", "softmax") for climb in _climbs(results, kind, budgets)
        ]
        if climbs:
            ladders.append((title, _ladder_table(climbs)))
    return ladders


def _ladder_table(climbs: Sequence[Climb]) -> str:
    """Return the table of a ladder: a column per budget, empty where a row was not trained."""
    # By tokens first: the axis of the ladder is training, not size.
    budgets = sorted({(rung.tokens, rung.size) for climb in climbs for rung in climb.rungs})
    titles = [f"{tokens / 1e6:.1f} M tokens, {size}" for tokens, size in budgets]
    lines = []
    for climb in climbs:
        texts = {(rung.tokens, rung.size): rung.text for rung in climb.rungs}
        cells = [texts.get(budget, "") for budget in budgets]
        lines.append([climb.attention, f"`{climb.method}`", *cells])
    head = ["attention", "method", *titles]
    turns = [may_turn(climb.rungs) for climb in climbs]
    # A column of one word would repeat it in every line.
    if len(set(turns)) == 1:
        said = f"May turn within ten times the tokens, every row: {turns[0]}."
        return f"{markdown.table(head, lines)}\n\n{said}"
    lines = [[*line, turn] for line, turn in zip(lines, turns, strict=True)]
    return markdown.table([*head, "may turn within ten times"], lines)


def _climbs(results: Results, attention: str, budgets: Sequence[Budget]) -> Iterator[Climb]:
    """Yield the methods with enough rungs."""
    rungs: dict[str, list[Rung]] = {}
    for budget in budgets:
        place = budget.table, budget.scale, budget.column
        if view := column_for(results, attention, *place):
            for name, rung in _rungs(results, view, budget.size):
                rungs.setdefault(name, []).append(rung)
    for name, climbed in rungs.items():
        # Two points always lie on a line; a third one can contradict it.
        if len(climbed) >= RUNGS:
            yield Climb(attention, name, sorted(climbed, key=lambda rung: rung.tokens))


def _rungs(results: Results, view: ColumnView, size: str) -> Iterator[tuple[str, Rung]]:
    """Yield the name and the rung of every row beside RoPE with the same normalizer and floor."""
    by_name = {view.names[row]: row for row in view.ranked()}
    for name, row in by_name.items():
        base = by_name.get(_rope_of(name))
        # A row without such a RoPE has nothing to be compared with.
        if base is None or base == row:
            continue
        verdict = view.verdict(row, base)
        # Of the means, as the table shows them; the interval is of differences by seed.
        gap = math.log(view.mean(row) / view.mean(base))
        half = view.measurement.interval(view.identity(row), view.identity(base)).half
        run = results.runs[next(iter(view.runs[row].values()))]
        updates = run["config"]["optimization.max_update"]
        tokens = updates * sizes(run["config"], "dataset.max_tokens")[0]
        text = f"{100 * math.expm1(gap):+.1f} %"
        if verdict.known:
            text = difference(verdict, view.kind)
        yield name, Rung(tokens=int(tokens), size=size, gap=gap, half=half, text=text)


KEPT = (*NORMALIZERS, "angle-floor turn")
"""What a row and its RoPE share, as names of rows have it; ``rotated`` is not named."""


def _rope_of(name: str) -> str:
    """Return the name of the row of RoPE with the normalizer and the floor of a row.

    >>> _rope_of("lrpe-type2, layernorm"), _rope_of("fox, fox-bias 3.0")
    ('rope, layernorm', 'rope')
    """
    return ", ".join(["rope", *(word for word in name.split(", ")[1:] if word in KEPT)])


def may_turn(rungs: Sequence[Rung]) -> str:
    """Return "yes" unless the sign of a difference is sure to stay for ten times the tokens.

    The line through the first and the last rung, over the logarithm of the tokens, is extended by
    a decade. The sign stays if both the last difference and the extended one have intervals that
    lie on one side of zero. A rung of one seed has no interval, and the answer is "unknown".
    """
    first, last = rungs[0], rungs[-1]
    if not math.isfinite(first.half + last.half):
        return "unknown, one seed at an end"
    # Differences change with the logarithm of the tokens, more than with the tokens.
    decades = math.log10(last.tokens / first.tokens)
    gap = last.gap + (last.gap - first.gap) / decades
    # The two ends are independent, and the line weighs them differently.
    half = math.hypot(last.half * (1 + 1 / decades), first.half / decades)
    # Both ends must be certain: today's order, and that of ten times the tokens.
    sure = abs(last.gap) > last.half and abs(gap) > half and (gap > 0) == (last.gap > 0)
    return "no" if sure else "yes"


# --- agreement with the papers -------------------------------------------------------------------

AGREEMENT = (
    ("1,800 updates", "table2", "small", "valid"),
    ("1,800 updates, annealed", "table2", "annealed", "valid"),
    ("16,200 updates", "budget", "annealed", "16200"),
    ("Table 2 on books", "table2", "books", "valid"),
)
"""Name, table, scale and column, without the attention, of the rows of the LRPE paper's Table 2."""
TOO_FEW, ABSENT = "fewer than ten rows", "not trained"
"""Why a rank correlation is not shown."""


def agreement(results: Results) -> str:
    """Return a table of the rank correlations with the published Table 2."""
    rows = []
    lacking: dict[str, list[str]] = {}
    for name, table, scale, key in AGREEMENT:
        for attention in ("linear", "softmax"):
            view = column_of(results, table, scale, f"{attention}-{key}")
            number, found = _agreement_of(view)
            if found in (TOO_FEW, ABSENT):
                lacking.setdefault(found, []).append(f"{name} ({attention})")
            else:
                rows.append([name, attention, number, found])
    text = markdown.table(["training", "attention", "rows", "rank correlation"], rows)
    said = [f"{why.capitalize()}: {'; '.join(where)}." for why, where in lacking.items()]
    return "\n\n".join([text, *said])


def _agreement_of(view: ColumnView | None) -> tuple[str, str]:
    """Return how many rows a column shares with its paper, and their rank correlation as text."""
    rows = [row for row in view.ranked() if row in view.paper] if view else []
    if view is None or not rows:
        return "0", ABSENT
    ours = [view.mean(row) for row in rows]
    correlation = orders.correlation(ours, [view.paper[row] for row in rows])
    if correlation is None:
        return str(len(rows)), TOO_FEW
    interval = f"[{correlation.low:.2f}, {correlation.high:.2f}]"
    return str(len(rows)), f"{correlation.value:.2f} {interval}"
