"""``scripts/eval_classifier.sh`` evaluates the splits of the data and checks all of them first."""

import pytest

from lrpe_fairseq.experiments.commands import evaluate


@pytest.fixture
def data(tmp_path):
    """Data like ImageNet's, which have no test split."""
    (tmp_path / "bin").mkdir()
    for split in ("train", "valid"):
        (tmp_path / "bin" / f"{split}.tsv").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("given", "splits"), [([], ["valid"]), (["--splits", "train", "valid"], ["train", "valid"])]
)
def test_the_default_splits_are_those_of_the_data(data, given, splits, monkeypatch):
    seen = []
    monkeypatch.setattr(evaluate, "evaluate_classifier", lambda *words: seen.append(words[2]))
    monkeypatch.setattr(evaluate, "_data_folder", lambda folder: folder)
    monkeypatch.setattr(evaluate, "report", lambda *_: None)
    assert evaluate.classifier(["a.pt", str(data), *given]) == 0
    assert seen == [splits]
