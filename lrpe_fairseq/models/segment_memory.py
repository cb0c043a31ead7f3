"""What a language model remembers of earlier segments (Transformer-XL, Section 3.2).

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
    """Which text a batch is, as the task tells the model: a plain dict, as batches are made of.

    stream: the number of the first row's stream; the other rows are the streams after it.
    blocks: the number of each row's segment in the text; a row goes on where its last one ended.
    first: whether the streams begin here, so that nothing is before them.
    documents: (B, T) the number of each target's document, -1 at padding; absent if tokens may
        see other documents.
    """

    stream: int
    blocks: list[int]
    first: bool
    documents: NotRequired[Tensor]


class Past(NamedTuple):
    """The last M tokens, or fewer, of some streams, and which segments go on from there."""

    blocks: list[int]
    inputs: Tensor  # L M B C, what entered each layer, without gradient
    documents: Tensor | None  # B M


class SegmentMemory:
    """The past of every stream, outside the model's state dict.

    Training and evaluation have one each, so that an evaluation in the middle of a training
    leaves no trace. A stream costs L x M x C numbers: what entered each layer, of which every
    step makes keys and values with the weights of the day.

    Args: length: M, how many tokens to remember; 0 for none. layers: L.
    """

    def __init__(self, length: int, layers: int) -> None:
        self.length, self.layers = length, layers
        self._pasts: dict[bool, dict[int, Past]] = {True: {}, False: {}}

    def recall(self, segment: Segment, training: bool, like: Tensor) -> Past:
        """What was before ``segment`` in its streams, of the type and place of ``like`` (..., C).

        Nothing at the beginning of the streams; and nothing, with a warning, where the text
        before them was not the last that was kept: once another process resumes, for instance.
        """
        blocks, kept = segment["blocks"], self._pasts[training].get(segment["stream"])
        rows = len(blocks)
        if kept is not None and kept.blocks[:rows] == blocks and not segment["first"]:
            documents = None if kept.documents is None else kept.documents[:rows].to(like.device)
            return Past(blocks, kept.inputs[:, :, :rows].to(like), documents)
        if self.length and not segment["first"]:
            logger.warning("nothing is remembered of the text before segments %s", blocks)
        return Past(blocks, like.new_empty(self.layers, 0, rows, like.shape[-1]), None)

    def keep(self, segment: Segment, training: bool, past: Past, inputs: Sequence[Tensor]) -> None:
        """Remember ``segment``, after ``past``: it entered the layers as ``inputs`` (T, B, C)."""
        if not self.length:
            return
        new = torch.stack([x.detach()[-self.length :] for x in inputs])
        old = past.inputs[:, max(0, past.inputs.shape[1] + new.shape[1] - self.length) :]
        documents = _documents(segment, past)
        documents = None if documents is None else documents[:, -self.length :].clone()
        following = [block + 1 for block in segment["blocks"]]
        kept = Past(following, torch.cat([old, new], 1), documents)
        self._pasts[training][segment["stream"]] = kept

    def reset(self) -> None:
        """Forget everything, in training and in evaluation."""
        for pasts in self._pasts.values():
            pasts.clear()

    def state(self) -> dict[int, dict[str, Any]]:
        """The memory of training, on the CPU, of types that torch's safe loading takes."""
        return {
            stream: {"blocks": blocks, "inputs": x.cpu(), "documents": d if d is None else d.cpu()}
            for stream, (blocks, x, d) in self._pasts[True].items()
        }

    def load(self, state: dict[int, dict[str, Any]]) -> None:
        """Remember what :meth:`state` had."""
        self._pasts[True] = {stream: Past(**past) for stream, past in state.items()}


def memories(segment: Segment, past: Past) -> list[Memory]:
    """What each layer's attention remembers; a token sees its own document only."""
    own, documents = segment.get("documents"), _documents(segment, past)
    hidden = None if own is None else own.unsqueeze(-1) != documents.unsqueeze(-2)  # B T M+T
    return [Memory(inputs, hidden) for inputs in past.inputs]


def _documents(segment: Segment, past: Past) -> Tensor | None:
    """(B, M+T): the documents of the past and of the segment."""
    own = segment.get("documents")
    if own is None or past.documents is None:
        return own
    return torch.cat([past.documents, own], 1)
