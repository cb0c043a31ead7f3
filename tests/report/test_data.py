"""``results/results.csv.gz``: every number of every run file, once."""

import csv
import io
import json
import re

import pytest

from lrpe_fairseq.experiments.report import data, docs
from lrpe_fairseq.experiments.report.results import results_of


def test_every_number_of_every_run_is_one_line(monkeypatch, tmp_path):
    runs = {
        "a/one.json": {"experiment": "a", "metrics": {"test": {"blocks": {"ppl": 2 / 3, "n": 7}}}},
        "a/two.json": {"experiment": "a", "seed": 2, "metrics": {"valid": {"x": {"ppl": 5.0}}}},
    }
    monkeypatch.setattr(data, "read_runs", lambda root: runs)
    lines = list(csv.DictReader(io.StringIO(data.pages(tmp_path)[data.FILE])))
    found = [
        (x["run"], x["seed"], x["split"], x["protocol"], x["metric"], x["value"]) for x in lines
    ]
    assert found == [
        ("a/one.json", "", "test", "blocks", "ppl", "0.66666667"),
        ("a/one.json", "", "test", "blocks", "n", "7"),
        ("a/two.json", "2", "valid", "x", "ppl", "5"),
    ]


def test_the_file_of_the_repository_has_as_many_numbers_as_the_run_files():
    stored = data.decompress((docs.ROOT / data.FILE).read_bytes())
    runs = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in (docs.ROOT / "results" / "runs").rglob("*.json")
        if not path.name.startswith("base")
    ]
    assert stored.count("\n") == 1 + sum(len(list(data.numbers(run))) for run in runs)


def test_equal_texts_are_equal_files():
    assert data.compress("a,b\n") == data.compress("a,b\n")
    assert data.decompress(data.compress("a,b\n")) == "a,b\n"


def test_a_stale_file_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(docs.PARTS, "data", data)
    monkeypatch.setattr(data, "read_runs", lambda root: {})
    (tmp_path / "results").mkdir()
    (tmp_path / data.FILE).write_bytes(data.compress("old\n"))
    assert docs.stale(tmp_path, ["data"]) == [data.FILE]
    docs.write(tmp_path, ["data"], dict)
    assert docs.stale(tmp_path, ["data"]) == []


def test_the_lines_of_pandas_in_the_index_print_the_means_of_a_column(monkeypatch, capsys):
    text = (docs.ROOT / "results" / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(docs.ROOT)
    names = {}
    exec(compile(block.replace("print(", "means = ("), "README.md", "exec"), names)
    view = results_of(docs.ROOT).column("extrapolation", "softmax-paired-2048")
    for row in ("RoPE", "stick-breaking"):
        assert names["means"]["softmax", row] == pytest.approx(view.mean(row))
    exec(compile(block, "README.md", "exec"), {})
    assert "stick-breaking" in capsys.readouterr().out
