"""Single rows of a benchmark measured again: ``python -m benchmarks.run table9 --encodings``."""

import json
from argparse import Namespace

import pytest

from benchmarks import run

STATED = {"hardware": {"cpu": "A"}, "versions": {"torch": "2"}, "threads": 2, "dtype": "float32"}


def row(name: str, speed: float) -> dict:
    timed = {"seconds": 0.5, "tokens_per_second": 1024.0}
    return {"attention": "linear", "encoding": name, "relative_speed": speed, **timed}


def figures(commit: str, **stated: object) -> dict:
    return {"part": "table9", "commit": commit, **STATED, **stated}


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Options of a command whose results are in a temporary folder with one finished part."""
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    (tmp_path / "cpu").mkdir()
    before = {**figures("old"), "rows": [row("rope", 1.0), row("cape-alibi", 0.3)]}
    (tmp_path / "cpu" / "table9.json").write_text(json.dumps(before))
    return Namespace(device="cpu", tokens=512)


def test_new_rows_replace_the_old_ones_and_name_their_commit(options):
    rows = [row("cape-alibi", 0.8), row("ape", 0.9)]
    merged = run.merged(run.earlier(options, figures("new")), {**figures("new"), "rows": rows})
    assert merged["commit"] == "old"
    assert merged["rows"] == [
        row("rope", 1.0),
        {**row("cape-alibi", 0.8), "commit": "new"},
        {**row("ape", 0.9), "commit": "new"},
    ]


@pytest.mark.parametrize(
    ("stated", "tokens", "named"),
    [({"hardware": {"cpu": "B"}}, 512, "hardware"), ({}, 1024, r"tokens \(512\)")],
)
def test_rows_of_other_conditions_are_refused_before_they_are_measured(
    options, stated, tokens, named
):
    options.tokens = tokens
    with pytest.raises(SystemExit, match=f"differs in {named}; measure the whole part"):
        run.earlier(options, figures("new", **stated))
