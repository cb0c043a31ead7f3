"""The text of an option is a literal of bounded size; nothing larger is computed."""

import ast
import time
import tracemalloc

import pytest

from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.literals import LONGEST_TEXT, MOST_ITEMS, evaluate_literal

ITEMS, DEEP = "has more than 100,000 items", "is nested too deeply"
HUGE = {
    "[0] * 10000000000": ITEMS,
    "10000000000 * [0]": ITEMS,
    "'x' * 10**10": "not a literal",
    "'x' * 10000000000": ITEMS,
    "b'x' * 10000000000": ITEMS,
    "(1, 2) * 99999 * 99999 * 99999": ITEMS,
    "[[0] * 9999] * 9999": ITEMS,
    "[[[[0] * 99] * 99] * 99] * 99": ITEMS,
    "{'a': [0] * 99999} , {'a': [0] * 99999}": ITEMS,
    "('x' * 60000) + ('y' * 60000)": ITEMS,
    "[] * 10000000000 + [0] * 10000000000": ITEMS,
    "[" + "0," * 9000 + "]": "longer than 10,000 characters",
    "1" * (LONGEST_TEXT + 1): "longer than 10,000 characters",
    "1" * 5000: "not an expression",  # Python reads no more than 4,300 digits
    "-" * 9000 + "1": DEEP,
    "1" + "+1" * 4500: DEEP,
    "[" * 300 + "]" * 300: "not an expression",
    "8,,16": "not an expression",
    "8\0": "not an expression",
    "1 / 0": "arithmetic has no result",
    "'a' - 1": "arithmetic has no result",
    "{[1]}": "arithmetic has no result",
    "{**{1: 2}}": "not a literal",
}


@pytest.mark.parametrize(("text", "reason"), HUGE.items(), ids=range(len(HUGE)))
def test_a_text_that_asks_for_memory_or_has_no_value_is_refused_before_it_is_computed(text, reason):
    tracemalloc.start()
    begun = time.perf_counter()
    with pytest.raises(ChoiceError, match=reason) as refused:
        evaluate_literal(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24
    assert time.perf_counter() - begun < 5
    assert len(str(refused.value)) < 200
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        *("[(512, 3)] * 20", "{1, 2}", "{'a': (1,), 'b': []}", "-1", "+1.5", "1 + 2 * 3 / 4"),
        *("[0] * 0", "[0] * -5", "2 * 'ab'", "True", "None", "'a' + 'b'", "()", "{}"),
        f"[0] * {MOST_ITEMS // 2}",
    ],
)
def test_a_literal_has_the_value_of_python(text):
    assert evaluate_literal(text) == eval(text)
    if "*" not in text and "+" not in text:
        assert evaluate_literal(text) == ast.literal_eval(text)


def test_only_a_text_is_evaluated():
    with pytest.raises(TypeError, match="expected text, got int"):
        evaluate_literal(3)
