"""``lrpe_transduction``: fairseq's ``translation`` with positions of tree nodes and metrics of the
synthetic tasks, for the data of data-prep/algebraic.

Generation is fairseq's own. The positions of generated nodes follow from the tokens before them.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fairseq.data import BaseWrapperDataset, data_utils
from fairseq.dataclass import ChoiceEnum
from fairseq.dataclass.configs import GenerationConfig
from fairseq.logging import metrics
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from torch import Tensor

from lrpe_fairseq.encodings.core.options import option
from lrpe_fairseq.errors import ChoiceError, one_sentence_errors, refuse
from lrpe_fairseq.models.translation import LRPETransformer
from lrpe_fairseq.tasks.missing_data import single_folder

NAME = "lrpe_transduction"
PUBLISHED_BATCH = 32
"""Rows of the validation batches of the published code, in the order of the file."""
SCORED = ("all", "no-end", "inner")
DECODED = ("samples", "tokens", "correct", "exact")
"""Sums of decoded samples in the log of a batch, as ``_decoded_samples``."""


@dataclass
class TransductionConfig(TranslationConfig):
    """Options of ``translation``, the positions of attention and the tokens to score."""

    node_positions: bool = option(
        False, "attention uses the stored codes of tree nodes instead of counting tokens"
    )
    scored_tokens: ChoiceEnum(SCORED) = option(  # type: ignore[valid-type]
        "all",
        "target tokens in teacher_ppl, token_accuracy and exact_match: all; no-end leaves out the "
        "end of sentence (trees of the paper); inner also leaves out the first token (repeat and "
        "reverse of the paper)",
    )
    decode_samples: int = option(
        0,
        "validation also decodes the first N samples of a split greedily, without the true prefix, "
        "and reports decoded_token_accuracy and decoded_exact_match",
    )


@register_task(NAME, dataclass=TransductionConfig)
class LRPETransductionTask(TranslationTask):
    """Transduction with teacher-forced metrics in validation.

    ``teacher_ppl``: exp of the mean negative log-likelihood (base e, without label smoothing) of
    the scored tokens. ``ppl_published``: the same losses with the published code's slip, which
    counts one more token, of loss zero, for each target shorter than the longest of its batch of
    32; it is never above ``teacher_ppl``. ``token_accuracy``: scored tokens whose prediction is
    right, given the true prefix. ``exact_match``: samples without a wrong scored token. fairseq's
    own ``ppl`` counts every token and the end of sentence.

    Generated tokens are free of the true prefix. ``decoded_token_accuracy``: tokens of the targets,
    end of sentence included, that the output has at the same place. ``decoded_exact_match``:
    targets that equal the output. Only ``--decode-samples`` samples count.

    Raises: Refusal for a model other than ``lrpe_transformer`` with ``--node-positions``, for data
        without positions or in shards, and for decoding with ``--node-positions``.
    """

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        if self.cfg.node_positions:
            single_folder(self.cfg.data, "--node-positions")

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the model as fairseq does."""
        model = super().build_model(cfg, from_checkpoint)
        if self.cfg.node_positions and not isinstance(model, LRPETransformer):
            refuse("--node-positions supports lrpe_transformer and its presets only")
        return model

    def build_generator(self, models: Any, args: Any, *rest: Any, **keywords: Any) -> Any:
        """Build the generator as fairseq does. Raises: Refusal to decode nodes of trees."""
        if self.cfg.node_positions and not getattr(args, "score_reference", False):
            refuse(
                "--node-positions cannot decode, because the positions of the next nodes are not "
                "known: measure with fairseq-validate"
            )
        return super().build_generator(models, args, *rest, **keywords)

    def _path(self, split: str, name: str) -> str:
        pair = f"{self.cfg.source_lang}-{self.cfg.target_lang}"
        return f"{self.cfg.data}/{split}.{pair}.{name}"

    def load_dataset(self, split: str, *rest: Any, **keywords: Any) -> None:
        """Load a split as fairseq does, and the positions of its tokens if needed.

        Raises: Refusal for ``task_cfg``, the task of a checkpoint, with other positions.
        """
        # fairseq-validate and fairseq-generate pass the task of the checkpoint
        trained = getattr(keywords.get("task_cfg"), "node_positions", self.cfg.node_positions)
        if trained != self.cfg.node_positions:
            done = "with" if trained else "without"
            refuse(f"the model was trained {done} --node-positions: evaluate it {done} them")
        super().load_dataset(split, *rest, **keywords)
        pairs = self.datasets[split]
        codes = None
        if self.cfg.node_positions:
            with one_sentence_errors():
                codes = [
                    self._codes(split, side, sizes)
                    for side, sizes in (
                        (self.cfg.source_lang, pairs.src_sizes),
                        (self.cfg.target_lang, pairs.tgt_sizes),
                    )
                ]
        self.datasets[split] = TransductionDataset(pairs, codes, self.source_dictionary.pad())

    def _codes(self, split: str, side: str, sizes: np.ndarray) -> Any:
        """Return the stored codes of one side of a split."""
        path = self._path(split, f"{side}-positions")
        codes = data_utils.load_indexed_dataset(path, None, "mmap")
        if codes is None:
            raise ChoiceError(f"--node-positions needs {path}.idx: prepare a task of trees")
        if len(codes) != len(sizes) or (np.asarray(codes.sizes) != sizes).any():
            raise ChoiceError(f"{path} does not have a position for every token: prepare it again")
        return codes

    def valid_step(self, sample: dict, model: Any, criterion: Any) -> tuple[Any, int, dict]:
        """Compute the loss as fairseq does, and the sums of the metrics."""
        loss, size, log = super().valid_step(sample, model, criterion)
        # once more, because criterions do not return their outputs
        with torch.no_grad():
            net_input = sample["net_input"]
            log_probs = model.get_normalized_probs(model(**net_input), log_probs=True)
        vocabulary = self.target_dictionary
        scored = scored_mask(
            sample["target"], vocabulary.pad(), vocabulary.eos(), str(self.cfg.scored_tokens)
        )
        log |= sums(log_probs, sample["target"], scored)
        log["_published_zeros"] = float(sample["published_zeros"].sum())
        if self.cfg.decode_samples > 0:
            log |= self._decoded(sample, model)
        return loss, size, log

    def _decoded(self, sample: dict, model: Any) -> dict[str, float]:
        """Decode the samples of a batch that ``--decode-samples`` selects, and return their sums.

        An output is not longer than the longest target, which ends the sentence earlier.
        """
        # ids are rows of the file, so that every number of processes decodes the same samples
        rows = (sample["id"] < self.cfg.decode_samples).nonzero().squeeze(1)
        if not len(rows):
            return decoded_sums([], sample["target"][:0], self.target_dictionary.pad())
        net_input = {name: tensor[rows] for name, tensor in sample["net_input"].items()}
        generator = self.build_generator([model], GenerationConfig(beam=1))
        generator.max_len_a = 0
        generator.max_len_b = sample["target"].shape[1]
        hypotheses = self.inference_step(generator, [model], {"net_input": net_input})
        outputs = [best["tokens"] for best, *_ in hypotheses]
        return decoded_sums(outputs, sample["target"][rows], self.target_dictionary.pad())

    def reduce_metrics(self, logging_outputs: list[dict], criterion: Any) -> None:
        """Log fairseq's metrics, and in validation those of this task."""
        super().reduce_metrics(logging_outputs, criterion)
        self._reduce_decoded(logging_outputs)
        outputs = [log for log in logging_outputs if "_scored" in log]
        if outputs:
            log_scored(outputs)

    def _reduce_decoded(self, logging_outputs: list[dict]) -> None:
        samples, tokens, correct, exact = (
            float(sum(log.get(f"_decoded_{name}", 0) for log in logging_outputs))
            for name in DECODED
        )
        if samples:
            metrics.log_scalar_sum("decoded_samples", samples, round=0)
            metrics.log_scalar("decoded_token_accuracy", correct / tokens, tokens, round=6)
            metrics.log_scalar("decoded_exact_match", exact / samples, samples, round=6)


class TransductionDataset(BaseWrapperDataset):
    """fairseq's pairs, with ``published_zeros`` and, given codes, the positions of both sides.

    codes: datasets of int64 codes of source and target, one code per token, or None.
    """

    def __init__(self, pairs: Any, codes: list | None, pad: int) -> None:
        super().__init__(pairs)
        self.codes = codes
        self.pad = pad
        self.zeros = published_zeros(np.asarray(pairs.tgt_sizes))

    def collater(self, samples: list[dict], **keywords: Any) -> dict:
        """Return fairseq's batch with the additions; {} for no samples, as in fairseq."""
        batch = self.dataset.collater(samples, **keywords)
        if not samples:
            return batch
        rows = batch["id"].tolist()
        batch["published_zeros"] = torch.from_numpy(self.zeros[rows])
        if self.codes is not None:
            source, target = ([side[row] for row in rows] for side in self.codes)
            net_input = batch["net_input"]
            net_input["src_positions"] = self._padded(net_input["src_tokens"], source)
            shifted = [codes.roll(1) for codes in target]  # the end of sentence comes first
            tokens = net_input["prev_output_tokens"]
            net_input["prev_output_positions"] = self._padded(tokens, shifted)
        return batch

    def _padded(self, tokens: Tensor, codes: list[Tensor]) -> Tensor:
        """Return (B, T) with the codes at the real tokens, on either side, and 0 at padding."""
        positions = torch.zeros_like(tokens)
        # row by row, as the mask selects the real tokens; padding may be on either side
        positions[tokens.ne(self.pad)] = torch.cat(codes)
        return positions


def published_zeros(lengths: np.ndarray) -> np.ndarray:
    """Return 1 where a target is shorter than the longest of its published batch, else 0.

    The published code divides by the tokens of the decoder's *input*. A target that is not the
    longest of its batch then counts one padding token, whose loss is zero.
    """
    zeros = np.zeros(len(lengths), dtype=np.int64)
    for start in range(0, len(lengths), PUBLISHED_BATCH):
        batch = lengths[start : start + PUBLISHED_BATCH]
        zeros[start : start + PUBLISHED_BATCH] = batch < batch.max()
    return zeros


def scored_mask(target: Tensor, pad: int, eos: int, scored: str) -> Tensor:
    """Return (B, T), true at the tokens of ``--scored-tokens``; padding may be on either side."""
    real = target.ne(pad)
    if scored == "all":
        return real
    without_end = real & target.ne(eos)
    if scored == "no-end":
        return without_end
    return without_end & real.cumsum(1).gt(1)  # nor the first real token


def sums(log_probs: Tensor, target: Tensor, scored: Tensor) -> dict[str, float]:
    """Return the sums of a batch: log_probs (B, T, V), target (B, T), scored (B, T)."""
    nll = -log_probs.gather(2, target.unsqueeze(2)).squeeze(2).double()  # sums of many terms
    right = log_probs.argmax(2).eq(target)
    return {
        "_nll": float(nll[scored].sum()),
        "_scored": float(scored.sum()),
        "_correct": float((right & scored).sum()),
        "_exact": float((right | ~scored).all(1).sum()),
        "_samples": float(len(target)),
    }


def log_scored(outputs: list[dict]) -> None:
    """Log the metrics of scored tokens from the :func:`sums` of batches and their zeros.

    A mean over no tokens is NaN, and has no weight beside those of other batches.
    """
    nll, scored, correct, exact, samples, zeros = (
        float(sum(log[f"_{name}"] for log in outputs))
        for name in ("nll", "scored", "correct", "exact", "samples", "published_zeros")
    )
    # fairseq weighs the means of batches by the counts
    for name, total, count in (
        ("_teacher_nll", nll, scored),
        ("_published_nll", nll, scored + zeros),
        ("token_accuracy", correct, scored),
        ("exact_match", exact, samples),
    ):
        metrics.log_scalar(name, total / count if count else math.nan, count, round=6)
    metrics.log_scalar_sum("samples", samples, round=0)
    metrics.log_derived("teacher_ppl", lambda m: perplexity(m["_teacher_nll"].avg))
    metrics.log_derived("ppl_published", lambda m: perplexity(m["_published_nll"].avg))


def perplexity(nll: float) -> float:
    """Return exp(nll), infinite above the largest float, as after a training that diverged."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def decoded_sums(outputs: list[Tensor], target: Tensor, pad: int) -> dict[str, float]:
    """Return the sums of decoded samples: outputs (T',) each, target (B, T) with padding.

    A place after the end of the output is wrong.
    """
    totals = dict.fromkeys(DECODED, 0.0)
    for output, row in zip(outputs, target, strict=True):
        wanted = row[row.ne(pad)]
        shorter = min(len(output), len(wanted))
        correct = int(output[:shorter].eq(wanted[:shorter]).sum())
        totals["samples"] += 1
        totals["tokens"] += len(wanted)
        totals["correct"] += correct
        totals["exact"] += len(output) == len(wanted) == correct
    return {f"_decoded_{name}": float(value) for name, value in totals.items()}
