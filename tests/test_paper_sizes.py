"""The papers' configurations train whole batches with their whole vocabularies, on generated data.

Minutes of one core and up to 10 GB each. Of the configurations with a row in
results/bench/paper-configs.json one of each size is trained here: the corpora of the others differ,
and the data here are random. ``python -m benchmarks.paper_configs NAME`` trains any of them.
"""

import pytest

from benchmarks import paper_configs
from benchmarks.paper_configs import PAPERS
from lrpe_fairseq.experiments.families import load_named, runs
from lrpe_fairseq.experiments.records.files import read_json
from lrpe_fairseq.experiments.runner import arithmetic

PROGRAM = 0.5e9
"""Bytes of Python with torch and fairseq."""
OF_TEXT = ("table2", "table3", "table4", "table8")
OF_TEXT += ("tmlr-table1-pretrain", "tmlr-table1", "tmlr-table2")


ROWS = read_json(paper_configs.TARGET)["rows"]
OF_A_SIZE = {(row["folder"], row["arithmetic"]): row["name"] for row in reversed(ROWS)}
MEASURED = [row["name"] for row in ROWS if row["name"] in OF_A_SIZE.values()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MEASURED)
def test_a_paper_configuration_trains_two_updates_of_its_batch(name):
    paper = PAPERS[name]
    found = paper_configs.two_updates(paper)
    assert found["updates"] == 2
    shape = arithmetic.shape_of(paper_configs.options_of(paper), paper.words)
    assert found["parameters"] == pytest.approx(shape.parameters, rel=0.02)
    expected = found["arithmetic"] + PROGRAM
    assert expected / 1.5 < found["peak"] < expected * 1.5


def test_every_configuration_of_the_papers_tables_of_text_is_among_them():
    used = {
        (run.configs, run.config)
        for name in OF_TEXT
        for run in runs(load_named(name).at("paper"), "paper", [1])
    }
    assert used == {(paper.folder, paper.name) for paper in PAPERS.values()}


def test_every_paper_configuration_was_measured():
    assert [row["name"] for row in ROWS] == [*PAPERS]


@pytest.mark.parametrize("name", PAPERS)
def test_no_paper_configuration_stores_the_logits(name):
    options = paper_configs.options_of(PAPERS[name])
    of_words = options["task._name"] != "sentence_prediction"
    assert options["criterion._name"].startswith("lrpe_") == of_words
