"""Single rows of a benchmark measured again: ``python -m benchmarks.run table9 --encodings``."""

import json
from argparse import Namespace

import pytest

from benchmarks import run

STATED = {"hardware": {"cpu": "A"}, "versions": {"torch": "2"}, "threads": 2, "dtype": "float32"}


def row(name: str, speed: float, seconds: float = 0.5) -> dict:
    timed = {"seconds": seconds, "tokens_per_second": 1024.0}
    return {"attention": "linear", "encoding": name, "relative_speed": speed, **timed}


def found(commit: str, *rows: dict, **stated: object) -> dict:
    return {"part": "table9", "commit": commit, **STATED, **stated, "rows": list(rows)}


@pytest.fixture
def options(tmp_path, monkeypatch) -> Namespace:
    """Options of a command whose results are in a temporary folder with one finished part."""
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    (tmp_path / "cpu").mkdir()
    before = found("old", row("rope", 1.0), row("cape-alibi", 0.3))
    (tmp_path / "cpu" / "table9.json").write_text(json.dumps(before))
    return Namespace(device="cpu")


def test_new_rows_replace_the_old_ones_and_name_their_commit(options):
    merged = run.merged(options, found("new", row("cape-alibi", 0.8), row("ape", 0.9)))
    assert merged["commit"] == "old"
    assert merged["rows"] == [
        row("rope", 1.0),
        {**row("cape-alibi", 0.8), "commit": "new"},
        {**row("ape", 0.9), "commit": "new"},
    ]


def test_rows_of_another_machine_are_refused(options):
    with pytest.raises(SystemExit, match="differs in hardware; measure the whole part"):
        run.merged(options, found("new", row("ape", 0.9), hardware={"cpu": "B"}))


def test_rows_of_steps_of_another_length_are_refused(options):
    with pytest.raises(SystemExit, match="differs in tokens; measure the whole part"):
        run.merged(options, found("new", row("ape", 0.9, seconds=1.0)))
