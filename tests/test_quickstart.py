"""The quickstart: its trainings, its published runs, and the n-gram counts beside them."""

import json
from collections import Counter

import numpy as np
import pytest

from lrpe_fairseq.experiments.commands import quickstart
from lrpe_fairseq.experiments.commands.quickstart import perplexities
from lrpe_fairseq.experiments.families import load_named, runs
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.report import frame

COUNTS = json.loads((ROOT / "results" / "ngrams.json").read_text(encoding="utf-8"))


def test_a_visitor_trains_the_published_rows_and_leaves_their_run_files_alone():
    own, published = quickstart.planned(3), runs(load_named("quickstart"), "small", range(1, 4))
    assert [run.name for run in own] == [run.name for run in published]
    assert [run.command() for run in own] == [run.command() for run in published]
    assert not any(run.result.is_relative_to(ROOT / "results") for run in own)
    assert all(run.finished() for run in published if run.seed == 1)


def test_every_row_but_base_is_better_than_trigrams_and_one_has_less_than_five():
    views = frame.results(ROOT).headlines(frame.results(ROOT).sheets_of("quickstart")[0])
    means = {(view.column.attention, row): view.mean(row) for view in views for row in view.rows}
    assert len(means) == 4
    learned = [value for (_, row), value in means.items() if row != "Base"]
    assert max(learned) < COUNTS["3"]
    assert min(learned) < 5


def by_definition(train, test, longest):
    """Witten and Bell's estimates, token by token."""
    below, found = [1 / len(set(train))] * len(test), {}
    for n in range(1, longest + 1):
        grams = Counter(tuple(train[i : i + n]) for i in range(len(train) - n + 1))
        for place in range(n - 1, len(test)):
            *context, _ = gram = tuple(test[place - n + 1 : place + 1])
            seen = {g: count for g, count in grams.items() if g[:-1] == tuple(context)}
            if seen:
                mixed = grams[gram] + len(seen) * below[place]
                below[place] = mixed / (sum(seen.values()) + len(seen))
        found[n] = float(np.exp(-np.log(below).mean()))
    return found


def test_counts_are_those_of_witten_and_bell():
    train = np.random.default_rng(1).integers(0, 6, 300).tolist()
    test = np.random.default_rng(2).integers(0, 7, 40).tolist()  # with a symbol that training lacks
    expected = by_definition(train, test, 4)
    assert perplexities(train, test, 4) == pytest.approx(expected, rel=1e-12)
