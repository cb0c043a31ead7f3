"""The contest counts rounds in turn and compares within a round."""

import pytest
import torch

from benchmarks import (
    attention,
    decays,
    decoding,
    phases,
)
from benchmarks.timing import Timing, contest
from lrpe_fairseq.attention import linear


def test_contestants_run_in_turn_and_warm_up_rounds_do_not_count():
    calls = []
    result = contest(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=2
    )
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


def test_decays_are_compared_with_attention_without_one():
    rows = decays.measure("cpu", torch.float32, 1, lengths=(32, 64), tokens=128)
    assert [(r["length"], r["decay"]) for r in rows] == [
        (n, kind) for n in (32, 64) for kind in decays.KINDS
    ]
    assert all(r["speed"] == 1.0 for r in rows if r["decay"] == "none")
    assert all(r["flatness"] == 1.0 for r in rows if r["length"] == 32)


def test_a_speed_of_other_gradients_of_gates_is_not_shown(monkeypatch):
    decays.check()
    other = decays.linear_attention_naive

    def wrong(*rows, log_decay, **options):
        return other(*rows, log_decay=log_decay.detach() + 0 * log_decay, **options)

    monkeypatch.setattr(decays, "linear_attention", wrong)
    with pytest.raises(AssertionError):
        decays.check()


def test_the_state_of_a_linear_decoder_does_not_grow_and_that_of_a_softmax_one_does():
    rows = decoding.measure("cpu", rounds=1, lengths=(4, 40))
    sizes = {(r["contestant"], r["length"]): r["state_mb"] for r in rows}
    assert sizes["linear", 4] == sizes["linear", 40] > 0
    assert sizes["softmax", 40] > 5 * sizes["softmax", 4]
    assert sizes["softmax", 40] >= 6 * 2 * 40 * 4 * 512 * 4 / 1e6
    flat = {(r["contestant"], r["length"]): r["flatness"] for r in rows}
    assert flat["linear", 4] == flat["softmax", 4] == 1.0


def test_a_decoder_that_says_something_else_token_by_token_is_not_timed(monkeypatch):
    decoding.check()
    monkeypatch.setattr(
        linear, "_advance_by_one", lambda q, k, v, before, *rest, **options: (v, None, before)
    )
    with pytest.raises(AssertionError):
        decoding.check()


def test_phases_of_rounded_angles_are_off_and_ours_are_not():
    rows = {(r["position"], r["dtype"]): r for r in phases.measure("cpu", (512, 1_000_000))}
    assert rows[1_000_000, "float32"]["ours"] < 1e-7
    assert rows[1_000_000, "float32"]["float32_angle"] > 1e-2
    assert rows[512, "bfloat16"]["own_angle"] > 1
    assert rows[1_000_000, "float16"]["own_angle"] is None
