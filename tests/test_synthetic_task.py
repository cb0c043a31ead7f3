"""The task lrpe_synthetic: batches, metrics, counts, and input that it refuses."""

import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lrpe_fairseq.experiments.data import synthetic as data
from lrpe_fairseq.experiments.data.synthetic import Recipe
from lrpe_fairseq.tasks.synthetic import sums
from tests.end_to_end.commands import PLUGIN, built
from tests.test_transduction_task import PAD, one_epoch, sums_row_by_row

MODEL = (
    "--arch lrpe_lm_tiny --decoder-layers 1 --decoder-embed-dim 16 --decoder-input-dim 16 "
    "--decoder-output-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 "
    "--no-token-positional-embeddings --position-encoding rope --attention-type softmax --dropout 0"
)
TASK = f"--user-dir {PLUGIN} --task lrpe_synthetic --cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    dest = tmp_path_factory.mktemp("data") / "mqar"
    data.prepare(dest, Recipe("mqar", "tiny"))
    return dest / "bin"


@pytest.fixture(scope="module")
def task(folder):
    _, task, _ = built(folder, TASK, MODEL)
    task.load_dataset("valid")
    return task


CHOSEN = (0, 5, 9)


@pytest.fixture(scope="module")
def samples():
    """The samples of a batch, as they were generated."""
    every = data.generate(Recipe("mqar", "tiny"))["valid"]
    return [every[number] for number in CHOSEN]


@pytest.fixture(scope="module")
def batch(task):
    """The batch of these samples."""
    rows = task.dataset("valid")
    return rows.collater([rows[number] for number in CHOSEN])


def test_a_batch_has_the_tokens_and_answers_of_its_samples(task, batch, samples):
    words = task.source_dictionary
    net_input = batch["net_input"]
    for row, sample in enumerate(samples):
        length = len(sample.inputs)
        assert net_input["src_lengths"][row] == length
        assert [words[i] for i in net_input["src_tokens"][row, :length]] == list(sample.inputs)
        assert [words[i] for i in batch["target"][row, :length]] == list(sample.targets)


def test_a_batch_is_padded_on_the_right(batch, samples):
    for row, sample in enumerate(samples):
        length = len(sample.inputs)
        assert (batch["net_input"]["src_tokens"][row, length:] == PAD).all()
        assert (batch["target"][row, length:] == PAD).all()


def test_a_batch_counts_scored_tokens_and_all_tokens(batch, samples):
    assert batch["tokens"] == sum(len(sample.inputs) for sample in samples)
    scored = [answer for sample in samples for answer in sample.targets if answer != data.PAD]
    assert batch["ntokens"] == len(scored)


def test_an_answer_with_one_wrong_token_is_wrong_and_unscored_tokens_do_not_count():
    target = torch.tensor([[PAD, 4, 5], [6, PAD, 4]])
    given = torch.tensor([[9, 4, 5], [6, 2, 5]])
    found = sums(F.one_hot(given).float(), target, PAD)
    assert found == {"_answers": 4, "_correct": 3, "_exact": 1, "_samples": 2}


def test_training_and_validation_report_the_numbers_of_a_direct_computation(folder, tmp_path):
    options = (TASK, MODEL, "--criterion cross_entropy")
    text, logged, task, model = one_epoch(folder, tmp_path, *options)
    rows = task.dataset("valid")
    nll, right, answers, exact = sums_row_by_row(rows, model)
    assert logged["loss"] == pytest.approx(nll / answers / np.log(2), abs=2e-3)
    assert logged["token_accuracy"] == pytest.approx(right / answers, abs=1e-5)
    assert logged["answer_accuracy"] == pytest.approx(exact / len(rows), abs=1e-5)
    assert (logged["samples"], logged["answers"]) == (len(rows), answers)
    tokens = data.count(Recipe("mqar", "tiny"), folder.parent / "text")["splits"]["train"]["tokens"]
    found = re.search(r"epoch 001 \| loss .*\| wpb ([\d.]+)", text)
    assert float(found[1]) == pytest.approx(tokens / 8, abs=0.1)
