"""A model that diverged is recorded and shown as diverged, not as an error or as not run."""

import json
import math

import pytest
import torch

from lrpe_fairseq.experiments.commands import eval_classifier
from lrpe_fairseq.experiments.families import lm
from lrpe_fairseq.experiments.records import fairseq_log
from lrpe_fairseq.experiments.records.runs import first_number, read_run, write_run
from tests.test_experiments import INNER, VALID
from tests.trial import a_record

EVALUATED = "Evaluated 1,000 tokens in 1s\n{}Loss (base 2): {}, Perplexity: {}"
MESSAGE = "Message: 'skipping tokens with inf scores:'\n"
LOST = {"diverged": 1, "tokens": 1000}


@pytest.mark.parametrize(
    "output",
    [
        EVALUATED.format("", "5000.0000", "inf"),
        EVALUATED.format("", "inf", "inf"),
        EVALUATED.format("", "nan", "nan"),
        EVALUATED.format(MESSAGE, "5.0000", "32.00"),
        EVALUATED.format("", "600.0000", "4.1e180"),  # word perplexity 2 to the 1,200
    ],
)
def test_an_evaluation_that_is_not_finite_has_diverged(tmp_path, output):
    counts = {"tokens": 1000, "words_with_eos": 500}
    (tmp_path / "manifest.json").write_text(json.dumps({"splits": {"test": counts}}))
    log = tmp_path / "eval.log"
    log.write_text(output)
    assert lm.read_evaluation(log, tmp_path, "test") == LOST


@pytest.mark.parametrize("loss", ["3000.5", "nan", "inf"])
def test_a_masked_model_that_is_not_finite_has_diverged(tmp_path, loss):
    log = tmp_path / "eval.log"
    ppl = "nan" if loss == "nan" else "inf"
    log.write_text(f'| INFO | valid | {{"valid_loss": "{loss}", "valid_ppl": "{ppl}"}}')
    assert lm.read_validation(log, "valid") == {"diverged": 1}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_classifier_whose_logits_are_not_finite_has_diverged(tmp_path, value):
    logits = torch.zeros(4, 3)
    logits[1, 2] = value
    found = eval_classifier._measured(logits, torch.tensor([0, 2, 1, 0]))
    assert found == {"diverged": 1, "examples": 4}
    metrics = {"test": {"accuracy": found}}
    write_run(tmp_path / "run.json", a_record(metrics=metrics, protocol={"accuracy": "accuracy."}))


@pytest.mark.parametrize("exact", [1.58, 2.3251, 8.73672, 8.73748])
def test_a_masked_loss_is_that_of_the_more_exact_of_two_rounded_numbers(tmp_path, exact):
    log = tmp_path / "eval.log"
    log.write_text(f'| valid | {{"valid_loss": "{exact:.3f}", "valid_ppl": "{2**exact:.2f}"}}')
    found = lm.read_validation(log, "valid")
    assert found["ppl"] == pytest.approx(2**exact, rel=3.5e-4)
    assert found["loss"] == pytest.approx(exact, abs=5e-4 if exact < 3 else 2e-5)


@pytest.mark.parametrize(
    ("end", "lost"),
    [
        ("FloatingPointError: gradients are Nan/Inf", True),
        ("FloatingPointError: Minimum loss scale reached (0.0001). Try lowering the rate", True),
        ("grad_norm across the workers:\nrank   0 = nan\nrank   1 = nan", True),
        ("grad_norm across the workers:\nrank   0 = 1.50000000\nrank   1 = 1.60000000", False),
        ("RuntimeError: the disk is full", False),
    ],
)
def test_only_gradients_that_are_not_finite_end_a_diverged_training(tmp_path, end, lost):
    log = tmp_path / "train.log"
    log.write_text(f"{INNER.format(100, 10)}\nTraceback (most recent call last):\n{end}\n")
    assert fairseq_log.ended_not_finite(log) == lost


def test_a_diverged_run_has_a_run_file_and_a_curve_of_its_finite_points(tmp_path):
    log = tmp_path / "train.log"
    lines = [INNER.format(100, 10), VALID.format(80, 10), VALID.format("inf", 20)]
    log.write_text("\n".join([*lines, VALID.format("nan", 30)]))
    curve = fairseq_log.read_training_log(log).curve("valid_ppl")
    assert [point["updates"] for point in curve] == [10]
    run = a_record(metrics={"test": {"blocks": LOST}}, curve=curve)
    write_run(tmp_path / "run.json", run)
    assert read_run(tmp_path / "run.json") == run
    assert first_number(run["metrics"]) == "test blocks diverged"
