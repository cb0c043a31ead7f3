"""Long texts with facts hidden in them, and a question at the end: passkey, keys, variables.

The text around the facts is generated: each word has a few words that may follow it. A sample ends
with the question and its answer, whose digits are scored. No digit occurs twice in the facts of a
sample, so a given digit names the next one, and models of two layers learn the tasks. The depth of
a fact is the fraction of the surrounding text that comes before it. The tasks are those of RULER
(Hsieh et al., 2024) in a small vocabulary: a needle, one needle of several, and variable tracking.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from numpy.random import RandomState

from lrpe_fairseq.experiments.data.transduction import below, types

WORDS, FOLLOWERS = 64, 4
DIGITS = types("d", 10)
PASSKEY_DIGITS = 5
VALUE_DIGITS = 2
KEYS, PAIRS = 16, 4
"""Keys that there are, and pairs of a key and a value in a sample."""
VARIABLES, CHAINS, COPIES = 16, 2, 2
"""Variables that there are, chains of them in a sample, and copies in a chain."""
SURROUNDINGS = types("w", WORDS)

Fact = tuple[str, ...]


class Hidden(NamedTuple):
    """Facts, the question about the first of them, and its answer.

    chains: lists of facts. The facts of a chain stand in this order in the text, and the question
    asks about the first chain.
    """

    chains: list[list[Fact]]
    question: Fact
    answer: Fact


def surroundings(rng: RandomState, count: int) -> list[str]:
    """Draw ``count`` words; word n is followed by one of 4 words, 5 n + 1 to 5 n + 4 modulo 64."""
    word, found = below(rng, WORDS), []
    for step in rng.randint(1, FOLLOWERS + 1, size=count):
        word = (5 * word + int(step)) % WORDS
        found.append(SURROUNDINGS[word])
    return found


def values(rng: RandomState, count: int, size: int) -> list[Fact]:
    """Draw ``count`` values of ``size`` digits; all of their digits are different."""
    drawn = [DIGITS[n] for n in rng.permutation(len(DIGITS))[: count * size]]
    return [tuple(drawn[n : n + size]) for n in range(0, count * size, size)]


def passkey(rng: RandomState) -> Hidden:
    """One fact ``passkey`` and five digits; the question is ``passkey?``."""
    [answer] = values(rng, 1, PASSKEY_DIGITS)
    return Hidden([[("passkey", *answer)]], ("passkey?",), answer)


def keys(rng: RandomState) -> Hidden:
    """Four facts ``value-of key`` and two digits; the question is ``value-of? key`` of one."""
    chosen = [f"k{n + 1}" for n in rng.permutation(KEYS)[:PAIRS]]
    drawn = values(rng, PAIRS, VALUE_DIGITS)
    facts = [[("value-of", key, *value)] for key, value in zip(chosen, drawn, strict=True)]
    return Hidden(facts, ("value-of?", chosen[0]), drawn[0])


def variables(rng: RandomState) -> Hidden:
    """Two chains: ``set x`` and two digits, then twice ``copy y x``; the question is ``get? z``.

    The answer is the value at the start of the chain of z, its last variable.
    """
    names = [f"x{n + 1}" for n in rng.permutation(VARIABLES)]
    size, chains = COPIES + 1, []
    drawn = values(rng, CHAINS, VALUE_DIGITS)
    for first, value in zip(range(0, CHAINS * size, size), drawn, strict=True):
        chain = names[first : first + size]
        copies = [("copy", new, old) for old, new in itertools.pairwise(chain)]
        chains.append([("set", chain[0], *value), *copies])
    return Hidden(chains, ("get?", names[COPIES]), drawn[0])


def hide(
    rng: RandomState, hidden: Hidden, length: int, depth: float | None
) -> tuple[list[str], list[str]]:
    """Return ``length`` tokens, and the answer at each of the last ones ("" elsewhere).

    depth: of the first fact of the asked chain, 0 to 1; None: uniform. Later facts of a chain are
    uniform behind its first one, and the other chains begin anywhere.
    """
    facts = [fact for chain in hidden.chains for fact in chain]
    tail = [*hidden.question, *hidden.answer[:-1]]
    room = length - len(tail) - sum(map(len, facts))
    places = []
    for number, chain in enumerate(hidden.chains):
        asked = number == 0 and depth is not None
        first = round(depth * room) if asked else below(rng, room + 1)
        later = [first + below(rng, room - first + 1) for _ in chain[1:]]
        places += [first, *sorted(later)]
    text, tokens, done = surroundings(rng, room), [], 0
    for place, fact in sorted(zip(places, facts, strict=True), key=lambda pair: pair[0]):
        tokens += [*text[done:place], *fact]
        done = place
    tokens += [*text[done:], *tail]
    unscored = length - len(hidden.answer)
    return tokens, [*[""] * unscored, *hidden.answer]


TASKS: dict[str, tuple[Callable[[RandomState], Hidden], Sequence[str]]] = {
    "passkey": (passkey, ["passkey", "passkey?"]),
    "keys": (keys, ["value-of", "value-of?", *types("k", KEYS)]),
    "variables": (variables, ["set", "copy", "get?", *types("x", VARIABLES)]),
}
"""Task -> what is hidden, and the symbols beside the surroundings and the digits."""
