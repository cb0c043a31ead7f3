"""The benchmark for a few minutes: order, deadline, failures, resumption, and its page."""

import json

import pytest
import torch

from benchmarks import attention, rivals, slot, tiles
from lrpe_fairseq.experiments.records import kernel_sources
from lrpe_fairseq.experiments.report import speed

TINY = slot.Setting("cpu", torch.float32, 1, **slot.TINY)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Measures given rows; returns the columns of those in the part steps."""

    def call(rows, *options):
        monkeypatch.setattr(slot, "rows", lambda setting: rows)
        words = ["slot", "--device", "cpu", "--tiny", "--out", str(tmp_path), *options]
        monkeypatch.setattr("sys.argv", words)
        slot.main()
        return json.loads((tmp_path / "cpu" / "steps.json").read_text())["rows"]

    return call


def row(name, measure, seconds=1.0):
    return slot.Row("steps", {"encoding": name}, measure, seconds)


def test_rows_are_written_at_once_failures_too_and_a_later_run_measures_what_is_missing(
    run, capsys
):
    def fails():
        raise RuntimeError("no kernel")

    def hangs():
        slot._give_up()

    def never():
        raise AssertionError("measured again")

    good, late = row("good", lambda: {"seconds": 2.0}), row("late", never, seconds=1e9)
    done = [{"encoding": "good", "seconds": 2.0},
            {"encoding": "bad", "failed": "RuntimeError: no kernel"}]  # fmt: skip
    rows = [good, row("bad", fails), late, row("slow", hangs)]
    assert run(rows, "--minutes", "0.5") == done
    assert "2 rows are missing" in capsys.readouterr().out
    rest = [row("good", never), row("bad", never), row("late", lambda: {"seconds": 3.0})]
    assert run(rest, "--resume") == [*done, {"encoding": "late", "seconds": 3.0}]
    assert run([good]) == done[:1]


def test_the_most_important_rows_come_first_and_none_twice():
    rows = slot.rows(TINY)
    assert [row.part for row in rows[:2]] == ["machine", "busy"]
    named = [(row.part, *row.key.values()) for row in rows]
    assert len(named) == len(set(named))
    steps = [row.key["encoding"] for row in rows if row.part == "steps"]
    assert list(dict.fromkeys(steps))[:4] == ["none", "stock", "rope", "lrpe-type1"]


@pytest.mark.parametrize("encoding", ["stock", "lrpe-type2"])
@pytest.mark.parametrize("part", ["steps", "roberta", "busy"])
def test_a_training_step_of_every_part_is_measured(part, encoding):
    key = {"attention": "softmax", "encoding": encoding, "length": 32}
    rows = (row for row in slot.rows(TINY) if row.part == part)
    (found,) = (row for row in rows if key.items() <= row.key.items())
    assert found.measure()["seconds"] > 0


@pytest.mark.parametrize("name", rivals.forms("cpu"))
def test_every_form_of_attention_equals_its_definition(name):
    assert rivals.error(rivals.forms("cpu")[name], "cpu", torch.float32) < 1e-5


def test_another_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(attention, "bidirectional", lambda q, k, v: q * k * v)
    slot.error_of.cache_clear()
    form = rivals.forms("cpu")["linear, full"]
    found = slot.compared(TINY, "linear, full", form, 64)
    slot.error_of.cache_clear()
    assert found.keys() == {"base", "failed"}


def test_a_tile_is_timed_in_turn_with_the_chosen_one():
    first = next(tiles.candidates())
    assert first[2:] == ("forward query key", (64, 8, 2))  # which an environment variable chooses
    assert tiles.timed(first, 64, 128, "cpu", torch.float32, 1)["seconds"] > 0


def test_overlapping_kernels_count_once():
    assert slot.union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)]) == 4.0


def test_the_page_shows_steps_of_a_gpu_and_no_older_figures(tmp_path):
    own = {"attention": "softmax", "encoding": "t5", "relative_speed": 0.5, "seconds": 1.0}
    for device, speeds in (("cpu", 1000.0), ("cuda", 2000.0)):
        rows = [{**own, "tokens_per_second": speeds}, {**own, "encoding": "rope"}]
        write(tmp_path / speed.RESULTS / device / "table9.json", rows)
    assert speed.trained(tmp_path, "softmax", "t5", 512) == speed.MISSING
    assert speed.trained(tmp_path, "linear", "t5", 512) == "–"
    speed.run_file.cache_clear()
    rows = [{**own, "length": 2048, "tokens_per_second": 9e5, "relative_speed": 0.9}]
    write(tmp_path / speed.RESULTS / "cuda" / "steps.json", rows)
    assert speed.trained(tmp_path, "softmax", "t5", 2048) == "900&nbsp;(0.90)"
    assert speed.trained(tmp_path, "softmax", "rope", 2048) == speed.MISSING
    assert speed.rate(tmp_path, "softmax", "t5", 2048) == pytest.approx(900)
    assert speed.rate(tmp_path, "softmax", "rope", 2048) is None


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": rows, "sources": kernel_sources.hashes()}))
