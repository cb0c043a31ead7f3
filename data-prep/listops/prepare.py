"""Generate ListOps for fairseq: nested expressions over MIN, MAX, MED and SM (the sum modulo 10).

    python data-prep/listops/prepare.py --dest data/listops-20-100 --length 20-100

The distribution is that of the Long-Range Arena (Tay et al., 2020), whose generator this follows.
The label of an expression is its value, a digit. Brackets are tokens: ``[MIN 3 4 ]`` has four. The
parentheses of the published files, which repeat the brackets, are left out. See the README in this
folder for the sizes and the statistics.
"""

import functools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import examples
from lrpe_fairseq.experiments.data.examples import Examples
from lrpe_fairseq.experiments.records.console import command

DIGIT_PROBABILITY = 0.75


def median(values: Sequence[int]) -> int:
    """Return the median of digits; of an even number, the mean of the middle two, truncated."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": median,
    "[SM": lambda values: sum(values) % 10,
}
CLOSE = "]"
SYMBOLS = [*OPERATORS, CLOSE, *map(str, range(10))]
CLOSE_ID = len(OPERATORS)  # the place of the closing bracket in SYMBOLS
ZERO = len(OPERATORS) + 1  # of the digit 0


@dataclass(frozen=True)
class Recipe:
    """The size of the expressions.

    shortest, longest: bounds of the number of tokens, both excluded. depth: largest depth of a
    digit; the root has depth 1. arguments: an operator has 2 .. ``arguments`` of them. sizes: split
    -> number of expressions.
    """

    shortest: int
    longest: int
    depth: int
    arguments: int
    sizes: Mapping[str, int] = field(
        default_factory=lambda: {"train": 20_000, "valid": 2_000, "test": 2_000}
    )


LENGTHS = {
    "20-100": Recipe(20, 100, 5, 5),
    "100-400": Recipe(100, 400, 10, 10),
    "500-2000": Recipe(
        500, 2000, 10, 10, {"train": 96_000, "valid": 2_000, "test": 2_000}
    ),  # the Long-Range Arena's
}


class TooLong(Exception):
    """The expression has more tokens than the recipe allows."""


def expression(rng: random.Random, recipe: Recipe) -> tuple[list[int], int]:
    """Draw an expression; return its tokens, as numbers in :data:`SYMBOLS`, and its value.

    Raises: TooLong as soon as it is known to be, which does not change the distribution of the
        others.
    """
    tokens: list[int] = []
    functions = list(OPERATORS.values())

    def node(depth: int) -> int:
        if len(tokens) >= recipe.longest:
            raise TooLong
        if depth == recipe.depth or rng.random() < DIGIT_PROBABILITY:
            value = below(rng, 10)
            tokens.append(ZERO + value)
            return value
        operator = below(rng, len(functions))
        tokens.append(operator)
        count = 2 + below(rng, recipe.arguments - 1)
        # the arguments append their tokens before the bracket closes
        value = functions[operator]([node(depth + 1) for _ in range(count)])
        tokens.append(CLOSE_ID)
        return value

    value = node(1)
    return tokens, value


def below(rng: random.Random, most: int) -> int:
    """Draw an integer from 0 .. most - 1. Python guarantees the stream of ``random()`` only."""
    return int(rng.random() * most)


def generate(recipe: Recipe, seed: int) -> dict[str, Examples]:
    """Return the expressions of every split; none occurs twice, in one split or in two.

    Equal arguments give equal expressions on every machine.
    """
    known: set[bytes] = set()
    return {
        split: _split(random.Random(1_000 * seed + number), recipe, count, known)
        for number, (split, count) in enumerate(recipe.sizes.items())
    }


def _split(rng: random.Random, recipe: Recipe, count: int, known: set[bytes]) -> Examples:
    inputs = []
    labels = []
    while len(inputs) < count:
        try:
            tokens, value = expression(rng, recipe)
        except TooLong:
            continue  # most expressions are too short or too long
        key = bytes(tokens)
        if recipe.shortest < len(tokens) < recipe.longest and key not in known:
            known.add(key)
            inputs.append(tokens)
            labels.append(value)
    return Examples(inputs, labels)


def prepare(dest: Path, length: str, seed: int = 1) -> dict:
    """Prepare ``dest`` with the expressions of ``LENGTHS[length]`` and return its manifest.

    ``root`` of a split: the accuracy, times 100, of the best prediction from the first token
    alone, the operator of the whole expression. A model below it has not learned the task.
    """
    steps = prep.Steps(dest, "listops", length)

    def with_root(counts: dict[str, Any]) -> dict[str, Any]:
        for split, of_split in counts["splits"].items():
            prefix = dest / "bin" / "input0" / split
            # the first token of every row
            starts = np.cumsum([0, *prep.row_lengths(prefix)[:-1]])
            roots = np.fromfile(f"{prefix}.bin", dtype=np.uint16)[starts].tolist()
            labels = examples.labels_of(dest / "bin" / "label" / split)
            of_split["root"] = round(examples.accuracy_from_key(roots, labels), 2)
        return counts

    make = functools.partial(generate, LENGTHS[length], seed)
    reads = {"script": Path(__file__), "seed": seed}
    shape = {"symbols": SYMBOLS, "classes": 10}
    return examples.prepare(steps, reads, make, counted=with_root, **shape)


@command("data-prep/listops/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and generate the expressions."""
    parser = prep.parser(__doc__)
    parser.add_argument(
        "--length", default="20-100", choices=list(LENGTHS), help="bounds of the tokens"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the expressions")
    options = parser.parse_args(argv)
    prep.say(f"ListOps {options.length}, seed {options.seed} -> {options.dest}")
    prepare(options.dest, options.length, options.seed)


if __name__ == "__main__":
    sys.exit(main())
