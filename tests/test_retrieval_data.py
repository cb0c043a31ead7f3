"""data-prep/retrieval: pairs of texts, their solver, and what does not solve them."""

import hashlib
import itertools

import numpy as np
import pytest

from tests.test_data_prep import load

retrieval = load("retrieval")
RECIPE = retrieval.Recipe(sizes={"train": 300, "valid": 200, "test": 200})


@pytest.fixture(scope="module")
def made():
    return retrieval.generate(RECIPE, 1)


def pairs(made):
    for examples in made.values():
        yield from zip(examples.inputs, examples.seconds, examples.labels, strict=True)


def source_of(text):
    """The only source in which every letter of a text may follow the one before."""
    known = retrieval.sources(1)
    bigrams = list(itertools.pairwise(text))
    fits = [n for n, own in enumerate(known) if all(b in own[:, a] for a, b in bigrams)]
    [found] = fits
    return found


def test_the_sources_of_both_texts_give_every_class(made):
    for first, second, label in pairs(made):
        assert (source_of(first) == source_of(second)) == label


def test_letters_are_equally_frequent_in_every_source_so_their_counts_are_at_chance(made):
    for own in retrieval.sources(1):
        for follower in own:
            assert sorted(follower) == list(range(retrieval.LETTERS))
    train, test = made["train"], made["test"]

    def distances(examples):
        rows = zip(examples.inputs, examples.seconds, strict=True)
        counted = [[np.bincount(t, minlength=26) / len(t) for t in pair] for pair in rows]
        return np.array([np.abs(a - b).sum() for a, b in counted])

    # the best threshold on the distance of the two distributions of letters
    found, labels = distances(train), np.array(train.labels)
    best = max(found, key=lambda limit: ((found < limit) == labels).mean())
    right = ((distances(test) < best) == np.array(test.labels)).mean()
    assert abs(right - 0.5) < 4 * np.sqrt(0.25 / len(test.labels))


def test_lengths_classes_and_sizes_are_those_of_the_recipe_and_the_manifest(made, tmp_path):
    lengths = {len(text) for first, second, _ in pairs(made) for text in (first, second)}
    assert (min(lengths), max(lengths)) == (64, 128)
    share = np.mean([label for *_, label in pairs(made)])
    assert abs(share - 0.5) < 4 * np.sqrt(0.25 / 700)
    found = retrieval.prepare(tmp_path, recipe=RECIPE)
    assert {s: own["examples"] for s, own in found["splits"].items()} == dict(RECIPE.sizes)
    assert (found["classes"], found["dictionary"]["symbols"]) == (2, 26)


def test_the_pairs_are_the_same_on_every_machine(made):
    content = repr([list(pair) for pair in pairs(made)]).encode()
    assert hashlib.sha256(content).hexdigest()[:16] == CHECKSUM


CHECKSUM = "3e8bbef1fd8e3eab"
