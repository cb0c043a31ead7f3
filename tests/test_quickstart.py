"""The quickstart: its trainings, its published runs, and the n-grams beside them."""

from lrpe_fairseq.experiments.commands import quickstart
from lrpe_fairseq.experiments.families import load_named, runs
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.runs import read_run
from lrpe_fairseq.experiments.report.results import results_of

NGRAMS = ROOT / "results" / "runs" / "ngrams" / "pydoc-char-1228800-in-128.json"
COUNTS = read_run(NGRAMS)["metrics"]["test"]["blocks"]


def test_a_visitor_trains_the_published_rows_and_leaves_their_run_files_alone():
    own, published = quickstart.planned(3), runs(load_named("quickstart"), "small", range(1, 4))
    assert [run.name for run in own] == [run.name for run in published]
    assert [run.command() for run in own] == [run.command() for run in published]
    assert not any(run.result.is_relative_to(ROOT / "results") for run in own)
    assert all(run.finished() for run in published if run.seed == 1)


def test_every_row_but_base_is_better_than_trigrams_and_one_has_less_than_five():
    views = results_of(ROOT).headlines(results_of(ROOT).sheets_of("quickstart")[0])
    means = {(view.column.attention, row): view.mean(row) for view in views for row in view.rows}
    assert len(means) == 4
    learned = [value for (_, row), value in means.items() if row != "Base"]
    assert max(learned) < COUNTS["ppl-3"]
    assert min(learned) < 5


def test_the_record_of_a_text_says_which_model_wrote_it(monkeypatch):
    run = next(run for run in quickstart.planned(1) if run.label == "FoX")
    measured = {"metrics": {"test": {"blocks": {"ppl": 4.0}}}}
    monkeypatch.setattr(quickstart, "read_run", lambda path: measured)
    monkeypatch.setattr(quickstart, "sample", lambda run: "a text")
    record = quickstart.sample_record(run)
    assert (record["row"], record["seed"], record["test_perplexity"]) == ("FoX", 1, 4.0)
    assert record["text"] == "a text"
    assert {"commit", "versions", "hardware", "kernels"} <= record.keys()
