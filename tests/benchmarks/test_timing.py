"""The contest counts rounds in turn and compares within a round."""

import pytest
import torch

from benchmarks import attention, decoding, timing
from benchmarks.timing import Timing, contest


def test_contestants_run_in_turn_and_warm_up_rounds_do_not_count():
    calls = []
    result = contest(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=2
    )
    assert calls == ["a", "b"] * 5
    assert [len(t.seconds) for t in result.values()] == [3, 3]


def test_untimed_calls_settle_a_contestant_before_each_timed_one():
    calls = []
    contest({"a": lambda: calls.append("a")}, rounds=2, warmup=0, settle=2)
    assert len(calls) == 2 * (2 + 1)


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    slow, fast = Timing((2.0, 40.0, 6.0)), Timing((1.0, 10.0, 3.0))
    assert slow.ratio(fast) == 2.0
    assert fast.ratio(slow) == 0.5
    assert slow.median == 6.0
    assert slow.spread == pytest.approx(38 / 6)


def test_a_speed_up_of_something_else_is_not_shown(monkeypatch):
    attention.check()
    monkeypatch.setattr(attention, "linear_attention", lambda q, k, v, causal: q * k * v)
    with pytest.raises(AssertionError):
        attention.check()


def test_a_row_states_the_speed_up_over_the_contestant(monkeypatch):
    clock = iter([1.0, 3.0, 1.0, 3.0])
    monkeypatch.setattr(timing, "_time", lambda run: next(clock))
    timings = contest({"chunked": lambda: None, "sdpa": lambda: None}, rounds=2, warmup=0)
    row = attention.row(512, 4096, "sdpa", timings, "chunked")
    assert row["speed_up"] == 3.0
    assert row["tokens_per_second"] == pytest.approx(4096 / 3)


def test_every_contestant_makes_a_step():
    for form in (attention.chunked, attention.naive, attention.sdpa):
        attention.step(form, 8, 16, "cpu", torch.float32)()


def test_bidirectional_rows_compare_with_sdpa_at_every_length():
    rows = attention.measure_bidirectional("cpu", torch.float32, rounds=1, lengths=(16, 32))
    assert [(r["length"], r["contestant"]) for r in rows] == [
        (n, name) for n in (16, 32) for name in ("linear", "sdpa")
    ]
    assert all(r["speed_up"] == 1.0 for r in rows if r["contestant"] == "linear")


def test_the_state_of_a_linear_decoder_does_not_grow_and_that_of_a_softmax_one_does():
    rows = decoding.measure("cpu", rounds=1, lengths=(4, 40))
    sizes = {(r["contestant"], r["length"]): r["state_mb"] for r in rows}
    assert sizes["linear", 4] == sizes["linear", 40] > 0
    assert sizes["softmax", 40] == pytest.approx(10 * sizes["softmax", 4], rel=0.01)
    assert sizes["softmax", 4] == pytest.approx(6 * 2 * 4 * 4 * 512 * 4 / 1e6, rel=0.01)
