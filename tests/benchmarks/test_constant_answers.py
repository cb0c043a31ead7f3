"""The score of the most frequent class as every answer."""

import json

from benchmarks import constant_answers
from lrpe_fairseq.experiments.data.glue import TASKS
from lrpe_fairseq.experiments.records.files import ROOT


def test_the_most_frequent_class_has_its_share_and_a_correlation_of_0():
    tags = ["entailment", "not_entailment", "entailment", "entailment"]
    assert constant_answers.score(TASKS["RTE"], tags) == 75.0
    assert constant_answers.score(TASKS["CoLA"], ["1", "1", "0"]) == 0.0
    assert constant_answers.score(TASKS["STS-B"], ["5.0", "1.2"]) == 0.0


def test_only_whole_development_sets_are_scored(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constant_answers, "TARGET", tmp_path / "found.json")
    (tmp_path / "RTE").mkdir()
    lines = ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tentailment"]
    path = tmp_path / "RTE" / "dev.tsv"
    path.write_text("\n".join(lines) + "\n")
    constant_answers.main([str(tmp_path)])
    assert json.loads(constant_answers.TARGET.read_text()) == {}
    path.write_text("\n".join([lines[0], *lines[1:] * TASKS["RTE"].examples["valid"]]) + "\n")
    constant_answers.main([str(tmp_path)])
    assert json.loads(constant_answers.TARGET.read_text()) == {"RTE": 100.0}
    assert "RTE" in capsys.readouterr().out


def test_every_task_of_table_3s_mean_has_a_score():
    path = ROOT / "results" / "bench" / "constant-answers.json"
    assert set(json.loads(path.read_text())) >= {"CoLA", "SST-2", "MRPC", "STS-B", "RTE"}
