"""``lrpe_classification``: one class for one sequence, or for a pair of sequences.

The data have the layout of fairseq's GLUE: ``input0/``, ``label/`` and for pairs ``input1/``, each
with ``dict.txt`` and ``<split>.{bin,idx}``. Bytes and pixels are symbols of one dictionary: value v
is symbol ``v`` of ``0`` .. ``255``. A sequence is used as it is stored: text ends with an end of
sentence, images and ListOps do not.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II
from torch import Tensor

from lrpe_fairseq.encodings.core.options import option
from lrpe_fairseq.errors import refuse
from lrpe_fairseq.tasks.datasets import EpochDataset
from lrpe_fairseq.tasks.missing_data import single_folder

logger = logging.getLogger(__name__)

NAME = "lrpe_classification"
INPUTS = ("input0", "input1")
SUFFIXES = ("", "2")


@dataclass
class ClassificationConfig(FairseqDataclass):
    """Options of the task."""

    data: str = option("", "folder with input0/, label/ and for pairs input1/")
    num_classes: int = option(0, "number of classes, as in label/dict.txt")
    max_positions: int = option(
        4096, "longest input; longer ones are cut at the end, each one of a pair"
    )
    random_batches: bool = option(
        False,
        "batches of examples in random order; by default the examples of a batch have similar "
        "lengths, which needs less padding",
    )
    seed: int = II("common.seed")


PER_TOKEN = ("cross_entropy", "label_smoothed_cross_entropy")
"""Criterions that predict a token at every position."""


class ClassTask(FairseqTask):
    """A task whose targets are numbers of classes: ``cfg.num_classes``, ``dictionary``."""

    def build_criterion(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Refuse fairseq's default, which would divide the loss of an example by its tokens.

        Raises: Refusal for a criterion of tokens.
        """
        if cfg._name in PER_TOKEN:
            refuse(f"--criterion {cfg._name} is for texts: pass --criterion lrpe_classification")
        return super().build_criterion(cfg, from_checkpoint)

    def filter_indices_by_size(self, indices: np.ndarray, *rest: Any) -> np.ndarray:
        """Return all indices: every input is made to fit the model."""
        return indices

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.cfg.num_classes

    @property
    def source_dictionary(self) -> Dictionary:
        """The dictionary of the inputs: of images, special symbols only."""
        return self.dictionary

    @property
    def target_dictionary(self) -> None:
        """None: classes are numbers."""
        return None


@register_task(NAME, dataclass=ClassificationConfig)
class LRPEClassificationTask(ClassTask):
    """Classification of sequences or pairs of sequences.

    A batch has ``net_input`` with ``src_tokens`` (B, T), padded on the right, and ``src_lengths``
    (B,), for pairs also ``src_tokens2`` and ``src_lengths2``; and ``target``, int64 (B,).

    Every epoch has other batches. They depend on the seed and the epoch only, so that a resumed
    training sees those of an uninterrupted one.

    Raises: Refusal for data that are incomplete or contradict ``--num-classes``.
    """

    def __init__(self, cfg: ClassificationConfig, dictionary: Dictionary, pairs: bool) -> None:
        super().__init__(cfg)
        self.dictionary = dictionary
        self.pairs = pairs

    @classmethod
    def setup_task(cls, cfg: ClassificationConfig, **keywords: Any) -> "LRPEClassificationTask":
        """Load the dictionaries; called by fairseq."""
        folder = single_folder(cfg.data, NAME)
        if not (folder / "input0" / "dict.txt").is_file():
            refuse(f"{folder} has no input0/dict.txt: prepare the data first")
        check_classes(folder / "label" / "dict.txt", cfg.num_classes)
        if cfg.max_positions < 1:
            refuse(f"--max-positions must be at least 1, not {cfg.max_positions}")
        dictionary = Dictionary.load(str(folder / "input0" / "dict.txt"))
        logger.info(f"[input] dictionary: {len(dictionary)} types")
        return cls(cfg, dictionary, (folder / "input1" / "dict.txt").is_file())

    def load_dataset(self, split: str, combine: bool = False, **keywords: Any) -> None:
        """Load a split; called by fairseq."""
        inputs = [self._stored(part, split) for part in INPUTS[: 2 if self.pairs else 1]]
        labels = self._labels(split, len(inputs[0]))
        # of pairs: the first inputs were compared with the labels
        if any(len(other) != len(labels) for other in inputs):
            refuse(f"{self.cfg.data} has different numbers of inputs in {split}: prepare it again")
        # the mean over no tokens is no number
        if any((np.asarray(part.sizes) == 0).any() for part in inputs):
            refuse(f"{self.cfg.data} has empty inputs in {split}: prepare it again")
        dataset = ClassificationDataset(
            inputs,
            labels,
            pad=self.dictionary.pad(),
            longest=self.cfg.max_positions,
            seed=self.cfg.seed,
            by_length=not self.cfg.random_batches,
        )
        if dataset.cut:
            logger.info(f"{split}: {dataset.cut:,} inputs are cut at {self.cfg.max_positions}")
        self.datasets[split] = dataset

    def max_positions(self) -> int:
        """Return the length at which inputs are cut."""
        return self.cfg.max_positions

    def _stored(self, part: str, split: str) -> Any:
        path = f"{self.cfg.data}/{part}/{split}"
        dataset = data_utils.load_indexed_dataset(path, None, "mmap")
        if dataset is None:
            refuse(f"{path}.idx does not exist: prepare this split, or choose another one")
        return dataset

    def _labels(self, split: str, expected: int) -> np.ndarray:
        """Return the classes of a split, int64 (N,), without an end of sentence."""
        stored = self._stored("label", split)
        ids = [int(stored[index][0]) for index in range(len(stored))]
        # fairseq-preprocess has made symbols of the classes, after the special ones
        labels = np.array(ids, dtype=np.int64) - Dictionary().nspecial
        if len(labels) != expected or (labels < 0).any() or (labels >= self.num_classes).any():
            refuse(
                f"{self.cfg.data}/label/{split} does not have one of the {self.num_classes} "
                f"classes for each of the {expected} inputs: prepare it again"
            )
        return labels


def check_classes(path: Path, classes: int) -> None:
    """Refuse unless ``path`` lists the classes 0, 1, ... in this order and ``classes`` of them.

    Raises: Refusal, which says what the file has.
    """
    if not path.is_file():
        refuse(f"{path} does not exist: prepare the data first")
    names = [line.rpartition(" ")[0] for line in path.read_text(encoding="utf-8").splitlines()]
    if names != [str(number) for number in range(len(names))]:
        refuse(f"{path} does not list the classes 0, 1, ... in this order: prepare the data again")
    if classes != len(names):
        refuse(f"{path} lists {len(names)} classes: set --num-classes {len(names)}, not {classes}")


class ClassificationDataset(EpochDataset):
    """Examples of one split: one or two inputs and a class.

    Args:
        inputs: one or two datasets of token ids with ``sizes``, of N rows each.
        labels: int64 (N,).
        pad: the id of padding.
        longest: inputs are cut to this length.
        seed, by_length: see :meth:`ordered_indices`.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        labels: np.ndarray,
        *,
        pad: int,
        longest: int,
        seed: int = 1,
        by_length: bool = True,
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.labels = labels
        self.pad = pad
        self.longest = longest
        self.seed = seed
        self.by_length = by_length
        self.epoch = 1
        lengths = np.stack([np.asarray(part.sizes) for part in inputs])
        self.cut = int((lengths > longest).sum())
        self.sizes = len(inputs) * np.minimum(lengths, longest).max(0)
        """Tokens of an example where a model pads both inputs to the longer one."""

    def __getitem__(self, index: int) -> dict:
        return {"id": index, "inputs": [part[index][: self.longest] for part in self.inputs]}

    def ordered_indices(self) -> np.ndarray:
        """Return the order in which examples are put into batches, int64 (N,).

        It is drawn from the seed and the epoch; by length with random ties, or at random. fairseq
        then shuffles the batches.
        """
        draw = np.random.default_rng([self.seed, self.epoch]).permutation(len(self))
        return np.lexsort([draw, self.sizes]) if self.by_length else draw  # the last key is first

    def collater(self, samples: list[dict]) -> dict:
        """Return a batch; {} for no samples, as in fairseq."""
        if not samples:
            return {}
        ids = torch.tensor([sample["id"] for sample in samples])
        batch: dict[str, Tensor] = {}
        for number, suffix in enumerate(SUFFIXES[: len(self.inputs)]):
            rows = [sample["inputs"][number] for sample in samples]
            batch[f"src_tokens{suffix}"] = data_utils.collate_tokens(rows, self.pad)
            batch[f"src_lengths{suffix}"] = torch.tensor([len(row) for row in rows])
        lengths = [value for name, value in batch.items() if "lengths" in name]  # of both inputs
        return {
            "id": ids,
            "net_input": batch,
            "target": torch.from_numpy(self.labels[ids.numpy()]),
            "nsentences": len(samples),
            "ntokens": int(sum(value.sum() for value in lengths)),
        }
