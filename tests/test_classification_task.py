"""The task and the criterion lrpe_classification."""

from __future__ import annotations

import math
import shutil
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.logging import metrics
from torch import nn
from torch.nn import functional as F

from lrpe_fairseq.criterions.classification import ClassificationCriterion, scores
from lrpe_fairseq.errors import Refusal
from lrpe_fairseq.experiments.data import corpus, examples
from lrpe_fairseq.experiments.data.examples import BYTES, Examples
from lrpe_fairseq.tasks.classification import ClassificationConfig, LRPEClassificationTask

PAD, FIRST = 1, 4
CLASSES = 3
SIZES = {"train": 50, "valid": 10, "test": 10}


def lengths_and_labels(split: str) -> Examples:
    rng = np.random.RandomState(len(split))
    rows = [rng.randint(0, 256, rng.randint(1, 20)).tolist() for _ in range(SIZES[split])]
    return Examples(rows, rng.randint(0, CLASSES, SIZES[split]).tolist())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Random bytes with classes: ``bin`` of data-prep."""
    dest = tmp_path_factory.mktemp("classes")
    steps = corpus.Steps(dest, "test", "bytes")
    splits = {split: lengths_and_labels(split) for split in SIZES}
    examples.prepare(steps, {}, lambda: splits, symbols=BYTES, classes=CLASSES)
    return dest / "bin"


@pytest.fixture(scope="module")
def paired(data, tmp_path_factory):
    """The same, with the inputs of the training set as second inputs of test, and so on."""
    folder = tmp_path_factory.mktemp("pairs") / "bin"
    shutil.copytree(data, folder)
    (folder / "input1").mkdir()
    shutil.copy(folder / "input0" / "dict.txt", folder / "input1")
    for kind in ("bin", "idx"):
        shutil.copy(folder / "input0" / f"test.{kind}", folder / "input1" / f"valid.{kind}")
    return folder


def task_of(folder: Path, split: str = "train", **options: object) -> LRPEClassificationTask:
    cfg = ClassificationConfig(
        **{"data": str(folder), "num_classes": CLASSES, "seed": 1, **options}
    )
    task = LRPEClassificationTask.setup_task(cfg)
    task.load_dataset(split)
    return task


def batches(task: LRPEClassificationTask, epoch: int, split: str = "train") -> list[list[int]]:
    """The examples of the batches of an epoch, as a training asks for them."""
    iterator = task.get_batch_iterator(
        task.dataset(split), max_sentences=8, seed=1, epoch=epoch, update_epoch_batch_itr=True
    )
    return [batch["id"].tolist() for batch in iterator.next_epoch_itr(shuffle=True)]


# --- batches -----------------------------------------------------------------------------------


def test_a_batch_has_the_bytes_the_lengths_and_the_classes(data):
    task, known = task_of(data), lengths_and_labels("train")
    dataset = task.dataset("train")
    batch = dataset.collater([dataset[row] for row in (7, 0, 30)])
    tokens = batch["net_input"]["src_tokens"]
    for place, row in enumerate((7, 0, 30)):
        length = len(known.inputs[row])
        assert (tokens[place, :length] - FIRST).tolist() == known.inputs[row]
        assert (tokens[place, length:] == PAD).all()
        assert batch["net_input"]["src_lengths"][place] == length
        assert batch["target"][place] == known.labels[row]
    assert batch["ntokens"] == batch["net_input"]["src_lengths"].sum()
    assert batch["nsentences"] == 3
    assert dataset.collater([]) == {}


def test_long_inputs_are_cut_at_the_end(data):
    task = task_of(data, max_positions=4)
    dataset, known = task.dataset("train"), lengths_and_labels("train")
    row = int(np.argmax([len(inputs) for inputs in known.inputs]))
    assert (dataset[row]["inputs"][0] - FIRST).tolist() == known.inputs[row][:4]
    assert dataset.sizes.max() == 4
    assert sorted(chain(*batches(task, 1))) == list(range(50))


def test_a_pair_has_two_inputs_and_counts_as_twice_the_longer_one(paired):
    task = task_of(paired, "valid")
    dataset, first, second = task.dataset("valid"), *map(lengths_and_labels, ("valid", "test"))
    batch = dataset.collater([dataset[0], dataset[1]])
    for name, known in (("src_tokens", first), ("src_tokens2", second)):
        real = batch["net_input"][name][1]
        assert (real[real != PAD] - FIRST).tolist() == known.inputs[1]
    longest = [2 * max(map(len, pair)) for pair in zip(first.inputs, second.inputs, strict=True)]
    assert dataset.sizes.tolist() == longest
    assert batch["ntokens"] == sum(len(p.inputs[row]) for p in (first, second) for row in (0, 1))


@pytest.mark.parametrize("random", [False, True])
def test_every_epoch_has_other_batches_which_a_resumed_training_sees_too(data, random):
    whole = task_of(data, random_batches=random)
    epochs = [batches(whole, epoch) for epoch in (1, 2, 3)]
    for one in epochs:
        assert sorted(chain(*one)) == list(range(50))
    groups = [{frozenset(batch) for batch in one} for one in epochs]
    assert groups[0] != groups[1] != groups[2]
    resumed = task_of(data, random_batches=random)
    assert batches(resumed, 3) == epochs[2]
    assert batches(task_of(data, random_batches=random, seed=2), 3) != epochs[2]


def test_a_batch_has_inputs_of_similar_lengths_unless_they_are_random(data):
    def padding(random: bool) -> int:
        task = task_of(data, random_batches=random)
        sizes = task.dataset("train").sizes
        return sum(int((sizes[rows].max() - sizes[rows]).sum()) for rows in batches(task, 1))

    assert padding(False) < padding(True) / 3


def refused(folder: Path, **options: object) -> str:
    with pytest.raises(Refusal) as refusal:
        task_of(folder, **options)
    return str(refusal.value)


def test_data_that_do_not_fit_are_refused_in_one_sentence(data, tmp_path):
    assert "lists 3 classes: set --num-classes 3, not 2" in refused(data, num_classes=2)
    assert "has no input0/dict.txt" in refused(tmp_path)
    assert "train7.idx does not exist" in refused(data, split="train7")
    assert "--max-positions must be at least 1" in refused(data, max_positions=0)
    shutil.copytree(data, tmp_path / "bin")
    for kind in ("bin", "idx"):
        shutil.copy(tmp_path / f"bin/label/valid.{kind}", tmp_path / f"bin/label/train.{kind}")
    assert "does not have one of the 3 classes for each of the 50" in refused(tmp_path / "bin")
    (tmp_path / "bin" / "label" / "dict.txt").write_text("1 1\n0 1\n2 1\n")
    assert "does not list the classes 0, 1, ..." in refused(tmp_path / "bin")


# --- the criterion -----------------------------------------------------------------------------


class Answers(nn.Module):
    """A model whose logits are given."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def sample_of(logits: torch.Tensor, target: torch.Tensor) -> dict:
    return {"net_input": {"logits": logits}, "target": target, "ntokens": 7 * len(target)}


def criterion_of(smoothing: float = 0.0) -> ClassificationCriterion:
    return ClassificationCriterion(SimpleNamespace(), smoothing)


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(40, 12, generator=generator)
    return logits, torch.randint(0, 12, (40,), generator=generator)


def test_hard_targets_equal_soft_ones_and_smoothing_is_that_of_torch(case):
    logits, target = case
    model, criterion = Answers().train(), criterion_of(0.1)
    soft = F.one_hot(target, 12).float()
    hard = criterion(model, sample_of(logits, target))
    for other in (soft, soft.double()):
        found = criterion(model, sample_of(logits, other))
        torch.testing.assert_close(found[0], hard[0])
        assert {k: float(v) for k, v in found[2].items() if "_" in k} == {
            k: float(v) for k, v in hard[2].items() if "_" in k
        }
    expected = F.cross_entropy(logits, target, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(hard[0], expected)
    each = criterion(model, sample_of(logits, target), reduce=False)[0]
    torch.testing.assert_close(each.sum(), expected)


def test_validation_has_no_smoothing(case):
    logits, target = case
    loss, size, _ = criterion_of(0.1)(Answers().eval(), sample_of(logits, target))
    torch.testing.assert_close(loss, F.cross_entropy(logits, target, reduction="sum"))
    assert size == 40


def test_sums_over_uneven_shards_give_the_numbers_of_the_whole_set(case):
    logits, target = case
    criterion, model = criterion_of(), Answers().eval()
    cuts = (slice(0, 3), slice(3, 30), slice(30, 40))
    logs = [criterion(model, sample_of(logits[cut], target[cut]))[2] for cut in cuts]
    with metrics.aggregate() as found:
        criterion.reduce_metrics(logs)
    values = found.get_smoothed_values()
    right = (logits.argmax(1) == target).float().mean()
    five = (logits.argsort(1, descending=True)[:, :5] == target[:, None]).any(1).float().mean()
    assert values["accuracy"] == pytest.approx(100 * float(right), rel=1e-6)
    assert values["top5"] == pytest.approx(100 * float(five), rel=1e-6)
    loss = float(F.cross_entropy(logits, target)) / math.log(2)
    assert values["loss"] == pytest.approx(loss, abs=1e-5)
    whole = scores(logits, target)
    assert whole == pytest.approx({**values, "examples": 40}, abs=1e-4)


def test_few_classes_have_no_top5_and_half_precision_is_summed_in_float32():
    logits = torch.tensor([[60000.0, 0.0], [0.0, 60000.0]]).half()
    loss, _, log = criterion_of()(Answers(), sample_of(logits, torch.tensor([0, 0])))
    assert loss.dtype == torch.float32
    assert float(loss) == 60000
    assert "_top5" not in log
    assert int(log["_accuracy"]) == 1
