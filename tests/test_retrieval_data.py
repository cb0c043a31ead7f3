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


def follows():
    """For every source and letter, which letters follow it, bool."""
    known = retrieval.sources(1)
    follows = np.zeros((retrieval.SOURCES, retrieval.LETTERS, retrieval.LETTERS), bool)
    for source, letter in itertools.product(*map(range, follows.shape[:2])):
        follows[source, letter, known[source, :, letter]] = True
    return follows


FOLLOWS = follows()


def source_of(text):
    """The source whose followers are the most frequent in a text."""
    return FOLLOWS[:, text[:-1], text[1:]].sum(1).argmax()


def test_the_sources_of_both_texts_give_every_class(made):
    for first, second, label in pairs(made):
        assert (source_of(first) == source_of(second)) == label


def test_counts_of_letters_say_nothing_of_the_source(made):
    for first, second, _ in pairs(made):
        for text in (first, second):
            assert set(np.bincount(text, minlength=26)) == {len(text) // 26}


def test_lengths_classes_and_sizes_are_those_of_the_recipe_and_the_manifest(made, tmp_path):
    lengths = {len(text) for first, second, _ in pairs(made) for text in (first, second)}
    assert (min(lengths), max(lengths)) == (78, 130)
    share = np.mean([label for *_, label in pairs(made)])
    assert abs(share - 0.5) < 4 * np.sqrt(0.25 / 700)
    found = retrieval.prepare(tmp_path, recipe=RECIPE)
    assert {s: own["examples"] for s, own in found["splits"].items()} == dict(RECIPE.sizes)
    assert (found["classes"], found["dictionary"]["symbols"]) == (2, 26)


def test_the_pairs_are_the_same_on_every_machine(made):
    content = repr([list(pair) for pair in pairs(made)]).encode()
    assert hashlib.sha256(content).hexdigest()[:16] == CHECKSUM


CHECKSUM = "df9ac26a07a0fe51"
