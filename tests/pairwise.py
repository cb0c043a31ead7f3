"""Cases of several factors in which every two values of two factors meet."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairwise(*factors: Iterable[Any]) -> list[tuple]:
    """A part of the product in which each pair of values of two factors occurs; the same always."""
    values = [list(factor) for factor in factors]
    cases = product(*(range(len(own)) for own in values))
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    left, chosen = set().union(*pairs.values()), []
    while left:
        best = max(pairs, key=lambda case: len(pairs[case] & left))
        left -= pairs[best]
        chosen.append(tuple(own[i] for own, i in zip(values, best, strict=True)))
    return chosen
