"""Perplexities of n-gram counts: a yardstick for small language models."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fairseq.data import Dictionary, data_utils


def counted(data: Path, longest: int) -> dict[int, float]:
    """Return :func:`perplexities` of the split ``test`` of binary fairseq data."""
    dictionary = Dictionary.load(str(data / "dict.txt"))
    sets = (data_utils.load_indexed_dataset(str(data / s), dictionary) for s in ("train", "test"))
    train, test = ([token for i in range(len(s)) for token in s[i].tolist()] for s in sets)
    return perplexities(train, test, longest)


def perplexities(train: Sequence[int], test: Sequence[int], longest: int) -> dict[int, float]:
    """Return n -> perplexity per token of ``test`` by counts of ``train``, for n up to ``longest``.

    The estimate p of order n is interpolated with p' of order n - 1 by Witten and Bell's rule,
    p = (count + distinct p') / (total + distinct), with the tokens that follow the same context;
    order 0 is uniform over the symbols of train. Tokens at the start have shorter contexts.
    """
    p, found = [1 / len(set(train))] * len(test), {}
    for n in range(1, longest + 1):
        counts = Counter(zip(*(train[i:] for i in range(n)), strict=False))
        total, distinct = Counter[tuple](), Counter(gram[:-1] for gram in counts)
        for gram, count in counts.items():
            total[gram[:-1]] += count
        for place, gram in enumerate(zip(*(test[i:] for i in range(n)), strict=False), n - 1):
            if kinds := distinct[gram[:-1]]:
                p[place] = (counts[gram] + kinds * p[place]) / (total[gram[:-1]] + kinds)
        found[n] = math.exp(-statistics.fmean(map(math.log, p)))
    return found
