"""Memory of earlier segments for language models (Transformer-XL, Section 3.2).

Axes: L layers, M memory, B batch, T time, C width.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import torch
from torch import Tensor

from lrpe_fairseq.attention.multihead import Memory

logger = logging.getLogger(__name__)


class Segment(TypedDict):
    """The position of a batch in the text, passed from the task to the model in the batch.

    stream: index of the first row's stream; the other rows are the streams that follow it.
    blocks: index of each row's segment in the text; a row continues its previous segment.
    first: true for the first segments of the streams, which have no memory.
    documents: (B, T) the index of each target's document, -1 at padding; absent if tokens may
        attend to other documents, or if the model knows their symbol.
    """

    stream: int
    blocks: list[int]
    first: bool
    documents: NotRequired[Tensor]


class Past(NamedTuple):
    """The last M tokens, or fewer, of some streams, and the segments that continue them."""

    blocks: list[int]
    inputs: Tensor  # L M B C, the inputs of each layer, without gradient
    documents: Tensor | None  # B M


class SegmentMemory:
    """The memory of every stream. It is not part of the model's state dict.

    Training and evaluation have separate memories. A stream stores the inputs of each layer; keys
    and values are computed from them with the current weights.

    Args: length: M, tokens to store; 0 for none. layers: L.
    """

    def __init__(self, length: int, layers: int) -> None:
        self.length = length
        self.layers = layers
        self._pasts: dict[bool, dict[int, Past]] = {True: {}, False: {}}
        self._loaded: dict[int, Past] = {}  # from a checkpoint: of all processes

    def recall(self, segment: Segment, training: bool, like: Tensor) -> Past:
        """Return the past of ``segment``'s streams, with dtype and device of ``like`` (..., C).

        It is empty at the start of the streams and, with a warning, if the text stored last does
        not precede the segment.
        """
        blocks = segment["blocks"]
        stream = segment["stream"]
        kept = self._pasts[training].get(stream)
        # after a resumption the streams may be read by other processes than before
        if kept is None and training:
            kept = self._loaded.get(stream)
        rows = len(blocks)
        # the last segments of the streams may be fewer rows than those before
        if kept is not None and kept.blocks[:rows] == blocks and not segment["first"]:
            documents = None if kept.documents is None else kept.documents[:rows].to(like.device)
            return Past(blocks, kept.inputs[:, :, :rows].to(like), documents)
        if self.length and not segment["first"]:
            logger.warning(
                "no memory is stored for the text before segments %s; they start without one",
                blocks,
            )
        return Past(blocks, like.new_empty(self.layers, 0, rows, like.shape[-1]), None)

    def keep(self, segment: Segment, training: bool, past: Past, inputs: Sequence[Tensor]) -> None:
        """Store ``segment`` after ``past``. ``inputs``: (T, B, C) for each layer."""
        if not self.length:
            return
        new = torch.stack([x.detach()[-self.length :] for x in inputs])
        old = past.inputs[:, max(0, past.inputs.shape[1] + new.shape[1] - self.length) :]
        documents = _documents(segment, past)
        # a clone, because a view keeps the whole row alive
        documents = None if documents is None else documents[:, -self.length :].clone()
        following = [block + 1 for block in segment["blocks"]]
        kept = Past(following, torch.cat([old, new], 1), documents)
        self._pasts[training][segment["stream"]] = kept

    def state(self) -> dict[int, dict[str, Any]]:
        """Return the memory of training on the CPU, in types that torch's safe loading accepts.

        It has the streams that this process has read since :meth:`load`.
        """
        state = {}
        for stream, past in self._pasts[True].items():
            documents = None if past.documents is None else past.documents.cpu()
            state[stream] = {
                "blocks": past.blocks,
                "inputs": past.inputs.cpu(),
                "documents": documents,
            }
        return state

    def load(self, state: dict[int, dict[str, Any]]) -> None:
        """Restore the memory of training from :meth:`state`, or from those of all processes."""
        self._pasts[True] = {}
        self._loaded = {stream: Past(**past) for stream, past in state.items()}


def memories(segment: Segment, past: Past) -> list[Memory]:
    """Return the memory of each layer's attention. A token sees its own document only."""
    documents = _documents(segment, past)
    return [Memory(inputs, documents) for inputs in past.inputs]


def with_documents(segment: Segment, past: Past, starts: Tensor) -> Segment:
    """Return the segment with the documents that begin at ``starts``, bool (B, T)."""
    last = 0 if past.documents is None else past.documents[:, -1:]
    return {**segment, "documents": last + starts.cumsum(1)}


def _documents(segment: Segment, past: Past) -> Tensor | None:
    """Document indices of the past, 0 if they are unknown, and of the segment: (B, M+T)."""
    documents = segment.get("documents")
    before = past.documents
    if documents is None:
        return None
    if before is None:
        before = documents.new_zeros(len(documents), past.inputs.shape[1])
    return torch.cat([before, documents], 1)
