"""Generate pairs of texts for fairseq: are both from one source?

    python data-prep/retrieval/prepare.py --dest data/retrieval-78-130

A stand-in for Retrieval of the Long-Range Arena, whose release is large. See the README in this
folder for the rules and the sizes.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.random import RandomState

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import examples
from lrpe_fairseq.experiments.data.examples import Examples
from lrpe_fairseq.experiments.records.console import command

LETTERS, SOURCES, FOLLOWERS = 26, 16, 3
SYMBOLS = [chr(ord("a") + n) for n in range(LETTERS)]


@dataclass(frozen=True)
class Recipe:
    """The size of the texts, in rounds of all letters, and split -> number of pairs."""

    fewest: int = 3
    most: int = 5
    sizes: Mapping[str, int] = field(
        default_factory=lambda: {"train": 10_000, "valid": 1_000, "test": 1_000}
    )


def sources(seed: int) -> np.ndarray:
    """Return the sources, int64 (SOURCES, FOLLOWERS, LETTERS): the letters that follow each."""
    rng = RandomState(seed)
    drawn = [rng.permutation(LETTERS) for _ in range(SOURCES * FOLLOWERS)]
    return np.array(drawn).reshape(SOURCES, FOLLOWERS, LETTERS)


def text(rng: RandomState, source: np.ndarray, recipe: Recipe) -> list[int]:
    """Draw a text of one source (FOLLOWERS, LETTERS).

    Every round has each letter once, so that only the order of the letters depends on the source.
    """
    letters = [int(rng.randint(LETTERS))]
    left = set(range(LETTERS)) - set(letters)
    for _ in range(LETTERS * rng.randint(recipe.fewest, recipe.most + 1) - 1):
        left = left or set(range(LETTERS))
        # a follower that the round still lacks, or else any such letter
        choices = sorted(left & set(source[:, letters[-1]].tolist())) or sorted(left)
        letters.append(choices[rng.randint(len(choices))])
        left -= {letters[-1]}
    return letters


def generate(recipe: Recipe, seed: int) -> dict[str, Examples]:
    """Return the pairs of every split; class 1: both texts are from one source.

    Equal arguments give equal pairs on every machine.
    """
    known = sources(seed)
    return {
        split: _split(RandomState(1_000 * seed + number), known, recipe, count)
        for number, (split, count) in enumerate(recipe.sizes.items(), 1)
    }


def _split(rng: RandomState, known: np.ndarray, recipe: Recipe, count: int) -> Examples:
    firsts, seconds, labels = [], [], []
    for _ in range(count):
        label = int(rng.randint(2))
        first = int(rng.randint(SOURCES))
        # another source, each with the same probability
        second = first if label else (first + 1 + int(rng.randint(SOURCES - 1))) % SOURCES
        firsts.append(text(rng, known[first], recipe))
        seconds.append(text(rng, known[second], recipe))
        labels.append(label)
    return Examples(firsts, labels, seconds)


def prepare(dest: Path, seed: int = 1, recipe: Recipe = Recipe()) -> dict:
    """Prepare ``dest`` and return its manifest."""
    steps = prep.Steps(dest, "retrieval", f"{LETTERS * recipe.fewest}-{LETTERS * recipe.most}")
    reads = {"script": Path(__file__), "seed": seed}
    make = functools.partial(generate, recipe, seed)
    shape = {"symbols": SYMBOLS, "classes": 2, "pairs": True}
    return examples.prepare(steps, reads, make, **shape)


@command("data-prep/retrieval/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and generate the pairs."""
    parser = prep.parser(__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the sources and the pairs")
    options = parser.parse_args(argv)
    prep.say(f"Pairs of texts, seed {options.seed} -> {options.dest}")
    prepare(options.dest, options.seed)


if __name__ == "__main__":
    sys.exit(main())
