"""The task and the criterion lrpe_classification."""

import math
import shutil
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.logging import metrics
from torch import nn
from torch.nn import functional as F

from lrpe_fairseq.criterions.classification import ClassificationCriterion, scores
from lrpe_fairseq.errors import Refusal
from lrpe_fairseq.experiments.commands import eval_classifier
from lrpe_fairseq.experiments.data import corpus, examples
from lrpe_fairseq.experiments.data.examples import BYTES, Examples
from lrpe_fairseq.experiments.runner import by_hand
from lrpe_fairseq.tasks.classification import ClassificationConfig, LRPEClassificationTask
from tests.test_data_prep import unpacked

PAD, FIRST = 1, 4
CLASSES = 3
SIZES = {"train": 50, "valid": 10, "test": 10}


def examples_of(split):
    rng = np.random.RandomState(len(split))
    rows = [rng.randint(0, 256, rng.randint(1, 20)).tolist() for _ in range(SIZES[split])]
    return Examples(rows, rng.randint(0, CLASSES, SIZES[split]).tolist())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Random bytes with classes: ``bin`` of data-prep."""
    dest = tmp_path_factory.mktemp("classes")
    steps = corpus.Steps(dest, "test", "bytes")
    splits = {split: examples_of(split) for split in SIZES}
    examples.prepare(steps, {}, lambda: splits, symbols=BYTES, classes=CLASSES)
    return dest / "bin"


@pytest.fixture(scope="module")
def paired(data, tmp_path_factory):
    """The same, with the inputs of test as second inputs of valid."""
    folder = shutil.copytree(data, tmp_path_factory.mktemp("pairs") / "bin")
    shutil.copytree(folder / "input0", folder / "input1")
    for kind in ("bin", "idx"):
        shutil.copy(folder / "input0" / f"test.{kind}", folder / "input1" / f"valid.{kind}")
    return folder


def task_of(folder, split="train", **options):
    given = {"data": str(folder), "num_classes": CLASSES, "seed": 1, **options}
    task = LRPEClassificationTask.setup_task(ClassificationConfig(**given))
    task.load_dataset(split)
    return task


def batches(task, epoch, split="train"):
    """The examples of the batches of an epoch, as a training asks for them."""
    iterator = task.get_batch_iterator(
        task.dataset(split), max_sentences=8, seed=1, epoch=epoch, update_epoch_batch_itr=True
    )
    return [batch["id"].tolist() for batch in iterator.next_epoch_itr(shuffle=True)]


def test_a_batch_has_the_bytes_the_lengths_and_the_classes(data):
    dataset, known = task_of(data).dataset("train"), examples_of("train")
    batch = dataset.collater([dataset[row] for row in (7, 0, 30)])
    tokens = batch["net_input"]["src_tokens"]
    for place, row in enumerate((7, 0, 30)):
        length = len(known.inputs[row])
        assert (tokens[place, :length] - FIRST).tolist() == known.inputs[row]
        assert (tokens[place, length:] == PAD).all()
        assert batch["net_input"]["src_lengths"][place] == length
        assert batch["target"][place] == known.labels[row]


def test_a_batch_counts_its_tokens_and_its_examples(data):
    dataset = task_of(data).dataset("train")
    batch = dataset.collater([dataset[row] for row in (7, 0, 30)])
    assert batch["ntokens"] == batch["net_input"]["src_lengths"].sum()
    assert batch["nsentences"] == 3


def test_a_batch_of_no_examples_is_empty(data):
    assert task_of(data).dataset("train").collater([]) == {}


def test_long_inputs_are_cut_at_the_end(data):
    task = task_of(data, max_positions=4)
    dataset, known = task.dataset("train"), examples_of("train")
    row = int(np.argmax([len(inputs) for inputs in known.inputs]))
    assert (dataset[row]["inputs"][0] - FIRST).tolist() == known.inputs[row][:4]
    assert dataset.sizes.max() == 4
    assert sorted(chain(*batches(task, 1))) == list(range(50))


def test_a_pair_has_two_inputs_and_counts_as_twice_the_longer_one(paired):
    dataset = task_of(paired, "valid").dataset("valid")
    first, second = examples_of("valid"), examples_of("test")
    batch = dataset.collater([dataset[0], dataset[1]])
    for name, known in (("src_tokens", first), ("src_tokens2", second)):
        real = batch["net_input"][name][1]
        assert (real[real != PAD] - FIRST).tolist() == known.inputs[1]
    longest = [2 * max(map(len, pair)) for pair in zip(first.inputs, second.inputs, strict=True)]
    assert dataset.sizes.tolist() == longest
    assert batch["ntokens"] == sum(len(p.inputs[row]) for p in (first, second) for row in (0, 1))


@pytest.mark.parametrize("random", [False, True])
def test_every_epoch_has_other_batches_which_a_resumed_training_sees_too(data, random):
    whole, resumed, other = (task_of(data, random_batches=random, seed=n) for n in (1, 1, 2))
    epochs = [batches(whole, epoch) for epoch in (1, 2, 3)]
    for one in epochs:
        assert sorted(chain(*one)) == list(range(50))
    groups = [{frozenset(batch) for batch in one} for one in epochs]
    assert groups[0] != groups[1] != groups[2]
    assert batches(resumed, 3) == epochs[2] != batches(other, 3)


def test_a_batch_has_inputs_of_similar_lengths_unless_they_are_random(data):
    def padding(random):
        task = task_of(data, random_batches=random)
        sizes = task.dataset("train").sizes
        return sum(int((sizes[rows].max() - sizes[rows]).sum()) for rows in batches(task, 1))

    assert padding(False) < padding(True) / 3


def test_data_that_do_not_fit_are_refused_in_one_sentence(data, tmp_path):
    def refused(sentence, folder, **options):
        with pytest.raises(Refusal, match=sentence):
            task_of(folder, **options)

    refused("lists 3 classes: set --num-classes 3, not 2", data, num_classes=2)
    refused("has no input0/dict.txt", tmp_path)
    refused("train7.idx does not exist", data, split="train7")
    refused("--max-positions must be at least 1", data, max_positions=0)
    folder = shutil.copytree(data, tmp_path / "bin")
    for kind in ("bin", "idx"):
        shutil.copy(folder / "label" / f"valid.{kind}", folder / "label" / f"train.{kind}")
    refused("does not have one of the 3 classes for each of the 50", folder)
    (folder / "label" / "dict.txt").write_text("1 1\n0 1\n2 1\n")
    refused("does not list the classes 0, 1, ...", folder)


class Answers(nn.Module):
    """A model whose logits are given."""

    def forward(self, logits):
        return logits


def sample_of(logits, target):
    return {"net_input": {"logits": logits}, "target": target, "ntokens": 7 * len(target)}


def criterion_of(smoothing=0.0):
    return ClassificationCriterion(SimpleNamespace(), smoothing)


@pytest.fixture
def case():
    torch.manual_seed(1)
    return 3 * torch.randn(40, 12), torch.randint(0, 12, (40,))


def test_hard_targets_equal_soft_ones_and_smoothing_is_that_of_torch(case):
    logits, target = case
    model, criterion = Answers().train(), criterion_of(0.1)
    soft = F.one_hot(target, 12).float()
    hard = criterion(model, sample_of(logits, target))
    for other in (soft, soft.double()):
        found = criterion(model, sample_of(logits, other))
        torch.testing.assert_close(found[0], hard[0])
        counts = [{k: float(v) for k, v in log.items() if "_" in k} for log in (found[2], hard[2])]
        assert counts[0] == counts[1]
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


@pytest.mark.parametrize(
    ("given", "splits"), [([], ["valid"]), (["--splits", "train", "valid"], ["train", "valid"])]
)
def test_an_evaluation_is_of_the_splits_of_the_data(given, splits, tmp_path, monkeypatch):
    """ImageNet has no test split."""
    unpacked(tmp_path, {"bin/train.tsv": b"", "bin/valid.tsv": b""})
    seen = []
    monkeypatch.setattr(
        eval_classifier, "evaluate_classifier", lambda *words, **sizes: seen.append(words[2])
    )
    monkeypatch.setattr(by_hand, "data_folder", lambda folder, _: folder)
    monkeypatch.setattr(by_hand, "report", lambda *_: None)
    assert eval_classifier.main(["a.pt", str(tmp_path), *given]) == 0
    assert seen == [splits]
