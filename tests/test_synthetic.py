"""data-prep/synthetic: answers of hand-built solvers, chance, statistics, splits and files."""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from numpy.random import RandomState

from lrpe_fairseq.experiments.data import retrieval, synthetic
from lrpe_fairseq.experiments.data.synthetic import PAD, TASKS, Recipe, Split
from lrpe_fairseq.experiments.records.console import UserError

Tokens = tuple[str, ...]


@cache
def generated(task):
    return synthetic.generate(Recipe(task, "tiny"))


def drawn(task, count=400, multiple=0, scale="small", **keywords):
    draw = synthetic.sampler(Recipe(task, scale), Split(count, multiple, keywords))
    rng = RandomState(7)
    return [draw(rng) for _ in range(count)]


# Each reads the tokens up to and including one place, as a causal model does, and answers there.


def copied(seen):
    return seen[len(seen) - seen.index("separator")]


def reversed_(seen):
    return seen[2 * seen.index("separator") - len(seen)]


def recalled(seen):
    """The token after the last earlier occurrence of the key that has a value."""
    found = [b for a, b in itertools.pairwise(seen) if a == seen[-1] and b[0] == "v"]
    return found[-1] if found else ""


def remembered(seen):
    writes = [n for n in range(0, len(seen) - 1, 2) if seen[n] == "w"]
    return seen[writes[-1] + 1]


def counted(seen):
    start = len(seen) - 1 - seen[::-1].index("reset")
    return str(seen[start:].count("mark"))


def width_of(seen):
    return 1 + next(n for n, token in enumerate(seen[1:]) if token != synthetic.BLANK)


def at_the_offset(seen):
    width, (up, right) = width_of(seen), synthetic.OFFSETS[seen[0]]
    row, column = divmod(len(seen) - 1, width)
    return seen[(row - up) * width + (column + right) % width]


def hidden_digits(seen, fact, question):
    """The next digit of the value behind ``fact``, after ``question`` and digits given already."""
    given = len(seen) - 1 - (len(seen) - 1 - seen[::-1].index(question[-1]))
    return values_after(seen, fact)[given]


def values_after(seen, fact):
    """The tokens that follow the first occurrence of ``fact``."""
    size = len(fact)
    start = next(n for n in range(len(seen)) if seen[n : n + size] == fact)
    return seen[start + size :]


def passkey_read(seen):
    return hidden_digits(seen, ("passkey",), ("passkey?",))


def key_read(seen):
    key = seen[seen.index("value-of?") + 1]
    return hidden_digits(seen, ("value-of", key), (key,))


def variable_followed(seen):
    asked = name = seen[seen.index("get?") + 1]
    copies = {seen[n + 1]: seen[n + 2] for n, token in enumerate(seen) if token == "copy"}
    while name in copies:
        name = copies[name]
    return hidden_digits(seen, ("set", name), (asked,))


SOLVERS: dict[str, Callable[[Tokens], str]] = {
    "copy": copied,
    "reverse": reversed_,
    "mqar": recalled,
    "mqrar": recalled,
    "flip-flop": remembered,
    "counting": counted,
    "grid": at_the_offset,
    "passkey": passkey_read,
    "keys": key_read,
    "variables": variable_followed,
}


def accuracy(samples, answer):
    right = [
        answer(sample.inputs[: place + 1]) == target
        for sample in samples
        for place, target in enumerate(sample.targets)
        if target != PAD
    ]
    return sum(right) / len(right)


@pytest.mark.parametrize("task", TASKS)
def test_a_hand_built_solver_is_right_everywhere_and_a_constant_answer_at_chance(task):
    for samples in generated(task).values():
        assert accuracy(samples, SOLVERS[task]) == 1
    samples = drawn(task)
    answers = Counter(t for sample in samples for t in sample.targets if t != PAD)
    possible = TASKS[task].answers(synthetic.SCALES["small"])
    assert set(answers) == set(possible)
    chance, count = 1 / len(possible), answers.total()
    for constant in possible:
        found = accuracy(samples, lambda seen, constant=constant: constant)
        # tokens of a flip-flop sample repeat one bit, so the error is that of the samples
        error = math.sqrt(chance * (1 - chance) / min(count, 2 * len(samples)))
        assert found == pytest.approx(chance, abs=4 * error)


@pytest.mark.parametrize("task", synthetic.SCALES["many"].lengths)
def test_samples_of_scale_many_have_four_times_the_keys(task):
    few, many = (drawn(task, 100, multiple=1, scale=scale) for scale in ("small", "many"))
    assert accuracy(many, SOLVERS[task]) == 1
    asked = [[sum(t != PAD for t in s.targets) for s in samples] for samples in (few, many)]
    assert [(min(counts), max(counts)) for counts in asked] == [(4, 8), (16, 32)]


def test_a_task_that_a_scale_lacks_is_refused():
    with pytest.raises(UserError, match="--scale many is for mqar and mqrar: leave it out"):
        Recipe("copy", "many")


@pytest.mark.parametrize("task", TASKS)
def test_splits_differ_have_their_lengths_and_only_symbols_of_the_dictionary(task):
    recipe, splits = Recipe(task, "tiny"), generated(task)
    every = [sample for samples in splits.values() for sample in samples]
    distinct = [len({sample.inputs for sample in samples}) for samples in splits.values()]
    assert len({sample.inputs for sample in every}) == sum(distinct)
    words = {
        "copy": lambda t: (t - 1) // 2,
        "reverse": lambda t: (t - 1) // 2,
        "grid": lambda t: t // recipe.sizes.width - 1,
    }.get(task, lambda t: t)
    length = {name: {words(len(s.inputs)) for s in samples} for name, samples in splits.items()}
    tests = {name: split for name, split in recipe.splits.items() if split.multiple}
    assert {split.multiple for split in tests.values()} == set(TASKS[task].multiples)
    for name, split in tests.items():
        assert length[name] == {split.multiple * recipe.length}
    assert max(length["train"]) <= recipe.length
    assert len(length["train"]) > 2  # mixed, so that no lag or place is constant
    assert {t for s in every for t in (*s.inputs, *s.targets)} - {PAD} <= set(recipe.vocabulary)
    assert all(len(sample.inputs) == len(sample.targets) for sample in every)
    seen = max(len(sample.inputs) for sample in splits["train"])
    for name in (name for name, split in tests.items() if split.multiple > 1):
        for sample in splits[name]:  # scored beyond every sample of training only
            places = [place for place, target in enumerate(sample.targets) if target != PAD]
            assert min(places) >= seen


def test_the_gaps_of_mqar_follow_the_power_law():
    """One query: place g has the probability (g + 1)^(a - 1) over their sum."""
    rng = RandomState(3)
    found = Counter(synthetic.gaps(rng, 24, 1)[0] for _ in range(6000))
    weights = np.arange(1, 25) ** (0.01 - 1)
    for place, p in enumerate(weights / weights.sum()):
        assert found[place] / 6000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 6000))


@pytest.mark.parametrize("task", retrieval.TASKS)
@pytest.mark.parametrize("percent", [0, 25, 100])
def test_the_asked_fact_has_the_depth_of_its_split_and_nothing_else_moves(task, percent):
    depth = synthetic.DEPTHS[percent]
    first = {"passkey": "passkey", "keys": "value-of", "variables": "set"}[task]
    for sample in drawn(task, 40, multiple=4, depth=depth):
        tokens = sample.inputs
        words = [n for n, token in enumerate(tokens) if token in retrieval.SURROUNDINGS]
        value = tuple(t for t in sample.targets if t != PAD)
        facts = [n for n, token in enumerate(tokens) if token == first]
        skip = {"passkey": 1, "keys": 2, "variables": 2}[task]
        found = [n for n in facts if tokens[n + skip : n + skip + len(value)] == value]
        before = [sum(word < place for word in words) / len(words) for place in found]
        assert any(share == pytest.approx(depth, abs=0.51 / len(words)) for share in before)


@pytest.mark.parametrize("task", retrieval.TASKS)
def test_no_digit_occurs_twice_in_the_facts_of_a_long_text(task):
    for sample in drawn(task, 50, multiple=1):
        question = max(sample.inputs.index(q) for q in QUESTIONS if q in sample.inputs)
        given = [token for token in sample.inputs[:question] if token in retrieval.DIGITS]
        assert len(given) == len(set(given)) >= 4


QUESTIONS = ("passkey?", "value-of?", "get?")


def test_words_around_hidden_facts_follow_one_another():
    words = retrieval.surroundings(RandomState(1), 4000)
    followers = {first: {b for a, b in itertools.pairwise(words) if a == first} for first in words}
    assert len(followers) == retrieval.WORDS
    assert {len(after) for after in followers.values()} == {retrieval.FOLLOWERS}


@pytest.mark.parametrize("task", ["mqar", "mqrar"])
def test_every_key_is_asked_once_and_mqrar_assigns_as_many_values_again(task):
    for sample in drawn(task, 100, multiple=1) + drawn(task, 50, multiple=4):
        asked = [i for i, t in zip(sample.inputs, sample.targets, strict=True) if t != PAD]
        pairs = [(a, b) for a, b in itertools.pairwise(sample.inputs) if b[0] == "v"]
        keys = [key for key, _ in pairs if key[0] == "k"]
        assert sorted(asked) == sorted(set(keys))
        assert 4 <= len(asked) <= 8
        assert len(keys) == len(asked) * (2 if task == "mqrar" else 1)
        assert len({value for _, value in pairs}) == len(keys)  # no value twice


def test_random_fillers_are_neither_blanks_nor_keys_nor_values():
    given = synthetic.generate(Recipe("mqar", "tiny", fillers="random"))
    for samples in given.values():
        assert accuracy(samples, recalled) == 1
    used = Counter(token for sample in given["test4"] for token in sample.inputs)
    assert {token[0] for token in used} == {"k", "v", "n"}
    fillers = {token: n for token, n in used.items() if token[0] == "n"}
    assert len(fillers) == 8
    assert max(fillers.values()) < 1.5 * min(fillers.values())
    with pytest.raises(UserError, match="leave it out for copy"):
        Recipe("copy", "tiny", fillers="random")


def test_the_manifest_counts_samples_answers_and_chance(tmp_path):
    found = synthetic.prepare(tmp_path, Recipe("flip-flop", "tiny"))
    for split, samples in generated("flip-flop").items():
        targets = [t for s in samples for t in s.targets]
        counts = found["splits"][split]
        assert counts["samples"] == len(samples)
        assert counts["tokens"] == len(targets)
        assert counts["answers"] == len(targets) - targets.count(PAD)
        best = max(targets.count(bit) for bit in "01") / counts["answers"]
        assert counts["constant"] == pytest.approx(best, abs=1e-4)
    assert (found["chance"], found["length"]) == (0.5, 32)


def test_the_text_is_the_same_on_every_machine():
    """A numpy whose streams differ would make other data under the same name."""
    texts = {task: repr(list(generated(task).values())).encode() for task in TASKS}
    found = {task: hashlib.sha256(text).hexdigest()[:16] for task, text in texts.items()}
    assert found == CHECKSUMS


CHECKSUMS = {
    "copy": "86edf762cef03e2b",
    "reverse": "d5f13ef8932fb425",
    "mqar": "dd714152aa55056d",
    "mqrar": "56134b851f74197c",
    "flip-flop": "b68c75e001d3741b",
    "counting": "aa3d721e781e5c33",
    "grid": "3974351a0a650f0f",
    "passkey": "540bfedf57137ecd",
    "keys": "30f464c91bcc1ba6",
    "variables": "bb95badf18a64f77",
}
