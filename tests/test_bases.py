"""The configuration of a run is stored as differences from a base that never changes."""

import json
from multiprocessing import get_context

import pytest

from lrpe_fairseq.experiments.records import bases, runs
from lrpe_fairseq.experiments.records.files import ROOT, write_json
from lrpe_fairseq.experiments.records.runs import read_run, read_runs, write_run
from tests.trial import a_record

FIRST = {"model._name": "lrpe_lm", "optimization.max_update": 900, "optimization.clip_norm": 1}


def written(path, config, **changes):
    """What the file of a run with these options contains."""
    write_run(path, a_record(config=config, **changes))
    assert read_run(path)["config"] == config
    return json.loads(path.read_text())


def test_a_run_is_stored_as_its_differences_from_a_base_that_stays(tmp_path):
    assert written(tmp_path / "a.json", FIRST)["config"] == {}
    base = tmp_path / "base-small.json"
    before = base.read_bytes()
    other = {"model._name": "lrpe_lm", "optimization.clip_norm": 1.0, "task.seed": 2}
    found = written(tmp_path / "b.json", other)
    assert found["config"] == {"optimization.clip_norm": 1.0, "task.seed": 2}
    assert found["without"] == ["optimization.max_update"]
    again = read_run(tmp_path / "b.json")["config"]
    assert json.dumps(again["optimization.clip_norm"]) == "1.0"
    assert base.read_bytes() == before
    assert read_run(tmp_path / "a.json")["config"] == FIRST
    assert written(tmp_path / "c.json", other, scale="paper")["config"] == {}
    assert base.read_bytes() == before


def test_an_evaluation_by_hand_has_its_whole_configuration(tmp_path):
    hand = {"experiment": runs.BY_HAND, "scale": runs.BY_HAND}
    assert written(tmp_path / "run.json", FIRST, **hand)["config"] == FIRST
    assert not list(tmp_path.glob("base-*"))


def test_a_base_that_is_missing_or_was_edited_is_refused_in_one_sentence(tmp_path):
    path, base = tmp_path / "run.json", tmp_path / "base-small.json"
    written(path, FIRST)
    edits = {
        json.dumps(FIRST | {"optimization.max_update": 901}): "config_hash does not agree",
        "{": r"base-small\.json is not valid JSON",
    }
    for text, said in edits.items():
        base.write_text(text)
        with pytest.raises(ValueError, match=rf"run\.json is not a run file: .*{said}") as refused:
            read_run(path)
        assert "\n" not in str(refused.value)
    base.unlink()
    with pytest.raises(ValueError, match=r"its base base-small\.json is missing: restore it"):
        read_run(path)


def test_processes_that_write_the_first_base_at_once_agree_on_one(tmp_path, monkeypatch):
    fork = get_context("fork")
    both = fork.Barrier(2)

    def write_together(*arguments, **options):
        write_json(*arguments, **options)
        both.wait(60)  # no process has a base yet

    monkeypatch.setattr(bases, "write_json", write_together)
    configs = {tmp_path / f"{number}.json": FIRST | {"task.seed": number} for number in (1, 2)}
    writers = [
        fork.Process(target=write_run, args=(path, a_record(config=config)))
        for path, config in configs.items()
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert {path: read_run(path)["config"] for path in configs} == configs
    assert {path.name for path in tmp_path.iterdir()} == {"1.json", "2.json", "base-small.json"}


def test_a_base_needs_no_hard_links_and_stays_as_it_is(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(bases.os, "link", refused)
    write_run(tmp_path / "a.json", a_record(config=FIRST))
    assert json.loads((tmp_path / "base-small.json").read_text()) == FIRST
    write_json(tmp_path / "part", {})
    bases._become(tmp_path / "part", tmp_path / "base-small.json")
    assert read_run(tmp_path / "a.json")["config"] == FIRST


def test_every_run_file_of_this_repository_is_whole_and_passes():
    assert read_runs(ROOT / "results" / "runs")
    for path in (ROOT / "results" / "runs").rglob("*.json"):
        if not path.name.startswith(bases.PREFIX):
            assert b'"config_hash"' in path.read_bytes(), path
