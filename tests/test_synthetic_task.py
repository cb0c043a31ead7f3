"""The task lrpe_synthetic: batches, metrics, counts, and input that it refuses."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lrpe_fairseq.experiments.data import synthetic as data
from lrpe_fairseq.experiments.data.synthetic import Recipe
from lrpe_fairseq.tasks.synthetic import sums
from tests.end_to_end.commands import PLUGIN, built, run_here

PAD = 1
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


def test_a_batch_is_padded_on_the_right_and_counts_scored_and_all_tokens(task):
    samples = data.generate(Recipe("mqar", "tiny"))["valid"]
    rows = task.dataset("valid")
    batch = rows.collater([rows[n] for n in (0, 5, 9)])
    words, given = task.source_dictionary, batch["net_input"]
    for row, number in enumerate((0, 5, 9)):
        sample = samples[number]
        length = len(sample.inputs)
        assert given["src_lengths"][row] == length
        assert [words[i] for i in given["src_tokens"][row, :length]] == list(sample.inputs)
        assert [words[i] for i in batch["target"][row, :length]] == list(sample.targets)
        assert (given["src_tokens"][row, length:] == PAD).all()
        assert (batch["target"][row, length:] == PAD).all()
    chosen = [samples[n] for n in (0, 5, 9)]
    assert batch["tokens"] == sum(len(s.inputs) for s in chosen)
    assert batch["ntokens"] == sum(t != data.PAD for s in chosen for t in s.targets)


def test_an_answer_with_one_wrong_token_is_wrong_and_unscored_tokens_do_not_count():
    target = torch.tensor([[PAD, 4, 5], [6, PAD, 4]])
    given = torch.tensor([[9, 4, 5], [6, 2, 5]])
    found = sums(F.one_hot(given).float(), target, PAD)
    assert found == {"_answers": 4, "_correct": 3, "_exact": 1, "_samples": 2}


def test_training_and_validation_report_the_numbers_of_a_direct_computation(folder, tmp_path):
    log = tmp_path / "log.txt"
    run_here(
        "fairseq_cli.train", folder, TASK, MODEL, "--optimizer adam --lr 1e-2 --batch-size 32",
        "--max-epoch 1 --num-workers 0 --log-format simple --log-interval 1 --criterion",
        "cross_entropy --save-dir", tmp_path, "--log-file", log,
    )  # fmt: skip
    text = log.read_text()
    line = next(line for line in text.splitlines() if "valid on 'valid'" in line)
    logged = {name: float(v) for name, v in re.findall(r"(\w+) ([\d.]+)", line)}
    model, task, _ = built(folder, TASK, MODEL)
    model.load_state_dict(torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["model"])
    task.load_dataset("valid")
    rows = task.dataset("valid")
    nll, right, exact, answers = 0.0, 0, 0, 0
    for row in range(len(rows)):
        batch = rows.collater([rows[row]])
        with torch.no_grad():
            scores = model.eval()(**batch["net_input"])[0].log_softmax(-1)[0]
        scored = batch["target"][0].ne(PAD)
        target = batch["target"][0, scored]
        nll -= float(scores[scored].gather(1, target[:, None]).sum())
        hits = scores[scored].argmax(1).eq(target)
        right, exact, answers = (
            right + int(hits.sum()),
            exact + int(hits.all()),
            answers + len(hits),
        )
    assert logged["loss"] == pytest.approx(nll / answers / np.log(2), abs=2e-3)
    assert logged["token_accuracy"] == pytest.approx(right / answers, abs=1e-5)
    assert logged["answer_accuracy"] == pytest.approx(exact / len(rows), abs=1e-5)
    assert (logged["samples"], logged["answers"]) == (len(rows), answers)
    tokens = data.count(Recipe("mqar", "tiny"), folder.parent / "text")["splits"]["train"]["tokens"]
    found = re.search(r"epoch 001 \| loss .*\| wpb ([\d.]+)", text)
    assert float(found[1]) == pytest.approx(tokens / 8, abs=0.1)
