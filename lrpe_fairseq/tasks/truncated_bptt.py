"""``lrpe_truncated_bptt_lm``: language modeling over contiguous streams of text.

Truncated back-propagation through time with a memory (Transformer-XL, Section 3.2). Only the order
of the batches differs from fairseq's ``language_modeling``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, List, Optional  # noqa: UP035  (fairseq reads List and Optional)

import numpy as np
import torch
from fairseq.data import MonolingualDataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from omegaconf import II
from torch import Tensor

from lrpe_fairseq.encodings.core.options import option
from lrpe_fairseq.errors import ChoiceError, one_sentence_errors, refuse
from lrpe_fairseq.models.language_model import LRPELanguageModel
from lrpe_fairseq.models.segment_memory import Segment
from lrpe_fairseq.patterns import over_layers

NAME = "lrpe_truncated_bptt_lm"
ONLY = {  # with other values batches would not be consecutive segments
    "sample_break_mode": "none",
    "shorten_method": "none",
    "add_bos_token": False,
    "self_target": False,
    "past_target": False,
    "pad_to_fixed_length": False,
    "pad_to_fixed_bsz": False,
}


@dataclass
class TruncatedBPTTConfig(LanguageModelingConfig):
    """Options of ``language_modeling``. ``tokens_per_sample`` is the length of a segment."""

    reset_at_documents: Optional[str] = option(
        None,
        "folder with {split}.tsv, whose lines begin with the number of each document's first line; "
        "tokens do not attend to earlier documents",
    )
    update_freq: List[int] = II("optimization.update_freq")  # noqa: UP006
    train_subset: str = II("dataset.train_subset")


@dataclass(frozen=True)
class Streams:
    """A text of ``blocks`` segments split into ``streams`` consecutive parts.

    The lengths of the parts differ by at most one, the longer ones first.
    """

    blocks: int
    streams: int

    def start(self, stream: int) -> int:
        """Return the first block of a stream."""
        length, longer = divmod(self.blocks, self.streams)
        return stream * length + min(stream, longer)

    def stream_of(self, block: int) -> int:
        """Return the stream that contains a block."""
        length, longer = divmod(self.blocks, self.streams)
        # the first streams have a block more
        if block < longer * (length + 1):
            return block // (length + 1)
        return (block - longer) // length

    def batches(self, rows: int) -> list[list[int]]:
        """Return the blocks of every batch.

        A round takes the next block of every stream, ``rows`` streams per batch. The last round
        has the longer streams only, so its batches are fewer or smaller.
        """
        bounds = list(pairwise(self.start(stream) for stream in range(self.streams + 1)))
        rows_of_blocks = []
        rounds = -(-self.blocks // self.streams)  # rounded up
        for number in range(rounds):
            blocks = [start + number for start, end in bounds if start + number < end]
            rows_of_blocks += [blocks[row : row + rows] for row in range(0, len(blocks), rows)]
        return rows_of_blocks


@register_task(NAME, dataclass=TruncatedBPTTConfig)
class LRPETruncatedBPTTTask(LanguageModelingTask):
    """Language modeling over B contiguous streams. A batch has the next segment of each.

    An update reads one segment of every stream. B is therefore the rows of a batch (--batch-size,
    or --max-tokens divided by the segment length) x --update-freq x processes; in evaluation, rows
    x processes. Batches are not shuffled, and every token is predicted exactly once per epoch. The
    checkpoint contains the memory of training, of all processes, so a resumed training is exact.

    Raises: Refusal for options that cannot be combined.
    """

    ordered_by_updates = True  # see compat.resumed_place.resume_where_the_data_were_left

    @classmethod
    def setup_task(cls, args: Any, **keywords: Any) -> "LRPETruncatedBPTTTask":
        """Called by fairseq."""
        with one_sentence_errors():
            check_options(args)
        return super().setup_task(args, **keywords)

    def __init__(self, *rest: Any, **keywords: Any) -> None:
        super().__init__(*rest, **keywords)
        self._model: LRPELanguageModel | None = None
        self._document_starts: dict[MonolingualDataset, np.ndarray] = {}
        self._gathered: dict[int, Any] | None = None

    def build_model(self, args: Any, from_checkpoint: bool = False) -> BaseFairseqModel:
        """Build the model as fairseq does.

        Raises: Refusal for a model other than ``lrpe_lm``, or for linear attention with
            ``--reset-at-documents``.
        """
        self._model = super().build_model(args, from_checkpoint)
        with one_sentence_errors():
            if not isinstance(self._model, LRPELanguageModel):
                raise ChoiceError(f"the task {NAME} supports lrpe_lm and its presets only")
            # a state of linear attention cannot be reset within a row
            linear = "linear" in over_layers(args.attention_type, args.decoder_layers)
            if self.args.reset_at_documents and linear:
                raise ChoiceError("--reset-at-documents requires softmax attention")
            if self.args.reset_at_documents and args.document_boundary:
                raise ChoiceError("pass --reset-at-documents or --document-boundary, not both")
        return self._model

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Return the task's part of a checkpoint. fairseq looks it up by the name of the class."""
        gathered = self._gathered
        self._gathered = None
        state = self._model.decoder.memory.state() if gathered is None else gathered
        return {type(self).__name__: state}

    def before_checkpoint(self, trainer: Any) -> None:
        """Collect the memory of all processes. Each of them calls it before a checkpoint is saved,
        but only the first one saves (``compat.processes``)."""
        if trainer.data_parallel_world_size == 1:
            return
        states = [None] * trainer.data_parallel_world_size
        group = trainer.data_parallel_process_group
        torch.distributed.all_gather_object(states, self._model.decoder.memory.state(), group=group)
        # every stream is of one process
        self._gathered = {stream: past for state in states for stream, past in state.items()}

    def set_checkpoint_dict(self, state: dict[int, Any]) -> None:
        """Called by fairseq before training resumes."""
        self._model.decoder.memory.load(state)

    # --- data ----------------------------------------------------------------------------------

    def load_dataset(self, split: str, *rest: Any, **keywords: Any) -> None:
        """Load fairseq's blocks of a split, and the starts of its documents if needed."""
        super().load_dataset(split, *rest, **keywords)
        dataset = self.datasets[split]
        if self.args.reset_at_documents:
            path = Path(self.args.reset_at_documents) / f"{split}.tsv"
            lines = dataset.dataset.dataset.sizes  # of blocks of lines
            with one_sentence_errors():
                self._document_starts[dataset] = document_starts(path, lines)

    def get_batch_iterator(
        self,
        dataset: Any,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        max_positions: int | None = None,
        **options: Any,
    ) -> EpochBatchIterator:
        """Return the segments of a split in order. Other data, such as prompts, as in fairseq."""
        if not isinstance(dataset, MonolingualDataset):
            return super().get_batch_iterator(
                dataset, max_tokens, max_sentences, max_positions, **options
            )
        shards = options.get("num_shards", 1)
        epoch = options.get("epoch", 1)
        with one_sentence_errors():
            rows = self._rows(int(dataset.sizes[0]), max_tokens, max_sentences, max_positions)
        wanted = rows * shards * self._batches_per_update(dataset, epoch)
        # a short text has a block for every stream, and no more streams
        streams = Streams(len(dataset), min(wanted, len(dataset)))
        return EpochBatchIterator(
            dataset=dataset,
            collate_fn=self._collater(dataset, streams),
            batch_sampler=streams.batches(rows),
            num_shards=shards,
            shard_id=options.get("shard_id", 0),
            num_workers=options.get("num_workers", 0),
            epoch=epoch,
            buffer_size=options.get("data_buffer_size", 0),
            disable_shuffling=True,
            persistent_workers=False,
        )

    def eval_lm_dataloader(self, dataset: Any, context_window: int = 0, **options: Any) -> Any:
        """Return the batches of fairseq-eval-lm."""
        if context_window:
            refuse(
                f"{NAME} does not support --context-window: the memory is the context of a segment"
            )
        return super().eval_lm_dataloader(dataset, **options)

    def _rows(
        self,
        segment: int,
        max_tokens: int | None,
        max_sentences: int | None,
        max_positions: int | None,
    ) -> int:
        """Return the number of rows of a batch."""
        if max_positions is not None and segment > max_positions:
            raise ChoiceError(
                f"segments of {segment} tokens are longer than the {max_positions} that the model "
                "and --max-tokens allow"
            )
        limits = []
        if max_tokens:
            limits.append(max_tokens // segment)
        if max_sentences:
            limits.append(max_sentences)
        return max(1, min(limits, default=1))

    def _batches_per_update(self, dataset: MonolingualDataset, epoch: int) -> int:
        """Return --update-freq of the epoch in training, else 1."""
        if dataset is not self.datasets.get(self.args.train_subset):
            return 1  # evaluation has no updates
        frequencies = self.args.update_freq
        return int(frequencies[min(epoch, len(frequencies)) - 1])

    def _collater(self, dataset: MonolingualDataset, streams: Streams) -> Callable:
        return partial(collate, dataset, streams, self._document_starts.get(dataset))


def collate(
    dataset: MonolingualDataset,
    streams: Streams,
    starts: np.ndarray | None,
    samples: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return fairseq's batch with its :class:`Segment`; {} for no samples, as in fairseq."""
    batch = dataset.collater(samples)
    if not samples:
        return batch
    blocks = [sample["id"] for sample in samples]
    stream = streams.stream_of(blocks[0])
    segment = Segment(stream=stream, blocks=blocks, first=blocks[0] == streams.start(stream))
    if starts is not None:
        # the index of each token in the text: all blocks but the last have one length
        tokens = torch.as_tensor(blocks).unsqueeze(1) * int(dataset.sizes[0])
        tokens = tokens + torch.arange(batch["target"].shape[1])
        padding = batch["target"].eq(dataset.vocab.pad())
        segment["documents"] = _numbers(starts, tokens).masked_fill(padding, -1)
    batch["net_input"]["segment"] = segment
    return batch


def document_starts(path: Path, lines: np.ndarray) -> np.ndarray:
    """Return the index of the first token of every document.

    path: lines that begin with the number of a document's first line. lines: (lines of the text,)
    their lengths in tokens, including the end of sentence.

    Raises: ChoiceError if the file is missing or does not match the text.
    """
    try:
        rows = path.read_text(encoding="utf-8").splitlines()
        numbers = np.array([int(row.split("\t")[0]) for row in rows], dtype=np.int64)
    except (OSError, ValueError) as error:
        raise ChoiceError(f"{path} does not list the starts of documents: {error}") from None
    first_tokens = np.concatenate([[0], np.cumsum(lines)])
    # increasing line numbers of this text; other files list other things
    ordered = (np.diff(numbers) > 0).all() and (numbers >= 0).all()
    if not ordered or (numbers >= len(lines)).any():
        raise ChoiceError(f"{path} does not match the text, which has {len(lines)} lines")
    return first_tokens[numbers]


def check_options(options: Any) -> None:
    """Raise ChoiceError for options that do not give consecutive segments."""
    for name, only in ONLY.items():
        # as text: enumerations of fairseq, booleans, and strings of a YAML
        if str(getattr(options, name)).lower() != str(only).lower():
            raise ChoiceError(f"the task {NAME} supports {name}={only} only")
    if options.reset_at_documents and ":" in options.data:
        raise ChoiceError("--reset-at-documents requires data in one folder")


def _numbers(starts: np.ndarray, tokens: Tensor) -> Tensor:
    """Count the documents that start at or before each of ``tokens``."""
    return torch.searchsorted(torch.from_numpy(starts), tokens, right=True)
