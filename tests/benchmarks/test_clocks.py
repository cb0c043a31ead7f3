"""The contest counts rounds in turn and compares within a round."""

from functools import partial

import pytest

from benchmarks import attention, decays, decoding
from benchmarks.timing import Timing, contest
from lrpe_fairseq.attention import linear


def test_contestants_run_in_turn_and_warm_up_rounds_do_not_count():
    calls = []
    contestants = {name: partial(calls.append, name) for name in "ab"}
    result = contest(contestants, rounds=3, warmup=2)
    assert calls == ["a", "b"] * 5
    assert [len(t.seconds) for t in result.values()] == [3, 3]


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    slow, fast = Timing((2.0, 40.0, 6.0)), Timing((1.0, 10.0, 3.0))
    assert slow.ratio(fast) == 2.0
    assert fast.ratio(slow) == 0.5
    assert slow.quartiles(fast) == (2.0, 3.0)
    assert Timing((3.0,)).quartiles(Timing((2.0,))) == (1.5, 1.5)
    assert slow.median == 6.0
    assert slow.spread == pytest.approx(38 / 6)


def test_a_speed_up_of_something_else_is_not_shown(monkeypatch):
    attention.check()
    monkeypatch.setattr(attention, "linear_attention", lambda q, k, v, causal: q * k * v)
    with pytest.raises(AssertionError):
        attention.check()


def test_a_speed_of_other_gradients_of_gates_is_not_shown(monkeypatch):
    decays.check()
    other = decays.linear_attention_naive

    def wrong(*rows, log_decay, **options):
        return other(*rows, log_decay=log_decay.detach() + 0 * log_decay, **options)

    monkeypatch.setattr(decays, "linear_attention", wrong)
    with pytest.raises(AssertionError):
        decays.check()


def test_a_decoder_that_says_something_else_token_by_token_is_not_timed(monkeypatch):
    decoding.check()
    monkeypatch.setattr(
        linear, "_advance_by_one", lambda q, k, v, before, *rest, **options: (v, None, before)
    )
    with pytest.raises(AssertionError):
        decoding.check()
