"""``lrpe_synthetic``: a language model whose targets are the answers of a synthetic task.

For the data of data-prep/synthetic. Loss and accuracies count the scored tokens only; the other
targets are padding.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
from fairseq.data import Dictionary, data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.models import FairseqLanguageModel
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.options import option
from lrpe_fairseq.errors import refuse
from lrpe_fairseq.tasks.datasets import SizedDataset
from lrpe_fairseq.tasks.missing_data import single_folder

NAME = "lrpe_synthetic"
LONGEST = 16384


@dataclass
class SyntheticConfig(FairseqDataclass):
    """Options of the task. The last two are fields that fairseq's language models read."""

    # fairseq's argument parser cannot read `str | None`
    data: Optional[str] = option(None, "bin/ of data-prep/synthetic")
    max_target_positions: int = option(LONGEST, "longest sequence of any split, in tokens")
    tokens_per_sample: int = II("task.max_target_positions")
    add_bos_token: bool = False


@register_task(NAME, dataclass=SyntheticConfig)
class LRPESyntheticTask(FairseqTask):
    """Answers to a synthetic task, predicted by a causal model.

    Validation reports ``answer_accuracy``, the samples without a wrong scored token,
    ``token_accuracy``, the scored tokens that are right, both given the true tokens before them,
    ``exact_loss``, fairseq's ``loss`` (bits) without its rounding, and the counts ``samples`` and
    ``answers`` (scored tokens). Greedy decoding of an answer is right exactly if all of its tokens
    are right here. The loss is per scored token; ``wps`` and ``wpb`` count all tokens.

    Raises: Refusal for a model that is no language model, and for data that are missing, damaged or
        too long.
    """

    def __init__(self, cfg: SyntheticConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg)
        self.dictionary = dictionary

    @classmethod
    def setup_task(cls, cfg: SyntheticConfig, **keywords: Any) -> "LRPESyntheticTask":
        """Load the dictionary."""
        path = single_folder(cfg.data, NAME) / "dict.txt"
        if not path.is_file():
            refuse(f"{path} does not exist: prepare the data with data-prep/synthetic/prepare.py")
        return cls(cfg, Dictionary.load(str(path)))

    @property
    def source_dictionary(self) -> Dictionary:
        """The dictionary of tokens and answers."""
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        """The dictionary of tokens and answers."""
        return self.dictionary

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the model as fairseq does.

        Raises: Refusal for a floor of angles without ``--context-length``, because the splits have
            sequences longer than those of training.
        """
        floor = str(getattr(cfg, "angle_floor", "none"))
        needs = f"--angle-floor {floor}" if floor != "none" else ""
        if str(getattr(cfg, "rotation_spectrum", "partial")) == "turns":
            needs = "--rotation-spectrum turns"
        if needs and not cfg.context_length:
            refuse(
                f"{needs} needs --context-length, the tokens of the longest sequence in training"
            )
        model = super().build_model(cfg, from_checkpoint)
        # an encoder would see the answers
        if not isinstance(model, FairseqLanguageModel):
            refuse(f"{NAME} supports language models only: choose lrpe_lm or a preset of it")
        return model

    def max_positions(self) -> int:
        """Return the length of the longest sequence that models accept."""
        return int(self.cfg.max_target_positions)

    def load_dataset(self, split: str, *rest: Any, **keywords: Any) -> None:
        """Load the sequences and targets of a split."""
        inputs, targets = (self._rows(split, side) for side in ("input", "target"))
        # a token without an answer has padding as its target
        if not np.array_equal(inputs.sizes, targets.sizes):
            refuse(f"split {split} does not have a target for every token: prepare it again")
        longest = int(inputs.sizes.max())
        if longest > self.max_positions():
            refuse(f"split {split} has {longest} tokens in a row: set --max-target-positions")
        self.datasets[split] = SyntheticDataset(inputs, targets, self.dictionary.pad())

    def _rows(self, split: str, side: str) -> Any:
        path = single_folder(self.cfg.data, NAME) / f"{split}.{side}"
        rows = data_utils.load_indexed_dataset(str(path), None, "mmap")
        if rows is None:
            refuse(f"{path}.idx does not exist: prepare the data with data-prep/synthetic")
        return rows

    def train_step(self, sample: dict, *rest: Any, **keywords: Any) -> tuple[Any, int, dict]:
        """Train as fairseq does, and count all tokens."""
        loss, size, log = super().train_step(sample, *rest, **keywords)
        # fairseq sums the log over batches and processes
        return loss, size, {**log, "_tokens": sample["tokens"]}

    def valid_step(self, sample: dict, model: nn.Module, criterion: Any) -> tuple[Any, int, dict]:
        """Compute the loss as fairseq does, and the sums of the metrics from the same outputs."""
        with outputs_of(model) as outputs:
            loss, size, log = super().valid_step(sample, model, criterion)
        counted = sums(outputs[-1][0], sample["target"], self.dictionary.pad())
        return loss, size, {**log, **counted, "_tokens": sample["tokens"]}

    def reduce_metrics(self, logging_outputs: list[dict], criterion: Any) -> None:
        """Log the criterion's metrics, the speed in all tokens, and the accuracies."""

        def total(name: str) -> float:
            return float(sum(log.get(name, 0) for log in logging_outputs))

        metrics.log_scalar("wpb", total("_tokens"), priority=180, round=1)
        metrics.log_speed("wps", total("_tokens"), priority=90, round=1)
        metrics.log_scalar("bsz", total("nsentences"), priority=190, round=1)
        # not the task's own method in fairseq, which logs the speed in scored tokens
        criterion.__class__.reduce_metrics(logging_outputs)
        samples = total("_samples")
        answers = total("_answers")
        if samples:  # a validation
            size = total("sample_size")
            # base e -> bits; rounded to more digits than fairseq's loss
            metrics.log_scalar("exact_loss", total("loss") / size / math.log(2), size, round=9)
            metrics.log_scalar("answer_accuracy", total("_exact") / samples, samples, round=6)
            metrics.log_scalar("token_accuracy", total("_correct") / answers, answers, round=6)
            metrics.log_scalar_sum("samples", samples)
            metrics.log_scalar_sum("answers", answers)


class SyntheticDataset(SizedDataset):
    """Sequences and their targets, in the order of the file.

    Samples are random already; sorting them by length would make batches of one length.
    """

    def __init__(self, inputs: Any, targets: Any, pad: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.targets = targets
        self.pad = pad
        self.sizes = np.asarray(inputs.sizes)

    def __getitem__(self, index: int) -> dict:
        return {"id": index, "input": self.inputs[index], "target": self.targets[index]}

    def collater(self, samples: list[dict]) -> dict:
        """Return a batch padded on the right: tokens and targets (B, T); {} for no samples.

        ``ntokens`` counts scored tokens, because criterions divide by it; ``tokens`` all.
        """
        if not samples:
            return {}
        inputs, target = (
            data_utils.collate_tokens([sample[side] for sample in samples], self.pad)
            for side in ("input", "target")
        )
        lengths = torch.tensor([len(sample["input"]) for sample in samples])
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "net_input": {"src_tokens": inputs, "src_lengths": lengths},
            "target": target,
            "nsentences": len(samples),
            "ntokens": int(target.ne(self.pad).sum()),
            "tokens": int(lengths.sum()),
        }


@contextmanager
def outputs_of(model: nn.Module) -> Iterator[list]:
    """Yield a list to which every forward pass of ``model`` appends its output."""
    outputs: list = []
    handle = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def sums(scores: Tensor, target: Tensor, pad: int) -> dict[str, int]:
    """Return the sums of a batch: scores (B, T, V), target (B, T) with ``pad`` where not scored."""
    scored = target.ne(pad)
    right = scores.argmax(2).eq(target) & scored
    return {
        "_answers": int(scored.sum()),
        "_correct": int(right.sum()),
        "_exact": int((right | ~scored).all(1).sum()),  # no scored token is wrong
        "_samples": len(target),
    }
