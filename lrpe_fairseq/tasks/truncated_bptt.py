"""``lrpe_truncated_bptt_lm``: a language model reads its text in contiguous streams.

Truncated back-propagation through time with a memory (Transformer-XL, Section 3.2). Everything
but the order of the batches is fairseq's own language modelling.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
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

from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.models.language_model import LRPELanguageModel
from lrpe_fairseq.models.options import one_sentence_errors
from lrpe_fairseq.models.segment_memory import Segment

NAME = "lrpe_truncated_bptt_lm"
ONLY = {  # options of language_modeling that would make a batch something else than segments
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
    """That of language_modeling; ``tokens_per_sample`` is the length of a segment."""

    reset_at_documents: Optional[str] = field(
        default=None,
        metadata={
            "help": "folder with {split}.tsv, whose lines begin with the number of each document's "
            "first line: a token sees nothing of the documents before its own"
        },
    )
    update_freq: List[int] = II("optimization.update_freq")  # noqa: UP006
    train_subset: str = II("dataset.train_subset")


@dataclass(frozen=True)
class Streams:
    """``blocks`` segments of a text dealt out, in order, to ``streams`` of equal length, or one
    more for the first ones: every segment stands in one stream once."""

    blocks: int
    streams: int

    def start(self, stream: int) -> int:
        """The first block of a stream."""
        length, longer = divmod(self.blocks, self.streams)
        return stream * length + min(stream, longer)

    def stream_of(self, block: int) -> int:
        """The stream that a block stands in."""
        length, longer = divmod(self.blocks, self.streams)
        if block < longer * (length + 1):
            return block // (length + 1)
        return (block - longer) // length

    def batches(self, rows: int) -> list[list[int]]:
        """Blocks of every batch: in a round, ``rows`` streams after ``rows`` streams go on by one.

        The last round has the longer streams only, so that its batches are fewer or smaller.
        """
        bounds = list(pairwise(self.start(stream) for stream in range(self.streams + 1)))
        found = []
        for number in range(-(-self.blocks // self.streams)):
            going_on = [start + number for start, end in bounds if start + number < end]
            found += [going_on[row : row + rows] for row in range(0, len(going_on), rows)]
        return found


@register_task(NAME, dataclass=TruncatedBPTTConfig)
class LRPETruncatedBPTTTask(LanguageModelingTask):
    """Language modelling over B contiguous streams, each batch the next segment of each.

    An update reads one segment of every stream, so that B is the rows of a batch (--batch-size,
    or --max-tokens over the segment's length) x --update-freq x processes; in evaluation, rows x
    processes. Nothing is shuffled, and every token is predicted exactly once an epoch. The
    memory of training is part of the checkpoint, so that a resumed training goes on exactly;
    of several processes, only the first one's.

    Raises: SystemExit, one sentence, for options that do not go together.
    """

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

    def build_model(self, args: Any, from_checkpoint: bool = False) -> BaseFairseqModel:
        """fairseq's; only our language model understands segments."""
        self._model = super().build_model(args, from_checkpoint)
        with one_sentence_errors():
            if not isinstance(self._model, LRPELanguageModel):
                raise ChoiceError(f"the task {NAME} is for lrpe_lm and its presets only")
            if self.args.reset_at_documents and str(args.attention_type) == "linear":
                raise ChoiceError("--reset-at-documents needs softmax attention")
        return self._model

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """What fairseq saves of the task; under the name of the class, by which it is found."""
        return {type(self).__name__: self._model.decoder.memory.state()}

    def set_checkpoint_dict(self, state: dict[int, Any]) -> None:
        """Called by fairseq before a resumed training."""
        self._model.decoder.memory.load(state)

    # --- data ----------------------------------------------------------------------------------

    def load_dataset(self, split: str, *rest: Any, **keywords: Any) -> None:
        """fairseq's blocks of a split, and where its documents begin if that is asked."""
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
        """The segments of a split in order; what is no split, such as prompts, as in fairseq."""
        if not isinstance(dataset, MonolingualDataset):
            return super().get_batch_iterator(
                dataset, max_tokens, max_sentences, max_positions, **options
            )
        shards, epoch = options.get("num_shards", 1), options.get("epoch", 1)
        with one_sentence_errors():
            rows = self._rows(int(dataset.sizes[0]), max_tokens, max_sentences, max_positions)
        streams = rows * shards * self._batches_per_update(dataset, epoch)
        streams = Streams(len(dataset), min(streams, len(dataset)))
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
        """Batches of fairseq-eval-lm."""
        if context_window:
            raise SystemExit(
                f"lrpe_fairseq: {NAME} has no --context-window: the memory is what a token sees "
                "before its segment"
            )
        return super().eval_lm_dataloader(dataset, **options)

    def _rows(
        self,
        segment: int,
        max_tokens: int | None,
        max_sentences: int | None,
        max_positions: int | None,
    ) -> int:
        """Rows of a batch."""
        if max_positions is not None and segment > max_positions:
            raise ChoiceError(
                f"segments of {segment} tokens are longer than the {max_positions} that the model "
                "and --max-tokens allow"
            )
        by_tokens = [max_tokens // segment] if max_tokens else []
        by_rows = [max_sentences] if max_sentences else []
        return max(1, min(by_tokens + by_rows, default=1))

    def _batches_per_update(self, dataset: MonolingualDataset, epoch: int) -> int:
        """--update-freq in training, else 1."""
        if dataset is not self.datasets.get(self.args.train_subset):
            return 1
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
    """fairseq's batch, and the :class:`Segment` of its streams; {} for none, as in fairseq."""
    batch = dataset.collater(samples)
    if not samples:
        return batch
    blocks = [sample["id"] for sample in samples]
    stream = streams.stream_of(blocks[0])
    segment = Segment(stream=stream, blocks=blocks, first=blocks[0] == streams.start(stream))
    if starts is not None:
        tokens = torch.as_tensor(blocks).unsqueeze(1) * int(dataset.sizes[0])
        tokens = tokens + torch.arange(batch["target"].shape[1])
        padding = batch["target"].eq(dataset.vocab.pad())
        segment["documents"] = _numbers(starts, tokens).masked_fill(padding, -1)
    batch["net_input"]["segment"] = segment
    return batch


def document_starts(path: Path, lines: np.ndarray) -> np.ndarray:
    """The first token of every document, from the numbers of their first lines, and the lengths
    of all lines, ends included.

    Raises: ChoiceError if the file is not there, or cannot belong to this text.
    """
    try:
        rows = path.read_text(encoding="utf-8").splitlines()
        numbers = np.array([int(row.split("\t")[0]) for row in rows], dtype=np.int64)
    except (OSError, ValueError) as error:
        raise ChoiceError(f"{path} does not tell where documents begin: {error}") from None
    known = np.concatenate([[0], np.cumsum(lines)])
    ordered = (np.diff(numbers) > 0).all() and (numbers >= 0).all()
    if not ordered or (numbers >= len(lines)).any():
        raise ChoiceError(f"{path} is not of this text of {len(lines)} lines")
    return known[numbers]


def check_options(options: Any) -> None:
    """Raise ChoiceError for what streams of segments cannot be."""
    for name, only in ONLY.items():
        if str(getattr(options, name)).lower() != str(only).lower():
            raise ChoiceError(f"the task {NAME} takes {name}={only} only")
    if options.reset_at_documents and ":" in options.data:
        raise ChoiceError("--reset-at-documents needs data in one folder")


def _numbers(starts: np.ndarray, tokens: Tensor) -> Tensor:
    """How many documents have begun at each of ``tokens``."""
    return torch.searchsorted(torch.from_numpy(starts), tokens, right=True)
