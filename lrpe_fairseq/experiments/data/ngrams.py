"""Language models of n-grams, a yardstick: what counts of the same tokens achieve.

- :class:`KneserNey`: interpolated modified Kneser-Ney, orders 1 to N (Chen and Goodman 1998, "An
  empirical study of smoothing techniques for language modeling", Section 3).
- :func:`cached`: the frequencies of what followed the same tokens among the last W tokens.
- :class:`Mixture`: Kneser-Ney and caches, mixed by weights that are fitted to other text.

A text is an array of symbols, int64 (N,). The id of an n-gram is its place among the sorted keys of
its order; its key is the id of its first n - 1 symbols times the number of symbols, plus its last
symbol. Axes: N tokens of a text, K components of a mixture.
"""

from dataclasses import dataclass, field

import numpy as np

ORDERS = 6
DRAW = 1
"""Seed of the random blocks."""
CACHE_ORDERS = (1, 2, 3)
STEPS = 50
"""Steps of the fit of a mixture by expectation-maximization."""
Ints = np.ndarray
Floats = np.ndarray
UNSEEN = -1
"""Id of an n-gram that the counted text lacks, or that begins before a text."""


# --- the counted text ----------------------------------------------------------------------------


def random_blocks(text: Ints, tokens: int, length: int) -> tuple[Ints, Ints]:
    """Return ``tokens`` tokens of a text in random blocks, in its order, and where pieces begin.

    A training of less than one epoch reads random blocks of ``length`` tokens. Blocks that follow
    each other are one piece. All tokens: the text itself, in one piece.
    """
    chosen = np.random.default_rng(DRAW).permutation(-(-len(text) // length))
    taken = np.zeros(len(text), bool)
    left = min(tokens, len(text))
    for block in chosen:
        size = min(left, length, len(text) - block * length)
        taken[block * length : block * length + size] = True
        left -= size
        if not left:
            break
    places = np.flatnonzero(taken)
    return text[places], 1 + np.flatnonzero(np.diff(places) > 1)


# --- counts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keys:
    """The n-grams of a text, up to an order. tables: sorted keys of the orders from 2 on."""

    symbols: int
    tables: list[Ints] = field(default_factory=list)

    @property
    def orders(self) -> int:
        """The highest order."""
        return len(self.tables) + 1

    def size(self, order: int) -> int:
        """Return the number of different n-grams of an order; of order 0: 1, the empty one."""
        if order == 0:
            return 1
        return self.symbols if order == 1 else len(self.tables[order - 2])

    def prefixes(self, order: int) -> Ints:
        """Return the id of the first ``order - 1`` symbols of every n-gram."""
        if order == 1:
            return np.zeros(self.symbols, np.int64)
        return self.tables[order - 2] // self.symbols

    def ids(self, text: Ints) -> list[Ints]:
        """Return by order, from 1 on, the id of the n-gram that ends at every token, (N,)."""
        by_order = [text.astype(np.int64)]
        for table in self.tables:
            keys, whole = _keys(preceding(by_order[-1]), text, self.symbols)
            place = np.searchsorted(table, keys)
            # searchsorted returns the end for a key above all others; any valid place will do,
            # because the keys are compared.
            place[place == len(table)] = 0
            by_order.append(np.where(whole & (table[place] == keys), place, UNSEEN))
        return by_order


def count_keys(
    text: Ints, symbols: int, orders: int, starts: Ints | None = None
) -> tuple[Keys, list[Ints]]:
    """Return the n-grams of a text, and :meth:`Keys.ids` of it.

    symbols: size of the vocabulary. starts: places where pieces begin; no n-gram reads the end of
    one piece and the start of the next. Raises: ValueError if the text has other symbols.
    """
    # Another dictionary would give keys that mean other n-grams.
    if len(text) and not 0 <= text.min() <= text.max() < symbols:
        raise ValueError(f"the text has symbols outside 0 to {symbols - 1}")
    keys = Keys(symbols)
    by_order = [text.astype(np.int64)]
    for _ in range(2, orders + 1):
        before = preceding(by_order[-1])
        before[[] if starts is None else starts] = UNSEEN
        ngram_keys, whole = _keys(before, text, symbols)
        table, places = np.unique(ngram_keys[whole], return_inverse=True)
        ids = np.full(len(text), UNSEEN, np.int64)
        ids[whole] = places
        keys.tables.append(table)
        by_order.append(ids)
    return keys, by_order


def _keys(before: Ints, text: Ints, symbols: int) -> tuple[Ints, Ints]:
    """Return the keys of the n-grams that end at every token, and which are whole and seen.

    before: the ids of the n-grams of one order less that end before every token.
    """
    return before * symbols + text, before != UNSEEN


def preceding(ids: Ints) -> Ints:
    """Return the id at the token before every token: that of its context. It is a copy."""
    return np.concatenate([[UNSEEN], ids[:-1]]) if len(ids) else ids.copy()


# --- Kneser-Ney ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """One order of a Kneser-Ney model.

    share: of every n-gram, its count less the discount, over the total of its context. rest: of
    every context, the weight of the order below. seen: of every context, if it has n-grams.
    """

    share: Floats
    rest: Floats
    seen: Ints


class KneserNey:
    """Interpolated modified Kneser-Ney models of the orders 1 to ``orders``, of one text.

    starts: places where pieces of the text begin; see :func:`count_keys`.
    p(w | h) = max(c(hw) - D(c(hw)), 0) / sum_v c(hv) + rest(h) p(w | h'), where h' is h without its
    first symbol. c counts in the highest order, and below it the different symbols before hw. D has
    one value for the counts 1, 2, and 3 or more. Below order 1 all symbols are equally likely. A
    context that the text lacks leaves p to the order below. O(N log N) per order.
    """

    def __init__(
        self, text: Ints, symbols: int, orders: int = ORDERS, starts: Ints | None = None
    ) -> None:
        self.keys, ids = count_keys(text, symbols, orders, starts)
        self._highest = []
        self._below = []
        for order in range(1, orders + 1):
            size = self.keys.size(order)
            counts = np.bincount(_seen(ids[order - 1]), minlength=size)
            self._highest.append(self._level(order, counts))
            if order < orders:
                before = np.empty(self.keys.size(order + 1), np.int64)
                longer, shorter = ids[order], ids[order - 1]
                # A token near the start of a piece has no longer n-gram.
                whole = longer != UNSEEN
                before[longer[whole]] = shorter[whole]  # of each longer n-gram: without its first
                self._below.append(self._level(order, np.bincount(before, minlength=size)))

    def _level(self, order: int, counts: Ints) -> Level:
        contexts = self.keys.prefixes(order)
        size = self.keys.size(order - 1)
        # A discount is never more than its count: no share is negative.
        taken = np.minimum(discounts(counts)[np.minimum(counts, 3)], counts)
        totals = np.bincount(contexts, weights=counts, minlength=size)
        lost = np.bincount(contexts, weights=taken, minlength=size)
        seen = totals > 0
        # Contexts without n-grams would divide by zero; nothing reads their shares.
        safe = np.where(seen, totals, 1.0)
        return Level((counts - taken) / safe[contexts], lost / safe, seen)

    def probabilities(self, text: Ints) -> Floats:
        """Return p of every token by the model of every order, from 1 on: (orders, N)."""
        ids = self.keys.ids(text)
        below = np.full(len(text), 1 / self.keys.symbols)
        by_order = []
        for order in range(1, self.keys.orders + 1):
            contexts = np.zeros(len(text), np.int64) if order == 1 else preceding(ids[order - 2])
            ngrams = ids[order - 1]
            by_order.append(_interpolated(self._highest[order - 1], contexts, ngrams, below))
            # The highest order has true counts; below it the number of different continuations
            # counts.
            if order < self.keys.orders:
                below = _interpolated(self._below[order - 1], contexts, ngrams, below)
        return np.stack(by_order)


def discounts(counts: Ints) -> Floats:
    """Return what is subtracted from the counts 0, 1, 2, and 3 or more: Chen and Goodman's.

    With n_i n-grams of the count i and Y = n_1 / (n_1 + 2 n_2), D_i = i - (i + 1) Y n_(i+1) / n_i.
    In a text with few n-grams it is kept between 0.1 and i, so that every symbol has a chance.
    """
    n = [np.count_nonzero(counts == i) for i in (1, 2, 3, 4)]
    y = n[0] / max(n[0] + 2 * n[1], 1)
    amounts = [i - (i + 1) * y * n[i] / max(n[i - 1], 1) for i in (1, 2, 3)]
    return np.array([0.0, *np.clip(amounts, 0.1, [1, 2, 3])])


def _interpolated(level: Level, contexts: Ints, ngrams: Ints, below: Floats) -> Floats:
    """Return p by a level, from p by the order below."""
    known = contexts != UNSEEN
    # A context that occurs only at the end of the text has no n-grams either.
    known[known] = level.seen[contexts[known]]
    mixed = below.copy()
    mixed[known] *= level.rest[contexts[known]]
    counted = known & (ngrams != UNSEEN)
    mixed[counted] += level.share[ngrams[counted]]
    return mixed


def _seen(ids: Ints) -> Ints:
    return ids[ids != UNSEEN]


# --- caches --------------------------------------------------------------------------------------


def cached(text: Ints, symbols: int, order: int, window: int) -> tuple[Floats, Ints]:
    """Return p of every token by the last ``window`` tokens, (N,), and where it is defined.

    It is the share of the token among those that follow the same ``order - 1`` tokens there. It is
    not defined if they do not occur there before, and 0 then. O(N log N).
    """
    _, ids = count_keys(text, symbols, order)
    count = _recent(ids[order - 1], window)
    if order == 1:
        total = np.minimum(np.arange(len(text)), window)
    else:
        total = _recent(preceding(ids[order - 2]), window)
    defined = total > 0
    return np.divide(count, total, out=np.zeros(len(text)), where=defined), defined


def _recent(ids: Ints, window: int) -> Ints:
    """Return how often the id at every token is among the ``window`` before it; 0 if unseen."""
    places = np.arange(len(ids))
    step = len(ids) + 1
    # Sorted by id, then by place: one search counts all earlier places of an id.
    by_id = np.sort(ids * step + places)
    first = np.maximum(places - window, 0)
    count = np.searchsorted(by_id, ids * step + places) - np.searchsorted(by_id, ids * step + first)
    return np.where(ids == UNSEEN, 0, count)


# --- mixtures ------------------------------------------------------------------------------------


class Mixture:
    """Kneser-Ney of one order and caches of the last ``window`` tokens, mixed.

    The weights are fitted to ``held_out`` by expectation-maximization. There are weights for every
    set of caches that are defined at a token, which depends on the tokens before it only, so p sums
    to one. Where ``held_out`` lacks a set, Kneser-Ney has all of the weight.
    """

    def __init__(self, model: KneserNey, order: int, window: int, held_out: Ints) -> None:
        self.model = model
        self.order = order
        self.window = window
        parts, defined = self._parts(held_out)
        self._weights = {
            int(pattern): fitted(parts[:, defined == pattern]) for pattern in np.unique(defined)
        }

    def probabilities(self, text: Ints) -> Floats:
        """Return p of every token, (N,)."""
        parts, defined = self._parts(text)
        # Without a fit, Kneser-Ney alone.
        alone = np.eye(1, len(parts))[0]
        weights = np.stack(
            [self._weights.get(pattern, alone) for pattern in range(2 ** (len(parts) - 1))]
        )
        return (weights[defined].T * parts).sum(0)

    def _parts(self, text: Ints) -> tuple[Floats, Ints]:
        """Return p of every token by every component, (K, N), and the set of defined caches, (N,).

        Bit i of the set stands for cache i.
        """
        parts = [self.model.probabilities(text)[self.order - 1]]
        pattern = np.zeros(len(text), np.int64)
        for place, order in enumerate(CACHE_ORDERS):
            probabilities, defined = cached(text, self.model.keys.symbols, order, self.window)
            parts.append(probabilities)
            pattern += defined.astype(np.int64) << place
        return np.stack(parts), pattern


def fitted(parts: Floats) -> Floats:
    """Return the weights (K,) of components with p (K, N) that maximize the likelihood.

    A component that is 0 everywhere gets the weight 0.
    """
    # A component that never gives a chance would keep its start forever.
    weights = (parts > 0).any(1) / max((parts > 0).any(1).sum(), 1)
    for _ in range(STEPS):
        owned = weights[:, None] * parts
        # A token that every component excludes would be 0 / 0.
        weights = (owned / np.maximum(owned.sum(0), 1e-300)).mean(1)
    return weights


# --- measures ------------------------------------------------------------------------------------


def loss(probabilities: Floats, scored: Ints | None = None) -> float:
    """Return the mean of -log2 p over all tokens, or over the places ``scored``."""
    chosen = probabilities if scored is None else probabilities[scored]
    return float(-np.log2(chosen).mean())
