"""Long texts with facts hidden in them, and a question at the end: passkey, keys, variables.

The text around the facts is generated: each word has a few words that may follow it. A sample ends
with the question and its answer, whose digits are scored. The depth of a fact is the fraction of
the surrounding text that comes before it. The tasks are those of RULER (Hsieh et al., 2024) in a
small vocabulary: a needle, one needle of several, and variable tracking.
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

    chains: indices of facts that must stand in this order, the asked ones first.
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


def digits(rng: RandomState, count: int) -> Fact:
    """Draw ``count`` digits."""
    return tuple(DIGITS[n] for n in rng.randint(len(DIGITS), size=count))


def passkey(rng: RandomState) -> Hidden:
    """One fact ``passkey`` and five digits; the question is ``passkey?``."""
    answer = digits(rng, PASSKEY_DIGITS)
    return Hidden([[("passkey", *answer)]], ("passkey?",), answer)


def keys(rng: RandomState) -> Hidden:
    """Four facts ``value-of key`` and two digits; the question is ``value-of? key`` of one."""
    chosen = [f"k{n + 1}" for n in rng.permutation(KEYS)[:PAIRS]]
    values = [digits(rng, VALUE_DIGITS) for _ in chosen]
    facts = [[("value-of", key, *value)] for key, value in zip(chosen, values, strict=True)]
    return Hidden(facts, ("value-of?", chosen[0]), values[0])


def variables(rng: RandomState) -> Hidden:
    """Two chains: ``set x`` and two digits, then twice ``copy y x``; the question is ``get? z``.

    The answer is the value at the start of the chain of z, its last variable.
    """
    names = [f"x{n + 1}" for n in rng.permutation(VARIABLES)]
    size, values, chains = COPIES + 1, [], []
    for first in range(0, CHAINS * size, size):
        chain = names[first : first + size]
        values.append(digits(rng, VALUE_DIGITS))
        copies = [("copy", new, old) for old, new in itertools.pairwise(chain)]
        chains.append([("set", chain[0], *values[-1]), *copies])
    return Hidden(chains, ("get?", names[COPIES]), values[0])


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
